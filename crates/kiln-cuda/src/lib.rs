//! The CUDA runtime of Kiln: what runs a compiled step on an NVIDIA GPU.
//!
//! - [`libraries`] finds and opens NVIDIA's libraries at run time. [`sys`] declares the functions.
//! - [`runtime`] is a device with its memory, streams, kernels and graphs.
//! - [`build`] makes machine code from CUDA C++ and keeps it on disk.
//! - [`products`] multiplies matrices through cuBLASLt.
//! - [`kernels`] is CUDA C++ that does not follow from a nest of loops.
//!
//! The crate knows nothing of graphs of operations, tensors or Burn.

pub mod build;
pub mod error;
pub mod kernels;
pub mod libraries;
pub mod products;
pub mod runtime;
pub mod sys;
#[cfg(feature = "testing")]
pub mod testing;

pub use error::{CudaError, Result};
pub use libraries::{Report, Search};
