//! Ranks: processes that train together.
//!
//! [`init`] finds out from the environment who started the process, which rank it is and how many there are,
//! and connects the ranks through the MPI of whoever started them. [`World`] is that connection: collectives on
//! buffers, begun and waited for apart, and [`World::agree`], by which ranks find out that they do not run the
//! same step.
//!
//! ```text
//!   mpirun, srun, torchrun ──► environment ──► World ──► engine: one thread ──► mpi: a dozen functions of libmpi
//! ```
//!
//! - Nothing is linked: a program that runs alone needs no MPI. Open MPI and MPICH differ in what a handle is
//!   (`mpi.rs`); which of them is loaded follows from who started the process.
//! - One thread makes every MPI call, so that any MPI will do; it works on one collective after the other, in
//!   the order in which they were begun.
//! - Sums go in the order of ranks, whatever the number of elements and however they travel: two runs have
//!   equal bits, and so have all ranks.
//! - Whoever waits too long for another rank says for which, and for what ([`Error::Timeout`]). A collective
//!   that another rank does not take part in is an error on both ([`Error::Differs`]).
//! - Knows buffers and element types; no graph, no tensors, no Burn.

mod agree;
mod engine;
mod environment;
mod error;
mod mpi;
mod sum;
mod world;

pub use environment::{Launcher, Place};
pub use error::Error;
pub use world::{Operands, Options, Ticket, World, current, init, init_with};
