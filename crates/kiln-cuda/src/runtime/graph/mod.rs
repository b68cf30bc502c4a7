//! A whole step as one CUDA graph.
//!
//! [`GraphBuilder`] collects kernels, copies, fills and library calls, each with the nodes that it comes
//! after; nothing is ordered that no edge orders. Kernels are nodes of their own. A library launches kernels
//! that nobody else knows: its calls are captured into the same graph at their place.
//! [`GraphBuilder::instantiate`] makes a [`StepGraph`], which is launched with one call however many nodes it
//! has, and is never changed: memory stays where it is, and numbers that change go through
//! [`super::Parcel`].

mod builder;
mod step;

pub use builder::{GraphBuilder, Node};
pub use step::StepGraph;
