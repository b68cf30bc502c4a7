//! Running compiled steps: loading, calling, threads and memory.
//!
//! Everything here but [`executable`] knows pointers and sizes only. Global state is in two files: the
//! counters of [`buffer`] and the arenas that all steps of the process share ([`arenas`]).

pub mod abi;
pub(crate) mod arenas;
pub mod buffer;
pub mod executable;
pub mod functions;
pub mod library;
pub mod observe;
pub mod thread_pool;
