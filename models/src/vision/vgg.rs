//! VGG of torchvision without batch norm: stages of 3x3 convolutions with ReLU, a max pool after each stage,
//! and three linear layers with dropout between.
//!
//! Convolutions begin He-normal by fan out, linear layers normal with standard deviation 0.01, biases at
//! zero.

use crate::ModelError;
use crate::keys::Pretrained;
use crate::layers::{ConvInit, ConvSpec, adaptive_avg_pool, max_pool2d, normal_linear};
use crate::loss::CrossEntropy;
use burn::config::Config;
use burn::module::Module;
use burn::nn::conv::Conv2d;
use burn::nn::pool::MaxPool2d;
use burn::nn::{Dropout, DropoutConfig, Linear};
use burn::tensor::activation::relu;
use burn::tensor::backend::Backend;
use burn::tensor::{Int, Tensor};

/// Cells per side of the grid before the linear layers.
const GRID: usize = 7;

/// Configuration of a [`Vgg`].
#[derive(Config, Debug)]
pub struct VggConfig {
    /// Channels of the convolutions of each stage; a max pool ends each stage.
    pub stages: Vec<Vec<usize>>,
    /// Number of classes. Default: 1000
    #[config(default = 1000)]
    pub num_classes: usize,
    /// Dropout after the first two linear layers. Default: 0.5
    #[config(default = 0.5)]
    pub dropout: f64,
    /// Width of the linear layers. Default: 4096
    #[config(default = 4096)]
    pub hidden: usize,
}

/// A VGG network, see the [module's documentation](self).
#[derive(Module, Debug)]
pub struct Vgg<B: Backend> {
    features: Vec<Conv2d<B>>,
    classifier: Vec<Linear<B>>,
    pool: MaxPool2d,
    dropout: Dropout,
    /// For each convolution, whether it ends its stage.
    #[module(skip)]
    ends_stage: Vec<bool>,
}

impl VggConfig {
    /// 13 convolutions and 3 linear layers.
    pub fn vgg16() -> Self {
        let stages = [(64, 2), (128, 2), (256, 3), (512, 3), (512, 3)];
        Self::new(stages.map(|(channels, convs)| vec![channels; convs]).to_vec())
    }

    /// Builds the model; its parameters are initialised when first used.
    pub fn init<B: Backend>(&self, device: &B::Device) -> Vgg<B> {
        let mut channels = 3;
        let mut features = Vec::new();
        let mut ends_stage = Vec::new();
        for stage in &self.stages {
            for (index, width) in stage.iter().enumerate() {
                let conv = ConvSpec::new([channels, *width], 3).with_padding(1);
                features.push(conv.with_scheme(ConvInit::KaimingNormalFanOut).init(device));
                ends_stage.push(index + 1 == stage.len());
                channels = *width;
            }
        }
        let linear = |input, output| normal_linear(input, output, 0.01, device);
        Vgg {
            features,
            classifier: vec![
                linear(channels * GRID * GRID, self.hidden),
                linear(self.hidden, self.hidden),
                linear(self.hidden, self.num_classes),
            ],
            pool: max_pool2d(2, 2, 0, false),
            dropout: DropoutConfig::new(self.dropout).init(),
            ends_stage,
        }
    }
}

impl<B: Backend> Vgg<B> {
    /// Whether the network takes a batch of shape `[batch, channels, height, width]`.
    ///
    /// # Errors
    ///
    /// [`ModelError::Input`] for images that are not RGB, or too small.
    pub fn check_images(&self, dims: [usize; 4]) -> Result<(), ModelError> {
        super::check_images(
            "vgg",
            dims,
            1 << self.ends_stage.iter().filter(|ends| **ends).count(),
        )
    }

    /// Logits of a batch of images: `[batch, 3, height, width]` to `[batch, classes]`.
    ///
    /// # Panics
    ///
    /// If [`check_images`](Self::check_images) refuses the batch.
    pub fn forward(&self, images: Tensor<B, 4>) -> Tensor<B, 2> {
        if let Err(error) = self.check_images(images.dims()) {
            panic!("{error}");
        }
        let mut hidden = images;
        for (conv, ends_stage) in self.features.iter().zip(&self.ends_stage) {
            hidden = relu(conv.forward(hidden));
            if *ends_stage {
                hidden = self.pool.forward(hidden);
            }
        }
        let mut hidden = adaptive_avg_pool(hidden, GRID).flatten(1, 3);
        for (index, linear) in self.classifier.iter().enumerate() {
            hidden = linear.forward(hidden);
            if index < 2 {
                hidden = self.dropout.forward(relu(hidden));
            }
        }
        hidden
    }

    /// Mean cross entropy against class indices `[batch]`; output `[1]`.
    pub fn loss(&self, images: Tensor<B, 4>, targets: Tensor<B, 1, Int>) -> Tensor<B, 1> {
        CrossEntropy::new().forward(self.forward(images), targets)
    }
}

impl<B: Backend> Pretrained<B> for Vgg<B> {
    fn family(&self) -> &'static str {
        "vgg"
    }

    fn original_key(&self, path: &str) -> String {
        super::renumber(path, |list, index| match list {
            // Each earlier convolution is followed by a ReLU, each earlier stage by a pool.
            "features" => 2 * index + self.ends_stage[..index].iter().filter(|ends| **ends).count(),
            _ => 3 * index,
        })
    }

    fn is_head(&self, key: &str) -> bool {
        key.starts_with("classifier.6.")
    }
}
