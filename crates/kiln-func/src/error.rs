//! Errors of transforms, with the remedy.

use std::fmt;
use std::sync::Arc;

use kiln_graph::{Op, Provenance, TensorType, TypeError};

/// Why a graph has no derivative, or no batched form.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FuncError {
    /// There is no such tensor argument.
    #[error("there is no parameter {index}: graph `{graph}` has {count}")]
    NoParameter {
        /// Name of the graph.
        graph: String,
        /// The position asked for.
        index: usize,
        /// How many there are.
        count: usize,
    },
    /// There is no such output.
    #[error("there is no output {index}: graph `{graph}` has {count}")]
    NoOutput {
        /// Name of the graph.
        graph: String,
        /// The position asked for.
        index: usize,
        /// How many there are.
        count: usize,
    },
    /// A derivative with respect to integers or bools.
    #[error(
        "parameter {index} is {ty}, and only floats have derivatives: leave it out of what is differentiated, \
         or pass floats and cast them inside"
    )]
    DiscreteParameter {
        /// Its position.
        index: usize,
        /// Its type.
        ty: TensorType,
    },
    /// A derivative of integers or bools.
    #[error(
        "output {index} is {ty}, and only floats have derivatives: leave it out of what is differentiated"
    )]
    DiscreteOutput {
        /// Its position.
        index: usize,
        /// Its type.
        ty: TensorType,
    },
    /// A gradient of more than one number.
    #[error(
        "output {index} is {ty}, and a gradient is of one number: take its sum or mean, or ask for the jacobian"
    )]
    NotOneNumber {
        /// Its position.
        index: usize,
        /// Its type.
        ty: TensorType,
    },
    /// An operation without a derivative lies between the outputs and the parameters of the derivative.
    #[error("`{operation}`{origin} has no derivative: {remedy}")]
    NoDerivative {
        /// Mnemonic of the operation, or the name of one kept whole.
        operation: String,
        /// Where the program has it.
        origin: Origin,
        /// What to do.
        remedy: &'static str,
    },
    /// An operation that has no batched form reads a value that differs between elements.
    #[error("`{operation}`{origin} cannot be batched: {remedy}")]
    NoBatching {
        /// Mnemonic of the operation, or the name of one kept whole.
        operation: String,
        /// Where the program has it.
        origin: Origin,
        /// What to do.
        remedy: &'static str,
    },
    /// The number of batch dimensions given is wrong.
    #[error("{given} batch dimensions for {expected} {what}")]
    DimCount {
        /// `parameters` or `outputs`.
        what: &'static str,
        /// How many there are.
        expected: usize,
        /// How many dimensions were given.
        given: usize,
    },
    /// A batch dimension that the tensor cannot have.
    #[error("batch dimension {dim} of {what} {index} is out of range: an element is {ty}")]
    DimRange {
        /// `parameter` or `output`.
        what: &'static str,
        /// Its position.
        index: usize,
        /// The dimension asked for.
        dim: usize,
        /// The type of one element.
        ty: TensorType,
    },
    /// An output differs between elements although the caller gave it no batch dimension.
    #[error("output {index} differs between the elements of the batch: give it a batch dimension")]
    Differs {
        /// Its position.
        index: usize,
    },
    /// A batch of nothing.
    #[error("a batch has at least one element")]
    EmptyBatch,
    /// A node of a rule is ill-typed or larger than any memory.
    #[error(transparent)]
    Type(#[from] TypeError),
}

/// The recorded operation and the line of the program, as far as they are known.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Origin {
    /// The recorded operation.
    pub operation: Option<Arc<str>>,
    /// `file:line`.
    pub location: Option<Arc<str>>,
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (&self.operation, &self.location) {
            (Some(operation), Some(location)) => write!(f, " ({operation} at {location})"),
            (Some(only), None) | (None, Some(only)) => write!(f, " ({only})"),
            (None, None) => Ok(()),
        }
    }
}

impl Origin {
    pub(crate) fn new(provenance: &Provenance) -> Self {
        Self {
            // A node of a derivative knows the operation that it belongs to.
            operation: provenance
                .operation
                .clone()
                .or_else(|| provenance.gradient_of.clone()),
            location: provenance.location.clone(),
        }
    }
}

/// The name of an operation, for people.
pub(crate) fn name_of(op: &Op) -> String {
    match op {
        Op::Extern(op) => op.name.clone(),
        other => other.name().to_owned(),
    }
}

pub(crate) type Result<T> = std::result::Result<T, FuncError>;
