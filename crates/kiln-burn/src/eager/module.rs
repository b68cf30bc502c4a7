//! Operations of neural network modules: linear, convolution, pooling, interpolation, attention, losses.

use burn_backend::IntDType;
use burn_backend::ops::{IntTensorOps, ModuleOps};
use burn_flex::Flex;
use burn_ir::{
    AttentionOpIr, CtcLossBackwardOpIr, CtcLossOpIr, DeformConv2dBackwardOpIr, DeformConv2dOpIr,
    ModuleOperationIr,
};

use super::indices::check;
use super::{Operands, OperationError, TensorStore};

/// Runs a convolution: `conv!(function, store, descriptor)`.
macro_rules! conv {
    ($f:path, $s:ident, $d:ident) => {{
        let (x, weight) = ($s.take(&$d.x)?, $s.take(&$d.weight)?);
        let bias = $s.take_optional(&$d.bias)?;
        $s.put(&$d.out, $f(x, weight, bias, $d.options.clone().into()));
    }};
}

/// Runs the gradient of a convolution with respect to its input or weight.
macro_rules! conv_backward {
    ($f:path, $s:ident, $d:ident) => {{
        let (x, weight, grad) = ($s.take(&$d.x)?, $s.take(&$d.weight)?, $s.take(&$d.output_grad)?);
        $s.put(&$d.out, $f(x, weight, grad, $d.options.clone().into()));
    }};
}

/// Runs the gradient of a convolution with respect to its bias.
macro_rules! bias_backward {
    ($f:path, $s:ident, $d:ident) => {{
        let (x, bias, grad) = ($s.take(&$d.x)?, $s.take(&$d.bias)?, $s.take(&$d.output_grad)?);
        $s.put(&$d.out, $f(x, bias, grad));
    }};
}

/// Runs an average pooling.
macro_rules! avg_pool {
    ($f:path, $s:ident, $d:ident) => {{
        let x = $s.take(&$d.x)?;
        let out = $f(
            x,
            $d.kernel_size,
            $d.stride,
            $d.padding,
            $d.count_include_pad,
            $d.ceil_mode,
        );
        $s.put(&$d.out, out);
    }};
}

/// Runs the gradient of an average pooling.
macro_rules! avg_pool_backward {
    ($f:path, $s:ident, $d:ident) => {{
        let (x, grad) = ($s.take(&$d.x)?, $s.take(&$d.grad)?);
        let out = $f(
            x,
            grad,
            $d.kernel_size,
            $d.stride,
            $d.padding,
            $d.count_include_pad,
            $d.ceil_mode,
        );
        $s.put(&$d.out, out);
    }};
}

/// Runs a max pooling without indices.
macro_rules! max_pool {
    ($f:path, $s:ident, $d:ident) => {{
        let x = $s.take(&$d.x)?;
        $s.put(
            &$d.out,
            $f(
                x,
                $d.kernel_size,
                $d.stride,
                $d.padding,
                $d.dilation,
                $d.ceil_mode,
            ),
        );
    }};
}

/// Runs a max pooling with indices.
macro_rules! max_pool_with_indices {
    ($f:path, $s:ident, $d:ident) => {{
        let x = $s.take(&$d.x)?;
        let result = $f(
            x,
            $d.kernel_size,
            $d.stride,
            $d.padding,
            $d.dilation,
            $d.ceil_mode,
        );
        $s.put(&$d.out, result.output);
        $s.put(&$d.out_indices, result.indices);
    }};
}

/// Runs the gradient of a max pooling with indices.
macro_rules! max_pool_backward {
    ($f:path, $s:ident, $d:ident) => {{
        let (x, grad, indices) = ($s.take(&$d.x)?, $s.take(&$d.grad)?, $s.take(&$d.indices)?);
        // burn-flex reads the indices as it writes them, in 64 bits, whatever type was announced.
        let indices = Flex::int_cast(indices, IntDType::I64);
        let result = $f(
            x,
            $d.kernel_size,
            $d.stride,
            $d.padding,
            $d.dilation,
            $d.ceil_mode,
            grad,
            indices,
        );
        $s.put(&$d.out, result.x_grad);
    }};
}

pub(super) fn run<S: TensorStore>(
    op: &ModuleOperationIr,
    s: &mut Operands<'_, S>,
) -> Result<(), OperationError> {
    use ModuleOperationIr as Op;
    match op {
        Op::Embedding(d) => {
            let (weights, indices) = (s.take(&d.weights)?, s.take(&d.indices)?);
            check("Module.Embedding", &weights, 0, &indices)?;
            s.put(&d.out, Flex::embedding(weights, indices));
        }
        Op::EmbeddingBackward(d) => {
            let (weights, grad, indices) = (s.take(&d.weights)?, s.take(&d.out_grad)?, s.take(&d.indices)?);
            check("Module.EmbeddingBackward", &weights, 0, &indices)?;
            s.put(&d.out, Flex::embedding_backward(weights, grad, indices));
        }
        Op::Linear(d) => {
            let (x, weight) = (s.take(&d.x)?, s.take(&d.weight)?);
            let bias = s.take_optional(&d.bias)?;
            s.put(&d.out, Flex::linear(x, weight, bias));
        }
        Op::LinearXBackward(d) => {
            let (weight, grad) = (s.take(&d.weight)?, s.take(&d.output_grad)?);
            s.put(&d.out, Flex::linear_x_backward(weight, grad));
        }
        Op::LinearWeightBackward(d) => {
            let (x, grad) = (s.take(&d.x)?, s.take(&d.output_grad)?);
            s.put(&d.out, Flex::linear_weight_backward(x, grad));
        }
        Op::LinearBiasBackward(d) => {
            let grad = s.take(&d.output_grad)?;
            s.put(&d.out, Flex::linear_bias_backward(grad));
        }
        Op::Conv1d(d) => conv!(Flex::conv1d, s, d),
        Op::Conv1dXBackward(d) => conv_backward!(Flex::conv1d_x_backward, s, d),
        Op::Conv1dWeightBackward(d) => conv_backward!(Flex::conv1d_weight_backward, s, d),
        Op::Conv1dBiasBackward(d) => bias_backward!(Flex::conv1d_bias_backward, s, d),
        Op::Conv2d(d) => conv!(Flex::conv2d, s, d),
        Op::Conv2dXBackward(d) => conv_backward!(Flex::conv2d_x_backward, s, d),
        Op::Conv2dWeightBackward(d) => conv_backward!(Flex::conv2d_weight_backward, s, d),
        Op::Conv2dBiasBackward(d) => bias_backward!(Flex::conv2d_bias_backward, s, d),
        Op::Conv3d(d) => conv!(Flex::conv3d, s, d),
        Op::Conv3dXBackward(d) => conv_backward!(Flex::conv3d_x_backward, s, d),
        Op::Conv3dWeightBackward(d) => conv_backward!(Flex::conv3d_weight_backward, s, d),
        Op::Conv3dBiasBackward(d) => bias_backward!(Flex::conv3d_bias_backward, s, d),
        Op::DeformableConv2d(d) => deformable_conv2d(d, s)?,
        Op::DeformableConv2dBackward(d) => deformable_conv2d_backward(d, s)?,
        Op::ConvTranspose1d(d) => conv!(Flex::conv_transpose1d, s, d),
        Op::ConvTranspose2d(d) => conv!(Flex::conv_transpose2d, s, d),
        Op::ConvTranspose3d(d) => conv!(Flex::conv_transpose3d, s, d),
        Op::AvgPool1d(d) => avg_pool!(Flex::avg_pool1d, s, d),
        Op::AvgPool2d(d) => avg_pool!(Flex::avg_pool2d, s, d),
        Op::AvgPool1dBackward(d) => avg_pool_backward!(Flex::avg_pool1d_backward, s, d),
        Op::AvgPool2dBackward(d) => avg_pool_backward!(Flex::avg_pool2d_backward, s, d),
        Op::AdaptiveAvgPool1d(d) => {
            let x = s.take(&d.x)?;
            s.put(&d.out, Flex::adaptive_avg_pool1d(x, d.output_size));
        }
        Op::AdaptiveAvgPool2d(d) => {
            let x = s.take(&d.x)?;
            s.put(&d.out, Flex::adaptive_avg_pool2d(x, d.output_size));
        }
        Op::AdaptiveAvgPool1dBackward(d) => {
            let (x, grad) = (s.take(&d.x)?, s.take(&d.grad)?);
            s.put(&d.out, Flex::adaptive_avg_pool1d_backward(x, grad));
        }
        Op::AdaptiveAvgPool2dBackward(d) => {
            let (x, grad) = (s.take(&d.x)?, s.take(&d.grad)?);
            s.put(&d.out, Flex::adaptive_avg_pool2d_backward(x, grad));
        }
        Op::MaxPool1d(d) => max_pool!(Flex::max_pool1d, s, d),
        Op::MaxPool1dWithIndices(d) => max_pool_with_indices!(Flex::max_pool1d_with_indices, s, d),
        Op::MaxPool1dWithIndicesBackward(d) => {
            max_pool_backward!(Flex::max_pool1d_with_indices_backward, s, d)
        }
        Op::MaxPool2d(d) => max_pool!(Flex::max_pool2d, s, d),
        Op::MaxPool2dWithIndices(d) => max_pool_with_indices!(Flex::max_pool2d_with_indices, s, d),
        Op::MaxPool2dWithIndicesBackward(d) => {
            max_pool_backward!(Flex::max_pool2d_with_indices_backward, s, d)
        }
        Op::Interpolate(d) => {
            let x = s.take(&d.x)?;
            s.put(
                &d.out,
                Flex::interpolate(x, d.output_size, d.options.clone().into()),
            );
        }
        Op::InterpolateBackward(d) => {
            let (x, grad) = (s.take(&d.x)?, s.take(&d.grad)?);
            let out = Flex::interpolate_backward(x, grad, d.output_size, d.options.clone().into());
            s.put(&d.out, out);
        }
        Op::Rfft(d) => {
            let signal = s.take(&d.signal)?;
            let (re, im) = Flex::rfft(signal, d.dim, d.n);
            s.put(&d.out_re, re);
            s.put(&d.out_im, im);
        }
        Op::IRfft(d) => {
            let (re, im) = (s.take(&d.input_re)?, s.take(&d.input_im)?);
            s.put(&d.out_signal, Flex::irfft(re, im, d.dim, d.n));
        }
        Op::Attention(d) => attention(d, s)?,
        Op::CtcLoss(d) => ctc_loss(d, s)?,
        Op::CtcLossBackward(d) => ctc_loss_backward(d, s)?,
    }
    Ok(())
}

fn deformable_conv2d<S: TensorStore>(
    d: &DeformConv2dOpIr,
    s: &mut Operands<'_, S>,
) -> Result<(), OperationError> {
    let (x, offset, weight) = (s.take(&d.x)?, s.take(&d.offset)?, s.take(&d.weight)?);
    let (mask, bias) = (s.take_optional(&d.mask)?, s.take_optional(&d.bias)?);
    let out = Flex::deform_conv2d(x, offset, weight, mask, bias, d.options.clone().into());
    s.put(&d.out, out);
    Ok(())
}

fn deformable_conv2d_backward<S: TensorStore>(
    d: &DeformConv2dBackwardOpIr,
    s: &mut Operands<'_, S>,
) -> Result<(), OperationError> {
    let (x, offset, weight) = (s.take(&d.x)?, s.take(&d.offset)?, s.take(&d.weight)?);
    let (mask, bias) = (s.take_optional(&d.mask)?, s.take_optional(&d.bias)?);
    let grad = s.take(&d.out_grad)?;
    let options = d.options.clone().into();
    let result = Flex::deform_conv2d_backward(x, offset, weight, mask, bias, grad, options);
    s.put(&d.input_grad, result.x_grad);
    s.put(&d.offset_grad, result.offset_grad);
    s.put(&d.weight_grad, result.weight_grad);
    if let (Some(ir), Some(tensor)) = (&d.mask_grad, result.mask_grad) {
        s.put(ir, tensor);
    }
    if let (Some(ir), Some(tensor)) = (&d.bias_grad, result.bias_grad) {
        s.put(ir, tensor);
    }
    Ok(())
}

fn attention<S: TensorStore>(d: &AttentionOpIr, s: &mut Operands<'_, S>) -> Result<(), OperationError> {
    let (query, key, value) = (s.take(&d.query)?, s.take(&d.key)?, s.take(&d.value)?);
    let (mask, bias) = (s.take_optional(&d.mask)?, s.take_optional(&d.attn_bias)?);
    let out = Flex::attention(query, key, value, mask, bias, d.options.clone().into());
    s.put(&d.out, out);
    Ok(())
}

fn ctc_loss<S: TensorStore>(d: &CtcLossOpIr, s: &mut Operands<'_, S>) -> Result<(), OperationError> {
    let (log_probs, targets) = (s.take(&d.log_probs)?, s.take(&d.targets)?);
    let (inputs, lengths) = (s.take(&d.input_lengths)?, s.take(&d.target_lengths)?);
    s.put(
        &d.out,
        Flex::ctc_loss(log_probs, targets, inputs, lengths, d.blank),
    );
    Ok(())
}

fn ctc_loss_backward<S: TensorStore>(
    d: &CtcLossBackwardOpIr,
    s: &mut Operands<'_, S>,
) -> Result<(), OperationError> {
    let (log_probs, targets) = (s.take(&d.log_probs)?, s.take(&d.targets)?);
    let (inputs, lengths) = (s.take(&d.input_lengths)?, s.take(&d.target_lengths)?);
    let grad = s.take(&d.grad_loss)?;
    let out = Flex::ctc_loss_backward(log_probs, targets, inputs, lengths, grad, d.blank);
    s.put(&d.out, out);
    Ok(())
}
