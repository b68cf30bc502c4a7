//! Eager execution: one recorded operation, run at once on burn-flex.
//!
//! `burn-router` describes every backend call as an [`OperationIr`] whose operands are ids. [`run`] looks the
//! operands up in a [`TensorStore`], calls the operation of the same name on [`Flex`], and stores the
//! results. All three tensor kinds are `FlexTensor` there, so operations that only move elements share one
//! table of functions per kind.
//!
//! Two rules keep this safe and fast:
//!
//! - An operand whose status is `ReadWrite` is used for the last time and leaves the store, so that
//!   burn-flex owns its buffer and may work in place. If the same tensor is also another operand of the
//!   operation, it leaves when the operation has run.
//! - Results have the element type the stream announces, even where burn-flex prefers another (it indexes
//!   with 64 bits).
//!
//! Random operations do not use burn-flex's generator. Each is a draw from its own Philox stream
//! ([`kiln_graph::philox`]) followed by the arithmetic below. The import emits exactly these steps as
//! primitives, so eager and compiled results agree bit for bit; each step rounds once to the type named.
//!
//! | distribution | float tensor of type `d` | integer tensor |
//! | --- | --- | --- |
//! | `Default` | `uniform(d)` | all values of the type equally likely (the top one of 64-bit types never) |
//! | `Uniform(low, high)` | `uniform(d) * (high - low) + low` in `d` | `int_range(low, high)`, bounds truncated |
//! | `Normal(mean, deviation)` | `normal(d) * deviation + mean` in `d` | the same in f64, then truncated |
//! | `Bernoulli(p)` | `uniform < p ? 1 : 0`, drawn and compared in f32 (f64 for f64) | the same in f32 |
//!
//! A panic inside burn-flex (for example of shapes that do not fit) passes through: it is the user's panic.
//! The store then lacks only operands that no other operation could have used.

mod base;
pub(crate) mod cast;
mod float;
pub(crate) mod indices;
mod int;
mod module;
mod numeric;
pub(crate) mod random;
pub(crate) mod top_k;

use burn_backend::ops::IntTensorOps;
use burn_backend::{DType, FloatDType, IntDType};
use burn_flex::{Flex, FlexTensor};
use burn_ir::{OperationIr, TensorId, TensorIr, TensorStatus};
use kiln_graph::IndexError;
use smallvec::SmallVec;

use cast::float_cast;

use crate::{custom, rounded, stream};

/// The store of an operation's operands and results.
pub trait TensorStore {
    /// The tensor `ir` names. If its status is `ReadWrite` nobody uses it again, and it leaves the store.
    ///
    /// Fails if the store has no such tensor, or the tensor has no value.
    fn take(&mut self, ir: &TensorIr) -> Result<FlexTensor, OperationError>;

    /// Stores a result under the id of `ir`.
    fn put(&mut self, ir: &TensorIr, tensor: FlexTensor);
}

/// Why an operation did not run.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum OperationError {
    /// No part of the backend can run it.
    #[error("{operation} cannot run on Kiln: {reason}")]
    Unsupported {
        /// The operation, such as `Float.Quantize`.
        operation: String,
        /// The obstacle, and what to do instead.
        reason: String,
    },
    /// The function of an operation of the program's own gave something else than it must.
    #[error("the function of the operation `{operation}` {reason}")]
    Own {
        /// The operation, such as `custom cube, gradient`.
        operation: String,
        /// What it did.
        reason: String,
    },
    /// An index is out of range.
    #[error(transparent)]
    Index(Box<IndexError>),
    /// An operand is not in the store.
    #[error("tensor {tensor} has no value: it was dropped, or made by a step that did not finish")]
    Missing {
        /// Its id.
        tensor: u64,
    },
    /// An operand is known but has no value.
    #[error("tensor {tensor} has no value: {reason}")]
    Unavailable {
        /// Its id.
        tensor: u64,
        /// What happened.
        reason: String,
    },
}

impl OperationError {
    /// The error for an operand the store does not know.
    pub fn missing(tensor: TensorId) -> Self {
        OperationError::Missing {
            tensor: tensor.value(),
        }
    }

    fn unsupported(operation: &OperationIr, reason: &str) -> Self {
        OperationError::Unsupported {
            operation: stream::name(operation),
            reason: reason.to_owned(),
        }
    }
}

/// Takes the position of the next random operation: the seed of the device's generator and a stream of its
/// own.
pub type NextStream<'a> = dyn FnMut() -> (u64, u64) + 'a;

/// Runs `operation` on burn-flex, operands and results in `tensors`; `random` is called once for each random
/// operation.
///
/// `Drop` takes its tensor out of the store; `Init` does nothing.
///
/// # Errors
///
/// If an operand has no value, an index is out of range, or nothing behind the backend can run the operation.
///
/// # Panics
///
/// As the operation does on burn-flex (shapes that do not fit).
pub fn run(
    operation: &OperationIr,
    tensors: &mut impl TensorStore,
    random: &mut NextStream<'_>,
) -> Result<(), OperationError> {
    let mut operands = Operands::new(operation, tensors);
    match operation {
        OperationIr::BaseFloat(op) => base::run(&base::FLOAT, op, &mut operands)?,
        OperationIr::BaseInt(op) => base::run(&base::INT, op, &mut operands)?,
        OperationIr::BaseBool(op) => base::run(&base::BOOL, op, &mut operands)?,
        OperationIr::NumericFloat(_, op) => numeric::run(&numeric::FLOAT, op, &mut operands, random)?,
        OperationIr::NumericInt(_, op) => numeric::run(&numeric::INT, op, &mut operands, random)?,
        OperationIr::Bool(op) => float::run_bool(op, &mut operands)?,
        OperationIr::Int(op) => int::run_int(op, &mut operands)?,
        OperationIr::Float(_, op) => float::run_float(operation, op, &mut operands, random)?,
        OperationIr::Module(op) => module::run(op, &mut operands)?,
        OperationIr::Init(_) => {}
        OperationIr::Drop(tensor) => match operands.store.take(tensor) {
            Ok(_) | Err(OperationError::Missing { .. }) => {}
            Err(error) => return Err(error),
        },
        OperationIr::Custom(op) if custom::id(operation).is_some() => {
            let inputs = op.inputs.iter().map(|ir| operands.take(ir));
            let inputs = inputs.collect::<Result<Vec<_>, _>>()?;
            for (ir, result) in op.outputs.iter().zip(custom::run(op, inputs)?) {
                operands.put(ir, result);
            }
        }
        OperationIr::Custom(op) if rounded::is_with_copy(operation) => {
            let inputs = op.inputs.iter().map(|ir| operands.take(ir));
            let parameter = inputs.collect::<Result<Vec<_>, _>>()?.swap_remove(0);
            operands.put(&op.outputs[0], parameter);
        }
        OperationIr::Custom(_) => {
            return Err(OperationError::unsupported(
                operation,
                "custom operations have no implementation on this backend; express it with tensor operations",
            ));
        }
        #[allow(unreachable_patterns)] // Present only if some crate enables burn-ir's `distributed` feature.
        _ => {
            return Err(OperationError::unsupported(
                operation,
                "collectives are not available on a single device; reduce the gradients on the host",
            ));
        }
    }
    operands.finish()
}

/// The operands of one operation; a tensor may be several of them.
struct Operands<'a, S> {
    store: &'a mut S,
    /// Whether some tensor is an operand twice.
    repeats: bool,
    /// Last uses that are deferred until the operation has run.
    deferred: SmallVec<[TensorIr; 2]>,
}

impl<'a, S: TensorStore> Operands<'a, S> {
    fn new(operation: &OperationIr, store: &'a mut S) -> Self {
        let mut seen: SmallVec<[TensorId; 6]> = SmallVec::new();
        let mut repeats = false;
        if !matches!(operation, OperationIr::Drop(_)) {
            for input in operation.inputs() {
                repeats |= seen.contains(&input.id);
                seen.push(input.id);
            }
        }
        Self {
            store,
            repeats,
            deferred: SmallVec::new(),
        }
    }

    fn take(&mut self, ir: &TensorIr) -> Result<FlexTensor, OperationError> {
        if !(self.repeats && ir.status == TensorStatus::ReadWrite) {
            return self.store.take(ir);
        }
        self.deferred.push(ir.clone());
        self.store.take(&TensorIr {
            status: TensorStatus::ReadOnly,
            ..ir.clone()
        })
    }

    fn take_optional(&mut self, ir: &Option<TensorIr>) -> Result<Option<FlexTensor>, OperationError> {
        ir.as_ref().map(|ir| self.take(ir)).transpose()
    }

    fn put(&mut self, ir: &TensorIr, tensor: FlexTensor) {
        let tensor = conform(tensor, ir.dtype);
        self.store.put(ir, tensor);
    }

    fn finish(self) -> Result<(), OperationError> {
        for ir in &self.deferred {
            self.store.take(ir)?;
        }
        Ok(())
    }
}

/// `tensor` in the element type the stream announces.
fn conform(tensor: FlexTensor, announced: DType) -> FlexTensor {
    let have = tensor.dtype();
    if have == announced {
        tensor
    } else if is_int(have) && is_int(announced) {
        Flex::int_cast(tensor, IntDType::from(announced))
    } else if have.is_float() && announced.is_float() {
        float_cast(tensor, float_dtype(announced))
    } else if announced.is_bool() && (have == DType::U8 || have.is_bool()) {
        // Selecting truth values gives their bytes: the same elements under another name.
        FlexTensor::from_arc(tensor.data_arc(), tensor.layout().clone(), announced)
    } else {
        tensor
    }
}

/// Whether `dtype` is an integer type, signed or not.
fn is_int(dtype: DType) -> bool {
    dtype.is_int() || dtype.is_uint()
}

/// The float type burn-flex computes `dtype` in: `Flex32`, whose precision is the backend's choice, is f32.
fn float_dtype(dtype: DType) -> FloatDType {
    match FloatDType::from(dtype) {
        FloatDType::Flex32 => FloatDType::F32,
        other => other,
    }
}
