//! The index of a checkpoint in several files.
//!
//! `model.safetensors.index.json` (and `pytorch_model.bin.index.json` in the same form) maps each tensor to
//! the file that holds it. Its file names are joined to the checkpoint's folder, so they are checked before
//! any is opened.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use serde_json::Value;

use crate::error::HubError;
use crate::mistaken;
use crate::names::is_plain_relative;

/// Tensor name to file name.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct ShardIndex {
    pub weight_map: BTreeMap<String, String>,
}

impl ShardIndex {
    /// Reads an index file.
    pub fn read(path: &Path) -> Result<Self, HubError> {
        let text = std::fs::read_to_string(path).map_err(|source| HubError::io("read", path, source))?;
        Self::parse(&text, path)
    }

    /// Parses an index; `path` is for errors.
    pub fn parse(text: &str, path: &Path) -> Result<Self, HubError> {
        let value: Value = match serde_json::from_str(text) {
            Ok(value) => value,
            Err(error) => {
                mistaken::refuse(path, text.as_bytes())?;
                return Err(HubError::index(path, error));
            }
        };
        let map = value
            .get("weight_map")
            .and_then(Value::as_object)
            .ok_or_else(|| HubError::index(path, "no object `weight_map`"))?;
        if map.is_empty() {
            return Err(HubError::index(path, "`weight_map` is empty"));
        }
        let mut weight_map = BTreeMap::new();
        for (tensor, file) in map {
            let file = file.as_str().ok_or_else(|| {
                HubError::index(path, format!("the file of tensor `{tensor}` is not a string"))
            })?;
            if !is_plain_relative(file) {
                return Err(HubError::UnsafePath {
                    origin: path.display().to_string(),
                    name: file.to_string(),
                });
            }
            weight_map.insert(tensor.clone(), file.to_string());
        }
        Ok(Self { weight_map })
    }

    /// The files, each once, sorted.
    pub fn files(&self) -> Vec<&str> {
        self.weight_map
            .values()
            .map(String::as_str)
            .collect::<BTreeSet<_>>()
            .into_iter()
            .collect()
    }
}
