//! Updates of a tensor's elements, written as one reduction over all updates that an element receives.
//!
//! A tensor of bools of extents `.., m, n, ..` says whether update `j` lands on element `i`; the updates
//! that land are combined along `m`, then with the element. This takes `n` times the memory of the updates.

use kiln_graph::op::{BinaryOp, CompareOp, Dims, ReduceOp, ScatterMode, SignedDims};
use kiln_graph::{DType, Graph, Op, Shape, TensorType};

use super::small;
use crate::error::Result;

pub(super) fn scatter(types: &[TensorType], axis: usize, mode: ScatterMode) -> Result<Graph> {
    let (combine, reduction, neutral) = match mode {
        ScatterMode::Add => (BinaryOp::Add, ReduceOp::Sum, 0.0),
        ScatterMode::Mul => (BinaryOp::Mul, ReduceOp::Prod, 1.0),
        ScatterMode::Max => (BinaryOp::Max, ReduceOp::Max, f64::NEG_INFINITY),
        ScatterMode::Min => (BinaryOp::Min, ReduceOp::Min, f64::INFINITY),
        ScatterMode::Assign => unreachable!("an assignment is linear"),
    };
    small("scatter", types, |b, operands| {
        let (x, indices) = (&types[0], &types[1].shape);
        let extent = x.shape[axis];
        let wide: Shape = indices[..=axis]
            .iter()
            .copied()
            .chain([extent])
            .chain(indices[axis + 1..].iter().copied())
            .collect();
        let dims: Dims = (0..wide.rank()).filter(|&dim| dim != axis + 1).collect();
        let target = b.cast(operands[1], DType::I64)?;
        let target = b.broadcast(target, &wide, &dims)?;
        let place = b.iota(DType::I64, &wide, axis + 1)?;
        let lands = b.compare(CompareOp::Eq, target, place)?;
        let updates = b.broadcast(operands[2], &wide, &dims)?;
        let nothing = b.full_like(neutral, updates)?;
        let updates = b.select(lands, updates, nothing)?;
        let received = b.reduce(reduction, updates, &[axis])?;
        let missing = |dim: usize| {
            if dim == axis {
                0
            } else {
                (x.shape[dim] - indices[dim]) as i64
            }
        };
        let high: SignedDims = (0..x.shape.rank()).map(missing).collect();
        let low = SignedDims::from_elem(0, x.shape.rank());
        let neutral = b.constant(neutral, x.dtype)?;
        let received = b.pad(received, neutral, low, high)?;
        Ok(vec![b.binary(combine, operands[0], received)?])
    })
}

/// Whole slices: the same index for each element of a slice.
pub(super) fn index_put(types: &[TensorType], axis: usize, mode: ScatterMode) -> Result<Graph> {
    small("index_put", types, |b, operands| {
        let indices = b.broadcast(operands[1], &types[2].shape, &[axis])?;
        let op = Op::Scatter { axis, mode };
        Ok(vec![b.op(op, &[operands[0], indices, operands[2]])?])
    })
}
