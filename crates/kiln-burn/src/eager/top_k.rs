//! The places of the largest elements along a dimension.
//!
//! burn-flex has no top-k, and its sort leaves the order of equal elements open, but results must not
//! depend on how a program is run. So the order here is stable: largest first, the first one first among
//! equals, NaN before all numbers.

use std::cmp::Ordering;

use burn_flex::{FlexTensor, Layout};
use burn_std::Bytes;
use kiln_graph::DType;

use crate::execute::convert;

/// `int64[.., k, ..]`: the indices along `axis` of the `k` largest elements of `tensor`, largest first. All
/// of them if there are fewer than `k`. None if the element type has no order.
pub(crate) fn top_k_indices(tensor: &FlexTensor, axis: usize, k: usize) -> Option<FlexTensor> {
    let host = convert::to_host(tensor)?;
    let shape = host.ty().shape.clone();
    let extent = shape[axis];
    let k = k.min(extent);
    let inner: usize = shape[axis + 1..].iter().product();
    let outer: usize = shape[..axis].iter().product();
    let mut indices = vec![0i64; outer * k * inner];
    let mut fill = |larger_first: &dyn Fn(usize, usize) -> Ordering| {
        let mut order: Vec<usize> = Vec::with_capacity(extent);
        for lane in 0..outer * inner {
            let (block, offset) = (lane / inner, lane % inner);
            let element = |i: usize| (block * extent + i) * inner + offset;
            order.clear();
            order.extend(0..extent);
            order.sort_by(|&i, &j| larger_first(element(i), element(j)));
            for (rank, &index) in order.iter().take(k).enumerate() {
                indices[(block * k + rank) * inner + offset] = index as i64;
            }
        }
    };
    match host.ty().dtype {
        dtype if dtype.is_float() => {
            let values = host.to_f64s();
            fill(&|i, j| descending(values[i], values[j]));
        }
        DType::U64 => {
            let values = host.to_vec::<u64>()?;
            fill(&|i, j| values[j].cmp(&values[i]));
        }
        dtype if dtype.is_int() => {
            let values = host.to_i64s();
            fill(&|i, j| values[j].cmp(&values[i]));
        }
        _ => return None,
    }
    let shape = convert::burn_shape(&shape.with(axis, k));
    Some(FlexTensor::new(
        Bytes::from_elems(indices),
        Layout::contiguous(shape),
        burn_backend::DType::I64,
    ))
}

/// Larger numbers first, NaN before all.
fn descending(x: f64, y: f64) -> Ordering {
    y.is_nan()
        .cmp(&x.is_nan())
        .then_with(|| y.partial_cmp(&x).unwrap_or(Ordering::Equal))
}
