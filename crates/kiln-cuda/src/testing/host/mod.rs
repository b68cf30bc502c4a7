//! Runs generated CUDA C++ on the host, for tests.
//!
//! ```text
//! StepCode ─► kiln_host.h + prelude + kernels ─► C++ compiler ─► library ─► HostStep::run: launches, products and guards in order
//! ```
//!
//! The header `kiln_host.h` defines CUDA's words for the host: the threads of a block are fibers, and
//! blocks run one after the other. Memory begins as noise that is NaN in every float type, and lies between
//! guard zones, so a check finds elements that no kernel wrote and writes beside a buffer. Plain loops
//! compute products of matrices. [`Differential`] compiles a graph, runs it so, and compares with the
//! interpreter.

mod convolution;
mod differential;
mod library;
mod memory;
mod product;
mod step;

use std::fmt;

pub use differential::{Differential, Outcome, differential};
pub use step::{HostStep, StageOrder, one_kernel};

/// Why a run gave no results.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum HostError {
    /// Indices were out of range.
    Index {
        /// The number of the check.
        check: u32,
        /// The least of the indices.
        least: i128,
        /// The largest.
        most: i128,
    },
    /// A kernel did what no kernel may do.
    Fault(String),
}

impl fmt::Display for HostError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Index { check, least, most } => {
                write!(
                    f,
                    "check {check}: indices from {least} to {most} are out of range"
                )
            }
            Self::Fault(text) => f.write_str(text),
        }
    }
}

impl std::error::Error for HostError {}

impl From<HostError> for String {
    fn from(error: HostError) -> Self {
        error.to_string()
    }
}
