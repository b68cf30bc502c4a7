//! Import: from recorded operations to a [`Graph`].
//!
//! [`import`] goes over the operations once, in order. Each is lowered to primitives whose values take the
//! places of its results: a table maps tensor ids to values. A tensor that no operation of the recording
//! defined is an argument of the graph, numbered by first use. [`kiln_graph::op`] defines the meaning of
//! each primitive. burn-flex defines the meaning of each operation, and the primitives must give its
//! results. Where the two differ in corners (the remainder of infinities, NaN in max pooling, shifts beyond
//! the width) the primitive's meaning holds.
//!
//! Scalars become constants or runtime scalars as [`crate::stream::scalars_are_static`] says; runtime scalars
//! are numbered in the order of the graph, and [`Imported::scalars`] says where each comes from. A random
//! operation is a draw from its own stream, whose seed and number are runtime scalars too, followed by the
//! arithmetic that [`crate::eager`] documents.
//!
//! A function that is one operation ([`crate::inlined`]) is replaced by its graph.
//!
//! An operation without lowering stays whole as [`Op::Extern`](kiln_graph::Op::Extern) (see [`external`]).
//! Operations that nothing else uses are lowered like all others; removing them is a transform's work.

mod base;
mod conv;
pub mod external;
mod float;
mod inline;
mod interpolate;
mod lower;
mod module;
mod numeric;
mod pool;

use burn_ir::{CustomOpIr, OperationIr, TensorId, TensorIr};
use kiln_graph::{Graph, TensorType, TypeError};

use crate::host_data::IOTA;
use crate::record::Source;
use crate::{inlined, rounded};
use lower::{Fault, Lower};

/// Recorded operations as a graph.
#[derive(Clone, Debug)]
pub struct Imported {
    /// The graph; its outputs are in the order asked for, without aliases.
    pub graph: Graph,
    /// The tensor each parameter of the graph stands for, in order of first use.
    pub inputs: Vec<TensorIr>,
    /// Where each runtime scalar of the graph comes from.
    pub scalars: Vec<ScalarSource>,
}

/// Where a runtime scalar comes from.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum ScalarSource {
    /// A scalar of a recorded operation.
    Operation {
        /// Position of the operation.
        op: usize,
        /// Which of its scalars, in the order of [`crate::stream::walk`].
        nth: usize,
    },
    /// The generator's seed for a random operation.
    RandomSeed {
        /// Which random operation of the recording.
        nth: usize,
    },
    /// The stream of a random operation.
    RandomStream {
        /// Which random operation of the recording.
        nth: usize,
    },
}

/// Why operations could not be imported.
#[derive(Clone, Debug, thiserror::Error)]
pub enum ImportError {
    /// An operation that no part of the backend can run.
    #[error("{operation} (operation {position} of the step) cannot be compiled: {reason}")]
    Unsupported {
        /// The operation, such as `Float.Quantize`.
        operation: String,
        /// Its position in the recording.
        position: usize,
        /// The obstacle, and what to do instead.
        reason: String,
    },
    /// Operands that do not fit the operation.
    #[error("{operation} (operation {position} of the step) is ill-typed: {source}")]
    Type {
        /// The operation.
        operation: String,
        /// Its position in the recording.
        position: usize,
        /// The rule that is broken.
        source: Box<TypeError>,
    },
    /// The primitives give another type than the recording announces. A fault of the import.
    #[error(
        "{operation} (operation {position} of the step) gives {found} where Burn announces {announced}; \
         please report this, and run the region on the backend `eager` meanwhile"
    )]
    Announced {
        /// The operation.
        operation: String,
        /// Its position in the recording.
        position: usize,
        /// Type of the lowered result.
        found: Box<TensorType>,
        /// Type of the recorded result.
        announced: Box<TensorType>,
    },
    /// An output that no operation of the recording defines or reads.
    #[error("tensor {tensor} is asked for as an output but is not part of the recording")]
    UnknownOutput {
        /// Its id.
        tensor: u64,
    },
}

/// Imports `operations`; the graph's outputs are the tensors `outputs`, in this order.
///
/// # Errors
///
/// If an operation cannot be compiled or is ill-typed, or if an output is unknown.
pub fn import(operations: &[OperationIr], outputs: &[TensorId]) -> Result<Imported, ImportError> {
    import_located(operations, outputs, |_| Source::default())
}

/// [`import`], with where each operation comes from, as far as that is known.
///
/// # Errors
///
/// As [`import`].
pub fn import_located(
    operations: &[OperationIr],
    outputs: &[TensorId],
    source: impl Fn(usize) -> Source,
) -> Result<Imported, ImportError> {
    let _span = tracing::debug_span!("import", operations = operations.len()).entered();
    let mut lower = Lower::new();
    for (position, operation) in operations.iter().enumerate() {
        lower.begin(operation, position, source(position));
        lower_operation(&mut lower, operation).map_err(|fault| fault.of(operation, position))?;
    }
    for &id in outputs {
        let value = lower
            .value(id)
            .ok_or(ImportError::UnknownOutput { tensor: id.value() })?;
        lower.graph.output(value, None);
    }
    Ok(lower.finish())
}

fn lower_operation(lower: &mut Lower, operation: &OperationIr) -> Result<(), Fault> {
    match operation {
        OperationIr::BaseFloat(op) | OperationIr::BaseInt(op) | OperationIr::BaseBool(op) => {
            base::lower(lower, op)
        }
        OperationIr::NumericFloat(_, op) | OperationIr::NumericInt(_, op) => numeric::lower(lower, op),
        OperationIr::Float(_, op) => float::lower_float(lower, operation, op),
        OperationIr::Int(op) => float::lower_int(lower, op),
        OperationIr::Bool(op) => float::lower_bool(lower, op),
        OperationIr::Module(op) => module::lower(lower, operation, op),
        // A tensor that exists already, or is not needed any more: nothing is computed.
        OperationIr::Init(_) | OperationIr::Drop(_) => Ok(()),
        OperationIr::Custom(CustomOpIr { id, outputs, .. }) if id == IOTA => {
            outputs.iter().try_for_each(|out| {
                let ty = lower::tensor_type(out)?;
                let value = lower.iota(ty.dtype, &ty.shape, 0)?;
                lower.define(out, value)
            })
        }
        OperationIr::Custom(op) if rounded::is_with_copy(operation) => {
            let [parameter, copy] = [lower.input(&op.inputs[0])?, lower.input(&op.inputs[1])?];
            // Of what the recording itself makes there is no promise to be noted: it is cast as ever.
            lower.graph.note_copy(copy, parameter);
            lower.define(&op.outputs[0], parameter)
        }
        OperationIr::Custom(_) if crate::custom::id(operation).is_some() => external::keep(lower, operation),
        OperationIr::Custom(op) if let Some(function) = inlined::find(operation) => {
            inline::inline(lower, op, &function)
        }
        OperationIr::Custom(_) => Err(Fault::Unsupported(
            "custom operations have no implementation on this backend; express it with tensor operations"
                .into(),
        )),
        #[allow(unreachable_patterns)] // Present only if some crate enables burn-ir's `distributed` feature.
        _ => Err(Fault::Unsupported(
            "collectives are not available on a single device; reduce the gradients on the host".into(),
        )),
    }
}
