//! Executors: what runs a [`Graph`].
//!
//! An executor turns a graph into an [`Executable`] once ([`prepare`]); the executable runs it on burn-flex
//! tensors as often as the step comes again. Inputs are handed over by value: a tensor nobody else holds may
//! be overwritten.
//!
//! - [`aot_eager`]: node by node on burn-flex. The reference in the ladder of backends, and what runs where
//!   nothing can be compiled.
//! - [`cpu`]: compiled to one shared object through C. [`cuda`]: compiled to one graph of kernels on an
//!   NVIDIA GPU.
//! - [`minify`]: what becomes of one that goes wrong, if that is asked for.
//! - [`memory`]: the arguments of a step that runs again and again.
//! - [`profile`]: what they tell an open profile. [`check`]: comparing one with another.
//! - [`host`]: `interpret`, the plain meaning in f64. With the feature `candle` also `candle`: candle-core,
//!   whose kernels share nothing with Burn's.
//!
//! Operations kept whole run on burn-flex everywhere ([`crate::import::external`]).

pub mod aot_eager;
#[cfg(feature = "candle")]
pub mod candle;
pub mod check;
pub mod convert;
pub mod cpu;
pub mod cuda;
pub mod families;
pub mod host;
pub mod memory;
pub mod minify;
mod patience;
pub mod profile;

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

#[cfg(feature = "candle")]
use kiln_candle::CandleError;
use kiln_compiler::{CompileError, Contract};
use kiln_cpu::{CpuError, StepError};
use kiln_family::Outcome;
use kiln_graph::{Graph, IndexError, InterpretError, Phase, TensorType};

use crate::import::external::ExternError;
use crate::options::{CompileBackend, CompileOptions};
use crate::storage::Storage;
use memory::Memory;

/// A graph ready to run.
///
/// Every index is known to be in range before an argument is overwritten: after [`ExecuteError::Index`] all
/// arguments are as they were, and where they were.
pub trait Executable: Send + Sync {
    /// Runs the graph. `inputs` are its tensor arguments, `scalars` its runtime scalars
    /// ([`kiln_graph::Scalar::to_bits`] of each one's type). Returns the outputs in order; two outputs may
    /// share a buffer. The inputs leave their list, unless the error is [`ExecuteError::Index`].
    ///
    /// # Errors
    ///
    /// If the arguments do not fit the graph or a node fails.
    ///
    /// # Panics
    ///
    /// Where a kernel of burn-flex does.
    fn run_given(&self, inputs: &mut Vec<Storage>, scalars: &[u64]) -> Result<Vec<Storage>, ExecuteError>;

    /// [`Executable::run_given`] for inputs that the caller does not want back.
    ///
    /// # Errors
    ///
    /// As [`Executable::run_given`].
    ///
    /// # Panics
    ///
    /// As [`Executable::run_given`].
    fn run(&self, mut inputs: Vec<Storage>, scalars: &[u64]) -> Result<Vec<Storage>, ExecuteError> {
        self.run_given(&mut inputs, scalars)
    }

    /// Runs the graph on the tensors of `memory`, which keeps the outputs that become arguments of the next
    /// run. The result has none for these.
    ///
    /// # Errors
    ///
    /// As [`Executable::run`]; and if an argument is missing. What the memory had for one run may then be
    /// lost, unless the error is
    /// [`ExecuteError::Index`]: the memory is then as it was.
    ///
    /// # Panics
    ///
    /// As [`Executable::run`].
    fn run_on(&self, memory: &mut Memory, scalars: &[u64]) -> Result<Vec<Option<Storage>>, ExecuteError> {
        memory.run_by(|inputs| self.run_given(inputs, scalars))
    }

    /// What there is to say about how the graph runs, for people.
    fn report(&self) -> String;

    /// What is known of compiled code: kernels, buffers, operations outside. None where nothing is compiled.
    fn contract(&self) -> Option<&Contract> {
        None
    }

    /// What became of the dimensions that the program marked, for people.
    fn size_notes(&self) -> &[String] {
        &[]
    }

    /// Its number in the process, under which profiles file its kernels.
    fn id(&self) -> u64;

    /// The first place where this executable and the reference part, as precisely as it can tell.
    ///
    /// # Errors
    ///
    /// If either fails.
    fn locate(&self, _reference: &check::Reference<'_>) -> Result<Option<check::Parting>, ExecuteError> {
        Ok(None)
    }

    /// Time spent in each stage of preparation.
    fn stages(&self) -> &[(&'static str, Duration)] {
        &[]
    }

    /// Whether the disk cache had it.
    fn is_from_cache(&self) -> bool {
        false
    }

    /// What it took to compile it, where steps of several shapes share their kernels. None where they do not.
    fn outcome(&self) -> Option<&Outcome> {
        None
    }

    /// Threads that share its work.
    fn threads(&self) -> usize {
        1
    }

    /// Bytes of the one block that holds all intermediate values of a run; none where values are allocated
    /// one by one.
    fn arena_bytes(&self) -> Option<usize> {
        None
    }

    /// Time spent in compiled code, over all runs: without handing over tensors and taking results. None
    /// where there is no such code.
    fn code_time(&self) -> Option<Duration> {
        None
    }
}

/// Why a graph could not be prepared or run.
#[derive(Debug, thiserror::Error)]
pub enum ExecuteError {
    /// The number of tensor arguments is wrong.
    #[error("the graph takes {expected} tensors, got {given}")]
    TensorCount {
        /// How many it takes.
        expected: usize,
        /// How many it was given.
        given: usize,
    },
    /// The number of runtime scalars is wrong.
    #[error("the graph takes {expected} runtime scalars, got {given}")]
    ScalarCount {
        /// How many it takes.
        expected: usize,
        /// How many it was given.
        given: usize,
    },
    /// A tensor argument was not given.
    #[error("argument {index} is missing")]
    Missing {
        /// Which argument.
        index: usize,
    },
    /// A tensor argument has the wrong type.
    #[error("argument {index} is {given}, the graph takes {expected}")]
    TensorType {
        /// Which argument.
        index: usize,
        /// Its type in the graph.
        expected: TensorType,
        /// The type given.
        given: String,
    },
    /// A node failed.
    #[error("`{operation}`{origin}: {reason}")]
    Node {
        /// Mnemonic of the primitive, or name of the operation kept whole.
        operation: String,
        /// The recorded operation it comes from and where, in parentheses; empty if unknown.
        origin: String,
        /// What happened.
        reason: String,
    },
    /// An index is out of range. Nothing was overwritten: all arguments are as they were before the run.
    #[error(transparent)]
    Index(Box<IndexError>),
    /// The candle executor failed.
    #[cfg(feature = "candle")]
    #[error("candle: {0}")]
    Candle(CandleError),
    /// The backend is not part of this build.
    #[error(
        "this program was built without the backend `{backend}`: ask for it in Cargo.toml, `kiln = {{ .., features = [\"{backend}\"] }}`"
    )]
    NotBuilt {
        /// The backend, which is also the name of the feature.
        backend: CompileBackend,
    },
    /// The interpreter failed.
    #[error("interpret: {0}")]
    Interpret(InterpretError),
    /// An operation kept whole failed.
    #[error(transparent)]
    Extern(#[from] ExternError),
    /// Autocast to a type that is none of 16 bits.
    #[error("autocast takes bf16 or f16, not {dtype:?}")]
    Autocast {
        /// The type.
        dtype: burn_backend::DType,
    },
    /// A kernel panicked.
    #[error("a kernel panicked: {message}")]
    Panicked {
        /// What it said.
        message: String,
    },
    /// The step and the backend it was checked against gave different results.
    #[error("output {output} is not what {reference} gives; they part at {parting}")]
    Parted {
        /// The backend it was checked against.
        reference: CompileBackend,
        /// The first output that differs.
        output: usize,
        /// The first place where they part.
        parting: Box<check::Parting>,
    },
    /// The step crashes in a process of its own, where it ran first (`KILN_MINIFY`).
    #[error("the compiled step did not run here, because it ran in a process of its own first: {fault}")]
    Crashes {
        /// How that process ended.
        fault: String,
    },
    /// A fault that was minified (`KILN_MINIFY`).
    #[error("{source}; {search}")]
    Minified {
        /// The fault.
        source: Box<ExecuteError>,
        /// The file of the smallest graph that shows it, or why there is none.
        search: Box<minify::Search>,
    },
    /// There is no C compiler.
    #[error(transparent)]
    NoCompiler(Arc<CpuError>),
    /// Other ranks have died, hang, or compiled another step.
    #[error(transparent)]
    Ranks(#[from] kiln_distributed::Error),
    /// A mean over ranks does not fit the graph.
    #[error("the means over ranks do not fit the step: {0}")]
    Mean(kiln_graph::TypeError),
    /// The step compiler failed.
    #[error(transparent)]
    Compile(#[from] CompileError),
    /// The compiled code could not be built, or failed.
    #[error(transparent)]
    Step(StepError),
    /// A GPU has not the memory that the step needs. Nothing was overwritten: all arguments are as they were
    /// before the run.
    #[error(
        "{source}. The step has {arguments} bytes of arguments and {outputs} of outputs, and {arena} of intermediate values; {remedy}"
    )]
    GpuMemory {
        /// The allocation that failed, with the sizes of the GPU's memory.
        source: Box<kiln_cuda::CudaError>,
        /// Bytes of all arguments.
        arguments: usize,
        /// Bytes of the outputs that do not take an argument's place.
        outputs: usize,
        /// Bytes of all intermediate values.
        arena: usize,
        /// What would do.
        remedy: String,
    },
    /// The code on a GPU could not be built, or failed.
    #[error(transparent)]
    Cuda(kiln_cuda::execute::StepError),
}

impl ExecuteError {
    /// Whether the inputs are as they were: nothing was overwritten, or a check had kept them.
    pub fn is_before_overwriting(&self) -> bool {
        match self {
            Self::Index(_) | Self::GpuMemory { .. } | Self::Parted { .. } => true,
            Self::Minified { source, .. } => source.is_before_overwriting(),
            _ => false,
        }
    }

    /// Whether the graph is the cause, so that the next attempt to prepare it fails alike. Whatever else
    /// fails, such as a disk that is full or a compiler that was killed, may pass.
    pub fn is_of_graph(&self) -> bool {
        match self {
            Self::Compile(_) | Self::Mean(_) | Self::Crashes { .. } => true,
            Self::Minified { source, .. } => source.is_of_graph(),
            _ => false,
        }
    }
}

#[cfg(feature = "candle")]
impl From<CandleError> for ExecuteError {
    fn from(error: CandleError) -> Self {
        match error {
            CandleError::Index(error) => Self::Index(error),
            error => Self::Candle(error),
        }
    }
}

impl From<InterpretError> for ExecuteError {
    fn from(error: InterpretError) -> Self {
        match error {
            InterpretError::Index(error) => Self::Index(error),
            error => Self::Interpret(error),
        }
    }
}

impl From<StepError> for ExecuteError {
    fn from(error: StepError) -> Self {
        match error {
            StepError::Index(error) => Self::Index(error),
            StepError::Compile(error) => Self::Compile(error),
            error => Self::Step(error),
        }
    }
}

impl From<kiln_cuda::execute::StepError> for ExecuteError {
    fn from(error: kiln_cuda::execute::StepError) -> Self {
        use kiln_cuda::execute::StepError;
        match error {
            StepError::Index(error) => Self::Index(error),
            StepError::Compile(error) => Self::Compile(error),
            error => Self::Cuda(error),
        }
    }
}

impl From<kiln_cuda::CudaError> for ExecuteError {
    fn from(error: kiln_cuda::CudaError) -> Self {
        Self::Cuda(error.into())
    }
}

/// [`prepare_here`]. With `KILN_MINIFY` ([`minify`]) a graph that does not compile, or whose code crashes in a
/// process of its own, is an error that names the file of the smallest such graph.
///
/// # Errors
///
/// If the backend cannot take the graph.
pub fn prepare(
    backend: CompileBackend,
    gpu: usize,
    graph: Arc<Graph>,
    options: &CompileOptions,
    setting: Setting<'_>,
) -> Result<(Box<dyn Executable>, CompileBackend), ExecuteError> {
    let suspect = |backend| minify::Suspect {
        graph: &graph,
        backend,
        gpu,
        options,
    };
    let prepared = patience::compiling(&graph, backend, || {
        prepare_here(backend, gpu, graph.clone(), options, setting)
    });
    let (executable, backend) = prepared.map_err(|error| suspect(backend).minified(error))?;
    suspect(backend).survives()?;
    Ok((executable, backend))
}

/// Prepares `graph` for `backend`, and says which backend it really is: where nothing can be compiled (no C
/// compiler, an operation without code) the step runs on `aot_eager`, after one warning. `gpu` is the ordinal
/// of the GPU, for a backend that runs on one.
///
/// # Errors
///
/// If the backend cannot take the graph.
fn prepare_here(
    backend: CompileBackend,
    gpu: usize,
    graph: Arc<Graph>,
    options: &CompileOptions,
    setting: Setting<'_>,
) -> Result<(Box<dyn Executable>, CompileBackend), ExecuteError> {
    let _span = tracing::debug_span!("prepare", %backend).entered();
    let is_half = options.autocast == Some(burn_backend::DType::F16);
    if is_half && backend.compiles() && options.loss_scaling.is_none() && has_gradients(&graph) {
        say_once(
            "autocast to f16 scales the loss in a `TrainStep` only: elsewhere gradients below 6e-8 become zero; multiply the loss by a number of your own and divide the \
             gradients by it, or take bf16",
        );
    }
    let instead = |graph, cause: &str| -> Result<(Box<dyn Executable>, CompileBackend), ExecuteError> {
        let executable = aot_eager::AotEager::instead(graph, cause);
        Ok((Box::new(executable), CompileBackend::AotEager))
    };
    let executable: Box<dyn Executable> = match backend {
        CompileBackend::Eager | CompileBackend::AotEager => Box::new(aot_eager::AotEager::new(graph)),
        #[cfg(feature = "candle")]
        CompileBackend::Candle => Box::new(candle::Candle::new(graph)?),
        #[cfg(not(feature = "candle"))]
        CompileBackend::Candle => return Err(ExecuteError::NotBuilt { backend }),
        CompileBackend::Interpret => Box::new(host::Interpret::new(graph)),
        CompileBackend::Cpu => match cpu::Cpu::new(graph.clone(), options, setting) {
            Ok(Some(executable)) => Box::new(executable),
            Ok(None) => return instead(graph, KNOWN_ALONE),
            Err(
                error @ (ExecuteError::NoCompiler(_)
                | ExecuteError::Compile(CompileError::Unsupported { .. })),
            ) => {
                let cause = error.to_string();
                say_once(&format!("steps run on aot_eager, which is slower: {cause}"));
                return instead(graph, &cause);
            }
            Err(error) => return Err(error),
        },
        CompileBackend::Cuda => match cuda::Cuda::new(gpu, graph.clone(), options, setting) {
            Ok(Some(executable)) => Box::new(executable),
            Ok(None) => return instead(graph, KNOWN_ALONE),
            Err(error @ ExecuteError::Compile(CompileError::Unsupported { .. })) => {
                let cause = error.to_string();
                say_once(&format!("steps run on aot_eager, which is slower: {cause}"));
                return instead(graph, &cause);
            }
            Err(error) => return Err(error),
        },
    };
    if options.autocast.is_some() && !backend.compiles() {
        say_once(&format!(
            "steps on {backend} compute in f32: autocast is for the backends cpu and cuda"
        ));
    }
    Ok((executable, backend))
}

/// Why a step behind the recompile limit is not compiled.
const KNOWN_ALONE: &str = "behind the recompile limit only kernels that are known run";

/// What a graph is prepared in, besides the options.
#[derive(Clone, Copy, Default)]
pub struct Setting<'a> {
    /// How much time compiling is worth.
    pub effort: Effort,
    /// The folder for what the step compiler makes of the graph, if that is wanted.
    pub debug: Option<&'a Path>,
    /// The families that a step of another shape belongs to; none where each shape is compiled by itself.
    pub families: Option<&'a families::Families>,
    /// Which dimensions of the graph's arguments vary, as far as the program says.
    pub sizes: Option<&'a families::Sizes>,
    /// Whether nothing may be compiled any more: a step that is no other shape of one before runs on
    /// `aot_eager`.
    pub only_known: bool,
}

/// How much time compiling is worth.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Effort {
    /// The step runs again and again.
    #[default]
    Full,
    /// The step runs once: what it shares with the step that lasts is compiled for both, and its updates are
    /// kernels of their own.
    Quick,
}

/// Warns of something once.
fn say_once(text: &str) {
    static SAID: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());
    let mut said = SAID.lock().unwrap_or_else(PoisonError::into_inner);
    if said.insert(text.to_owned()) {
        kiln_log::warn!(target: "kiln", "{text}");
    }
}

/// Whether a graph has a backward pass.
fn has_gradients(graph: &Graph) -> bool {
    let mut nodes = graph.nodes();
    nodes.any(|(_, data)| data.provenance.phase == Phase::Backward)
}

/// The type that the step compiler casts to.
fn autocast(options: &CompileOptions) -> Result<Option<kiln_graph::DType>, ExecuteError> {
    let Some(dtype) = options.autocast else {
        return Ok(None);
    };
    match convert::dtype(dtype) {
        Some(kiln_graph::DType::BF16) => Ok(Some(kiln_graph::DType::BF16)),
        Some(kiln_graph::DType::F16) => Ok(Some(kiln_graph::DType::F16)),
        _ => Err(ExecuteError::Autocast { dtype }),
    }
}

/// Bytes in KiB, rounded up, for reports.
pub(crate) fn kib(bytes: u64) -> u64 {
    bytes.div_ceil(1 << 10)
}

/// What autocast did to a step, in lines: which type each value has that was decided on, and what is cast
/// where. None without autocast.
fn autocast_text(contract: &Contract) -> Option<String> {
    let report = contract.autocast.as_ref()?;
    Some(format!("\n{}", report.to_string().trim_end()))
}

/// Checks that `inputs` and `scalars` are what `graph` takes.
fn check_arguments(graph: &Graph, inputs: &[Storage], scalars: &[u64]) -> Result<(), ExecuteError> {
    check_count(graph, inputs.len())?;
    check_scalars(graph, scalars)?;
    let mut tensors = inputs.iter().enumerate();
    tensors.try_for_each(|(index, tensor)| check_tensor(graph, index, tensor))
}

/// Checks the number of tensor arguments.
fn check_count(graph: &Graph, given: usize) -> Result<(), ExecuteError> {
    let expected = graph.parameters().len();
    match expected == given {
        true => Ok(()),
        false => Err(ExecuteError::TensorCount { expected, given }),
    }
}

/// Checks the number of runtime scalars.
fn check_scalars(graph: &Graph, scalars: &[u64]) -> Result<(), ExecuteError> {
    let (expected, given) = (graph.scalars().len(), scalars.len());
    match expected == given {
        true => Ok(()),
        false => Err(ExecuteError::ScalarCount { expected, given }),
    }
}

/// Checks that `tensor` is what `graph` takes as argument `index`.
fn check_tensor(graph: &Graph, index: usize, tensor: &Storage) -> Result<(), ExecuteError> {
    let expected = graph.ty(graph.parameters()[index]);
    if tensor.has_type(expected) {
        return Ok(());
    }
    let given = tensor.tensor_type();
    let given = given.map_or_else(|| format!("{:?}", tensor.dtype()), |ty| ty.to_string());
    Err(ExecuteError::TensorType {
        index,
        expected: expected.clone(),
        given,
    })
}
