//! From a checkpoint into a module.
//!
//! Loading has two halves. The first compares: it walks the module without initialising anything, looks up each
//! parameter's rule and tensor, and collects every disagreement into one [`KeyReport`], so that a wrong mapping is seen
//! whole and a half-filled module never exists. The second fills, and by then nothing is left to fail but reading.
//! Tensors are read one at a time, so the peak is the module plus one tensor.

use std::collections::{BTreeMap, BTreeSet};

use burn_core::module::{Module, ModuleMapper, Param};
use burn_tensor::backend::Backend;
use burn_tensor::{Bool, DType, Int, Tensor, TensorData};

use crate::checkpoint::Checkpoint;
use crate::convert::{kind_of, transpose_bytes};
use crate::error::{HubError, KeyReport, MisshapenKey, MissingKey, MistypedKey};
use crate::key_map::{KeyMap, KeyRule, Transform};
use crate::walk::{ParamInfo, PathStack, list_params};

/// How strictly a checkpoint must fit.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LoadOptions {
    /// Float type of the filled parameters; by default the backend's own.
    pub dtype: Option<DType>,
    /// Parameters whose path begins with one of these keep their initial values, whatever the checkpoint has (a head
    /// for other classes).
    pub skip: Vec<String>,
    /// Parameters whose path begins with one of these may be absent from the checkpoint.
    pub allow_missing: Vec<String>,
    /// Keys of the checkpoint that no parameter uses are not an error.
    pub allow_unexpected: bool,
}

impl LoadOptions {
    /// Everything must fit.
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets the float type of the filled parameters.
    pub fn with_dtype(mut self, dtype: DType) -> Self {
        self.dtype = Some(dtype);
        self
    }

    /// Leaves parameters below a path as they are.
    pub fn with_skip(mut self, prefix: impl Into<String>) -> Self {
        self.skip.push(prefix.into());
        self
    }

    /// Lets parameters below a path be absent.
    pub fn with_allow_missing(mut self, prefix: impl Into<String>) -> Self {
        self.allow_missing.push(prefix.into());
        self
    }

    /// Lets the checkpoint hold more than the module uses.
    pub fn with_allow_unexpected(mut self, allow: bool) -> Self {
        self.allow_unexpected = allow;
        self
    }
}

/// What loading did.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Loaded {
    /// Number of parameters that were filled.
    pub filled: usize,
    /// Parameters that kept their initial values, by skipping or because the checkpoint has none.
    pub kept: Vec<String>,
    /// Keys of the checkpoint that were not used.
    pub unused: Vec<String>,
}

/// Fills a module from a checkpoint; everything must fit.
///
/// The parameters keep their ids, devices and whether they require gradients. Stored f64, f32, f16 and bf16 become the
/// backend's float type.
///
/// # Errors
/// [`HubError::Keys`] with every missing, unexpected and misshapen key at once; [`HubError::KeyMap`] for a contradictory
/// map.
pub fn load_into<B: Backend, M: Module<B>>(
    module: M,
    checkpoint: &Checkpoint,
    map: impl Into<KeyMap>,
) -> Result<M, HubError> {
    load_into_with(module, checkpoint, map, &LoadOptions::default()).map(|(module, _)| module)
}

/// Fills a module from a checkpoint as [`load_into`] does, with options, and says what was done.
///
/// # Errors
/// See [`load_into`].
pub fn load_into_with<B: Backend, M: Module<B>>(
    module: M,
    checkpoint: &Checkpoint,
    map: impl Into<KeyMap>,
    options: &LoadOptions,
) -> Result<(M, Loaded), HubError> {
    let map = map.into();
    let (plan, mut loaded) = compare(&list_params::<B, M>(&module), checkpoint, &map, options)?;
    let mut filler = Filler {
        checkpoint,
        plan,
        dtype: options.dtype,
        path: PathStack::default(),
        filled: 0,
        error: None,
    };
    let module = module.map(&mut filler);
    match filler.error {
        Some(error) => Err(error),
        None => {
            loaded.filled = filler.filled;
            Ok((module, loaded))
        }
    }
}

/// Which key fills a parameter, and how.
type Plan = BTreeMap<String, (String, Transform)>;

/// Looks at module and checkpoint together; an error lists everything that does not fit.
fn compare(
    params: &[ParamInfo],
    checkpoint: &Checkpoint,
    map: &KeyMap,
    options: &LoadOptions,
) -> Result<(Plan, Loaded), HubError> {
    let rules = map.by_param()?;
    let mut report = KeyReport {
        place: checkpoint.place().to_string(),
        ..Default::default()
    };
    let mut plan = Plan::new();
    let mut loaded = Loaded::default();
    let mut used: BTreeSet<&str> = BTreeSet::new();
    for param in params {
        let Some(rule) = rules.get(param.path.as_str()) else {
            if below(&options.skip, &param.path) {
                loaded.kept.push(param.path.clone());
            } else {
                report.unmapped.push(param.path.clone());
            }
            continue;
        };
        let names = || {
            std::iter::once(&rule.key)
                .chain(&rule.aliases)
                .map(String::as_str)
        };
        if below(&options.skip, &param.path) {
            used.extend(names());
            loaded.kept.push(param.path.clone());
            continue;
        }
        let Some((key, stored)) = names().find_map(|name| Some((name, checkpoint.stored(name)?))) else {
            if rule.optional || below(&options.allow_missing, &param.path) {
                loaded.kept.push(param.path.clone());
            } else {
                report.missing.push(MissingKey {
                    param: param.path.clone(),
                    key: rule.key.clone(),
                });
            }
            continue;
        };
        used.insert(key);
        let expected = stored_shape(param, rule)?;
        if stored.shape != expected {
            report.misshapen.push(MisshapenKey {
                param: param.path.clone(),
                key: key.to_string(),
                expected,
                found: stored.shape,
            });
        } else if kind_of(stored.dtype) != Some(param.kind) {
            report.mistyped.push(MistypedKey {
                param: param.path.clone(),
                key: key.to_string(),
                expected: param.kind.name(),
                found: format!("{:?}", stored.dtype),
            });
        } else {
            plan.insert(param.path.clone(), (key.to_string(), rule.transform));
        }
    }
    // A file may hold one tensor under several of its names; the spare ones are not a mistake.
    let aliases: BTreeSet<&str> = map
        .rules
        .iter()
        .flat_map(|r| &r.aliases)
        .map(String::as_str)
        .collect();
    let unused = checkpoint.names().filter(|key| !used.contains(key));
    loaded.unused = unused.map(str::to_string).collect();
    if !options.allow_unexpected {
        let expected = |key: &str| aliases.contains(key) || map.ignorable.iter().any(|p| p.matches(key));
        report.unexpected = loaded
            .unused
            .iter()
            .filter(|key| !expected(key))
            .cloned()
            .collect();
    }
    if report.is_clean() {
        Ok((plan, loaded))
    } else {
        Err(HubError::Keys(Box::new(report)))
    }
}

/// The shape that a parameter's tensor has in the checkpoint.
fn stored_shape(param: &ParamInfo, rule: &KeyRule) -> Result<Vec<usize>, HubError> {
    let mut shape = param.shape.clone();
    if rule.transform == Transform::Transpose {
        if shape.len() != 2 {
            return Err(HubError::KeyMap(format!(
                "parameter `{}` has rank {} and cannot be transposed",
                param.path,
                shape.len()
            )));
        }
        shape.reverse();
    }
    Ok(shape)
}

/// Whether a path equals one of the prefixes or lies below it.
fn below(prefixes: &[String], path: &str) -> bool {
    prefixes.iter().any(|prefix| {
        let prefix = prefix.trim_end_matches('.');
        path.strip_prefix(prefix)
            .is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
    })
}

struct Filler<'a> {
    checkpoint: &'a Checkpoint,
    plan: Plan,
    dtype: Option<DType>,
    path: PathStack,
    filled: usize,
    error: Option<HubError>,
}

impl Filler<'_> {
    /// The data for the parameter at the current path; `None` if it is to be left alone.
    fn data(&mut self, float: Option<DType>) -> Option<TensorData> {
        if self.error.is_some() {
            return None;
        }
        let (key, transform) = self.plan.get(&self.path.path())?;
        match read(self.checkpoint, key, *transform, float) {
            Ok(data) => {
                self.filled += 1;
                Some(data)
            }
            Err(error) => {
                self.error = Some(error);
                None
            }
        }
    }
}

/// Reads one tensor, transposed and converted.
fn read(
    checkpoint: &Checkpoint,
    key: &str,
    transform: Transform,
    float: Option<DType>,
) -> Result<TensorData, HubError> {
    let mut raw = checkpoint.raw(key)?;
    let (transposed, shape);
    if let (Transform::Transpose, &[rows, cols]) = (transform, raw.shape) {
        transposed = transpose_bytes(raw.bytes, rows, cols, raw.dtype.bitsize() / 8);
        shape = [cols, rows];
        (raw.bytes, raw.shape) = (&transposed, &shape);
    }
    match float {
        Some(dtype) => raw.to_floats(dtype),
        None => raw.to_data(),
    }
}

impl<B: Backend> ModuleMapper<B> for Filler<'_> {
    fn enter_module(&mut self, name: &str, _container: &str) {
        self.path.enter(name);
    }

    fn exit_module(&mut self, _name: &str, _container: &str) {
        self.path.exit();
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
        let dtype = self.dtype.unwrap_or_else(|| match param.is_initialized() {
            true => param.val().dtype(),
            false => <B::FloatElem as burn_tensor::Element>::dtype(),
        });
        let Some(data) = self.data(Some(dtype)) else {
            return param;
        };
        let id = param.id;
        let tensor = Tensor::from_data(data, (&param.lazy_device(), dtype));
        param.transform_for_load(tensor, id)
    }

    fn map_int<const D: usize>(&mut self, param: Param<Tensor<B, D, Int>>) -> Param<Tensor<B, D, Int>> {
        let Some(data) = self.data(None) else { return param };
        let id = param.id;
        let tensor = Tensor::from_data(data, &param.lazy_device());
        param.transform_for_load(tensor, id)
    }

    fn map_bool<const D: usize>(&mut self, param: Param<Tensor<B, D, Bool>>) -> Param<Tensor<B, D, Bool>> {
        let Some(data) = self.data(None) else { return param };
        let id = param.id;
        let tensor = Tensor::from_data(data, &param.lazy_device());
        param.transform_for_load(tensor, id)
    }
}

#[cfg(test)]
mod tests {
    use super::below;

    #[test]
    fn a_prefix_ends_at_a_dot() {
        let prefixes = vec!["head".to_string(), "layers.1.".to_string()];
        assert!(below(&prefixes, "head"));
        assert!(below(&prefixes, "head.weight"));
        assert!(below(&prefixes, "layers.1.bias"));
        assert!(!below(&prefixes, "header.weight"));
        assert!(!below(&prefixes, "layers.10.bias"));
    }
}
