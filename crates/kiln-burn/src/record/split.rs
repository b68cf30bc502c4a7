//! A forward pass compiled by itself, with a backward pass that is compiled, too, and runs later.
//!
//! The input is a trace ([`super::CompiledRegion::trace`]) of the forward pass and of its gradients with
//! respect to some inputs, given the gradients of its outputs: *tangents*, inputs of the trace whose
//! elements do not matter. kiln-partition splits the joint graph; the region's backend prepares the two
//! halves. [`SplitStep::forward`] runs the first and returns the tensors that the second needs,
//! [`SplitStep::backward`] runs the second, or what is needed of it for the outputs that a loss uses
//! ([`backward`]).

mod backward;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use burn_ir::{TensorId, TensorIr};
use kiln_compiler::CompileError;
use kiln_graph::Graph;
use kiln_partition::{OutputRole, SavedSource, Split};
use rustc_hash::FxHashSet;

use backward::{Backward, Prepare};

use super::deferred;
use super::gradient;
use super::guard::{self, Guard, Mismatch};
use super::recording::Recorded;
use super::salvage;
use super::step::{Scalars, panic_message, types_of};
use crate::error::Error;
use crate::execute::{self, Executable, ExecuteError};
use crate::import;
use crate::options::{CompileBackend, CompileOptions};
use crate::storage::Storage;
use crate::table;

/// The compiled halves of one function, by what was recorded.
pub struct SplitRegion {
    /// How the halves are compiled. A memory budget is for both together.
    options: CompileOptions,
    frozen: AtomicBool,
    compiled: Mutex<Compiled>,
}

#[derive(Default)]
struct Compiled {
    steps: Vec<Arc<SplitStep>>,
    /// The mismatches that made further compilations necessary.
    recompiles: Vec<Mismatch>,
}

/// A compiled forward pass and its compiled backward pass.
pub struct SplitStep {
    guard: Guard,
    /// Where the gradients and tangents are in the recording.
    places: Vec<Option<Place>>,
    name: String,
    forward: Box<dyn Executable>,
    backward: Backward,
    /// For each tensor argument of the forward pass, the position of the recording's input.
    arguments: Vec<usize>,
    scalars: Scalars,
    saved: Vec<SavedSource>,
    /// A memory budget that was asked for and that the backend does not support.
    ignored_budget: Option<usize>,
    /// Positions, among the recording's results that are no gradients, of the first results of the forward
    /// pass.
    results: Vec<TensorIr>,
    gradients: Vec<TensorIr>,
    reached: Vec<Vec<bool>>,
}

/// A tensor of a trace, by position.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Place {
    Result(usize),
    Input(usize),
}

/// What a trace computes besides the function, by the tensors of the trace.
#[derive(Clone, Copy, Debug)]
pub struct Differentiated<'a> {
    /// The gradients of some inputs.
    pub gradients: &'a [TensorId],
    /// The gradients of the outputs, from which those of the inputs follow.
    pub tangents: &'a [TensorId],
    /// For each tangent, the position of its output among all tensors of the function's result: its name in
    /// reports.
    pub outputs: &'a [usize],
}

/// The tensors that the backward pass needs of a forward pass that ran.
#[derive(Clone, Debug)]
pub struct Saved {
    tensors: Vec<Storage>,
    scalars: Vec<u64>,
}

impl std::fmt::Debug for SplitStep {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SplitStep")
            .field("name", &self.name)
            .finish_non_exhaustive()
    }
}

impl SplitRegion {
    /// A region that has compiled nothing.
    pub fn new(options: CompileOptions) -> Self {
        Self {
            frozen: AtomicBool::new(options.frozen),
            options,
            compiled: Mutex::default(),
        }
    }

    /// From now on a trace that would have to be compiled is an error.
    pub fn freeze(&self) {
        self.frozen.store(true, Ordering::Relaxed);
    }

    /// Takes [`SplitRegion::freeze`] back.
    pub fn unfreeze(&self) {
        self.frozen.store(false, Ordering::Relaxed);
    }

    /// Runs the forward pass of a trace, compiled before or now, and enters its results into the table.
    ///
    /// # Errors
    ///
    /// If the trace cannot be imported, split, compiled or run. The effects of the function have happened
    /// all the same ([`super::salvage`]).
    pub fn run(&self, recorded: Recorded, of: Differentiated<'_>) -> Result<(Arc<SplitStep>, Saved), Error> {
        let ran = self
            .step(&recorded, of)
            .and_then(|step| Ok((step.forward(&recorded)?, step)));
        match ran {
            Ok(((tensors, saved), step)) => {
                let ids = results(&recorded, of.gradients).into_iter();
                ids.zip(tensors)
                    .for_each(|(id, tensor)| table::insert(id, tensor));
                Ok((step, saved))
            }
            Err(error @ Error::Frozen { .. }) => {
                deferred::enter(&self.options, recorded);
                Err(error)
            }
            Err(error) => {
                self.salvage(recorded);
                Err(error)
            }
        }
    }

    /// Runs a trace that is not going to be compiled, for the tensors that it leaves behind.
    pub fn salvage(&self, recorded: Recorded) {
        salvage::run(&self.options, recorded);
    }

    /// The error for a function that uses a tensor from outside which follows from trained ones.
    pub fn tracked_capture(&self) -> Error {
        Error::TrackedCapture {
            region: self.options.name.clone(),
        }
    }

    /// The compiled halves for a trace, new or known.
    fn step(&self, recorded: &Recorded, of: Differentiated<'_>) -> Result<Arc<SplitStep>, Error> {
        let places = places(recorded, of);
        let mut compiled = self.compiled();
        let Compiled { steps, recompiles } = &mut *compiled;
        if let Some(step) = steps.iter().find(|step| step.fits(recorded, &places)) {
            return Ok(step.clone());
        }
        let nearest = steps.iter().max_by_key(|step| step.guard.agreement(recorded));
        let mismatch = nearest.and_then(|step| step.guard.mismatch(recorded));
        if self.frozen.load(Ordering::Relaxed) {
            return Err(Error::frozen(&self.options.name, mismatch.as_ref()));
        }
        if let Some(mismatch) = mismatch {
            tracing::info!(target: "kiln::recompiles", region = %self.options.name, "{mismatch}");
            recompiles.push(mismatch);
        }
        let mut backend = self.options.backend.on(recorded.gpu());
        if steps.len() >= self.options.recompile_limit && backend > CompileBackend::AotEager {
            // Other ranks, which may be behind the limit or not, wait for what this function exchanges.
            let exchanges = recorded.is_of_ranks();
            kiln_log::warn!(
                target: "kiln::recompiles",
                region = %self.options.name,
                "recompile limit of {} reached; further forward passes {}.{}",
                self.options.recompile_limit,
                guard::behind_limit(exchanges),
                guard::advice(recompiles.iter(), None),
            );
            if !exchanges {
                backend = CompileBackend::AotEager;
            }
        }
        let step = SplitStep::compile(&self.options, backend, recorded, of, places)?;
        let step = Arc::new(step);
        steps.push(step.clone());
        Ok(step)
    }

    fn compiled(&self) -> MutexGuard<'_, Compiled> {
        self.compiled.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How many forward passes were compiled.
    pub fn count(&self) -> usize {
        self.compiled().steps.len()
    }

    /// A report on what was compiled and why, for people.
    pub fn report(&self) -> String {
        let (steps, recompiles) = {
            let compiled = self.compiled();
            (compiled.steps.clone(), compiled.recompiles.clone())
        };
        let steps = steps.iter().map(|step| {
            format!(
                "forward and backward pass, {} tensors saved between them\n  forward: {}\n  backward: {}\n",
                step.saved.len(),
                step.forward.report(),
                step.backward
            ) + &step.ignored_budget.map_or_else(String::new, |bytes| {
                format!(
                    "  the memory budget of {bytes} bytes has no effect: only the backend cpu plans memory\n"
                )
            })
        });
        let recompiles = recompiles.iter();
        steps
            .chain(recompiles.map(|mismatch| format!("recompiled: {mismatch}\n")))
            .collect()
    }
}

/// Which of the `gradients` follow from the tensor `from`.
fn reached(recorded: &Recorded, from: TensorId, gradients: &[TensorId]) -> Vec<bool> {
    let mut following = FxHashSet::from_iter([from]);
    for operation in &recorded.operations {
        if operation.inputs().any(|input| following.contains(&input.id)) {
            following.extend(operation.outputs().map(|output| output.id));
        }
    }
    gradients.iter().map(|id| following.contains(id)).collect()
}

fn places(recorded: &Recorded, of: Differentiated<'_>) -> Vec<Option<Place>> {
    let ids = of.gradients.iter().chain(of.tangents);
    ids.map(|&id| place(recorded, id)).collect()
}

fn place(recorded: &Recorded, id: TensorId) -> Option<Place> {
    let result = recorded.output_ids.iter().position(|&own| own == id);
    let input = || recorded.inputs.iter().position(|input| input.ir.id == id);
    result.map(Place::Result).or_else(|| input().map(Place::Input))
}

/// The joint graph as one graph for each pass, as `backend` needs them.
fn cut(
    (backend, gpu): (CompileBackend, usize),
    graph: &Graph,
    tangents: &[u32],
    roles: &[OutputRole],
    options: &CompileOptions,
) -> Result<Split, ExecuteError> {
    match backend {
        CompileBackend::Cpu => match execute::cpu::split(graph, tangents, roles, options) {
            // The halves are going to run on another backend, and a warning says so.
            Err(ExecuteError::NoCompiler(_)) => {}
            other => return other,
        },
        CompileBackend::Cuda => return execute::cuda::split(gpu, graph, tangents, roles, options),
        _ => {}
    }
    let choices = kiln_partition::Options::default();
    let split = kiln_partition::split(graph, tangents, roles, &choices);
    Ok(split.map_err(CompileError::from)?)
}

impl SplitStep {
    fn compile(
        options: &CompileOptions,
        backend: CompileBackend,
        recorded: &Recorded,
        Differentiated {
            gradients,
            tangents,
            outputs: positions,
        }: Differentiated<'_>,
        places: Vec<Option<Place>>,
    ) -> Result<Self, Error> {
        let _span = tracing::info_span!("compile_split", region = %options.name, %backend).entered();
        let failed = |source: ExecuteError| Error::Execute {
            region: options.name.clone(),
            source: source.into(),
        };
        let gpu = recorded.gpu().unwrap_or(0);
        let results = results(recorded, gradients);
        let outputs: Vec<TensorId> = results.iter().chain(gradients).copied().collect();
        let sources = gradient::sources(&recorded.operations, &recorded.lines, &recorded.full_precision);
        let imported = import::import_located(&recorded.operations, &outputs, |position| {
            recorded.source(&sources, position)
        })
        .map_err(|source| Error::Import {
            region: options.name.clone(),
            source: source.into(),
        })?;
        let scalars = Scalars::new(&recorded.operations, &imported.scalars, &imported.graph);
        let mut graph = imported.graph;
        graph.name.clone_from(&options.name);
        let position = |id: TensorId| recorded.inputs.iter().position(|input| input.ir.id == id);
        // In the order in which the backward pass is going to get them.
        let tangent_arguments: Vec<u32> = tangents
            .iter()
            .filter_map(|&id| imported.inputs.iter().position(|ir| ir.id == id))
            .map(|index| index as u32)
            .collect();
        let arguments = imported
            .inputs
            .iter()
            .filter(|ir| !tangents.contains(&ir.id))
            .filter_map(|ir| position(ir.id))
            .collect();
        let mut roles = vec![OutputRole::Forward; results.len()];
        roles.resize(outputs.len(), OutputRole::Gradient);
        let split = cut((backend, gpu), &graph, &tangent_arguments, &roles, options).map_err(failed)?;
        // The budget has been spent on the cut: a half by itself has nothing to recompute.
        let half = CompileOptions {
            memory_budget: None,
            ..options.clone()
        };
        let prepare = Prepare {
            backend,
            gpu,
            options: half,
        };
        let (forward, ran) = prepare.prepare(Arc::new(split.forward)).map_err(failed)?;
        let backward = Backward::new(split.backward, split.saved.len(), positions, prepare);
        let backward = backward.map_err(failed)?;
        let planned = ran.compiles() && backward.compiles();
        Ok(Self {
            guard: Guard::new(recorded, sources),
            places,
            name: options.name.clone(),
            forward,
            backward,
            arguments,
            scalars,
            saved: split.saved,
            // A backend that does not compile plans no memory: it allocates value by value.
            ignored_budget: options.memory_budget.filter(|_| !planned),
            results: types_of(recorded, &results),
            gradients: types_of(recorded, gradients),
            reached: tangents
                .iter()
                .map(|&tangent| reached(recorded, tangent, gradients))
                .collect(),
        })
    }

    fn fits(&self, recorded: &Recorded, places: &[Option<Place>]) -> bool {
        self.places == places && self.guard.accepts(recorded)
    }

    /// For tangent `index`, whether each gradient follows from it. The other gradients are those of inputs
    /// that the output does not depend on.
    pub fn reached(&self, index: usize) -> &[bool] {
        &self.reached[index]
    }

    /// Runs the forward pass of `recorded`. The results are those of the recording that are no gradients, in
    /// order.
    fn forward(&self, recorded: &Recorded) -> Result<(Vec<Storage>, Saved), Error> {
        let scalars = self.scalars.bind(&recorded.scalars, &recorded.streams);
        let inputs: Vec<Storage> = self
            .arguments
            .iter()
            .map(|&position| recorded.inputs[position].tensor.clone())
            .collect();
        let outputs = self.run(&*self.forward, inputs.clone(), &scalars)?;
        let tensors = self.saved.iter().map(|source| match *source {
            SavedSource::Input(index) => inputs[index as usize].clone(),
            SavedSource::Output(index) => outputs[index as usize].clone(),
        });
        let tensors = tensors.collect();
        let results = outputs.into_iter().zip(&self.results);
        let results = results.map(|(tensor, ir)| tensor.with_dtype(ir.dtype)).collect();
        Ok((results, Saved { tensors, scalars }))
    }

    /// The gradients, given those of the outputs in the order of the tangents; none of an output that the
    /// loss does not use. The first loss of each different set of outputs compiles the backward pass for
    /// those.
    ///
    /// # Errors
    ///
    /// If the backward pass cannot be compiled or fails.
    pub fn backward(&self, saved: Saved, tangents: Vec<Option<Storage>>) -> Result<Vec<Storage>, Error> {
        let given: Vec<bool> = tangents.iter().map(Option::is_some).collect();
        let backward = self.backward.of(&given).map_err(|source| Error::Execute {
            region: self.name.clone(),
            source,
        })?;
        let inputs = saved.tensors.into_iter().chain(tangents.into_iter().flatten());
        let gradients = self
            .run(&*backward, inputs.collect(), &saved.scalars)?
            .into_iter();
        let typed = gradients.zip(&self.gradients);
        Ok(typed.map(|(tensor, ir)| tensor.with_dtype(ir.dtype)).collect())
    }

    fn run(
        &self,
        executable: &dyn Executable,
        inputs: Vec<Storage>,
        scalars: &[u64],
    ) -> Result<Vec<Storage>, Error> {
        let run = AssertUnwindSafe(|| executable.run(inputs, scalars));
        let result = catch_unwind(run).unwrap_or_else(|payload| {
            Err(ExecuteError::Panicked {
                message: panic_message(&*payload),
            })
        });
        result.map_err(|source| Error::Execute {
            region: self.name.clone(),
            source: source.into(),
        })
    }
}

/// The results of a trace that outlive it and are no gradients: the function's results, and state that it
/// updates on its way.
fn results(recorded: &Recorded, gradients: &[TensorId]) -> Vec<TensorId> {
    let ids = recorded.output_ids.iter().copied();
    ids.filter(|id| !gradients.contains(id)).collect()
}
