//! What can go wrong between a graph and a step's code.

use kiln_graph::verify::VerifyError;
use kiln_graph::{DType, TypeError};
use kiln_partition::PartitionError;

use crate::plan::verify::PlanFault;

/// An error of the step compiler.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CompileError {
    /// The graph is not well formed.
    #[error("the graph given to the step compiler is not valid: {0}")]
    Invalid(#[from] VerifyError),
    /// A pass built an ill-typed node: a bug of that pass.
    #[error("pass `{pass}` of the step compiler made an ill-typed node: {source}")]
    Pass {
        /// The pass.
        pass: &'static str,
        /// What is wrong.
        source: TypeError,
    },
    /// The step cannot be partitioned: most often, nothing fits the memory budget.
    #[error(transparent)]
    Partition(#[from] PartitionError),
    /// Autocast is to a type of 16 bits.
    #[error("autocast takes `f16` or `bf16`, not `{0}`")]
    Autocast(DType),
    /// The plan of memory is wrong: a bug of the compiler, found before the step could run.
    #[error("the plan of memory of the step compiler is wrong: {0}")]
    Plan(#[from] PlanFault),
    /// The target has no code for an operation.
    #[error("the `{target}` backend has no code for `{op}` on {types}; the `aot_eager` backend runs it")]
    Unsupported {
        /// Name of the target.
        target: &'static str,
        /// Mnemonic of the operation.
        op: String,
        /// Types of its operands.
        types: String,
    },
}

impl CompileError {
    /// Wraps the error of an ill-typed node that `pass` made.
    pub(crate) fn pass(pass: &'static str) -> impl FnOnce(TypeError) -> Self {
        move |source| Self::Pass { pass, source }
    }
}
