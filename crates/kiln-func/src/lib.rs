//! Functions of functions, on graphs: derivatives in both modes, and batching.
//!
//! Each transform takes a [`Graph`](kiln_graph::Graph) and gives another one, made of the same primitives, so
//! that transforms compose in any order: `vmap` of `grad` gives per-sample gradients, `jvp` of `grad` a
//! Hessian times a vector.
//!
//! | transform | made of |
//! |---|---|
//! | [`jvp()`] | a rule for each primitive ([`forward`]) |
//! | [`vjp`] | the linear part of that, transposed ([`transpose`]) |
//! | [`vmap`] | a rule for each primitive ([`batch`]) |
//! | [`grad`], [`value_and_grad`], [`jacobian`], [`hessian`] | the three above ([`derivative`]) |
//!
//! Reverse mode is linearisation and transposition (Radul, Paszke, Frostig, Johnson, Maclaurin: *You only
//! linearize once*, POPL 2023). It needs one derivative of each primitive, which both modes share, and
//! transposes of the two dozen linear primitives. Operations whose rules follow from those of others are
//! expanded into these (`expand`): products of many elements, updates that combine other than by addition,
//! attention.
//!
//! Arguments that are not differentiated, integers, bools, comparisons, positions and random draws have no
//! derivative: they count as constant. An operation kept whole has no known derivative; an error names it
//! if the derivative would have to pass through it.
//!
//! # Over closures of tensors
//!
//! A front end records a closure into a graph whose parameters are the tensors that the closure takes and
//! captures, transforms the graph, and runs the result on the same tensors (`kiln::func` does). Three rules
//! concern the front end. Tensors that the closure captures have no batch dimension and are not
//! differentiated. The runtime scalars of the graph (numbers, seeds, the streams of random operations) keep
//! their order through every transform here, so their values are those of the recording; new parameters
//! come last. And a closure that reads a value, and so cuts its recording, cannot be transformed.
//!
//! What this crate does not know: Burn, executors, machines.

pub mod batch;
mod build;
pub mod derivative;
pub mod error;
mod expand;
pub mod forward;
pub mod transpose;

pub use batch::{Randomness, vmap};
pub use derivative::{Mode, grad, hessian, jacobian, value_and_grad};
pub use error::{FuncError, Origin};
pub use forward::jvp;
pub use transpose::vjp;
