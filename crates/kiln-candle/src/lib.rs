//! A graph executor on candle-core, independent of Burn's kernels: the oracle of differential tests.
//!
//! [`CandleExecutable`] runs a [`kiln_graph::Graph`] node by node. The rustdoc of [`kiln_graph::op`]
//! defines what an operation computes; this crate decides how: nearly everything is composed of candle's
//! tensor operations. Neither Burn's kernels nor the plain interpreter of the graph take part, so that a
//! mistake in one of the three shows.
//!
//! Accuracy comes before speed, because other executors are compared with this one: functions, sums and
//! products over an axis, scatters and attention are computed in f64 and rounded once; matrix products and
//! convolutions of f32 accumulate in f32, as candle's kernels do. f16 and bf16 compute in f32 or wider and
//! round once per primitive. Integers follow the graph's rules (wrapping, division by zero) although
//! candle's would panic.
//!
//! Four things are computed on the host, outside of candle: random numbers (they are defined by a function of
//! this workspace, [`kiln_graph::philox::fill`]), conversions that candle would round twice
//! ([`kiln_graph::rounding`]), index tables that follow from shapes alone, and the grouping of scatter
//! targets into rounds.
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
