//! The list of passes.

use std::fmt;
use std::time::Duration;

use kiln_graph::Graph;
use kiln_partition::Report;

use crate::checks::{self, Check};
use crate::contract::{self, Contract, ExternCall};
use crate::decision::Decision;
use crate::error::CompileError;
use crate::options::Options;
use crate::plan::{Plan, verify};
use crate::planner::{self, ArenaPlanner};
use crate::report::{self, BufferReport, KernelReport};
use crate::schedule::{self, Schedule};
use crate::stages::Stages;
use crate::target::{Emitted, Step, Target};
use crate::transform::Transformed;
use crate::transform::autocast::AutocastReport;
use crate::{debug, late, partition, transform};

/// The result of [`compile`].
pub struct CompiledStep<T: Target> {
    /// The graph after all transforms. Extern operations keep their order.
    pub graph: Graph,
    /// What autocast did; none if it was not asked for, or had nothing to do.
    pub autocast: Option<AutocastReport>,
    /// What the backward pass keeps; none for a graph without one.
    pub partition: Option<Report>,
    /// Which operations share a kernel, and the order of kernels.
    pub schedule: Schedule,
    /// Where everything lives.
    pub plan: Plan,
    /// The target's code for the step, such as a source tree.
    pub code: T::Code,
    /// What each kernel does, by the number that profiling events carry.
    pub kernels: Vec<KernelReport>,
    /// The buffers that kernels share.
    pub buffers: Vec<BufferReport>,
    /// Operations that run outside, by the index that the step calls them by.
    pub externs: Vec<ExternCall>,
    /// The checked indices; the last outputs of the graph are the least and the largest index of each.
    pub checks: Vec<Check>,
    /// Time spent in each stage.
    pub times: Vec<(&'static str, Duration)>,
    /// The graph after each pass, as text, if [`Options::dump`] asks for it.
    pub dumps: Vec<(String, String)>,
}

impl<T: Target> fmt::Debug for CompiledStep<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CompiledStep")
            .field("name", &self.graph.name)
            .field("kernels", &self.kernels.len())
            .field("arena_bytes", &self.plan.arena_bytes)
            .finish_non_exhaustive()
    }
}

impl<T: Target> CompiledStep<T> {
    /// What the caller of the compiled code must know.
    pub fn contract(&self) -> Contract {
        Contract {
            aliases: self.plan.aliases[..self.plan.aliases.len() - 2 * self.checks.len()].to_vec(),
            arena_bytes: self.plan.arena_bytes,
            autocast: self.autocast.clone(),
            partition: self.partition.as_ref().map(Decision::from),
            kernels: self.kernels.clone(),
            buffers: self.buffers.clone(),
            externs: self.externs.clone(),
            checks: self.checks.clone(),
        }
    }
}

/// Compiles `graph` for `target`. The result of each stage is written to [`Options::debug`], if that names
/// a folder.
///
/// The compiled step takes one pointer for each parameter and one for each output, row-major and contiguous,
/// and the runtime scalars as eight bytes each ([`kiln_graph::Scalar::to_bits`]). [`Plan::aliases`] says
/// which outputs take over which parameter's memory.
///
/// # Errors
/// [`CompileError::Invalid`] if the graph breaks a rule of kiln-graph; [`CompileError::Unsupported`] if
/// nothing computes one of its operations; [`CompileError::Partition`] if nothing fits a memory budget.
pub fn compile<T: Target>(
    graph: &Graph,
    options: &Options,
    target: &T,
) -> Result<CompiledStep<T>, CompileError> {
    let span = tracing::info_span!("compile", name = graph.name);
    let _entered = span.enter();
    let mut stages = Stages::default();

    kiln_graph::verify::verify(graph)?;
    let (graph, checks) = checks::run(graph).map_err(CompileError::pass("checks"))?;
    let Transformed {
        graph,
        mut dumps,
        autocast,
    } = transform::run(&graph, options, target.policy(), &mut stages)?;
    let (graph, partition) = stages.time("partition", || {
        partition::run(
            &graph,
            options.keep,
            target.rates(),
            target.policy(),
            ArenaPlanner { options, target },
        )
    })?;
    if options.wants_dumps() && partition.is_some() {
        dumps.push(("partition".into(), graph.to_string()));
    }
    let mut graph = graph;
    for (name, pass) in late::PASSES {
        let changed = stages.time(name, || pass(&graph, options, target.policy()));
        if let Some(changed) = changed.map_err(CompileError::pass(name))? {
            if options.wants_dumps() {
                dumps.push((name.into(), changed.to_string()));
            }
            graph = changed;
        }
    }
    let schedule = stages.time("schedule", || {
        schedule::fuse::schedule(&graph, options, target.policy())
    });
    let kernels = stages.time("kernels", || planner::kernels(&graph, &schedule, target))?;
    let plan = stages.time("plan", || planner::memory(&graph, &schedule, &kernels, target));
    // Before anything refuses it: who reports a plan that is wrong has it to look at.
    if let Some(folder) = &options.debug {
        debug::write(folder, &dumps, &graph, &schedule, &plan);
    }
    let scratch: Vec<usize> = kernels.iter().map(|kernel| target.scratch(kernel)).collect();
    stages.time("verify", || {
        verify::verify(&graph, &schedule, &plan, &scratch, target.policy().alignment)
    })?;
    let (buffers, mut reports) = report::describe(&graph, &schedule, &plan, &scratch);
    let Emitted { code, names } = stages.time("emit", || {
        target.emit(&Step {
            graph: &graph,
            schedule: &schedule,
            kernels: &kernels,
            plan: &plan,
            checks: &checks,
            reports: &reports,
        })
    })?;
    for (report, name) in reports.iter_mut().zip(names) {
        report.name = name;
    }
    Ok(CompiledStep {
        externs: contract::externs(&graph, &schedule, target.compiles_c()),
        graph,
        autocast,
        partition,
        schedule,
        plan,
        code,
        kernels: reports,
        buffers,
        checks,
        times: stages.times,
        dumps,
    })
}
