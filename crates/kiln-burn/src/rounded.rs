//! A parameter with the copy of 16 bits that its owner keeps beside it.
//!
//! Under autocast the products of a step read a parameter of f32 in 16 bits. Cast in the step, each parameter
//! is read and written once more at each call. An owner who has the same parameter rounded already, because
//! the update before has written it so, says that with an operation of the recording:
//!
//! ```text
//!   parameter, f32 ──┐
//!                    ├─ kiln.with_copy ─► the parameter, f32
//!   copy, 16 bits ───┘
//! ```
//!
//! The result is the first operand; the second is a promise. Nothing is computed: import gives the result the
//! value of the parameter and notes in the graph which argument is a copy of which
//! ([`kiln_graph::Graph::note_copy`]). Autocast reads the copy where it would cast. Whoever runs operations one
//! by one takes the parameter.

use burn_backend::{DType, TensorMetadata};
use burn_ir::OperationIr;
use burn_router::RouterTensor;

use crate::client::KilnClient;

/// The name of the operation.
pub(crate) const WITH_COPY: &str = "kiln.with_copy";

/// `parameter`, of whose elements `copy` has each rounded to 16 bits.
///
/// # Panics
///
/// If the two differ in shape, `parameter` is not of f32, or `copy` not of 16 bits.
pub fn with_copy(
    parameter: RouterTensor<KilnClient>,
    copy: RouterTensor<KilnClient>,
) -> RouterTensor<KilnClient> {
    let (shape, dtype) = (parameter.shape(), parameter.dtype());
    assert!(
        dtype == DType::F32 && matches!(copy.dtype(), DType::F16 | DType::BF16) && copy.shape() == shape,
        "a copy of 16 bits of {dtype:?} {shape:?} cannot be {:?} {:?}",
        copy.dtype(),
        copy.shape()
    );
    let client = parameter.client;
    let mut results = client.custom(WITH_COPY, vec![parameter, copy], &[(shape, dtype)]);
    results.remove(0)
}

/// Whether `operation` is the one of [`with_copy`].
pub(crate) fn is_with_copy(operation: &OperationIr) -> bool {
    matches!(operation, OperationIr::Custom(op) if op.id == WITH_COPY)
}
