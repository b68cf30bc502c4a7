//! The partitioned graph: the joint graph with the chosen nodes duplicated into its backward pass.
//!
//! The joint graph is walked in order and rebuilt. Forward nodes are copied. When a fixed node (backward or
//! optimizer) reads a value that is not kept, the nodes that compute it are emitted once more, right there,
//! each at most once. So a block of the forward pass that is recomputed as a whole is recomputed when the
//! backward pass arrives at it, and its values live until the backward pass has left it. A primal node runs
//! in the forward pass if its result is kept; otherwise where it was recorded or, if that was before the
//! end of the forward pass, where it is needed.
//!
//! A duplicate has the operation, the operands and the provenance of its original, but its phase is
//! backward. Later passes must not merge nodes of different phases, because a duplicate equals its original
//! on purpose.

use cranelift_entity::packed_option::PackedOption;
use cranelift_entity::{EntitySet, SecondaryMap};
use kiln_graph::op::Op;
use kiln_graph::{Graph, Node, Output, Phase, Provenance, Value};

use crate::error::PartitionError;
use crate::joint::{Closure, Joint, Side};

/// A joint graph that recomputes.
#[derive(Debug)]
pub(crate) struct Rewritten {
    pub(crate) graph: Graph,
    /// For each old node that runs again, the new node that does.
    pub(crate) duplicates: Vec<(Node, Node)>,
    /// The kept values: in the joint graph and in the new one.
    pub(crate) kept: Vec<(Value, Value)>,
    /// New nodes that the forward pass need not run.
    pub(crate) backward: EntitySet<Node>,
    /// Primal nodes that were put into the forward pass.
    pub(crate) hoisted: EntitySet<Node>,
}

struct Emitter<'a> {
    joint: &'a Joint<'a>,
    closure: &'a Closure,
    new: Graph,
    /// The new values of an old value: its only or forward definition, and its recomputed one.
    original: SecondaryMap<Value, PackedOption<Value>>,
    again: SecondaryMap<Value, PackedOption<Value>>,
    duplicates: Vec<(Node, Node)>,
    backward: EntitySet<Node>,
    hoisted: EntitySet<Node>,
}

/// Rebuilds the joint graph so that exactly `closure` crosses.
pub(crate) fn rewrite(joint: &Joint, closure: &Closure) -> Result<Rewritten, PartitionError> {
    let graph = joint.graph;
    let mut emitter = Emitter {
        joint,
        closure,
        new: Graph::new(graph.name.clone()),
        original: SecondaryMap::with_capacity(graph.num_values()),
        again: SecondaryMap::with_capacity(graph.num_values()),
        duplicates: Vec::new(),
        backward: EntitySet::new(),
        hoisted: EntitySet::new(),
    };
    let hoist = primal_of_forward(joint, closure);
    for &value in graph.parameters().iter().chain(graph.scalars()) {
        emitter.copy(joint.node_of(value), false)?;
    }
    // Primal nodes since the last forward node: they run in the backward pass, where they were recorded.
    let mut pending: Vec<Value> = Vec::new();
    for (node, data) in graph.nodes() {
        match joint.side[node] {
            Side::Resident => {
                if matches!(data.op, Op::Constant { .. }) {
                    emitter.copy(node, false)?;
                }
            }
            Side::Forward => {
                pending.clear();
                emitter.copy(node, false)?;
            }
            Side::Primal => {
                if hoist.contains(node) {
                    emitter.copy(node, false)?;
                }
                if closure.recomputed.contains(node) {
                    pending.push(data.outputs[0]);
                }
            }
            Side::Fixed => {
                for value in pending.drain(..) {
                    emitter.make_again(value)?;
                }
                for &value in &data.inputs {
                    emitter.make_again(value)?;
                }
                emitter.copy(node, true)?;
            }
        }
    }
    let mut outputs = Vec::with_capacity(graph.outputs.len());
    for output in &graph.outputs {
        let primal = joint.side_of(output.value) == Side::Primal;
        if primal {
            emitter.make_again(output.value)?;
        }
        let value = emitter.get(output.value, primal);
        outputs.push(Output {
            value,
            alias: output.alias,
            check: output.check,
        });
    }
    emitter.new.outputs = outputs;
    let kept = closure
        .kept
        .iter()
        .map(|value| (value, emitter.get(value, false)))
        .collect();
    Ok(Rewritten {
        graph: emitter.new,
        duplicates: emitter.duplicates,
        kept,
        backward: emitter.backward,
        hoisted: emitter.hoisted,
    })
}

/// The primal nodes that run in the forward pass, because they compute kept values.
fn primal_of_forward(joint: &Joint, closure: &Closure) -> EntitySet<Node> {
    let mut hoist = EntitySet::new();
    for (node, data) in joint.graph.nodes().rev() {
        let kept = data.outputs.iter().any(|&value| closure.kept.contains(value));
        if joint.side[node] == Side::Primal && (kept || hoist.contains(node)) {
            hoist.insert(node);
            for &value in &data.inputs {
                if joint.side_of(value) == Side::Primal {
                    hoist.insert(joint.node_of(value));
                }
            }
        }
    }
    hoist
}

impl Emitter<'_> {
    /// The new value of `value` in the forward or in the backward pass.
    fn get(&self, value: Value, backward: bool) -> Value {
        let again = if backward && !self.closure.kept.contains(value) {
            self.again[value].expand()
        } else {
            None
        };
        let found = again.or(self.original[value].expand());
        found.expect("operands are emitted before their users")
    }

    /// Emits the original of `node`: with recomputed operands if it runs in the backward pass.
    fn copy(&mut self, node: Node, backward: bool) -> Result<(), PartitionError> {
        let mut provenance = self.joint.graph.node(node).provenance.clone();
        provenance.phase = self.joint.phase[node];
        if self.joint.side[node] == Side::Primal {
            provenance.phase = Phase::Forward;
        }
        let (new, results) = self.emit(node, backward, provenance)?;
        if backward {
            self.backward.insert(new);
        } else if self.joint.side[node] == Side::Primal {
            self.hoisted.insert(new);
        }
        for (old, new) in results {
            self.original[old] = new.into();
        }
        Ok(())
    }

    fn emit(
        &mut self,
        node: Node,
        backward: bool,
        provenance: Provenance,
    ) -> Result<(Node, Vec<(Value, Value)>), PartitionError> {
        let data = self.joint.graph.node(node);
        let inputs: Vec<Value> = data
            .inputs
            .iter()
            .map(|&value| self.get(value, backward))
            .collect();
        let results = self.new.add_node(data.op.clone(), &inputs, provenance)?;
        let new = self.new.nodes().next_back().expect("a node was just added").0;
        Ok((new, data.outputs.iter().copied().zip(results).collect()))
    }

    /// Makes `value` available in the backward pass, so that [`Emitter::get`] finds it there.
    fn make_again(&mut self, value: Value) -> Result<(), PartitionError> {
        if self.closure.kept.contains(value) {
            return Ok(());
        }
        let mut stack = vec![self.joint.node_of(value)];
        while let Some(&node) = stack.last() {
            let data = self.joint.graph.node(node);
            let done = data.outputs.iter().all(|&value| self.again[value].is_some());
            // A node may have a kept result, which is not recomputed, beside others that have to be.
            if done || !self.closure.recomputed.contains(node) {
                stack.pop();
                continue;
            }
            let missing = data.inputs.iter().copied().find(|&value| {
                let operand = self.joint.node_of(value);
                self.closure.recomputed.contains(operand)
                    && !self.closure.kept.contains(value)
                    && self.again[value].is_none()
            });
            if let Some(value) = missing {
                stack.push(self.joint.node_of(value));
                continue;
            }
            let mut provenance = data.provenance.clone();
            provenance.phase = Phase::Backward;
            let (new, results) = self.emit(node, true, provenance)?;
            self.backward.insert(new);
            if self.joint.side[node] == Side::Forward {
                self.duplicates.push((node, new));
            }
            for (old, new) in results {
                self.again[old] = new.into();
            }
            stack.pop();
        }
        Ok(())
    }
}
