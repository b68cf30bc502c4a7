//! One uniform view of a module's tensors: where each lies in the module tree, its shape, and whether it is
//! trained.
//!
//! Burn modules are walked with a visitor; the walk asks a parameter for its shape without initialising it,
//! so listing a model of billions of parameters allocates nothing. Buffers (the running statistics of batch
//! normalisation) are seen by the same walk and told apart by the field that holds them.

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param};
use burn::tensor::backend::Backend;
use burn::tensor::{Bool, Int, Tensor, TensorData};

/// Whether a tensor of a module is trained.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TensorKind {
    /// Updated by the optimizer.
    Parameter,
    /// State that the forward pass maintains, such as running statistics.
    Buffer,
}

/// One tensor of a module.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ParamInfo {
    /// Path in the module tree, fields and indices joined by dots: `layers.0.self_attn.q_proj.weight`.
    pub path: String,
    /// Shape as the module stores it. A `Linear` weight is `[d_input, d_output]`.
    pub shape: Vec<usize>,
    /// Whether the tensor is trained.
    pub kind: TensorKind,
    /// Name of the struct that holds the tensor: `Linear`, `LayerNorm`, `Conv2d`, ...
    pub container: String,
}

impl ParamInfo {
    /// Number of elements.
    pub fn num_elements(&self) -> usize {
        self.shape.iter().product()
    }
}

/// Lists all float tensors of `module` in the order of its fields, without initialising any of them.
pub fn list_params<B: Backend, M: Module<B>>(module: &M) -> Vec<ParamInfo> {
    let mut walk = Walk::default();
    module.visit(&mut walk);
    walk.found
}

/// Number of trained elements of `module`: buffers do not count, so the figure is the one PyTorch reports.
pub fn num_trainable<B: Backend, M: Module<B>>(module: &M) -> usize {
    list_params(module)
        .iter()
        .filter(|info| info.kind == TensorKind::Parameter)
        .map(ParamInfo::num_elements)
        .sum()
}

/// Brings the running statistics of `module` up to date.
///
/// A training step's forward pass leaves the new statistics of a `RunningState` aside, and the next step or
/// `module.valid()` puts them in place. A walk over the module (to save it, for one) does neither and sees
/// the values of the step before, or the initial ones after a single step. Call this before such a walk.
/// Copies of the module share the statistics and are brought up to date too. Parameters that have no value
/// yet get their initial one.
pub fn sync_running<B: Backend, M: Module<B>>(module: &M) {
    // A copy draws initial values of its own, so the module draws them first.
    module.visit(&mut Initialise);
    // Making a record is the one operation of every module that puts the statistics in place.
    drop(module.clone().into_record());
}

/// Whether no parameter of `module` has its value yet: such a module has never computed anything, and has no
/// running statistics to bring up to date.
pub fn is_fresh<B: Backend, M: Module<B>>(module: &M) -> bool {
    let mut walk = Fresh::default();
    module.visit(&mut walk);
    !walk.initialized
}

#[derive(Default)]
struct Fresh {
    position: Position,
    initialized: bool,
}

impl<B: Backend> ModuleVisitor<B> for Fresh {
    fn enter_module(&mut self, name: &str, container: &str) {
        self.position.enter(name, container);
    }

    fn exit_module(&mut self, _name: &str, _container: &str) {
        self.position.exit();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        // Running statistics have values from the start.
        self.initialized |= !self.position.is_buffer() && param.is_initialized();
    }
}

struct Initialise;

impl<B: Backend> ModuleVisitor<B> for Initialise {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        drop(param.val());
    }

    fn visit_int<const D: usize>(&mut self, param: &Param<Tensor<B, D, Int>>) {
        drop(param.val());
    }

    fn visit_bool<const D: usize>(&mut self, param: &Param<Tensor<B, D, Bool>>) {
        drop(param.val());
    }
}

/// Replaces tensors of `module` by what `source` returns for their paths; `None` leaves a tensor as it is.
///
/// Keeps each parameter's identity and whether it requires a gradient. A parameter that was never initialised
/// is not initialised on the way. Data is converted to the backend's float type.
///
/// # Errors
///
/// The first tensor whose data has another shape than the module expects, as [`ShapeMismatch`].
pub fn assign_params<B: Backend, M: Module<B>>(
    module: M,
    source: impl FnMut(&str) -> Option<TensorData>,
) -> Result<M, ShapeMismatch> {
    if !is_fresh(&module) {
        // A statistic that a training step has left aside would replace the assigned one later.
        sync_running(&module);
    }
    let mut assign = Assign {
        position: Position::default(),
        source,
        mismatch: None,
    };
    let module = module.map(&mut assign);
    match assign.mismatch {
        Some(mismatch) => Err(mismatch),
        None => Ok(module),
    }
}

/// Data for a tensor had another shape than the module's.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("assign `{path}`: the module expects shape {expected:?}, the data has {found:?}")]
pub struct ShapeMismatch {
    /// Path of the tensor in the module.
    pub path: String,
    /// Shape in the module.
    pub expected: Vec<usize>,
    /// Shape of the data.
    pub found: Vec<usize>,
}

/// Where a walk stands in the module tree: field names, and the kind of container that holds each.
#[derive(Default)]
struct Position {
    names: Vec<String>,
    containers: Vec<String>,
}

impl Position {
    fn enter(&mut self, name: &str, container: &str) {
        self.names.push(name.to_string());
        self.containers.push(container.to_string());
    }

    fn exit(&mut self) {
        self.names.pop();
        self.containers.pop();
    }

    fn path(&self) -> String {
        self.names.join(".")
    }

    /// Whether the tensor here is a running statistic, going by its field's name.
    fn is_buffer(&self) -> bool {
        self.names.last().is_some_and(|name| name.starts_with("running_"))
    }

    /// The innermost struct: containers of other kinds (`Vec`, tuples, arrays) only add an index to the path.
    fn holder(&self) -> &str {
        self.containers
            .iter()
            .rev()
            .find_map(|container| container.strip_prefix("Struct:"))
            .unwrap_or("")
    }
}

#[derive(Default)]
struct Walk {
    position: Position,
    found: Vec<ParamInfo>,
}

impl<B: Backend> ModuleVisitor<B> for Walk {
    fn enter_module(&mut self, name: &str, container: &str) {
        self.position.enter(name, container);
    }

    fn exit_module(&mut self, _name: &str, _container: &str) {
        self.position.exit();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        let container = self.position.holder().to_string();
        self.found.push(ParamInfo {
            path: self.position.path(),
            shape: param.lazy_shape().to_vec(),
            kind: if self.position.is_buffer() {
                TensorKind::Buffer
            } else {
                TensorKind::Parameter
            },
            container,
        });
    }
}

struct Assign<F> {
    position: Position,
    source: F,
    mismatch: Option<ShapeMismatch>,
}

impl<B: Backend, F: FnMut(&str) -> Option<TensorData>> ModuleMapper<B> for Assign<F> {
    fn enter_module(&mut self, name: &str, container: &str) {
        self.position.enter(name, container);
    }

    fn exit_module(&mut self, _name: &str, _container: &str) {
        self.position.exit();
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
        let path = self.position.path();
        let Some(data) = (self.source)(&path) else {
            return param;
        };
        let expected = param.lazy_shape().to_vec();
        let found = data.shape.to_vec();
        if expected != found {
            self.mismatch.get_or_insert(ShapeMismatch {
                path,
                expected,
                found,
            });
            return param;
        }
        let tensor = Tensor::from_data(data, &param.lazy_device());
        let id = param.id;
        param.transform_for_load(tensor, id)
    }
}
