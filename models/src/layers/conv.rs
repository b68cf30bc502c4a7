//! Convolutions with the initialisation schemes of torchvision, and the pooling around them.

use burn::module::Initializer;
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::pool::{MaxPool2d, MaxPool2dConfig};
use burn::nn::{Linear, LinearConfig, PaddingConfig2d};
use burn::tensor::Tensor;
use burn::tensor::backend::Backend;
use burn::tensor::module::adaptive_avg_pool2d;

/// How the weight and the bias of a convolution begin.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum ConvInit {
    /// PyTorch's default: both uniform in `±1 / sqrt(fan_in)`.
    Default,
    /// Weight normal with standard deviation `sqrt(2 / fan_out)`, bias zero: He's scheme for ReLU networks.
    KaimingNormalFanOut,
    /// Weight uniform in `±sqrt(6 / fan_in)`, bias zero.
    KaimingUniformFanIn,
    /// Weight normal with this standard deviation, bias zero.
    Normal(f64),
}

/// A square convolution with symmetric padding, built by [`ConvSpec::init`].
///
/// `fan_out` is counted as PyTorch counts it, `channels_out * kernel * kernel` whatever the groups.
#[derive(Debug, Clone, Copy)]
pub struct ConvSpec {
    channels: [usize; 2],
    kernel: usize,
    stride: usize,
    padding: usize,
    groups: usize,
    bias: bool,
    scheme: ConvInit,
}

impl ConvSpec {
    /// A convolution from `channels[0]` to `channels[1]` with stride 1, no padding, one group and a bias.
    pub fn new(channels: [usize; 2], kernel: usize) -> Self {
        Self {
            channels,
            kernel,
            stride: 1,
            padding: 0,
            groups: 1,
            bias: true,
            scheme: ConvInit::Default,
        }
    }

    /// Sets the stride of both directions.
    pub fn with_stride(mut self, stride: usize) -> Self {
        self.stride = stride;
        self
    }

    /// Sets the padding of all four sides.
    pub fn with_padding(mut self, padding: usize) -> Self {
        self.padding = padding;
        self
    }

    /// Sets the number of groups.
    pub fn with_groups(mut self, groups: usize) -> Self {
        self.groups = groups;
        self
    }

    /// Leaves the bias out, as before a batch normalisation.
    pub fn without_bias(mut self) -> Self {
        self.bias = false;
        self
    }

    /// Sets the initialisation scheme.
    pub fn with_scheme(mut self, scheme: ConvInit) -> Self {
        self.scheme = scheme;
        self
    }

    /// Builds the convolution; its parameters are initialised when first used.
    pub fn init<B: Backend>(&self, device: &B::Device) -> Conv2d<B> {
        let initializer = match self.scheme {
            ConvInit::Default => Initializer::KaimingUniform {
                gain: 1.0 / 3f64.sqrt(),
                fan_out_only: false,
            },
            ConvInit::KaimingNormalFanOut => {
                let fan_out = self.channels[1] * self.kernel * self.kernel;
                Initializer::Normal {
                    mean: 0.0,
                    std: (2.0 / fan_out as f64).sqrt(),
                }
            }
            ConvInit::KaimingUniformFanIn => Initializer::KaimingUniform {
                gain: 2f64.sqrt(),
                fan_out_only: false,
            },
            ConvInit::Normal(std) => Initializer::Normal { mean: 0.0, std },
        };
        let pad = self.padding;
        let mut conv: Conv2d<B> = Conv2dConfig::new(self.channels, [self.kernel, self.kernel])
            .with_stride([self.stride, self.stride])
            .with_padding(PaddingConfig2d::Explicit(pad, pad, pad, pad))
            .with_groups(self.groups)
            .with_bias(self.bias)
            .with_initializer(initializer)
            .init(device);
        if self.bias && self.scheme != ConvInit::Default {
            conv.bias = Some(Initializer::Zeros.init([self.channels[1]], device));
        }
        conv
    }
}

/// A square max pool with symmetric padding.
pub fn max_pool2d(kernel: usize, stride: usize, padding: usize, ceil: bool) -> MaxPool2d {
    MaxPool2dConfig::new([kernel, kernel])
        .with_strides([stride, stride])
        .with_padding(PaddingConfig2d::Explicit(padding, padding, padding, padding))
        .with_ceil_mode(ceil)
        .init()
}

/// Mean over height and width: `[batch, channels, height, width]` to `[batch, channels]`.
pub fn global_avg_pool<B: Backend>(input: Tensor<B, 4>) -> Tensor<B, 2> {
    let [batch, channels, height, width] = input.dims();
    input
        .reshape([batch, channels, height * width])
        .mean_dim(2)
        .reshape([batch, channels])
}

/// Mean over the cells of a grid of `size` by `size`: `[batch, channels, size, size]`.
pub fn adaptive_avg_pool<B: Backend>(input: Tensor<B, 4>, size: usize) -> Tensor<B, 4> {
    let [_, _, height, width] = input.dims();
    // At the size that a network is made for the grid is the image.
    if [height, width] == [size, size] {
        input
    } else {
        adaptive_avg_pool2d(input, [size, size])
    }
}

/// A linear layer with normal weights of standard deviation `std` and a zero bias.
pub fn normal_linear<B: Backend>(input: usize, output: usize, std: f64, device: &B::Device) -> Linear<B> {
    let initializer = Initializer::Normal { mean: 0.0, std };
    let mut linear = LinearConfig::new(input, output)
        .with_initializer(initializer)
        .init(device);
    linear.bias = Some(Initializer::Zeros.init([output], device));
    linear
}
