//! A region: the steps compiled for one `run` call site, and running one.
//!
//! A region is cut into segments by graph breaks; usually there is one. Each segment has a list of compiled steps, most recently used
//! first. A recording that no guard accepts is a new step: it is imported, prepared by the region's backend, and remembered with the guard that failed.

use std::fmt::Write;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use burn_backend::DType;
use burn_flex::FlexTensor;
use burn_ir::{ScalarIr, TensorId, TensorIr};
use kiln_compiler::Contract;
use kiln_compiler::stages::Stages;
use kiln_graph::Graph;
use kiln_profile::Category;
use rustc_hash::FxHashMap;

use super::breaks::GraphBreak;
use super::guard::{Guard, Mismatch};
use super::history::{self, CompileEvent};
use super::recording::Recorded;
use super::stream_text;
use crate::error::Error;
use crate::execute::check::Checker;
use crate::execute::memory::Memory;
use crate::execute::{self, Effort, Executable, ExecuteError};
use crate::import::{self, ScalarSource};
use crate::options::{CompileBackend, CompileOptions};
use crate::random::Stream;
use crate::{stream, table};

/// A compiled step.
pub struct Step {
    guard: Guard,
    graph: Arc<Graph>,
    executable: Box<dyn Executable>,
    /// Compares the first runs with another backend, if that was asked for.
    checker: Option<Checker>,
    /// For each argument of the graph, the position of the recording's input.
    arguments: Vec<usize>,
    scalars: Scalars,
    /// Burn's type and shape of each output.
    outputs: Vec<TensorIr>,
    backend: CompileBackend,
    /// Inputs of the recording whose buffers outputs could take over, had they ended in the step.
    lasting: Vec<usize>,
    /// Runs in a row in which one of them did end.
    ended: AtomicU64,
    /// Prepared for one run only: replaced by the region's own backend if the step comes again.
    provisional: bool,
    /// Which step of the region, in the order of compilation.
    number: usize,
    runs: Arc<AtomicU64>,
    compile_time: Duration,
    /// Time in each stage of compilation, recording included.
    stages: Vec<(&'static str, Duration)>,
    /// The memory budget asked for, where the backend has no way to keep it.
    ignored_budget: Option<usize>,
    /// Nanoseconds, over all runs.
    run_time: AtomicU64,
    operations: usize,
}

/// What the last run of a region did: all a replay needs to know ([`super::replay`]).
#[derive(Clone)]
pub struct LastRun {
    /// The step that ran.
    pub step: Arc<Step>,
    /// The segment it was; a replay wants a region of one segment.
    pub segment: usize,
    /// Ids of the tensors it read, in order.
    pub inputs: Vec<TensorId>,
    /// Ids of the tensors it left behind, in order.
    pub outputs: Vec<TensorId>,
    /// Its runtime scalars, in order.
    pub scalars: Vec<ScalarIr>,
    /// Number of random operations in it.
    pub random_operations: usize,
    /// Inputs that the program made from data on the host, by position; empty unless the region keeps them.
    pub host_data: FxHashMap<usize, FlexTensor>,
}

/// Where a runtime scalar comes from.
#[derive(Clone, Copy, Debug)]
enum Binding {
    /// The k-th scalar of the recording.
    Recorded(usize),
    /// The generator's seed, as the k-th random operation found it.
    Seed(usize),
    /// The stream of the k-th random operation.
    Stream(usize),
}

/// One compilation that a guard made necessary.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Recompile {
    /// Segment of the region, from 0.
    pub segment: usize,
    /// How the recording differed from the nearest compiled step.
    pub mismatch: Mismatch,
}

/// What must be the same for a step to run again. The operations themselves, with their attributes, are the rest of it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Guards {
    /// Element type and shape of each input, in order of first use.
    pub inputs: Vec<String>,
    /// Number of operations.
    pub operations: usize,
    /// Number of results that are alive at the end.
    pub outputs: usize,
}

/// What a region has compiled.
#[derive(Clone, Debug)]
pub struct StepReport {
    /// Segment of the region, from 0.
    pub segment: usize,
    /// Which step of the region, in the order of compilation, from 0.
    pub number: usize,
    /// Number of the executable in the process: what kernels in profiles are filed under.
    pub executable: u64,
    /// Whether it was prepared for one run only: the first step of an optimizer, whose graph does not come again.
    pub provisional: bool,
    /// What must be the same for it to run.
    pub guards: Guards,
    /// The backend that runs it.
    pub backend: CompileBackend,
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
    /// Sum over all runs, with the handing over of tensors.
    pub run_time: Duration,
    /// The part of it in compiled code; all of it where the executor has none.
    pub code_time: Duration,
    /// The graph.
    pub graph: Arc<Graph>,
    /// Bytes of the block that holds all intermediate values; none where the backend has no such block.
    pub arena_bytes: Option<usize>,
    /// What the executor says of itself.
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

/// What happened in a region so far.
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
}

/// The compiled steps of one region and their history.
pub struct Region {
    /// How steps are compiled.
    pub options: CompileOptions,
    /// Greatest number of steps a segment keeps; the least recently used goes. Lazy devices use it: they have no step to come back to.
    pub capacity: usize,
    /// Whether [`LastRun::host_data`] is kept: a replay needs to know whether it is the same at each call.
    pub keeps_host_data: bool,
    segments: Vec<Vec<Arc<Step>>>,
    last: Option<LastRun>,
    calls: u64,
    breaks: Vec<(GraphBreak, u64)>,
    recompiles: Vec<Recompile>,
    compiles: Vec<CompileEvent>,
    warned_limit: bool,
    /// How long the program took to issue the operations of the recording that comes next.
    pub recorded_in: Duration,
    /// Where dumps go; none if nobody asked for them.
    debug: Option<PathBuf>,
}

impl Region {
    /// A region that has compiled nothing.
    pub fn new(options: CompileOptions) -> Self {
        Self {
            debug: history::debug_folder(options.debug.as_deref(), &options.name),
            options,
            capacity: usize::MAX,
            keeps_host_data: false,
            segments: Vec::new(),
            last: None,
            calls: 0,
            breaks: Vec::new(),
            recompiles: Vec::new(),
            compiles: Vec::new(),
            warned_limit: false,
            recorded_in: Duration::ZERO,
        }
    }

    /// Counts a call.
    pub fn begin(&mut self) {
        self.calls += 1;
        self.last = None;
    }

    /// The last step that ran in this call; none if nothing was recorded or the step failed.
    pub fn last_run(&self) -> Option<&LastRun> {
        self.last.as_ref()
    }

    /// Whether there is a compiled step for this segment that was not made for one run only.
    pub fn has_compiled(&self, segment: usize) -> bool {
        let steps = self.segments.get(segment);
        steps.is_some_and(|steps| steps.iter().any(|step| !step.provisional))
    }

    /// Remembers a graph break.
    pub fn note_break(&mut self, graph_break: GraphBreak) {
        tracing::info!(target: "kiln::graph_breaks", region = %self.options.name, "{graph_break}");
        if kiln_profile::is_active() {
            let region = ("region", self.options.name.clone().into());
            let text = ("break", graph_break.to_string().into());
            kiln_profile::instant(Category::Break, "graph break", vec![region, text]);
        }
        match self.breaks.iter_mut().find(|(known, _)| *known == graph_break) {
            Some((_, count)) => *count += 1,
            None => self.breaks.push((graph_break, 1)),
        }
    }

    /// Runs a recording as segment `segment` and enters its outputs into the table. If that fails, the table says why instead.
    pub fn run(&mut self, segment: usize, recorded: Recorded) -> Result<(), Error> {
        let ids = recorded.output_ids.clone();
        if ids.is_empty() {
            return Ok(());
        }
        match self.execute(segment, recorded) {
            Ok(tensors) => {
                ids.into_iter()
                    .zip(tensors)
                    .for_each(|(id, tensor)| table::insert(id, tensor));
                Ok(())
            }
            Err(error) => {
                let reason: Arc<str> = error.to_string().into();
                ids.into_iter().for_each(|id| table::fail(id, reason.clone()));
                Err(error)
            }
        }
    }

    fn execute(&mut self, segment: usize, recorded: Recorded) -> Result<Vec<FlexTensor>, Error> {
        self.last = None;
        let index = self.find_or_compile(segment, &recorded)?;
        // Most recently used first.
        self.segments[segment][..=index].rotate_right(1);
        let step = self.segments[segment][0].clone();
        let inputs = recorded.inputs.iter().map(|input| input.ir.id).collect();
        let host_data = match self.keeps_host_data {
            true => host_data(&recorded),
            false => FxHashMap::default(),
        };
        let tensors = step.run(
            recorded.inputs.into_iter().map(|input| input.tensor).collect(),
            &recorded.scalars,
            &recorded.streams,
        )?;
        self.last = Some(LastRun {
            step,
            segment,
            inputs,
            outputs: recorded.output_ids,
            scalars: recorded.scalars,
            random_operations: recorded.streams.len(),
            host_data,
        });
        Ok(tensors)
    }

    fn find_or_compile(&mut self, segment: usize, recorded: &Recorded) -> Result<usize, Error> {
        while self.segments.len() <= segment {
            self.segments.push(Vec::new());
        }
        let guard = kiln_profile::span(Category::Host, "guard");
        let known = self.segments[segment]
            .iter()
            .position(|step| step.guard.accepts(recorded));
        drop(guard);
        let mut reason = None;
        if let Some(index) = known {
            let step = &self.segments[segment][index];
            if !step.provisional && !step.could_overwrite_more(recorded) {
                return Ok(index);
            }
        }
        let lines = self.lines(segment, recorded);
        if let Some(index) = known {
            self.segments[segment].remove(index);
        } else if let Some(mismatch) = self
            .nearest(segment, recorded)
            .and_then(|step| step.guard.mismatch(recorded))
        {
            let expected = self.segments[segment].iter().all(|step| step.provisional);
            let remedy = if expected {
                history::EXPECTED
            } else {
                mismatch.remedy()
            };
            tracing::info!(
                target: "kiln::recompiles",
                region = %self.options.name,
                segment,
                "{mismatch}; {remedy}"
            );
            reason = Some(mismatch.clone());
            self.recompiles.push(Recompile { segment, mismatch });
        }
        let (backend, provisional) = self.choose_backend(segment, recorded, known.is_some());
        let number = self.compiles.len();
        let folder = self
            .debug
            .as_ref()
            .map(|folder| folder.join(format!("step-{number}")));
        let mut step = Step::compile(
            &self.options,
            backend,
            provisional,
            recorded,
            folder.as_deref(),
            lines,
        )?;
        step.number = number;
        step.stages.insert(0, ("record", self.recorded_in));
        let name = &self.options.name;
        let at = (segment, number);
        history::note_compile(
            name,
            at,
            step.backend,
            step.executable.is_from_cache(),
            &step.stages,
        );
        self.compiles.push(CompileEvent::new(
            at,
            (step.backend, provisional),
            reason,
            step.compile_time,
            step.runs.clone(),
        ));
        let steps = &mut self.segments[segment];
        steps.insert(0, Arc::new(step));
        steps.truncate(self.capacity);
        Ok(0)
    }

    /// The user's line of each operation: looked up while recording, or else those of the step it resembles most.
    fn lines(&self, segment: usize, recorded: &Recorded) -> Vec<Option<Arc<str>>> {
        match recorded.lines.is_empty() {
            false => recorded.lines.clone(),
            true => self
                .nearest(segment, recorded)
                .map_or_else(Vec::new, |step| step.guard.lines_of(recorded)),
        }
    }

    /// The compiled step that agrees longest; none if there is no step.
    fn nearest(&self, segment: usize, recorded: &Recorded) -> Option<&Arc<Step>> {
        self.segments[segment]
            .iter()
            .max_by_key(|step| step.guard.agreement(recorded))
    }

    /// The backend for a new step, and whether it is provisional: the first call of an optimizer has a graph of its own, because the
    /// state does not exist yet, and will not come again.
    fn choose_backend(&mut self, segment: usize, recorded: &Recorded, seen: bool) -> (CompileBackend, bool) {
        let backend = self.options.backend;
        let compiled = self.segments[segment]
            .iter()
            .filter(|step| !step.provisional)
            .count();
        if compiled >= self.options.recompile_limit && backend > CompileBackend::AotEager {
            if !std::mem::replace(&mut self.warned_limit, true) {
                let last = self.recompiles.last().map(|recompile| &recompile.mismatch);
                let failed = last.map(Mismatch::to_string).unwrap_or_default();
                let remedy = last.map_or("keep shapes and control flow the same", Mismatch::remedy);
                tracing::warn!(
                    target: "kiln::recompiles",
                    region = %self.options.name,
                    "recompile limit of {} reached; further steps run on aot_eager, which is slower. Last guard that failed: {failed}. \
                     Likely fix: {remedy}; or raise recompile_limit",
                    self.options.recompile_limit,
                );
            }
            return (CompileBackend::AotEager, false);
        }
        let first = self.segments[segment].is_empty() && !seen;
        if first && backend == CompileBackend::Cpu && creates_state(recorded) {
            return (backend, true);
        }
        (backend, false)
    }

    /// What happened so far.
    pub fn report(&self) -> RegionReport {
        let steps = self.segments.iter().enumerate();
        RegionReport {
            name: self.options.name.clone(),
            calls: self.calls,
            steps: steps
                .flat_map(|(segment, steps)| steps.iter().map(move |step| step.report(segment)))
                .collect(),
            breaks: self.breaks.clone(),
            recompiles: self.recompiles.clone(),
            compiles: self.compiles.clone(),
            recompile_limit: self.options.recompile_limit,
        }
    }
}

/// Whether the step leaves much more behind than it takes away: dying inputs are the state it replaces, and new state exceeds
/// half of that. Only tensors of a type that both ends and is left behind count: a batch that ends in the step is no state, and neither
/// is a loss that is left.
fn creates_state(recorded: &Recorded) -> bool {
    let ending: Vec<&TensorIr> = recorded
        .inputs
        .iter()
        .filter(|input| input.tensor_dies())
        .map(|input| &input.ir)
        .collect();
    let kept: Vec<&TensorIr> = recorded
        .operations
        .iter()
        .flat_map(|operation| operation.outputs())
        .filter(|output| recorded.output_ids.contains(&output.id))
        .collect();
    let bytes_of_types_in = |these: &[&TensorIr], those: &[&TensorIr]| -> usize {
        let alike = |a: &TensorIr, b: &TensorIr| a.dtype == b.dtype && a.shape == b.shape;
        let both = these.iter().filter(|a| those.iter().any(|b| alike(a, b)));
        both.map(|ir| ir.shape.num_elements() * ir.dtype.size()).sum()
    };
    let replaced = bytes_of_types_in(&ending, &kept);
    replaced > 0 && bytes_of_types_in(&kept, &ending) > replaced + replaced / 2
}

impl Step {
    fn compile(
        options: &CompileOptions,
        backend: CompileBackend,
        provisional: bool,
        recorded: &Recorded,
        debug: Option<&Path>,
        lines: Vec<Option<Arc<str>>>,
    ) -> Result<Self, Error> {
        let _span = tracing::info_span!("compile", region = %options.name, %backend).entered();
        let _profiled = kiln_profile::span(Category::Compile, "compile");
        if let Some(folder) = debug {
            history::write_stream(folder, &stream_text::to_text(recorded));
        }
        let mut stages = Stages::default();
        let start = Instant::now();
        let outputs = types_of(recorded, &recorded.output_ids);
        let line = |position: usize| lines.get(position).cloned().flatten();
        let imported = stages
            .time("import", || {
                import::import_located(&recorded.operations, &recorded.output_ids, line)
            })
            .map_err(|source| Error::Import {
                region: options.name.clone(),
                source: source.into(),
            })?;
        let import::Imported {
            mut graph,
            inputs,
            scalars,
        } = imported;
        graph.name = options.name.clone();
        let position = |ir: &TensorIr| recorded.inputs.iter().position(|input| input.ir.id == ir.id);
        let arguments: Vec<usize> = inputs.iter().filter_map(position).collect();
        debug_assert_eq!(
            arguments.len(),
            inputs.len(),
            "import finds no inputs that recording did not"
        );
        let dies: Vec<bool> = arguments
            .iter()
            .map(|&position| recorded.inputs[position].tensor_dies())
            .collect();
        let lasting = lasting_inputs(&graph, &dies)
            .into_iter()
            .map(|argument| arguments[argument])
            .collect();
        kiln_graph::alias::assign_aliases(&mut graph, &dies);
        // Now, while the order of the nodes is that of the recording.
        kiln_partition::assign_phases(&mut graph);
        let scalars = Scalars::new(&recorded.operations, &scalars, &graph);
        let graph = Arc::new(graph);
        let effort = if provisional { Effort::Quick } else { Effort::Full };
        let (executable, backend) = execute::prepare(backend, graph.clone(), options, effort, debug)
            .map_err(|source| Error::Execute {
                region: options.name.clone(),
                source: source.into(),
            })?;
        let checker = Checker::new(&graph, options).map_err(|source| Error::Execute {
            region: options.name.clone(),
            source: source.into(),
        })?;
        let mut stages = stages.times;
        stages.extend_from_slice(executable.stages());
        Ok(Self {
            guard: Guard::new(recorded, lines),
            graph,
            stages,
            number: 0,
            executable,
            checker,
            arguments,
            scalars,
            outputs,
            backend,
            lasting,
            ended: AtomicU64::new(0),
            provisional,
            runs: Arc::default(),
            compile_time: start.elapsed(),
            // Only one backend plans memory; the others allocate value by value.
            ignored_budget: options.memory_budget.filter(|_| backend != CompileBackend::Cpu),
            run_time: AtomicU64::new(0),
            operations: recorded.operations.len(),
        })
    }

    /// Whether the step should be compiled anew because inputs that outlived it then end in it now, so that
    /// outputs can take over their buffers. It must have been so in the run before too: one run in which a
    /// program lets go of a copy is no reason. No guard has failed, and the step stays the same one.
    fn could_overwrite_more(&self, recorded: &Recorded) -> bool {
        let ends = |&input: &usize| recorded.inputs[input].tensor_dies();
        if !self.lasting.iter().any(ends) {
            self.ended.store(0, Ordering::Relaxed);
            return false;
        }
        self.ended.fetch_add(1, Ordering::Relaxed) > 0
    }

    /// Runs the step on `inputs`, one for each input of the recording, in order; inputs nobody else holds may be overwritten. A panic
    /// inside becomes an error. Outputs are in the recording's order and have Burn's types.
    pub fn run(
        &self,
        inputs: Vec<FlexTensor>,
        scalars: &[ScalarIr],
        streams: &[Stream],
    ) -> Result<Vec<FlexTensor>, Error> {
        // Moved, not copied: a second handle would keep the step from overwriting its inputs.
        let mut inputs: Vec<Option<FlexTensor>> = inputs.into_iter().map(Some).collect();
        let arguments = self
            .arguments
            .iter()
            .filter_map(|&position| inputs[position].take());
        let arguments: Vec<FlexTensor> = arguments.collect();
        drop(inputs);
        let tensors = self.guarded(scalars, streams, |scalars| self.run_checked(arguments, scalars))?;
        let tensors = tensors.into_iter().zip(&self.outputs);
        Ok(tensors.map(|(tensor, ir)| with_dtype(tensor, ir.dtype)).collect())
    }

    /// Runs the step on a memory of its arguments ([`Step::argument`]), which keeps the outputs that become arguments of the next run; the
    /// result has none for these. After an error nothing that was there for one run is left.
    pub(super) fn run_on(
        &self,
        memory: &mut Memory,
        scalars: &[ScalarIr],
        streams: &[Stream],
    ) -> Result<Vec<Option<FlexTensor>>, Error> {
        let checked = self.checker.as_ref().is_some_and(Checker::is_due);
        let result = self.guarded(scalars, streams, |scalars| match checked {
            true => memory.run_by(|arguments| self.run_checked(arguments, scalars)),
            false => self.executable.run_on(memory, scalars),
        });
        if result.is_err() {
            memory.clear();
        }
        let tensors = result?.into_iter().zip(&self.outputs);
        Ok(tensors
            .map(|(tensor, ir)| tensor.map(|tensor| with_dtype(tensor, ir.dtype)))
            .collect())
    }

    /// The executable's argument that input `position` of the recording is; none if the graph does not read it.
    pub(super) fn argument(&self, position: usize) -> Option<usize> {
        self.arguments.iter().position(|&input| input == position)
    }

    /// Binds the scalars, and counts, times and guards one run.
    fn guarded<R>(
        &self,
        scalars: &[ScalarIr],
        streams: &[Stream],
        run: impl FnOnce(&[u64]) -> Result<R, ExecuteError>,
    ) -> Result<R, Error> {
        let _span = tracing::info_span!("run", region = %self.graph.name, backend = %self.backend).entered();
        let start = Instant::now();
        let scalars = self.scalars.bind(scalars, streams);
        let result = catch_unwind(AssertUnwindSafe(|| run(&scalars)))
            .unwrap_or_else(|payload| {
                Err(ExecuteError::Panicked {
                    message: panic_message(&*payload),
                })
            })
            .map_err(|source| Error::Execute {
                region: self.graph.name.clone(),
                source: source.into(),
            })?;
        self.runs.fetch_add(1, Ordering::Relaxed);
        self.run_time
            .fetch_add(start.elapsed().as_nanos() as u64, Ordering::Relaxed);
        Ok(result)
    }

    /// Runs the executable, and compares the results with another backend's if that is due.
    fn run_checked(&self, inputs: Vec<FlexTensor>, scalars: &[u64]) -> Result<Vec<FlexTensor>, ExecuteError> {
        let Some(checker) = &self.checker else {
            return self.executable.run(inputs, scalars);
        };
        let Some(copies) = checker.copy(&inputs) else {
            return self.executable.run(inputs, scalars);
        };
        let outputs = self.executable.run(inputs, scalars)?;
        checker.compare(&*self.executable, &self.graph, &copies, scalars, &outputs)?;
        Ok(outputs)
    }

    /// Type and shape of each output.
    pub fn outputs(&self) -> &[TensorIr] {
        &self.outputs
    }

    /// Type and shape of each input.
    pub fn inputs(&self) -> &[String] {
        self.guard.inputs()
    }

    /// Whether the step was prepared for one run only.
    pub fn is_provisional(&self) -> bool {
        self.provisional
    }

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

    fn report(&self, segment: usize) -> StepReport {
        let externs = self.graph.nodes().filter_map(|(_, node)| match &node.op {
            kiln_graph::Op::Extern(op) => Some(op.name.clone()),
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
            scalars: self.scalars.0.len(),
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

/// Burn distinguishes types that are one type here (bools of several widths); the tag is what the program expects.
pub(super) fn with_dtype(tensor: FlexTensor, dtype: DType) -> FlexTensor {
    if tensor.dtype() == dtype || dtype.size() != tensor.dtype().size() {
        return tensor;
    }
    let layout = tensor.layout().clone();
    FlexTensor::from_arc(tensor.data_arc(), layout, dtype)
}

/// The inputs made from data on the host, by position.
fn host_data(recorded: &Recorded) -> FxHashMap<usize, FlexTensor> {
    let made = recorded
        .inputs
        .iter()
        .enumerate()
        .filter(|(_, input)| input.is_host_data());
    made.map(|(index, input)| (index, input.tensor.clone())).collect()
}

/// Arguments that outlive the step and whose buffers outputs would take over if they did not.
fn lasting_inputs(graph: &Graph, dies: &[bool]) -> Vec<usize> {
    let mut all_end = graph.clone();
    kiln_graph::alias::assign_aliases(&mut all_end, &vec![true; dies.len()]);
    let taken = all_end.outputs.iter().filter_map(|output| output.alias);
    taken
        .map(|argument| argument as usize)
        .filter(|&argument| !dies[argument])
        .collect()
}

/// Burn's type and shape of some tensors of a recording.
pub(super) fn types_of(recorded: &Recorded, ids: &[TensorId]) -> Vec<TensorIr> {
    let results = recorded
        .operations
        .iter()
        .flat_map(|operation| operation.outputs());
    let inputs = recorded.inputs.iter().map(|input| &input.ir);
    let by_id: rustc_hash::FxHashMap<_, _> = inputs.chain(results).map(|ir| (ir.id, ir)).collect();
    ids.iter().map(|id| by_id[id].clone()).collect()
}

/// For each runtime scalar of a graph, where it comes from and what it becomes.
#[derive(Debug)]
pub(super) struct Scalars(Vec<(Binding, kiln_graph::DType)>);

impl Scalars {
    /// Translates the scalar sources of an import into positions among the scalars of a recording.
    pub(super) fn new(operations: &[burn_ir::OperationIr], sources: &[ScalarSource], graph: &Graph) -> Self {
        let firsts = stream::first_dynamic_scalars(operations);
        let bind = |source: &ScalarSource| match *source {
            ScalarSource::Operation { op, nth } => Binding::Recorded(firsts[op] + nth),
            ScalarSource::RandomSeed { nth } => Binding::Seed(nth),
            ScalarSource::RandomStream { nth } => Binding::Stream(nth),
        };
        let types = graph.scalars().iter().map(|&value| graph.dtype(value));
        Self(sources.iter().map(bind).zip(types).collect())
    }

    /// The eight bytes of each runtime scalar of the graph.
    pub(super) fn bind(&self, scalars: &[ScalarIr], streams: &[Stream]) -> Vec<u64> {
        let bits = |(binding, dtype): &(Binding, kiln_graph::DType)| match *binding {
            Binding::Recorded(index) => stream::to_scalar(scalars[index]).to_bits(*dtype),
            Binding::Seed(index) => streams[index].seed,
            Binding::Stream(index) => streams[index].stream,
        };
        self.0.iter().map(bits).collect()
    }
}

/// What a panic said.
pub fn panic_message(payload: &(dyn std::any::Any + Send)) -> String {
    let text = payload.downcast_ref::<&str>().map(|text| (*text).to_owned());
    text.or_else(|| payload.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "a panic without a message".to_owned())
}
