//! Reductions, running reductions and sorting on burn-flex.

use burn_backend::IntDType;
use burn_backend::ops::{BoolTensorOps, FloatTensorOps, IntTensorOps};
use burn_flex::{Flex, FlexTensor};
use kiln_graph::op::{ArgReduceOp, ReduceOp};
use kiln_graph::{DType, Graph, NodeData, Op};
use smallvec::{SmallVec, smallvec};

use crate::eager::top_k::top_k_indices;

use super::{ExecuteError, Results, convert, failure, fallback, pointwise};

pub(super) fn compute(
    graph: &Graph,
    data: &NodeData,
    operands: SmallVec<[FlexTensor; 3]>,
) -> Result<Results, ExecuteError> {
    let dtype = graph.dtype(data.inputs[0]);
    let Some(x) = operands.into_iter().next() else {
        return Err(failure(data, "its operand is missing"));
    };
    let out = convert::burn_shape(graph.shape(data.outputs[0]));
    // burn-flex refuses to reduce nothing, and has no unsigned extremes.
    let empty = graph.shape(data.inputs[0]).numel() == 0;
    if empty || dtype.is_unsigned_int() {
        return fallback(graph, data, &[x]);
    }
    let result = match &data.op {
        Op::Reduce { op, axes } => reduce(*op, x, axes, dtype).reshape(out),
        Op::ArgReduce { op, axis, dtype: to } => {
            let indices = match (op, dtype.is_float()) {
                (ArgReduceOp::Max, true) => Flex::float_argmax(x, *axis, IntDType::I64),
                (ArgReduceOp::Min, true) => Flex::float_argmin(x, *axis, IntDType::I64),
                (ArgReduceOp::Max, false) => Flex::int_argmax(x, *axis),
                (ArgReduceOp::Min, false) => Flex::int_argmin(x, *axis),
            };
            let indices = Flex::int_cast(indices, IntDType::from(convert::burn_dtype(*to)));
            indices.reshape(out)
        }
        Op::Cumulative { op, axis } => match (op, dtype.is_float()) {
            (ReduceOp::Sum, true) => Flex::float_cumsum(x, *axis),
            (ReduceOp::Prod, true) => Flex::float_cumprod(x, *axis),
            (ReduceOp::Max, true) => Flex::float_cummax(x, *axis),
            (ReduceOp::Min, true) => Flex::float_cummin(x, *axis),
            (ReduceOp::Sum, false) => Flex::int_cumsum(x, *axis),
            (ReduceOp::Prod, false) => Flex::int_cumprod(x, *axis),
            (ReduceOp::Max, false) => Flex::int_cummax(x, *axis),
            (ReduceOp::Min, false) => Flex::int_cummin(x, *axis),
            (ReduceOp::Any | ReduceOp::All, _) => return fallback(graph, data, &[x]),
        },
        Op::TopK { axis, k, dtype: to } => {
            let Some(indices) = top_k_indices(&x, *axis, *k) else {
                return fallback(graph, data, &[x]);
            };
            let values = match dtype.is_float() {
                true => Flex::float_gather(*axis, x, indices.clone()),
                false => Flex::int_gather(*axis, x, indices.clone()),
            };
            let indices = Flex::int_cast(indices, IntDType::from(convert::burn_dtype(*to)));
            return Ok(smallvec![values, indices]);
        }
        // The interpreter has a stable order of ties and of NaN.
        _ => return fallback(graph, data, &[x]),
    };
    Ok(smallvec![result])
}

/// Reduces one axis after the other, last first, keeping each with extent 1. Half types accumulate in f32.
fn reduce(op: ReduceOp, x: FlexTensor, axes: &[usize], dtype: DType) -> FlexTensor {
    let wide = match op {
        ReduceOp::Sum | ReduceOp::Prod => dtype.compute(),
        _ => dtype,
    };
    let x = pointwise::cast(x, dtype, wide);
    let float = dtype.is_float();
    let all = axes.len() == x.layout().num_dims();
    let result = match op {
        ReduceOp::Sum if all && float => Flex::float_sum(x),
        ReduceOp::Prod if all && float => Flex::float_prod(x),
        _ => axes.iter().rev().fold(x, |x, &axis| match op {
            ReduceOp::Sum if float => Flex::float_sum_dim(x, axis),
            ReduceOp::Prod if float => Flex::float_prod_dim(x, axis),
            ReduceOp::Max if float => Flex::float_max_dim(x, axis),
            ReduceOp::Min if float => Flex::float_min_dim(x, axis),
            ReduceOp::Sum => Flex::int_sum_dim(x, axis),
            ReduceOp::Prod => Flex::int_prod_dim(x, axis),
            ReduceOp::Max => Flex::int_max_dim(x, axis),
            ReduceOp::Min => Flex::int_min_dim(x, axis),
            ReduceOp::Any => Flex::bool_any_dim(x, axis),
            ReduceOp::All => Flex::bool_all_dim(x, axis),
        }),
    };
    pointwise::cast(result, wide, dtype)
}
