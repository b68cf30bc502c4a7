//! Reductions, arg-reductions and running reductions.
//!
//! candle sums over any axes and finds extremes along one; NaN does not survive its comparisons, so a mask of
//! NaN is reduced beside the numbers. Products and running reductions are composed: a product halves the axis
//! again and again, a running reduction adds shifted copies of itself (Hillis and Steele 1986), which takes
//! `log2(n)` steps.

use candle_core::{Device, Result, Tensor};
use kiln_graph::op::{ArgReduceOp, BinaryOp, ReduceOp};
use kiln_graph::{DType, HostTensor, Scalar, Shape, TensorType};

use crate::value::{Val, float, is_nan, repeat, select, wrap};
use crate::{float as floats, ints};

/// The result of a reduction of nothing.
pub(crate) fn neutral(op: ReduceOp, dtype: DType) -> Scalar {
    let bits = 8 * dtype.size() as u32;
    let (low, high) = match dtype {
        _ if dtype.is_float() => (Scalar::Float(f64::NEG_INFINITY), Scalar::Float(f64::INFINITY)),
        _ if dtype.is_signed_int() => (
            Scalar::Int(i64::MIN >> (64 - bits)),
            Scalar::Int(i64::MAX >> (64 - bits)),
        ),
        _ => (Scalar::UInt(0), Scalar::UInt(u64::MAX >> (64 - bits))),
    };
    match op {
        ReduceOp::Sum => Scalar::Int(0),
        ReduceOp::Prod => Scalar::Int(1),
        ReduceOp::Max => low,
        ReduceOp::Min => high,
        ReduceOp::Any => Scalar::Bool(false),
        ReduceOp::All => Scalar::Bool(true),
    }
}

/// A tensor of `ty` with every element `value`.
pub(crate) fn full(value: Scalar, ty: &TensorType) -> Result<Val> {
    let scalar = Val::from_host(&HostTensor::scalar(ty.dtype, value))?;
    Ok(Val::new(repeat(&scalar.tensor, ty.shape.dims())?, ty.dtype))
}

/// `x` with `axes` moved to the end and merged into one: `[outer, reduced]`.
fn rows(x: &Tensor, axes: &[usize]) -> Result<Tensor> {
    let kept = (0..x.rank()).filter(|axis| !axes.contains(axis));
    let order: Vec<usize> = kept.chain(axes.iter().copied()).collect();
    let count: usize = axes.iter().map(|&axis| x.dims()[axis]).product();
    let outer = x.elem_count() / count.max(1);
    x.permute(order)?.contiguous()?.reshape((outer, count))
}

pub(crate) fn reduce(op: ReduceOp, x: &Val, axes: &[usize], result: &TensorType) -> Result<Val> {
    if x.numel() == 0 {
        return full(neutral(op, x.dtype), result);
    }
    let reduced = match op {
        ReduceOp::Sum if x.dtype.is_int() => ints::sum_last(&rows(&x.tensor, axes)?, x.dtype)?,
        ReduceOp::Sum => x.wide()?.contiguous()?.sum(axes)?,
        ReduceOp::Prod => product_last(&rows(&x.wide()?, axes)?, x.dtype)?,
        ReduceOp::Any => rows(&x.tensor, axes)?.max(1)?,
        ReduceOp::All => rows(&x.tensor, axes)?.min(1)?,
        ReduceOp::Max | ReduceOp::Min => extreme_last(op, &rows(&x.compute()?, axes)?, x.dtype)?,
    };
    Val::narrow(reduced.reshape(result.shape.dims())?, x.dtype)
}

/// Product along the last of two dimensions. Floats come in f64.
fn product_last(x: &Tensor, dtype: DType) -> Result<Tensor> {
    let mut x = x.clone();
    loop {
        let count = x.dims()[1];
        if count == 1 {
            return x.squeeze(1);
        }
        let half = count / 2;
        let (a, b) = (x.narrow(1, 0, half)?, x.narrow(1, half, half)?);
        let merged = combine(BinaryOp::Mul, &a.contiguous()?, &b.contiguous()?, dtype)?;
        x = if count.is_multiple_of(2) {
            merged
        } else {
            Tensor::cat(&[merged, x.narrow(1, count - 1, 1)?], 1)?
        };
    }
}

/// Maximum or minimum along the last of two dimensions; NaN if any element is NaN.
pub(crate) fn extreme_last(op: ReduceOp, x: &Tensor, dtype: DType) -> Result<Tensor> {
    let extreme = |x: &Tensor| if op == ReduceOp::Max { x.max(1) } else { x.min(1) };
    if dtype.is_int() {
        return ints::from_ordered(&extreme(&ints::to_ordered(x, dtype)?)?, dtype);
    }
    let found = extreme(x)?;
    select(&is_nan(x)?.max(1)?, &float(&found, f64::NAN)?, &found)
}

/// Index along the last of two dimensions of the extreme: the first of equals, the first NaN if there is one.
/// As i64.
pub(crate) fn arg_extreme_last(op: ArgReduceOp, x: &Tensor, dtype: DType) -> Result<Tensor> {
    let arg = |x: &Tensor| match op {
        ArgReduceOp::Max => x.argmax(1),
        ArgReduceOp::Min => x.argmin(1),
    };
    let index = if dtype.is_int() {
        arg(&ints::to_ordered(x, dtype)?)?
    } else {
        let nan = is_nan(x)?;
        select(&nan.max(1)?, &nan.argmax(1)?, &arg(x)?)?
    };
    index.to_dtype(candle_core::DType::I64)
}

pub(crate) fn arg_reduce(op: ArgReduceOp, x: &Val, axis: usize, result: &TensorType) -> Result<Val> {
    let index = arg_extreme_last(op, &rows(&x.compute()?, &[axis])?, x.dtype)?;
    let index = wrap(&index, result.dtype)?.reshape(result.shape.dims())?;
    Ok(Val::new(index, result.dtype))
}

/// One step of a reduction. Floats in f32 or f64, either.
fn combine(op: BinaryOp, a: &Tensor, b: &Tensor, dtype: DType) -> Result<Tensor> {
    if dtype.is_int() {
        ints::binary(op, a, b, dtype)
    } else {
        floats::binary(op, a, b)
    }
}

pub(crate) fn cumulative(op: ReduceOp, x: &Val, axis: usize) -> Result<Val> {
    let step = match op {
        ReduceOp::Sum => BinaryOp::Add,
        ReduceOp::Prod => BinaryOp::Mul,
        ReduceOp::Max => BinaryOp::Max,
        ReduceOp::Min => BinaryOp::Min,
        other => candle_core::bail!("`{other}` has no running form"),
    };
    let extent = x.dims()[axis];
    let mut running = x.wide()?.contiguous()?;
    let mut shift = 1;
    while shift < extent {
        let before = running.narrow(axis, 0, extent - shift)?;
        let after = running.narrow(axis, shift, extent - shift)?;
        let head = running.narrow(axis, 0, shift)?;
        let tail = combine(step, &after.contiguous()?, &before.contiguous()?, x.dtype)?;
        running = Tensor::cat(&[head, tail], axis)?;
        shift *= 2;
    }
    Val::narrow(running, x.dtype)
}

/// The coordinate along `axis`.
pub(crate) fn iota(shape: &Shape, axis: usize, dtype: DType) -> Result<Val> {
    let mut dims = vec![1; shape.rank()];
    dims[axis] = shape[axis];
    let count = Tensor::arange(0, shape[axis] as i64, &Device::Cpu)?;
    let count = repeat(&count.reshape(dims)?, shape.dims())?;
    crate::pointwise::cast(&Val::new(count, DType::I64), dtype)
}
