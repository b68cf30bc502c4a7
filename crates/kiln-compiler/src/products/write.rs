//! Writes the graph whose products are joined.

use kiln_graph::op::{BinaryOp, Op};
use kiln_graph::{Graph, Node, Provenance, Rewriter, Shape, TypeError, Value};
use rustc_hash::FxHashMap;

use super::{Biased, Cut, Group};

/// Writes the graph anew. A product that stands for several is made where the first of them was, with what
/// the others need before it.
pub(super) struct Writer<'a> {
    graph: &'a Graph,
    groups: &'a [Group],
    /// The group that each product belongs to, and each sum that is replaced.
    of: FxHashMap<Node, usize>,
    /// Whether a group waits for its operands.
    waits: Vec<bool>,
    rewriter: Rewriter<'a>,
}

impl<'a> Writer<'a> {
    pub fn new(graph: &'a Graph, groups: &'a [Group]) -> Self {
        let mut of = FxHashMap::default();
        for (number, group) in groups.iter().enumerate() {
            let nodes = match group {
                Group::Sum { root, .. } => std::slice::from_ref(root),
                Group::Shared { products, .. } => products,
            };
            of.extend(nodes.iter().map(|&node| (node, number)));
        }
        Self {
            graph,
            groups,
            of,
            waits: vec![false; groups.len()],
            rewriter: Rewriter::new(graph),
        }
    }

    /// The new graph, or the number of a group that needs its own result.
    pub fn write(mut self) -> Result<Result<Graph, usize>, TypeError> {
        for (node, data) in self.graph.nodes() {
            // Arguments keep their numbers.
            if matches!(data.op, Op::Parameter { .. } | Op::Scalar { .. }) {
                self.rewriter.copy(node)?;
            }
        }
        for (node, _) in self.graph.nodes() {
            if let Some(group) = self.make(node)? {
                return Ok(Err(group));
            }
        }
        Ok(Ok(self.rewriter.finish().without_dead_code()))
    }

    fn is_made(&self, node: Node) -> bool {
        let outputs = &self.graph.node(node).outputs;
        !outputs.is_empty() && outputs.iter().all(|&value| self.rewriter.get(value).is_some())
    }

    /// The values from which `node`, or the group that it belongs to, is made.
    fn needs(&self, node: Node, group: Option<&Group>) -> Vec<Value> {
        let inputs = |node: &Node| self.graph.node(*node).inputs.iter().copied();
        match group {
            Some(Group::Sum { products, rest, .. }) => products
                .iter()
                .flat_map(inputs)
                .chain(rest.iter().copied())
                .collect(),
            Some(Group::Shared { products, biased, .. }) => {
                let biases = biased.iter().map(|biased| biased.bias);
                products.iter().flat_map(inputs).chain(biases).collect()
            }
            None => inputs(&node).collect(),
        }
    }

    /// Makes the results of `node` in the new graph, and what they need; returns a group that needs its own.
    fn make(&mut self, node: Node) -> Result<Option<usize>, TypeError> {
        let groups = self.groups;
        // Nodes to make, the next one last.
        let mut left = vec![node];
        while let Some(&node) = left.last() {
            if self.is_made(node) {
                left.pop();
                continue;
            }
            let number = self.of.get(&node).copied();
            let group = number.map(|number| &groups[number]);
            let needs = self.needs(node, group).into_iter();
            let missing = needs.filter(|&value| self.rewriter.get(value).is_none());
            let before = left.len();
            left.extend(missing.map(|value| self.graph.value(value).node));
            if left.len() > before {
                match number.filter(|&number| std::mem::replace(&mut self.waits[number], true)) {
                    Some(number) => return Ok(Some(number)),
                    None => continue,
                }
            }
            left.pop();
            match group {
                Some(group) => self.join(group)?,
                None => {
                    self.rewriter.copy(node)?;
                }
            }
        }
        Ok(None)
    }

    fn join(&mut self, group: &Group) -> Result<(), TypeError> {
        match group {
            Group::Sum {
                root,
                products,
                axes,
                between,
                rest,
            } => self.sum(*root, products, *axes, between, rest),
            Group::Shared {
                products,
                cut,
                axis,
                biased,
            } => self.shared(products, *cut, *axis, biased),
        }
    }

    /// Operand `side` of several products, as one.
    fn whole(
        &mut self,
        products: &[Node],
        side: usize,
        axis: usize,
        p: &Provenance,
    ) -> Result<Value, TypeError> {
        let operands = products.iter().map(|&node| self.graph.node(node).inputs[side]);
        let operands: Vec<Value> = operands.map(|value| self.rewriter.map(value)).collect();
        self.rewriter.graph.add(Op::Concat { axis }, &operands, p)
    }

    fn sum(
        &mut self,
        root: Node,
        products: &[Node],
        axes: [usize; 2],
        between: &[Node],
        rest: &[Value],
    ) -> Result<(), TypeError> {
        let graph = self.graph;
        let data = graph.node(products[0]);
        let p = &data.provenance;
        let left = self.whole(products, 0, axes[0], p)?;
        let right = self.whole(products, 1, axes[1], p)?;
        let mut sum = self.rewriter.graph.add(data.op.clone(), &[left, right], p)?;
        for &node in between {
            let data = graph.node(node);
            let new = &mut self.rewriter.graph;
            sum = new.add(data.op.clone(), &[sum], &data.provenance)?;
        }
        let p = &graph.node(root).provenance;
        for &value in rest {
            let value = self.rewriter.map(value);
            let add = Op::Binary(BinaryOp::Add);
            sum = self.rewriter.graph.add(add, &[value, sum], p)?;
        }
        self.rewriter.replace(graph.node(root).outputs[0], sum);
        Ok(())
    }

    fn shared(
        &mut self,
        products: &[Node],
        cut: Cut,
        axis: usize,
        biased: &[Biased],
    ) -> Result<(), TypeError> {
        let graph = self.graph;
        let data = graph.node(products[0]);
        let p = &data.provenance;
        let side = usize::from(cut == Cut::Columns);
        let mut operands = [self.rewriter.map(data.inputs[1 - side]); 2];
        operands[side] = self.whole(products, side, axis, p)?;
        let mut whole = self.rewriter.graph.add(data.op.clone(), &operands, p)?;
        // The rows of the result come first, its columns last.
        let shape = self.rewriter.graph.shape(whole).clone();
        let along = if side == 0 { 0 } else { shape.rank() - 1 };
        let results = products.iter().map(|&node| graph.node(node).outputs[0]);
        self.cut(results, whole, along)?;
        let Some(first) = biased.first() else {
            return Ok(());
        };
        for &node in &first.nodes {
            let data = graph.node(node);
            let p = &data.provenance;
            let operands = match data.op {
                Op::Binary(_) => vec![whole, self.biases(biased, &shape, p)?],
                _ => vec![whole],
            };
            whole = self.rewriter.graph.add(data.op.clone(), &operands, p)?;
        }
        self.cut(biased.iter().map(|biased| biased.result(graph)), whole, along)
    }

    /// The biases of products that become one, for each row.
    fn biases(&mut self, biased: &[Biased], shape: &Shape, p: &Provenance) -> Result<Value, TypeError> {
        let each: Vec<Value> = biased.iter().map(|it| self.rewriter.map(it.bias)).collect();
        let all = self.rewriter.graph.add(Op::Concat { axis: 0 }, &each, p)?;
        let broadcast = Op::Broadcast {
            shape: shape.clone(),
            dims: [shape.rank() - 1].into_iter().collect(),
        };
        self.rewriter.graph.add(broadcast, &[all], p)
    }

    /// Replaces values by their parts of `whole`, one after the other along an axis.
    fn cut(
        &mut self,
        values: impl Iterator<Item = Value>,
        whole: Value,
        along: usize,
    ) -> Result<(), TypeError> {
        let graph = self.graph;
        let mut start = 0;
        for value in values {
            let end = start + graph.shape(value)[along];
            let new = &mut self.rewriter.graph;
            let slice = Op::slice(new.shape(whole), along, start..end);
            let slice = new.add(slice, &[whole], &graph.def(value).provenance)?;
            self.rewriter.replace(value, slice);
            start = end;
        }
        Ok(())
    }
}
