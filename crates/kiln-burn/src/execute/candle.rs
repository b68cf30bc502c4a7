//! The graph on candle-core, whose kernels share nothing with Burn's: a second opinion. Inputs and outputs
//! are copied.

use std::sync::Arc;

use kiln_candle::CandleExecutable;
use kiln_graph::op::ExternOp;
use kiln_graph::{Graph, HostTensor};
use kiln_profile::Category;

use super::check::{Parting, Reference};
use super::host::{run_extern, to_hosts, to_storage};
use super::profile::next_id;
use super::{Executable, ExecuteError, check_arguments};
use crate::options::CompileBackend;
use crate::storage::Storage;

/// The graph on candle-core.
pub struct Candle {
    executable: CandleExecutable,
    id: u64,
}

impl Candle {
    /// Prepares `graph`.
    ///
    /// # Errors
    ///
    /// If a tensor of the graph is too large for candle.
    pub fn new(graph: Arc<Graph>) -> Result<Self, ExecuteError> {
        Ok(Self {
            executable: CandleExecutable::new(graph)?,
            id: next_id(),
        })
    }
}

impl Executable for Candle {
    fn run_given(&self, inputs: &mut Vec<Storage>, scalars: &[u64]) -> Result<Vec<Storage>, ExecuteError> {
        let graph = self.executable.graph();
        let _span = kiln_profile::span_with(Category::Step, || graph.name.clone().into());
        check_arguments(graph, inputs, scalars)?;
        let handler = |op: &ExternOp, operands: Vec<HostTensor>| run_extern(op, &operands);
        let outputs = self.executable.run_with(&to_hosts(inputs), scalars, &handler)?;
        inputs.clear();
        Ok(outputs.iter().map(to_storage).collect())
    }

    fn id(&self) -> u64 {
        self.id
    }

    fn locate(&self, reference: &Reference<'_>) -> Result<Option<Parting>, ExecuteError> {
        reference.first_node(self.executable.graph(), CompileBackend::Candle)
    }

    fn report(&self) -> String {
        format!(
            "{} nodes, each on candle-core",
            self.executable.graph().num_nodes()
        )
    }
}
