//! Reads and writes at computed positions. Every index is checked.

use super::OutOfRange;
use super::array::{Array, Lanes, Number, map_data, map_data2, strides, walk};
use crate::TensorType;
use crate::op::ScatterMode;

fn check(index: i128, axis: usize, extent: usize) -> Result<usize, OutOfRange> {
    let position = usize::try_from(index).ok().filter(|&position| position < extent);
    position.ok_or(OutOfRange { index, axis, extent })
}

fn combine<T: Number>(mode: ScatterMode, held: T, update: T) -> T {
    match mode {
        ScatterMode::Assign => update,
        ScatterMode::Add => held.add(update),
        ScatterMode::Mul => held.mul(update),
        ScatterMode::Max => held.max(update),
        ScatterMode::Min => held.min(update),
    }
}

/// For each index of `indices` in row-major order, the position in `x` it stands for.
fn positions(x: &Array, indices: &Array, axis: usize) -> Result<Vec<usize>, OutOfRange> {
    let mut steps = strides(&x.ty.shape);
    let along = steps[axis] as usize;
    steps[axis] = 0;
    walk(&indices.ty.shape, &steps, 0)
        .zip(indices.ints())
        .map(|(rest, &index)| Ok(rest + along * check(index, axis, x.ty.shape[axis])?))
        .collect()
}

pub(super) fn gather(x: &Array, indices: &Array, axis: usize, ty: &TensorType) -> Result<Array, OutOfRange> {
    let positions = positions(x, indices, axis)?;
    let data = map_data!(x.data, x => positions.iter().map(|&at| x[at]).collect());
    Ok(Array::new(ty.clone(), data))
}

pub(super) fn scatter(
    x: &Array,
    indices: &Array,
    updates: &Array,
    axis: usize,
    mode: ScatterMode,
) -> Result<Array, OutOfRange> {
    let positions = positions(x, indices, axis)?;
    let data = map_data2!(x.data, updates.data, (x, updates) => {
        let mut out = x.clone();
        for (&at, &update) in positions.iter().zip(updates) {
            out[at] = combine(mode, out[at], update);
        }
        out
    });
    Ok(Array::new(x.ty.clone(), data))
}

/// The positions of `indices` along a dimension, checked.
fn rows(x: &Array, indices: &Array, axis: usize) -> Result<Vec<usize>, OutOfRange> {
    indices
        .ints()
        .iter()
        .map(|&index| check(index, axis, x.ty.shape[axis]))
        .collect()
}

pub(super) fn index_select(
    x: &Array,
    indices: &Array,
    axis: usize,
    ty: &TensorType,
) -> Result<Array, OutOfRange> {
    let rows = rows(x, indices, axis)?;
    let lanes = Lanes::new(&x.ty.shape, axis);
    let data = map_data!(x.data, x => {
        let mut out = Vec::with_capacity(ty.numel());
        for outer in 0..lanes.outer {
            for &row in &rows {
                let start = (outer * lanes.extent + row) * lanes.inner;
                out.extend_from_slice(&x[start..start + lanes.inner]);
            }
        }
        out
    });
    Ok(Array::new(ty.clone(), data))
}

pub(super) fn index_put(
    x: &Array,
    indices: &Array,
    updates: &Array,
    axis: usize,
    mode: ScatterMode,
) -> Result<Array, OutOfRange> {
    let rows = rows(x, indices, axis)?;
    let lanes = Lanes::new(&x.ty.shape, axis);
    let data = map_data2!(x.data, updates.data, (x, updates) => {
        let mut out = x.clone();
        for outer in 0..lanes.outer {
            for (j, &row) in rows.iter().enumerate() {
                for inner in 0..lanes.inner {
                    let to = (outer * lanes.extent + row) * lanes.inner + inner;
                    let from = (outer * rows.len() + j) * lanes.inner + inner;
                    out[to] = combine(mode, out[to], updates[from]);
                }
            }
        }
        out
    });
    Ok(Array::new(x.ty.clone(), data))
}
