//! The fields of a Hugging Face `config.json` that a family does not read.
//!
//! Such a file holds much that does not change what a model computes: who wrote it, which tokens frame a
//! text, how text is drawn from it. It may also hold a field that makes another model of it. So every field
//! is one of four: a family reads it; it is known not to matter ([`NEUTRAL`]); it is known to matter and only
//! the value of the implemented architecture passes ([`PLAIN`]); or nobody here knows it, and one warning
//! names all of those.

use crate::ModelError;
use serde_json::{Map, Value};

/// Fields that leave the function of the model alone. Names that begin with an underscore are of this kind
/// too.
const NEUTRAL: &[&str] = &[
    "architectures",
    "attn_implementation",
    "auto_map",
    "bad_words_ids",
    "begin_suppress_tokens",
    "bos_token_id",
    "chunk_size_feed_forward",
    "classifier_dropout",
    "cross_attention_hidden_size",
    "decoder_start_token_id",
    "directionality",
    "diversity_penalty",
    "do_sample",
    "dtype",
    "early_stopping",
    "encoder_no_repeat_ngram_size",
    "eos_token_id",
    "exponential_decay_length_penalty",
    "finetuning_task",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "gradient_checkpointing",
    "id2label",
    "is_decoder",
    "label2id",
    "length_penalty",
    "max_length",
    "min_length",
    "model_max_length",
    "name_or_path",
    "no_repeat_ngram_size",
    "num_beam_groups",
    "num_beams",
    "num_labels",
    "num_return_sequences",
    "output_attentions",
    "output_hidden_states",
    "output_past",
    "output_scores",
    "pooler_fc_size",
    "pooler_num_attention_heads",
    "pooler_num_fc_layers",
    "pooler_size_per_head",
    "pooler_type",
    "prefix",
    "pretraining_tp",
    "problem_type",
    "remove_invalid_values",
    "repetition_penalty",
    "return_dict",
    "return_dict_in_generate",
    "sep_token_id",
    "suppress_tokens",
    "task_specific_params",
    "temperature",
    "tf_legacy_loss",
    "tie_encoder_decoder",
    "tokenizer_class",
    "top_k",
    "top_p",
    "torch_dtype",
    "torchscript",
    "transformers_version",
    "typical_p",
    "use_bfloat16",
    "use_cache",
];

/// A field, whether a value of it changes nothing, and what the others ask for.
type Plain = (&'static str, fn(&Value) -> bool, &'static str);

/// Fields that change the model, the test of the value that does not, and that value in words.
const PLAIN: [Plain; 5] = [
    (
        "quantization_config",
        |_| false,
        "weights that are not quantized, without this field",
    ),
    ("is_encoder_decoder", is_false, "false"),
    ("add_cross_attention", is_false, "false"),
    (
        "pruned_heads",
        |value| value.as_object().is_some_and(Map::is_empty),
        "no pruned heads",
    ),
    ("layer_types", all_full_attention, "full_attention in every layer"),
];

fn is_false(value: &Value) -> bool {
    *value == Value::Bool(false)
}

fn all_full_attention(value: &Value) -> bool {
    value
        .as_array()
        .is_some_and(|layers| layers.iter().all(|layer| layer == "full_attention"))
}

/// Looks at the fields that `family` has not read; `null` counts as absent.
///
/// # Errors
///
/// [`ModelError::Unsupported`] for a field of [`PLAIN`] with a value that makes another model.
pub(crate) fn check(family: &'static str, rest: &Map<String, Value>) -> Result<(), ModelError> {
    let given = || rest.iter().filter(|(_, value)| !value.is_null());
    for (name, value) in given() {
        let plain = PLAIN.iter().find(|(field, ..)| field == name);
        if let Some((field, _, supported)) = plain.filter(|(_, is_plain, _)| !is_plain(value)) {
            return Err(ModelError::unsupported(
                family,
                field,
                shortened(value),
                supported,
            ));
        }
    }
    let known = |name: &str| {
        name.starts_with('_') || NEUTRAL.contains(&name) || PLAIN.iter().any(|(field, ..)| *field == name)
    };
    warn_of_unknown(
        family,
        "config.json",
        given().map(|(name, _)| name.as_str()).filter(|name| !known(name)),
    );
    Ok(())
}

/// Names fields that nobody here knows in one warning, if there are any.
pub(crate) fn warn_of_unknown<'a>(family: &str, place: &str, unknown: impl Iterator<Item = &'a str>) {
    let names: Vec<&str> = unknown.collect();
    if !names.is_empty() {
        kiln_log::warn!(
            "{family} config: {place} has fields that are not known and not used: {}; compare with the original \
             library if one of them changes the model",
            names.join(", ")
        );
    }
}

/// Most layers of a model. Each takes memory before any weight is read.
const MOST_LAYERS: usize = 1 << 14;

/// Most rows or columns of a matrix.
const MOST_ROWS: usize = 1 << 31;

/// Most elements of a matrix: a tebibyte even if each were a byte.
const MOST_ELEMENTS: usize = 1 << 40;

/// Refuses sizes of a damaged file that no model has, before memory is asked for: `layers` above
/// [`MOST_LAYERS`], `rows` above [`MOST_ROWS`], and matrices of the named extents above [`MOST_ELEMENTS`].
///
/// # Errors
///
/// [`ModelError::Invalid`] with the field.
pub(crate) fn bounded(
    family: &'static str,
    layers: usize,
    rows: &[(&'static str, usize)],
    matrices: &[(&'static str, usize, usize)],
) -> Result<(), ModelError> {
    let most = |most: usize| format!("it must be at most {most}; is the file damaged?");
    if layers > MOST_LAYERS {
        return Err(ModelError::invalid(
            family,
            "num_hidden_layers",
            layers,
            most(MOST_LAYERS),
        ));
    }
    if let Some((field, size)) = rows.iter().find(|(_, size)| *size > MOST_ROWS) {
        return Err(ModelError::invalid(family, field, *size, most(MOST_ROWS)));
    }
    for &(field, one, other) in matrices {
        let elements = one
            .checked_mul(other)
            .filter(|&elements| elements <= MOST_ELEMENTS);
        if elements.is_none() {
            let remedy = format!(
                "a matrix of {one} by {other} has more than {MOST_ELEMENTS} elements; is the file damaged?"
            );
            return Err(ModelError::invalid(family, field, one, remedy));
        }
    }
    Ok(())
}

/// A value for a message: objects can be long.
pub(crate) fn shortened(value: &Value) -> String {
    let text = value.to_string();
    match text.char_indices().nth(80) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text,
    }
}
