//! Where numbers of 16 bits must have the bits that they have in memory.
//!
//! A nest computes in f32 registers, and a value of 16 bits is rounded where it is stored. Between two stores
//! a sum or a product may keep more bits: its readers are off by less than a rounding. But an operation that
//! decides by an element, as a comparison does, must see what other kernels see of it: an element that is
//! computed again and compared with the largest one, which was stored, is equal to it only if both are
//! rounded.

use kiln_graph::op::{BinaryOp, Op, UnaryOp};
use kiln_graph::{DType, Graph, Value};

use super::nest::Nest;

/// Whether a register of the operand `value` of `op` must be rounded before `op` reads it in `nest`: `op`
/// decides by it, or leaves its type, and it may have more bits.
pub fn reads_rounded(graph: &Graph, nest: &Nest, op: &Op, value: Value) -> bool {
    let dtype = graph.dtype(value);
    matches!(dtype, DType::F16 | DType::BF16) && decides(op, dtype) && !is_rounded(graph, nest, value)
}

/// Whether more bits of an operand of `dtype` than its own may change what `op` makes of it altogether.
fn decides(op: &Op, dtype: DType) -> bool {
    match op {
        Op::Compare(_) | Op::Binary(BinaryOp::Rem) => true,
        Op::Unary(op) => {
            use UnaryOp::{Ceil, Floor, IsInf, IsNan, Round, Sign, Trunc};
            matches!(op, Sign | Floor | Ceil | Round | Trunc | IsNan | IsInf)
        }
        Op::Cast(to) => *to != dtype,
        _ => false,
    }
}

/// Whether a register of `value`, which is of 16 bits, has no more in `nest`.
fn is_rounded(graph: &Graph, nest: &Nest, value: Value) -> bool {
    if !nest.uses_of(value).is_empty() {
        return true;
    }
    let data = graph.def(value);
    let all = |places: std::ops::Range<usize>| {
        data.inputs[places]
            .iter()
            .all(|&operand| is_rounded(graph, nest, operand))
    };
    match &data.op {
        Op::Constant { .. } | Op::Scalar { .. } | Op::Iota { .. } | Op::Random { .. } | Op::Cast(_) => true,
        Op::Unary(UnaryOp::Neg | UnaryOp::Abs) => all(0..1),
        Op::Binary(BinaryOp::Max | BinaryOp::Min) => all(0..2),
        Op::Select => all(1..3),
        Op::Gather { .. } | Op::IndexSelect { .. } => all(0..1),
        op if op.is_movement() => all(0..data.inputs.len()),
        // Nothing computes a product twice: only what follows it in its own kernel sees more of its bits.
        op => !op.is_pointwise() && !matches!(op, Op::Reduce { .. }),
    }
}
