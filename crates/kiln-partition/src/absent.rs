//! The backward pass of a function for a loss that uses some of its outputs.
//!
//! Gradients are linear in the tangents. The tangent of an output that a loss does not use is not one of
//! zeros: times an infinite derivative a zero is NaN, and the eager program multiplies nothing there. What
//! follows from such tangents alone is *absent*. A sum is then its other operand, and what is linear in
//! something absent is absent too. Zeros stand in for it only where an operation joins it with gradients that
//! are there (a concatenation, a choice), or is not known to be linear.

use cranelift_entity::SecondaryMap;
use cranelift_entity::packed_option::PackedOption;
use kiln_graph::op::{BinaryOp, Op, ReduceOp, ScatterMode, UnaryOp};
use kiln_graph::{Graph, NodeData, Value};

use crate::error::PartitionError;

/// The backward graph of a [`Split`](crate::Split) for the tangents that are `given`, in the order of its
/// arguments, which begin with `saved` tensors of the forward pass. Of the tangents the result takes only
/// those; it has all outputs, with zeros where none of them leads.
///
/// # Errors
///
/// If a node cannot be added, which is a defect of this crate.
pub fn without_tangents(backward: &Graph, saved: usize, given: &[bool]) -> Result<Graph, PartitionError> {
    let mut new = Graph::new(backward.name.clone());
    let mut map: SecondaryMap<Value, PackedOption<Value>> = SecondaryMap::new();
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
        let follows = match data.inputs.iter().any(|&input| map[input].is_none()) {
            true => follows(backward, data, |operand| map[data.inputs[operand]].is_none()),
            false => Follows::Itself,
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

fn follows(graph: &Graph, data: &NodeData, absent: impl Fn(usize) -> bool) -> Follows {
    let nothing = |operand: usize| absent(operand) || graph.is_zero(data.inputs[operand]);
    let is_absent = match &data.op {
        Op::Binary(BinaryOp::Add) if !absent(0) => return Follows::Operand(0),
        Op::Binary(BinaryOp::Add) if !absent(1) => return Follows::Operand(1),
        Op::Binary(BinaryOp::Sub) if !absent(0) => return Follows::Operand(0),
        Op::Binary(BinaryOp::Sub) if !absent(1) => return Follows::Negated(1),
        // One operand, of which nothing else is asked, or products, in which one absent factor is enough.
        Op::Unary(UnaryOp::Neg)
        | Op::Binary(BinaryOp::Add | BinaryOp::Sub | BinaryOp::Mul)
        | Op::Reduce {
            op: ReduceOp::Sum, ..
        }
        | Op::Cumulative {
            op: ReduceOp::Sum, ..
        }
        | Op::Reshape(_)
        | Op::Transpose(_)
        | Op::Broadcast { .. }
        | Op::Slice { .. }
        | Op::Flip(_)
        | Op::DotGeneral(_)
        | Op::Conv(_)
        | Op::ConvInputGrad { .. }
        | Op::ConvWeightGrad { .. }
        | Op::AvgPool { .. }
        | Op::AvgPoolGrad { .. } => true,
        Op::Cast(to) => to.is_float(),
        // Linear in the first operand, whatever the second is.
        Op::Binary(BinaryOp::Div) | Op::Gather { .. } | Op::IndexSelect { .. } | Op::MaxPoolGrad { .. } => {
            absent(0)
        }
        Op::Select => nothing(1) && nothing(2),
        Op::Pad { .. } | Op::UpdateSlice { .. } => nothing(0) && nothing(1),
        Op::Concat { .. } => (0..data.inputs.len()).all(nothing),
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
