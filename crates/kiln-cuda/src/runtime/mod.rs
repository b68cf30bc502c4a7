//! A device and everything that lives on it: memory, streams, kernels, graphs.
//!
//! ```text
//! Driver ──► Device ──► Stream ──► copies, launches, Event
//!              │  └───► Pool ────► Storage (device)     Pinned (host)
//!              └──────► Module ──► Kernel
//! Kernel, Storage ──► GraphBuilder ──► StepGraph::launch
//! ```
//!
//! Calls return when work is queued. What waits says so: [`Stream::synchronize`], [`Stream::read`] and
//! looking into [`Pinned`] memory that a copy still uses. Nothing is freed while the device uses it: a
//! [`Storage`] is freed in the order of the stream that used it last, [`Pinned`] memory after its last copy,
//! modules and storages of a graph with the graph.
//!
//! A kernel that fails takes its device along (`CudaError::Lost`): the driver lets nothing more be done with
//! it in this process, and every later call says so without asking the driver.

mod copy;
mod device;
mod event;
mod graph;
mod kernel;
mod memory;
mod parcel;
mod pinned;
mod storage;
mod stream;

pub use device::Device;
pub use event::Event;
pub use graph::{GraphBuilder, Node, StepGraph};
pub use kernel::{Arguments, Kernel, KernelUse, Launch, Module};
pub use parcel::Parcel;
pub use pinned::Pinned;
pub use storage::Storage;
pub use stream::Stream;
