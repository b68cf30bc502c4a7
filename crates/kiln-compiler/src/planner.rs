//! The memory that a graph takes, for the partitioner: the passes after the partition, as far as the size
//! of the arena needs them.
//!
//! A memory budget is met by trying partitions. Scheduling, the target's decisions on every kernel and the
//! plan of memory determine the arena of each candidate; no code is written for that.

use std::borrow::Cow;

use kiln_graph::Graph;
use kiln_partition::Planner;

use crate::error::CompileError;
use crate::late;
use crate::options::Options;
use crate::plan::{self, Plan};
use crate::schedule::{Schedule, fuse};
use crate::target::Target;

/// The target's decision on each kernel of `schedule`.
///
/// # Errors
/// Those of [`Target::kernel`].
pub fn kernels<T: Target>(
    graph: &Graph,
    schedule: &Schedule,
    target: &T,
) -> Result<Vec<T::Kernel>, CompileError> {
    let kernels = schedule.kernels.iter();
    kernels
        .map(|kernel| target.kernel(graph, kernel, &schedule.layouts))
        .collect()
}

/// The memory of a step of these kernels.
pub fn memory<T: Target>(graph: &Graph, schedule: &Schedule, kernels: &[T::Kernel], target: &T) -> Plan {
    let scratch: Vec<usize> = kernels.iter().map(|kernel| target.scratch(kernel)).collect();
    plan::plan(graph, schedule, &scratch, target.policy())
}

/// Plans partitioned graphs: schedule, kernels, memory.
#[derive(Debug)]
pub struct ArenaPlanner<'a, T> {
    /// How the step is compiled.
    pub options: &'a Options,
    /// What it is compiled for.
    pub target: &'a T,
}

impl<T> Clone for ArenaPlanner<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for ArenaPlanner<'_, T> {}

impl<T: Target> ArenaPlanner<'_, T> {
    /// Bytes of the arena that `graph` gets.
    ///
    /// # Errors
    /// Those of [`Target::kernel`].
    pub fn arena(&self, graph: &Graph) -> Result<u64, CompileError> {
        let mut graph = Cow::Borrowed(graph);
        for (name, pass) in late::PASSES {
            let changed = pass(&graph, self.options, self.target.policy());
            if let Some(changed) = changed.map_err(CompileError::pass(name))? {
                graph = Cow::Owned(changed);
            }
        }
        let graph = graph.as_ref();
        let schedule = fuse::schedule(graph, self.options, self.target.policy());
        let kernels = kernels(graph, &schedule, self.target)?;
        Ok(memory(graph, &schedule, &kernels, self.target).arena_bytes as u64)
    }
}

impl<T: Target> Planner for ArenaPlanner<'_, T> {
    fn peak(&self, graph: &Graph) -> Result<u64, String> {
        self.arena(graph).map_err(|error| error.to_string())
    }
}
