//! The step compiler: from a graph to C sources that run a whole training step.
//!
//! ```text
//! Graph ──► checks ──► transform ──► partition ──► schedule ──► emit (kernels) ──► plan ──► emit (step) ──► sources ──► CpuExecutable
//! ```
//!
//! - [`checks`] has indices looked at before anything is overwritten.
//! - [`transform`] rewrites the graph: simplification, common subexpressions, patterns.
//! - [`partition`] decides what the backward pass keeps and what it computes again, under a memory budget if there is one.
//! - [`schedule`] decides which operations share a kernel and in which order kernels run.
//! - [`emit`] writes the C of each kernel; [`kernels`] has the templates for products, convolutions and pooling.
//! - [`plan`] gives every buffer its memory.
//! - [`CpuExecutable`] builds, caches, loads and calls the result through kiln-cpu.
//! - [`try_compiler`] says whether a C compiler may be trusted with it.
//!
//! Each stage takes plain data and returns plain data with a text form; [`compile`] is the list of them. The crate does not know Burn.

mod arenas;
pub mod checks;
pub mod debug;
pub mod emit;
mod error;
mod executable;
pub mod index;
pub mod kernels;
mod lines;
mod log;
mod machine;
pub mod observe;
mod options;
pub mod partition;
pub mod plan;
pub mod report;
pub mod schedule;
pub mod stages;
pub mod transform;
mod trial;

use std::time::Duration;

use kiln_cpu::SourceFile;
use kiln_graph::Graph;
use kiln_partition::Report;
use partition::Lowered;
use stages::Stages;

pub use checks::{Check, IndexUse};
pub use emit::ExternCall;
pub use error::CompileError;
pub use executable::{Contract, CpuExecutable};
pub use machine::rates;
pub use observe::{Observer, StepMemory};
pub use options::{Keep, Options};
pub use partition::{Decision, memory_curve, split};
pub use plan::Plan;
pub use report::{BufferPlace, BufferReport, FusedNode, KernelReport};
pub use trial::{Distrust, try_compiler};

/// The result of [`compile`].
#[derive(Clone, Debug)]
pub struct CompiledStep {
    /// The graph after all transforms. Extern operations keep their order.
    pub graph: Graph,
    /// What the backward pass keeps; none for a graph without one.
    pub partition: Option<Report>,
    /// What runs together and when.
    pub schedule: schedule::Schedule,
    /// Where everything lives.
    pub plan: Plan,
    /// The C source tree.
    pub sources: Vec<SourceFile>,
    /// What each kernel does, by the number that profiling events carry.
    pub kernels: Vec<KernelReport>,
    /// The buffers that kernels share.
    pub buffers: Vec<BufferReport>,
    /// Most threads that may run the step.
    pub threads: usize,
    /// Operations that run outside, by the index that the step passes to `call_extern`.
    pub externs: Vec<ExternCall>,
    /// Indices that are looked at; the last outputs of the graph are the least and the largest index of each.
    pub checks: Vec<checks::Check>,
    /// Time spent in each stage.
    pub times: Vec<(&'static str, Duration)>,
    /// The graph after each pass, as text, if [`Options::dump`] asks for it.
    pub dumps: Vec<(String, String)>,
}

/// Compiles `graph` to C. What each stage made is written to [`Options::debug`], if that names a folder.
///
/// The compiled step takes one pointer for each parameter and one for each output, row-major and contiguous, and the runtime scalars
/// as eight bytes each ([`kiln_graph::Scalar::to_bits`]). [`Plan::aliases`] says which outputs take over which parameter's memory.
///
/// # Errors
/// [`CompileError::Invalid`] if the graph breaks a rule of kiln-graph; [`CompileError::Unsupported`] if nothing computes one of its
/// operations.
pub fn compile(graph: &Graph, options: &Options) -> Result<CompiledStep, CompileError> {
    let span = tracing::info_span!("compile", name = graph.name);
    let _entered = span.enter();
    kiln_graph::verify::verify(graph)?;
    let mut stages = Stages::default();

    let dump = options.dump || options.debug.is_some();
    let Lowered {
        graph,
        checks,
        partition,
        dumps,
    } = partition::lower(graph, options, dump, &mut stages)?;
    let Planned {
        schedule,
        codes,
        externs,
        plan,
        emit_options,
    } = planned(&graph, options, &mut stages)?;
    let emitted = stages.time("emit", || {
        emit::emit(&graph, &schedule, &codes, &plan, &checks, &emit_options)
    });
    let compiled = CompiledStep {
        graph,
        partition,
        schedule,
        plan,
        sources: emitted.sources,
        kernels: emitted.kernels,
        buffers: emitted.buffers,
        threads: options.threads,
        externs,
        checks,
        times: stages.times,
        dumps,
    };
    if let Some(folder) = &options.debug {
        debug::write(folder, &compiled);
    }
    Ok(compiled)
}

/// A graph as kernels with their memory.
struct Planned {
    schedule: schedule::Schedule,
    codes: Vec<emit::KernelCode>,
    externs: Vec<ExternCall>,
    plan: Plan,
    emit_options: emit::EmitOptions,
}

/// Schedules `graph`, writes its kernels and gives every buffer its memory.
fn planned(graph: &Graph, options: &Options, stages: &mut Stages) -> Result<Planned, CompileError> {
    let schedule = stages.time("schedule", || schedule::fuse::schedule(graph, options));
    let emit_options = emit::EmitOptions {
        isa: options.isa,
        threads: options.threads,
        layouts: std::sync::Arc::clone(&schedule.layouts),
    };
    let mut externs = Vec::new();
    let codes = stages.time("kernels", || {
        let kernels = schedule.kernels.iter();
        kernels
            .map(|kernel| emit::generate(graph, kernel, &emit_options, &mut externs))
            .collect::<Result<Vec<_>, CompileError>>()
    })?;
    let plan = stages.time("plan", || {
        let scratch: Vec<usize> = codes.iter().map(|code| code.scratch).collect();
        plan::plan(graph, &schedule, &scratch)
    });
    Ok(Planned {
        schedule,
        codes,
        externs,
        plan,
        emit_options,
    })
}
