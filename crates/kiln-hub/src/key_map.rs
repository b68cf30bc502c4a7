//! Which tensor of a checkpoint fills which parameter of a module, as plain data.
//!
//! A parameter's name is the path of its fields in the module, joined with dots
//! (`layers.0.attention.query.weight`). A checkpoint has the names of the program that wrote it. A [`KeyMap`]
//! lists the pairs, one [`KeyRule`] each, and is read in both directions: by loading and by saving. The
//! models of `kiln-models` produce one from their own key map; for any other module, start from
//! [`KeyMap::identity`] and rename.

use std::collections::BTreeMap;

use burn_core::module::Module;
use burn_tensor::backend::Backend;

use crate::error::HubError;
use crate::walk::list_params;

/// The transform of a tensor on its way from the checkpoint to the module; saving does the opposite.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Transform {
    /// Nothing.
    #[default]
    None,
    /// The two dimensions of a matrix are swapped: PyTorch stores a linear layer as `[out, in]`, Burn as
    /// `[in, out]`.
    Transpose,
}

/// One parameter and its tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeyRule {
    /// Path of the parameter in the module, joined with dots.
    pub param: String,
    /// Name of the tensor in the checkpoint; the name it is saved under.
    pub key: String,
    /// Other names that a checkpoint may use instead, most preferred first.
    pub aliases: Vec<String>,
    /// How the tensor is changed on the way in.
    pub transform: Transform,
    /// Whether the parameter belongs to a task head, which fine-tuning may start anew
    /// ([`LoadOptions::with_new_heads`](crate::LoadOptions::with_new_heads)).
    pub head: bool,
}

/// Keys of a checkpoint that no parameter needs and that are no sign of a mistake.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KeyPattern {
    /// Exactly this key.
    Exact(String),
    /// Every key that begins with this text.
    Prefix(String),
    /// Every key that ends with this text.
    Suffix(String),
}

impl KeyPattern {
    /// Whether a key falls under the pattern.
    pub fn matches(&self, key: &str) -> bool {
        match self {
            Self::Exact(text) => key == text,
            Self::Prefix(text) => key.starts_with(text.as_str()),
            Self::Suffix(text) => key.ends_with(text.as_str()),
        }
    }
}

/// All rules of a module.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KeyMap {
    /// One rule a parameter.
    pub rules: Vec<KeyRule>,
    /// Keys of a checkpoint that may be left unused without being reported.
    pub ignorable: Vec<KeyPattern>,
}

impl KeyMap {
    /// Every parameter under its own path, nothing transformed: for files that only this program reads.
    pub fn identity<B: Backend, M: Module<B>>(module: &M) -> Self {
        list_params(module)
            .into_iter()
            .map(|param| (param.path.clone(), param.path, Transform::None))
            .collect()
    }

    /// Changes the names of all keys.
    pub fn rename(mut self, rename: impl Fn(&str) -> String) -> Self {
        for rule in &mut self.rules {
            rule.key = rename(&rule.key);
        }
        self
    }

    /// Adds keys that may be left unused.
    pub fn with_ignorable(mut self, pattern: KeyPattern) -> Self {
        self.ignorable.push(pattern);
        self
    }

    /// The rule of a parameter.
    pub fn rule(&self, param: &str) -> Option<&KeyRule> {
        self.rules.iter().find(|rule| rule.param == param)
    }

    /// Rules by parameter, after checking that the map is one-to-one.
    pub(crate) fn by_param(&self) -> Result<BTreeMap<&str, &KeyRule>, HubError> {
        let mut params = BTreeMap::new();
        let mut keys: BTreeMap<&str, &str> = BTreeMap::new();
        for rule in &self.rules {
            if params.insert(rule.param.as_str(), rule).is_some() {
                return Err(HubError::KeyMap(format!(
                    "parameter `{}` has two rules",
                    rule.param
                )));
            }
            if let Some(other) = keys.insert(&rule.key, &rule.param) {
                return Err(HubError::KeyMap(format!(
                    "key `{}` belongs to both `{other}` and `{}`; tie the parameters in the module instead",
                    rule.key, rule.param
                )));
            }
        }
        Ok(params)
    }
}

/// Collects rules `(parameter, key, transform)`.
impl FromIterator<(String, String, Transform)> for KeyMap {
    fn from_iter<I: IntoIterator<Item = (String, String, Transform)>>(rules: I) -> Self {
        let rules = rules
            .into_iter()
            .map(|(param, key, transform)| KeyRule {
                param,
                key,
                aliases: vec![],
                transform,
                head: false,
            })
            .collect();
        Self {
            rules,
            ignorable: vec![],
        }
    }
}

impl From<&KeyMap> for KeyMap {
    fn from(map: &KeyMap) -> Self {
        map.clone()
    }
}
impl From<kiln_models::keys::KeyMap> for KeyMap {
    fn from(map: kiln_models::keys::KeyMap) -> Self {
        let rule = |entry: kiln_models::keys::KeyEntry| KeyRule {
            param: entry.path,
            key: entry.key,
            aliases: entry.aliases,
            transform: if entry.transpose {
                Transform::Transpose
            } else {
                Transform::None
            },
            head: entry.head,
        };
        let pattern = |pattern| match pattern {
            kiln_models::keys::KeyPattern::Exact(text) => KeyPattern::Exact(text),
            kiln_models::keys::KeyPattern::Prefix(text) => KeyPattern::Prefix(text),
            kiln_models::keys::KeyPattern::Suffix(text) => KeyPattern::Suffix(text),
        };
        Self {
            rules: map.entries.into_iter().map(rule).collect(),
            ignorable: map.ignorable.into_iter().map(pattern).collect(),
        }
    }
}

impl From<&kiln_models::keys::KeyMap> for KeyMap {
    fn from(map: &kiln_models::keys::KeyMap) -> Self {
        map.clone().into()
    }
}
