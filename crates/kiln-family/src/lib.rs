//! Steps of several shapes that share their functions, on any target.
//!
//! Extents, strides and offsets are literals of generated code. For a batch of another length the whole
//! pipeline runs again, for exactly that graph and up to the text of its functions, but the compiler behind
//! it (a C compiler, NVRTC) does not: a text that equals a known one but for numbers is that function with
//! other numbers, which every call brings along. So a step of a family *is* the step that its graph alone
//! would be compiled to; there is nothing to guard, and nothing that another shape decided.
//!
//! ```text
//! Graph ─► passes ─► calls, functions ──all known──► a list of calls with their numbers
//!                         │ some are not
//!                         ▼
//!          samples: the graphs seen, and graphs of other sizes on the line through two of them
//!                         │ templates: what differs between the shapes is a variable
//!                         ▼
//!                the compiler, once for all that is not known
//! ```
//!
//! - [`text`]: tokens and numbers of generated text. [`mod@unit`]: functions apart from their numbers.
//!   [`template`]: which numbers vary. [`samples`]: graphs of other sizes. [`family`]: what a family knows
//!   and how it learns.
//! - What a function is, where a variable can stand in it, how it is built and called is a [`Maker`]'s to
//!   say: each target is one.
//! - Order of kernels, partition, plan of memory and choices of templates are those of each shape. They
//!   are data: a shape that decides otherwise calls other functions, which most often are there.
//! - Graphs of the samples are guesses, and only show which numbers vary. Nothing of theirs is ever run.
//! - A function in which the compiler rejects variables is compiled for each shape, and no other is.
//! - Knows no language beyond its numbers, and no machine.

pub mod family;
pub mod samples;
mod state;
pub mod template;
pub mod text;
pub mod unit;

pub use family::{Batch, Bound, Failure, Family, FamilyStats, Maker, Outcome, Stored, Times};
pub use samples::Varying;
pub use state::{LISTED, Learned, State};
pub use template::{Pattern, Template};
pub use unit::{Reading, Skeleton, Slot, Unit};
