//! Where the time of a program goes: events while a [`Profile`] is open, and the compile times of the
//! process.
//!
//! ```text
//! span(..), instant(..)      any crate ──►  collect  ──► Trace ──► chrome   a file for Perfetto
//! StepRun, KernelTime        executors ──►                    └──► summary  tables by kernel and by operation
//! ```
//!
//! While no profile is open a span is one load of an atomic flag, and nothing else happens. While one is
//! open, a kernel costs two readings of the clock and one entry of a list: names, arguments, phases and
//! arrows are added when the trace is written.
//!
//! ```
//! use kiln_profile::{Category, span};
//!
//! let profile = kiln_profile::Profile::start();
//! {
//!     let _span = span(Category::Data, "data loading");
//! }
//! assert_eq!(profile.trace().events.len(), 1);
//! ```
//!
//! The crate knows names, times and threads; nothing of graphs, tensors or Burn.

mod chrome;
mod collect;
pub mod compile;
mod event;
mod summary;

pub use chrome::PROCESS;
pub use collect::{
    Profile, Span, add_run, event, instant, is_active, now, row, set_rank, span, span_with, worker_row,
};
pub use compile::{CompileTimes, Stage, StepCompile, compile_times};
pub use event::{
    Arguments, Category, Event, EventKind, KernelDescription, KernelTime, OperationShare, StepDescription,
    StepRun, Trace,
};
pub use summary::{HostRow, KernelRow, OperationRow, Summary};
