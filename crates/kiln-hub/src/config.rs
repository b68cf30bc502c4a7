//! `config.json`: the hyperparameters beside the weights.
//!
//! The file is a JSON object whose keys the model family defines, so this type stays a view of it: typed
//! getters whose errors name the file and the key, and conversion to a struct with serde. Python writes
//! `NaN` and `Infinity` into JSON unless it is told not to; those are errors here, with line and column, as
//! is any number beyond f64.

use std::path::{Path, PathBuf};

use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use crate::error::HubError;
use crate::mistaken;

/// An opened `config.json`.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    path: PathBuf,
    object: Map<String, Value>,
}

impl Config {
    /// Reads a file.
    ///
    /// # Errors
    /// [`HubError::Io`]; [`HubError::Config`] if it is not a JSON object.
    pub fn read(path: impl Into<PathBuf>) -> Result<Self, HubError> {
        let path = path.into();
        let bytes = std::fs::read(&path).map_err(|source| HubError::io("read", &path, source))?;
        Self::parse(&bytes, path)
    }

    /// Parses the bytes of a file; `path` is for errors.
    ///
    /// # Errors
    /// [`HubError::Config`] if they are not a JSON object.
    pub fn parse(bytes: &[u8], path: impl Into<PathBuf>) -> Result<Self, HubError> {
        let path = path.into();
        match serde_json::from_slice(bytes) {
            Ok(Value::Object(object)) => Ok(Self { path, object }),
            Ok(_) => Err(HubError::config(path, "not a JSON object")),
            Err(error) => {
                mistaken::refuse(&path, bytes)?;
                let hint = match literal_at(bytes, &error) {
                    Some(word) => format!(" ({word} is not a JSON number; write null or a finite value)"),
                    None => String::new(),
                };
                Err(HubError::config(path, format!("not valid JSON: {error}{hint}")))
            }
        }
    }

    /// The file, for messages.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The whole object.
    pub fn object(&self) -> &Map<String, Value> {
        &self.object
    }

    /// The object as JSON text.
    pub fn to_json(&self) -> String {
        Value::Object(self.object.clone()).to_string()
    }

    /// A value; `None` if the key is absent or null.
    pub fn get(&self, key: &str) -> Option<&Value> {
        self.object.get(key).filter(|value| !value.is_null())
    }

    /// A value as any type that serde reads; `None` if the key is absent or null.
    ///
    /// # Errors
    /// [`HubError::Config`] if the value is of another type.
    pub fn optional<T: DeserializeOwned>(&self, key: &str) -> Result<Option<T>, HubError> {
        match self.get(key) {
            None => Ok(None),
            Some(value) => serde_json::from_value(value.clone())
                .map(Some)
                .map_err(|error| HubError::config(&self.path, format!("key `{key}`: {error}"))),
        }
    }

    /// A value that must be there.
    ///
    /// # Errors
    /// [`HubError::Config`] if the key is absent, null or of another type.
    pub fn required<T: DeserializeOwned>(&self, key: &str) -> Result<T, HubError> {
        self.optional(key)?
            .ok_or_else(|| HubError::config(&self.path, format!("key `{key}` is missing")))
    }

    /// A value, or the default where the key is absent or null.
    ///
    /// # Errors
    /// [`HubError::Config`] if the value is of another type.
    pub fn value_or<T: DeserializeOwned>(&self, key: &str, default: T) -> Result<T, HubError> {
        Ok(self.optional(key)?.unwrap_or(default))
    }

    /// The whole object as a struct.
    ///
    /// # Errors
    /// [`HubError::Config`] naming the field that does not fit.
    pub fn into_struct<T: DeserializeOwned>(self) -> Result<T, HubError> {
        serde_json::from_value(Value::Object(self.object))
            .map_err(|error| HubError::config(&self.path, error))
    }

    /// The family: `model_type`, such as "bert" or "llama".
    ///
    /// # Errors
    /// [`HubError::Config`] if it is missing.
    pub fn model_type(&self) -> Result<String, HubError> {
        self.required("model_type")
    }
}

/// Whether the parser stopped at one of the non-numbers that Python writes.
fn literal_at(bytes: &[u8], error: &serde_json::Error) -> Option<&'static str> {
    let line = bytes.split(|&b| b == b'\n').nth(error.line().checked_sub(1)?)?;
    let column = error.column().min(line.len());
    // The parser may stop one or more characters into the word.
    let window = &line[column.saturating_sub(9)..(column + 9).min(line.len())];
    ["NaN", "Infinity"]
        .into_iter()
        .find(|word| window.windows(word.len()).any(|w| w == word.as_bytes()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Config, HubError> {
        Config::parse(text.as_bytes(), "config.json")
    }

    #[test]
    fn getters_name_the_key() {
        let config =
            parse(r#"{"hidden_size": 384, "rope_scaling": null, "eps": 1e-12, "layers": "six"}"#).unwrap();
        assert_eq!(config.required::<usize>("hidden_size").unwrap(), 384);
        assert_eq!(config.optional::<f64>("rope_scaling").unwrap(), None);
        assert_eq!(config.value_or("dropout", 0.1).unwrap(), 0.1);
        let missing = config.required::<usize>("num_layers").unwrap_err().to_string();
        assert!(
            missing.contains("num_layers") && missing.contains("config.json"),
            "{missing}"
        );
        let wrong = config.required::<usize>("layers").unwrap_err().to_string();
        assert!(wrong.contains("layers") && wrong.contains("six"), "{wrong}");
        assert!(config.required::<usize>("eps").is_err());
    }

    #[test]
    fn numbers_that_are_none_are_errors() {
        for text in [
            "{\"eps\": NaN}",
            "{\n\"a\": 1,\n\"eps\": -Infinity\n}",
            "{\"eps\": Infinity}",
        ] {
            let error = parse(text).unwrap_err().to_string();
            assert!(error.contains("finite"), "{error}");
        }
        assert!(parse("{\"eps\": 1e999}").is_err());
        // An empty file is no wrongly written config, and has an error of its own.
        assert!(parse("").is_err_and(|error| !matches!(error, HubError::Config { .. })));
        for text in ["[1]", "{", "{\"a\": }", "\u{feff}{}", "null"] {
            assert!(matches!(parse(text), Err(HubError::Config { .. })), "{text:?}");
        }
        assert!(Config::parse(&[0xff, 0xfe, 0x00], "config.json").is_err());
    }
}
