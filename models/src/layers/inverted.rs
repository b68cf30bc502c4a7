//! Convolution with batch norm, and the inverted residual block of mobile networks made of three of them.

use super::{BatchNorm2d, BatchNorm2dConfig, ConvInit, ConvSpec};
use burn::module::Module;
use burn::nn::conv::Conv2d;
use burn::tensor::Tensor;
use burn::tensor::activation::relu;
use burn::tensor::backend::Backend;

/// A convolution without bias and the batch norm after it.
#[derive(Module, Debug)]
pub struct ConvNorm<B: Backend> {
    conv: Conv2d<B>,
    norm: BatchNorm2d<B>,
}

impl<B: Backend> ConvNorm<B> {
    /// A convolution that keeps the size at stride 1, He-normal by fan out, then a batch norm with this
    /// momentum.
    pub fn new(
        channels: [usize; 2],
        kernel: usize,
        stride: usize,
        groups: usize,
        momentum: f64,
        device: &B::Device,
    ) -> Self {
        let conv = ConvSpec::new(channels, kernel)
            .with_stride(stride)
            .with_padding(kernel / 2)
            .with_groups(groups)
            .without_bias()
            .with_scheme(ConvInit::KaimingNormalFanOut);
        Self {
            conv: conv.init(device),
            norm: BatchNorm2dConfig::new(channels[1])
                .with_momentum(momentum)
                .init(device),
        }
    }

    /// `[batch, channels[0], height, width]` to `[batch, channels[1], height / stride, width / stride]`.
    pub fn forward(&self, input: Tensor<B, 4>) -> Tensor<B, 4> {
        self.norm.forward(self.conv.forward(input))
    }
}

/// The two activations of mobile networks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rectifier {
    /// `max(0, x)`
    Relu,
    /// `min(max(0, x), 6)`
    Relu6,
}

impl Rectifier {
    /// Applies the activation to every element.
    pub fn forward<B: Backend, const D: usize>(self, input: Tensor<B, D>) -> Tensor<B, D> {
        match self {
            Self::Relu => relu(input),
            Self::Relu6 => input.clamp(0.0, 6.0),
        }
    }
}

/// What an [`InvertedResidual`] is made of.
#[derive(Debug, Clone, Copy)]
pub struct InvertedSpec {
    /// Channels at the start and at the end.
    pub channels: [usize; 2],
    /// Kernel of the depthwise convolution.
    pub kernel: usize,
    /// Stride of the depthwise convolution.
    pub stride: usize,
    /// Channels inside per channel at the start; with 1 there is no widening convolution unless
    /// `always_expand`.
    pub expansion: usize,
    /// Widen even by a factor of 1.
    pub always_expand: bool,
    /// Momentum of the batch norms.
    pub momentum: f64,
    /// Activation after the first two convolutions.
    pub rectifier: Rectifier,
}

impl InvertedSpec {
    /// Builds the block; its parameters are initialised when first used.
    pub fn init<B: Backend>(&self, device: &B::Device) -> InvertedResidual<B> {
        let [input, output] = self.channels;
        let inner = input * self.expansion;
        let expand = (self.always_expand || self.expansion != 1)
            .then(|| ConvNorm::new([input, inner], 1, 1, 1, self.momentum, device));
        InvertedResidual {
            expand,
            depthwise: ConvNorm::new(
                [inner, inner],
                self.kernel,
                self.stride,
                inner,
                self.momentum,
                device,
            ),
            project: ConvNorm::new([inner, output], 1, 1, 1, self.momentum, device),
            residual: self.stride == 1 && input == output,
            rectifier: self.rectifier,
        }
    }
}

/// Widen by a 1x1 convolution, filter each channel on its own, narrow by a 1x1 convolution; the input is
/// added where the shape allows.
#[derive(Module, Debug)]
pub struct InvertedResidual<B: Backend> {
    expand: Option<ConvNorm<B>>,
    depthwise: ConvNorm<B>,
    project: ConvNorm<B>,
    residual: bool,
    #[module(skip)]
    rectifier: Rectifier,
}

impl<B: Backend> InvertedResidual<B> {
    /// Whether the block widens first.
    pub fn expands(&self) -> bool {
        self.expand.is_some()
    }

    /// `[batch, channels[0], height, width]` to `[batch, channels[1], height / stride, width / stride]`.
    pub fn forward(&self, input: Tensor<B, 4>) -> Tensor<B, 4> {
        let mut hidden = input.clone();
        if let Some(expand) = &self.expand {
            hidden = self.rectifier.forward(expand.forward(hidden));
        }
        hidden = self.rectifier.forward(self.depthwise.forward(hidden));
        hidden = self.project.forward(hidden);
        if self.residual { hidden + input } else { hidden }
    }
}

/// `value` rounded to a multiple of 8, upwards if rounding down would lose more than a tenth.
pub fn round_channels(value: f64) -> usize {
    let rounded = ((value + 4.0) as usize / 8 * 8).max(8);
    if (rounded as f64) < 0.9 * value {
        rounded + 8
    } else {
        rounded
    }
}
