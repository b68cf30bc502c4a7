//! Pooling on burn-flex, in one and two dimensions with equal padding on both sides; the rest in the
//! interpreter.

use burn_backend::ops::{FloatTensorOps, IntTensorOps, ModuleOps};
use burn_backend::{IntDType, Slice};
use burn_flex::{Flex, FlexTensor};
use kiln_graph::op::Window;
use kiln_graph::{DType, Graph, NodeData, Op, Shape};
use smallvec::{SmallVec, smallvec};

use super::movement::{slice, splat};
use super::{ExecuteError, Results, convert, fallback, rank_0};

pub(super) fn compute(
    graph: &Graph,
    data: &NodeData,
    operands: SmallVec<[FlexTensor; 3]>,
) -> Result<Results, ExecuteError> {
    let dtype = graph.dtype(data.inputs[0]);
    let out = graph.shape(data.outputs[0]);
    let spatial = out.rank() - 2;
    let plain = match &data.op {
        Op::MaxPool(w)
        | Op::MaxPoolWithIndices { window: w, .. }
        | Op::AvgPool { window: w, .. }
        | Op::AvgPoolGrad { window: w, .. } => w.pad_low == w.pad_high,
        _ => true,
    };
    let empty = operands.iter().any(|tensor| tensor.layout().num_elements() == 0);
    if !plain || empty || !dtype.is_float() || !(1..=2).contains(&spatial) {
        return fallback(graph, data, &operands);
    }
    let x = planes(&operands[0]);
    let results: Results = match &data.op {
        Op::MaxPool(window) => smallvec![max(x, window)],
        Op::MaxPoolWithIndices { window, dtype } => max_with_indices(x, window, *dtype),
        Op::MaxPoolGrad { .. } => smallvec![max_grad(x, planes(&operands[1]), like(dtype, out))],
        Op::AvgPool {
            window,
            count_include_pad,
        } => smallvec![mean(x, window, *count_include_pad)],
        // burn-flex divides by the whole window where the primitive leaves out what lies beyond the padded
        // input.
        Op::AvgPoolGrad { window, .. } if window.ceil_mode => return fallback(graph, data, &operands),
        Op::AvgPoolGrad {
            window,
            count_include_pad,
            ..
        } => smallvec![mean_grad(x, window, *count_include_pad, like(dtype, out))],
        _ => return fallback(graph, data, &operands),
    };
    Ok(results.into_iter().map(|result| of_shape(result, out)).collect())
}

fn max(x: FlexTensor, window: &Window) -> FlexTensor {
    let w = Flat::new(window);
    Flex::max_pool2d(x, w.size, w.stride, w.padding, w.dilation, window.ceil_mode)
}

fn max_with_indices(x: FlexTensor, window: &Window, dtype: DType) -> Results {
    let w = Flat::new(window);
    let result = Flex::max_pool2d_with_indices(x, w.size, w.stride, w.padding, w.dilation, window.ceil_mode);
    let indices = Flex::int_cast(result.indices, IntDType::from(convert::burn_dtype(dtype)));
    smallvec![result.output, indices]
}

/// `grad` at the elements that `indices` has chosen. Only the shape of `input` is read.
fn max_grad(grad: FlexTensor, indices: FlexTensor, input: FlexTensor) -> FlexTensor {
    let indices = Flex::int_cast(indices, IntDType::I64);
    let (one, zero) = ([1, 1], [0, 0]);
    let result = Flex::max_pool2d_with_indices_backward(input, one, one, zero, one, false, grad, indices);
    result.x_grad
}

fn mean(x: FlexTensor, window: &Window, count_include_pad: bool) -> FlexTensor {
    let w = Flat::new(window);
    Flex::avg_pool2d(
        x,
        w.size,
        w.stride,
        w.padding,
        count_include_pad,
        window.ceil_mode,
    )
}

/// `grad` spread over the windows of an input with the shape of `input`.
fn mean_grad(grad: FlexTensor, window: &Window, count_include_pad: bool, input: FlexTensor) -> FlexTensor {
    let w = Flat::new(window);
    Flex::avg_pool2d_backward(input, grad, w.size, w.stride, w.padding, count_include_pad, false)
}

/// A tensor with two dimensions after batch and channels: one dimension is two of which the first has extent
/// 1.
fn planes(tensor: &FlexTensor) -> FlexTensor {
    let shape = tensor.layout().shape();
    match **shape {
        [batch, channels, width] => tensor.reshape(vec![batch, channels, 1, width].into()),
        _ => tensor.clone(),
    }
}

/// The result `tensor` of burn-flex as one of shape `out`. In ceil mode burn-flex may give one more window
/// than the primitive.
fn of_shape(tensor: FlexTensor, out: &Shape) -> FlexTensor {
    let flat = flat_shape(out);
    let slices: Vec<Slice> = flat.dims().iter().map(|&limit| slice(0, limit, 1)).collect();
    Flex::float_slice(tensor, &slices)
        .to_contiguous()
        .reshape(convert::burn_shape(out))
}

/// Zeros in the place of the forward input of shape `shape`.
fn like(dtype: DType, shape: &Shape) -> FlexTensor {
    splat(rank_0(dtype, 0i64.into()), &flat_shape(shape))
}

/// `[n, c, w]` as `[n, c, 1, w]`.
fn flat_shape(shape: &Shape) -> Shape {
    match shape.rank() {
        3 => Shape::from([shape[0], shape[1], 1, shape[2]]),
        _ => shape.clone(),
    }
}

/// A window in two dimensions.
struct Flat {
    size: [usize; 2],
    stride: [usize; 2],
    padding: [usize; 2],
    dilation: [usize; 2],
}

impl Flat {
    fn new(window: &Window) -> Self {
        let pair = |list: &[usize], one: usize| match *list {
            [only] => [one, only],
            [first, second, ..] => [first, second],
            [] => [one, one],
        };
        Self {
            size: pair(&window.size, 1),
            stride: pair(&window.stride, 1),
            padding: pair(&window.pad_low, 0),
            dilation: pair(&window.dilation, 1),
        }
    }
}
