//! The sizes of a BERT model, from presets or from the `config.json` of any Hugging Face BERT checkpoint.

use super::{BertForMaskedLm, BertForSequenceClassification, BertModel};
use crate::ModelError;
use crate::layers::Activation;
use crate::settings;
use burn::config::Config;
use burn::tensor::backend::Backend;
use serde::Deserialize;
use serde_json::{Map, Value};
use std::collections::BTreeMap;

const FAMILY: &str = "bert";

/// What the labels of a classifier are, which decides its loss.
#[derive(Config, Debug, Copy, PartialEq, Eq)]
pub enum ProblemType {
    /// Numbers: mean squared error.
    Regression,
    /// One class a text: cross entropy.
    SingleLabel,
    /// Any number of classes a text: binary cross entropy.
    MultiLabel,
}

impl ProblemType {
    /// The kinds with the names of `problem_type` in a `config.json`.
    const NAMES: [(Self, &'static str); 3] = [
        (Self::Regression, "regression"),
        (Self::SingleLabel, "single_label_classification"),
        (Self::MultiLabel, "multi_label_classification"),
    ];

    /// The name in a `config.json`.
    pub fn name(self) -> &'static str {
        Self::NAMES
            .iter()
            .find(|(kind, _)| *kind == self)
            .map_or("", |(_, name)| name)
    }

    fn from_name(name: &str) -> Option<Self> {
        let found = Self::NAMES.iter().find(|(_, known)| *known == name);
        found.map(|(kind, _)| *kind)
    }
}

/// Configuration of the BERT family; the defaults are those of `bert-base-uncased`.
#[derive(Config, Debug)]
pub struct BertConfig {
    /// Number of tokens. Default: 30522
    #[config(default = 30522)]
    pub vocab_size: usize,
    /// Width of the residual stream. Default: 768
    #[config(default = 768)]
    pub hidden_size: usize,
    /// Number of encoder layers. Default: 12
    #[config(default = 12)]
    pub num_hidden_layers: usize,
    /// Number of attention heads; divides the width. Default: 12
    #[config(default = 12)]
    pub num_attention_heads: usize,
    /// Width inside of the feed-forward network. Default: 3072
    #[config(default = 3072)]
    pub intermediate_size: usize,
    /// Activation of the feed-forward network. Default: exact GELU
    #[config(default = "Activation::Gelu")]
    pub hidden_act: Activation,
    /// Dropout after the embeddings and before each residual sum. Default: 0.1
    #[config(default = 0.1)]
    pub hidden_dropout_prob: f64,
    /// Dropout on the attention weights. Default: 0.1
    #[config(default = 0.1)]
    pub attention_probs_dropout_prob: f64,
    /// Dropout before the classifier; that of the hidden layers if absent. Default: absent
    pub classifier_dropout: Option<f64>,
    /// Longest sequence. Default: 512
    #[config(default = 512)]
    pub max_position_embeddings: usize,
    /// Number of segments. Default: 2
    #[config(default = 2)]
    pub type_vocab_size: usize,
    /// Added to the variance in layer norms. Default: 1e-12
    #[config(default = 1e-12)]
    pub layer_norm_eps: f64,
    /// Standard deviation of initial weights. Default: 0.02
    #[config(default = 0.02)]
    pub initializer_range: f64,
    /// Token whose embedding receives no gradient from its lookup. Default: 0
    #[config(default = "Some(0)")]
    pub pad_token_id: Option<usize>,
    /// Number of classes of the classification head. Default: 2
    #[config(default = 2)]
    pub num_labels: usize,
    /// The masked-language-model head projects with the token embeddings. Default: true
    #[config(default = true)]
    pub tie_word_embeddings: bool,
    /// What the labels of the classification head are; regression for one label, else classes, if absent.
    /// Default: absent
    pub problem_type: Option<ProblemType>,
}

impl BertConfig {
    /// `bert-base-uncased`: 12 layers, width 768, 110 million parameters.
    pub fn base() -> Self {
        Self::new()
    }

    /// The encoder of `all-MiniLM-L6-v2`: 6 layers, width 384, 12 heads, 23 million parameters.
    pub fn minilm() -> Self {
        Self::new()
            .with_hidden_size(384)
            .with_num_hidden_layers(6)
            .with_intermediate_size(1536)
    }

    /// The preset called `name`: `bert-base` or `bert-minilm`.
    ///
    /// # Errors
    ///
    /// [`ModelError::UnknownModel`] for any other name.
    pub fn preset(name: &str) -> Result<Self, ModelError> {
        match name {
            "bert-base" => Ok(Self::base()),
            "bert-minilm" => Ok(Self::minilm()),
            _ => Err(ModelError::UnknownModel {
                name: name.into(),
                known: "bert-base, bert-minilm".into(),
            }),
        }
    }

    /// What the labels of the classification head are, as transformers decides it.
    pub fn problem(&self) -> ProblemType {
        self.problem_type.unwrap_or(match self.num_labels {
            1 => ProblemType::Regression,
            _ => ProblemType::SingleLabel,
        })
    }

    /// Reads the text of a `config.json`. Fields that do not matter to the model are passed over, and a
    /// warning names those that are not known.
    ///
    /// # Errors
    ///
    /// Text that is not such a configuration, sizes that no model can have, and variants that are not
    /// implemented (decoders, cross attention, relative positions, quantized weights).
    pub fn from_hf_json(text: &str) -> Result<Self, ModelError> {
        let file: HfBertConfig = serde_json::from_str(text).map_err(|source| ModelError::Parse {
            family: FAMILY,
            source,
        })?;
        file.into_config()
    }

    /// The text of a `config.json` that transformers reads as this model. `architecture` is the name of the
    /// class: `BertModel`, `BertForSequenceClassification` or `BertForMaskedLM`.
    pub fn to_hf_json(&self, architecture: &str) -> String {
        let labels = |pair: fn(usize) -> (String, serde_json::Value)| -> serde_json::Map<String, _> {
            (0..self.num_labels).map(pair).collect()
        };
        let value = serde_json::json!({
            "architectures": [architecture],
            "model_type": "bert",
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "num_hidden_layers": self.num_hidden_layers,
            "num_attention_heads": self.num_attention_heads,
            "intermediate_size": self.intermediate_size,
            "hidden_act": self.hidden_act.name(),
            "hidden_dropout_prob": self.hidden_dropout_prob,
            "attention_probs_dropout_prob": self.attention_probs_dropout_prob,
            "classifier_dropout": self.classifier_dropout,
            "max_position_embeddings": self.max_position_embeddings,
            "type_vocab_size": self.type_vocab_size,
            "layer_norm_eps": self.layer_norm_eps,
            "initializer_range": self.initializer_range,
            "pad_token_id": self.pad_token_id,
            "tie_word_embeddings": self.tie_word_embeddings,
            "problem_type": self.problem_type.map(ProblemType::name),
            "id2label": labels(|id| (id.to_string(), format!("LABEL_{id}").into())),
            "label2id": labels(|id| (format!("LABEL_{id}"), id.into())),
        });
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
            ("num_hidden_layers", self.num_hidden_layers),
            ("num_attention_heads", self.num_attention_heads),
            ("intermediate_size", self.intermediate_size),
            ("max_position_embeddings", self.max_position_embeddings),
            ("type_vocab_size", self.type_vocab_size),
            ("num_labels", self.num_labels),
        ];
        if let Some((field, _)) = sizes.into_iter().find(|(_, size)| *size == 0) {
            return Err(ModelError::invalid(FAMILY, field, 0, "it must be at least 1"));
        }
        let matrices = [
            ("vocab_size", self.vocab_size, self.hidden_size),
            ("hidden_size", self.hidden_size, self.hidden_size),
            ("intermediate_size", self.intermediate_size, self.hidden_size),
            (
                "max_position_embeddings",
                self.max_position_embeddings,
                self.hidden_size,
            ),
            ("type_vocab_size", self.type_vocab_size, self.hidden_size),
            ("num_labels", self.num_labels, self.hidden_size),
        ];
        settings::bounded(FAMILY, self.num_hidden_layers, &sizes, &matrices)?;
        if !self.hidden_size.is_multiple_of(self.num_attention_heads) {
            let remedy = format!("it must divide the hidden size, {}", self.hidden_size);
            return Err(ModelError::invalid(
                FAMILY,
                "num_attention_heads",
                self.num_attention_heads,
                remedy,
            ));
        }
        let rates = [
            ("hidden_dropout_prob", self.hidden_dropout_prob),
            ("attention_probs_dropout_prob", self.attention_probs_dropout_prob),
            ("classifier_dropout", self.classifier_dropout.unwrap_or(0.0)),
        ];
        if let Some((field, rate)) = rates.into_iter().find(|(_, rate)| !(0.0..1.0).contains(rate)) {
            return Err(ModelError::invalid(FAMILY, field, rate, "it must lie in [0, 1)"));
        }
        for (field, value) in [
            ("layer_norm_eps", self.layer_norm_eps),
            ("initializer_range", self.initializer_range),
        ] {
            if !(value > 0.0 && value.is_finite()) {
                return Err(ModelError::invalid(
                    FAMILY,
                    field,
                    value,
                    "it must be positive and finite",
                ));
            }
        }
        Ok(())
    }

    /// Builds the encoder with its pooler; parameters are initialised when first used.
    ///
    /// # Panics
    ///
    /// If [`validate`](Self::validate) reports an error; a configuration read by
    /// [`from_hf_json`](Self::from_hf_json) has been checked.
    pub fn init<B: Backend>(&self, device: &B::Device) -> BertModel<B> {
        BertModel::new(self, true, device)
    }

    /// Builds the encoder alone, for sentence embeddings and for checkpoints without a pooler. Panics like
    /// [`init`](Self::init).
    pub fn init_without_pooler<B: Backend>(&self, device: &B::Device) -> BertModel<B> {
        BertModel::new(self, false, device)
    }

    /// Builds the encoder with a classification head. Panics like [`init`](Self::init).
    pub fn init_classifier<B: Backend>(&self, device: &B::Device) -> BertForSequenceClassification<B> {
        BertForSequenceClassification::new(self, device)
    }

    /// Builds the encoder with a masked-language-model head. Panics like [`init`](Self::init).
    pub fn init_masked_lm<B: Backend>(&self, device: &B::Device) -> BertForMaskedLm<B> {
        BertForMaskedLm::new(self, device)
    }
}

/// The fields of a `config.json` that decide about the model.
#[derive(Deserialize)]
struct HfBertConfig {
    model_type: Option<String>,
    vocab_size: Option<usize>,
    hidden_size: Option<usize>,
    num_hidden_layers: Option<usize>,
    num_attention_heads: Option<usize>,
    intermediate_size: Option<usize>,
    hidden_act: Option<String>,
    hidden_dropout_prob: Option<f64>,
    attention_probs_dropout_prob: Option<f64>,
    classifier_dropout: Option<f64>,
    max_position_embeddings: Option<usize>,
    type_vocab_size: Option<usize>,
    layer_norm_eps: Option<f64>,
    initializer_range: Option<f64>,
    /// Absent means 0, an explicit null means none.
    #[serde(default = "default_padding")]
    pad_token_id: Option<usize>,
    num_labels: Option<usize>,
    id2label: Option<BTreeMap<String, serde_json::Value>>,
    position_embedding_type: Option<String>,
    is_decoder: Option<bool>,
    add_cross_attention: Option<bool>,
    tie_word_embeddings: Option<bool>,
    problem_type: Option<String>,
    is_causal: Option<bool>,
    #[serde(flatten)]
    rest: Map<String, Value>,
}

fn default_padding() -> Option<usize> {
    Some(0)
}

impl HfBertConfig {
    fn into_config(self) -> Result<BertConfig, ModelError> {
        if let Some(other) = self.model_type.filter(|kind| kind != FAMILY) {
            return Err(ModelError::unsupported(FAMILY, "model_type", other, "bert"));
        }
        if let Some(other) = self.position_embedding_type.filter(|kind| kind != "absolute") {
            return Err(ModelError::unsupported(
                FAMILY,
                "position_embedding_type",
                other,
                "absolute",
            ));
        }
        if self.is_decoder == Some(true) {
            return Err(ModelError::unsupported(FAMILY, "is_decoder", true, "false"));
        }
        if self.add_cross_attention == Some(true) {
            return Err(ModelError::unsupported(
                FAMILY,
                "add_cross_attention",
                true,
                "false",
            ));
        }
        if self.is_causal == Some(true) {
            return Err(ModelError::unsupported(FAMILY, "is_causal", true, "false"));
        }
        settings::check(FAMILY, &self.rest)?;
        let problem_type = match self.problem_type {
            None => None,
            Some(name) => Some(ProblemType::from_name(&name).ok_or_else(|| {
                let known = "regression, single_label_classification, multi_label_classification";
                ModelError::unsupported(FAMILY, "problem_type", name, known)
            })?),
        };
        let standard = BertConfig::new();
        let hidden_act = match self.hidden_act {
            None => standard.hidden_act,
            Some(name) => Activation::from_name(&name)
                .ok_or_else(|| ModelError::unsupported(FAMILY, "hidden_act", name, Activation::NAMES))?,
        };
        let config = BertConfig {
            vocab_size: self.vocab_size.unwrap_or(standard.vocab_size),
            hidden_size: self.hidden_size.unwrap_or(standard.hidden_size),
            num_hidden_layers: self.num_hidden_layers.unwrap_or(standard.num_hidden_layers),
            num_attention_heads: self.num_attention_heads.unwrap_or(standard.num_attention_heads),
            intermediate_size: self.intermediate_size.unwrap_or(standard.intermediate_size),
            hidden_act,
            hidden_dropout_prob: self.hidden_dropout_prob.unwrap_or(standard.hidden_dropout_prob),
            attention_probs_dropout_prob: self
                .attention_probs_dropout_prob
                .unwrap_or(standard.attention_probs_dropout_prob),
            classifier_dropout: self.classifier_dropout,
            max_position_embeddings: self
                .max_position_embeddings
                .unwrap_or(standard.max_position_embeddings),
            type_vocab_size: self.type_vocab_size.unwrap_or(standard.type_vocab_size),
            layer_norm_eps: self.layer_norm_eps.unwrap_or(standard.layer_norm_eps),
            initializer_range: self.initializer_range.unwrap_or(standard.initializer_range),
            pad_token_id: self.pad_token_id,
            num_labels: match self.id2label {
                Some(labels) => labels.len(),
                None => self.num_labels.unwrap_or(standard.num_labels),
            },
            tie_word_embeddings: self.tie_word_embeddings.unwrap_or(true),
            problem_type,
        };
        config.validate()?;
        Ok(config)
    }
}
