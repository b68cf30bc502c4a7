//! A step: one recording, compiled, and its runs.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use burn_ir::{ScalarIr, TensorId, TensorIr};
use kiln_compiler::stages::Stages;
use kiln_family::Outcome;
use kiln_graph::{Dimension, Graph, Phase};
use kiln_profile::Category;

use super::gradient::Source;
use super::guard::Guard;
use super::history;
use super::marks::MarkedInput;
use super::recording::Recorded;
use super::stream_text;
use crate::custom;
use crate::error::Error;
use crate::execute::check::Checker;
use crate::execute::families::Sizes;
use crate::execute::memory::Memory;
use crate::execute::{self, Effort, Executable, ExecuteError, Setting};
use crate::import::{self, ScalarSource};
use crate::options::{CompileBackend, CompileOptions};
use crate::random::Stream;
use crate::ranks;
use crate::storage::Storage;
use crate::stream;

/// A compiled step.
pub struct Step {
    pub(super) guard: Guard,
    pub(super) graph: Arc<Graph>,
    pub(super) executable: Box<dyn Executable>,
    /// Compares the first runs with another backend, if that was asked for.
    checker: Option<Checker>,
    /// For each argument of the graph, the position of the recording's input.
    arguments: Vec<usize>,
    pub(super) scalars: Scalars,
    /// Burn's type and shape of each output.
    pub(super) outputs: Vec<TensorIr>,
    pub(super) backend: CompileBackend,
    /// Ordinal of the GPU, for a backend that runs on one.
    pub(super) gpu: usize,
    /// Dimensions of inputs that the program marked, for this step or for one that it resembles.
    pub(super) marks: Vec<MarkedInput>,
    /// Inputs of the recording whose buffers outputs could take over, had they ended in the step.
    lasting: Vec<usize>,
    /// Runs in a row in which one of them did end.
    ended: AtomicU64,
    /// Prepared for one run only: replaced by the region's own backend if the step comes again.
    pub(super) provisional: bool,
    /// Which step of the region, in the order of compilation.
    pub(super) number: usize,
    pub(super) runs: Arc<AtomicU64>,
    pub(super) compile_time: Duration,
    /// Time in each stage of compilation, recording included.
    pub(super) stages: Vec<(&'static str, Duration)>,
    /// The memory budget asked for, where the backend has no way to keep it.
    pub(super) ignored_budget: Option<usize>,
    /// Nanoseconds, over all runs.
    pub(super) run_time: AtomicU64,
    pub(super) operations: usize,
}

impl Step {
    /// Imports and prepares a recording.
    pub(super) fn compile(
        options: &CompileOptions,
        backend: CompileBackend,
        setting: Setting<'_>,
        recorded: &Recorded,
        (lines, marks): (Vec<Source>, Vec<MarkedInput>),
    ) -> Result<Self, Error> {
        let _span = tracing::info_span!("compile", region = %options.name, %backend).entered();
        let _profiled = kiln_profile::span(Category::Compile, "compile");
        if let Some(folder) = setting.debug {
            history::write_stream(folder, &stream_text::to_text(recorded));
        }
        let mut stages = Stages::default();
        let start = Instant::now();
        let outputs = types_of(recorded, &recorded.output_ids);
        let line = |position: usize| recorded.source(&lines, position);
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
        if let Some(what) = ranks::not_averaged(&graph).filter(|_| options.ranks > 1) {
            return Err(Error::NotAveraged {
                region: options.name.clone(),
                ranks: options.ranks,
                what,
            });
        }
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
        ranks::assign_aliases(&mut graph, &dies);
        // Phases are assigned now, while the order of the nodes is that of the recording.
        kiln_partition::assign_phases(&mut graph);
        let scalars = Scalars::new(&recorded.operations, &scalars, &graph);
        let graph = Arc::new(graph);
        let gpu = recorded.gpu().unwrap_or(0);
        let sizes = sizes(&graph, options, &marks, &arguments);
        let setting = Setting {
            sizes: Some(&sizes),
            ..setting
        };
        let (executable, backend) =
            execute::prepare(backend, gpu, graph.clone(), options, setting).map_err(|source| {
                Error::Execute {
                    region: options.name.clone(),
                    source: source.into(),
                }
            })?;
        if backend == CompileBackend::Cuda {
            let externs = graph.nodes().filter_map(|(_, node)| match &node.op {
                kiln_graph::Op::Extern(op) if !ranks::is_of_ranks(&node.op) => Some(op.name.clone()),
                _ => None,
            });
            custom::say_that_copies(externs);
        }
        let checker = Checker::new(&graph, backend, gpu, options).map_err(|source| Error::Execute {
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
            gpu,
            marks,
            lasting,
            ended: AtomicU64::new(0),
            provisional: setting.effort == Effort::Quick,
            runs: Arc::default(),
            compile_time: start.elapsed(),
            // A backend that does not compile plans no memory: it allocates value by value.
            ignored_budget: options.memory_budget.filter(|_| !backend.compiles()),
            run_time: AtomicU64::new(0),
            operations: recorded.operations.len(),
        })
    }

    /// Whether the step should be compiled anew, because inputs that outlived it when it was compiled end
    /// in it now, so that outputs can take over their buffers. This must have been so in the run before
    /// too: one run in which a program drops a copy is no reason. No guard has failed, and the step stays
    /// the same one.
    pub(super) fn could_overwrite_more(&self, recorded: &Recorded) -> bool {
        let ends = |&input: &usize| recorded.inputs[input].tensor_dies();
        if !self.lasting.iter().any(ends) {
            self.ended.store(0, Ordering::Relaxed);
            return false;
        }
        self.ended.fetch_add(1, Ordering::Relaxed) > 0
    }

    /// Whether nothing had to be compiled for it: it is another size of a step before, whose kernels it has.
    pub(super) fn is_absorbed(&self) -> bool {
        self.executable.outcome() == Some(&Outcome::Known)
    }

    /// Whether sizes are variables of its kernels.
    pub(super) fn shares_sizes(&self) -> bool {
        matches!(
            self.executable.outcome(),
            Some(Outcome::Known | Outcome::Built { .. } | Outcome::General { .. })
        )
    }

    /// Runs the step on `inputs`, one for each input of the recording, in order; inputs that no other
    /// handle shares may be overwritten. A panic inside becomes an error. Outputs are in the recording's
    /// order and have Burn's types.
    ///
    /// The inputs leave their list, unless the step had overwritten nothing
    /// ([`Error::is_before_overwriting`]): they are then as they were.
    pub fn run(
        &self,
        inputs: &mut Vec<Storage>,
        scalars: &[ScalarIr],
        streams: &[Stream],
    ) -> Result<Vec<Storage>, Error> {
        // Moved, not copied: a second handle would keep the step from overwriting its inputs.
        let mut given: Vec<Option<Storage>> = inputs.drain(..).map(Some).collect();
        let arguments = self
            .arguments
            .iter()
            .filter_map(|&position| given[position].take());
        let mut arguments: Vec<Storage> = arguments.collect();
        let tensors = self.guarded(scalars, streams, |scalars| {
            self.run_checked(&mut arguments, scalars)
        });
        let tensors = match tensors {
            Ok(tensors) => tensors,
            Err(error) => {
                if error.is_before_overwriting() {
                    for (&position, argument) in self.arguments.iter().zip(arguments) {
                        given[position] = Some(argument);
                    }
                    inputs.extend(given.into_iter().flatten());
                }
                return Err(error);
            }
        };
        let tensors = tensors.into_iter().zip(&self.outputs);
        Ok(tensors.map(|(tensor, ir)| tensor.with_dtype(ir.dtype)).collect())
    }

    /// Runs the step on a memory of its arguments ([`Step::argument`]), which keeps the outputs that become
    /// arguments of the next run; the result has none for these. After an error the tensors that were given
    /// for one run are gone, unless the step had overwritten nothing ([`Error::is_before_overwriting`]):
    /// the memory is then as it was.
    pub(super) fn run_on(
        &self,
        memory: &mut Memory,
        scalars: &[ScalarIr],
        streams: &[Stream],
    ) -> Result<Vec<Option<Storage>>, Error> {
        let checked = self.checker.as_ref().is_some_and(Checker::is_due);
        let result = self.guarded(scalars, streams, |scalars| match checked {
            true => memory.run_by(|arguments| self.run_checked(arguments, scalars)),
            false => self.executable.run_on(memory, scalars),
        });
        if result.as_ref().is_err_and(|error| !error.is_before_overwriting()) {
            memory.clear();
        }
        let tensors = result?.into_iter().zip(&self.outputs);
        Ok(tensors
            .map(|(tensor, ir)| tensor.map(|tensor| tensor.with_dtype(ir.dtype)))
            .collect())
    }

    /// The executable's argument that input `position` of the recording is; none if the graph does not read
    /// it.
    pub(super) fn argument(&self, position: usize) -> Option<usize> {
        self.arguments.iter().position(|&input| input == position)
    }

    /// The input of the recording that each argument of the graph is, by position.
    pub(super) fn argument_positions(&self) -> &[usize] {
        &self.arguments
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

    /// Runs the executable, and compares the results with another backend's if that is due. Inputs whose
    /// results differ are in their list again.
    fn run_checked(&self, inputs: &mut Vec<Storage>, scalars: &[u64]) -> Result<Vec<Storage>, ExecuteError> {
        let Some(checker) = &self.checker else {
            return self.executable.run_given(inputs, scalars);
        };
        let Some(copies) = checker.copy(inputs) else {
            return self.executable.run_given(inputs, scalars);
        };
        let outputs = self.executable.run_given(inputs, scalars)?;
        match checker.compare(&*self.executable, &self.graph, &copies, scalars, &outputs) {
            Ok(()) => Ok(outputs),
            Err(error) => {
                *inputs = copies;
                Err(error)
            }
        }
    }

    /// Whether both were compiled for one step: with equal operations, shapes and results left behind.
    pub fn is_same(&self, other: &Self) -> bool {
        std::ptr::eq(self, other) || self.guard.is_same(&other.guard)
    }

    /// Type and shape of each output.
    pub fn outputs(&self) -> &[TensorIr] {
        &self.outputs
    }

    /// Type and shape of each input.
    pub fn inputs(&self) -> &[String] {
        self.guard.inputs()
    }

    /// The user's line of the operation that takes runtime scalar `index`; none if it is not known.
    pub fn scalar_line(&self, index: usize) -> Option<&str> {
        self.guard.scalar_line(index)
    }

    /// Whether the step was prepared for one run only.
    pub fn is_provisional(&self) -> bool {
        self.provisional
    }
}

/// Arguments that outlive the step and whose buffers outputs would take over if they did not.
fn lasting_inputs(graph: &Graph, dies: &[bool]) -> Vec<usize> {
    let mut all_end = graph.clone();
    ranks::assign_aliases(&mut all_end, &vec![true; dies.len()]);
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

/// Where a runtime scalar comes from.
#[derive(Clone, Copy, Debug)]
pub(super) enum Binding {
    /// The k-th scalar of the recording.
    Recorded(usize),
    /// The generator's seed, as the k-th random operation found it.
    Seed(usize),
    /// The stream of the k-th random operation.
    Stream(usize),
}

/// For each runtime scalar of a graph, its source and its type.
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

    /// Where each comes from, and its type in the graph.
    pub(super) fn sources(&self) -> impl Iterator<Item = (Binding, kiln_graph::DType)> {
        self.0.iter().copied()
    }

    /// How many there are.
    pub(super) fn len(&self) -> usize {
        self.0.len()
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

/// The message of a panic.
pub fn panic_message(payload: &(dyn std::any::Any + Send)) -> String {
    let text = payload.downcast_ref::<&str>().map(|text| (*text).to_owned());
    text.or_else(|| payload.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "a panic without a message".to_owned())
}

/// Which dimensions of a graph's arguments vary; `arguments` has the recording's input of each one. State
/// that the optimizer replaces keeps its shape.
fn sizes(graph: &Graph, options: &CompileOptions, marks: &[MarkedInput], arguments: &[usize]) -> Sizes {
    let dimension = |marked: &MarkedInput| {
        let parameter = arguments.iter().position(|&input| input == marked.input)?;
        let dimension = Dimension {
            parameter: parameter as u32,
            axis: marked.mark.axis,
        };
        Some((dimension, marked.mark))
    };
    let mut varies = vec![true; graph.parameters().len()];
    if !marks.is_empty() {
        // Which arguments the optimizer would replace, whether or not they end in this call.
        let mut updates = graph.clone();
        kiln_graph::alias::assign_aliases(&mut updates, &vec![true; varies.len()]);
        for output in &updates.outputs {
            let is_update = graph.def(output.value).provenance.phase == Phase::Optimizer;
            if let (true, Some(parameter)) = (is_update, output.alias) {
                varies[parameter as usize] = false;
            }
        }
    }
    Sizes {
        dynamic: options.dynamic,
        marks: marks.iter().filter_map(dimension).collect(),
        inputs: arguments.to_vec(),
        varies,
    }
}
