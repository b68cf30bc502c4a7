//! BERT: the encoder, and heads for classification, masked language modelling and sentence embeddings.
//!
//! The modules mirror transformers' `BertModel`, `BertForSequenceClassification` and `BertForMaskedLM`:
//! post-norm encoder layers with learned positions, dropout after the embeddings, on the attention weights
//! and before each residual sum. All weights begin normal with standard deviation 0.02, biases at zero.

mod config;
mod encoder;
mod heads;

pub use config::{BertConfig, ProblemType};
pub use encoder::{BertAttention, BertEmbeddings, BertEncoder, BertLayer, BertModel, BertPooler};
pub use heads::{BertForMaskedLm, BertForSequenceClassification};

use crate::keys::{KeyPattern, rename_segments};

/// Paths of this module to names of transformers, without the prefix of the base model.
fn original_segments(path: &str) -> String {
    rename_segments(path, |segment| match segment {
        "layer_norm" => "LayerNorm",
        "self_attention" => "self",
        other => other,
    })
}

/// Older files call the tensors of a layer norm `gamma` and `beta`; files of the base model lack the prefix
/// `bert.`, which files of the other heads have.
fn aliases(key: &str) -> Vec<String> {
    let mut names = Vec::new();
    match key.strip_prefix("bert.") {
        Some(bare) => names.push(bare.to_string()),
        None if !key.starts_with("cls.") && !key.starts_with("classifier.") => {
            names.push(format!("bert.{key}"))
        }
        None => {}
    }
    if key.contains(".LayerNorm.") {
        let legacy = |name: &String| match name.strip_suffix("weight") {
            Some(stem) => format!("{stem}gamma"),
            None => format!("{}beta", name.strip_suffix("bias").unwrap_or(name)),
        };
        let mut older: Vec<String> = std::iter::once(&key.to_string())
            .chain(&names)
            .map(legacy)
            .collect();
        names.append(&mut older);
    }
    names
}

/// Position tables that older versions saved.
fn computed_keys() -> Vec<KeyPattern> {
    vec![
        KeyPattern::Suffix("position_ids".into()),
        KeyPattern::Suffix("embeddings.token_type_ids".into()),
    ]
}
