//! Recording: the operations inside a region.
//!
//! - [`recording`]: the operations of one region between two breaks, in relative form.
//! - [`guard`]: comparing a recording with steps seen before, and saying how it differs.
//! - [`region`]: the compiled steps of a region, and choosing or compiling one.
//! - [`step`]: one compiled step, and running it.
//! - [`binding`]: where each input of a step comes from, and where each output goes.
//! - [`replay`]: running a step again without the program that recorded it.
//! - [`mod@export`]: a replayed step as files that run without Kiln.
//! - [`split`]: a forward pass compiled by itself, and its backward pass for later.
//! - [`marks`]: dimensions that the program marks as varying.
//! - [`deferred`]: recordings that a frozen region did not run, kept until one of their tensors is needed.
//! - [`salvage`]: running the operations of a function that failed, for the tensors that it leaves behind.
//! - [`transformed`]: a recording that is transformed and compiled by itself.
//! - [`inline`]: a recording that is transformed and becomes one operation of another recording.
//! - [`session`]: which thread records into which region; graph breaks; panics.
//! - [`exchange`]: looking at, and replacing, the tensors inside an object that only offers `to_device`.
//! - [`history`], [`report`], [`words`], [`stream_text`]: descriptions of what was compiled and why, for
//!   reports and debug dumps.
//! - [`sighting`], [`gradient`]: which line of the program an operation comes from, and whose gradient it
//!   belongs to.
//! - [`wish`]: tensors that other threads are about to read.
//! - [`breaks`], [`host_operations`], [`location`]: why and where a recording was cut.

pub mod binding;
pub mod breaks;
mod deferred;
pub mod exchange;
pub mod export;
mod functions;
pub mod gradient;
pub mod guard;
pub mod history;
pub mod host_operations;
pub mod inline;
pub mod location;
pub mod marks;
pub mod recording;
pub mod region;
pub mod replay;
pub mod report;
pub mod salvage;
pub mod session;
pub mod sighting;
pub mod split;
pub mod step;
pub mod stream_text;
pub mod transformed;
mod wish;
pub mod words;

pub use binding::{Bindings, Call, Place, ReplayError};
pub use breaks::{BreakReason, GraphBreak};
pub use export::{Number, Numbers, StepExportError, export, export_function};
pub use gradient::Source;
pub use guard::{Changed, Mismatch};
pub use history::CompileEvent;
pub use location::{Location, user_location};
pub use marks::{DynamicError, mark};
pub use recording::Recorded;
pub use region::{HostRead, LastRun};
pub use replay::{Disturbance, Replay};
pub use report::{Guards, Recompile, RegionReport, StepReport};
pub use session::{
    CompiledRegion, Interrupted, Position, Traced, are_ready, disable, hoist, is_disabled, is_nested,
    position, rehearse, surrender,
};
pub use split::{Differentiated, Saved, SplitRegion, SplitStep};
pub use step::Step;
pub use transformed::{Transformed, TransformedRegion};
pub use words::type_text;

pub use crate::table::Watch;
