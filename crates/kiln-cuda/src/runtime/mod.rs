//! A device and everything that lives on it: memory, streams, kernels, graphs.
//!
//! ```text
//! Driver ──► Device ──► Stream ──► copies, launches, Event
//!              │  └───► Pool ────► Storage (device)     Pinned (host)
//!              └──────► Module ──► Kernel
//! Kernel, Storage ──► GraphBuilder ──► StepGraph::launch
//! ```
//!
//! Calls return when their work is queued. Three kinds wait: [`Stream::synchronize`], [`Stream::read`] and
//! [`Stream::write`], and looking into [`Pinned`] memory that a copy still uses. Nothing is freed while the
//! device uses it: a [`Storage`] is freed in the order of the stream that used it last, [`Pinned`] memory
//! after its last copy, modules and storages of a graph with the graph.
//!
//! A kernel that fails makes its device unusable (`CudaError::Lost`): the driver refuses all further work
//! on it in this process, and every later call returns that error without asking the driver.

mod copy;
mod device;
mod event;
mod graph;
mod kernel;
mod memory;
mod parcel;
mod pinned;
mod staging;
mod storage;
mod stream;

pub use device::Device;
pub use event::Event;
pub use graph::{GraphBuilder, Node, StepGraph};
pub use kernel::{Arguments, Kernel, KernelUse, Launch, Module};
pub use parcel::Parcel;
pub use pinned::Pinned;
pub use staging::Staging;
pub use storage::Storage;
pub use stream::Stream;
