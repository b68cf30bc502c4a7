//! Pooling and its gradients, over [`Windows`] of `[n * c, positions]`.

use candle_core::{DType as CandleType, Device, Result, Tensor};
use kiln_graph::op::{ReduceOp, Window};
use kiln_graph::{DType, TensorType};

use crate::ints;
use crate::reduce::{extreme_last, full, neutral};
use crate::value::{Val, both, either, int, is_nan, repeat, select, storage, wrap};
use crate::window::{Geometry, Windows};

/// `x` as `[n * c, positions]`.
fn planes(x: &Tensor) -> Result<Tensor> {
    let positions: usize = x.dims()[2..].iter().product();
    x.reshape((x.dims()[0] * x.dims()[1], positions))
}

/// Windows as rows, `[planes * outputs, elements]`, from `[planes, elements * outputs]`.
fn rows(read: &Tensor, windows: &Windows) -> Result<Tensor> {
    let count = read.dims()[0];
    read.reshape((count, windows.elements, windows.outputs))?
        .transpose(1, 2)?
        .contiguous()?
        .reshape((count * windows.outputs, windows.elements))
}

/// Windows of `x` as rows, in the compute type; padding reads as the lowest value.
fn max_rows(x: &Val, windows: &Windows) -> Result<Tensor> {
    let lowest = full(neutral(ReduceOp::Max, x.dtype), &TensorType::scalar(x.dtype))?;
    rows(&windows.read(&planes(&x.compute()?)?, &lowest.tensor)?, windows)
}

pub(crate) fn max_pool(x: &Val, window: &Window, result: &TensorType) -> Result<Val> {
    let windows = Windows::new(&Geometry::of_pool(window, &x.dims()[2..], &result.shape[2..]))?;
    let largest = extreme_last(ReduceOp::Max, &max_rows(x, &windows)?, x.dtype)?;
    Val::narrow(largest.reshape(result.shape.dims())?, x.dtype)
}

pub(crate) fn max_pool_with_indices(
    x: &Val,
    window: &Window,
    result: &TensorType,
    dtype: DType,
) -> Result<(Val, Val)> {
    let windows = Windows::new(&Geometry::of_pool(window, &x.dims()[2..], &result.shape[2..]))?;
    let rows = max_rows(x, &windows)?;
    let largest = extreme_last(ReduceOp::Max, &rows, x.dtype)?;
    // The position that each element of each row was read from.
    let count = x.dims()[0] * x.dims()[1];
    let table = windows.table.reshape((windows.elements, windows.outputs))?.t()?;
    let table = table
        .unsqueeze(0)?
        .broadcast_as((count, windows.outputs, windows.elements))?
        .contiguous()?
        .reshape((count * windows.outputs, windows.elements))?;
    // The first element of the input, not of the padding, that equals the largest, or is NaN as it is; 0 if
    // all is padding.
    let largest_each = repeat(&largest.unsqueeze(1)?, rows.shape())?;
    let extreme = either(&rows.eq(&largest_each)?, &is_nan(&rows)?)?;
    let candidates = both(&extreme, &table.ne(&int(&table, windows.positions as i64)?)?)?;
    let first = table
        .gather(&candidates.argmax(1)?.unsqueeze(1)?, 1)?
        .squeeze(1)?;
    let at = select(&candidates.max(1)?, &first, &int(&first, 0)?)?.reshape(result.shape.dims())?;
    let largest = Val::narrow(largest.reshape(result.shape.dims())?, x.dtype)?;
    Ok((largest, Val::new(wrap(&at, dtype)?, dtype)))
}

/// Divisors of the mean at each output position, for `[planes, outputs]`; 1 where there is nothing to divide.
fn divisors(geometry: &Geometry, include_padding: bool, planes: usize) -> Result<Tensor> {
    let mut counts = geometry.counts(include_padding);
    counts.iter_mut().for_each(|count| *count = count.max(1.0));
    let outputs = counts.len();
    repeat(
        &Tensor::from_vec(counts, (1, outputs), &Device::Cpu)?,
        (planes, outputs),
    )
}

pub(crate) fn avg_pool(x: &Val, window: &Window, include_padding: bool, result: &TensorType) -> Result<Val> {
    let geometry = Geometry::of_pool(window, &x.dims()[2..], &result.shape[2..]);
    let windows = Windows::new(&geometry)?;
    let count = x.dims()[0] * x.dims()[1];
    let input = x.wide()?;
    let zero = Tensor::zeros(1, input.dtype(), &Device::Cpu)?;
    let rows = rows(&windows.read(&planes(&input)?, &zero)?, &windows)?;
    let counts = divisors(&geometry, include_padding, count)?.flatten_all()?;
    let mean = if x.dtype.is_int() {
        ints::mean_last(&rows, &counts.to_dtype(CandleType::I64)?, x.dtype)?
    } else {
        rows.sum(1)?.div(&counts)?
    };
    Val::narrow(mean.reshape(result.shape.dims())?, x.dtype)
}

pub(crate) fn avg_pool_grad(
    dy: &Val,
    window: &Window,
    include_padding: bool,
    result: &TensorType,
) -> Result<Val> {
    let geometry = Geometry::of_pool(window, &result.shape[2..], &dy.dims()[2..]);
    let windows = Windows::new(&geometry)?;
    let count = dy.dims()[0] * dy.dims()[1];
    let gradient = planes(&dy.wide()?)?;
    let counts = divisors(&geometry, include_padding, count)?;
    let share = if dy.dtype.is_int() {
        ints::div(&gradient, &counts.to_dtype(CandleType::I64)?, dy.dtype)?
    } else {
        gradient.div(&counts)?
    };
    let read = share
        .unsqueeze(1)?
        .broadcast_as((count, windows.elements, windows.outputs))?
        .contiguous()?
        .reshape((count, windows.elements * windows.outputs))?;
    let accumulate = if dy.dtype.is_float() { DType::F64 } else { dy.dtype };
    let sums = windows.add_up(&Val::new(read.to_dtype(storage(accumulate))?, accumulate))?;
    Val::narrow(sums.tensor.reshape(result.shape.dims())?, dy.dtype)
}
