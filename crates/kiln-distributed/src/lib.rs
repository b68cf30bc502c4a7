//! Ranks: processes that train together.
//!
//! [`init`] finds out from the environment who started the process, which rank it is and how many there are,
//! and connects the ranks through the MPI of whoever started them. [`World`] is that connection: collectives on
//! buffers, begun and waited for apart, and [`World::agree`], by which ranks find out that they do not run the
//! same step.
//!
//! ```text
//!   mpirun, srun ──► environment ──► World ──► engine: one thread ──► mpi: a dozen functions of libmpi
//!   torchrun     ──► environment ──► World ──► carried: one thread ──► rendezvous: few bytes over TCP
//!                                                             └──────► Carrier: NCCL, which the GPU's part gives
//! ```
//!
//! - Nothing is linked: a program that runs alone needs no MPI. Open MPI and MPICH differ in what a handle is
//!   (`mpi.rs`); which of them is loaded follows from who started the process.
//! - One thread makes every MPI call, so that any MPI will do; it works on one collective after the other, in
//!   the order in which they were begun.
//! - Sums go in the order of ranks, whatever the number of elements and however they travel: two runs have
//!   equal bits, and so have all ranks.
//! - Whoever waits too long for another rank says for which, and for what ([`Error::Timeout`]). A collective
//!   that another rank does not take part in is an error on both ([`Error::Differs`]). So are collectives of steps that
//!   do not belong together ([`StepTag`]): what a step is goes along with each of them.
//! - [`nccl`] is NCCL's table, and a GPU among those of all ranks; what queues its collectives is in kiln-cuda.
//! - Nothing here speaks to a network but `rendezvous`: facts and NCCL's id of ranks that `torchrun` started.
//! - [`Link`] says how long a collective takes, from two numbers that [`World::link`] measures once.
//! - [`World::threads`] is a rank's share of the CPUs that it may use: ranks tell each other theirs when they
//!   are connected (`cpus.rs`).
//! - [`imagine`] gives a world of one process that computes as one of several ranks, for what is predicted.
//! - Knows buffers and element types; no graph, no tensors, no Burn.

mod agree;
mod alive;
mod carried;
mod cpus;
mod engine;
mod environment;
mod error;
mod in_flight;
mod link;
mod mpi;
pub mod nccl;
mod rendezvous;
mod sum;
mod world;

pub use agree::Fact;
pub use carried::Carrier;
pub use engine::StepTag;
pub use environment::{Launcher, Place};
pub use error::Error;
pub use in_flight::{InFlight, Operand};
pub use link::{Link, UnknownLink};
pub use world::{Operands, Options, Ticket, World, current, imagine, init, init_with};
