//! Executors: what runs a [`Graph`].
//!
//! An executor turns a graph into an [`Executable`] once ([`prepare`]); the executable runs it on burn-flex tensors as often as the step
//! comes again. Inputs are handed over by value: a tensor nobody else holds may be overwritten.
//!
//! - [`aot_eager`]: node by node on burn-flex. The reference in the ladder of backends, and what runs where nothing can be compiled.
//! - [`host`]: `candle` (candle-core, whose kernels share nothing with Burn's) and `interpret` (the plain meaning in f64).
//!
//! Operations kept whole run on burn-flex everywhere ([`crate::import::external`]).

pub mod aot_eager;
pub mod convert;
pub mod host;

use std::sync::Arc;

use burn_flex::FlexTensor;
use kiln_candle::CandleError;
use kiln_graph::{Graph, InterpretError, TensorType};

use crate::import::external::ExternError;
use crate::options::{CompileBackend, CompileOptions};

/// A graph ready to run.
pub trait Executable: Send + Sync {
    /// Runs the graph. `inputs` are its tensor arguments, `scalars` its runtime scalars ([`kiln_graph::Scalar::to_bits`] of each
    /// one's type). Returns the outputs in order; two outputs may share a buffer.
    ///
    /// # Errors
    ///
    /// If the arguments do not fit the graph or a node fails.
    ///
    /// # Panics
    ///
    /// Where a kernel of burn-flex does (an index out of range).
    fn run(&self, inputs: Vec<FlexTensor>, scalars: &[u64]) -> Result<Vec<FlexTensor>, ExecuteError>;

    /// What there is to say about how the graph runs, for people.
    fn report(&self) -> String;
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
    /// The candle executor failed.
    #[error("candle: {0}")]
    Candle(#[from] CandleError),
    /// The interpreter failed.
    #[error("interpret: {0}")]
    Interpret(#[from] InterpretError),
    /// An operation kept whole failed.
    #[error(transparent)]
    Extern(#[from] ExternError),
    /// A kernel panicked.
    #[error("a kernel panicked: {message}")]
    Panicked {
        /// What it said.
        message: String,
    },
    /// The backend is not available.
    #[error("backend `{backend}` is not available: {reason}")]
    Unavailable {
        /// The backend.
        backend: CompileBackend,
        /// What is missing, and what to use instead.
        reason: String,
    },
}

/// Prepares `graph` for `backend`.
///
/// # Errors
///
/// If the backend is not available or cannot take the graph.
pub fn prepare(
    backend: CompileBackend,
    graph: Arc<Graph>,
    _options: &CompileOptions,
) -> Result<Box<dyn Executable>, ExecuteError> {
    let _span = tracing::debug_span!("prepare", %backend).entered();
    match backend {
        CompileBackend::Eager | CompileBackend::AotEager => Ok(Box::new(aot_eager::AotEager::new(graph))),
        CompileBackend::Candle => Ok(Box::new(host::Candle::new(graph)?)),
        CompileBackend::Interpret => Ok(Box::new(host::Interpret::new(graph))),
        CompileBackend::Cpu => Err(ExecuteError::Unavailable {
            backend,
            reason: "the compiler is not linked into this build; use `aot_eager`".into(),
        }),
    }
}

/// Checks that `inputs` and `scalars` are what `graph` takes.
fn check_arguments(graph: &Graph, inputs: &[FlexTensor], scalars: &[u64]) -> Result<(), ExecuteError> {
    let (expected, given) = (graph.parameters().len(), inputs.len());
    if expected != given {
        return Err(ExecuteError::TensorCount { expected, given });
    }
    let (expected, given) = (graph.scalars().len(), scalars.len());
    if expected != given {
        return Err(ExecuteError::ScalarCount { expected, given });
    }
    for (index, (&value, tensor)) in graph.parameters().iter().zip(inputs).enumerate() {
        let expected = graph.ty(value);
        let given = convert::tensor_type(tensor);
        if given.as_ref() != Some(expected) {
            let given = given.map_or_else(|| format!("{:?}", tensor.dtype()), |ty| ty.to_string());
            return Err(ExecuteError::TensorType {
                index,
                expected: expected.clone(),
                given,
            });
        }
    }
    Ok(())
}
