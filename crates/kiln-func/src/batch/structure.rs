//! Operations whose dimensions all move up by one.

use kiln_graph::op::{Dims, Op, SignedDims};
use kiln_graph::{DType, TensorType, Value};

use super::{Batch, Lane};
use crate::error::Result;

fn up(axis: usize) -> usize {
    axis + 1
}

fn all_up(axes: &[usize]) -> Dims {
    axes.iter().map(|&axis| axis + 1).collect()
}

/// `dims` with an entry for the batch before them.
fn with_first(first: usize, dims: &[usize]) -> Dims {
    [first].into_iter().chain(dims.iter().copied()).collect()
}

impl Batch {
    /// The operation on operands with a batch before their dimensions.
    pub(super) fn shifted(&self, op: &Op) -> Op {
        let size = self.size;
        match op.clone() {
            Op::Reduce { op, axes } => Op::Reduce {
                op,
                axes: all_up(&axes),
            },
            Op::ArgReduce { op, axis, dtype } => Op::ArgReduce {
                op,
                axis: up(axis),
                dtype,
            },
            Op::Cumulative { op, axis } => Op::Cumulative { op, axis: up(axis) },
            Op::Sort {
                axis,
                descending,
                dtype,
            } => Op::Sort {
                axis: up(axis),
                descending,
                dtype,
            },
            Op::TopK { axis, k, dtype } => Op::TopK {
                axis: up(axis),
                k,
                dtype,
            },
            Op::Reshape(shape) => Op::Reshape(self.wide(&shape)),
            Op::Transpose(perm) => Op::Transpose(with_first(0, &all_up(&perm))),
            Op::Broadcast { shape, dims } => Op::Broadcast {
                shape: self.wide(&shape),
                dims: with_first(0, &all_up(&dims)),
            },
            Op::Slice {
                starts,
                limits,
                steps,
            } => Op::Slice {
                starts: with_first(0, &starts),
                limits: with_first(size, &limits),
                steps: with_first(1, &steps),
            },
            Op::Concat { axis } => Op::Concat { axis: up(axis) },
            Op::Flip(axes) => Op::Flip(all_up(&axes)),
            Op::UpdateSlice { starts, steps } => Op::UpdateSlice {
                starts: with_first(0, &starts),
                steps: with_first(1, &steps),
            },
            Op::Gather { axis } => Op::Gather { axis: up(axis) },
            Op::Scatter { axis, mode } => Op::Scatter { axis: up(axis), mode },
            other => unreachable!("{} has a rule of its own", other.name()),
        }
    }

    /// A value that differs between elements is written around them afterwards.
    pub(super) fn pad(&mut self, low: &SignedDims, high: &SignedDims, x: &[Lane]) -> Result<Value> {
        let around = |amounts: &SignedDims| {
            [0].into_iter()
                .chain(amounts.iter().copied())
                .collect::<SignedDims>()
        };
        let (low, high) = (around(low), around(high));
        let inner = self.batched(x[0])?;
        if !x[1].batched {
            return self.b.op(Op::Pad { low, high }, &[inner, x[1].value]);
        }
        let ty = self.b.ty(inner);
        let zero = self.b.constant(0.0, ty.dtype)?;
        let inside = self.b.full(
            true,
            &TensorType {
                dtype: DType::Bool,
                shape: ty.shape,
            },
        )?;
        let outside = self.b.constant(false, DType::Bool)?;
        let inside = self.b.op(
            Op::Pad {
                low: low.clone(),
                high: high.clone(),
            },
            &[inside, outside],
        )?;
        let padded = self.b.op(Op::Pad { low, high }, &[inner, zero])?;
        let shape = self.b.shape(padded);
        let value = self.b.broadcast(x[1].value, &shape, &[0])?;
        self.b.select(inside, padded, value)
    }
}
