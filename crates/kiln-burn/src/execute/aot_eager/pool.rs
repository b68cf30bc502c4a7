//! Pooling on burn-flex, in one and two dimensions with equal padding on both sides; the rest in the
//! interpreter.

use burn_backend::ops::{FloatTensorOps, IntTensorOps, ModuleOps};
use burn_backend::{IntDType, Slice};
use burn_flex::{Flex, FlexTensor};
use kiln_graph::op::Window;
use kiln_graph::{Graph, NodeData, Op, Shape};
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
    // One dimension is two of which the first has extent 1.
    let planes = |tensor: &FlexTensor| match spatial {
        1 => {
            let shape = tensor.layout().shape().clone();
            tensor.reshape(vec![shape[0], shape[1], 1, shape[2]].into())
        }
        _ => tensor.clone(),
    };
    // In ceil mode burn-flex may give one more window than the primitive.
    let finish = |tensor: FlexTensor| {
        let extents = tensor.layout().shape().clone();
        let last = |back: usize| out[out.rank() - back];
        let rows = if spatial == 2 { last(2) } else { 1 };
        let slices: Vec<Slice> = [extents[0], extents[1], rows, last(1)]
            .map(|limit| slice(0, limit, 1))
            .into();
        Flex::float_slice(tensor, &slices)
            .to_contiguous()
            .reshape(convert::burn_shape(out))
    };
    let x = planes(&operands[0]);
    let results = match &data.op {
        Op::MaxPool(window) => {
            let w = Flat::new(window);
            smallvec![finish(Flex::max_pool2d(
                x,
                w.size,
                w.stride,
                w.padding,
                w.dilation,
                window.ceil_mode
            ))]
        }
        Op::MaxPoolWithIndices { window, dtype } => {
            let w = Flat::new(window);
            let result =
                Flex::max_pool2d_with_indices(x, w.size, w.stride, w.padding, w.dilation, window.ceil_mode);
            let indices = Flex::int_cast(result.indices, IntDType::from(convert::burn_dtype(*dtype)));
            smallvec![finish(result.output), finish(indices)]
        }
        Op::MaxPoolGrad { .. } => {
            // Only the shape of the forward input is read.
            let input = splat(rank_0(dtype, 0i64.into()), &flat_shape(out));
            let indices = Flex::int_cast(planes(&operands[1]), IntDType::I64);
            let result = Flex::max_pool2d_with_indices_backward(
                input,
                [1, 1],
                [1, 1],
                [0, 0],
                [1, 1],
                false,
                x,
                indices,
            );
            smallvec![finish(result.x_grad)]
        }
        Op::AvgPool {
            window,
            count_include_pad,
        } => {
            let w = Flat::new(window);
            let result = Flex::avg_pool2d(
                x,
                w.size,
                w.stride,
                w.padding,
                *count_include_pad,
                window.ceil_mode,
            );
            smallvec![finish(result)]
        }
        // burn-flex divides by the whole window where the primitive leaves out what lies beyond the padded
        // input.
        Op::AvgPoolGrad { window, .. } if window.ceil_mode => return fallback(graph, data, &operands),
        Op::AvgPoolGrad {
            window,
            count_include_pad,
            ..
        } => {
            let w = Flat::new(window);
            let input = splat(rank_0(dtype, 0i64.into()), &flat_shape(out));
            let result =
                Flex::avg_pool2d_backward(input, x, w.size, w.stride, w.padding, *count_include_pad, false);
            smallvec![finish(result)]
        }
        _ => return fallback(graph, data, &operands),
    };
    Ok(results)
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
