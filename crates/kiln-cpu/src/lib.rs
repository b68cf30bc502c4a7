//! The CPU as a target: C for the kernels of a step, the compiler that builds it, and the runtime that runs
//! it.
//!
//! ```text
//!            kiln-compiler decides                          CpuTarget writes            Toolchain builds        CpuExecutable runs
//! Graph ─► transform ► partition ► schedule ► plan ─► kernels ► emit ─► SourceFile ─► cc ─► .so ─► Cache ─► Library ► ThreadPool
//! ```
//!
//! The rooms are those that another target has too:
//!
//! - [`target`]: [`CpuTarget`], which answers the compiler's questions about this machine. [`policy`]: its
//!   thresholds.
//!   [`machine`]: what it can do in a second.
//! - [`kernels`]: templates for operations that a loop nest cannot express well: products, convolutions,
//!   attention, pooling.
//! - [`emit`]: C text from the nests and templates of a planned step.
//! - [`build`]: the C compiler, its objects, and the trial that it must pass.
//! - [`family`]: steps of several shapes that share their functions.
//! - [`runtime`]: loading, calling, threads, buffers, arenas: pointers and sizes.
//!
//! The crate knows nothing of Burn.

pub mod build;
mod cache;
pub mod debug;
pub mod emit;
mod error;
pub mod export;
pub mod family;
mod isa;
pub mod kernels;
pub mod machine;
pub mod policy;
pub mod runtime;
pub mod target;
mod tiles;

pub use build::objects::Objects;
pub use build::toolchain::Toolchain;
pub use build::trial::{Distrust, try_compiler};
pub use build::{BuildOptions, Built, OptLevel, SourceFile};
pub use cache::{Cache, CachedStep, Origin, StepSource, step_key};
pub use error::{CpuError, Result, StepError};
pub use family::{Family, FamilyStats, Outcome};
pub use isa::Isa;
pub use machine::rates;
pub use runtime::abi::{self, Signature};
pub use runtime::buffer::{ALIGNMENT, AlignedBuffer, HUGE, current_bytes, peak_bytes, reset_peak};
pub use runtime::executable::CpuExecutable;
pub use runtime::library::{KernelEvent, Library, NoHooks, Step, StepArguments, StepHooks};
pub use runtime::observe::{Observer, StepMemory};
pub use runtime::thread_pool::ThreadPool;
pub use target::{CpuStep, CpuTarget};
