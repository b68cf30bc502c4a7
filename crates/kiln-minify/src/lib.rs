//! The minifier: from a graph that a backend gets wrong to the smallest graph that still shows the fault.
//!
//! ```text
//! Case ──► observe: backend and interpreter ──► Fault          in a child process (ChildProbe), which may crash
//!  │                                              │
//!  └──► minify: a smaller Case ──► still this Fault? ──yes──► go on from there
//!                    ▲                             └──no────► try another
//!                    └── fewer outputs, values cut off, nodes bypassed, dimensions halved
//! ```
//!
//! A [`Case`] is a graph with a rule for its arguments, so that a few lines of text repeat it: every element
//! follows from a seed and from the interval of its argument. A value that is cut off becomes an argument
//! whose interval is the one that the value had, so that logarithms keep positive operands and indices stay
//! in range.
//!
//! A [`Fault`] of a backend is one of these: results that differ from the interpreter's beyond rounding, a
//! graph that it does not compile, a run that fails, a process that crashes or does not end. A smaller case
//! counts only if it shows the *same* fault ([`Fault::is_like`]): another error message is another fault.
//!
//! The crate knows graphs and their meaning. Its caller knows the backend ([`Subject`]).

mod case;
mod child;
mod cut;
mod fault;
mod outputs;
mod resize;
mod shrink;

pub use case::{Case, CaseError, Fill, Interval};
pub use child::{ChildProbe, print_verdict};
pub use fault::{Failure, Fault, Subject, observe};
pub use shrink::{Limits, Minified, minify, provoke};
