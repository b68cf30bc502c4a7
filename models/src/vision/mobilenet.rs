//! MobileNet v2 of torchvision: a stack of inverted residuals with ReLU6.
//!
//! Convolutions begin He-normal by fan out, the classifier normal with standard deviation 0.01 behind
//! dropout.

use crate::ModelError;
use crate::keys::{KeyPattern, Pretrained};
use crate::layers::{
    ConvNorm, InvertedResidual, InvertedSpec, Rectifier, global_avg_pool, normal_linear, round_channels,
};
use crate::loss::CrossEntropy;
use burn::config::Config;
use burn::module::Module;
use burn::nn::{Dropout, DropoutConfig, Linear};
use burn::tensor::backend::Backend;
use burn::tensor::{Int, Tensor};

const RECTIFIER: Rectifier = Rectifier::Relu6;
const MOMENTUM: f64 = 0.1;

/// Configuration of a [`MobileNetV2`].
#[derive(Config, Debug)]
pub struct MobileNetV2Config {
    /// Number of classes. Default: 1000
    #[config(default = 1000)]
    pub num_classes: usize,
    /// Factor on all numbers of channels, which are then rounded to multiples of 8. Default: 1
    #[config(default = 1.0)]
    pub width_mult: f64,
    /// Dropout before the classifier. Default: 0.2
    #[config(default = 0.2)]
    pub dropout: f64,
    /// For each group of blocks its expansion, channels, number of blocks and the stride of the first.
    #[config(default = "standard_groups()")]
    pub groups: Vec<[usize; 4]>,
}

fn standard_groups() -> Vec<[usize; 4]> {
    vec![
        [1, 16, 1, 1],
        [6, 24, 2, 2],
        [6, 32, 3, 2],
        [6, 64, 4, 2],
        [6, 96, 3, 1],
        [6, 160, 3, 2],
        [6, 320, 1, 1],
    ]
}

/// MobileNet v2, see the [module's documentation](self).
#[derive(Module, Debug)]
pub struct MobileNetV2<B: Backend> {
    stem: ConvNorm<B>,
    blocks: Vec<InvertedResidual<B>>,
    last: ConvNorm<B>,
    classifier: Linear<B>,
    dropout: Dropout,
}

impl MobileNetV2Config {
    /// Builds the model; its parameters are initialised when first used.
    pub fn init<B: Backend>(&self, device: &B::Device) -> MobileNetV2<B> {
        let stem = round_channels(32.0 * self.width_mult);
        let last = round_channels(1280.0 * self.width_mult.max(1.0));
        let mut channels = stem;
        let mut blocks = Vec::new();
        for [expansion, width, count, stride] in self.groups.iter().copied() {
            let output = round_channels(width as f64 * self.width_mult);
            for index in 0..count {
                let spec = InvertedSpec {
                    channels: [channels, output],
                    kernel: 3,
                    stride: if index == 0 { stride } else { 1 },
                    expansion,
                    always_expand: false,
                    momentum: MOMENTUM,
                    rectifier: RECTIFIER,
                };
                blocks.push(spec.init(device));
                channels = output;
            }
        }
        MobileNetV2 {
            stem: ConvNorm::new([3, stem], 3, 2, 1, MOMENTUM, device),
            blocks,
            last: ConvNorm::new([channels, last], 1, 1, 1, MOMENTUM, device),
            classifier: normal_linear(last, self.num_classes, 0.01, device),
            dropout: DropoutConfig::new(self.dropout).init(),
        }
    }
}

impl<B: Backend> MobileNetV2<B> {
    /// Whether the network takes a batch of shape `[batch, channels, height, width]`.
    ///
    /// # Errors
    ///
    /// [`ModelError::Input`] for images that are not RGB, or too small.
    pub fn check_images(&self, dims: [usize; 4]) -> Result<(), ModelError> {
        super::check_images("mobilenet", dims, 1)
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
        let mut hidden = RECTIFIER.forward(self.stem.forward(images));
        for block in &self.blocks {
            hidden = block.forward(hidden);
        }
        let pooled = global_avg_pool(RECTIFIER.forward(self.last.forward(hidden)));
        self.classifier.forward(self.dropout.forward(pooled))
    }

    /// Mean cross entropy against class indices `[batch]`; output `[1]`.
    pub fn loss(&self, images: Tensor<B, 4>, targets: Tensor<B, 1, Int>) -> Tensor<B, 1> {
        CrossEntropy::new().forward(self.forward(images), targets)
    }

    /// The original's name of a tensor of block `index`: its sequence holds the widening and the depthwise
    /// convolution as pairs with their norms, then the narrowing convolution and its norm.
    fn block_key(&self, index: usize, rest: &str) -> Option<String> {
        let first = usize::from(self.blocks.get(index)?.expands());
        let (part, rest) = rest.split_once('.')?;
        let (item, leaf) = rest.split_once('.')?;
        let norm = usize::from(item == "norm");
        let place = match part {
            "expand" => format!("0.{norm}"),
            "depthwise" => format!("{first}.{norm}"),
            _ => format!("{}", first + 1 + norm),
        };
        Some(format!("features.{}.conv.{place}.{leaf}", index + 1))
    }
}

impl<B: Backend> Pretrained<B> for MobileNetV2<B> {
    fn family(&self) -> &'static str {
        "mobilenet_v2"
    }

    fn original_key(&self, path: &str) -> String {
        let pair = |rest: &str| rest.replace("conv.", "0.").replace("norm.", "1.");
        let key = match path.split_once('.') {
            Some(("stem", rest)) => Some(format!("features.0.{}", pair(rest))),
            Some(("last", rest)) => Some(format!("features.{}.{}", self.blocks.len() + 1, pair(rest))),
            Some(("classifier", leaf)) => Some(format!("classifier.1.{leaf}")),
            Some((_, rest)) => rest
                .split_once('.')
                .and_then(|(index, rest)| self.block_key(index.parse().ok()?, rest)),
            None => None,
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
