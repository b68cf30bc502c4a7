//! Kiln's graph: one training step as a small, typed program in SSA form.
//!
//! A [`Graph`] is a list of nodes in topological order. Each node applies one primitive ([`Op`]) to values
//! and defines one or more new values; a value has a [`TensorType`] (dtype and static shape) that follows
//! from the operation alone ([`infer`]). Inputs arrive through [`Op::Parameter`] (tensors) and [`Op::Scalar`]
//! (runtime scalars such as a learning rate); [`Graph::outputs`] lists what leaves, and which input each
//! output may take its buffer from.
//!
//! The crate also fixes what the primitives *mean*: the rustdoc of [`op`] states it in words, [`interpret()`]
//! is it in code (plain loops in f64), and [`philox`] is the meaning of random numbers. Every executor is
//! compared with these.
//!
//! What this crate does not know: Burn, files, threads, memory, machines.

pub mod alias;
pub mod collective;
pub mod dot;
pub mod dtype;
pub mod graph;
pub mod indices;
pub mod infer;
pub mod interpret;
pub mod line;
pub mod op;
pub mod philox;
pub mod provenance;
pub mod range;
pub mod resize;
pub mod rewrite;
pub mod rounding;
pub mod scalar;
pub mod shape;
pub mod tensor;
#[cfg(feature = "testing")]
pub mod testing;
pub mod text;
pub mod users;
pub mod verify;

pub use collective::{Collective, CollectiveKind};
pub use dtype::DType;
pub use graph::{Graph, Node, NodeData, Output, Value, ValueData};
pub use indices::{IndexCheck, IndexError};
pub use infer::TypeError;
pub use interpret::{InterpretError, Interpreter, interpret, interpret_f64, interpret_ranks};
pub use line::Line;
pub use op::Op;
pub use provenance::{Phase, Provenance};
pub use resize::{Dimension, Pinned, Resizer};
pub use rewrite::Rewriter;
pub use scalar::Scalar;
pub use shape::{Shape, TensorType};
pub use tensor::HostTensor;
pub use text::ParseError;
pub use users::{Fingerprint, Users};
pub use verify::{VerifyError, verify};
