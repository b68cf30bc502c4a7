//! Why a step could not be compiled, or failed.

use kiln_compiler::CompileError;
use kiln_graph::IndexError;

use crate::error::CudaError;

/// Why a step could not be compiled, or failed.
#[derive(Debug, thiserror::Error)]
pub enum StepError {
    /// The step compiler failed.
    #[error(transparent)]
    Compile(#[from] CompileError),
    /// The device, a library or the building of kernels failed.
    #[error(transparent)]
    Cuda(#[from] CudaError),
    /// An index was out of range. Nothing that the step was given was overwritten.
    #[error(transparent)]
    Index(Box<IndexError>),
    /// The cache's entry of a step cannot be read.
    #[error("step `{name}`: its description cannot be read: {reason}")]
    Description {
        /// The step.
        name: String,
        /// Why.
        reason: String,
    },
    /// The arguments of a call do not fit the step.
    #[error("step `{name}` takes {expected} {what}, got {given}")]
    Arguments {
        /// The step.
        name: String,
        /// What was counted: inputs, outputs or scalars.
        what: &'static str,
        /// What the step takes.
        expected: usize,
        /// What it was given.
        given: usize,
    },
    /// An operation that runs outside failed.
    #[error("operation {index} outside of step `{name}` failed: {reason}")]
    Outside {
        /// The step.
        name: String,
        /// The operation's number.
        index: u32,
        /// Why.
        reason: String,
    },
}
