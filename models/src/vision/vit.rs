//! Vision transformers of timm: vit_small_patch16_224 and vit_base_patch16_224.
//!
//! The image is cut into patches, each becomes a token by a linear map (a convolution whose stride is its
//! kernel), a class token goes in front, learned positions are added, pre-norm layers follow, and a linear
//! layer reads the class token after the last norm. Linear weights begin normal with standard deviation 0.02
//! (timm truncates at ±2, a hundred standard deviations away), positions likewise, the class token almost at
//! zero.

use crate::ModelError;
use crate::keys::Pretrained;
use crate::layers::{ConvSpec, attention, gelu, merge_heads, normal_linear, split_heads};
use crate::loss::CrossEntropy;
use burn::config::Config;
use burn::module::{Initializer, Module, Param};
use burn::nn::conv::Conv2d;
use burn::nn::{Dropout, DropoutConfig, LayerNorm, LayerNormConfig, Linear};
use burn::tensor::backend::Backend;
use burn::tensor::{Int, Tensor};

const EPSILON: f64 = 1e-6;

/// Configuration of a [`VisionTransformer`].
#[derive(Config, Debug)]
pub struct VitConfig {
    /// Width of the residual stream.
    pub embed_dim: usize,
    /// Number of layers.
    pub depth: usize,
    /// Number of attention heads; divides the width.
    pub num_heads: usize,
    /// Pixels per side of an image. Default: 224
    #[config(default = 224)]
    pub image_size: usize,
    /// Pixels per side of a patch; divides the image. Default: 16
    #[config(default = 16)]
    pub patch_size: usize,
    /// Number of classes. Default: 1000
    #[config(default = 1000)]
    pub num_classes: usize,
    /// Width inside of the feed-forward network per width of the stream. Default: 4
    #[config(default = 4.0)]
    pub mlp_ratio: f64,
    /// Dropout before the head. Default: 0
    #[config(default = 0.0)]
    pub drop_rate: f64,
    /// Dropout after the positions. Default: 0
    #[config(default = 0.0)]
    pub pos_drop_rate: f64,
    /// Dropout after the projections of attention and of the feed-forward network. Default: 0
    #[config(default = 0.0)]
    pub proj_drop_rate: f64,
    /// Dropout on the attention weights. Default: 0
    #[config(default = 0.0)]
    pub attn_drop_rate: f64,
}

impl VitConfig {
    /// 12 layers of width 384 with 6 heads, patches of 16 pixels.
    pub fn vit_small_patch16_224() -> Self {
        Self::new(384, 12, 6)
    }

    /// 12 layers of width 768 with 12 heads, patches of 16 pixels.
    pub fn vit_base_patch16_224() -> Self {
        Self::new(768, 12, 12)
    }

    /// Checks that a model can be built.
    ///
    /// # Errors
    ///
    /// [`ModelError::Invalid`] naming the field.
    pub fn validate(&self) -> Result<(), ModelError> {
        let divides = |field, divisor: usize, whole: usize, what: &str| {
            if divisor != 0 && whole.is_multiple_of(divisor) {
                return Ok(());
            }
            Err(ModelError::invalid(
                "vit",
                field,
                divisor,
                format!("it must divide {what}, {whole}"),
            ))
        };
        divides("patch_size", self.patch_size, self.image_size, "the image size")?;
        divides("num_heads", self.num_heads, self.embed_dim, "the width")
    }

    /// Builds the model; its parameters are initialised when first used.
    ///
    /// # Panics
    ///
    /// If [`validate`](Self::validate) reports an error; the named models have been checked.
    pub fn init<B: Backend>(&self, device: &B::Device) -> VisionTransformer<B> {
        if let Err(error) = self.validate() {
            panic!("{error}");
        }
        let width = self.embed_dim;
        let tokens = (self.image_size / self.patch_size).pow(2) + 1;
        let inner = (width as f64 * self.mlp_ratio) as usize;
        let dropout = |rate: f64| DropoutConfig::new(rate).init();
        let norm = || LayerNormConfig::new(width).with_epsilon(EPSILON).init(device);
        let linear = |input: usize, output: usize| normal_linear(input, output, 0.02, device);
        let normal =
            |std: f64, tokens: usize| Initializer::Normal { mean: 0.0, std }.init([1, tokens, width], device);
        let block = |_| VitBlock {
            norm1: norm(),
            attn: VitAttention {
                qkv: linear(width, 3 * width),
                proj: linear(width, width),
                attn_drop: dropout(self.attn_drop_rate),
                proj_drop: dropout(self.proj_drop_rate),
                heads: self.num_heads,
            },
            norm2: norm(),
            mlp: VitMlp {
                fc1: linear(width, inner),
                fc2: linear(inner, width),
                drop: dropout(self.proj_drop_rate),
            },
        };
        let patches = ConvSpec::new([3, width], self.patch_size).with_stride(self.patch_size);
        VisionTransformer {
            cls_token: normal(1e-6, 1),
            pos_embed: normal(0.02, tokens),
            patch_embed: PatchEmbed {
                proj: patches.init(device),
            },
            pos_drop: dropout(self.pos_drop_rate),
            blocks: (0..self.depth).map(block).collect(),
            norm: norm(),
            head_drop: dropout(self.drop_rate),
            head: linear(width, self.num_classes),
        }
    }
}

/// The linear map of patches.
#[derive(Module, Debug)]
pub struct PatchEmbed<B: Backend> {
    proj: Conv2d<B>,
}

/// Self-attention; one linear layer makes queries, keys and values.
#[derive(Module, Debug)]
pub struct VitAttention<B: Backend> {
    qkv: Linear<B>,
    proj: Linear<B>,
    attn_drop: Dropout,
    proj_drop: Dropout,
    heads: usize,
}

impl<B: Backend> VitAttention<B> {
    fn forward(&self, hidden: Tensor<B, 3>) -> Tensor<B, 3> {
        let [_, _, width] = hidden.dims();
        let qkv = self.qkv.forward(hidden);
        let part = |index: usize| {
            split_heads(
                qkv.clone().slice_dim(2, index * width..(index + 1) * width),
                self.heads,
            )
        };
        let scale = ((width / self.heads) as f64).powf(-0.5);
        let context = attention(part(0), part(1), part(2), None, scale, &self.attn_drop);
        self.proj_drop.forward(self.proj.forward(merge_heads(context)))
    }
}

/// The feed-forward network.
#[derive(Module, Debug)]
pub struct VitMlp<B: Backend> {
    fc1: Linear<B>,
    fc2: Linear<B>,
    drop: Dropout,
}

impl<B: Backend> VitMlp<B> {
    fn forward(&self, hidden: Tensor<B, 3>) -> Tensor<B, 3> {
        let hidden = self.drop.forward(gelu(self.fc1.forward(hidden)));
        self.drop.forward(self.fc2.forward(hidden))
    }
}

/// One layer: attention and feed-forward network, both with the norm before and the residual sum after.
#[derive(Module, Debug)]
pub struct VitBlock<B: Backend> {
    norm1: LayerNorm<B>,
    attn: VitAttention<B>,
    norm2: LayerNorm<B>,
    mlp: VitMlp<B>,
}

impl<B: Backend> VitBlock<B> {
    fn forward(&self, hidden: Tensor<B, 3>) -> Tensor<B, 3> {
        let hidden = hidden.clone() + self.attn.forward(self.norm1.forward(hidden));
        hidden.clone() + self.mlp.forward(self.norm2.forward(hidden))
    }
}

/// A vision transformer, see the [module's documentation](self).
#[derive(Module, Debug)]
pub struct VisionTransformer<B: Backend> {
    cls_token: Param<Tensor<B, 3>>,
    pos_embed: Param<Tensor<B, 3>>,
    patch_embed: PatchEmbed<B>,
    pos_drop: Dropout,
    blocks: Vec<VitBlock<B>>,
    norm: LayerNorm<B>,
    head_drop: Dropout,
    /// The classifier: replace it to fine-tune on another set of classes.
    pub head: Linear<B>,
}

impl<B: Backend> VisionTransformer<B> {
    /// Whether the model takes a batch of shape `[batch, channels, height, width]`.
    ///
    /// # Errors
    ///
    /// [`ModelError::Input`] for images that are not RGB, or not of the size the model was built for.
    pub fn check_images(&self, dims: [usize; 4]) -> Result<(), ModelError> {
        super::check_images("vit", dims, 1)?;
        let patch = self.patch_embed.proj.kernel_size[0];
        let size = (self.pos_embed.lazy_shape()[1] - 1).isqrt() * patch;
        let [_, _, height, width] = dims;
        if [height, width] == [size, size] {
            return Ok(());
        }
        Err(ModelError::Input {
            family: "vit",
            reason: format!(
                "images of {height}x{width} pixels, but the model was built for {size}x{size}: resize them, or build the \
                 model for their size (`image_size`)"
            ),
        })
    }

    /// Logits of a batch of images of the configured size: `[batch, 3, size, size]` to `[batch, classes]`.
    ///
    /// # Panics
    ///
    /// If [`check_images`](Self::check_images) refuses the batch.
    pub fn forward(&self, images: Tensor<B, 4>) -> Tensor<B, 2> {
        if let Err(error) = self.check_images(images.dims()) {
            panic!("{error}");
        }
        let patches = self.patch_embed.proj.forward(images);
        let [batch, width, rows, cols] = patches.dims();
        let patches = patches.reshape([batch, width, rows * cols]).swap_dims(1, 2);
        let class = self.cls_token.val().expand([batch, 1, width]);
        let mut hidden = Tensor::cat(vec![class, patches], 1) + self.pos_embed.val();
        hidden = self.pos_drop.forward(hidden);
        for block in &self.blocks {
            hidden = block.forward(hidden);
        }
        let class = self
            .norm
            .forward(hidden)
            .slice_dim(1, 0..1)
            .reshape([batch, width]);
        self.head.forward(self.head_drop.forward(class))
    }

    /// Mean cross entropy against class indices `[batch]`; output `[1]`.
    pub fn loss(&self, images: Tensor<B, 4>, targets: Tensor<B, 1, Int>) -> Tensor<B, 1> {
        CrossEntropy::new().forward(self.forward(images), targets)
    }
}

impl<B: Backend> Pretrained<B> for VisionTransformer<B> {
    fn family(&self) -> &'static str {
        "vit"
    }

    fn original_key(&self, path: &str) -> String {
        path.to_string()
    }

    fn is_head(&self, key: &str) -> bool {
        key.starts_with("head.")
    }
}
