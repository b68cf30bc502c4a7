//! The encoder: embeddings, layers of attention and feed-forward network, and the pooler.

use super::BertConfig;
use crate::ModelError;
use crate::keys::{KeyPattern, Pretrained};
use crate::layers::{Activation, TokenEmbedding, attention, merge_heads, split_heads};
use burn::module::{Initializer, Module};
use burn::nn::{Dropout, DropoutConfig, LayerNorm, LayerNormConfig, Linear, LinearConfig};
use burn::tensor::backend::Backend;
use burn::tensor::{Bool, Int, Tensor};

/// A linear layer with normal weights and a zero bias.
pub(super) fn linear<B: Backend>(
    config: &BertConfig,
    input: usize,
    output: usize,
    device: &B::Device,
) -> Linear<B> {
    let initializer = Initializer::Normal {
        mean: 0.0,
        std: config.initializer_range,
    };
    let mut linear = LinearConfig::new(input, output)
        .with_initializer(initializer)
        .init(device);
    linear.bias = Some(Initializer::Zeros.init([output], device));
    linear
}

pub(super) fn layer_norm<B: Backend>(config: &BertConfig, device: &B::Device) -> LayerNorm<B> {
    LayerNormConfig::new(config.hidden_size)
        .with_epsilon(config.layer_norm_eps)
        .init(device)
}

pub(super) fn dropout(prob: f64) -> Dropout {
    DropoutConfig::new(prob).init()
}

/// Sum of token, segment and position embeddings, normalised.
#[derive(Module, Debug)]
pub struct BertEmbeddings<B: Backend> {
    pub(super) word_embeddings: TokenEmbedding<B>,
    position_embeddings: TokenEmbedding<B>,
    token_type_embeddings: TokenEmbedding<B>,
    layer_norm: LayerNorm<B>,
    dropout: Dropout,
}

impl<B: Backend> BertEmbeddings<B> {
    fn new(config: &BertConfig, device: &B::Device) -> Self {
        let table = |rows: usize, padding: Option<usize>| {
            TokenEmbedding::new(
                rows,
                config.hidden_size,
                config.initializer_range,
                padding,
                device,
            )
        };
        Self {
            word_embeddings: table(config.vocab_size, config.pad_token_id),
            position_embeddings: table(config.max_position_embeddings, None),
            token_type_embeddings: table(config.type_vocab_size, None),
            layer_norm: layer_norm(config, device),
            dropout: dropout(config.hidden_dropout_prob),
        }
    }

    /// Whether there are positions for texts of `length` tokens.
    fn check_length(&self, length: usize) -> Result<(), ModelError> {
        let longest = self.position_embeddings.weight.lazy_shape()[0];
        if length <= longest {
            return Ok(());
        }
        Err(ModelError::Input {
            family: "bert",
            reason: format!(
                "texts of {length} tokens, but the model has {longest} positions (`max_position_embeddings`): cut the \
                 texts to {longest} tokens"
            ),
        })
    }

    fn forward(&self, tokens: Tensor<B, 2, Int>, segments: Option<Tensor<B, 2, Int>>) -> Tensor<B, 3> {
        let [_, length] = tokens.dims();
        if let Err(error) = self.check_length(length) {
            panic!("{error}");
        }
        let words = self.word_embeddings.forward(tokens);
        // Every token of an absent segment input belongs to segment 0, and positions count from 0: both
        // lookups are slices of their tables.
        let segments = match segments {
            Some(segments) => self.token_type_embeddings.forward(segments),
            None => self
                .token_type_embeddings
                .weight
                .val()
                .slice_dim(0, 0..1)
                .unsqueeze_dim(0),
        };
        let positions = self
            .position_embeddings
            .weight
            .val()
            .slice_dim(0, 0..length)
            .unsqueeze_dim(0);
        self.dropout
            .forward(self.layer_norm.forward(words + segments + positions))
    }
}

/// A dense layer whose output joins the residual stream: dense, dropout, sum, layer norm.
#[derive(Module, Debug)]
pub struct BertOutput<B: Backend> {
    dense: Linear<B>,
    layer_norm: LayerNorm<B>,
    dropout: Dropout,
}

impl<B: Backend> BertOutput<B> {
    fn new(config: &BertConfig, input: usize, device: &B::Device) -> Self {
        Self {
            dense: linear(config, input, config.hidden_size, device),
            layer_norm: layer_norm(config, device),
            dropout: dropout(config.hidden_dropout_prob),
        }
    }

    fn forward(&self, hidden: Tensor<B, 3>, residual: Tensor<B, 3>) -> Tensor<B, 3> {
        self.layer_norm
            .forward(self.dropout.forward(self.dense.forward(hidden)) + residual)
    }
}

/// Projections of self-attention.
#[derive(Module, Debug)]
pub struct BertSelfAttention<B: Backend> {
    query: Linear<B>,
    key: Linear<B>,
    value: Linear<B>,
    dropout: Dropout,
    heads: usize,
}

/// Self-attention with its output projection and residual sum.
#[derive(Module, Debug)]
pub struct BertAttention<B: Backend> {
    self_attention: BertSelfAttention<B>,
    output: BertOutput<B>,
}

impl<B: Backend> BertAttention<B> {
    fn new(config: &BertConfig, device: &B::Device) -> Self {
        let width = config.hidden_size;
        Self {
            self_attention: BertSelfAttention {
                query: linear(config, width, width, device),
                key: linear(config, width, width, device),
                value: linear(config, width, width, device),
                dropout: dropout(config.attention_probs_dropout_prob),
                heads: config.num_attention_heads,
            },
            output: BertOutput::new(config, width, device),
        }
    }

    fn forward(&self, hidden: Tensor<B, 3>, mask: Option<Tensor<B, 4, Bool>>) -> Tensor<B, 3> {
        let inner = &self.self_attention;
        let query = split_heads(inner.query.forward(hidden.clone()), inner.heads);
        let key = split_heads(inner.key.forward(hidden.clone()), inner.heads);
        let value = split_heads(inner.value.forward(hidden.clone()), inner.heads);
        let scale = (query.dims()[3] as f64).powf(-0.5);
        let context = attention(query, key, value, mask, scale, &inner.dropout);
        self.output.forward(merge_heads(context), hidden)
    }
}

/// The widening half of the feed-forward network.
#[derive(Module, Debug)]
pub struct BertIntermediate<B: Backend> {
    dense: Linear<B>,
}

/// One encoder layer: self-attention, then the feed-forward network.
#[derive(Module, Debug)]
pub struct BertLayer<B: Backend> {
    attention: BertAttention<B>,
    intermediate: BertIntermediate<B>,
    output: BertOutput<B>,
    #[module(skip)]
    activation: Activation,
}

impl<B: Backend> BertLayer<B> {
    fn new(config: &BertConfig, device: &B::Device) -> Self {
        Self {
            attention: BertAttention::new(config, device),
            intermediate: BertIntermediate {
                dense: linear(config, config.hidden_size, config.intermediate_size, device),
            },
            output: BertOutput::new(config, config.intermediate_size, device),
            activation: config.hidden_act,
        }
    }

    fn forward(&self, hidden: Tensor<B, 3>, mask: Option<Tensor<B, 4, Bool>>) -> Tensor<B, 3> {
        let hidden = self.attention.forward(hidden, mask);
        let wide = self
            .activation
            .forward(self.intermediate.dense.forward(hidden.clone()));
        self.output.forward(wide, hidden)
    }
}

/// The stack of encoder layers.
#[derive(Module, Debug)]
pub struct BertEncoder<B: Backend> {
    layer: Vec<BertLayer<B>>,
}

/// A dense layer with hyperbolic tangent on the first token.
#[derive(Module, Debug)]
pub struct BertPooler<B: Backend> {
    dense: Linear<B>,
}

/// The BERT encoder.
#[derive(Module, Debug)]
pub struct BertModel<B: Backend> {
    pub(super) embeddings: BertEmbeddings<B>,
    encoder: BertEncoder<B>,
    pooler: Option<BertPooler<B>>,
}

impl<B: Backend> BertModel<B> {
    pub(super) fn new(config: &BertConfig, pooler: bool, device: &B::Device) -> Self {
        if let Err(error) = config.validate() {
            panic!("{error}");
        }
        let width = config.hidden_size;
        Self {
            embeddings: BertEmbeddings::new(config, device),
            encoder: BertEncoder {
                layer: (0..config.num_hidden_layers)
                    .map(|_| BertLayer::new(config, device))
                    .collect(),
            },
            pooler: pooler.then(|| BertPooler {
                dense: linear(config, width, width, device),
            }),
        }
    }

    /// Whether the model takes texts of `length` tokens.
    ///
    /// # Errors
    ///
    /// [`ModelError::Input`] if it has fewer positions.
    pub fn check_length(&self, length: usize) -> Result<(), ModelError> {
        self.embeddings.check_length(length)
    }

    /// Hidden states of the last layer.
    ///
    /// # Panics
    ///
    /// If the texts are longer than [`check_length`](Self::check_length) allows.
    ///
    /// # Shapes
    ///
    /// - tokens: `[batch, length]`
    /// - segments: `[batch, length]`; absent means segment 0 everywhere
    /// - keep: `[batch, length]`, transformers' `attention_mask`: 0 hides a token from all others
    /// - output: `[batch, length, hidden_size]`
    pub fn forward(
        &self,
        tokens: Tensor<B, 2, Int>,
        segments: Option<Tensor<B, 2, Int>>,
        keep: Option<Tensor<B, 2, Int>>,
    ) -> Tensor<B, 3> {
        let [batch, length] = tokens.dims();
        let mask = keep.map(|keep| keep.equal_elem(0).reshape([batch, 1, 1, length]));
        let mut hidden = self.embeddings.forward(tokens, segments);
        for layer in &self.encoder.layer {
            hidden = layer.forward(hidden, mask.clone());
        }
        hidden
    }

    /// The pooled first token of hidden states, `[batch, hidden_size]`; the bare first token if there is no
    /// pooler.
    pub fn pool(&self, hidden: Tensor<B, 3>) -> Tensor<B, 2> {
        let [batch, _, width] = hidden.dims();
        let first = hidden.slice_dim(1, 0..1).reshape([batch, width]);
        match &self.pooler {
            Some(pooler) => pooler.dense.forward(first).tanh(),
            None => first,
        }
    }

    /// Sentence embeddings: the mean of the last hidden states over the tokens that `keep` keeps,
    /// `[batch, hidden_size]`.
    ///
    /// Inputs as for [`forward`](Self::forward). sentence-transformers normalises the result to length 1, see
    /// [`embed_normalized`](Self::embed_normalized).
    pub fn embed(
        &self,
        tokens: Tensor<B, 2, Int>,
        segments: Option<Tensor<B, 2, Int>>,
        keep: Option<Tensor<B, 2, Int>>,
    ) -> Tensor<B, 2> {
        let hidden = self.forward(tokens, segments, keep.clone());
        let [batch, length, width] = hidden.dims();
        match keep {
            None => hidden.mean_dim(1).reshape([batch, width]),
            Some(keep) => {
                let weight = keep.float().cast(hidden.dtype()).reshape([batch, length, 1]);
                let sum = (hidden * weight.clone()).sum_dim(1);
                (sum / weight.sum_dim(1).clamp_min(1e-9)).reshape([batch, width])
            }
        }
    }

    /// [`embed`](Self::embed), each row divided by its Euclidean length.
    pub fn embed_normalized(
        &self,
        tokens: Tensor<B, 2, Int>,
        segments: Option<Tensor<B, 2, Int>>,
        keep: Option<Tensor<B, 2, Int>>,
    ) -> Tensor<B, 2> {
        let vectors = self.embed(tokens, segments, keep);
        let length = vectors.clone().square().sum_dim(1).sqrt().clamp_min(1e-12);
        vectors / length
    }
}

impl<B: Backend> Pretrained<B> for BertModel<B> {
    fn family(&self) -> &'static str {
        "bert"
    }

    fn original_key(&self, path: &str) -> String {
        super::original_segments(path)
    }

    fn aliases(&self, key: &str) -> Vec<String> {
        super::aliases(key)
    }

    fn is_head(&self, key: &str) -> bool {
        key.starts_with("pooler.")
    }

    fn ignorable(&self) -> Vec<KeyPattern> {
        let heads = ["cls.", "classifier.", "qa_outputs."].map(|head| KeyPattern::Prefix(head.into()));
        super::computed_keys().into_iter().chain(heads).collect()
    }
}
