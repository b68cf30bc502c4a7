//! What can go wrong between a Burn program and its executable.

use std::sync::Arc;

use kiln_cuda::CudaError;
use kiln_graph::IndexError;

use crate::execute::ExecuteError;
use crate::import::ImportError;
use crate::record::GraphBreak;

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
    /// A tensor's elements could not be copied from a GPU.
    #[error("reading a tensor: {source}")]
    Gpu {
        /// What failed.
        source: Arc<CudaError>,
    },
    /// A tensor that the region reads has no value, because what was to produce it failed.
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
    /// Whether the step that failed has overwritten nothing: everything it was given is as it was.
    pub fn is_before_overwriting(&self) -> bool {
        match self {
            Error::Execute { source, .. } => {
                matches!(**source, ExecuteError::Index(_) | ExecuteError::GpuMemory { .. })
            }
            _ => false,
        }
    }

    /// The index out of range, if that is what the error is. The step that found it has overwritten nothing:
    /// everything it was given is as it was.
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
