//! NVIDIA GPUs as a target: CUDA C++ for the kernels of a step, what builds it, and what runs it.
//!
//! ```text
//!            kiln-compiler decides                          CudaTarget writes       Compiler builds           CudaExecutable runs
//! Graph ─► transform ► partition ► schedule ► plan ─► kernels ► emit ─► StepCode ─► NVRTC ─► cubin ─► Module ► GraphBuilder ► StepGraph
//! ```
//!
//! - [`target`]: [`CudaTarget`], which answers the compiler's questions about this machine. [`policy`]: its
//!   thresholds.
//! - [`emit`]: writes CUDA C++ for the nests and operations of a planned step. [`code`]: the result, as
//!   plain data.
//! - [`execute`]: runs a step on a device. [`debug`]: the GPU's part of a debug dump.
//! - [`family`]: steps of several shapes that share their kernels.
//! - [`libraries`] finds and opens NVIDIA's libraries at run time. [`sys`] declares the functions.
//! - [`runtime`] is a device with its memory, streams, kernels and graphs.
//! - [`build`] makes machine code from CUDA C++ and keeps it on disk.
//! - [`products`] multiplies matrices through cuBLASLt, [`convolutions`] has cuDNN.
//! - [`pictures`] has nvJPEG: batches of pictures that are decoded, cropped and scaled on the device.
//! - [`ranks`] has NCCL: collectives between the devices of several processes.
//! - [`kernels`] is CUDA C++ that is written by hand, not generated from a nest of loops.
//!
//! The crate knows nothing of Burn.

pub mod build;
pub mod code;
pub mod convolutions;
pub mod debug;
pub mod emit;
pub mod error;
pub mod execute;
pub mod family;
pub mod kernels;
pub mod libraries;
pub mod pictures;
pub mod policy;
pub mod products;
pub mod ranks;
pub mod runtime;
pub mod sys;
pub mod target;
#[cfg(feature = "testing")]
pub mod testing;

pub use error::{CudaError, Result};
pub use libraries::{Report, Search};
pub use target::{CudaStep, CudaTarget};
