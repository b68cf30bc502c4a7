//! The `config.json` beside the weights of an image classifier, as timm and transformers write it.
//!
//! The sizes follow from the model's name, so the file decides nothing; but it may say that the weights are
//! those of another network with the same tensors: another activation, another place of a stride, pooling
//! with anti-aliasing. Such a file is refused.

use super::VisionConfig;
use crate::ModelError;
use crate::settings;
use serde_json::{Map, Value};

const FAMILY: &str = "vision";

/// Arguments of timm's constructors that leave the function of the model alone.
const NEUTRAL_ARGUMENTS: [&str; 5] = [
    "num_classes",
    "drop_rate",
    "drop_path_rate",
    "drop_block_rate",
    "img_size",
];

/// Fields that are read here, or that say nothing of the network's arithmetic.
const KNOWN: [&str; 45] = [
    "architecture",
    "classifier",
    "crop_mode",
    "crop_pct",
    "custom_load",
    "depths",
    "downsample_in_bottleneck",
    "downsample_in_first_stage",
    "embedding_size",
    "file",
    "first_conv",
    "fixed_input_size",
    "global_pool",
    "hf_hub_id",
    "hidden_act",
    "hidden_size",
    "hidden_sizes",
    "image_size",
    "input_size",
    "interpolation",
    "label_descriptions",
    "label_names",
    "layer_type",
    "license",
    "mean",
    "min_input_size",
    "model_args",
    "model_type",
    "notes",
    "num_channels",
    "num_classes",
    "num_features",
    "origin_url",
    "out_features",
    "out_indices",
    "paper_ids",
    "paper_name",
    "patch_size",
    "pool_size",
    "pretrained_cfg",
    "stage_names",
    "std",
    "tag",
    "test_input_size",
    "url",
];

impl VisionConfig {
    /// Compares the text of a `config.json` beside weights with this model. Fields that do not matter to it
    /// are passed over, and a warning names those that are not known.
    ///
    /// # Errors
    ///
    /// [`ModelError::Parse`] for text that is no JSON object, and [`ModelError::Invalid`] or
    /// [`ModelError::Unsupported`] with the field that makes another network of it: another `architecture`,
    /// `model_args` that change it, another activation, pooling or place of the strides.
    pub fn check_file(&self, text: &str) -> Result<(), ModelError> {
        let parsed: Result<Map<String, Value>, _> = serde_json::from_str(text);
        let mut file = parsed.map_err(|source| ModelError::Parse {
            family: FAMILY,
            source,
        })?;
        file.retain(|_, value| !value.is_null());
        if let Some(value) = file.get("architecture") {
            // timm writes the name of the weights behind a dot.
            let name = value.as_str().map(|name| name.split('.').next().unwrap_or(name));
            if name != Some(&*self.name) {
                let remedy = format!(
                    "these are not weights of {}; name the model that they are of",
                    self.name
                );
                return Err(invalid("architecture", value, remedy));
            }
        }
        if let Some(value) = file.get("model_args") {
            self.check_arguments(value)?;
        }
        let transformer = self.name.starts_with("vit");
        let activation = match () {
            () if transformer => "gelu",
            () if self.name == "mobilenet_v2" => "relu6",
            () => "relu",
        };
        let pooling = if transformer { "token" } else { "avg" };
        let no = Value::Bool(false);
        let plain = [
            ("hidden_act", Value::from(activation)),
            ("global_pool", Value::from(pooling)),
            ("num_channels", Value::from(3)),
            ("downsample_in_bottleneck", no.clone()),
            ("downsample_in_first_stage", no),
        ];
        for (field, expected) in plain {
            if let Some(value) = file.get(field).filter(|value| **value != expected) {
                let remedy = format!(
                    "{} has {expected}, and the weights are of another network",
                    self.name
                );
                return Err(invalid(field, value, remedy));
            }
        }
        file.retain(|field, _| !KNOWN.contains(&field.as_str()));
        settings::check(FAMILY, &file)
    }

    fn check_arguments(&self, value: &Value) -> Result<(), ModelError> {
        let arguments = value.as_object();
        let changes = |(name, value): (&String, &Value)| {
            let same = NEUTRAL_ARGUMENTS.contains(&name.as_str()) || (name == "in_chans" && *value == 3);
            !same && !value.is_null()
        };
        match arguments.map(|arguments| arguments.iter().find(|&argument| changes(argument))) {
            Some(None) => Ok(()),
            found => {
                let name = found.flatten().map_or("its value", |(name, _)| name);
                let remedy = format!(
                    "`{name}` makes another network of {}, which is not here",
                    self.name
                );
                Err(invalid("model_args", value, remedy))
            }
        }
    }

    /// Mean and standard deviation of the channels that the weights beside a `config.json` were trained with,
    /// if it says them: under `pretrained_cfg`, or, in older files, at its top.
    pub fn normalisation_of_file(text: &str) -> Option<([f32; 3], [f32; 3])> {
        let file: Value = serde_json::from_str(text).ok()?;
        let place = file
            .get("pretrained_cfg")
            .filter(|nested| nested.is_object())
            .unwrap_or(&file);
        let three =
            |field: &str| -> Option<[f32; 3]> { serde_json::from_value(place.get(field)?.clone()).ok() };
        Some((three("mean")?, three("std")?))
    }
}

fn invalid(field: &'static str, value: &Value, remedy: String) -> ModelError {
    ModelError::invalid(FAMILY, field, settings::shortened(value), remedy)
}
