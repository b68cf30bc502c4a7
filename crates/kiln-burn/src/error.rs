//! Errors between a Burn program and its executable.

use std::sync::Arc;

use kiln_cuda::CudaError;
use kiln_graph::IndexError;

use crate::execute::ExecuteError;
use crate::import::ImportError;
use crate::record::{GraphBreak, Mismatch};

/// An error of a compiled region. Clones share their cause.
#[derive(Clone, Debug, thiserror::Error)]
pub enum Error {
    /// The region had to be cut although it was compiled with `fullgraph`.
    #[error("graph break in region `{region}` with fullgraph: {graph_break}")]
    GraphBreak {
        /// Name of the region.
        region: String,
        /// Why and where.
        graph_break: Box<GraphBreak>,
    },
    /// The region is frozen ([`CompileOptions::frozen`](crate::CompileOptions::frozen)), and the call would
    /// have compiled a step. Nothing ran, and the call's inputs are as they were. Tensors that a recorded
    /// closure has made are computed one operation at a time if they are used.
    #[error("region `{region}` is frozen, and the call would compile: {guard}; `unfreeze` lets it")]
    Frozen {
        /// Name of the region.
        region: String,
        /// The guard that failed, and what to do about it.
        guard: String,
    },
    /// The recorded operations could not be made a graph.
    #[error("region `{region}`: {source}")]
    Import {
        /// Name of the region.
        region: String,
        /// What could not be imported.
        source: Arc<ImportError>,
    },
    /// The graph could not be compiled or run.
    #[error("region `{region}`: {source}")]
    Execute {
        /// Name of the region.
        region: String,
        /// What failed.
        source: Arc<ExecuteError>,
    },
    /// A function that is compiled with its gradients uses a tensor that is computed from trained ones
    /// outside of it.
    #[error(
        "`{region}` uses a tensor that it captures and that follows from trained tensors: its gradient would be lost. Pass \
         the tensor as an argument, or detach it if it needs no gradient"
    )]
    TrackedCapture {
        /// Name of the function.
        region: String,
    },
    /// A region that trains on several ranks
    /// ([`CompileOptions::with_data_parallel`](crate::CompileOptions::with_data_parallel)) gives away
    /// something that follows from gradients of its own examples alone. Nothing ran.
    #[error(
        "region `{region}` trains on {ranks} ranks, and {what} follows from gradients that were not averaged over them: pass \
         them through `kiln::distributed::average` before the optimizer, or use `TrainStep::with_data_parallel`, which does"
    )]
    NotAveraged {
        /// Name of the region.
        region: String,
        /// Number of ranks.
        ranks: usize,
        /// A tensor that leaves the region: its type, and where it was made.
        what: String,
    },
    /// A tensor's elements could not be copied from a GPU.
    #[error("reading a tensor: {source}")]
    Gpu {
        /// What failed.
        source: Arc<CudaError>,
    },
    /// A tensor that the region reads has no value, because the step that computes it failed.
    #[error("a tensor has no value: {reason}")]
    NoValue {
        /// What happened to it.
        reason: Arc<str>,
    },
}

impl From<CudaError> for Error {
    fn from(source: CudaError) -> Self {
        Self::Gpu {
            source: Arc::new(source),
        }
    }
}

impl Error {
    /// The error of a frozen region whose nearest step differs by `mismatch`; none if there is no step.
    pub fn frozen(region: &str, mismatch: Option<&Mismatch>) -> Self {
        let guard = match mismatch {
            Some(mismatch) => format!("{mismatch}; {}", mismatch.remedy()),
            None => "nothing was compiled for it yet".to_owned(),
        };
        Self::Frozen {
            region: region.to_owned(),
            guard,
        }
    }

    /// Whether a frozen region refused the call.
    pub fn is_frozen(&self) -> bool {
        matches!(self, Self::Frozen { .. })
    }

    /// Whether the step that failed has overwritten nothing of what it was given, so that all its inputs are
    /// as they were.
    pub fn is_before_overwriting(&self) -> bool {
        match self {
            Error::Frozen { .. } => true,
            Error::Execute { source, .. } => source.is_before_overwriting(),
            _ => false,
        }
    }

    /// The index out of range, if this is such an error. The step that found it has overwritten nothing:
    /// all its inputs are as they were.
    pub fn index(&self) -> Option<&IndexError> {
        match self {
            Error::Execute { source, .. } => match &**source {
                ExecuteError::Index(error) => Some(error),
                _ => None,
            },
            _ => None,
        }
    }
}
