//! A model's sizes, from a run's config, a `config.json` and the data.
//!
//! Three sources decide: the weights that a run starts from (their `config.json`), the run's config, and
//! the data (vocabulary, classes). If two of them disagree, an error names both, because one would
//! otherwise be ignored silently.

use burn::tensor::backend::Backend;
use kiln::{Kiln, KilnDevice};
use kiln_hub::data::Pipeline;
use kiln_hub::{Checkpoint, HubError, Tokenizer};
use kiln_models::bert::{BertConfig, ProblemType};
use kiln_models::llama::LlamaConfig;
use kiln_models::mlp::MlpConfig;
use kiln_models::vision::VisionConfig;
use serde::{Deserialize, Serialize};

use crate::config::{Config, DataSource, ModelConfig};
use crate::data::Data;
use crate::error::CliError;
use crate::model::{Family, Model};

/// A model's sizes.
#[derive(Clone, Debug)]
pub enum Architecture {
    /// Of a language model.
    Llama(LlamaConfig),
    /// Of a classifier of texts.
    Bert(BertConfig),
    /// Of a classifier of images.
    Vision(VisionConfig),
    /// Of a classifier of vectors.
    Mlp(MlpConfig),
}

/// `config.json` of an image classifier, for which the original libraries have none.
#[derive(Serialize, Deserialize)]
struct VisionFile {
    architecture: String,
    num_classes: usize,
    image_size: usize,
}

impl Architecture {
    /// The sizes that follow from a config, its weights and its data.
    ///
    /// # Errors
    ///
    /// [`CliError::Model`] for sizes that no model can have, [`CliError::Unknown`] for a name that is no
    /// model, [`CliError::Config`] for a setting that the model or the weights leave no room for, and what
    /// [`Architecture::check`] returns.
    pub fn resolve(config: &Config, weights: Option<&Checkpoint>, data: &Data) -> Result<Self, CliError> {
        let family = Family::of(&config.model.name)?;
        let stored = match weights {
            Some(checkpoint) => stored_config(checkpoint)?,
            None => None,
        };
        refuse_settings_without_effect(&config.model, family, stored.is_some())?;
        let resolved = match family {
            Family::Llama => Self::Llama(llama(config, weights, stored.as_deref(), data)?),
            Family::Bert => Self::Bert(bert(&config.model, stored.as_deref(), data)?),
            Family::Vision => {
                let sizes = VisionConfig::new(config.model.name.clone())
                    .with_num_classes(data.classes.len())
                    .with_image_size(image_side(config));
                if let Some(file) = &stored {
                    sizes.check_file(file)?;
                    warn_of_normalisation(config, file);
                }
                Self::Vision(sizes)
            }
        };
        resolved.check(config, data)?;
        Ok(resolved)
    }

    /// Reads the `config.json` beside saved weights.
    ///
    /// # Errors
    ///
    /// [`CliError::Hub`] or [`CliError::Model`] if it is damaged or of a model that is not known.
    pub fn read(checkpoint: &Checkpoint) -> Result<Self, CliError> {
        let config = checkpoint.config()?;
        if let Ok(file) = config.clone().into_struct::<VisionFile>() {
            let VisionFile {
                architecture,
                num_classes,
                image_size,
            } = file;
            let sizes = VisionConfig::new(architecture)
                .with_num_classes(num_classes)
                .with_image_size(image_size);
            sizes.check_file(&config.to_json())?;
            return Ok(Self::Vision(sizes));
        }
        match config.model_type()?.as_str() {
            "llama" => {
                let sizes = LlamaConfig::from_hf_json(&config.to_json())?;
                Ok(Self::Llama(untie(sizes, checkpoint)?))
            }
            "bert" => Ok(Self::Bert(BertConfig::from_hf_json(&config.to_json())?)),
            other => Err(CliError::unknown("model_type", other, ["llama", "bert"])),
        }
    }

    /// Compares the sizes with the data: every token needs a row of the table of embeddings, every class an
    /// output, every position of a text an embedding, and an image at least the pixels that the strides take.
    ///
    /// # Errors
    ///
    /// [`CliError::Usage`] or [`CliError::Model`] with the two numbers that do not fit.
    pub fn check(&self, config: &Config, data: &Data) -> Result<(), CliError> {
        let tokens = |rows: usize| {
            if data.vocabulary <= rows {
                return Ok(());
            }
            Err(CliError::Usage(format!(
                "the tokenizer has ids up to {}, but the model has embeddings of {rows} tokens (`vocab_size`): use \
                 the tokenizer of the weights",
                data.vocabulary - 1
            )))
        };
        let classes = |outputs: usize| {
            if data.classes.len() < 2 {
                let found = data.classes.join(", ");
                return Err(CliError::Usage(format!(
                    "the data has labels of one class only (`{found}`): there is nothing to tell apart"
                )));
            }
            if data.classes.len() == outputs {
                return Ok(());
            }
            Err(CliError::Usage(format!(
                "the data has {} classes, the model has {outputs}: it was trained on other data",
                data.classes.len()
            )))
        };
        match self {
            Self::Llama(sizes) => {
                tokens(sizes.vocab_size)?;
                // Positions are computed, not looked up: any length runs.
                if let Some(most) = sizes.max_positions()
                    && config.data.length > most
                {
                    kiln_log::warn!(
                        "data.length is {} tokens, but the model is made for texts of up to {most} \
                         (`max_position_embeddings`): it has not learned positions beyond",
                        config.data.length
                    );
                }
                Ok(())
            }
            Self::Bert(sizes) => {
                tokens(sizes.vocab_size)?;
                classes(sizes.num_labels)?;
                if config.data.length <= sizes.max_position_embeddings {
                    return Ok(());
                }
                Err(CliError::config(
                    "data.length",
                    format!(
                        "{} tokens, but the model has {} positions (`max_position_embeddings`): cut the texts to that",
                        config.data.length, sizes.max_position_embeddings
                    ),
                ))
            }
            Self::Vision(sizes) => {
                classes(sizes.num_classes)?;
                let side = image_side(config);
                // Parameters are initialised when they are first used; here they never are.
                let model = sizes.init::<Kiln>(&KilnDevice::cpu())?;
                Ok(model.check_images([config.train.batch_size, 3, side, side])?)
            }
            Self::Mlp(_) => Ok(()),
        }
    }

    /// The text of `config.json`.
    pub fn to_json(&self) -> String {
        match self {
            Self::Llama(sizes) => sizes.to_hf_json(),
            Self::Bert(sizes) => sizes.to_hf_json("BertForSequenceClassification"),
            Self::Vision(sizes) => {
                let (num_classes, image_size) = (sizes.num_classes, sizes.image_size);
                let file = serde_json::json!({ "architecture": sizes.name, "num_classes": num_classes, "image_size": image_size });
                format!("{file:#}\n")
            }
            Self::Mlp(sizes) => format!(
                "{:#}\n",
                serde_json::json!({ "architecture": "mlp", "widths": sizes.widths })
            ),
        }
    }

    /// Builds the model.
    ///
    /// # Errors
    ///
    /// [`CliError::Model`].
    pub fn init<B: Backend>(&self, device: &B::Device) -> Result<Model<B>, CliError> {
        Ok(match self {
            Self::Llama(sizes) => {
                sizes.validate()?;
                Model::Llama(sizes.init(device))
            }
            Self::Bert(sizes) => {
                sizes.validate()?;
                Model::Bert(sizes.init_classifier(device))
            }
            Self::Vision(sizes) => Model::Vision(sizes.init(device)?),
            Self::Mlp(sizes) => Model::Mlp(sizes.init(device)),
        })
    }
}

/// The text of the `config.json` beside weights, if there is one.
fn stored_config(weights: &Checkpoint) -> Result<Option<String>, CliError> {
    match weights.config() {
        Ok(file) => Ok(Some(file.to_json())),
        Err(HubError::MissingFile { .. }) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// Says so if the images of a folder are normalised otherwise than those that the weights were trained with.
fn warn_of_normalisation(config: &Config, file: &str) {
    let ours = Pipeline::imagenet_evaluation(config.data.image_size);
    let ours = (ours.mean, ours.deviation);
    if let Some(theirs) = VisionConfig::normalisation_of_file(file)
        && config.data.source == DataSource::Images
        && theirs != ours
    {
        kiln_log::warn!(
            "the config.json of model.weights says that they were trained with images of mean {:?} and deviation \
             {:?}, but kiln train normalises with {:?} and {:?}: the first layers have to adapt",
            theirs.0,
            theirs.1,
            ours.0,
            ours.1
        );
    }
}

/// Settings of `[model]` that would be ignored are refused by name.
fn refuse_settings_without_effect(
    config: &ModelConfig,
    family: Family,
    stored: bool,
) -> Result<(), CliError> {
    let size = |value: Option<usize>| value.is_some();
    let settings = [
        ("model.hidden_size", size(config.hidden_size)),
        ("model.layers", size(config.layers)),
        ("model.heads", size(config.heads)),
        ("model.intermediate_size", size(config.intermediate_size)),
        ("model.tie_embeddings", config.tie_embeddings.is_some()),
        ("model.dropout", config.dropout.is_some()),
    ];
    for (key, given) in settings {
        let reason = match (family, key) {
            _ if !given => continue,
            (Family::Vision, _) => "an image classifier has the sizes of its name",
            (Family::Bert, "model.tie_embeddings") => "a classifier of texts has no output projection to tie",
            (_, "model.dropout") => continue,
            _ if stored => "the config.json of model.weights decides about sizes",
            _ => continue,
        };
        return Err(CliError::config(
            key,
            format!("it has no effect: {reason}; remove it"),
        ));
    }
    Ok(())
}

fn llama(
    config: &Config,
    weights: Option<&Checkpoint>,
    stored: Option<&str>,
    data: &Data,
) -> Result<LlamaConfig, CliError> {
    let model = &config.model;
    let mut sizes = match stored {
        Some(json) => LlamaConfig::from_hf_json(json)?,
        None => {
            let length = config.data.length;
            let mut sizes = LlamaConfig::preset(&model.name)?.with_max_position_embeddings(length.max(256));
            if let Some(heads) = model.heads {
                sizes.num_attention_heads = heads;
                sizes.num_key_value_heads = None;
            }
            sizes.hidden_size = model.hidden_size.unwrap_or(sizes.hidden_size);
            sizes.num_hidden_layers = model.layers.unwrap_or(sizes.num_hidden_layers);
            sizes.intermediate_size = model.intermediate_size.unwrap_or(sizes.intermediate_size);
            sizes.tie_word_embeddings = model.tie_embeddings.unwrap_or(sizes.tie_word_embeddings);
            sizes.vocab_size = data.vocabulary;
            let end = data.tokenizer.as_ref().and_then(Tokenizer::end_of_text);
            sizes.eos_token_ids = end.into_iter().collect();
            sizes
        }
    };
    sizes.attention_dropout = model.dropout.unwrap_or(sizes.attention_dropout);
    sizes.validate()?;
    match weights {
        Some(checkpoint) => untie(sizes, checkpoint),
        None => Ok(sizes),
    }
}

/// Weights that the configuration calls tied although they differ: as in transformers, the file decides,
/// not the configuration.
fn untie(mut sizes: LlamaConfig, checkpoint: &Checkpoint) -> Result<LlamaConfig, CliError> {
    let head = "lm_head.weight";
    let table = ["model.embed_tokens.weight", "embed_tokens.weight"]
        .into_iter()
        .find(|name| checkpoint.stored(name).is_some());
    if let Some(table) = table
        && sizes.tie_word_embeddings
        && checkpoint.stored(head).is_some()
        && !checkpoint.same(table, head)?
    {
        kiln_log::warn!(
            "{}: config.json ties {head} to {table}, but the two are stored with different values, so they are not \
             tied; set `tie_word_embeddings` to false there",
            checkpoint.place()
        );
        sizes.tie_word_embeddings = false;
    }
    Ok(sizes)
}

fn bert(model: &ModelConfig, stored: Option<&str>, data: &Data) -> Result<BertConfig, CliError> {
    let mut sizes = match stored {
        Some(json) => BertConfig::from_hf_json(json)?,
        None => {
            let mut sizes = BertConfig::preset(&model.name)?;
            sizes.hidden_size = model.hidden_size.unwrap_or(sizes.hidden_size);
            sizes.num_hidden_layers = model.layers.unwrap_or(sizes.num_hidden_layers);
            sizes.num_attention_heads = model.heads.unwrap_or(sizes.num_attention_heads);
            sizes.intermediate_size = model.intermediate_size.unwrap_or(sizes.intermediate_size);
            sizes.vocab_size = data.vocabulary;
            sizes
        }
    };
    if let Some(other) = sizes
        .problem_type
        .filter(|kind| *kind != ProblemType::SingleLabel)
    {
        return Err(CliError::config(
            "model.weights",
            format!(
                "their config.json says `problem_type`: \"{}\", but kiln train trains one class per text; remove the \
                 field to start a classifier from these weights",
                other.name()
            ),
        ));
    }
    sizes.num_labels = data.classes.len();
    if let Some(dropout) = model.dropout {
        sizes.hidden_dropout_prob = dropout;
        sizes.attention_probs_dropout_prob = dropout;
    }
    sizes.validate()?;
    Ok(sizes)
}

/// Pixels a side of the images that the data gives.
fn image_side(config: &Config) -> usize {
    match config.data.source {
        DataSource::Cifar10 | DataSource::Cifar100 => 32,
        _ => config.data.image_size,
    }
}
