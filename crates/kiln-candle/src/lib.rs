//! A graph executor on candle-core, independent of Burn's kernels: the oracle of differential tests.
//!
//! [`CandleExecutable`] runs a [`kiln_graph::Graph`] node by node. What an operation computes is fixed by the
//! rustdoc of [`kiln_graph::op`]; how, is this crate's own: nearly everything is composed of candle's tensor
//! operations, and neither Burn's kernels nor the plain interpreter of the graph take part, so that a mistake
//! in one of the three shows.
//!
//! Accuracy comes before speed, because the executor judges others: functions, sums and products over an
//! axis, scatters and attention are computed in f64 and rounded once; matrix products and convolutions of f32
//! accumulate in f32, as candle's kernels do. f16 and bf16 compute in f32 or wider and round once per
//! primitive. Integers follow the graph's rules (wrapping, division by zero) although candle's would panic.
//!
//! On the host, outside of candle, are computed only: random numbers (their meaning is a function of this
//! workspace, [`kiln_graph::philox::fill`]), index tables that follow from shapes alone, and the grouping of
//! scatter targets into rounds.
//!
//! **Invariants.** The crate does not know Burn, compilers, files or threads. A run changes nothing but the
//! tensors it returns.

mod attention;
mod contract;
mod error;
mod exec;
mod float;
mod index;
mod ints;
mod movement;
mod pointwise;
mod pool;
mod reduce;
mod value;
mod window;

pub use error::{CandleError, Failure};
pub use exec::{CandleExecutable, ExternHandler};
