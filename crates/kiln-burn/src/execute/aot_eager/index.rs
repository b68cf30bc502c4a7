//! Gathers and scatters on burn-flex. The indices are known to be in range.

use burn_backend::DType as BurnDType;
use burn_backend::ops::{BoolTensorOps, FloatTensorOps, IntTensorOps};
use burn_backend::tensor::IndexingUpdateOp;
use burn_flex::{Flex, FlexTensor};
use kiln_graph::op::ScatterMode;
use kiln_graph::{DType, Graph, NodeData, Op, Shape};
use smallvec::{SmallVec, smallvec};

use super::movement::slice;
use super::{ExecuteError, Results, convert, failure, fallback};

pub(super) fn compute(
    graph: &Graph,
    data: &NodeData,
    operands: SmallVec<[FlexTensor; 3]>,
) -> Result<Results, ExecuteError> {
    let dtype = graph.dtype(data.inputs[0]);
    let shape = graph.shape(data.inputs[0]);
    let of_indices = graph.shape(data.inputs[1]);
    let mut operands = operands.into_iter();
    let (Some(x), Some(indices)) = (operands.next(), operands.next()) else {
        return Err(failure(data, "an operand is missing"));
    };
    let axis = match data.op {
        Op::Gather { axis }
        | Op::Scatter { axis, .. }
        | Op::IndexSelect { axis }
        | Op::IndexPut { axis, .. } => axis,
        _ => return Err(failure(data, "it has no index")),
    };
    let result = match (&data.op, operands.next()) {
        (Op::Gather { .. }, _) => {
            // burn-flex wants the other extents equal; the primitive lets the indices cover less.
            let x = narrow_to(x, of_indices, axis);
            match dtype {
                DType::Bool => Flex::bool_gather(axis, x, indices),
                _ if dtype.is_float() => Flex::float_gather(axis, x, indices),
                _ => Flex::int_gather(axis, x, indices),
            }
        }
        (Op::IndexSelect { .. }, _) => match dtype {
            DType::Bool => Flex::bool_select(x, axis, indices),
            _ if dtype.is_float() => Flex::float_select(x, axis, indices),
            _ => Flex::int_select(x, axis, indices),
        },
        (Op::Scatter { mode, .. }, Some(updates)) => {
            let covers = (0..shape.rank()).all(|other| other == axis || shape[other] == of_indices[other]);
            match (mode, covers) {
                (ScatterMode::Add, true) if dtype.is_float() => {
                    Flex::float_scatter_add(axis, x, indices, updates)
                }
                (ScatterMode::Add, true) if dtype.is_int() => {
                    Flex::int_scatter_add(axis, x, indices, updates)
                }
                _ => return fallback(graph, data, &[x, indices, updates]),
            }
        }
        (Op::IndexPut { mode, .. }, Some(updates)) => match mode {
            ScatterMode::Add if dtype.is_float() => Flex::float_select_add(x, axis, indices, updates),
            ScatterMode::Add if dtype.is_int() => Flex::int_select_add(x, axis, indices, updates),
            ScatterMode::Assign | ScatterMode::Mul if dtype != DType::Bool => {
                put(x, axis, indices, updates, dtype, *mode)
            }
            _ => return fallback(graph, data, &[x, indices, updates]),
        },
        _ => return Err(failure(data, "an operand is missing")),
    };
    // burn-flex gives selected truth values as bytes.
    let result = match result.dtype() {
        BurnDType::U8 if dtype == DType::Bool => FlexTensor::from_arc(
            result.data_arc(),
            result.layout().clone(),
            convert::burn_dtype(dtype),
        ),
        _ => result,
    };
    Ok(smallvec![result])
}

/// The part of `x` that indices of shape `indices` can reach.
fn narrow_to(x: FlexTensor, indices: &Shape, axis: usize) -> FlexTensor {
    let extents = x.layout().shape().clone();
    let slices: Vec<_> = (0..indices.rank())
        .map(|dim| slice(0, if dim == axis { extents[dim] } else { indices[dim] }, 1))
        .collect();
    Flex::float_slice(x, &slices)
}

/// Whole slices combined into `x` along `axis`: rows of a matrix after moving the axis to the front.
fn put(
    x: FlexTensor,
    axis: usize,
    indices: FlexTensor,
    updates: FlexTensor,
    dtype: DType,
    mode: ScatterMode,
) -> FlexTensor {
    let rank = x.layout().num_dims();
    let mut front: Vec<usize> = (0..rank).filter(|&dim| dim != axis).collect();
    front.insert(0, axis);
    let mut back = vec![0; rank];
    front.iter().enumerate().for_each(|(to, &from)| back[from] = to);
    let count = indices.layout().num_elements();
    let indices = indices.reshape(vec![count, 1].into());
    let (x, updates) = (x.permute(&front), updates.permute(&front));
    let update = match mode {
        ScatterMode::Mul => IndexingUpdateOp::Mul,
        _ => IndexingUpdateOp::Assign,
    };
    let out = if dtype.is_float() {
        Flex::float_scatter_nd(x, indices, updates, update)
    } else {
        Flex::int_scatter_nd(x, indices, updates, update)
    };
    out.permute(&back)
}
