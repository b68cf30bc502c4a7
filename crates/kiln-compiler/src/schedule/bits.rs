//! Where numbers of 16 bits must have the bits that they have in memory.
//!
//! A nest computes in f32 registers, and a value of 16 bits is rounded where it is stored. Between two stores
//! a sum or a product may keep more bits: its readers are off by less than a rounding. But an operation that
//! decides by an element, as a comparison does, must see what other kernels see of it: an element that is
//! computed again and compared with the largest one, which was stored, is equal to it only if both are
//! rounded.

use std::ops::Range;

use kiln_graph::op::{BinaryOp, Op, UnaryOp};
use kiln_graph::{DType, Graph, Value};
use rustc_hash::FxHashSet;

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

/// The operands, of so many, among whose elements those of the result are, but for their signs: `op` moves
/// them, or is one of them. None if it computes others.
pub(super) fn passed(op: &Op, operands: usize) -> Option<Range<usize>> {
    match op {
        Op::Unary(UnaryOp::Neg | UnaryOp::Abs) => Some(0..1),
        Op::Binary(BinaryOp::Max | BinaryOp::Min) => Some(0..2),
        Op::Select => Some(1..3),
        Op::Gather { .. } | Op::IndexSelect { .. } => Some(0..1),
        op if op.is_movement() => Some(0..operands),
        _ => None,
    }
}

/// Whether a register of `value`, which is of 16 bits, has no more in `nest`: whatever it is one of, or
/// moves, has no more. Each value is looked at once: in a sorting network the ways to one are too many to go
/// them all.
fn is_rounded(graph: &Graph, nest: &Nest, value: Value) -> bool {
    let mut seen = FxHashSet::default();
    let mut next = vec![value];
    while let Some(value) = next.pop() {
        if !seen.insert(value) || !nest.uses_of(value).is_empty() {
            continue;
        }
        let data = graph.def(value);
        let among = match &data.op {
            Op::Constant { .. } | Op::Scalar { .. } | Op::Iota { .. } | Op::Random { .. } | Op::Cast(_) => {
                0..0
            }
            op => match passed(op, data.inputs.len()) {
                Some(among) => among,
                // Nothing computes a product twice: only what follows it in its own kernel sees more of its
                // bits.
                None if !op.is_pointwise() && !matches!(op, Op::Reduce { .. }) => 0..0,
                None => return false,
            },
        };
        next.extend_from_slice(&data.inputs[among]);
    }
    true
}

#[cfg(test)]
mod tests {
    use kiln_graph::{Provenance, TensorType};

    use super::*;

    #[test]
    fn a_sorting_network_is_looked_at_once() {
        let mut graph = Graph::new("network");
        let p = Provenance::default();
        let x = [0, 1].map(|_| graph.parameter(TensorType::new(DType::BF16, [8])));
        let sum = graph.binary(BinaryOp::Add, x[0], x[1], &p).expect("well typed");
        // Two elements that are exchanged again and again: 2^200 ways to the first of them.
        let mut network = |mut a: Value, mut b: Value| {
            for _ in 0..200 {
                (a, b) = (
                    graph.binary(BinaryOp::Max, a, b, &p).expect("well typed"),
                    graph.binary(BinaryOp::Min, a, b, &p).expect("well typed"),
                );
            }
            a
        };
        let (loaded, computed) = (network(x[0], x[1]), network(x[0], sum));
        let mut nest = Nest::default();
        x.iter().for_each(|&value| nest.add_use(value, Vec::new()));
        let decides = Op::Unary(UnaryOp::Sign);
        assert!(!reads_rounded(&graph, &nest, &decides, loaded));
        assert!(reads_rounded(&graph, &nest, &decides, computed));
    }
}
