//! The step compiler: from a graph to a training step on some machine.
//!
//! ```text
//! Graph ─► checks ─► transform ─► partition ─► schedule ─► kernels ─► plan ─► emit ─► code
//!                                                          Target             Target
//! ```
//!
//! - [`checks`] makes the step check indices before it overwrites anything.
//! - [`transform`] rewrites the graph: simplification, common subexpressions, patterns.
//! - [`partition`] decides what the backward pass keeps and what it computes again, under a memory budget if
//!   there is one.
//! - [`schedule`] decides which operations share a kernel and in which order kernels run.
//! - [`plan`] gives every buffer its memory.
//! - A [`Target`] answers what depends on the machine: where thresholds lie ([`Policy`]), how each kernel is
//!   computed and how much working memory that takes, and what the code is.
//!
//! Each stage takes plain data and returns plain data with a text form; [`compile()`] is the list of them,
//! and no stage calls back into the list. The crate knows no language, vector width, cache size or thread,
//! and nothing of Burn.

pub mod buckets;
pub mod checks;
pub mod compile;
pub mod contract;
pub mod debug;
pub mod decision;
mod error;
pub mod identity;
pub mod index;
pub mod late;
mod lines;
mod log;
mod options;
pub mod overlap;
pub mod partition;
pub mod plan;
pub mod planner;
pub mod policy;
pub mod products;
pub mod report;
pub mod schedule;
pub mod split;
pub mod stages;
pub mod target;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
pub mod transform;
pub mod weights;

pub use checks::{Check, IndexUse};
pub use compile::{CompiledStep, compile};
pub use contract::{CollectiveCall, Contract, ExternCall};
pub use decision::Decision;
pub use error::CompileError;
pub use lines::numbered;
pub use log::step as log_step;
pub use options::{Keep, Options};
pub use partition::memory_curve;
pub use plan::Plan;
pub use policy::Policy;
pub use report::{BufferPlace, BufferReport, FusedNode, KernelReport};
pub use split::split;
pub use target::{Emitted, Step, Target};
pub use transform::autocast::AutocastReport;
