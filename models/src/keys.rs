//! From the paths of a Burn module to the names of the original checkpoint, as plain data.
//!
//! A family implements [`Pretrained`]: how a path is renamed, which other names a file may use for the same
//! tensor, and which keys of a file it may ignore. [`Pretrained::key_map`] walks the module and returns a
//! [`KeyMap`], from which a loader reads what to look for and a writer what to write; neither needs to know
//! the family.
//!
//! Two things are the same for all families and are applied here. Burn's normalisation layers call their
//! tensors `gamma` and `beta` where PyTorch says `weight` and `bias`. And a Burn `Linear` stores
//! `[d_input, d_output]` where PyTorch stores `[d_output, d_input]`, so its weight is transposed on the way
//! in and out.

use crate::params::{TensorKind, list_params};
use burn::module::Module;
use burn::tensor::backend::Backend;

/// One tensor of the module and its counterpart in the original checkpoint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KeyEntry {
    /// Path in the Burn module.
    pub path: String,
    /// Name under which the original library saves the tensor.
    pub key: String,
    /// Other names under which a file may hold the tensor, in order of preference. A file that has several of
    /// the names must have equal tensors there.
    pub aliases: Vec<String>,
    /// Shape in the Burn module.
    pub shape: Vec<usize>,
    /// The file holds the transpose of the module's matrix.
    pub transpose: bool,
    /// Whether the tensor is trained.
    pub kind: TensorKind,
    /// The tensor belongs to a task head: a file of the base model lacks it, and fine-tuning may start it
    /// anew.
    pub head: bool,
}

impl KeyEntry {
    /// Shape in the original checkpoint.
    pub fn original_shape(&self) -> Vec<usize> {
        let mut shape = self.shape.clone();
        if self.transpose {
            shape.reverse();
        }
        shape
    }
}

/// Keys of a checkpoint that a module does not need.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum KeyPattern {
    /// Exactly this key.
    Exact(String),
    /// Every key that begins with this text.
    Prefix(String),
    /// Every key that ends with this text.
    Suffix(String),
}

impl KeyPattern {
    /// Whether `key` falls under the pattern.
    pub fn matches(&self, key: &str) -> bool {
        match self {
            Self::Exact(text) => key == text,
            Self::Prefix(text) => key.starts_with(text.as_str()),
            Self::Suffix(text) => key.ends_with(text.as_str()),
        }
    }
}

/// The whole correspondence between a module and its original checkpoint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KeyMap {
    /// Name of the family, for messages.
    pub family: &'static str,
    /// One entry per tensor of the module, in the order of its fields.
    pub entries: Vec<KeyEntry>,
    /// Keys that a file may hold beyond the entries without being reported: tables that the module computes
    /// itself, heads of other tasks.
    pub ignorable: Vec<KeyPattern>,
}

impl KeyMap {
    /// The entry of a Burn path.
    pub fn by_path(&self, path: &str) -> Option<&KeyEntry> {
        self.entries.iter().find(|entry| entry.path == path)
    }

    /// The entry that a key of a file belongs to, by its name or one of its aliases.
    pub fn by_key(&self, key: &str) -> Option<&KeyEntry> {
        self.entries.iter().find(|entry| entry.key == key).or_else(|| {
            self.entries
                .iter()
                .find(|entry| entry.aliases.iter().any(|alias| alias == key))
        })
    }

    /// Whether a key that belongs to no entry can be passed over in silence.
    pub fn is_ignorable(&self, key: &str) -> bool {
        self.ignorable.iter().any(|pattern| pattern.matches(key))
    }
}

/// A model that can exchange weights with its original library.
pub trait Pretrained<B: Backend>: Module<B> {
    /// Name of the family, for messages: `llama`, `bert`, `resnet`, ...
    fn family(&self) -> &'static str;

    /// The original name of the tensor at `path`; `gamma` and `beta` of normalisation layers have already
    /// become `weight` and `bias`.
    fn original_key(&self, path: &str) -> String;

    /// Other names under which a file may hold the tensor with the original name `key`.
    fn aliases(&self, key: &str) -> Vec<String> {
        let _ = key;
        Vec::new()
    }

    /// Whether the tensor with the original name `key` belongs to a task head.
    fn is_head(&self, key: &str) -> bool {
        let _ = key;
        false
    }

    /// Keys that a file may hold although the module has no such tensor.
    fn ignorable(&self) -> Vec<KeyPattern> {
        Vec::new()
    }

    /// The correspondence between this module and its original checkpoint. Initialises no parameter.
    fn key_map(&self) -> KeyMap {
        let entries = list_params(self)
            .into_iter()
            .map(|info| {
                let (stem, leaf) = info.path.rsplit_once('.').unwrap_or(("", &info.path));
                let leaf = match (info.container.as_str(), leaf) {
                    ("LayerNorm" | "RmsNorm" | "BatchNorm2d", "gamma") => "weight",
                    ("LayerNorm" | "BatchNorm2d", "beta") => "bias",
                    _ => leaf,
                };
                let renamed = if stem.is_empty() {
                    leaf.to_string()
                } else {
                    format!("{stem}.{leaf}")
                };
                let key = self.original_key(&renamed);
                KeyEntry {
                    transpose: info.container == "Linear" && leaf == "weight",
                    aliases: self.aliases(&key),
                    head: self.is_head(&key),
                    key,
                    path: info.path,
                    shape: info.shape,
                    kind: info.kind,
                }
            })
            .collect();
        KeyMap {
            family: self.family(),
            entries,
            ignorable: self.ignorable(),
        }
    }
}

/// Renames the segments of a dotted path one by one.
pub(crate) fn rename_segments<'a>(path: &'a str, rename: impl Fn(&'a str) -> &'a str) -> String {
    path.split('.').map(rename).collect::<Vec<_>>().join(".")
}
