//! Errors, in terms of the graph: which argument, which node, which operation.

use kiln_graph::{IndexError, Node, TensorType, Value};

/// Why an executable could not be made or a run did not finish.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CandleError {
    /// The number of tensor arguments is not the graph's.
    #[error("the graph takes {expected} tensor arguments, got {given}")]
    ArgumentCount {
        /// Parameters of the graph.
        expected: usize,
        /// Tensors handed in.
        given: usize,
    },
    /// A tensor argument has another element type or shape than the graph's parameter.
    #[error("tensor argument {index} is {given}, the graph's parameter is {expected}")]
    ArgumentType {
        /// Position among the tensor arguments.
        index: usize,
        /// Type of the parameter.
        expected: TensorType,
        /// Type of the tensor handed in.
        given: TensorType,
    },
    /// The number of runtime scalars is not the graph's.
    #[error("the graph takes {expected} runtime scalars, got {given}")]
    ScalarCount {
        /// Runtime scalars of the graph.
        expected: usize,
        /// Scalars handed in.
        given: usize,
    },
    /// A tensor has more elements than the executor's integer sums and 32-bit indices allow.
    #[error("{value} is {ty}: this executor takes tensors of fewer than 2^31 elements")]
    TooLarge {
        /// The value.
        value: Value,
        /// Its type.
        ty: TensorType,
    },
    /// An index is out of range: an error of the program.
    #[error(transparent)]
    Index(Box<IndexError>),
    /// A node could not be computed.
    #[error("{node}, `{op}`{origin}: {failure}")]
    Node {
        /// The node.
        node: Node,
        /// Mnemonic of its operation.
        op: String,
        /// Where it comes from, as ` (operation at file:line)`; empty if unknown.
        origin: String,
        /// What happened.
        #[source]
        failure: Box<Failure>,
    },
}

/// What happened at a node.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Failure {
    /// An index points outside of the dimension it indexes: an error of the program.
    #[error("index {index} is out of range for dimension {axis} of extent {extent}")]
    IndexOutOfRange {
        /// The first such index (a u64 of 2^63 or more shows as the i64 of the same bits).
        index: i64,
        /// The dimension indexed.
        axis: usize,
        /// Its extent.
        extent: usize,
    },
    /// The graph holds an operation kept whole and the call gave no handler for it.
    #[error("`{name}` is kept whole and needs a handler: call `run_with`")]
    NoHandler {
        /// Name of the operation.
        name: String,
    },
    /// The handler of operations kept whole reported an error.
    #[error("the handler of `{name}` failed: {reason}")]
    Handler {
        /// Name of the operation.
        name: String,
        /// The handler's message.
        reason: String,
    },
    /// The handler of operations kept whole returned other tensors than the operation declares.
    #[error("the handler of `{name}` returned {given:?}, declared are {expected:?}")]
    HandlerResult {
        /// Name of the operation.
        name: String,
        /// Declared types.
        expected: Vec<TensorType>,
        /// Types of the tensors returned.
        given: Vec<TensorType>,
    },
    /// candle refused.
    #[error("candle: {0}")]
    Candle(#[from] candle_core::Error),
}

/// Result of computing a node.
pub(crate) type Computed<T> = Result<T, Failure>;
