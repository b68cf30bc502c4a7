//! Operations that move elements: shapes, slices, padding, joining, reversing.
//!
//! They need no arithmetic, so they work on the candle tensor of any element type. Results may be views.

use candle_core::{Result, Tensor};
use kiln_graph::op::{Dims, SignedDims};
use kiln_graph::{Shape, TensorType};

use crate::value::{Val, indices, repeat};

pub(crate) fn broadcast(x: &Val, shape: &Shape, dims: &Dims) -> Result<Val> {
    let mut aligned = vec![1; shape.rank()];
    for (from, &to) in dims.iter().enumerate() {
        aligned[to] = x.dims()[from];
    }
    let tensor = repeat(&x.tensor.reshape(aligned)?, shape.dims())?;
    Ok(Val::new(tensor, x.dtype))
}

pub(crate) fn slice(x: &Val, starts: &Dims, limits: &Dims, steps: &Dims) -> Result<Val> {
    let mut tensor = x.tensor.clone();
    for axis in 0..starts.len() {
        tensor = tensor.narrow(axis, starts[axis], limits[axis] - starts[axis])?;
        if steps[axis] > 1 {
            let picked = (0..limits[axis] - starts[axis]).step_by(steps[axis]);
            let picked = indices(picked.map(|i| i as i64).collect())?;
            tensor = tensor.contiguous()?.index_select(&picked, axis)?;
        }
    }
    Ok(Val::new(tensor, x.dtype))
}

/// Element `i` of the result is element `i - low` of `x` if that exists, `value` otherwise. This also
/// defines cropping by more than the extent.
pub(crate) fn pad(x: &Val, value: &Val, low: &SignedDims, result: &TensorType) -> Result<Val> {
    let mut tensor = x.tensor.clone();
    for axis in 0..low.len() {
        let (extent, out) = (tensor.dims()[axis] as i64, result.shape[axis] as i64);
        let first = low[axis].clamp(0, out);
        let last = (extent + low[axis]).clamp(first, out);
        let body = if last > first {
            tensor.narrow(axis, (first - low[axis]) as usize, (last - first) as usize)?
        } else {
            tensor.narrow(axis, 0, 0)?
        };
        let fill = |count: i64| {
            let mut dims = tensor.dims().to_vec();
            dims[axis] = count as usize;
            repeat(&value.tensor, dims)
        };
        let mut parts = Vec::with_capacity(3);
        if first > 0 {
            parts.push(fill(first)?);
        }
        if last > first {
            parts.push(body.clone());
        }
        if out > last {
            parts.push(fill(out - last)?);
        }
        tensor = match parts.len() {
            0 => body,
            1 => parts.swap_remove(0),
            _ => Tensor::cat(&parts, axis)?,
        };
    }
    Ok(Val::new(tensor, x.dtype))
}

pub(crate) fn concat(parts: &[&Val], axis: usize) -> Result<Val> {
    let dtype = parts[0].dtype;
    let tensors: Vec<Tensor> = parts
        .iter()
        .filter(|part| part.numel() > 0)
        .map(|part| part.tensor.clone())
        .collect();
    Ok(Val::new(Tensor::cat(&tensors, axis)?, dtype))
}

pub(crate) fn flip(x: &Val, axes: &Dims) -> Result<Val> {
    let mut tensor = x.tensor.contiguous()?;
    for &axis in axes {
        let backward = indices((0..x.dims()[axis] as i64).rev().collect())?;
        tensor = tensor.index_select(&backward, axis)?;
    }
    Ok(Val::new(tensor, x.dtype))
}

/// The row-major positions in `shape` of the elements that a slice of extents `extents` reads, in its
/// row-major order.
fn positions(shape: &[usize], starts: &[usize], steps: &[usize], extents: &[usize]) -> Vec<i64> {
    let mut positions = vec![0i64];
    for axis in 0..shape.len() {
        positions = positions
            .into_iter()
            .flat_map(|outer| {
                let place = move |i: usize| (starts[axis] + i * steps[axis]) as i64;
                (0..extents[axis]).map(move |i| outer * shape[axis] as i64 + place(i))
            })
            .collect();
    }
    positions
}

pub(crate) fn update_slice(x: &Val, update: &Val, starts: &Dims, steps: &Dims) -> Result<Val> {
    if update.numel() == 0 {
        return Ok(x.clone());
    }
    let at = indices(positions(x.dims(), starts, steps, update.dims()))?;
    let flat = x.tensor.flatten_all()?.contiguous()?;
    let update = update.tensor.flatten_all()?.contiguous()?;
    let tensor = flat.scatter(&at, &update, 0)?.reshape(x.dims())?;
    Ok(Val::new(tensor, x.dtype))
}
