//! Lowering of convolutions, transposed convolutions and their gradients, in one to three dimensions.

use burn_ir::{ModuleOperationIr, TensorIr};
use kiln_graph::op::{BinaryOp, ConvDims, Dims, ReduceOp, SignedDims};
use kiln_graph::{Op, Value};

use super::lower::{Done, Fault, Lower, shape_of, tensor_type};

/// The attributes of a recorded convolution; padding is the same on both sides.
macro_rules! dims {
    ($options:expr) => {
        ConvDims {
            stride: Dims::from_slice(&$options.stride),
            pad_low: Dims::from_slice(&$options.padding),
            pad_high: Dims::from_slice(&$options.padding),
            dilation: Dims::from_slice(&$options.dilation),
            groups: $options.groups,
            result: None,
        }
    };
}

/// Lowers one of the convolutions; other operations are the caller's fault and reported as such.
pub(super) fn lower(l: &mut Lower, op: &ModuleOperationIr) -> Done {
    use ModuleOperationIr as M;
    match op {
        M::Conv1d(d) => forward(l, dims!(d.options), &d.x, &d.weight, d.bias.as_ref(), &d.out),
        M::Conv2d(d) => forward(l, dims!(d.options), &d.x, &d.weight, d.bias.as_ref(), &d.out),
        M::Conv3d(d) => forward(l, dims!(d.options), &d.x, &d.weight, d.bias.as_ref(), &d.out),
        M::Conv1dXBackward(d) => x_backward(l, dims!(d.options), &d.weight, &d.output_grad, &d.out),
        M::Conv2dXBackward(d) => x_backward(l, dims!(d.options), &d.weight, &d.output_grad, &d.out),
        M::Conv3dXBackward(d) => x_backward(l, dims!(d.options), &d.weight, &d.output_grad, &d.out),
        M::Conv1dWeightBackward(d) => weight_backward(l, dims!(d.options), &d.x, &d.output_grad, &d.out),
        M::Conv2dWeightBackward(d) => weight_backward(l, dims!(d.options), &d.x, &d.output_grad, &d.out),
        M::Conv3dWeightBackward(d) => weight_backward(l, dims!(d.options), &d.x, &d.output_grad, &d.out),
        M::Conv1dBiasBackward(d) => bias_backward(l, &d.output_grad, &d.out),
        M::Conv2dBiasBackward(d) => bias_backward(l, &d.output_grad, &d.out),
        M::Conv3dBiasBackward(d) => bias_backward(l, &d.output_grad, &d.out),
        M::ConvTranspose1d(d) => {
            let (conv, extra) = (dims!(d.options), d.options.padding_out);
            transposed(l, conv, &extra, &d.x, &d.weight, d.bias.as_ref(), &d.out)
        }
        M::ConvTranspose2d(d) => {
            let (conv, extra) = (dims!(d.options), d.options.padding_out);
            transposed(l, conv, &extra, &d.x, &d.weight, d.bias.as_ref(), &d.out)
        }
        M::ConvTranspose3d(d) => {
            let (conv, extra) = (dims!(d.options), d.options.padding_out);
            transposed(l, conv, &extra, &d.x, &d.weight, d.bias.as_ref(), &d.out)
        }
        _ => Err(Fault::Unsupported("it is no convolution".into())),
    }
}

fn forward(
    l: &mut Lower,
    conv: ConvDims,
    x: &TensorIr,
    weight: &TensorIr,
    bias: Option<&TensorIr>,
    out: &TensorIr,
) -> Done {
    let (x, weight) = (l.input(x)?, l.input(weight)?);
    let result = l.add(Op::Conv(conv), &[x, weight])?;
    finish(l, result, bias, out)
}

/// Adds the bias, one number per channel, and defines the result.
fn finish(l: &mut Lower, result: Value, bias: Option<&TensorIr>, out: &TensorIr) -> Done {
    let Some(bias) = bias else {
        return l.define(out, result);
    };
    let bias = l.input(bias)?;
    let bias = l.broadcast(bias, &shape_of(out), &[1])?;
    let result = l.binary(BinaryOp::Add, result, bias)?;
    l.define(out, result)
}

fn x_backward(l: &mut Lower, conv: ConvDims, weight: &TensorIr, grad: &TensorIr, out: &TensorIr) -> Done {
    let (weight, grad) = (l.input(weight)?, l.input(grad)?);
    let input = Dims::from_slice(&shape_of(out)[2..]);
    let dx = l.add(Op::ConvInputGrad { conv, input }, &[grad, weight])?;
    l.define(out, dx)
}

fn weight_backward(l: &mut Lower, conv: ConvDims, x: &TensorIr, grad: &TensorIr, out: &TensorIr) -> Done {
    let (x, grad) = (l.input(x)?, l.input(grad)?);
    let kernel = Dims::from_slice(&shape_of(out)[2..]);
    let dw = l.add(Op::ConvWeightGrad { conv, kernel }, &[x, grad])?;
    l.define(out, dw)
}

fn bias_backward(l: &mut Lower, grad: &TensorIr, out: &TensorIr) -> Done {
    let grad = l.input(grad)?;
    let axes: Dims = (0..l.shape(grad).rank()).filter(|&axis| axis != 1).collect();
    let db = l.reduce(ReduceOp::Sum, grad, &axes)?;
    l.define_reshaped(out, db)
}

/// A transposed convolution is the input gradient of the convolution with the same attributes, of which `x`
/// is the output gradient. `padding_out` asks for more of that input at its end: rows that the padding would
/// have cut off, and where the padding is used up, rows that nothing reaches, which are zero.
fn transposed(
    l: &mut Lower,
    mut conv: ConvDims,
    padding_out: &[usize],
    x: &TensorIr,
    weight: &TensorIr,
    bias: Option<&TensorIr>,
    out: &TensorIr,
) -> Done {
    let (x, weight) = (l.input(x)?, l.input(weight)?);
    let ty = tensor_type(out)?;
    let mut input = Dims::from_slice(&ty.shape[2..]);
    let mut beyond = SignedDims::from_elem(0, ty.shape.rank());
    for (axis, &extra) in padding_out.iter().enumerate() {
        let regained = extra.min(conv.pad_high[axis]);
        conv.pad_high[axis] -= regained;
        input[axis] -= extra - regained;
        beyond[axis + 2] = (extra - regained) as i64;
    }
    let mut result = l.add(Op::ConvInputGrad { conv, input }, &[x, weight])?;
    if beyond.iter().any(|&amount| amount > 0) {
        let zero = l.constant(0i64, ty.dtype)?;
        let low = SignedDims::from_elem(0, ty.shape.rank());
        let op = Op::Pad { low, high: beyond };
        result = l.add(op, &[result, zero])?;
    }
    finish(l, result, bias, out)
}
