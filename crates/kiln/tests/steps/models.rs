//! Small models of each family, and one batch for them.

use burn::module::{Module, Param};
use burn::nn::activation::{Activation, ActivationConfig};
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::pool::{AdaptiveAvgPool2d, AdaptiveAvgPool2dConfig, MaxPool2d, MaxPool2dConfig};
use burn::nn::transformer::{
    TransformerDecoder, TransformerDecoderConfig, TransformerDecoderInput, TransformerEncoder,
    TransformerEncoderConfig, TransformerEncoderInput,
};
use burn::nn::{
    BatchNorm, BatchNormConfig, Dropout, DropoutConfig, Embedding, EmbeddingConfig, Linear, LinearConfig,
    Lstm, LstmConfig, Relu,
};
use burn::tensor::backend::Backend;
use burn::tensor::{Distribution, Int, Tensor, TensorData};
use kiln::StepInput;

/// Inputs and labels. Images, sequences and vectors are views of the same numbers.
#[derive(Clone, Debug, StepInput)]
pub struct Batch<B: Backend> {
    pub values: Tensor<B, 2>,
    pub tokens: Tensor<B, 2, Int>,
    pub labels: Tensor<B, 1, Int>,
}

pub const EXAMPLES: usize = 4;
pub const WIDTH: usize = 48;
pub const LENGTH: usize = 6;
pub const VOCABULARY: usize = 11;
pub const CLASSES: usize = 3;

/// A batch that depends on `step` alone.
pub fn batch<B: Backend>(step: usize, examples: usize, device: &B::Device) -> Batch<B> {
    let value = |index: usize| (((index * 37 + step * 101) % 97) as f32 / 48.5 - 1.0) * 1.3;
    let values: Vec<f32> = (0..examples * WIDTH).map(value).collect();
    let tokens: Vec<i32> = (0..examples * LENGTH)
        .map(|index| ((index * 7 + step * 3) % VOCABULARY) as i32)
        .collect();
    let labels: Vec<i32> = (0..examples)
        .map(|index| ((index + step) % CLASSES) as i32)
        .collect();
    Batch {
        values: Tensor::from_data(TensorData::new(values, [examples, WIDTH]), device),
        tokens: Tensor::from_data(TensorData::new(tokens, [examples, LENGTH]), device),
        labels: Tensor::from_data(TensorData::new(labels, [examples]), device),
    }
}

/// A model that can be trained on a [`Batch`].
pub trait Trainable<B: Backend>: Module<B> {
    fn logits(&self, batch: &Batch<B>) -> Tensor<B, 2>;

    fn loss(&self, batch: Batch<B>) -> Tensor<B, 1> {
        let logits = self.logits(&batch);
        CrossEntropyLossConfig::new()
            .init(&logits.device())
            .forward(logits, batch.labels)
    }
}

#[derive(Module, Debug)]
pub struct Mlp<B: Backend> {
    hidden: Linear<B>,
    out: Linear<B>,
    activation: Activation<B>,
    scale: Param<Tensor<B, 1>>,
}

impl<B: Backend> Mlp<B> {
    pub fn new(device: &B::Device) -> Self {
        Self::with_activation(ActivationConfig::Gelu, device)
    }

    pub fn with_activation(activation: ActivationConfig, device: &B::Device) -> Self {
        Self {
            hidden: LinearConfig::new(WIDTH, 16).init(device),
            out: LinearConfig::new(16, CLASSES).with_bias(false).init(device),
            activation: activation.init(device),
            scale: Param::from_tensor(Tensor::ones([16], device)),
        }
    }
}

impl<B: Backend> Trainable<B> for Mlp<B> {
    fn logits(&self, batch: &Batch<B>) -> Tensor<B, 2> {
        let hidden = self.activation.forward(self.hidden.forward(batch.values.clone()));
        self.out.forward(hidden * self.scale.val().unsqueeze())
    }
}

/// Matrices alone, for an optimizer that takes nothing else.
#[derive(Module, Debug)]
pub struct Matrices<B: Backend> {
    hidden: Linear<B>,
    out: Linear<B>,
    activation: Relu,
}

impl<B: Backend> Matrices<B> {
    pub fn new(device: &B::Device) -> Self {
        Self {
            hidden: LinearConfig::new(WIDTH, 16).with_bias(false).init(device),
            out: LinearConfig::new(16, CLASSES).with_bias(false).init(device),
            activation: Relu::new(),
        }
    }
}

impl<B: Backend> Trainable<B> for Matrices<B> {
    fn logits(&self, batch: &Batch<B>) -> Tensor<B, 2> {
        let hidden = self.activation.forward(self.hidden.forward(batch.values.clone()));
        self.out.forward(hidden)
    }
}

#[derive(Module, Debug)]
pub struct Cnn<B: Backend> {
    first: Conv2d<B>,
    norm: BatchNorm<B>,
    second: Conv2d<B>,
    pool: MaxPool2d,
    mean: AdaptiveAvgPool2d,
    dropout: Dropout,
    activation: Relu,
    out: Linear<B>,
}

impl<B: Backend> Cnn<B> {
    pub fn new(dropout: f64, device: &B::Device) -> Self {
        Self {
            first: Conv2dConfig::new([3, 8], [3, 3])
                .with_padding(burn::nn::PaddingConfig2d::Explicit(1, 1, 1, 1))
                .init(device),
            norm: BatchNormConfig::new(8).init(device),
            second: Conv2dConfig::new([8, 6], [3, 3])
                .with_groups(2)
                .with_bias(false)
                .init(device),
            pool: MaxPool2dConfig::new([2, 2]).with_strides([1, 1]).init(),
            mean: AdaptiveAvgPool2dConfig::new([1, 1]).init(),
            dropout: DropoutConfig::new(dropout).init(),
            activation: Relu::new(),
            out: LinearConfig::new(6, CLASSES).init(device),
        }
    }
}

impl<B: Backend> Trainable<B> for Cnn<B> {
    fn logits(&self, batch: &Batch<B>) -> Tensor<B, 2> {
        let [examples, _] = batch.values.dims();
        let images = batch.values.clone().reshape([examples, 3, 4, 4]);
        let x = self
            .activation
            .forward(self.norm.forward(self.first.forward(images)));
        let x = self.dropout.forward(x);
        let x = self
            .activation
            .forward(self.second.forward(self.pool.forward(x.pad((1, 1, 1, 1), 0.0))));
        self.out.forward(self.mean.forward(x).flatten(1, 3))
    }
}

#[derive(Module, Debug)]
pub struct Encoder<B: Backend> {
    embedding: Embedding<B>,
    layers: TransformerEncoder<B>,
    out: Linear<B>,
}

impl<B: Backend> Encoder<B> {
    pub fn new(dropout: f64, device: &B::Device) -> Self {
        Self::with_activation(ActivationConfig::Gelu, dropout, device)
    }

    pub fn with_activation(activation: ActivationConfig, dropout: f64, device: &B::Device) -> Self {
        Self {
            embedding: EmbeddingConfig::new(VOCABULARY, 16).init(device),
            layers: TransformerEncoderConfig::new(16, 32, 4, 2)
                .with_dropout(dropout)
                .with_activation(activation)
                .init(device),
            out: LinearConfig::new(16, CLASSES).init(device),
        }
    }
}

impl<B: Backend> Trainable<B> for Encoder<B> {
    fn logits(&self, batch: &Batch<B>) -> Tensor<B, 2> {
        let x = self.embedding.forward(batch.tokens.clone());
        let x = self.layers.forward(TransformerEncoderInput::new(x));
        self.out.forward(x.mean_dim(1).squeeze_dim(1))
    }
}

#[derive(Module, Debug)]
pub struct Decoder<B: Backend> {
    embedding: Embedding<B>,
    layers: TransformerDecoder<B>,
    out: Linear<B>,
}

impl<B: Backend> Decoder<B> {
    pub fn new(device: &B::Device) -> Self {
        Self::with_activation(ActivationConfig::Gelu, device)
    }

    pub fn with_activation(activation: ActivationConfig, device: &B::Device) -> Self {
        Self {
            embedding: EmbeddingConfig::new(VOCABULARY, 12).init(device),
            layers: TransformerDecoderConfig::new(12, 20, 2, 1)
                .with_dropout(0.0)
                .with_norm_first(true)
                .with_activation(activation)
                .init(device),
            out: LinearConfig::new(12, CLASSES).init(device),
        }
    }
}

impl<B: Backend> Trainable<B> for Decoder<B> {
    fn logits(&self, batch: &Batch<B>) -> Tensor<B, 2> {
        let memory = self.embedding.forward(batch.tokens.clone());
        let target = memory.clone().flip([1]);
        let x = self.layers.forward(TransformerDecoderInput::new(target, memory));
        self.out.forward(x.sum_dim(1).squeeze_dim(1))
    }
}

#[derive(Module, Debug)]
pub struct Recurrent<B: Backend> {
    embedding: Embedding<B>,
    cells: Lstm<B>,
    out: Linear<B>,
}

impl<B: Backend> Recurrent<B> {
    pub fn new(device: &B::Device) -> Self {
        Self {
            embedding: EmbeddingConfig::new(VOCABULARY, 8).init(device),
            cells: LstmConfig::new(8, 10, true).init(device),
            out: LinearConfig::new(10, CLASSES).init(device),
        }
    }
}

impl<B: Backend> Trainable<B> for Recurrent<B> {
    fn logits(&self, batch: &Batch<B>) -> Tensor<B, 2> {
        let (_, state) = self
            .cells
            .forward(self.embedding.forward(batch.tokens.clone()), None);
        self.out.forward(state.hidden)
    }
}

impl<B: Backend> Encoder<B> {
    /// The same model with an embedding that is not trained.
    pub fn freeze_embedding(mut self) -> Self {
        self.embedding = self.embedding.no_grad();
        self
    }
}

/// A layer that has one parameter twice: it is read as it is, and transposed.
#[derive(Module, Debug)]
pub struct Tied<B: Backend> {
    weight: Param<Tensor<B, 2>>,
    again: Param<Tensor<B, 2>>,
}

impl<B: Backend> Tied<B> {
    pub fn new(device: &B::Device) -> Self {
        let weight = Param::from_tensor(Tensor::random([6, 6], Distribution::Default, device));
        Self {
            again: weight.clone(),
            weight,
        }
    }

    /// The mean square of what comes of `x`, of shape `[any, 6]`.
    pub fn energy(&self, x: Tensor<B, 2>) -> Tensor<B, 1> {
        let hidden = x.matmul(self.weight.val()).tanh();
        let out = hidden.matmul(self.again.val().transpose());
        out.powf_scalar(2.0).mean()
    }
}
