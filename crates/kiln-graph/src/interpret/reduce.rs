//! Reductions, positions of extremes, running reductions.

use super::array::{Array, Data, Lanes, Number, map_data, strides, walk};
use crate::op::{ArgReduceOp, ReduceOp};
use crate::{DType, TensorType};

/// The neutral element of `op` and how it combines two elements.
fn monoid<T: Number>(op: ReduceOp, dtype: DType) -> (T, fn(T, T) -> T) {
    let (lowest, highest) = T::extremes(dtype);
    match op {
        ReduceOp::Sum => (T::ZERO, T::add),
        ReduceOp::Prod => (T::ONE, T::mul),
        ReduceOp::Max => (lowest, T::max),
        ReduceOp::Min => (highest, T::min),
        ReduceOp::Any => (T::ZERO, T::max),
        ReduceOp::All => (T::ONE, T::min),
    }
}

pub(super) fn reduce(op: ReduceOp, x: &Array, axes: &[usize], ty: &TensorType) -> Array {
    let shape = &x.ty.shape;
    let all = strides(shape);
    // The dimensions that stay, then those that go: each result is a run of consecutive steps of the walk.
    let order: Vec<usize> = (0..shape.rank())
        .filter(|axis| !axes.contains(axis))
        .chain(axes.iter().copied())
        .collect();
    let extents: Vec<usize> = order.iter().map(|&axis| shape[axis]).collect();
    let steps: Vec<isize> = order.iter().map(|&axis| all[axis]).collect();
    let run: usize = axes.iter().map(|&axis| shape[axis]).product();
    let mut positions = walk(&extents, &steps, 0);
    let data = map_data!(x.data, values => {
        let (neutral, combine) = monoid(op, x.ty.dtype);
        (0..ty.numel())
            .map(|_| positions.by_ref().take(run).fold(neutral, |acc, at| combine(acc, values[at])))
            .collect()
    });
    Array::new(ty.clone(), data)
}

pub(super) fn arg_reduce(op: ArgReduceOp, x: &Array, axis: usize, ty: &TensorType) -> Array {
    fn best<T: Number>(op: ArgReduceOp, lane: impl Iterator<Item = T>) -> i128 {
        let mut best: Option<(usize, T)> = None;
        for (index, value) in lane.enumerate() {
            let better = match best {
                None => true,
                Some((_, held)) if held.is_nan() => false,
                Some((_, held)) => {
                    value.is_nan()
                        || match op {
                            ArgReduceOp::Max => value.greater(held),
                            ArgReduceOp::Min => held.greater(value),
                        }
                }
            };
            if better {
                best = Some((index, value));
            }
        }
        best.map_or(0, |(index, _)| index as i128)
    }
    let lanes = Lanes::new(&x.ty.shape, axis);
    let at = |start: usize| (0..lanes.extent).map(move |index| start + index * lanes.inner);
    let indices = match &x.data {
        Data::Float(values) => lanes
            .starts()
            .map(|start| best(op, at(start).map(|at| values[at])))
            .collect(),
        Data::Int(values) => lanes
            .starts()
            .map(|start| best(op, at(start).map(|at| values[at])))
            .collect(),
    };
    Array::new(ty.clone(), Data::Int(indices))
}

pub(super) fn cumulative(op: ReduceOp, x: &Array, axis: usize) -> Array {
    let lanes = Lanes::new(&x.ty.shape, axis);
    let data = map_data!(x.data, values => {
        let (neutral, combine) = monoid(op, x.ty.dtype);
        let mut out = values.clone();
        for start in lanes.starts() {
            let mut acc = neutral;
            for index in 0..lanes.extent {
                let at = start + index * lanes.inner;
                acc = combine(acc, values[at]);
                out[at] = acc;
            }
        }
        out
    });
    Array::new(x.ty.clone(), data)
}
