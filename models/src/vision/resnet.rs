//! Residual networks of torchvision: resnet18, 34, 50 and 101, resnext50_32x4d and
//! resnext101_32x8d.
//!
//! A stem (7x7 convolution with stride 2, batch norm, ReLU, 3x3 max pool with stride 2), four stages of
//! residual blocks, a global mean and a linear layer. The basic block has two 3x3 convolutions; the
//! bottleneck has 1x1, 3x3, 1x1 with four times the channels at its end, and its stride lies on the 3x3
//! convolution (the variant known as v1.5). The first block of a stage that changes the shape adapts its
//! shortcut by a 1x1 convolution with batch norm.
//!
//! Convolutions begin with He's scheme (normal, fan out), batch norms with scale 1 and shift 0.

use crate::ModelError;
use crate::keys::{KeyPattern, Pretrained, rename_segments};
use crate::layers::{BatchNorm2d, BatchNorm2dConfig, ConvInit, ConvSpec, global_avg_pool, max_pool2d};
use crate::loss::CrossEntropy;
use burn::config::Config;
use burn::module::Module;
use burn::nn::conv::Conv2d;
use burn::nn::pool::MaxPool2d;
use burn::nn::{Linear, LinearConfig};
use burn::tensor::activation::relu;
use burn::tensor::backend::Backend;
use burn::tensor::{Int, Tensor};

/// Which residual block the stages are made of.
#[derive(Config, Debug, Copy, PartialEq, Eq)]
pub enum BlockKind {
    /// Two 3x3 convolutions.
    Basic,
    /// 1x1, 3x3 and 1x1 convolutions; the last has four times the channels.
    Bottleneck,
}

impl BlockKind {
    /// Channels at the end of a block per channel inside.
    pub fn expansion(&self) -> usize {
        match self {
            Self::Basic => 1,
            Self::Bottleneck => 4,
        }
    }
}

/// Configuration of a [`ResNet`].
#[derive(Config, Debug)]
pub struct ResNetConfig {
    /// Kind of the residual blocks.
    pub block: BlockKind,
    /// Number of blocks of each of the four stages.
    pub blocks: [usize; 4],
    /// Number of classes. Default: 1000
    #[config(default = 1000)]
    pub num_classes: usize,
    /// Groups of the 3x3 convolutions of bottlenecks. Default: 1
    #[config(default = 1)]
    pub groups: usize,
    /// Channels per group at 64 planes. Default: 64
    #[config(default = 64)]
    pub width_per_group: usize,
    /// Channels of the stem, and planes of the first stage; each next stage doubles them. Default: 64
    #[config(default = 64)]
    pub stem_channels: usize,
}

impl ResNetConfig {
    /// 18 layers: basic blocks 2, 2, 2, 2.
    pub fn resnet18() -> Self {
        Self::new(BlockKind::Basic, [2, 2, 2, 2])
    }

    /// 34 layers: basic blocks 3, 4, 6, 3.
    pub fn resnet34() -> Self {
        Self::new(BlockKind::Basic, [3, 4, 6, 3])
    }

    /// 50 layers: bottlenecks 3, 4, 6, 3.
    pub fn resnet50() -> Self {
        Self::new(BlockKind::Bottleneck, [3, 4, 6, 3])
    }

    /// 101 layers: bottlenecks 3, 4, 23, 3.
    pub fn resnet101() -> Self {
        Self::new(BlockKind::Bottleneck, [3, 4, 23, 3])
    }

    /// ResNeXt with 50 layers, 32 groups of 4 channels.
    pub fn resnext50_32x4d() -> Self {
        Self::resnet50().with_groups(32).with_width_per_group(4)
    }

    /// ResNeXt with 101 layers, 32 groups of 8 channels.
    pub fn resnext101_32x8d() -> Self {
        Self::resnet101().with_groups(32).with_width_per_group(8)
    }

    /// Builds the model; its parameters are initialised when first used.
    pub fn init<B: Backend>(&self, device: &B::Device) -> ResNet<B> {
        let mut channels = self.stem_channels;
        let mut stage = |index: usize| -> Vec<Block<B>> {
            let planes = self.stem_channels << index;
            (0..self.blocks[index])
                .map(|block| {
                    let stride = if index > 0 && block == 0 { 2 } else { 1 };
                    let built = self.block(channels, planes, stride, device);
                    channels = planes * self.block.expansion();
                    built
                })
                .collect()
        };
        let (layer1, layer2, layer3, layer4) = (stage(0), stage(1), stage(2), stage(3));
        ResNet {
            conv1: conv(3, self.stem_channels, 7, 2, 1, device),
            bn1: BatchNorm2dConfig::new(self.stem_channels).init(device),
            pool: max_pool2d(3, 2, 1, false),
            layer1,
            layer2,
            layer3,
            layer4,
            fc: LinearConfig::new(channels, self.num_classes).init(device),
        }
    }

    fn block<B: Backend>(&self, input: usize, planes: usize, stride: usize, device: &B::Device) -> Block<B> {
        let output = planes * self.block.expansion();
        let norm = |channels: usize| BatchNorm2dConfig::new(channels).init(device);
        let downsample = (stride != 1 || input != output).then(|| Downsample {
            conv: conv(input, output, 1, stride, 1, device),
            norm: norm(output),
        });
        match self.block {
            BlockKind::Basic => Block {
                conv1: conv(input, planes, 3, stride, 1, device),
                bn1: norm(planes),
                conv2: conv(planes, planes, 3, 1, 1, device),
                bn2: norm(planes),
                conv3: None,
                bn3: None,
                downsample,
            },
            BlockKind::Bottleneck => {
                let width = planes * self.width_per_group / 64 * self.groups;
                Block {
                    conv1: conv(input, width, 1, 1, 1, device),
                    bn1: norm(width),
                    conv2: conv(width, width, 3, stride, self.groups, device),
                    bn2: norm(width),
                    conv3: Some(conv(width, output, 1, 1, 1, device)),
                    bn3: Some(norm(output)),
                    downsample,
                }
            }
        }
    }
}

/// A convolution without bias that keeps the size at stride 1.
fn conv<B: Backend>(
    input: usize,
    output: usize,
    kernel: usize,
    stride: usize,
    groups: usize,
    device: &B::Device,
) -> Conv2d<B> {
    ConvSpec::new([input, output], kernel)
        .with_stride(stride)
        .with_padding(kernel / 2)
        .with_groups(groups)
        .without_bias()
        .with_scheme(ConvInit::KaimingNormalFanOut)
        .init(device)
}

/// A residual block; the third convolution exists in bottlenecks only.
#[derive(Module, Debug)]
pub struct Block<B: Backend> {
    conv1: Conv2d<B>,
    bn1: BatchNorm2d<B>,
    conv2: Conv2d<B>,
    bn2: BatchNorm2d<B>,
    conv3: Option<Conv2d<B>>,
    bn3: Option<BatchNorm2d<B>>,
    downsample: Option<Downsample<B>>,
}

/// The shortcut of a block that changes the shape.
#[derive(Module, Debug)]
pub struct Downsample<B: Backend> {
    conv: Conv2d<B>,
    norm: BatchNorm2d<B>,
}

impl<B: Backend> Block<B> {
    fn forward(&self, input: Tensor<B, 4>) -> Tensor<B, 4> {
        let shortcut = match &self.downsample {
            Some(down) => down.norm.forward(down.conv.forward(input.clone())),
            None => input.clone(),
        };
        let hidden = relu(self.bn1.forward(self.conv1.forward(input)));
        let mut hidden = self.bn2.forward(self.conv2.forward(hidden));
        if let (Some(conv3), Some(bn3)) = (&self.conv3, &self.bn3) {
            hidden = bn3.forward(conv3.forward(relu(hidden)));
        }
        relu(hidden + shortcut)
    }
}

/// A residual network, see the [module's documentation](self).
#[derive(Module, Debug)]
pub struct ResNet<B: Backend> {
    conv1: Conv2d<B>,
    bn1: BatchNorm2d<B>,
    pool: MaxPool2d,
    layer1: Vec<Block<B>>,
    layer2: Vec<Block<B>>,
    layer3: Vec<Block<B>>,
    layer4: Vec<Block<B>>,
    /// The classifier: replace it to fine-tune on another set of classes.
    pub fc: Linear<B>,
}

impl<B: Backend> ResNet<B> {
    /// Whether the network takes a batch of shape `[batch, channels, height, width]`.
    ///
    /// # Errors
    ///
    /// [`ModelError::Input`] for images that are not RGB, or too small.
    pub fn check_images(&self, dims: [usize; 4]) -> Result<(), ModelError> {
        super::check_images("resnet", dims, 1)
    }

    /// Features before the classifier: `[batch, 3, height, width]` to `[batch, features]`.
    ///
    /// # Panics
    ///
    /// If [`check_images`](Self::check_images) refuses the batch.
    pub fn features(&self, images: Tensor<B, 4>) -> Tensor<B, 2> {
        if let Err(error) = self.check_images(images.dims()) {
            panic!("{error}");
        }
        let mut hidden = self
            .pool
            .forward(relu(self.bn1.forward(self.conv1.forward(images))));
        for block in [&self.layer1, &self.layer2, &self.layer3, &self.layer4]
            .into_iter()
            .flatten()
        {
            hidden = block.forward(hidden);
        }
        global_avg_pool(hidden)
    }

    /// Logits of a batch of images: `[batch, 3, height, width]` to `[batch, classes]`.
    pub fn forward(&self, images: Tensor<B, 4>) -> Tensor<B, 2> {
        self.fc.forward(self.features(images))
    }

    /// Mean cross entropy against class indices `[batch]`; output `[1]`.
    pub fn loss(&self, images: Tensor<B, 4>, targets: Tensor<B, 1, Int>) -> Tensor<B, 1> {
        CrossEntropy::new().forward(self.forward(images), targets)
    }
}

impl<B: Backend> Pretrained<B> for ResNet<B> {
    fn family(&self) -> &'static str {
        "resnet"
    }

    fn original_key(&self, path: &str) -> String {
        if path.contains(".downsample.") {
            rename_segments(path, |segment| match segment {
                "conv" => "0",
                "norm" => "1",
                other => other,
            })
        } else {
            path.to_string()
        }
    }

    fn is_head(&self, key: &str) -> bool {
        key.starts_with("fc.")
    }

    fn ignorable(&self) -> Vec<KeyPattern> {
        vec![KeyPattern::Suffix(".num_batches_tracked".into())]
    }
}
