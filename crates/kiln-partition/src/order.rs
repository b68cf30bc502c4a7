//! The order of the partitioned graph's nodes.
//!
//! Nodes keep the order of the recording, but for *early* ones, which run as soon as they can: primal nodes whose result
//! is kept belong right behind their operands in the forward pass, so that what they read dies there; and, where memory
//! matters, optimizer updates run as soon as their gradient is there, so that no two layers' gradients are alive together. An update that
//! takes over an argument's buffer still waits for those who read that argument before it in the recording: the
//! backward pass needs the old weights.
//!
//! An early node is never later than in the recording, because everything it waits for is before it there; so any
//! choice of early nodes gives a topological order.

use cranelift_entity::{EntityRef, EntitySet, SecondaryMap};
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

fn order(graph: &Graph, early: &EntitySet<Node>) -> Vec<Node> {
    let users = graph.users();
    // Readers of an argument, and the early node that takes its buffer.
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
        for &reader in users.of(value).iter().filter(|&&reader| reader < taker) {
            releases[reader].push(taker);
            waiting[taker] += 1;
        }
    }
    for (node, data) in graph.nodes() {
        if early.contains(node) {
            waiting[node] += data.inputs.len();
        }
    }

    let mut order = Vec::with_capacity(graph.num_nodes());
    let mut ready: Vec<Node> = Vec::new();
    for (node, data) in graph.nodes() {
        if !early.contains(node) || data.inputs.is_empty() {
            ready.push(node);
        }
        while let Some(node) = ready.pop() {
            order.push(node);
            let first = ready.len();
            let used = graph.node(node).outputs.iter().flat_map(|&value| users.of(value));
            for &freed in used.chain(&releases[node]) {
                if early.contains(freed) {
                    waiting[freed] -= 1;
                    if waiting[freed] == 0 && !graph.node(freed).inputs.is_empty() {
                        ready.push(freed);
                    }
                }
            }
            // The last one pushed runs first: keep the order of the recording among those freed together.
            ready[first..].sort_by(|a, b| b.cmp(a));
        }
    }
    order
}
