//! What can go wrong between a graph and a running step.

use kiln_cpu::CpuError;
use kiln_graph::verify::VerifyError;
use kiln_graph::{IndexError, TypeError};
use kiln_partition::PartitionError;

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
    /// The step compiler has no code for an operation.
    #[error("the `cpu` backend has no code for `{op}` on {types}; the `aot_eager` backend runs it")]
    Unsupported {
        /// Mnemonic of the operation.
        op: String,
        /// Types of its operands.
        types: String,
    },
    /// The compiled code takes other arguments than were given.
    #[error("step `{name}` takes {expected} {what}, got {given}")]
    Arguments {
        /// Name of the step.
        name: String,
        /// Which arguments.
        what: &'static str,
        /// How many.
        expected: usize,
        /// How many were given.
        given: usize,
    },
    /// The description that was stored beside a cached step cannot be read.
    #[error(
        "the cached description of step `{name}` cannot be read: {reason}; clear the cache with `kiln cache clear`"
    )]
    Description {
        /// Name of the step.
        name: String,
        /// Why.
        reason: String,
    },
    /// An index is out of range. Nothing was overwritten: arguments are as they were, and outputs hold nothing.
    #[error(transparent)]
    Index(Box<IndexError>),
    /// Compiling the generated C, loading it or running it failed.
    #[error(transparent)]
    Cpu(#[from] CpuError),
}
