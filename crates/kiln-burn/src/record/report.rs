//! Reports on a region and its steps, for people.

use std::fmt::Write;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use kiln_compiler::Contract;
use kiln_graph::Graph;

use super::breaks::GraphBreak;
use super::guard::Mismatch;
use super::history::CompileEvent;
use super::step::Step;
use crate::options::CompileBackend;

/// One compilation that a guard made necessary.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Recompile {
    /// Segment of the region, from 0.
    pub segment: usize,
    /// How the recording differed from the nearest compiled step.
    pub mismatch: Mismatch,
}

/// The guards of a step: what must be the same for it to run again, besides the operations with their
/// attributes.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Guards {
    /// Element type and shape of each input, in order of first use.
    pub inputs: Vec<String>,
    /// Number of operations.
    pub operations: usize,
    /// Number of results that are alive at the end.
    pub outputs: usize,
}

/// A compiled step of a region.
#[derive(Clone, Debug)]
pub struct StepReport {
    /// Segment of the region, from 0.
    pub segment: usize,
    /// Which step of the region, in the order of compilation, from 0.
    pub number: usize,
    /// Number of the executable in the process: profiles file its kernels under it.
    pub executable: u64,
    /// Whether it was prepared for one run only: the first step of an optimizer, whose graph does not come
    /// again.
    pub provisional: bool,
    /// The conditions for it to run.
    pub guards: Guards,
    /// The backend that runs it.
    pub backend: CompileBackend,
    /// Ordinal of the GPU, for a backend that runs on one.
    pub gpu: usize,
    /// Recorded operations.
    pub operations: usize,
    /// Nodes of the graph.
    pub nodes: usize,
    /// Tensor arguments.
    pub inputs: usize,
    /// Outputs.
    pub outputs: usize,
    /// Outputs that may take an argument's buffer.
    pub aliased: usize,
    /// Runtime scalars.
    pub scalars: usize,
    /// Operations kept whole, by name.
    pub externs: Vec<String>,
    /// Times it ran.
    pub runs: u64,
    /// Import and preparation.
    pub compile_time: Duration,
    /// Sum over all runs, including the handing over of tensors.
    pub run_time: Duration,
    /// The part of it in compiled code; all of it where the executor has none.
    pub code_time: Duration,
    /// The graph.
    pub graph: Arc<Graph>,
    /// Bytes of the block that holds all intermediate values; none where the backend has no such block.
    pub arena_bytes: Option<usize>,
    /// The executor's description.
    pub details: String,
    /// Kernels and buffers of compiled code.
    pub contract: Option<Contract>,
    /// Time in each stage of compilation, recording included.
    pub stages: Vec<(&'static str, Duration)>,
    /// Whether the disk cache had it.
    pub from_cache: bool,
    /// Threads that share its work.
    pub threads: usize,
}

/// A report on a region.
#[derive(Clone, Debug)]
pub struct RegionReport {
    /// Name of the region.
    pub name: String,
    /// Calls of `run`.
    pub calls: u64,
    /// Compiled steps, by segment.
    pub steps: Vec<StepReport>,
    /// Distinct graph breaks with the number of times each happened.
    pub breaks: Vec<(GraphBreak, u64)>,
    /// Compilations after the first of a segment.
    pub recompiles: Vec<Recompile>,
    /// Every compilation, in order.
    pub compiles: Vec<CompileEvent>,
    /// Greatest number of steps a segment compiles.
    pub recompile_limit: usize,
    /// What made compilations necessary, and what to do about it, if the limit was reached; else nothing.
    pub advice: String,
}

impl Step {
    fn details(&self) -> String {
        let mut details = self.executable.report();
        if let Some(budget) = self.ignored_budget {
            let _ = write!(
                details,
                "\nthe memory budget of {budget} bytes is not kept: `{}` allocates value by value, `cpu` plans memory",
                self.backend
            );
        }
        details
    }

    /// The report on the step, which belongs to segment `segment`.
    pub(super) fn report(&self, segment: usize) -> StepReport {
        let externs = self.graph.nodes().filter_map(|(_, node)| match &node.op {
            // With C it is inside of the code for the CPU.
            kiln_graph::Op::Extern(op) if op.c_source.is_empty() || self.backend != CompileBackend::Cpu => {
                Some(op.name.clone())
            }
            _ => None,
        });
        let run_time = Duration::from_nanos(self.run_time.load(Ordering::Relaxed));
        StepReport {
            segment,
            number: self.number,
            executable: self.executable.id(),
            provisional: self.provisional,
            guards: Guards {
                inputs: self.guard.inputs().to_vec(),
                operations: self.operations,
                outputs: self.outputs.len(),
            },
            backend: self.backend,
            gpu: self.gpu,
            operations: self.operations,
            nodes: self.graph.num_nodes(),
            inputs: self.graph.parameters().len(),
            outputs: self.graph.outputs.len(),
            aliased: self
                .graph
                .outputs
                .iter()
                .filter(|output| output.alias.is_some())
                .count(),
            scalars: self.scalars.len(),
            externs: externs.collect(),
            runs: self.runs.load(Ordering::Relaxed),
            compile_time: self.compile_time,
            run_time,
            code_time: self.executable.code_time().unwrap_or(run_time),
            graph: self.graph.clone(),
            arena_bytes: self.executable.arena_bytes(),
            details: self.details(),
            contract: self.executable.contract().cloned(),
            stages: self.stages.clone(),
            from_cache: self.executable.is_from_cache(),
            threads: self.executable.threads(),
        }
    }
}
