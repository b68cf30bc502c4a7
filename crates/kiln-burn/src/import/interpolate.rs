//! Lowering of interpolation: nearest and bilinear through indices and weights of each dimension, their
//! gradients by adding back. Bicubic and Lanczos stay whole.
//!
//! Coordinates are computed in f64 as burn-flex computes them, so that every index is the same: a coordinate
//! that a rounding error moves across an integer would read another pixel.

use burn_ir::{InterpolateBackwardOpIr, InterpolateModeIr, InterpolateOpIr, OperationIr};
use kiln_graph::op::{BinaryOp, ScatterMode, UnaryOp};
use kiln_graph::{DType, Op, Shape, Value};

use super::external;
use super::lower::{Done, Fault, Lower, shape_of};

pub(super) fn forward(l: &mut Lower, operation: &OperationIr, d: &InterpolateOpIr) -> Done {
    let linear = match d.options.mode {
        InterpolateModeIr::Nearest => false,
        InterpolateModeIr::Bilinear => true,
        _ => return external::keep(l, operation),
    };
    let x = l.input(&d.x)?;
    let dtype = l.dtype(x);
    let mut out = if linear { l.widen(x)? } else { x };
    for (axis, &to) in [2, 3].iter().zip(&d.output_size) {
        let from = l.shape(out)[*axis];
        if linear {
            let taps = Taps::new(l, from, to, d.options.align_corners, l.dtype(out))?;
            out = taps.blend(l, out, *axis)?;
        } else {
            let indices = nearest(l, from, to)?;
            out = l.index_select(out, *axis, indices)?;
        }
    }
    let out = l.cast(out, dtype)?;
    l.define(&d.out, out)
}

pub(super) fn backward(l: &mut Lower, operation: &OperationIr, d: &InterpolateBackwardOpIr) -> Done {
    let linear = match d.options.mode {
        InterpolateModeIr::Nearest => false,
        InterpolateModeIr::Bilinear => true,
        _ => return external::keep(l, operation),
    };
    let grad = l.input(&d.grad)?;
    let dtype = l.dtype(grad);
    let extents = shape_of(&d.out);
    let mut out = l.widen(grad)?;
    for axis in [3, 2] {
        let (from, to) = (extents[axis], l.shape(out)[axis]);
        let shape = l.shape(out).with(axis, from);
        let zeros = l.full(0i64, l.dtype(out), &shape)?;
        let mode = ScatterMode::Add;
        let put = Op::IndexPut { axis, mode };
        out = if linear {
            let taps = Taps::new(l, from, to, d.options.align_corners, l.dtype(out))?;
            let (low, high) = taps.weighted(l, out, out, axis)?;
            let sum = l.add(put.clone(), &[zeros, taps.low, low])?;
            l.add(put, &[sum, taps.high, high])?
        } else {
            let indices = nearest(l, from, to)?;
            l.add(put, &[zeros, indices, out])?
        };
    }
    let out = l.cast(out, dtype)?;
    l.define(&d.out, out)
}

/// The input each of `to` outputs reads: `floor(i * from / to)`.
fn nearest(l: &mut Lower, from: usize, to: usize) -> Result<Value, Fault> {
    let i = l.iota(DType::F64, &Shape::from([to]), 0)?;
    let x = l.with_constant(BinaryOp::Mul, i, from as f64 / to as f64)?;
    let x = l.unary(UnaryOp::Floor, x)?;
    let indices = l.cast(x, DType::I64)?;
    l.with_constant(BinaryOp::Min, indices, from as i64 - 1)
}

/// The two inputs each output of a linear interpolation blends, and the weight of the second.
struct Taps {
    low: Value,
    high: Value,
    weight: Value,
}

impl Taps {
    fn new(l: &mut Lower, from: usize, to: usize, align_corners: bool, dtype: DType) -> Result<Self, Fault> {
        let i = l.iota(DType::F64, &Shape::from([to]), 0)?;
        let x = if align_corners {
            let ratio = (from as f64 - 1.0) / (to.max(1) - 1).max(1) as f64;
            l.with_constant(BinaryOp::Mul, i, ratio)?
        } else {
            let x = l.with_constant(BinaryOp::Add, i, 0.5)?;
            let x = l.with_constant(BinaryOp::Mul, x, from as f64 / to as f64)?;
            l.with_constant(BinaryOp::Sub, x, 0.5)?
        };
        let floor = l.unary(UnaryOp::Floor, x)?;
        let floor = l.with_constant(BinaryOp::Max, floor, 0.0)?;
        let weight = l.binary(BinaryOp::Sub, x, floor)?;
        let weight = l.with_constant(BinaryOp::Max, weight, 0.0)?;
        let low = l.cast(floor, DType::I64)?;
        let low = l.with_constant(BinaryOp::Min, low, from as i64 - 1)?;
        let high = l.with_constant(BinaryOp::Add, low, 1i64)?;
        let high = l.with_constant(BinaryOp::Min, high, from as i64 - 1)?;
        Ok(Self {
            low,
            high,
            weight: l.cast(weight, dtype)?,
        })
    }

    /// `low * (1 - weight)` and `high * weight` along `axis`.
    fn weighted(&self, l: &mut Lower, low: Value, high: Value, axis: usize) -> Result<(Value, Value), Fault> {
        let shape = l.shape(low);
        let weight = l.broadcast(self.weight, &shape, &[axis])?;
        let one = l.full(1i64, l.dtype(low), &shape)?;
        let rest = l.binary(BinaryOp::Sub, one, weight)?;
        let low = l.binary(BinaryOp::Mul, low, rest)?;
        let high = l.binary(BinaryOp::Mul, high, weight)?;
        Ok((low, high))
    }

    fn blend(&self, l: &mut Lower, x: Value, axis: usize) -> Result<Value, Fault> {
        let low = l.index_select(x, axis, self.low)?;
        let high = l.index_select(x, axis, self.high)?;
        let (low, high) = self.weighted(l, low, high, axis)?;
        l.binary(BinaryOp::Add, low, high)
    }
}
