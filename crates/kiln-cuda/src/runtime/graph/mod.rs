//! A whole step as one CUDA graph.
//!
//! [`GraphBuilder`] collects kernels, copies, fills and library calls, each with the nodes that it comes
//! after; two nodes without a path of edges between them may run in any order, in at most eight branches
//! (`order.rs`). Kernels are nodes of their own. A library launches kernels that Kiln does not know: its
//! calls are captured into the same graph at their place. [`GraphBuilder::instantiate`] makes a
//! [`StepGraph`], which one call launches however many nodes it has. Memory stays where it is, and changing
//! numbers go through [`super::Parcel`]; only memory that kernels alone read can be elsewhere at each launch
//! (`moving.rs`).

mod builder;
mod moving;
mod order;
mod step;

pub use builder::{GraphBuilder, Node};
pub use step::StepGraph;
