//! The sizes of a Llama model, from presets or from the `config.json` of any Hugging Face Llama checkpoint.

use super::{Llama, RopeScaling};
use crate::ModelError;
use crate::layers::Activation;
use crate::settings;
use burn::config::Config;
use burn::tensor::backend::Backend;
use serde::Deserialize;
use serde_json::{Map, Value};

const FAMILY: &str = "llama";

/// Widest head: the table of rotary positions has thousands of rows of half this length.
const WIDEST_HEAD: usize = 1 << 12;

/// Configuration of a [`Llama`].
#[derive(Config, Debug)]
pub struct LlamaConfig {
    /// Number of tokens.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width inside of the feed-forward network.
    pub intermediate_size: usize,
    /// Number of decoder layers.
    pub num_hidden_layers: usize,
    /// Number of query heads.
    pub num_attention_heads: usize,
    /// Number of key and value heads; that of the query heads if absent.
    pub num_key_value_heads: Option<usize>,
    /// Width of a head; `hidden_size / num_attention_heads` if absent.
    pub head_dim: Option<usize>,
    /// Longest sequence without scaling of positions. Default: 2048
    #[config(default = 2048)]
    pub max_position_embeddings: usize,
    /// Added to the mean square in RMS norms. Default: 1e-5
    #[config(default = 1e-5)]
    pub rms_norm_eps: f64,
    /// Base of the rotary frequencies. Default: 10000
    #[config(default = 10000.0)]
    pub rope_theta: f64,
    /// How rotary frequencies are scaled. Default: not at all
    #[config(default = "RopeScaling::None")]
    pub rope_scaling: RopeScaling,
    /// The output projection is the table of token embeddings. Default: false
    #[config(default = false)]
    pub tie_word_embeddings: bool,
    /// The projections of attention have biases. Default: false
    #[config(default = false)]
    pub attention_bias: bool,
    /// The projections of the feed-forward network have biases. Default: false
    #[config(default = false)]
    pub mlp_bias: bool,
    /// Activation of the gate in the feed-forward network. Default: SiLU
    #[config(default = "Activation::Silu")]
    pub hidden_act: Activation,
    /// Dropout on the attention weights. Default: 0
    #[config(default = 0.0)]
    pub attention_dropout: f64,
    /// Standard deviation of initial weights. Default: 0.02
    #[config(default = 0.02)]
    pub initializer_range: f64,
    /// Token whose embedding receives no gradient from its lookup. Default: none
    pub pad_token_id: Option<usize>,
    /// First token of a text, for tokenizers that do not add it. Default: none
    pub bos_token_id: Option<u32>,
    /// Tokens that end a text. Default: none
    #[config(default = "Vec::new()")]
    pub eos_token_ids: Vec<u32>,
}

/// Names, and the sizes in the order of [`LlamaConfig::new`] with the key and value heads last.
const PRESETS: [(&str, [usize; 6]); 5] = [
    ("llama-tiny", [4096, 256, 688, 4, 8, 8]),
    ("llama-15m", [32000, 288, 768, 6, 6, 6]),
    ("llama-125m", [32000, 768, 2048, 12, 12, 12]),
    ("llama-1b", [128_256, 2048, 8192, 16, 32, 8]),
    ("decoder-2l", [3200, 1024, 32 * 1024, 2, 8, 4]),
];

impl LlamaConfig {
    /// Longest sequence that the model is made for; `None` when its positions scale with the sequence.
    pub fn max_positions(&self) -> Option<usize> {
        let is_dynamic = matches!(self.rope_scaling, RopeScaling::Dynamic { .. });
        (!is_dynamic).then_some(self.max_position_embeddings)
    }

    /// Names that [`LlamaConfig::preset`] accepts.
    pub fn preset_names() -> impl Iterator<Item = &'static str> {
        PRESETS.into_iter().map(|(name, _)| name)
    }

    /// The preset called `name`, see [`preset_names`](Self::preset_names).
    ///
    /// # Errors
    ///
    /// [`ModelError::UnknownModel`] for any other name.
    pub fn preset(name: &str) -> Result<Self, ModelError> {
        let Some((_, sizes)) = PRESETS.into_iter().find(|(known, _)| *known == name) else {
            let known = Self::preset_names().collect::<Vec<_>>().join(", ");
            return Err(ModelError::UnknownModel {
                name: name.into(),
                known,
            });
        };
        let [vocab, hidden, intermediate, layers, heads, kv_heads] = sizes;
        Ok(Self::new(vocab, hidden, intermediate, layers, heads).with_num_key_value_heads(Some(kv_heads)))
    }

    /// 4 layers of width 256 and 4096 tokens: trains on a CPU in minutes.
    pub fn tiny() -> Self {
        Self::new(4096, 256, 688, 4, 8)
    }

    /// Width of a head.
    pub fn head_width(&self) -> usize {
        self.head_dim
            .unwrap_or(self.hidden_size / self.num_attention_heads.max(1))
    }

    /// Number of key and value heads.
    pub fn kv_heads(&self) -> usize {
        self.num_key_value_heads.unwrap_or(self.num_attention_heads)
    }

    /// Reads the text of a `config.json`. Fields that do not matter to the model are passed over, and a
    /// warning names those that are not known.
    ///
    /// # Errors
    ///
    /// Text that is not such a configuration, sizes that no model can have, and variants that are not
    /// implemented (`yarn` and other scalings, partial rotation, attention that is not causal, quantized
    /// weights, unknown activations).
    pub fn from_hf_json(text: &str) -> Result<Self, ModelError> {
        let file: HfLlamaConfig = serde_json::from_str(text).map_err(|source| ModelError::Parse {
            family: FAMILY,
            source,
        })?;
        file.into_config()
    }

    /// The text of a `config.json` that transformers reads as this model.
    pub fn to_hf_json(&self) -> String {
        let mut value = serde_json::json!({
            "architectures": ["LlamaForCausalLM"],
            "model_type": FAMILY,
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_hidden_layers,
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.kv_heads(),
            "head_dim": self.head_width(),
            "hidden_act": self.hidden_act.name(),
            "max_position_embeddings": self.max_position_embeddings,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": self.rope_theta,
            "tie_word_embeddings": self.tie_word_embeddings,
            "attention_bias": self.attention_bias,
            "mlp_bias": self.mlp_bias,
            "attention_dropout": self.attention_dropout,
            "initializer_range": self.initializer_range,
            "pad_token_id": self.pad_token_id,
            "bos_token_id": self.bos_token_id,
            "eos_token_id": match self.eos_token_ids.as_slice() {
                [] => serde_json::Value::Null,
                [one] => (*one).into(),
                more => more.into(),
            },
        });
        if let (Some(scaling), Some(object)) = (self.rope_scaling.to_hf(), value.as_object_mut()) {
            object.insert("rope_scaling".into(), scaling);
        }
        format!("{value:#}\n")
    }

    /// Checks that a model can be built.
    ///
    /// # Errors
    ///
    /// [`ModelError::Invalid`] naming the first field with an impossible value.
    pub fn validate(&self) -> Result<(), ModelError> {
        let sizes = [
            ("vocab_size", self.vocab_size),
            ("hidden_size", self.hidden_size),
            ("intermediate_size", self.intermediate_size),
            ("num_hidden_layers", self.num_hidden_layers),
            ("num_attention_heads", self.num_attention_heads),
            ("num_key_value_heads", self.kv_heads()),
            ("max_position_embeddings", self.max_position_embeddings),
        ];
        if let Some((field, _)) = sizes.into_iter().find(|(_, size)| *size == 0) {
            return Err(ModelError::invalid(FAMILY, field, 0, "it must be at least 1"));
        }
        let heads = self.num_attention_heads;
        if self.head_dim.is_none() && !self.hidden_size.is_multiple_of(heads) {
            let remedy = format!(
                "it must divide the hidden size, {}, or set `head_dim`",
                self.hidden_size
            );
            return Err(ModelError::invalid(FAMILY, "num_attention_heads", heads, remedy));
        }
        if !heads.is_multiple_of(self.kv_heads()) {
            let remedy = format!("it must divide the number of attention heads, {heads}");
            return Err(ModelError::invalid(
                FAMILY,
                "num_key_value_heads",
                self.kv_heads(),
                remedy,
            ));
        }
        settings::bounded(FAMILY, self.num_hidden_layers, &sizes, &[])?;
        if self.head_width() > WIDEST_HEAD {
            let remedy = format!("it must be at most {WIDEST_HEAD}; is the file damaged?");
            return Err(ModelError::invalid(FAMILY, "head_dim", self.head_width(), remedy));
        }
        let matrices = [
            ("vocab_size", self.vocab_size, self.hidden_size),
            ("intermediate_size", self.intermediate_size, self.hidden_size),
            ("num_attention_heads", heads * self.head_width(), self.hidden_size),
        ];
        settings::bounded(FAMILY, self.num_hidden_layers, &[], &matrices)?;
        if self.head_width() == 0 || !self.head_width().is_multiple_of(2) {
            let remedy = "rotary positions turn pairs of coordinates: it must be even and positive";
            return Err(ModelError::invalid(FAMILY, "head_dim", self.head_width(), remedy));
        }
        let positive = [
            ("rms_norm_eps", self.rms_norm_eps),
            ("rope_theta", self.rope_theta),
            ("initializer_range", self.initializer_range),
        ];
        for (field, value) in positive.into_iter().chain(self.rope_scaling.positive_fields()) {
            if !(value > 0.0 && value.is_finite()) {
                return Err(ModelError::invalid(
                    FAMILY,
                    field,
                    value,
                    "it must be positive and finite",
                ));
            }
        }
        if let RopeScaling::Llama3 {
            low_freq_factor,
            high_freq_factor,
            ..
        } = self.rope_scaling
            && high_freq_factor <= low_freq_factor
        {
            let remedy = format!("it must exceed `low_freq_factor`, {low_freq_factor}");
            return Err(ModelError::invalid(
                FAMILY,
                "high_freq_factor",
                high_freq_factor,
                remedy,
            ));
        }
        if !(0.0..1.0).contains(&self.attention_dropout) {
            let rate = self.attention_dropout;
            return Err(ModelError::invalid(
                FAMILY,
                "attention_dropout",
                rate,
                "it must lie in [0, 1)",
            ));
        }
        Ok(())
    }

    /// Builds the model; its parameters are initialised when first used.
    ///
    /// # Panics
    ///
    /// If [`validate`](Self::validate) reports an error; presets and configurations read by
    /// [`from_hf_json`](Self::from_hf_json) have been checked.
    pub fn init<B: Backend>(&self, device: &B::Device) -> Llama<B> {
        Llama::new(self, device)
    }
}

/// The fields of a `config.json` that decide about the model.
#[derive(Deserialize)]
struct HfLlamaConfig {
    model_type: Option<String>,
    vocab_size: usize,
    hidden_size: usize,
    intermediate_size: usize,
    num_hidden_layers: usize,
    num_attention_heads: usize,
    num_key_value_heads: Option<usize>,
    head_dim: Option<usize>,
    hidden_act: Option<String>,
    max_position_embeddings: Option<usize>,
    rms_norm_eps: Option<f64>,
    rope_theta: Option<f64>,
    /// Where newer versions keep the base and the scaling together; `rope_scaling` is the older name, and
    /// what it says goes before.
    rope_parameters: Option<Map<String, Value>>,
    rope_scaling: Option<Map<String, Value>>,
    /// Goes before the field of the same name in the scaling.
    original_max_position_embeddings: Option<usize>,
    partial_rotary_factor: Option<f64>,
    is_causal: Option<bool>,
    tie_word_embeddings: Option<bool>,
    attention_bias: Option<bool>,
    mlp_bias: Option<bool>,
    attention_dropout: Option<f64>,
    initializer_range: Option<f64>,
    pad_token_id: Option<i64>,
    bos_token_id: Option<u32>,
    eos_token_id: Option<OneOrMany>,
    #[serde(flatten)]
    rest: Map<String, Value>,
}

#[derive(Deserialize)]
struct HfRope {
    rope_type: Option<String>,
    /// Older name of `rope_type`.
    r#type: Option<String>,
    rope_theta: Option<f64>,
    factor: Option<f64>,
    low_freq_factor: Option<f64>,
    high_freq_factor: Option<f64>,
    original_max_position_embeddings: Option<usize>,
    partial_rotary_factor: Option<f64>,
    #[serde(flatten)]
    rest: Map<String, Value>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum OneOrMany {
    One(u32),
    Many(Vec<u32>),
}

impl HfLlamaConfig {
    fn into_config(self) -> Result<LlamaConfig, ModelError> {
        if let Some(other) = self.model_type.filter(|kind| kind != FAMILY) {
            return Err(ModelError::unsupported(FAMILY, "model_type", other, "llama"));
        }
        if self.is_causal == Some(false) {
            return Err(ModelError::unsupported(FAMILY, "is_causal", false, "true"));
        }
        settings::check(FAMILY, &self.rest)?;
        let hidden_act = match self.hidden_act {
            None => Activation::Silu,
            Some(name) => Activation::from_name(&name)
                .ok_or_else(|| ModelError::unsupported(FAMILY, "hidden_act", name, Activation::NAMES))?,
        };
        let max_position_embeddings = self.max_position_embeddings.unwrap_or(2048);
        // An empty object says nothing.
        let rope_scaling = self.rope_scaling.filter(|rope| !rope.is_empty());
        let rope = rope_scaling.or(self.rope_parameters).unwrap_or_default();
        let mut rope: HfRope =
            serde_json::from_value(Value::Object(rope)).map_err(|source| ModelError::Parse {
                family: FAMILY,
                source,
            })?;
        rope.partial_rotary_factor = rope.partial_rotary_factor.or(self.partial_rotary_factor);
        rope.original_max_position_embeddings = self
            .original_max_position_embeddings
            .or(rope.original_max_position_embeddings);
        let theta = rope.rope_theta.or(self.rope_theta).unwrap_or(10000.0);
        let config = LlamaConfig {
            vocab_size: self.vocab_size,
            hidden_size: self.hidden_size,
            intermediate_size: self.intermediate_size,
            num_hidden_layers: self.num_hidden_layers,
            num_attention_heads: self.num_attention_heads,
            num_key_value_heads: self.num_key_value_heads,
            head_dim: self.head_dim,
            max_position_embeddings,
            rms_norm_eps: self.rms_norm_eps.unwrap_or(1e-6),
            rope_theta: theta,
            rope_scaling: rope.into_scaling(max_position_embeddings)?,
            tie_word_embeddings: self.tie_word_embeddings.unwrap_or(false),
            attention_bias: self.attention_bias.unwrap_or(false),
            mlp_bias: self.mlp_bias.unwrap_or(false),
            hidden_act,
            attention_dropout: self.attention_dropout.unwrap_or(0.0),
            initializer_range: self.initializer_range.unwrap_or(0.02),
            // Some published files write -1 for "none".
            pad_token_id: self.pad_token_id.and_then(|id| usize::try_from(id).ok()),
            bos_token_id: self.bos_token_id,
            eos_token_ids: match self.eos_token_id {
                None => Vec::new(),
                Some(OneOrMany::One(id)) => vec![id],
                Some(OneOrMany::Many(ids)) => ids,
            },
        };
        config.validate()?;
        Ok(config)
    }
}

impl HfRope {
    fn into_scaling(self, max_positions: usize) -> Result<RopeScaling, ModelError> {
        if let Some((layers, value)) = self.rest.iter().find(|(_, value)| value.is_object()) {
            return Err(ModelError::unsupported(
                FAMILY,
                "rope_parameters",
                format!("{layers}: {}", settings::shortened(value)),
                "one scaling for all layers",
            ));
        }
        let unknown = self.rest.keys().map(String::as_str);
        settings::warn_of_unknown(FAMILY, "the scaling of positions", unknown);
        if let Some(part) = self.partial_rotary_factor.filter(|part| *part != 1.0) {
            return Err(ModelError::unsupported(
                FAMILY,
                "partial_rotary_factor",
                part,
                "1.0",
            ));
        }
        let need = |field: &'static str, value: Option<f64>| {
            value.ok_or_else(|| ModelError::invalid(FAMILY, field, "absent", "this kind of scaling needs it"))
        };
        match self.rope_type.or(self.r#type).as_deref() {
            None | Some("default") => Ok(RopeScaling::None),
            Some("linear") => Ok(RopeScaling::Linear {
                factor: need("factor", self.factor)?,
            }),
            Some("dynamic") => Ok(RopeScaling::Dynamic {
                factor: need("factor", self.factor)?,
            }),
            Some("llama3") => Ok(RopeScaling::Llama3 {
                factor: need("factor", self.factor)?,
                low_freq_factor: need("low_freq_factor", self.low_freq_factor)?,
                high_freq_factor: need("high_freq_factor", self.high_freq_factor)?,
                original_max_position_embeddings: self
                    .original_max_position_embeddings
                    .unwrap_or(max_positions),
            }),
            Some(other) => Err(ModelError::unsupported(
                FAMILY,
                "rope_type",
                other,
                "default, linear, dynamic, llama3",
            )),
        }
    }
}
