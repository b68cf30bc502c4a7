//! SqueezeNet 1.1 of torchvision: fire modules, which squeeze by a 1x1 convolution and expand by 1x1 and 3x3
//! side by side, and a classifier that is itself a 1x1 convolution.
//!
//! Convolutions begin He-uniform by fan in, the classifier normal with standard deviation 0.01, biases at
//! zero.

use crate::ModelError;
use crate::keys::Pretrained;
use crate::layers::{ConvInit, ConvSpec, global_avg_pool, max_pool2d};
use crate::loss::CrossEntropy;
use burn::config::Config;
use burn::module::Module;
use burn::nn::conv::Conv2d;
use burn::nn::pool::MaxPool2d;
use burn::nn::{Dropout, DropoutConfig};
use burn::tensor::activation::relu;
use burn::tensor::backend::Backend;
use burn::tensor::{Int, Tensor};

/// Places of the fire modules in the original's sequence; the gaps are pools.
const FIRES: [usize; 8] = [3, 4, 6, 7, 9, 10, 11, 12];

/// Configuration of a [`SqueezeNet`].
#[derive(Config, Debug)]
pub struct SqueezeNetConfig {
    /// Number of classes. Default: 1000
    #[config(default = 1000)]
    pub num_classes: usize,
    /// Dropout before the classifier. Default: 0.5
    #[config(default = 0.5)]
    pub dropout: f64,
    /// Channels of the first convolution. Default: 64
    #[config(default = 64)]
    pub stem_channels: usize,
    /// Squeezed channels, and expanded channels of each kind, of the eight fire modules.
    #[config(
        default = "[[16, 64], [16, 64], [32, 128], [32, 128], [48, 192], [48, 192], [64, 256], [64, 256]]"
    )]
    pub fires: [[usize; 2]; 8],
}

/// Squeeze, then expand in two ways.
#[derive(Module, Debug)]
pub struct Fire<B: Backend> {
    squeeze: Conv2d<B>,
    expand1x1: Conv2d<B>,
    expand3x3: Conv2d<B>,
}

impl<B: Backend> Fire<B> {
    fn forward(&self, input: Tensor<B, 4>) -> Tensor<B, 4> {
        let squeezed = relu(self.squeeze.forward(input));
        let narrow = relu(self.expand1x1.forward(squeezed.clone()));
        let wide = relu(self.expand3x3.forward(squeezed));
        Tensor::cat(vec![narrow, wide], 1)
    }
}

/// SqueezeNet 1.1, see the [module's documentation](self).
#[derive(Module, Debug)]
pub struct SqueezeNet<B: Backend> {
    stem: Conv2d<B>,
    fires: Vec<Fire<B>>,
    classifier: Conv2d<B>,
    pool: MaxPool2d,
    dropout: Dropout,
}

impl SqueezeNetConfig {
    /// Builds the model; its parameters are initialised when first used.
    pub fn init<B: Backend>(&self, device: &B::Device) -> SqueezeNet<B> {
        let conv = |channels: [usize; 2], kernel: usize| {
            ConvSpec::new(channels, kernel).with_scheme(ConvInit::KaimingUniformFanIn)
        };
        let mut channels = self.stem_channels;
        let fires = self.fires.iter().map(|[squeezed, expanded]| {
            let fire = Fire {
                squeeze: conv([channels, *squeezed], 1).init(device),
                expand1x1: conv([*squeezed, *expanded], 1).init(device),
                expand3x3: conv([*squeezed, *expanded], 3).with_padding(1).init(device),
            };
            channels = 2 * expanded;
            fire
        });
        let fires = fires.collect();
        let classifier = ConvSpec::new([channels, self.num_classes], 1).with_scheme(ConvInit::Normal(0.01));
        SqueezeNet {
            stem: conv([3, self.stem_channels], 3).with_stride(2).init(device),
            fires,
            classifier: classifier.init(device),
            pool: max_pool2d(3, 2, 0, true),
            dropout: DropoutConfig::new(self.dropout).init(),
        }
    }
}

impl<B: Backend> SqueezeNet<B> {
    /// Whether the network takes a batch of shape `[batch, channels, height, width]`.
    ///
    /// # Errors
    ///
    /// [`ModelError::Input`] for images that are not RGB, or too small.
    pub fn check_images(&self, dims: [usize; 4]) -> Result<(), ModelError> {
        super::check_images("squeezenet", dims, 17)
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
        let mut hidden = relu(self.stem.forward(images));
        for (index, fire) in self.fires.iter().enumerate() {
            if matches!(index, 0 | 2 | 4) {
                hidden = self.pool.forward(hidden);
            }
            hidden = fire.forward(hidden);
        }
        global_avg_pool(relu(self.classifier.forward(self.dropout.forward(hidden))))
    }

    /// Mean cross entropy against class indices `[batch]`; output `[1]`.
    pub fn loss(&self, images: Tensor<B, 4>, targets: Tensor<B, 1, Int>) -> Tensor<B, 1> {
        CrossEntropy::new().forward(self.forward(images), targets)
    }
}

impl<B: Backend> Pretrained<B> for SqueezeNet<B> {
    fn family(&self) -> &'static str {
        "squeezenet"
    }

    fn original_key(&self, path: &str) -> String {
        match path.split_once('.') {
            Some(("stem", leaf)) => format!("features.0.{leaf}"),
            Some(("classifier", leaf)) => format!("classifier.1.{leaf}"),
            Some(("fires", rest)) => super::renumber(&format!("features.{rest}"), |_, index| FIRES[index]),
            _ => path.to_string(),
        }
    }

    fn is_head(&self, key: &str) -> bool {
        key.starts_with("classifier.")
    }
}
