//! From a checkpoint into a module.
//!
//! Loading has two halves. The first compares checkpoint and module ([`compare`]) and reports every
//! disagreement at once, so that a half-filled module never exists. The second fills, and by then nothing is
//! left to fail but reading. Tensors are read one at a time, so the peak is the module plus one tensor.

use burn_core::module::{Module, ModuleMapper, Param};
use burn_tensor::backend::Backend;
use burn_tensor::{Bool, DType, Int, Tensor, TensorData, get_device_settings};
use kiln_models::params::{is_fresh, sync_running};

use crate::checkpoint::Checkpoint;
use crate::compare::{Plan, compare};
use crate::convert::{ints_fit, transpose_bytes};
use crate::error::HubError;
use crate::key_map::{KeyMap, Transform};
use crate::walk::{PathStack, list_params};

/// How strictly a checkpoint must fit.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LoadOptions {
    /// Float type of the filled parameters; by default the backend's own.
    pub dtype: Option<DType>,
    /// Parameters whose path begins with one of these keep their initial values, whatever the checkpoint has
    /// (a head for other classes).
    pub skip: Vec<String>,
    /// Parameters whose path begins with one of these may be absent from the checkpoint.
    pub allow_missing: Vec<String>,
    /// Parameters of a task head keep their initial values where the checkpoint has no tensor for them, or
    /// one of another shape.
    pub new_heads: bool,
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

    /// Starts task heads anew that the checkpoint lacks or has for other classes, as fine-tuning wants it.
    /// [`Loaded::new_heads`] and a warning name these heads.
    pub fn with_new_heads(mut self, allow: bool) -> Self {
        self.new_heads = allow;
        self
    }

    /// Lets the checkpoint hold more than the module uses.
    pub fn with_allow_unexpected(mut self, allow: bool) -> Self {
        self.allow_unexpected = allow;
        self
    }
}

/// The result of loading.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Loaded {
    /// Number of parameters that were filled.
    pub filled: usize,
    /// Parameters that kept their initial values, by skipping or because the checkpoint has none.
    pub kept: Vec<String>,
    /// Those of them that belong to task heads which the checkpoint does not have in this shape.
    pub new_heads: Vec<String>,
    /// Keys of the checkpoint that were not used.
    pub unused: Vec<String>,
}

/// Fills a module from a checkpoint; everything must fit.
///
/// The parameters keep their ids, devices and whether they require gradients. Stored f64, f32, f16 and bf16
/// become the backend's float type, and stored integers the parameter's type.
///
/// # Errors
/// [`HubError::Keys`] with every missing, unexpected and misshapen key at once, the keys of a task head among
/// them; [`HubError::DType`] for integers that the parameter's type lacks; [`HubError::KeyMap`] for a
/// contradictory map.
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
    if !loaded.new_heads.is_empty() {
        kiln_log::warn!(
            "{} has no such head: {} start from random values",
            checkpoint.place(),
            loaded.new_heads.join(", ")
        );
    }
    if !is_fresh(&module) {
        // A statistic that a training step has left aside would replace the loaded one later.
        sync_running(&module);
    }
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
        let dtype = match param.is_initialized() {
            true => param.val().dtype(),
            false => get_device_settings::<B>(&param.lazy_device()).int_dtype.into(),
        };
        if !ints_fit(&data, dtype) {
            self.error = Some(HubError::DType {
                name: self.path.path(),
                stored: format!("{:?} with values beyond {dtype:?}", data.dtype),
                wanted: format!("{dtype:?}, the parameter's type; give the parameter the stored type"),
            });
            return param;
        }
        let id = param.id;
        let tensor = Tensor::from_data(data, (&param.lazy_device(), dtype));
        param.transform_for_load(tensor, id)
    }

    fn map_bool<const D: usize>(&mut self, param: Param<Tensor<B, D, Bool>>) -> Param<Tensor<B, D, Bool>> {
        let Some(data) = self.data(None) else { return param };
        let id = param.id;
        let tensor = Tensor::from_data(data, &param.lazy_device());
        param.transform_for_load(tensor, id)
    }
}
