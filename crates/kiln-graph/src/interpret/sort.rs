//! Sorting along a dimension, whole or the first few.

use std::cmp::Ordering;

use smallvec::{SmallVec, smallvec};

use super::array::{Array, Lanes, Number, map_data};
use crate::DType;

/// NaN above everything and equal to itself; zeros of both signs equal.
fn order<T: Number>(a: T, b: T) -> Ordering {
    match (a.is_nan(), b.is_nan()) {
        (true, true) => Ordering::Equal,
        (true, false) => Ordering::Greater,
        (false, true) => Ordering::Less,
        (false, false) if a.greater(b) => Ordering::Greater,
        (false, false) if b.greater(a) => Ordering::Less,
        (false, false) => Ordering::Equal,
    }
}

/// The first `keep` elements of each sorted lane, and where they were. Stable in both directions.
pub(super) fn sort(
    x: &Array,
    axis: usize,
    descending: bool,
    keep: usize,
    index_dtype: DType,
) -> SmallVec<[Array; 1]> {
    let lanes = Lanes::new(&x.ty.shape, axis);
    let shape = x.ty.shape.with(axis, keep);
    let mut indices = vec![0i128; shape.numel()];
    let data = map_data!(x.data, values => {
        let mut out = vec![Number::ZERO; shape.numel()];
        for outer in 0..lanes.outer {
            for inner in 0..lanes.inner {
                let at = |index: usize| values[(outer * lanes.extent + index) * lanes.inner + inner];
                let mut lane: Vec<usize> = (0..lanes.extent).collect();
                lane.sort_by(|&i, &j| if descending { order(at(j), at(i)) } else { order(at(i), at(j)) });
                for (position, &index) in lane.iter().take(keep).enumerate() {
                    let to = (outer * keep + position) * lanes.inner + inner;
                    (out[to], indices[to]) = (at(index), index as i128);
                }
            }
        }
        out
    });
    let ty = crate::TensorType {
        dtype: x.ty.dtype,
        shape: shape.clone(),
    };
    smallvec![
        Array::new(ty, data),
        Array::from_ints(index_dtype, shape, indices)
    ]
}
