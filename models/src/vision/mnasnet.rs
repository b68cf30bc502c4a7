//! MNASNet B1 of torchvision: a separable stem and six stacks of inverted residuals with ReLU.
//!
//! The batch norms forget slowly (momentum 0.0003). Convolutions begin He-normal by fan out, the classifier
//! uniform in `±sqrt(3 / classes)` behind dropout.

use crate::ModelError;
use crate::keys::{KeyPattern, Pretrained};
use crate::layers::{ConvNorm, InvertedResidual, InvertedSpec, Rectifier, global_avg_pool, round_channels};
use crate::loss::CrossEntropy;
use burn::config::Config;
use burn::module::{Initializer, Module};
use burn::nn::{Dropout, DropoutConfig, Linear, LinearConfig};
use burn::tensor::activation::relu;
use burn::tensor::backend::Backend;
use burn::tensor::{Int, Tensor};

const MOMENTUM: f64 = 1.0 - 0.9997;
const LAST: usize = 1280;

/// Channels (before scaling), kernel, stride, expansion and number of blocks of each stack.
const STACKS: [[usize; 5]; 6] = [
    [24, 3, 2, 3, 3],
    [40, 5, 2, 3, 3],
    [80, 5, 2, 6, 3],
    [96, 3, 1, 6, 2],
    [192, 5, 2, 6, 4],
    [320, 3, 1, 6, 1],
];

/// Configuration of a [`MnasNet`].
#[derive(Config, Debug)]
pub struct MnasNetConfig {
    /// Number of classes. Default: 1000
    #[config(default = 1000)]
    pub num_classes: usize,
    /// Factor on the numbers of channels, which are then rounded to multiples of 8. Default: 1
    #[config(default = 1.0)]
    pub alpha: f64,
    /// Dropout before the classifier. Default: 0.2
    #[config(default = 0.2)]
    pub dropout: f64,
}

/// MNASNet, see the [module's documentation](self).
#[derive(Module, Debug)]
pub struct MnasNet<B: Backend> {
    stem: ConvNorm<B>,
    depthwise: ConvNorm<B>,
    pointwise: ConvNorm<B>,
    stacks: Vec<Vec<InvertedResidual<B>>>,
    last: ConvNorm<B>,
    classifier: Linear<B>,
    dropout: Dropout,
}

impl MnasNetConfig {
    /// Builds the model; its parameters are initialised when first used.
    pub fn init<B: Backend>(&self, device: &B::Device) -> MnasNet<B> {
        let scaled = |channels: usize| round_channels(channels as f64 * self.alpha);
        let (stem, separable) = (scaled(32), scaled(16));
        let mut channels = separable;
        let stacks = STACKS.iter().map(|[width, kernel, stride, expansion, count]| {
            let output = scaled(*width);
            let block = |index: usize| {
                let spec = InvertedSpec {
                    channels: [if index == 0 { channels } else { output }, output],
                    kernel: *kernel,
                    stride: if index == 0 { *stride } else { 1 },
                    expansion: *expansion,
                    always_expand: true,
                    momentum: MOMENTUM,
                    rectifier: Rectifier::Relu,
                };
                spec.init(device)
            };
            let stack: Vec<_> = (0..*count).map(block).collect();
            channels = output;
            stack
        });
        let stacks = stacks.collect();
        let bound = (3.0 / self.num_classes as f64).sqrt();
        let initializer = Initializer::Uniform {
            min: -bound,
            max: bound,
        };
        let classifier = LinearConfig::new(LAST, self.num_classes).with_initializer(initializer);
        let mut classifier: Linear<B> = classifier.init(device);
        classifier.bias = Some(Initializer::Zeros.init([self.num_classes], device));
        MnasNet {
            stem: ConvNorm::new([3, stem], 3, 2, 1, MOMENTUM, device),
            depthwise: ConvNorm::new([stem, stem], 3, 1, stem, MOMENTUM, device),
            pointwise: ConvNorm::new([stem, separable], 1, 1, 1, MOMENTUM, device),
            stacks,
            last: ConvNorm::new([channels, LAST], 1, 1, 1, MOMENTUM, device),
            classifier,
            dropout: DropoutConfig::new(self.dropout).init(),
        }
    }
}

impl<B: Backend> MnasNet<B> {
    /// Whether the network takes a batch of shape `[batch, channels, height, width]`.
    ///
    /// # Errors
    ///
    /// [`ModelError::Input`] for images that are not RGB, or too small.
    pub fn check_images(&self, dims: [usize; 4]) -> Result<(), ModelError> {
        super::check_images("mnasnet", dims, 1)
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
        let hidden = relu(self.stem.forward(images));
        let hidden = relu(self.depthwise.forward(hidden));
        let mut hidden = self.pointwise.forward(hidden);
        for block in self.stacks.iter().flatten() {
            hidden = block.forward(hidden);
        }
        let pooled = global_avg_pool(relu(self.last.forward(hidden)));
        self.classifier.forward(self.dropout.forward(pooled))
    }

    /// Mean cross entropy against class indices `[batch]`; output `[1]`.
    pub fn loss(&self, images: Tensor<B, 4>, targets: Tensor<B, 1, Int>) -> Tensor<B, 1> {
        CrossEntropy::new().forward(self.forward(images), targets)
    }
}

/// `stack.block.part.item.leaf` of the stacks to the original's name: three convolutions, their norms and two
/// activations make the sequence of a block.
fn block_key(path: &str) -> Option<String> {
    let [stack, block, part, item, leaf] = path.split('.').collect::<Vec<_>>().try_into().ok()?;
    let first = match part {
        "expand" => 0,
        "depthwise" => 3,
        _ => 6,
    };
    let place = first + usize::from(item == "norm");
    Some(format!(
        "layers.{}.{block}.layers.{place}.{leaf}",
        stack.parse::<usize>().ok()? + 8
    ))
}

impl<B: Backend> Pretrained<B> for MnasNet<B> {
    fn family(&self) -> &'static str {
        "mnasnet"
    }

    fn original_key(&self, path: &str) -> String {
        let pair = |first: usize, rest: &str| {
            let (item, leaf) = rest.split_once('.')?;
            Some(format!("layers.{}.{leaf}", first + usize::from(item == "norm")))
        };
        let key = match path.split_once('.') {
            Some(("stem", rest)) => pair(0, rest),
            Some(("depthwise", rest)) => pair(3, rest),
            Some(("pointwise", rest)) => pair(6, rest),
            Some(("stacks", rest)) => block_key(rest),
            Some(("last", rest)) => pair(14, rest),
            Some(("classifier", leaf)) => Some(format!("classifier.1.{leaf}")),
            _ => None,
        };
        key.unwrap_or_else(|| path.to_string())
    }

    fn is_head(&self, key: &str) -> bool {
        key.starts_with("classifier.")
    }

    fn ignorable(&self) -> Vec<KeyPattern> {
        vec![KeyPattern::Suffix(".num_batches_tracked".into())]
    }
}
