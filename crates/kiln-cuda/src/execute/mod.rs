//! Running compiled steps on a device.
//!
//! ```text
//! StepCode ──NVRTC──► kernels ─┐
//!        └──cuBLASLt─► choices ─┴─► CudaExecutable ──first call───► bound calls, queued one by one
//!                                        └──────── further calls ─► one graph over fixed addresses
//! ```
//!
//! - [`gpu`]: a device with everything that steps share: streams, compiler, products, arena, staging memory.
//! - `prepare`: what a step needs before it can be called, from the caches or made.
//! - [`executable`]: a step that can be called.
//! - `bound`: its calls at given addresses, queued on a stream or added to a graph.
//! - `replayed`: the graph, and which addresses it relies on.
//! - [`settled`]: calls whose arguments stay where they are.

mod bound;
mod either;
mod error;
pub mod executable;
pub mod gpu;
pub(crate) mod guards;
mod limits;
pub(crate) mod prepare;
mod replayed;
pub mod settled;

pub use error::StepError;
pub use executable::{CallTime, CudaExecutable, NothingOutside, Outside};
pub use gpu::Gpu;
pub use limits::Limits;
pub use replayed::{Given, SMALL_INPUT};
pub use settled::Settled;
