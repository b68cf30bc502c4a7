//! Primitives that move or repeat elements. They do not interpret elements, so burn-flex's functions for
//! floats serve every type.

use burn_backend::ops::{FloatTensorOps, IntTensorOps};
use burn_backend::{IntDType, Slice};
use burn_flex::{Flex, FlexDevice, FlexTensor};
use kiln_graph::op::SignedDims;
use kiln_graph::{DType, Graph, NodeData, Op, Shape};
use smallvec::{SmallVec, smallvec};

use super::{ExecuteError, Results, convert, failure, pointwise};

pub(super) fn compute(
    graph: &Graph,
    data: &NodeData,
    operands: SmallVec<[FlexTensor; 3]>,
) -> Result<Results, ExecuteError> {
    let out = graph.shape(data.outputs[0]);
    let mut operands = operands.into_iter();
    let result = match (&data.op, operands.next(), operands.next()) {
        (Op::Iota { dtype, shape, axis }, ..) => iota(*dtype, shape, *axis),
        (Op::Reshape(shape), Some(x), _) => x.reshape(convert::burn_shape(shape)),
        (Op::Transpose(perm), Some(x), _) => x.permute(perm),
        (Op::Broadcast { shape, dims }, Some(x), _) => {
            let mut extents = vec![1; shape.rank()];
            for (&dim, &extent) in dims.iter().zip(x.layout().shape().iter()) {
                extents[dim] = extent;
            }
            let x = x.reshape(extents.into());
            Flex::float_expand(x, convert::burn_shape(shape))
        }
        (
            Op::Slice {
                starts,
                limits,
                steps,
            },
            Some(x),
            _,
        ) => {
            let slices: Vec<Slice> = (0..starts.len())
                .map(|axis| slice(starts[axis], limits[axis], steps[axis]))
                .collect();
            Flex::float_slice(x, &slices)
        }
        (Op::Pad { low, high }, Some(x), Some(value)) => pad(x, value, low, high, out),
        (Op::Concat { axis }, Some(first), Some(second)) => {
            let tensors = [first, second].into_iter().chain(operands).collect();
            Flex::float_cat(tensors, *axis)
        }
        (Op::Concat { .. }, Some(only), None) => only,
        (Op::Flip(axes), Some(x), _) => Flex::float_flip(x, axes),
        (Op::UpdateSlice { starts, steps }, Some(x), Some(update)) => {
            if update.layout().num_elements() == 0 {
                return Ok(smallvec![x]);
            }
            let extents = update.layout().shape().clone();
            let slices: Vec<Slice> = (0..starts.len())
                .map(|axis| {
                    let limit = starts[axis] + (extents[axis] - 1) * steps[axis] + 1;
                    slice(starts[axis], limit, steps[axis])
                })
                .collect();
            Flex::float_slice_assign(x, &slices, update)
        }
        _ => return Err(failure(data, "an operand is missing")),
    };
    Ok(smallvec![result])
}

/// A rank-0 tensor repeated to `shape`, without copying.
pub(super) fn splat(scalar: FlexTensor, shape: &Shape) -> FlexTensor {
    if shape.rank() == 0 {
        return scalar;
    }
    let ones = scalar.reshape(vec![1; shape.rank()].into());
    Flex::float_expand(ones, convert::burn_shape(shape))
}

/// `start..limit` by `step` in burn-flex's terms.
pub(super) fn slice(start: usize, limit: usize, step: usize) -> Slice {
    Slice::new(start as isize, Some(limit as isize), step as isize)
}

fn iota(dtype: DType, shape: &Shape, axis: usize) -> FlexTensor {
    let extent = shape[axis];
    let count = Flex::int_arange(0..extent as i64, &FlexDevice, IntDType::I64);
    let count = pointwise::cast(count, DType::I64, dtype);
    let mut extents = vec![1; shape.rank()];
    extents[axis] = extent;
    Flex::float_expand(count.reshape(extents.into()), convert::burn_shape(shape))
}

/// Crops where an amount is negative, and writes what is left into a tensor full of `value`.
fn pad(x: FlexTensor, value: FlexTensor, low: &SignedDims, high: &SignedDims, out: &Shape) -> FlexTensor {
    let extents = x.layout().shape().clone();
    let crop: Vec<Slice> = (0..low.len())
        .map(|axis| {
            let start = (-low[axis]).max(0) as usize;
            let limit = extents[axis] as i64 + high[axis].min(0);
            slice(start, (limit.max(0) as usize).max(start), 1)
        })
        .collect();
    let x = Flex::float_slice(x, &crop);
    let target = splat(value, out).to_contiguous();
    if x.layout().num_elements() == 0 {
        return target;
    }
    let extents = x.layout().shape().clone();
    let place: Vec<Slice> = (0..low.len())
        .map(|axis| {
            let start = low[axis].max(0) as usize;
            slice(start, start + extents[axis], 1)
        })
        .collect();
    Flex::float_slice_assign(target, &place, x)
}
