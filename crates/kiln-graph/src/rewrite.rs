//! Rewriting: a transform builds a new graph instead of editing the old one.
//!
//! A [`Rewriter`] walks an old graph, fills a new one, and remembers which new value replaces each old one.
//! A pass calls [`Rewriter::copy`] for the nodes that it leaves alone, adds its own nodes to
//! [`Rewriter::graph`], and tells the rewriter with [`Rewriter::replace`] which new value replaces a
//! result. Old nodes come in topological order, so operands are always mapped before they are needed.
//!
//! ```
//! use kiln_graph::op::{BinaryOp, Op};
//! use kiln_graph::{Graph, Rewriter, TypeError};
//!
//! /// `x - x`, written as two operands of one value, becomes zero.
//! fn cancel(old: &Graph) -> Result<Graph, TypeError> {
//!     let mut new = Rewriter::new(old);
//!     for (id, node) in old.nodes() {
//!         if node.op == Op::Binary(BinaryOp::Sub) && node.inputs[0] == node.inputs[1] {
//!             let zero = new.graph.full(0.0, old.ty(node.outputs[0]), &node.provenance)?;
//!             new.replace(node.outputs[0], zero);
//!         } else {
//!             new.copy(id)?;
//!         }
//!     }
//!     Ok(new.finish())
//! }
//! ```

use cranelift_entity::SecondaryMap;
use cranelift_entity::packed_option::PackedOption;
use smallvec::SmallVec;

use crate::{Graph, Node, Op, TypeError, Value};

/// Copies a graph node by node, with replacements.
#[derive(Debug)]
pub struct Rewriter<'a> {
    old: &'a Graph,
    /// The new graph, to which a pass adds nodes.
    pub graph: Graph,
    map: SecondaryMap<Value, PackedOption<Value>>,
}

impl<'a> Rewriter<'a> {
    /// Starts a new graph of the same name.
    pub fn new(old: &'a Graph) -> Self {
        Self {
            old,
            graph: Graph::new(old.name.clone()),
            map: SecondaryMap::new(),
        }
    }

    /// The graph being rewritten.
    pub fn old(&self) -> &'a Graph {
        self.old
    }

    /// The new value that replaces `old`; none if the node of `old` was neither copied nor replaced.
    pub fn get(&self, old: Value) -> Option<Value> {
        self.map[old].expand()
    }

    /// The new value that replaces `old`.
    ///
    /// # Panics
    ///
    /// If its node was neither copied nor replaced: the pass has a bug.
    pub fn map(&self, old: Value) -> Value {
        self.get(old)
            .unwrap_or_else(|| panic!("{old} was neither copied nor replaced"))
    }

    /// [`Rewriter::map`] for each of a list, most often a node's operands.
    pub fn map_all(&self, old: &[Value]) -> SmallVec<[Value; 3]> {
        old.iter().map(|&value| self.map(value)).collect()
    }

    /// Copies a node of the old graph; the copy's results replace the node's.
    ///
    /// # Errors
    ///
    /// If a replacement has another type than what it replaces, so that the operands no longer fit.
    pub fn copy(&mut self, node: Node) -> Result<SmallVec<[Value; 1]>, TypeError> {
        let data = self.old.node(node);
        self.copy_as(node, data.op.clone())
    }

    /// [`Rewriter::copy`] with another operation on the same operands. Parameters and scalars are renumbered
    /// in the order in which they are copied.
    pub fn copy_as(&mut self, node: Node, op: Op) -> Result<SmallVec<[Value; 1]>, TypeError> {
        let data = self.old.node(node);
        let inputs = self.map_all(&data.inputs);
        let op = match op {
            Op::Parameter { ty, copy_of, .. } => Op::Parameter {
                index: self.graph.parameters().len() as u32,
                ty,
                copy_of: copy_of.and_then(|of| self.new_index(of)),
            },
            Op::Scalar { dtype, .. } => Op::Scalar {
                index: self.graph.scalars().len() as u32,
                dtype,
            },
            other => other,
        };
        let outputs = self.graph.add_node(op, &inputs, data.provenance.clone())?;
        for (&old, &new) in data.outputs.iter().zip(&outputs) {
            self.map[old] = new.into();
        }
        Ok(outputs)
    }

    /// The number in the new graph of argument `index` of the old one; none if something else replaces it.
    fn new_index(&self, index: u32) -> Option<u32> {
        let new = self.get(self.old.parameters()[index as usize])?;
        match self.graph.def(new).op {
            Op::Parameter { index, .. } => Some(index),
            _ => None,
        }
    }

    /// Makes `new`, a value of the new graph, the replacement of `old`.
    pub fn replace(&mut self, old: Value, new: Value) {
        self.map[old] = new.into();
    }

    /// The new graph, with the old outputs and aliases mapped. If the rewrite found an output to be an
    /// argument, that argument keeps its buffer.
    ///
    /// # Panics
    ///
    /// If an output's node was neither copied nor replaced, or aliased parameters were not all copied in
    /// order: the pass has a bug.
    pub fn finish(mut self) -> Graph {
        self.graph.outputs = self
            .old
            .outputs
            .iter()
            .map(|output| {
                let alias = output.alias.map(|index| {
                    let parameter = self.map(self.old.parameters()[index as usize]);
                    let position = self
                        .graph
                        .parameters()
                        .iter()
                        .position(|&value| value == parameter);
                    position.expect("an aliased parameter stays a parameter") as u32
                });
                crate::Output {
                    value: self.map(output.value),
                    alias,
                    check: output.check,
                }
            })
            .collect();
        crate::alias::settle_aliases(&mut self.graph);
        self.graph
    }
}

impl Graph {
    /// The nodes that an output needs, and all arguments: `true` for each node that stays in
    /// [`Graph::without_dead_code`].
    pub fn live_nodes(&self) -> SecondaryMap<Node, bool> {
        let mut live: SecondaryMap<Node, bool> = SecondaryMap::with_capacity(self.num_nodes());
        for output in &self.outputs {
            live[self.value(output.value).node] = true;
        }
        for (id, node) in self.nodes().rev() {
            if matches!(node.op, Op::Parameter { .. } | Op::Scalar { .. }) {
                live[id] = true;
            }
            if live[id] {
                for &input in &node.inputs {
                    live[self.value(input).node] = true;
                }
            }
        }
        live
    }

    /// This graph without the nodes that no output needs, values renumbered. All arguments stay, because
    /// callers pass them by position.
    pub fn without_dead_code(&self) -> Graph {
        let live = self.live_nodes();
        let mut new = Rewriter::new(self);
        for (id, _) in self.nodes() {
            if live[id] {
                new.copy(id).expect("a copy on the same operands is well typed");
            }
        }
        new.finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::op::{BinaryOp, UnaryOp};

    const TEXT: &str = "graph @g {
  %0 = parameter 0 : f32[4]
  %1 = parameter 1 : f32[4]
  %2 = exp %1 : f32[4]
  %3, %4 = sort %0 {axis=0} : f32[4], i64[4]
  %5 = add %3, %3 : f32[4]
  return %5 (alias 1), %4, %5
}
";

    #[test]
    fn users_count_operands_and_outputs() {
        let graph = Graph::parse(TEXT).expect("well formed");
        let users = graph.users();
        let value = Value::from_u32;
        assert_eq!(users.of(value(3)).len(), 2);
        assert_eq!(users.count(value(5)), 2);
        assert_eq!(users.single(value(3)), None);
        assert_eq!(users.single(value(1)).map(|node| node.as_u32()), Some(2));
        assert_eq!(users.single(value(4)), None);
        assert_eq!(users.count(value(2)), 0);
    }

    #[test]
    fn dead_code_goes_and_arguments_stay() {
        let graph = Graph::parse(TEXT).expect("well formed").without_dead_code();
        assert_eq!(graph.num_nodes(), 4);
        assert_eq!(graph.parameters().len(), 2);
        assert_eq!(crate::verify(&graph), Ok(()));
        assert_eq!(graph, graph.without_dead_code());
    }

    #[test]
    fn replacements_reach_operands_and_outputs() {
        let old = Graph::parse(TEXT).expect("well formed");
        let mut new = Rewriter::new(&old);
        for (id, node) in old.nodes() {
            if node.op == Op::Binary(BinaryOp::Add) {
                let x = new.map(node.inputs[0]);
                let y = new
                    .graph
                    .unary(UnaryOp::Neg, x, &node.provenance)
                    .expect("well typed");
                new.replace(node.outputs[0], y);
            } else {
                new.copy(id).expect("well typed");
            }
        }
        let new = new.finish();
        assert_eq!(crate::verify(&new), Ok(()));
        assert_eq!(new.def(new.outputs[0].value).op, Op::Unary(UnaryOp::Neg));
        assert_eq!(new.outputs[2].value, new.outputs[0].value);
        assert_eq!(new.outputs[0].alias, Some(1));
    }

    #[test]
    fn the_fingerprint_sees_computation_only() {
        let graph = Graph::parse(TEXT).expect("well formed");
        let mut renamed = graph.clone();
        renamed.name = "other".into();
        renamed.provenance_mut(Node::from_u32(2)).operation = Some("Exp".into());
        assert_eq!(graph.fingerprint(), renamed.fingerprint());
        let changed = Graph::parse(&TEXT.replace("exp", "log")).expect("well formed");
        assert_ne!(graph.fingerprint(), changed.fingerprint());
        let unaliased = Graph::parse(&TEXT.replace(" (alias 1)", "")).expect("well formed");
        assert_ne!(graph.fingerprint(), unaliased.fingerprint());
    }
}
