//! Operations that move elements and compute nothing: each is a strided walk over its operand or its result.

use std::rc::Rc;

use super::array::{Array, Data, map_data, map_data2, strides, walk};
use crate::TensorType;

/// The elements of `x` at the positions of a walk, as a tensor of type `ty`.
fn pick(x: &Array, ty: &TensorType, steps: &[isize], start: isize) -> Array {
    let data = map_data!(x.data, values => walk(&ty.shape, steps, start).map(|at| values[at]).collect());
    Array::new(ty.clone(), data)
}

/// Writes the elements of `x` at positions `from` to positions `to` of `out`.
fn place(out: &mut Data, to: impl Iterator<Item = usize>, x: &Data, from: impl Iterator<Item = usize>) {
    match (out, x) {
        (Data::Float(out), Data::Float(x)) => to.zip(from).for_each(|(to, from)| out[to] = x[from]),
        (Data::Int(out), Data::Int(x)) => to.zip(from).for_each(|(to, from)| out[to] = x[from]),
        _ => unreachable!("typing gives both operands one dtype"),
    }
}

pub(super) fn iota(ty: &TensorType, axis: usize) -> Array {
    let mut steps = vec![0; ty.shape.rank()];
    steps[axis] = 1;
    let coordinates = walk(&ty.shape, &steps, 0);
    let data = if ty.dtype.is_float() {
        Data::Float(coordinates.map(|i| i as f64).collect())
    } else {
        Data::Int(coordinates.map(|i| i as i128).collect())
    };
    Array::new(ty.clone(), data)
}

pub(super) fn transpose(x: &Array, perm: &[usize], ty: &TensorType) -> Array {
    let all = strides(&x.ty.shape);
    let steps: Vec<isize> = perm.iter().map(|&axis| all[axis]).collect();
    pick(x, ty, &steps, 0)
}

pub(super) fn broadcast(x: &Array, dims: &[usize], ty: &TensorType) -> Array {
    let all = strides(&x.ty.shape);
    let mut steps = vec![0; ty.shape.rank()];
    for (from, &to) in dims.iter().enumerate() {
        if x.ty.shape[from] != 1 {
            steps[to] = all[from];
        }
    }
    pick(x, ty, &steps, 0)
}

/// Start and steps of a walk over every `steps`-th element from `starts` on.
fn region(shape: &[usize], starts: &[usize], steps: &[usize]) -> (isize, Vec<isize>) {
    let all = strides(shape);
    let start = all
        .iter()
        .zip(starts)
        .map(|(&stride, &start)| stride * start as isize)
        .sum();
    // A step longer than the dimension is taken at most zero times; bounding it keeps the product small.
    let bounded = steps
        .iter()
        .zip(shape)
        .map(|(&step, &extent)| step.min(extent) as isize);
    (
        start,
        all.iter()
            .zip(bounded)
            .map(|(&stride, step)| stride * step)
            .collect(),
    )
}

pub(super) fn slice(x: &Array, starts: &[usize], steps: &[usize], ty: &TensorType) -> Array {
    let (start, steps) = region(&x.ty.shape, starts, steps);
    pick(x, ty, &steps, start)
}

pub(super) fn pad(x: &Array, value: &Array, low: &[i64], ty: &TensorType) -> Array {
    let count = ty.numel();
    let mut data = map_data!(value.data, value => vec![value[0]; count]);
    // The part of the operand that lies inside the result.
    let (mut first, mut target, mut extent) = (Vec::new(), Vec::new(), Vec::new());
    for (axis, &low) in low.iter().enumerate() {
        let cropped = usize::try_from(-low.min(0)).unwrap_or(usize::MAX);
        let shifted = usize::try_from(low.max(0)).unwrap_or(usize::MAX);
        let rest = x.ty.shape[axis].saturating_sub(cropped);
        first.push(cropped.min(x.ty.shape[axis]));
        target.push(shifted.min(ty.shape[axis]));
        extent.push(rest.min(ty.shape[axis].saturating_sub(shifted)));
    }
    let ones = vec![1; extent.len()];
    let (from, from_steps) = region(&x.ty.shape, &first, &ones);
    let (to, to_steps) = region(&ty.shape, &target, &ones);
    place(
        &mut data,
        walk(&extent, &to_steps, to),
        &x.data,
        walk(&extent, &from_steps, from),
    );
    Array::new(ty.clone(), data)
}

pub(super) fn concat(parts: &[Rc<Array>], axis: usize, ty: &TensorType) -> Array {
    let count = ty.numel();
    let mut data = if ty.dtype.is_float() {
        Data::Float(vec![0.0; count])
    } else {
        Data::Int(vec![0; count])
    };
    let steps = strides(&ty.shape);
    let mut start = 0;
    for part in parts {
        let to = walk(&part.ty.shape, &steps, start * steps[axis]);
        place(&mut data, to, &part.data, 0..part.ty.numel());
        start += part.ty.shape[axis] as isize;
    }
    Array::new(ty.clone(), data)
}

pub(super) fn flip(x: &Array, axes: &[usize]) -> Array {
    let mut steps = strides(&x.ty.shape);
    let mut start = 0;
    for &axis in axes {
        start += steps[axis] * (x.ty.shape[axis] as isize - 1);
        steps[axis] = -steps[axis];
    }
    pick(x, &x.ty, &steps, start)
}

pub(super) fn update_slice(x: &Array, update: &Array, starts: &[usize], steps: &[usize]) -> Array {
    let (start, steps) = region(&x.ty.shape, starts, steps);
    let to = walk(&update.ty.shape, &steps, start);
    let data = map_data2!(x.data, update.data, (x, update) => {
        let mut out = x.clone();
        to.zip(update).for_each(|(at, &value)| out[at] = value);
        out
    });
    Array::new(x.ty.clone(), data)
}
