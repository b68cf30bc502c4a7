//! Gathering, scattering and sorting.
//!
//! Indices are checked against the extent first: candle reads the largest number of an index type as "no
//! element".
//!
//! candle scatters by assigning and by adding. A scatter becomes an indexed update of rows: [`put`] of the
//! flattened tensor with row-major positions as indices. Multiplying and taking extremes go in rounds: round
//! `r` takes the `r`-th update of every target, so that within a round no target occurs twice and gather,
//! combine, assign is right.
//!
//! candle's sort compares with Rust's stable sort, but needs a total order: NaN is sorted as infinity first,
//! and a second stable sort by "is NaN" puts it behind.

use std::collections::HashMap;

use candle_core::{DType as CandleType, Result, Tensor};
use kiln_graph::op::{BinaryOp, ScatterMode};
use kiln_graph::{DType, Shape, TensorType};

use crate::error::{Computed, Failure};
use crate::value::{Val, float, indices, is_nan, select, wrap};
use crate::{float as floats, ints};

/// Reports the first index outside of `0..extent`.
pub(crate) fn check(at: &Val, axis: usize, extent: usize) -> Computed<()> {
    if at.numel() == 0 {
        return Ok(());
    }
    let (low, high) = (at.tensor.min_all()?, at.tensor.max_all()?);
    if low.to_scalar::<i64>()? >= 0 && high.to_scalar::<i64>()? < extent as i64 {
        return Ok(());
    }
    let all = at.tensor.flatten_all()?.to_vec1::<i64>()?;
    let wrong = all.into_iter().find(|&index| index < 0 || index >= extent as i64);
    Err(Failure::IndexOutOfRange {
        index: wrong.unwrap_or_default(),
        axis,
        extent,
    })
}

pub(crate) fn gather(x: &Val, at: &Val, axis: usize) -> Computed<Val> {
    check(at, axis, x.dims()[axis])?;
    // candle's kernel takes the other extents of both as equal.
    let mut source = x.tensor.clone();
    for other in (0..x.dims().len()).filter(|&other| other != axis) {
        source = source.narrow(other, 0, at.dims()[other])?;
    }
    let tensor = source.contiguous()?.gather(&at.tensor.contiguous()?, axis)?;
    Ok(Val::new(tensor, x.dtype))
}

pub(crate) fn index_select(x: &Val, at: &Val, axis: usize) -> Computed<Val> {
    check(at, axis, x.dims()[axis])?;
    let tensor = x
        .tensor
        .contiguous()?
        .index_select(&at.tensor.contiguous()?, axis)?;
    Ok(Val::new(tensor, x.dtype))
}

pub(crate) fn scatter(x: &Val, at: &Val, updates: &Val, axis: usize, mode: ScatterMode) -> Computed<Val> {
    check(at, axis, x.dims()[axis])?;
    if at.numel() == 0 {
        return Ok(x.clone());
    }
    let strides = Shape::from(x.dims()).strides();
    let mut position = at
        .tensor
        .mul(&crate::value::int(&at.tensor, strides[axis] as i64)?)?;
    for other in (0..x.dims().len()).filter(|&other| other != axis) {
        let coordinate = crate::reduce::iota(&Shape::from(at.dims()), other, DType::I64)?.tensor;
        let stride = crate::value::int(&coordinate, strides[other] as i64)?;
        position = position.add(&coordinate.mul(&stride)?)?;
    }
    let flat = |tensor: &Tensor| tensor.flatten_all()?.contiguous();
    let combined = put(
        &Val::new(flat(&x.tensor)?, x.dtype),
        &flat(&position)?,
        &Val::new(flat(&updates.tensor)?, x.dtype),
        0,
        mode,
    )?;
    Ok(Val::new(combined.tensor.reshape(x.dims())?, x.dtype))
}

pub(crate) fn index_put(x: &Val, at: &Val, updates: &Val, axis: usize, mode: ScatterMode) -> Computed<Val> {
    check(at, axis, x.dims()[axis])?;
    if updates.numel() == 0 {
        return Ok(x.clone());
    }
    Ok(put(x, &at.tensor.contiguous()?, updates, axis, mode)?)
}

/// Combines slice `j` of `updates` into slice `at[j]` of `x`, in the order of `j`; `at` holds valid i64
/// indices.
fn put(x: &Val, at: &Tensor, updates: &Val, axis: usize, mode: ScatterMode) -> Result<Val> {
    let step = match mode {
        ScatterMode::Assign => {
            let tensor = assign(&x.tensor.contiguous()?, at, &updates.tensor, axis)?;
            return Ok(Val::new(tensor, x.dtype));
        }
        ScatterMode::Add => return add(x, at, updates, axis),
        ScatterMode::Mul => BinaryOp::Mul,
        ScatterMode::Max => BinaryOp::Max,
        ScatterMode::Min => BinaryOp::Min,
    };
    let mut seen: HashMap<i64, usize> = HashMap::new();
    let mut rounds: Vec<(Vec<i64>, Vec<i64>)> = Vec::new();
    for (j, target) in at.to_vec1::<i64>()?.into_iter().enumerate() {
        let round = seen.entry(target).or_default();
        if *round == rounds.len() {
            rounds.push(Default::default());
        }
        rounds[*round].0.push(target);
        rounds[*round].1.push(j as i64);
        *round += 1;
    }
    let mut result = x.wide()?.contiguous()?;
    let updates = updates.wide()?.contiguous()?;
    for (targets, sources) in rounds {
        let targets = indices(targets)?;
        let current = result.index_select(&targets, axis)?;
        let update = updates.index_select(&indices(sources)?, axis)?;
        let combined = if x.dtype.is_int() {
            ints::binary(step, &current, &update, x.dtype)?
        } else {
            floats::binary(step, &current, &update)?
        };
        result = assign(&result, &targets, &combined, axis)?;
    }
    Val::narrow(result, x.dtype)
}

/// `x` with slices `at` along `axis` replaced, the last of equals winning.
fn assign(x: &Tensor, at: &Tensor, updates: &Tensor, axis: usize) -> Result<Tensor> {
    let mut along = vec![1; x.rank()];
    along[axis] = at.elem_count();
    let at = at.reshape(along)?.broadcast_as(updates.shape())?.contiguous()?;
    x.scatter(&at, &updates.contiguous()?, axis)
}

/// `x` with slices of `updates` added at `at` along `axis`; floats accumulate in f64.
pub(crate) fn add(x: &Val, at: &Tensor, updates: &Val, axis: usize) -> Result<Val> {
    let (sums, updates) = (x.wide()?.contiguous()?, updates.wide()?.contiguous()?);
    let tensor = if x.dtype.is_int() {
        ints::index_add(&sums, at, &updates, axis, x.dtype)?
    } else {
        sums.index_add(at, &updates, axis)?
    };
    Val::narrow(tensor, x.dtype)
}

/// [`add`] at checked positions: `dy` added at row-major positions of the last dimensions merged, for each of
/// `planes`.
pub(crate) fn max_pool_grad(dy: &Val, at: &Val, result: &TensorType) -> Computed<Val> {
    let planes = result.shape[0] * result.shape[1];
    let spatial: usize = result.shape[2..].iter().product();
    check(at, 2, spatial)?;
    let out = dy.numel() / planes.max(1);
    let flat = TensorType::new(DType::I64, [planes, out]);
    let base = crate::reduce::iota(&flat.shape, 0, DType::I64)?.tensor;
    let base = base.mul(&crate::value::int(&base, spatial as i64)?)?;
    let position = base.add(&at.tensor.reshape((planes, out))?)?;
    let zeros = Val::zeros(&Shape::from([planes * spatial]), dy.dtype)?;
    let updates = Val::new(dy.tensor.flatten_all()?, dy.dtype);
    let sums = add(&zeros, &position.flatten_all()?.contiguous()?, &updates, 0)?;
    Ok(Val::new(sums.tensor.reshape(result.shape.dims())?, dy.dtype))
}

/// Stable order along the last dimension, as u32 indices.
fn stable_order(x: &Tensor, dtype: DType, ascending: bool) -> Result<Tensor> {
    if dtype.is_int() {
        return ints::to_ordered(x, dtype)?
            .contiguous()?
            .arg_sort_last_dim(ascending);
    }
    if !dtype.is_float() {
        return x.arg_sort_last_dim(ascending);
    }
    let nan = is_nan(x)?;
    let keys = select(&nan, &float(x, f64::INFINITY)?, x)?;
    let order = keys.contiguous()?.arg_sort_last_dim(ascending)?;
    if nan.max_all()?.to_scalar::<u8>()? == 0 {
        return Ok(order);
    }
    let last = x.rank() - 1;
    let nan_last = nan.gather(&order, last)?.arg_sort_last_dim(ascending)?;
    order.gather(&nan_last, last)
}

/// Sorted elements and where they were, cut to the first `count` along `axis`.
pub(crate) fn sort(
    x: &Val,
    axis: usize,
    descending: bool,
    count: usize,
    indices: DType,
) -> Result<(Val, Val)> {
    let last = x.dims().len() - 1;
    let to_last = |t: &Tensor| t.transpose(axis, last)?.contiguous();
    let moved = to_last(&x.tensor)?;
    let order = stable_order(&moved, x.dtype, !descending)?;
    let order = order.narrow(last, 0, count)?.contiguous()?;
    let sorted = to_last(&moved.gather(&order, last)?)?;
    let order = to_last(&order.to_dtype(CandleType::I64)?)?;
    Ok((
        Val::new(sorted, x.dtype),
        Val::new(wrap(&order, indices)?, indices),
    ))
}
