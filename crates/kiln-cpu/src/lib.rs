//! The CPU runtime of Kiln: C compiler, disk cache, loading and the thread pool.
//!
//! The step compiler hands over C source; this crate turns it into something that runs, and runs it.
//!
//! ```text
//! SourceFile ──► Toolchain::build ──► .so ──► Library::load ──► Step::run
//!                      ▲                │          ▲               │
//!                      └── Cache::get_or_build ────┘           ThreadPool
//! ```
//!
//! - [`Toolchain`] finds `cc` and says which vector instructions ([`Isa`]) the kernels may use.
//! - [`Cache`] keeps shared objects on disk, so that a second process starts without compiling.
//! - [`Library`] and [`Step`] load a shared object and call it; [`abi`] is the contract, in C and in Rust.
//! - [`ThreadPool`] runs the parallel loops inside a step; [`AlignedBuffer`] is the memory that it works in.
//!
//! The crate knows nothing of graphs, tensors or Burn: pointers and sizes are all it sees.

pub mod abi;
mod buffer;
mod build;
mod cache;
mod error;
mod isa;
mod library;
mod objects;
mod pool;
mod toolchain;

pub use abi::Signature;
pub use buffer::{ALIGNMENT, AlignedBuffer, HUGE, current_bytes, peak_bytes, reset_peak};
pub use build::{BuildOptions, Built, OptLevel, SourceFile};
pub use cache::{Cache, CacheEntry, CacheKey, CachedStep, KeyBuilder, Origin, StepSource};
pub use error::{CpuError, Result};
pub use isa::Isa;
pub use library::{KernelEvent, Library, NoHooks, Step, StepArguments, StepHooks};
pub use objects::Objects;
pub use pool::ThreadPool;
pub use toolchain::Toolchain;
