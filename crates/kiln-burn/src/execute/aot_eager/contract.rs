//! Matrix products and convolutions on burn-flex.

use burn_backend::ops::{ConvOptions, ConvTransposeOptions, FloatTensorOps, IntTensorOps, ModuleOps};
use burn_backend::{FloatDType, Slice};
use burn_flex::{Flex, FlexDevice, FlexTensor};
use kiln_graph::op::{ConvDims, DotDims};
use kiln_graph::{DType, Graph, NodeData, Op, Shape};
use smallvec::{SmallVec, smallvec};

use super::movement::{slice, splat};
use super::pointwise::cast;
use super::{ExecuteError, Results, convert, failure, fallback, rank_0};

pub(super) fn compute(
    graph: &Graph,
    data: &NodeData,
    operands: SmallVec<[FlexTensor; 3]>,
) -> Result<Results, ExecuteError> {
    let (given, dtype) = (graph.dtype(data.inputs[0]), graph.dtype(data.outputs[0]));
    let out = graph.shape(data.outputs[0]);
    let mut operands = operands.into_iter();
    let (Some(a), Some(b)) = (operands.next(), operands.next()) else {
        return Err(failure(data, "an operand is missing"));
    };
    // Sums over nothing are zero; burn-flex's kernels need at least one term.
    let empty = graph.shape(data.inputs[0]).numel() == 0 || graph.shape(data.inputs[1]).numel() == 0;
    if empty {
        let zero = rank_0(dtype, 0i64.into());
        return Ok(smallvec![splat(zero, out).to_contiguous()]);
    }
    let supported = match data.op {
        Op::DotGeneral(_) => dtype.is_float() || matches!(dtype, DType::I32 | DType::I64),
        _ => dtype.is_float(),
    };
    if !supported {
        return fallback(graph, data, &[a, b]);
    }
    // If the result is not rounded to the operands' type, operands of the sum's type give the same result.
    let (a, b) = match given == dtype {
        true => (a, b),
        false => (cast(a, given, dtype), cast(b, given, dtype)),
    };
    let result = match &data.op {
        Op::DotGeneral(dims) => dot(dims, a, b, dtype).reshape(convert::burn_shape(out)),
        Op::Conv(conv) => {
            let (a, conv) = symmetric(a, conv, dtype);
            forward(&conv, a, b)
        }
        Op::ConvInputGrad { conv, input } => input_grad(conv, input, a, b),
        Op::ConvWeightGrad { conv, kernel } => {
            let (a, conv) = symmetric(a, conv, dtype);
            weight_grad(&conv, kernel, out, a, b, dtype)
        }
        _ => return Err(failure(data, "it is no contraction")),
    };
    Ok(smallvec![result])
}

/// `[batch, free, contracted] x [batch, contracted, free]`.
fn dot(dims: &DotDims, a: FlexTensor, b: FlexTensor, dtype: DType) -> FlexTensor {
    let product = |axes: &[usize], tensor: &FlexTensor| -> usize {
        axes.iter().map(|&axis| tensor.layout().shape()[axis]).product()
    };
    let free_a = DotDims::free(a.layout().num_dims(), &dims.a_batch, &dims.a_contract);
    let free_b = DotDims::free(b.layout().num_dims(), &dims.b_batch, &dims.b_contract);
    let batch = product(&dims.a_batch, &a);
    let (m, k, n) = (
        product(&free_a, &a),
        product(&dims.a_contract, &a),
        product(&free_b, &b),
    );
    let perm_a: Vec<usize> = dims
        .a_batch
        .iter()
        .chain(&free_a)
        .chain(&dims.a_contract)
        .copied()
        .collect();
    let perm_b: Vec<usize> = dims
        .b_batch
        .iter()
        .chain(&dims.b_contract)
        .chain(&free_b)
        .copied()
        .collect();
    let a = matrices(a.permute(&perm_a), [batch, m, k]);
    let b = matrices(b.permute(&perm_b), [batch, k, n]);
    if dtype.is_float() {
        Flex::float_matmul(a, b)
    } else {
        Flex::int_matmul(a, b)
    }
}

/// A stack of matrices; a single transposed matrix stays a view, which burn-flex multiplies as it is.
fn matrices(x: FlexTensor, shape: [usize; 3]) -> FlexTensor {
    let extents = x.layout().shape().clone();
    if shape[0] == 1 && extents.num_dims() == 2 {
        return x;
    }
    if extents[..] == shape {
        return x;
    }
    x.reshape(shape.to_vec().into())
}

/// The same convolution with equal padding on both sides: unequal parts are padded beforehand.
fn symmetric(x: FlexTensor, conv: &ConvDims, dtype: DType) -> (FlexTensor, ConvDims) {
    if conv.pad_low == conv.pad_high {
        return (x, conv.clone());
    }
    let extents = x.layout().shape().clone();
    let mut shape = Shape::new(extents.iter().copied());
    let mut place = vec![slice(0, extents[0], 1), slice(0, extents[1], 1)];
    for axis in 0..conv.pad_low.len() {
        let (low, high) = (conv.pad_low[axis], conv.pad_high[axis]);
        let extent = extents[axis + 2];
        shape[axis + 2] = low + extent + high;
        place.push(slice(low, low + extent, 1));
    }
    let zeros = splat(rank_0(dtype, 0i64.into()), &shape).to_contiguous();
    let x = Flex::float_slice_assign(zeros, &place, x);
    let mut conv = conv.clone();
    conv.pad_low.fill(0);
    conv.pad_high.fill(0);
    (x, conv)
}

/// The first `N` of a list that has at least as many.
fn array<const N: usize>(list: &[usize]) -> [usize; N] {
    std::array::from_fn(|axis| list[axis])
}

fn options<const N: usize>(conv: &ConvDims) -> ConvOptions<N> {
    ConvOptions {
        stride: array(&conv.stride),
        padding: array(&conv.pad_low),
        dilation: array(&conv.dilation),
        groups: conv.groups,
    }
}

fn forward(conv: &ConvDims, x: FlexTensor, w: FlexTensor) -> FlexTensor {
    match conv.stride.len() {
        1 => Flex::conv1d(x, w, None, options(conv)),
        2 => Flex::conv2d(x, w, None, options(conv)),
        _ => Flex::conv3d(x, w, None, options(conv)),
    }
}

/// The transposed convolution, cut to the part that is the gradient.
fn input_grad(conv: &ConvDims, input: &[usize], grad: FlexTensor, w: FlexTensor) -> FlexTensor {
    let spatial = conv.stride.len();
    let (out, kernel) = (grad.layout().shape().clone(), w.layout().shape().clone());
    // Extent that the output positions reach, padding included.
    let reach: Vec<usize> = (0..spatial)
        .map(|axis| {
            (out[axis + 2] - 1) * conv.stride[axis] + conv.dilation[axis] * (kernel[axis + 2] - 1) + 1
        })
        .collect();
    let direct = (0..spatial).all(|axis| input[axis] + 2 * conv.pad_low[axis] >= reach[axis]);
    if direct {
        let extra: Vec<usize> = (0..spatial)
            .map(|axis| input[axis] + 2 * conv.pad_low[axis] - reach[axis])
            .collect();
        return transposed(conv, &conv.pad_low, &extra, grad, w);
    }
    let zeros = vec![0; spatial];
    let extra: Vec<usize> = (0..spatial)
        .map(|axis| (conv.pad_low[axis] + input[axis]).saturating_sub(reach[axis]))
        .collect();
    let full = transposed(conv, &zeros, &extra, grad, w);
    let extents = full.layout().shape().clone();
    let mut part: Vec<Slice> = vec![slice(0, extents[0], 1), slice(0, extents[1], 1)];
    part.extend((0..spatial).map(|axis| slice(conv.pad_low[axis], conv.pad_low[axis] + input[axis], 1)));
    Flex::float_slice(full, &part)
}

fn transposed(
    conv: &ConvDims,
    padding: &[usize],
    padding_out: &[usize],
    x: FlexTensor,
    w: FlexTensor,
) -> FlexTensor {
    fn options<const N: usize>(
        conv: &ConvDims,
        padding: &[usize],
        padding_out: &[usize],
    ) -> ConvTransposeOptions<N> {
        ConvTransposeOptions {
            stride: array(&conv.stride),
            padding: array(padding),
            padding_out: array(padding_out),
            dilation: array(&conv.dilation),
            groups: conv.groups,
        }
    }
    match conv.stride.len() {
        1 => Flex::conv_transpose1d(x, w, None, options(conv, padding, padding_out)),
        2 => Flex::conv_transpose2d(x, w, None, options(conv, padding, padding_out)),
        _ => Flex::conv_transpose3d(x, w, None, options(conv, padding, padding_out)),
    }
}

/// burn-flex reads only shape and type of the weight.
fn weight_grad(
    conv: &ConvDims,
    kernel: &[usize],
    out: &Shape,
    x: FlexTensor,
    grad: FlexTensor,
    dtype: DType,
) -> FlexTensor {
    let dtype = FloatDType::from(convert::burn_dtype(dtype));
    let weight = Flex::float_zeros(convert::burn_shape(out), &FlexDevice, dtype);
    match kernel.len() {
        1 => Flex::conv1d_weight_backward(x, weight, grad, options(conv)),
        2 => Flex::conv2d_weight_backward(x, weight, grad, options(conv)),
        _ => Flex::conv3d_weight_backward(x, weight, grad, options(conv)),
    }
}
