//! Small networks that reshape and permute what was computed in another order: the ways in which programs
//! take images apart and put them together again. Each trains in every compiled way as it does on burn-flex.

use burn::module::{Module, Param};
use burn::nn::conv::{Conv1d, Conv1dConfig, Conv2d, Conv2dConfig, ConvTranspose2d, ConvTranspose2dConfig};
use burn::nn::pool::{AvgPool2d, AvgPool2dConfig, MaxPool1d, MaxPool1dConfig, MaxPool2d, MaxPool2dConfig};
use burn::nn::{
    BatchNorm, BatchNormConfig, Embedding, EmbeddingConfig, GroupNorm, GroupNormConfig, LayerNorm,
    LayerNormConfig, Linear, LinearConfig, PaddingConfig1d, PaddingConfig2d,
};
use burn::tensor::activation::{relu, softmax};
use burn::tensor::backend::Backend;
use burn::tensor::module::unfold4d;
use burn::tensor::ops::UnfoldOptions;
use burn::tensor::{Distribution, Tensor};
use burn_autodiff::Autodiff;
use burn_flex::Flex;
use burn_optim::SgdConfig;

use crate::harness::*;
use crate::models::*;

const STEPS: usize = 4;

/// Trains a network eagerly on burn-flex and in every compiled way.
macro_rules! trains {
    ($($test:ident: $ty:ident),* $(,)?) => {$(
        #[test]
        fn $test() {
            let _ = compare!(Autodiff<Flex>, $ty, |device| $ty::new(device), SgdConfig::new().init(), STEPS, [Cpu]);
        }
    )*};
}

trains! {
    pooled_images_are_flattened: Pooled,
    channels_are_shuffled: Shuffled,
    channels_become_pixels_and_back: PixelShuffled,
    patches_are_embedded_in_two_ways: Patches,
    groups_are_normalised_after_a_reshape: Groups,
    windows_are_shifted_and_partitioned: Windows,
    depthwise_results_are_flattened: Depthwise,
    images_grow_and_are_flattened: Growing,
    heads_have_odd_sizes: Heads,
    windows_are_unfolded: Unfolded,
    dense_blocks_are_joined_and_flattened: Dense,
    sequences_are_convolved_and_flattened: Sequences,
    axes_of_images_are_mixed: Mixer,
}

fn conv<B: Backend>(channels: [usize; 2], kernel: usize, groups: usize, device: &B::Device) -> Conv2d<B> {
    let padding = kernel / 2;
    Conv2dConfig::new(channels, [kernel, kernel])
        .with_padding(PaddingConfig2d::Explicit(padding, padding, padding, padding))
        .with_groups(groups)
        .init(device)
}

fn norm<B: Backend>(channels: usize, device: &B::Device) -> BatchNorm<B> {
    BatchNormConfig::new(channels).init(device)
}

fn linear<B: Backend>(inputs: usize, outputs: usize, device: &B::Device) -> Linear<B> {
    LinearConfig::new(inputs, outputs).init(device)
}

/// `[examples, 3, 8, 8]`, from the batch's values and nonlinear functions of them.
fn images<B: Backend>(batch: &Batch<B>) -> Tensor<B, 4> {
    let x = batch.values.clone();
    Tensor::cat(
        vec![x.clone(), x.clone().sin(), x.clone().cos(), x.powi_scalar(2)],
        1,
    )
    .reshape([-1, 3, 8, 8])
}

/// Convolutions, norms and both kinds of pools before a flatten.
#[derive(Module, Debug)]
struct Pooled<B: Backend> {
    first: Conv2d<B>,
    norm: BatchNorm<B>,
    max: MaxPool2d,
    second: Conv2d<B>,
    again: BatchNorm<B>,
    mean: AvgPool2d,
    hidden: Linear<B>,
    out: Linear<B>,
}

impl<B: Backend> Pooled<B> {
    fn new(device: &B::Device) -> Self {
        Self {
            first: conv([3, 6], 3, 1, device),
            norm: norm(6, device),
            max: MaxPool2dConfig::new([2, 2]).with_strides([2, 2]).init(),
            second: conv([6, 5], 3, 1, device),
            again: norm(5, device),
            mean: AvgPool2dConfig::new([2, 2]).with_strides([1, 1]).init(),
            hidden: linear(5 * 9, 7, device),
            out: linear(7, CLASSES, device),
        }
    }
}

impl<B: Backend> Trainable<B> for Pooled<B> {
    fn logits(&self, batch: &Batch<B>) -> Tensor<B, 2> {
        let x = self
            .max
            .forward(self.norm.forward(self.first.forward(images(batch))).tanh());
        let x = self
            .mean
            .forward(self.again.forward(self.second.forward(x)).tanh());
        let x = self.hidden.forward(x.flatten::<2>(1, 3));
        self.out.forward(x.tanh())
    }
}

/// Grouped convolutions with a channel shuffle between them.
#[derive(Module, Debug)]
struct Shuffled<B: Backend> {
    first: Conv2d<B>,
    norm: BatchNorm<B>,
    depthwise: Conv2d<B>,
    again: BatchNorm<B>,
    last: Conv2d<B>,
    out: Linear<B>,
}

impl<B: Backend> Shuffled<B> {
    fn new(device: &B::Device) -> Self {
        Self {
            first: conv([3, 6], 1, 3, device),
            norm: norm(6, device),
            depthwise: conv([6, 6], 3, 6, device),
            again: norm(6, device),
            last: conv([6, 4], 1, 2, device),
            out: linear(4 * 64, CLASSES, device),
        }
    }

    fn shuffle(x: Tensor<B, 4>, groups: usize) -> Tensor<B, 4> {
        let [examples, channels, height, width] = x.dims();
        x.reshape([examples, groups, channels / groups, height, width])
            .swap_dims(1, 2)
            .reshape([examples, channels, height, width])
    }
}

impl<B: Backend> Trainable<B> for Shuffled<B> {
    fn logits(&self, batch: &Batch<B>) -> Tensor<B, 2> {
        let x = self.norm.forward(self.first.forward(images(batch))).tanh();
        let x = self.again.forward(self.depthwise.forward(Self::shuffle(x, 3)));
        let x = Self::shuffle(self.last.forward(Self::shuffle(x, 2)).tanh(), 2);
        self.out.forward(x.flatten::<2>(1, 3))
    }
}

/// Pixel shuffle and its inverse around norms.
#[derive(Module, Debug)]
struct PixelShuffled<B: Backend> {
    first: Conv2d<B>,
    norm: BatchNorm<B>,
    second: Conv2d<B>,
    again: BatchNorm<B>,
    out: Linear<B>,
}

impl<B: Backend> PixelShuffled<B> {
    fn new(device: &B::Device) -> Self {
        Self {
            first: conv([3, 8], 3, 1, device),
            norm: norm(2, device),
            second: conv([32, 4], 1, 1, device),
            again: norm(4, device),
            out: linear(4 * 16, CLASSES, device),
        }
    }
}

impl<B: Backend> Trainable<B> for PixelShuffled<B> {
    fn logits(&self, batch: &Batch<B>) -> Tensor<B, 2> {
        let x = self.first.forward(images(batch));
        let [examples, _, height, width] = x.dims();
        let x = x
            .reshape([examples, 2, 2, 2, height, width])
            .permute([0, 1, 4, 2, 5, 3]);
        let x = self
            .norm
            .forward(x.reshape([examples, 2, 2 * height, 2 * width]))
            .tanh();
        let x = x
            .reshape([examples, 2, height / 2, 4, width / 2, 4])
            .permute([0, 1, 3, 5, 2, 4]);
        let x = self
            .second
            .forward(x.reshape([examples, 32, height / 2, width / 2]));
        self.out.forward(self.again.forward(x).tanh().flatten::<2>(1, 3))
    }
}

/// Patches by a strided convolution, and by a reshape with a linear layer.
#[derive(Module, Debug)]
struct Patches<B: Backend> {
    convolved: Conv2d<B>,
    taken: Linear<B>,
    place: Param<Tensor<B, 3>>,
    norm: LayerNorm<B>,
    mix: Linear<B>,
    out: Linear<B>,
}

impl<B: Backend> Patches<B> {
    fn new(device: &B::Device) -> Self {
        Self {
            convolved: Conv2dConfig::new([3, 10], [4, 4])
                .with_stride([4, 4])
                .init(device),
            taken: linear(48, 10, device),
            place: Param::from_tensor(Tensor::random(
                [1, 4, 10],
                Distribution::Uniform(-0.5, 0.5),
                device,
            )),
            norm: LayerNormConfig::new(10).init(device),
            mix: linear(4, 4, device),
            out: linear(40, CLASSES, device),
        }
    }
}

impl<B: Backend> Trainable<B> for Patches<B> {
    fn logits(&self, batch: &Batch<B>) -> Tensor<B, 2> {
        let x = images(batch);
        let [examples, ..] = x.dims();
        let patches = x
            .clone()
            .reshape([examples, 3, 2, 4, 2, 4])
            .permute([0, 2, 4, 3, 5, 1]);
        let taken = self.taken.forward(patches.reshape([examples, 4, 48]));
        let convolved: Tensor<B, 3> = self.convolved.forward(x).flatten::<3>(2, 3).swap_dims(1, 2);
        let x = self.norm.forward(taken + convolved + self.place.val());
        let mixed = self.mix.forward(x.clone().swap_dims(1, 2)).swap_dims(1, 2);
        self.out.forward((x + mixed.tanh()).flatten::<2>(1, 2))
    }
}

/// Vectors that become images whose groups of channels are normalised.
#[derive(Module, Debug)]
struct Groups<B: Backend> {
    first: Linear<B>,
    groups: GroupNorm<B>,
    conv: Conv2d<B>,
    again: GroupNorm<B>,
    vectors: BatchNorm<B>,
    out: Linear<B>,
}

impl<B: Backend> Groups<B> {
    fn new(device: &B::Device) -> Self {
        Self {
            first: linear(WIDTH, 6 * 16, device),
            groups: GroupNormConfig::new(3, 6).init(device),
            conv: conv([6, 4], 3, 1, device),
            again: GroupNormConfig::new(2, 4).init(device),
            vectors: norm(64, device),
            out: linear(64, CLASSES, device),
        }
    }
}

impl<B: Backend> Trainable<B> for Groups<B> {
    fn logits(&self, batch: &Batch<B>) -> Tensor<B, 2> {
        let x = self.first.forward(batch.values.clone()).reshape([-1, 6, 4, 4]);
        let x = self.conv.forward(self.groups.forward(x).tanh());
        let x = self.again.forward(x).tanh().flatten::<2>(1, 3);
        self.out.forward(self.vectors.forward(x))
    }
}

/// Attention in shifted windows, as a Swin transformer has it.
#[derive(Module, Debug)]
struct Windows<B: Backend> {
    patches: Conv2d<B>,
    norm: LayerNorm<B>,
    qkv: Linear<B>,
    joined: Linear<B>,
    merged: Linear<B>,
    out: Linear<B>,
}

const WINDOW: usize = 2;

impl<B: Backend> Windows<B> {
    fn new(device: &B::Device) -> Self {
        Self {
            patches: Conv2dConfig::new([3, 6], [2, 2]).with_stride([2, 2]).init(device),
            norm: LayerNormConfig::new(6).init(device),
            qkv: linear(6, 18, device),
            joined: linear(6, 6, device),
            merged: linear(24, 5, device),
            out: linear(20, CLASSES, device),
        }
    }

    fn attention(&self, x: Tensor<B, 3>) -> Tensor<B, 3> {
        let [windows, pixels, channels] = x.dims();
        let qkv = self
            .qkv
            .forward(x)
            .reshape([windows, pixels, 3, 2, 3])
            .permute([2, 0, 3, 1, 4]);
        let of = |part: usize| -> Tensor<B, 4> { qkv.clone().narrow(0, part, 1).squeeze_dim(0) };
        let scores = of(0).matmul(of(1).swap_dims(2, 3)) * 3f64.sqrt().recip();
        let values = softmax(scores, 3).matmul(of(2));
        self.joined
            .forward(values.swap_dims(1, 2).reshape([windows, pixels, channels]))
    }
}

impl<B: Backend> Trainable<B> for Windows<B> {
    fn logits(&self, batch: &Batch<B>) -> Tensor<B, 2> {
        let x = self.patches.forward(images(batch)).permute([0, 2, 3, 1]);
        let [examples, height, width, channels] = x.dims();
        let counts = [height / WINDOW, width / WINDOW];
        let shifted = self.norm.forward(x.clone()).roll(&[-1, -1], &[1, 2]);
        let windows = shifted
            .reshape([examples, counts[0], WINDOW, counts[1], WINDOW, channels])
            .swap_dims(2, 3)
            .reshape([examples * counts[0] * counts[1], WINDOW * WINDOW, channels]);
        let windows = self.attention(windows);
        let back = windows
            .reshape([examples, counts[0], counts[1], WINDOW, WINDOW, channels])
            .swap_dims(2, 3)
            .reshape([examples, height, width, channels])
            .roll(&[1, 1], &[1, 2]);
        let x = x + back;
        // Patches are merged, four to one.
        let merged = x
            .reshape([examples, height / 2, 2, width / 2, 2, channels])
            .permute([0, 1, 3, 4, 2, 5])
            .reshape([examples, height / 2 * (width / 2), 4 * channels]);
        self.out
            .forward(self.merged.forward(merged).tanh().flatten::<2>(1, 2))
    }
}

/// Separable convolutions with strides, then vectors.
#[derive(Module, Debug)]
struct Depthwise<B: Backend> {
    wide: Conv2d<B>,
    first: BatchNorm<B>,
    depthwise: Conv2d<B>,
    second: BatchNorm<B>,
    narrow: Conv2d<B>,
    hidden: Linear<B>,
    vectors: BatchNorm<B>,
    out: Linear<B>,
}

impl<B: Backend> Depthwise<B> {
    fn new(device: &B::Device) -> Self {
        Self {
            wide: conv([3, 9], 1, 1, device),
            first: norm(9, device),
            depthwise: Conv2dConfig::new([9, 9], [3, 3])
                .with_stride([2, 2])
                .with_groups(9)
                .init(device),
            second: norm(9, device),
            narrow: conv([9, 5], 1, 1, device),
            hidden: linear(5 * 9, 11, device),
            vectors: norm(11, device),
            out: linear(11, CLASSES, device),
        }
    }
}

impl<B: Backend> Trainable<B> for Depthwise<B> {
    fn logits(&self, batch: &Batch<B>) -> Tensor<B, 2> {
        let x = self.first.forward(self.wide.forward(images(batch))).tanh();
        let x = self.second.forward(self.depthwise.forward(x)).tanh();
        let x = self.hidden.forward(self.narrow.forward(x).flatten::<2>(1, 3));
        self.out.forward(self.vectors.forward(x).tanh())
    }
}

/// Transposed convolutions to odd sizes.
#[derive(Module, Debug)]
struct Growing<B: Backend> {
    first: Linear<B>,
    grow: ConvTranspose2d<B>,
    norm: BatchNorm<B>,
    again: ConvTranspose2d<B>,
    last: BatchNorm<B>,
    out: Linear<B>,
}

impl<B: Backend> Growing<B> {
    fn new(device: &B::Device) -> Self {
        Self {
            first: linear(WIDTH, 5 * 9, device),
            grow: ConvTranspose2dConfig::new([5, 4], [3, 3])
                .with_stride([2, 2])
                .init(device),
            norm: norm(4, device),
            again: ConvTranspose2dConfig::new([4, 3], [2, 2])
                .with_stride([1, 1])
                .init(device),
            last: norm(3, device),
            out: linear(3 * 64, CLASSES, device),
        }
    }
}

impl<B: Backend> Trainable<B> for Growing<B> {
    fn logits(&self, batch: &Batch<B>) -> Tensor<B, 2> {
        let x = self.first.forward(batch.values.clone()).reshape([-1, 5, 3, 3]);
        let x = self.norm.forward(self.grow.forward(x)).tanh();
        let x = self.last.forward(self.again.forward(x)).tanh();
        self.out.forward(x.flatten::<2>(1, 3))
    }
}

/// Attention of three heads of five over six words, whose words are flattened.
#[derive(Module, Debug)]
struct Heads<B: Backend> {
    embedding: Embedding<B>,
    query: Linear<B>,
    key: Linear<B>,
    value: Linear<B>,
    joined: Linear<B>,
    norm: BatchNorm<B>,
    out: Linear<B>,
}

impl<B: Backend> Heads<B> {
    fn new(device: &B::Device) -> Self {
        Self {
            embedding: EmbeddingConfig::new(VOCABULARY, 7).init(device),
            query: linear(7, 15, device),
            key: linear(7, 15, device),
            value: linear(7, 15, device),
            joined: linear(15, 7, device),
            norm: norm(7, device),
            out: linear(7 * LENGTH, CLASSES, device),
        }
    }
}

impl<B: Backend> Trainable<B> for Heads<B> {
    fn logits(&self, batch: &Batch<B>) -> Tensor<B, 2> {
        let x = self.embedding.forward(batch.tokens.clone());
        let [examples, words, _] = x.dims();
        let heads = |x: Tensor<B, 3>| x.reshape([examples, words, 3, 5]).swap_dims(1, 2);
        let query = heads(self.query.forward(x.clone()));
        let key = heads(self.key.forward(x.clone()));
        let value = heads(self.value.forward(x.clone()));
        let weights = softmax(query.matmul(key.swap_dims(2, 3)) * 5f64.sqrt().recip(), 3);
        let joined = weights
            .matmul(value)
            .swap_dims(1, 2)
            .reshape([examples, words, 15]);
        let x = x + self.joined.forward(joined);
        let x = self.norm.forward(x.swap_dims(1, 2)).tanh();
        self.out.forward(x.flatten::<2>(1, 2))
    }
}

/// Windows as columns, multiplied by a matrix.
#[derive(Module, Debug)]
struct Unfolded<B: Backend> {
    columns: Linear<B>,
    norm: BatchNorm<B>,
    attention: Linear<B>,
    out: Linear<B>,
}

impl<B: Backend> Unfolded<B> {
    fn new(device: &B::Device) -> Self {
        Self {
            columns: linear(27, 6, device),
            norm: norm(6, device),
            attention: linear(36, 4, device),
            out: linear(16, CLASSES, device),
        }
    }
}

impl<B: Backend> Trainable<B> for Unfolded<B> {
    fn logits(&self, batch: &Batch<B>) -> Tensor<B, 2> {
        let options = UnfoldOptions::new([1, 1], [0, 0], [1, 1]);
        let columns = unfold4d(images(batch), [3, 3], options);
        let [examples, ..] = columns.dims();
        let x = self.columns.forward(columns.swap_dims(1, 2)).swap_dims(1, 2);
        let x = self.norm.forward(x.reshape([examples, 6, 6, 6])).tanh();
        // Windows of three with a stride of three, along both axes.
        let windows: Tensor<B, 5> = x.unfold::<5, _>(2, 3, 3);
        let windows: Tensor<B, 6> = windows.unfold::<6, _>(3, 3, 3);
        let windows = windows.permute([0, 2, 3, 1, 4, 5]).reshape([examples * 4, 6, 9]);
        let windows = windows.slice([0..examples * 4, 0..4]).reshape([examples, 4, 36]);
        self.out
            .forward(self.attention.forward(windows).tanh().flatten::<2>(1, 2))
    }
}

/// Blocks whose inputs are joined to their results, with pieces of a flattened concatenation.
#[derive(Module, Debug)]
struct Dense<B: Backend> {
    first: Conv2d<B>,
    one: BatchNorm<B>,
    second: Conv2d<B>,
    two: BatchNorm<B>,
    third: Conv2d<B>,
    all: BatchNorm<B>,
    out: Linear<B>,
}

impl<B: Backend> Dense<B> {
    fn new(device: &B::Device) -> Self {
        Self {
            first: conv([3, 4], 3, 1, device),
            one: norm(7, device),
            second: conv([7, 3], 1, 1, device),
            two: norm(10, device),
            third: conv([10, 2], 3, 1, device),
            all: norm(2, device),
            out: linear(64 * 5 + WIDTH, CLASSES, device),
        }
    }
}

impl<B: Backend> Trainable<B> for Dense<B> {
    fn logits(&self, batch: &Batch<B>) -> Tensor<B, 2> {
        let x = images(batch);
        let x = Tensor::cat(vec![self.first.forward(x.clone()).tanh(), x], 1);
        let narrow = self.second.forward(relu(self.one.forward(x.clone()) + 3.0));
        let x = Tensor::cat(vec![x, narrow.clone().tanh()], 1);
        let last = self.all.forward(self.third.forward(self.two.forward(x)));
        let pieces = vec![
            last.flatten::<2>(1, 3),
            narrow.permute([0, 2, 3, 1]).flatten::<2>(1, 3),
            batch.values.clone().tanh(),
        ];
        self.out.forward(Tensor::cat(pieces, 1))
    }
}

/// Words through convolutions of one dimension.
#[derive(Module, Debug)]
struct Sequences<B: Backend> {
    embedding: Embedding<B>,
    conv: Conv1d<B>,
    norm: BatchNorm<B>,
    pool: MaxPool1d,
    again: Conv1d<B>,
    last: BatchNorm<B>,
    out: Linear<B>,
}

impl<B: Backend> Sequences<B> {
    fn new(device: &B::Device) -> Self {
        Self {
            embedding: EmbeddingConfig::new(VOCABULARY, 6).init(device),
            conv: Conv1dConfig::new(6, 8, 3)
                .with_padding(PaddingConfig1d::Explicit(1, 1))
                .init(device),
            norm: norm(8, device),
            pool: MaxPool1dConfig::new(2).with_stride(2).init(),
            again: Conv1dConfig::new(8, 5, 1).with_groups(1).init(device),
            last: norm(5, device),
            out: linear(15, CLASSES, device),
        }
    }
}

impl<B: Backend> Trainable<B> for Sequences<B> {
    fn logits(&self, batch: &Batch<B>) -> Tensor<B, 2> {
        let x = self.embedding.forward(batch.tokens.clone()).swap_dims(1, 2);
        let x = self.pool.forward(self.norm.forward(self.conv.forward(x)).tanh());
        let x = self.last.forward(self.again.forward(x)).tanh();
        self.out.forward(x.flatten::<2>(1, 2))
    }
}

/// Linear layers along rows, columns and channels of images in turn, joined and split in between.
#[derive(Module, Debug)]
struct Mixer<B: Backend> {
    conv: Conv2d<B>,
    norm: BatchNorm<B>,
    pixels: Linear<B>,
    rows: Linear<B>,
    layers: LayerNorm<B>,
    last: Conv2d<B>,
    out: Linear<B>,
}

impl<B: Backend> Mixer<B> {
    fn new(device: &B::Device) -> Self {
        Self {
            conv: conv([3, 6], 3, 1, device),
            norm: norm(6, device),
            pixels: linear(64, 48, device),
            rows: linear(36, 36, device),
            layers: LayerNormConfig::new(24).init(device),
            last: conv([12, 3], 1, 1, device),
            out: linear(3 * 24, CLASSES, device),
        }
    }
}

impl<B: Backend> Trainable<B> for Mixer<B> {
    fn logits(&self, batch: &Batch<B>) -> Tensor<B, 2> {
        let x = self.norm.forward(self.conv.forward(images(batch)));
        let [examples, ..] = x.dims();
        // [6, 48] seen as [8, 36], mixed, and seen as [12, 24].
        let x = self.pixels.forward(x.flatten::<3>(2, 3)).tanh();
        let x = self.rows.forward(x.reshape([examples, 8, 36])).swap_dims(1, 2);
        let x = self.layers.forward(x.reshape([examples, 12, 24]));
        let x = self.last.forward(x.reshape([examples, 12, 4, 6]));
        self.out
            .forward(x.tanh().permute([0, 3, 1, 2]).flatten::<2>(1, 3))
    }
}
