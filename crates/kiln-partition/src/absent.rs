//! The backward pass of a function for a loss that uses some of its outputs.
//!
//! The tangent of an output that a loss does not use is not one of zeros: times an infinite derivative a
//! zero is NaN, and the eager program multiplies nothing there. A value that follows from such tangents is
//! *absent*:
//!
//! - An operation that takes something absent and no gradient is absent as well, whatever it computes. Its
//!   other operands are values of the forward pass and constants (the zeros that a slice's gradient is put
//!   into, the weight of a decay), and the eager program never runs it. Operations over ranks are the
//!   exception: the other ranks wait for them. Zeros stand in for what they take. Which operations these
//!   are the caller says: a recorded graph has them as operations kept whole.
//! - An operation that joins something absent with gradients that are there (*mixed*) is, for a sum, its
//!   other operand, and absent for a product. Zeros stand in for what is absent where neither holds: in a
//!   concatenation, a choice, an operation that is not known to be linear.
//!
//! ```text
//!   absent ─► slice ─► * infinite derivative ─► absent ──┐
//!                                  another gradient ─────┴─► + ─► the other gradient
//! ```

use cranelift_entity::packed_option::PackedOption;
use cranelift_entity::{EntitySet, SecondaryMap};
use kiln_graph::op::{BinaryOp, Op, ScatterMode, UnaryOp};
use kiln_graph::{Graph, NodeData, Value};

use crate::error::PartitionError;

/// The backward graph of a [`Split`](crate::Split) for the tangents that are `given`, in the order of its
/// arguments, which begin with `saved` tensors of the forward pass. Of the tangents the result takes only
/// those; it has all outputs, with zeros where none of them leads.
///
/// An operation that `stays` runs whatever is absent, because others than this graph wait for it: ranks.
///
/// # Errors
///
/// If a node cannot be added, which is a defect of this crate.
pub fn without_tangents(
    backward: &Graph,
    saved: usize,
    given: &[bool],
    stays: impl Fn(&Op) -> bool,
) -> Result<Graph, PartitionError> {
    let mut new = Graph::new(backward.name.clone());
    let mut map: SecondaryMap<Value, PackedOption<Value>> = SecondaryMap::new();
    let gradients = following(backward, saved);
    for (index, &argument) in backward.parameters().iter().enumerate() {
        let tangent = index.checked_sub(saved).and_then(|tangent| given.get(tangent));
        if tangent.is_none_or(|&given| given) {
            map[argument] = new.parameter(backward.ty(argument).clone()).into();
        }
    }
    for &scalar in backward.scalars() {
        map[scalar] = new.scalar(backward.dtype(scalar)).into();
    }
    for (_, data) in backward.nodes() {
        if matches!(data.op, Op::Parameter { .. } | Op::Scalar { .. }) {
            continue;
        }
        let absent = |operand: usize| map[data.inputs[operand]].is_none();
        let operands = 0..data.inputs.len();
        let is_mixed = || {
            let gradient = |operand: usize| gradients.contains(data.inputs[operand]);
            operands
                .clone()
                .any(|operand| gradient(operand) && !absent(operand))
        };
        let follows = if !operands.clone().any(absent) || stays(&data.op) {
            Follows::Itself
        } else if is_mixed() {
            mixed(backward, data, absent)
        } else {
            Follows::Absent
        };
        let p = &data.provenance;
        match follows {
            Follows::Absent => {}
            Follows::Operand(operand) => map[data.outputs[0]] = map[data.inputs[operand]],
            Follows::Negated(operand) => {
                if let Some(value) = map[data.inputs[operand]].expand() {
                    map[data.outputs[0]] = new.unary(UnaryOp::Neg, value, p)?.into();
                }
            }
            Follows::Itself => {
                let mut inputs = Vec::with_capacity(data.inputs.len());
                for &input in &data.inputs {
                    inputs.push(match map[input].expand() {
                        Some(value) => value,
                        None => new.full(0.0, backward.ty(input), p)?,
                    });
                }
                let results = new.add_node(data.op.clone(), &inputs, p.clone())?;
                for (&old, result) in data.outputs.iter().zip(results) {
                    map[old] = result.into();
                }
            }
        }
    }
    for output in &backward.outputs {
        let value = match map[output.value].expand() {
            Some(value) => value,
            None => new.full(
                0.0,
                backward.ty(output.value),
                &backward.def(output.value).provenance,
            )?,
        };
        new.output(value, None);
    }
    Ok(new.without_dead_code())
}

/// The values that depend on a tangent, which are the arguments behind the first `saved`.
fn following(backward: &Graph, saved: usize) -> EntitySet<Value> {
    let tangents = backward.parameters().iter().skip(saved);
    let mut following: EntitySet<Value> = EntitySet::new();
    tangents.for_each(|&tangent| {
        following.insert(tangent);
    });
    for (_, data) in backward.nodes() {
        if data.inputs.iter().any(|&input| following.contains(input)) {
            data.outputs.iter().for_each(|&output| {
                following.insert(output);
            });
        }
    }
    following
}

/// What a node with an absent operand is.
enum Follows {
    Absent,
    /// This operand.
    Operand(usize),
    /// Minus this operand.
    Negated(usize),
    /// What it was, with zeros for what is absent.
    Itself,
}

/// What a node is that takes something absent beside a gradient that is there.
fn mixed(graph: &Graph, data: &NodeData, absent: impl Fn(usize) -> bool) -> Follows {
    let nothing = |operand: usize| absent(operand) || graph.is_zero(data.inputs[operand]);
    let is_absent = match &data.op {
        Op::Binary(BinaryOp::Add) if !absent(0) => return Follows::Operand(0),
        Op::Binary(BinaryOp::Add) => return Follows::Operand(1),
        Op::Binary(BinaryOp::Sub) if !absent(0) => return Follows::Operand(0),
        Op::Binary(BinaryOp::Sub) => return Follows::Negated(1),
        // Products.
        Op::Binary(BinaryOp::Mul)
        | Op::DotGeneral(_)
        | Op::Conv(_)
        | Op::ConvInputGrad { .. }
        | Op::ConvWeightGrad { .. } => true,
        // Linear in the first operand, whatever the second is.
        Op::Binary(BinaryOp::Div) | Op::Gather { .. } | Op::IndexSelect { .. } | Op::MaxPoolGrad { .. } => {
            absent(0)
        }
        // Both choices are nothing, or all that is put into nothing.
        Op::Select => nothing(1) && nothing(2),
        Op::Scatter { mode, .. } | Op::IndexPut { mode, .. } => {
            matches!(mode, ScatterMode::Add | ScatterMode::Assign) && nothing(0) && nothing(2)
        }
        Op::AttentionGrad(dims) => absent(dims.operands().forward + 1),
        _ => false,
    };
    if is_absent {
        Follows::Absent
    } else {
        Follows::Itself
    }
}
