//! AlexNet of torchvision: five convolutions with ReLU, three max pools, and three linear layers behind
//! dropout.
//!
//! All weights begin with PyTorch's defaults.

use crate::ModelError;
use crate::keys::Pretrained;
use crate::layers::{ConvSpec, adaptive_avg_pool, max_pool2d};
use crate::loss::CrossEntropy;
use burn::config::Config;
use burn::module::Module;
use burn::nn::conv::Conv2d;
use burn::nn::pool::MaxPool2d;
use burn::nn::{Dropout, DropoutConfig, Linear, LinearConfig};
use burn::tensor::activation::relu;
use burn::tensor::backend::Backend;
use burn::tensor::{Int, Tensor};

/// Cells per side of the grid before the linear layers.
const GRID: usize = 6;

/// Places of the convolutions and of the linear layers in the original's sequences.
const FEATURES: [usize; 5] = [0, 3, 6, 8, 10];
const CLASSIFIER: [usize; 3] = [1, 4, 6];

/// Configuration of an [`AlexNet`].
#[derive(Config, Debug)]
pub struct AlexNetConfig {
    /// Number of classes. Default: 1000
    #[config(default = 1000)]
    pub num_classes: usize,
    /// Dropout before the first two linear layers. Default: 0.5
    #[config(default = 0.5)]
    pub dropout: f64,
    /// Channels of the convolutions. Default: 64, 192, 384, 256, 256
    #[config(default = "[64, 192, 384, 256, 256]")]
    pub channels: [usize; 5],
    /// Width of the linear layers. Default: 4096
    #[config(default = 4096)]
    pub hidden: usize,
}

/// AlexNet, see the [module's documentation](self).
#[derive(Module, Debug)]
pub struct AlexNet<B: Backend> {
    features: Vec<Conv2d<B>>,
    classifier: Vec<Linear<B>>,
    pool: MaxPool2d,
    dropout: Dropout,
}

impl AlexNetConfig {
    /// Builds the model; its parameters are initialised when first used.
    pub fn init<B: Backend>(&self, device: &B::Device) -> AlexNet<B> {
        let [first, second, third, fourth, fifth] = self.channels;
        let kept = |from: usize, to: usize| ConvSpec::new([from, to], 3).with_padding(1).init(device);
        AlexNet {
            features: vec![
                ConvSpec::new([3, first], 11)
                    .with_stride(4)
                    .with_padding(2)
                    .init(device),
                ConvSpec::new([first, second], 5).with_padding(2).init(device),
                kept(second, third),
                kept(third, fourth),
                kept(fourth, fifth),
            ],
            classifier: vec![
                LinearConfig::new(fifth * GRID * GRID, self.hidden).init(device),
                LinearConfig::new(self.hidden, self.hidden).init(device),
                LinearConfig::new(self.hidden, self.num_classes).init(device),
            ],
            pool: max_pool2d(3, 2, 0, false),
            dropout: DropoutConfig::new(self.dropout).init(),
        }
    }
}

impl<B: Backend> AlexNet<B> {
    /// Whether the network takes a batch of shape `[batch, channels, height, width]`.
    ///
    /// # Errors
    ///
    /// [`ModelError::Input`] for images that are not RGB, or too small.
    pub fn check_images(&self, dims: [usize; 4]) -> Result<(), ModelError> {
        super::check_images("alexnet", dims, 63)
    }

    /// Logits of a batch of images: `[batch, 3, height, width]` to `[batch, classes]`; at least 63 pixels a
    /// side.
    ///
    /// # Panics
    ///
    /// If [`check_images`](Self::check_images) refuses the batch.
    pub fn forward(&self, images: Tensor<B, 4>) -> Tensor<B, 2> {
        if let Err(error) = self.check_images(images.dims()) {
            panic!("{error}");
        }
        let mut hidden = images;
        for (index, conv) in self.features.iter().enumerate() {
            hidden = relu(conv.forward(hidden));
            if matches!(index, 0 | 1 | 4) {
                hidden = self.pool.forward(hidden);
            }
        }
        let mut hidden = adaptive_avg_pool(hidden, GRID).flatten(1, 3);
        for (index, linear) in self.classifier.iter().enumerate() {
            if index < 2 {
                hidden = relu(linear.forward(self.dropout.forward(hidden)));
            } else {
                hidden = linear.forward(hidden);
            }
        }
        hidden
    }

    /// Mean cross entropy against class indices `[batch]`; output `[1]`.
    pub fn loss(&self, images: Tensor<B, 4>, targets: Tensor<B, 1, Int>) -> Tensor<B, 1> {
        CrossEntropy::new().forward(self.forward(images), targets)
    }
}

impl<B: Backend> Pretrained<B> for AlexNet<B> {
    fn family(&self) -> &'static str {
        "alexnet"
    }

    fn original_key(&self, path: &str) -> String {
        super::renumber(path, |list, index| match list {
            "features" => FEATURES[index],
            _ => CLASSIFIER[index],
        })
    }

    fn is_head(&self, key: &str) -> bool {
        key.starts_with("classifier.6.")
    }
}
