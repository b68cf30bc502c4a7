//! Errors of the partitioner.

use kiln_graph::TypeError;

/// A partition that cannot be made.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum PartitionError {
    /// No plan needs as little memory as was asked for.
    #[error(
        "the memory budget of {budget} bytes is too small: the smallest budget that fits is {smallest} bytes; \
         raise `memory_budget` to it, or make the batch smaller"
    )]
    BudgetTooSmall {
        /// Name of the graph.
        graph: String,
        /// What was asked for, in bytes.
        budget: u64,
        /// The smallest budget that fits, in bytes.
        smallest: u64,
    },
    /// The roles do not fit the graph's outputs.
    #[error("{given} roles for a graph with {outputs} outputs; give one for each output, or none")]
    RoleCount {
        /// Number of roles.
        given: usize,
        /// Number of outputs.
        outputs: usize,
    },
    /// A tangent is no tensor argument of the graph.
    #[error("tangent {index} is no tensor argument of `{graph}`, which has {parameters}")]
    UnknownTangent {
        /// Name of the graph.
        graph: String,
        /// The argument index given.
        index: u32,
        /// Number of tensor arguments.
        parameters: usize,
    },
    /// A forward output is computed from a tangent.
    #[error(
        "output {output} of `{graph}` is a forward output, but depends on tangent argument {tangent}: it cannot be \
         computed before the backward pass; give it the role `Gradient`"
    )]
    ForwardNeedsTangent {
        /// Name of the graph.
        graph: String,
        /// Position of the output.
        output: usize,
        /// Argument index of a tangent that it depends on.
        tangent: u32,
    },
    /// The planner could not plan a graph.
    #[error("the memory planner failed on `{graph}`: {reason}")]
    Planner {
        /// Name of the graph.
        graph: String,
        /// What the planner says.
        reason: String,
    },
    /// A rebuilt node has no valid type, so the graph given was not valid.
    #[error("the graph is not valid: {0}")]
    Type(#[from] TypeError),
}
