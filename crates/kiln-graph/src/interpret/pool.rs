//! Pooling and its gradients. Leading dimensions (batch and channels) are planes; a window slides over each.

use super::OutOfRange;
use super::array::{Array, Data, Number, map_data};
use super::contract::{Slide, Tap, taps};
use crate::op::Window;
use crate::{DType, TensorType};

fn window_taps(window: &Window, input: &[usize], out: &[usize]) -> Vec<Tap> {
    let slides: Vec<Slide> = (0..window.size.len())
        .map(|axis| Slide {
            out: out[axis],
            kernel: window.size[axis],
            input: input[axis],
            stride: window.stride[axis],
            dilation: window.dilation[axis],
            pad_low: window.pad_low[axis],
        })
        .collect();
    taps(&slides)
}

/// Batch times channels, and the spatial extents.
fn planes(shape: &[usize]) -> (usize, &[usize]) {
    (shape[0] * shape[1], &shape[2..])
}

/// The neutral element of max, in the type of `_like`.
fn lowest<T: Number>(_like: &[T], dtype: DType) -> T {
    T::extremes(dtype).0
}

/// The largest elements and where they are. A window that covers padding only has the lowest value, at 0.
pub(super) fn max_pool(x: &Array, window: &Window, ty: &TensorType, index_dtype: DType) -> (Array, Array) {
    let (count, input) = planes(&x.ty.shape);
    let taps = window_taps(window, input, &ty.shape[2..]);
    let (from, to): (usize, usize) = (input.iter().product(), ty.shape[2..].iter().product());
    let mut indices = vec![0i128; ty.numel()];
    let data = map_data!(x.data, values => {
        let lowest = lowest(values, x.ty.dtype);
        let mut out = vec![lowest; ty.numel()];
        let mut seen = vec![false; ty.numel()];
        for plane in 0..count {
            for tap in &taps {
                let (at, value) = (plane * to + tap.out, values[plane * from + tap.input]);
                let better = !out[at].is_nan() && (value.is_nan() || value.greater(out[at]));
                if better || !seen[at] {
                    (out[at], indices[at], seen[at]) = (value, tap.input as i128, true);
                }
            }
        }
        out
    });
    (
        Array::new(ty.clone(), data),
        Array::from_ints(index_dtype, ty.shape.clone(), indices),
    )
}

pub(super) fn max_pool_grad(dy: &Array, indices: &Array, ty: &TensorType) -> Result<Array, OutOfRange> {
    let (_, input) = planes(&ty.shape);
    let (from, to): (usize, usize) = (dy.ty.shape[2..].iter().product(), input.iter().product());
    for &index in indices.ints() {
        if !usize::try_from(index).is_ok_and(|index| index < to) {
            return Err(OutOfRange {
                index,
                axis: 2,
                extent: to,
            });
        }
    }
    let data = map_data!(dy.data, values => {
        let mut out = vec![Number::ZERO; ty.numel()];
        for (position, (&value, &index)) in values.iter().zip(indices.ints()).enumerate() {
            let at = position / from * to + index as usize;
            out[at] = Number::add(out[at], value);
        }
        out
    });
    Ok(Array::new(ty.clone(), data))
}

/// For each output position, how many elements its mean is over.
fn divisors(window: &Window, count_include_pad: bool, input: &[usize], out: &[usize]) -> Vec<usize> {
    let mut divisors = vec![1];
    for axis in 0..input.len() {
        let low = window.pad_low[axis];
        let counted = if count_include_pad {
            0..low + input[axis] + window.pad_high[axis]
        } else {
            low..low + input[axis]
        };
        let line: Vec<usize> = (0..out[axis])
            .map(|o| {
                let positions =
                    (0..window.size[axis]).map(|k| o * window.stride[axis] + k * window.dilation[axis]);
                positions.filter(|padded| counted.contains(padded)).count()
            })
            .collect();
        divisors = divisors
            .iter()
            .flat_map(|outer| line.iter().map(move |inner| outer * inner))
            .collect();
    }
    divisors
}

pub(super) fn avg_pool(x: &Array, window: &Window, count_include_pad: bool, ty: &TensorType) -> Array {
    let (count, input) = planes(&x.ty.shape);
    let output = &ty.shape[2..];
    let taps = window_taps(window, input, output);
    let divisors = divisors(window, count_include_pad, input, output);
    let (from, to): (usize, usize) = (input.iter().product(), output.iter().product());
    let data = map_data!(x.data, values => {
        let mut out = vec![Number::ZERO; ty.numel()];
        for plane in 0..count {
            for tap in &taps {
                let at = plane * to + tap.out;
                out[at] = Number::add(out[at], values[plane * from + tap.input]);
            }
        }
        let means = out.iter().enumerate();
        means.map(|(at, sum)| sum.in_64_bits(ty.dtype).divide(divisors[at % to])).collect()
    });
    Array::new(ty.clone(), data)
}

pub(super) fn avg_pool_grad(dy: &Array, window: &Window, count_include_pad: bool, ty: &TensorType) -> Array {
    let (count, input) = planes(&ty.shape);
    let output = &dy.ty.shape[2..];
    let taps = window_taps(window, input, output);
    let divisors = divisors(window, count_include_pad, input, output);
    let (from, to): (usize, usize) = (output.iter().product(), input.iter().product());
    let data: Data = map_data!(dy.data, values => {
        let mut out = vec![Number::ZERO; ty.numel()];
        for plane in 0..count {
            for tap in &taps {
                let (at, share) = (plane * to + tap.input, values[plane * from + tap.out].divide(divisors[tap.out]));
                out[at] = Number::add(out[at], share);
            }
        }
        out
    });
    Array::new(ty.clone(), data)
}
