//! The order of the partitioned graph's nodes.
//!
//! Nodes keep the order of the recording, except for *early* nodes, which run as soon as they can. There
//! are two kinds. Primal nodes whose result is kept run right after their operands in the forward pass, so
//! that the values that they read die there. And, where memory matters, optimizer updates run as soon as
//! their gradient is computed, so that the gradients of two layers are never alive together. An update that
//! takes over an argument's buffer still waits for the nodes that read that argument before it in the
//! recording: the backward pass needs the old weights.
//!
//! Values that an update reads besides its gradient, and that follow from arguments alone (a decayed
//! moment, a repeated learning rate), are computed right before it.
//!
//! No node is later than in the recording, where everything it waits for is before it; so any choice of early
//! nodes gives a topological order.

use cranelift_entity::{EntityRef, EntitySet, SecondaryMap};
use kiln_graph::op::Op;
use kiln_graph::{Graph, Node, Rewriter, Value};

/// A permutation of a graph's nodes, and what became of each.
#[derive(Debug)]
pub(crate) struct Reordered {
    pub(crate) graph: Graph,
    pub(crate) nodes: SecondaryMap<Node, Node>,
    pub(crate) values: SecondaryMap<Value, Value>,
}

/// `graph` with the nodes in `early` as early as they can be.
pub(crate) fn reorder(graph: &Graph, early: &EntitySet<Node>) -> Result<Reordered, kiln_graph::TypeError> {
    let order = order(graph, early);
    let mut rewriter = Rewriter::new(graph);
    let mut nodes = SecondaryMap::with_default(Node::new(0));
    let mut values = SecondaryMap::with_default(Value::new(0));
    for (new, &old) in order.iter().enumerate() {
        let results = rewriter.copy(old)?;
        nodes[old] = Node::new(new);
        for (&old, &new) in graph.node(old).outputs.iter().zip(&results) {
            values[old] = new;
        }
    }
    Ok(Reordered {
        graph: rewriter.finish(),
        nodes,
        values,
    })
}

/// The walk that makes the order.
struct Walk<'a> {
    graph: &'a Graph,
    /// Early nodes that follow from arguments alone, and arguments and constants: they are emitted when a
    /// node reads them.
    on_demand: SecondaryMap<Node, bool>,
    order: Vec<Node>,
    emitted: EntitySet<Node>,
}

impl Walk<'_> {
    /// Emits `node`, after operands that come on demand.
    fn emit(&mut self, node: Node) {
        let mut stack = vec![node];
        while let Some(&node) = stack.last() {
            let mut operands = self
                .graph
                .node(node)
                .inputs
                .iter()
                .map(|&value| self.graph.value(value).node);
            let missing =
                operands.find(|&operand| self.on_demand[operand] && !self.emitted.contains(operand));
            match missing {
                Some(operand) => stack.push(operand),
                None => {
                    stack.pop();
                    if self.emitted.insert(node) {
                        self.order.push(node);
                    }
                }
            }
        }
    }
}

fn order(graph: &Graph, early: &EntitySet<Node>) -> Vec<Node> {
    let users = graph.users();
    let mut on_demand: SecondaryMap<Node, bool> = SecondaryMap::new();
    for (node, data) in graph.nodes() {
        let argument = matches!(
            data.op,
            Op::Parameter { .. } | Op::Scalar { .. } | Op::Constant { .. }
        );
        let from_arguments = data
            .inputs
            .iter()
            .all(|&value| on_demand[graph.value(value).node]);
        on_demand[node] = argument || early.contains(node) && from_arguments;
    }
    // The early node that takes an argument's buffer waits for the argument's other readers.
    let mut takers: Vec<Option<Node>> = vec![None; graph.parameters().len()];
    for output in &graph.outputs {
        let node = graph.value(output.value).node;
        if let (Some(index), true) = (output.alias, early.contains(node)) {
            takers[index as usize] = Some(node);
        }
    }
    let mut releases: SecondaryMap<Node, Vec<Node>> = SecondaryMap::new();
    let mut waiting: SecondaryMap<Node, usize> = SecondaryMap::new();
    for (&value, taker) in graph.parameters().iter().zip(&takers) {
        let Some(taker) = *taker else { continue };
        for &reader in users
            .of(value)
            .iter()
            .filter(|&&reader| reader < taker && !on_demand[reader])
        {
            releases[reader].push(taker);
            waiting[taker] += 1;
        }
    }
    for (node, data) in graph.nodes() {
        if early.contains(node) {
            waiting[node] += data
                .inputs
                .iter()
                .filter(|&&value| !on_demand[graph.value(value).node])
                .count();
        }
    }

    let mut walk = Walk {
        graph,
        on_demand,
        order: Vec::with_capacity(graph.num_nodes()),
        emitted: EntitySet::with_capacity(graph.num_nodes()),
    };
    for &value in graph.parameters().iter().chain(graph.scalars()) {
        walk.emit(graph.value(value).node);
    }
    let mut ready: Vec<Node> = Vec::new();
    for (node, _) in graph.nodes() {
        ready.push(node);
        while let Some(node) = ready.pop() {
            if walk.emitted.contains(node) {
                continue;
            }
            walk.emit(node);
            if walk.on_demand[node] {
                continue;
            }
            let first = ready.len();
            let used = graph.node(node).outputs.iter().flat_map(|&value| users.of(value));
            for &freed in used.chain(&releases[node]) {
                if early.contains(freed) && waiting[freed] > 0 {
                    waiting[freed] -= 1;
                    if waiting[freed] == 0 {
                        ready.push(freed);
                    }
                }
            }
            // The last one pushed runs first: keep the order of the recording among those freed together.
            ready[first..].sort_by(|a, b| b.cmp(a));
        }
    }
    walk.order
}

#[cfg(test)]
mod tests {
    use super::*;

    const STEP: &str = "graph @step {
  %w = parameter 0 : f32[4]
  %v = parameter 1 : f32[4]
  %a = exp %w : f32[4]
  %b = neg %v : f32[4]
  %c = mul %b, %w : f32[4]
  %k = constant 2.0 : f32[]
  %ks = broadcast %k {dims=[]} : f32[4]
  %e = mul %a, %ks : f32[4]
  %u = sub %w, %e : f32[4]
  return %u (alias 0), %c
}";

    fn names(early: &[u32]) -> Vec<String> {
        let graph = Graph::parse(STEP).expect("well formed");
        let mut set = EntitySet::new();
        set.extend(early.iter().map(|&index| Node::from_u32(index)));
        let reordered = reorder(&graph, &set).expect("well typed");
        assert_eq!(kiln_graph::verify(&reordered.graph), Ok(()));
        let names = reordered
            .graph
            .nodes()
            .filter(|(_, data)| !data.inputs.is_empty());
        names.map(|(_, data)| data.op.name().to_owned()).collect()
    }

    #[test]
    fn nothing_early_is_the_recorded_order() {
        assert_eq!(names(&[]), ["exp", "neg", "mul", "broadcast", "mul", "sub"]);
    }

    #[test]
    fn an_early_node_follows_its_operands_and_brings_what_it_needs() {
        assert_eq!(names(&[6, 7]), ["exp", "broadcast", "mul", "neg", "mul", "sub"]);
    }

    #[test]
    fn an_update_in_place_waits_for_readers_of_the_old_value() {
        assert_eq!(
            names(&[6, 7, 8]),
            ["exp", "broadcast", "mul", "neg", "mul", "sub"]
        );
    }
}
