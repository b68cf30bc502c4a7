//! The decoder: embeddings, layers of attention and feed-forward network, and the output projection.

use super::rope::{RopeSpec, RotaryEmbedding};
use super::{KvCache, LayerCache, LlamaConfig};
use crate::keys::{KeyPattern, Pretrained};
use crate::layers::{Activation, TokenEmbedding, attention, causal_mask, merge_heads, split_heads};
use crate::loss::{CrossEntropy, sequence_cross_entropy};
use burn::module::{Initializer, Module};
use burn::nn::{Dropout, DropoutConfig, Linear, LinearConfig, RmsNorm, RmsNormConfig};
use burn::tensor::backend::Backend;
use burn::tensor::{Bool, Int, Tensor};

fn linear<B: Backend>(
    config: &LlamaConfig,
    input: usize,
    output: usize,
    bias: bool,
    device: &B::Device,
) -> Linear<B> {
    let initializer = Initializer::Normal {
        mean: 0.0,
        std: config.initializer_range,
    };
    let linear = LinearConfig::new(input, output)
        .with_bias(false)
        .with_initializer(initializer);
    let mut linear = linear.init(device);
    linear.bias = bias.then(|| Initializer::Zeros.init([output], device));
    linear
}

fn rms_norm<B: Backend>(config: &LlamaConfig, device: &B::Device) -> RmsNorm<B> {
    RmsNormConfig::new(config.hidden_size)
        .with_epsilon(config.rms_norm_eps)
        .init(device)
}

/// Grouped-query attention with rotary positions.
#[derive(Module, Debug)]
pub struct LlamaAttention<B: Backend> {
    q_proj: Linear<B>,
    k_proj: Linear<B>,
    v_proj: Linear<B>,
    o_proj: Linear<B>,
    dropout: Dropout,
    heads: usize,
    kv_heads: usize,
}

impl<B: Backend> LlamaAttention<B> {
    fn new(config: &LlamaConfig, device: &B::Device) -> Self {
        let (width, bias) = (config.hidden_size, config.attention_bias);
        let query_width = config.num_attention_heads * config.head_width();
        let key_width = config.kv_heads() * config.head_width();
        Self {
            q_proj: linear(config, width, query_width, bias, device),
            k_proj: linear(config, width, key_width, bias, device),
            v_proj: linear(config, width, key_width, bias, device),
            o_proj: linear(config, query_width, width, bias, device),
            dropout: DropoutConfig::new(config.attention_dropout).init(),
            heads: config.num_attention_heads,
            kv_heads: config.kv_heads(),
        }
    }

    fn forward(
        &self,
        hidden: Tensor<B, 3>,
        angles: &[Tensor<B, 2>; 2],
        mask: Option<Tensor<B, 4, Bool>>,
        cache: Option<&mut LayerCache<B>>,
    ) -> Tensor<B, 3> {
        let query = split_heads(self.q_proj.forward(hidden.clone()), self.heads);
        let key = split_heads(self.k_proj.forward(hidden.clone()), self.kv_heads);
        let value = split_heads(self.v_proj.forward(hidden), self.kv_heads);
        let scale = (query.dims()[3] as f64).powf(-0.5);
        let query = RotaryEmbedding::rotate(query, angles);
        let key = RotaryEmbedding::rotate(key, angles);
        let [key, value] = match cache {
            Some(cache) => cache.append(key, value),
            None => [key, value],
        };
        let context = attention(query, key, value, mask, scale, &self.dropout);
        self.o_proj.forward(merge_heads(context))
    }
}

/// SwiGLU: `down(silu(gate(x)) * up(x))`; the configuration may name another activation than SiLU.
#[derive(Module, Debug)]
pub struct LlamaMlp<B: Backend> {
    gate_proj: Linear<B>,
    up_proj: Linear<B>,
    down_proj: Linear<B>,
    #[module(skip)]
    activation: Activation,
}

impl<B: Backend> LlamaMlp<B> {
    fn new(config: &LlamaConfig, device: &B::Device) -> Self {
        let (width, inner, bias) = (config.hidden_size, config.intermediate_size, config.mlp_bias);
        Self {
            gate_proj: linear(config, width, inner, bias, device),
            up_proj: linear(config, width, inner, bias, device),
            down_proj: linear(config, inner, width, bias, device),
            activation: config.hidden_act,
        }
    }

    fn forward(&self, hidden: Tensor<B, 3>) -> Tensor<B, 3> {
        let gate = self.activation.forward(self.gate_proj.forward(hidden.clone()));
        self.down_proj.forward(gate * self.up_proj.forward(hidden))
    }
}

/// One decoder layer, both halves with the norm before and the residual sum after.
#[derive(Module, Debug)]
pub struct DecoderLayer<B: Backend> {
    self_attn: LlamaAttention<B>,
    mlp: LlamaMlp<B>,
    input_layernorm: RmsNorm<B>,
    post_attention_layernorm: RmsNorm<B>,
}

impl<B: Backend> DecoderLayer<B> {
    fn forward(
        &self,
        hidden: Tensor<B, 3>,
        angles: &[Tensor<B, 2>; 2],
        mask: Option<Tensor<B, 4, Bool>>,
        cache: Option<&mut LayerCache<B>>,
    ) -> Tensor<B, 3> {
        let normed = self.input_layernorm.forward(hidden.clone());
        let hidden = hidden + self.self_attn.forward(normed, angles, mask, cache);
        let normed = self.post_attention_layernorm.forward(hidden.clone());
        hidden + self.mlp.forward(normed)
    }
}

/// The decoder without output projection.
#[derive(Module, Debug)]
pub struct LlamaModel<B: Backend> {
    embed_tokens: TokenEmbedding<B>,
    layers: Vec<DecoderLayer<B>>,
    norm: RmsNorm<B>,
    rope: RotaryEmbedding<B>,
}

impl<B: Backend> LlamaModel<B> {
    /// Hidden states after the last norm: `[batch, length]` tokens to `[batch, length, hidden_size]`.
    ///
    /// With a cache the tokens continue the positions it has seen, and are added to it.
    pub fn forward(&self, tokens: Tensor<B, 2, Int>, mut cache: Option<&mut KvCache<B>>) -> Tensor<B, 3> {
        let [_, length] = tokens.dims();
        let seen = cache.as_ref().map_or(0, |cache| cache.len());
        let angles = self.rope.positions(seen, seen + length);
        // A single new token may see everything, so it needs no mask.
        let mask = (length > 1).then(|| causal_mask(length, seen + length, &tokens.device()));
        let mut hidden = self.embed_tokens.forward(tokens);
        for (index, layer) in self.layers.iter().enumerate() {
            let cache = cache.as_mut().map(|cache| &mut cache.layers[index]);
            hidden = layer.forward(hidden, &angles, mask.clone(), cache);
        }
        self.norm.forward(hidden)
    }
}

/// A Llama language model.
#[derive(Module, Debug)]
pub struct Llama<B: Backend> {
    /// The decoder.
    pub model: LlamaModel<B>,
    /// The output projection, `None` when it is the table of token embeddings.
    lm_head: Option<Linear<B>>,
    vocab_size: usize,
    /// Longest sequence; `None` when positions scale with the sequence.
    max_positions: Option<usize>,
}

impl<B: Backend> Llama<B> {
    pub(super) fn new(config: &LlamaConfig, device: &B::Device) -> Self {
        if let Err(error) = config.validate() {
            panic!("{error}");
        }
        let (width, tokens) = (config.hidden_size, config.vocab_size);
        let spec = RopeSpec {
            head_dim: config.head_width(),
            theta: config.rope_theta,
            max_positions: config.max_position_embeddings,
            scaling: config.rope_scaling,
        };
        let layer = |_| DecoderLayer {
            self_attn: LlamaAttention::new(config, device),
            mlp: LlamaMlp::new(config, device),
            input_layernorm: rms_norm(config, device),
            post_attention_layernorm: rms_norm(config, device),
        };
        let model = LlamaModel {
            embed_tokens: TokenEmbedding::new(
                tokens,
                width,
                config.initializer_range,
                config.pad_token_id,
                device,
            ),
            layers: (0..config.num_hidden_layers).map(layer).collect(),
            norm: rms_norm(config, device),
            rope: RotaryEmbedding::new(spec, device),
        };
        let lm_head = (!config.tie_word_embeddings).then(|| linear(config, width, tokens, false, device));
        Self {
            model,
            lm_head,
            vocab_size: tokens,
            max_positions: config.max_positions(),
        }
    }

    /// Logits of the next token at every position: `[batch, length]` to `[batch, length, vocab_size]`.
    pub fn forward(&self, tokens: Tensor<B, 2, Int>) -> Tensor<B, 3> {
        self.project(self.model.forward(tokens, None))
    }

    /// Logits after the last of `tokens`, `[batch, vocab_size]`; the tokens continue those in `cache` and are
    /// added to it.
    pub fn forward_cached(&self, tokens: Tensor<B, 2, Int>, cache: &mut KvCache<B>) -> Tensor<B, 2> {
        let hidden = self.model.forward(tokens, Some(cache));
        let [batch, length, _] = hidden.dims();
        self.project(hidden.slice_dim(1, length - 1..length))
            .reshape([batch, self.vocab_size])
    }

    /// Mean cross entropy of the logits at each position against `targets`, the token that follows it; -100
    /// marks positions that do not count. Both `[batch, length]`, output `[1]`.
    pub fn loss(&self, tokens: Tensor<B, 2, Int>, targets: Tensor<B, 2, Int>) -> Tensor<B, 1> {
        let loss = CrossEntropy::new().with_ignore_index(-100);
        sequence_cross_entropy(&loss, self.forward(tokens), targets)
    }

    /// Mean cross entropy of predicting each token of `[batch, length]` from those before it; output `[1]`.
    ///
    /// What transformers computes when the labels are the inputs.
    pub fn causal_loss(&self, tokens: Tensor<B, 2, Int>) -> Tensor<B, 1> {
        let [_, length] = tokens.dims();
        let logits = self.forward(tokens.clone()).slice_dim(1, 0..length - 1);
        sequence_cross_entropy(&CrossEntropy::new(), logits, tokens.slice_dim(1, 1..length))
    }

    /// Number of tokens the model knows.
    pub fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    /// See [`LlamaConfig::max_positions`].
    pub fn max_positions(&self) -> Option<usize> {
        self.max_positions
    }

    pub(super) fn num_layers(&self) -> usize {
        self.model.layers.len()
    }

    fn project(&self, hidden: Tensor<B, 3>) -> Tensor<B, 3> {
        match &self.lm_head {
            Some(head) => head.forward(hidden),
            None => self.model.embed_tokens.logits(hidden),
        }
    }
}

impl<B: Backend> Pretrained<B> for Llama<B> {
    fn family(&self) -> &'static str {
        "llama"
    }

    fn original_key(&self, path: &str) -> String {
        path.to_string()
    }

    fn aliases(&self, key: &str) -> Vec<String> {
        let mut names: Vec<String> = key.strip_prefix("model.").map(String::from).into_iter().collect();
        if self.lm_head.is_none() && key == "model.embed_tokens.weight" {
            // The one tensor of tied weights; a file that has it under both names must have it twice.
            names.push("lm_head.weight".into());
        }
        names
    }

    fn is_head(&self, key: &str) -> bool {
        key.starts_with("lm_head.")
    }

    fn ignorable(&self) -> Vec<KeyPattern> {
        vec![KeyPattern::Suffix("rotary_emb.inv_freq".into())]
    }
}
