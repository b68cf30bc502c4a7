//! What can go wrong when a model is described, built or asked to generate.
//!
//! Each variant names the model family or operation, the offending value, and what would be accepted instead.

/// Error of a model's configuration or of text generation.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    /// The text of a configuration is not JSON, or a field has the wrong type.
    #[error("{family} config: {source}; expected the `config.json` of a Hugging Face {family} checkpoint")]
    Parse {
        /// Family whose configuration was read.
        family: &'static str,
        /// The JSON error with line and column.
        source: serde_json::Error,
    },
    /// A field has a value that no model can be built from.
    #[error("{family} config: `{field}` is {value}: {remedy}")]
    Invalid {
        /// Family whose configuration was checked.
        family: &'static str,
        /// Name of the field.
        field: &'static str,
        /// The value found.
        value: String,
        /// What would be accepted.
        remedy: String,
    },
    /// The configuration asks for a variant of the architecture that this crate does not implement.
    #[error("{family} config: `{field}` = {value} is not supported; supported: {supported}")]
    Unsupported {
        /// Family whose configuration was checked.
        family: &'static str,
        /// Name of the field.
        field: &'static str,
        /// The value found.
        value: String,
        /// The values that are implemented.
        supported: &'static str,
    },
    /// No model or preset has this name.
    #[error("unknown model `{name}`; known models: {known}")]
    UnknownModel {
        /// The name asked for.
        name: String,
        /// All known names, separated by commas.
        known: String,
    },
    /// A model was given something of a shape that it cannot take.
    #[error("{family}: {reason}")]
    Input {
        /// Family of the model.
        family: &'static str,
        /// What is wrong and what would be right.
        reason: String,
    },
    /// Text generation was asked for something it cannot do.
    #[error("generate: {reason}")]
    Generate {
        /// What is wrong and what would be right.
        reason: String,
    },
    /// The device failed while computing or reading a result.
    #[error("generate: the device could not return the logits: {reason}")]
    Device {
        /// The device's own message.
        reason: String,
    },
}

impl ModelError {
    pub(crate) fn invalid(
        family: &'static str,
        field: &'static str,
        value: impl std::fmt::Display,
        remedy: impl Into<String>,
    ) -> Self {
        Self::Invalid {
            family,
            field,
            value: value.to_string(),
            remedy: remedy.into(),
        }
    }

    pub(crate) fn unsupported(
        family: &'static str,
        field: &'static str,
        value: impl std::fmt::Display,
        supported: &'static str,
    ) -> Self {
        Self::Unsupported {
            family,
            field,
            value: value.to_string(),
            supported,
        }
    }
}
