//! `TrainStep`: a training step that is traced once and replayed.
//!
//! The first calls run the loss closure, Burn's autograd and the optimizer under recording, like [`crate::compile`]. When two calls in a row were
//! the same step, the flow of state is known (`kiln_burn::record::replay`) and no model or autograd code runs any more. What still changes from step to
//! step are the optimizer's scalars: learning rate, bias correction. They come from the optimizer's own host code, run on a few parameters in a rehearsal ([`rehearsal`]).
//!
//! ```text
//!   call 1     recorded: the steady step, compiled
//!   call 2     recorded and checked: same step again, rehearsed scalars equal the recorded ones
//!   call 3 ..  replayed
//! ```
//!
//! An optimizer whose state does not start from zeros ([`zeros`]) needs one call more: the first creates the state, by a graph of its own.
//!
//! Anything the replay does not cover (another batch shape, a step whose host code takes another branch, state that the program replaced) is recorded again; the
//! optimizer's state is brought up to date first ([`rehearsal::Rehearsal::catch_up`]). Calls 4, 8, 16, .. are proofs: they are recorded although they could be replayed, and compared with
//! the plan ([`plan`]).

mod backup;
mod export;
mod history;
mod ownership;
mod places;
mod plan;
mod rehearsal;
mod zeros;

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, Ordering};

use burn_backend::AutodiffBackend;
use burn_core::module::AutodiffModule;
use burn_ir::TensorIr;
use burn_optim::adaptor::OptimizerAdaptor;
use burn_optim::{GradientsParams, LearningRate, Optimizer, SimpleOptimizer};
use burn_tensor::Tensor;
use kiln_burn::record::{self, Call, Place, Position};
use kiln_burn::{CompileBackend, CompileOptions, CompiledRegion, Error, Kiln, RegionReport};
use kiln_profile::Category;

use crate::explain::Explain;
use crate::input::{KilnBackend, KilnTensor, Signature, StepInput, inspect};
use backup::Backup;
pub use export::ExportError;
pub use history::{Cause, History};
use places::{Cells, Found};
use plan::{Obstacle, Plan, Scrutiny, Trace};
use rehearsal::{Rehearsal, trained_parameters};

/// The backends a model can be trained on: `Autodiff<Kiln>`, with any checkpointing strategy.
pub trait TrainBackend: KilnBackend + AutodiffBackend<InnerBackend = Kiln> {}

impl<B: KilnBackend + AutodiffBackend<InnerBackend = Kiln>> TrainBackend for B {}

/// An optimizer that [`TrainStep`] can drive: every `SimpleOptimizer` of burn-optim, as its `init` makes it, with or without gradient clipping.
#[diagnostic::on_unimplemented(
    message = "`TrainStep` cannot drive `{Self}`",
    label = "not an `OptimizerAdaptor` around a `SimpleOptimizer`",
    note = "an optimizer that evaluates the model itself, such as `LBFGS`, has no single step to replay: compile what it evaluates, loss and gradients, with \
            `kiln::compile(..).run(..)` inside its closure, and leave the optimizer outside"
)]
pub trait StepOptimizer<B: TrainBackend, M: AutodiffModule<B>>: Optimizer<M, B> {
    /// The optimizer's rule for one tensor.
    type Simple: SimpleOptimizer<Kiln>;

    /// As the adaptor it is.
    fn into_adaptor(self) -> OptimizerAdaptor<Self::Simple, M, B>;
}

impl<B: TrainBackend, M: AutodiffModule<B>, O: SimpleOptimizer<Kiln>> StepOptimizer<B, M>
    for OptimizerAdaptor<O, M, B>
{
    type Simple = O;

    fn into_adaptor(self) -> OptimizerAdaptor<O, M, B> {
        self
    }
}

/// What the loss closure of a [`TrainStep`] returns: the loss, alone or first in a pair with anything else that should leave the step (logits,
/// metrics). Both leave without their autodiff history.
pub trait StepOutput<B: TrainBackend>: StepInput + Clone {
    /// The loss whose gradients train the model, of one element.
    fn loss(&self) -> Tensor<B, 1>;
}

impl<B: TrainBackend> StepOutput<B> for Tensor<B, 1> {
    fn loss(&self) -> Tensor<B, 1> {
        self.clone()
    }
}

impl<B: TrainBackend, A: StepInput + Clone> StepOutput<B> for (Tensor<B, 1>, A) {
    fn loss(&self) -> Tensor<B, 1> {
        self.0.clone()
    }
}

/// Why a training step failed.
#[derive(Clone, Debug, thiserror::Error)]
pub enum TrainError {
    /// The step could not be compiled or run.
    #[error(transparent)]
    Step(#[from] Error),
    /// Model and optimizer were lost in an earlier step that failed after it had consumed them.
    #[error(
        "the training step has no model any more: an earlier step failed while it replaced the parameters; restart from a checkpoint"
    )]
    Lost,
    /// Under [`CompileOptions::strict`]: the closure is not the same function of its input at every call. The call that noticed was recorded, so that its own update is right.
    #[error(
        "the training step is not the same at every call: {what}. Replayed calls after call {last_equal}, when it was last seen equal, may have used old values (noticed at \
         call {call}); pass what changes as an input of the step"
    )]
    Changed {
        /// What changed.
        what: String,
        /// The last recorded call that agreed with what was replayed, counted from 1.
        last_equal: u64,
        /// The call that noticed.
        call: u64,
    },
}

/// Builds a [`TrainStep`]: made by [`TrainStep::new`].
pub struct TrainStepBuilder<B: TrainBackend, M: AutodiffModule<B>, O: SimpleOptimizer<Kiln>, F> {
    model: M,
    optim: OptimizerAdaptor<O, M, B>,
    loss: F,
    start: Start<B, M, O>,
    options: CompileOptions,
}

/// Makes the state that an optimizer starts from ([`zeros::start`]).
type Start<B, M, O> = fn(OptimizerAdaptor<O, M, B>, &M, &GradientsParams) -> OptimizerAdaptor<O, M, B>;

impl<B: TrainBackend, M: AutodiffModule<B> + Clone, O: SimpleOptimizer<Kiln>, F>
    TrainStepBuilder<B, M, O, F>
{
    /// Sets how the step is compiled.
    pub fn with_options(mut self, options: CompileOptions) -> Self {
        self.options = options;
        self
    }

    /// Sets what runs the compiled step.
    pub fn with_backend(mut self, backend: CompileBackend) -> Self {
        self.options.backend = backend;
        self
    }

    /// Makes the step. Nothing is compiled before the first call.
    pub fn build<I, L>(self) -> Result<TrainStep<B, M, O, F, I, L>, TrainError>
    where
        F: Fn(&M, I) -> L,
        I: StepInput,
        L: StepOutput<B>,
    {
        crate::log::init_if_asked();
        Ok(TrainStep {
            replays: self.options.backend != CompileBackend::Eager,
            strict: self.options.strict,
            region: CompiledRegion::new(self.options).for_replay(),
            trained: Some((self.model, self.optim)),
            loss: self.loss,
            start: self.start,
            traces: Vec::new(),
            plan: None,
            lent: AtomicBool::new(false),
            was_lent: false,
            cells: None,
            asked: None,
            rate: None,
            history: History::default(),
            types: std::marker::PhantomData,
        })
    }
}

/// A training step that owns model and optimizer.
///
/// Parameters that were not used before the first step are drawn in the first call, in the order of their use, as in a loop without `TrainStep`.
///
/// `F` is the loss closure: `Fn(&M, I) -> L` with an input `I` ([`StepInput`]) and an output `L` ([`StepOutput`]). The closure runs on the first calls
/// and on a few later ones, therefore it should compute the same function of its input at every call. Its random operations (dropout) draw new numbers at each call all the
/// same. What it does besides is noticed:
///
/// - A closure that reads a tensor on the host, returns a plain number, or keeps a tensor from call to call outside the model is recorded at every call, with a
///   warning that names the reason and the line ([`History::obstacle`]).
/// - A captured tensor that the program drops or replaces, and state of the model that it replaces, end the replay; the step is recorded once or twice and replayed again.
/// - Calls 4, 8, 16, .. and every 1024th are recorded again and compared. A number counted in a `Cell`, say, is found there: a warning names it (an error under
///   [`CompileOptions::strict`]), and the step is recorded from then on.
pub struct TrainStep<B: TrainBackend, M: AutodiffModule<B>, O: SimpleOptimizer<Kiln>, F, I, L> {
    region: CompiledRegion,
    /// None once a step failed half way.
    trained: Option<(M, OptimizerAdaptor<O, M, B>)>,
    loss: F,
    start: Start<B, M, O>,
    /// The last recorded call of each of the last few signatures.
    traces: Vec<Trace>,
    plan: Option<Plan<B, M, O, L>>,
    /// Whether the model was shown to the program, which may have copied it, since the last step.
    lent: AtomicBool,
    /// Whether it ever was: the program may have a clone, which shares cells with the model.
    was_lent: bool,
    /// Which tensors of the model are in cells that clones share; none before the first call.
    cells: Option<Cells>,
    /// Why the next call is recorded, if something since the last one decided that.
    asked: Option<Cause>,
    /// The learning rate of the last call; none before the first.
    rate: Option<LearningRate>,
    /// Whether replay is tried at all.
    replays: bool,
    /// Whether a closure that is not the same function at every call is an error.
    strict: bool,
    history: History,
    types: std::marker::PhantomData<fn(I) -> L>,
}

/// What the closure of a recorded call leaves behind.
struct Recorded<M, T, L> {
    trained: (M, T),
    output: L,
    optimizer: Option<Position>,
    /// The optimizer's tensors before the update.
    optimizer_before: Vec<Found>,
}

/// Signatures whose last recorded call is kept.
const TRACES: usize = 8;

/// From here on every so many calls are proofs; before, those whose number is a power of two, from 4 on.
const PROOF_EVERY: u64 = 1024;

/// Whether call `number` is recorded, though it could be replayed, and compared with the plan.
const fn is_proof(number: u64) -> bool {
    number.is_multiple_of(PROOF_EVERY) || (number >= 4 && number.is_power_of_two())
}

impl<B, M, O, F> TrainStep<B, M, O, F, (), ()>
where
    B: TrainBackend,
    M: AutodiffModule<B> + Clone,
    O: SimpleOptimizer<Kiln> + 'static,
{
    /// Begins a training step of `model` with `optim` and the loss closure `loss`.
    #[allow(clippy::new_ret_no_self)] // `new` begins, `build` makes: the shape of Burn's own builders.
    pub fn new(
        model: M,
        optim: impl StepOptimizer<B, M, Simple = O>,
        loss: F,
    ) -> TrainStepBuilder<B, M, O, F> {
        let options = CompileOptions::default().with_name("train_step");
        TrainStepBuilder {
            model,
            optim: optim.into_adaptor(),
            loss,
            start: zeros::start,
            options,
        }
    }
}

impl<B, M, O, F, I, L> TrainStep<B, M, O, F, I, L>
where
    B: TrainBackend,
    M: AutodiffModule<B> + Clone,
    O: SimpleOptimizer<Kiln>,
    F: Fn(&M, I) -> L,
    I: StepInput,
    L: StepOutput<B>,
{
    /// Trains on one input: forward, backward, update with learning rate `lr`. Returns what the closure returned, outside any autodiff graph.
    ///
    /// # Errors
    ///
    /// If the step cannot be compiled or run. Model and optimizer are then as before the call, unless the step failed when it had begun to replace
    /// parameters: they are lost then, and every later call says so.
    ///
    /// # Panics
    ///
    /// If the closure or the optimizer panics, with the same payload. Model and optimizer are then as before the call.
    pub fn step(&mut self, lr: LearningRate, input: I) -> Result<L, TrainError> {
        let _call = kiln_profile::span(Category::Host, "train step");
        self.rate = Some(lr);
        let (tensors, signature) = inspect(&input);
        let cause = match self.replay(lr, &tensors, &signature)? {
            Ok(scalars) => return self.run_plan(&tensors, input, &scalars),
            Err(cause) => cause,
        };
        self.leave_replay();
        self.record(lr, input, &tensors, signature, cause)
    }

    /// The optimizer's scalars if the call can be replayed, or why it is recorded.
    fn replay(
        &mut self,
        lr: LearningRate,
        tensors: &[TensorIr],
        signature: &Signature,
    ) -> Result<Result<Vec<burn_ir::ScalarIr>, Cause>, TrainError> {
        let Some(plan) = &self.plan else {
            let unplanned = || match (&self.history.obstacle, self.history.calls()) {
                (Some(obstacle), _) => Cause::Obstacle(obstacle.clone()),
                (None, 0) => Cause::First,
                (None, _) => Cause::Confirming,
            };
            return Ok(Err(self.asked.take().unwrap_or_else(unplanned)));
        };
        if !plan.accepts(tensors, signature) {
            return Ok(Err(Cause::Input));
        }
        self.take_possession()?;
        let number = self.history.calls() + 1;
        let Some(plan) = self.plan.as_mut() else {
            return Ok(Err(Cause::Confirming));
        };
        if let Some(disturbance) = plan.replay.disturbed() {
            return Ok(Err(Cause::Disturbed(disturbance.to_string())));
        }
        match plan.rehearsal.scalars(lr) {
            None => Ok(Err(Cause::Optimizer)),
            Some(_) if is_proof(number) => Ok(Err(Cause::Proof)),
            Some(scalars) => Ok(Ok(scalars)),
        }
    }

    /// Makes the model the only owner of its state again, if the program may have copied it.
    fn take_possession(&mut self) -> Result<(), TrainError> {
        let lent = std::mem::take(self.lent.get_mut());
        self.was_lent |= lent;
        let shares_cells = self.was_lent && self.cells.as_ref().is_some_and(Cells::any);
        if !lent && !shares_cells {
            return Ok(());
        }
        let (Some(plan), Some((model, optim))) = (self.plan.as_mut(), self.trained.take()) else {
            return Ok(());
        };
        if shares_cells {
            // A clone that ran in training mode has left updates in the cells: they become the cells' values, which ends the replay.
            drop(model.valid());
        }
        let mut renewed = None;
        let state = plan.replay.state_ids().into_iter().collect();
        plan.replay.rename(|| {
            let (model, names) = ownership::renew::<B, M>(model, state)?;
            renewed = Some(model);
            Ok::<_, Error>(names)
        })?;
        self.trained = renewed.map(|model| (model, optim));
        Ok(())
    }

    /// Runs the plan.
    fn run_plan(
        &mut self,
        tensors: &[TensorIr],
        input: I,
        scalars: &[burn_ir::ScalarIr],
    ) -> Result<L, TrainError> {
        let Some(plan) = self.plan.as_mut() else {
            return Err(TrainError::Lost);
        };
        match plan.run(tensors, input, scalars) {
            Ok(output) => {
                plan.rehearsal.commit();
                self.history.replayed += 1;
                Ok(output)
            }
            Err(error) => {
                if !plan.replay.has_state() {
                    self.plan = None;
                    self.trained = None;
                }
                Err(error.into())
            }
        }
    }

    /// Records one call; prepares replay if it was the same step as an earlier one.
    fn record(
        &mut self,
        lr: LearningRate,
        input: I,
        tensors: &[TensorIr],
        signature: Signature,
        cause: Cause,
    ) -> Result<L, TrainError> {
        let (model, optim) = self.trained.take().ok_or(TrainError::Lost)?;
        // A step inside another region is a part of that region.
        let traced = self.replays && !record::is_nested();
        let cells = self
            .cells
            .get_or_insert_with(|| Cells::of::<B, M>(&model))
            .clone();
        // Burn draws a parameter when it is first used: until the closure has run nothing else may use it.
        let is_initialized = places::is_initialized::<B, M>(&model);
        if cells.any() && is_initialized {
            drop(model.valid());
        }
        let mut before = places::of_model::<B, M>(&model);
        let backup = Backup::new(&model, &optim, &cells);

        let earlier = self
            .traces
            .iter()
            .position(|trace| traced && trace.signature == signature);
        let cause = match cause {
            Cause::Confirming if earlier.is_none() => Cause::Input,
            cause => cause,
        };
        let mut backup = Some(backup);
        let loss = &self.loss;
        let first_state = self.replays.then_some(self.start);
        let mut rehearsed = None;
        let result = catch_unwind(AssertUnwindSafe(|| {
            self.region.run(|| {
                let output = loss(&model, input);
                let gradients = GradientsParams::from_grads(output.loss().backward(), &model);
                if cells.any() {
                    // Updates that wait in the cells become their values now: a cell has one tensor between calls, wherever the program looks.
                    drop(model.valid());
                }
                if !is_initialized {
                    let (all, drawn) = places::with_drawn::<B, M>(&model, std::mem::take(&mut before));
                    record::hoist(&drawn);
                    before = all;
                }
                let mut optim = match first_state {
                    Some(start) => start(optim, &model, &gradients),
                    None => optim,
                };
                if earlier.is_some() {
                    let parameters = trained_parameters(&model, &gradients);
                    rehearsed = Rehearsal::new(&model, &optim, &parameters).and_then(|mut rehearsal| {
                        let scalars = rehearsal.scalars(lr)?;
                        rehearsal.commit();
                        Some((scalars, rehearsal))
                    });
                }
                let optimizer_before = match traced {
                    true => places::of_optimizer(&model, &optim),
                    false => Vec::new(),
                };
                let start = record::position();
                let model = optim.step(lr, model, gradients);
                // The old parameters and state end here, so that the step may reuse their buffers.
                backup = backup.take().filter(|_| traced).map(Backup::surrender);
                let output = output.map(&mut |tensor: KilnTensor| tensor);
                Recorded {
                    trained: (model, optim),
                    output,
                    optimizer: start,
                    optimizer_before,
                }
            })
        }));
        let recorded = match result {
            Ok(Ok(recorded)) => recorded,
            Ok(Err(error)) => {
                self.trained = backup.and_then(Backup::restore);
                return Err(error.into());
            }
            Err(payload) => {
                self.trained = backup.and_then(Backup::restore);
                resume_unwind(payload)
            }
        };
        drop(backup);
        let Recorded {
            trained,
            mut output,
            optimizer,
            optimizer_before,
        } = recorded;
        let after = places::of_model::<B, M>(&trained.0);
        let device = trained.0.devices().first().copied().unwrap_or_default();
        let optimizer_after = match traced {
            true => places::of_optimizer(&trained.0, &trained.1),
            false => Vec::new(),
        };
        self.trained = Some(trained);
        let scrutiny = match cause {
            Cause::Disturbed(_) => Scrutiny::Numbers,
            Cause::Optimizer | Cause::Input => Scrutiny::SameStep,
            _ => Scrutiny::All,
        };
        self.history.note(cause);
        let (true, Some(run), Some(optimizer)) = (traced, self.region.last_run(), optimizer) else {
            return Ok(output);
        };
        let results = plan::ids(&output);
        // The caller's handles get ids of their own: a tensor that is known under its old one is held by something else, too.
        output = detach(output)?;
        before.extend(optimizer_before);
        let call = Call {
            run,
            fresh: tensors.iter().map(|ir| ir.id).collect(),
            results,
            places: pair(before, after.into_iter().chain(optimizer_after)),
        };
        let mut trace = Trace {
            varied: vec![false; call.fresh.len()],
            call,
            tensors: tensors.to_vec(),
            signature,
            optimizer,
            expected: None,
        };
        let earlier = earlier.map(|position| self.traces.remove(position));
        let outcome = match &earlier {
            Some(earlier) => {
                trace.follow(earlier);
                self.plan(earlier, &mut trace, rehearsed, &output, device, scrutiny)
            }
            None => Ok(()),
        };
        self.traces.insert(0, trace);
        self.traces.truncate(TRACES);
        outcome.map(|()| output)
    }

    /// Makes a plan from two calls of one signature, or says why there is none.
    fn plan(
        &mut self,
        earlier: &Trace,
        trace: &mut Trace,
        rehearsed: Option<(Vec<burn_ir::ScalarIr>, Rehearsal<B, M, O>)>,
        output: &L,
        device: kiln_burn::KilnDevice,
        scrutiny: Scrutiny,
    ) -> Result<(), TrainError> {
        let number = self.history.calls();
        let bindings = match plan::host_obstacle(output, self.region.last_host_read()) {
            Some(reason) => Err(Obstacle::Reason(reason)),
            None => plan::bind(earlier, trace),
        };
        if let Some(expected) = &earlier.expected
            && let Some(what) = expected.difference(trace, &bindings, scrutiny)
        {
            return self.distrust(what, expected.last_equal, number);
        }
        let made = bindings.and_then(|bindings| Plan::new(bindings, trace, rehearsed, output, device));
        match made {
            Ok(plan) => {
                self.history.proofs += u64::from(earlier.expected.is_some());
                self.history.obstacle = None;
                trace.expected = Some(plan.expected(number));
                self.plan = Some(plan);
                // Whatever the closure put aside of the new state keeps its id, and the model gets another.
                self.lent.store(true, Ordering::Relaxed);
                let was_lent = self.was_lent;
                self.take_possession()?;
                self.was_lent = was_lent;
            }
            Err(Obstacle::NotYet) => {}
            // What the replay relied on was exchanged just now; the next call tells whether it is exchanged each time.
            Err(Obstacle::Reason(_)) if scrutiny == Scrutiny::Numbers => {}
            Err(Obstacle::Reason(reason)) => self.give_up(reason),
        }
        Ok(())
    }

    /// Ends replay for good: the closure is not the same function at every call.
    fn distrust(&mut self, what: String, last_equal: u64, call: u64) -> Result<(), TrainError> {
        self.replays = false;
        let error = TrainError::Changed {
            what,
            last_equal,
            call,
        };
        tracing::warn!(target: "kiln", "{error}. It is recorded at every call from now on");
        self.history.obstacle = Some(error.to_string());
        match self.strict {
            true => Err(error),
            false => Ok(()),
        }
    }

    /// Says once that the step will be recorded at each call.
    fn give_up(&mut self, reason: String) {
        if self.history.obstacle.as_ref() != Some(&reason) {
            tracing::warn!(target: "kiln", "the training step is recorded at every call, which costs host time: {reason}");
            self.history.obstacle = Some(reason);
        }
    }

    /// Ends replay: brings the optimizer's host state up to date.
    fn leave_replay(&mut self) {
        let Some(plan) = self.plan.take() else { return };
        if let Some((model, optim)) = self.trained.take() {
            self.trained = Some((model, plan.rehearsal.catch_up(optim)));
        }
    }

    /// The model with its current parameters; none after a step failed half way. A copy of it stays as it is when training goes on.
    pub fn model(&self) -> Option<&M> {
        self.lent.store(true, Ordering::Relaxed);
        self.trained.as_ref().map(|(model, _)| model)
    }

    /// The optimizer with its current state, for a checkpoint; none after a step failed half way. Ends replay for the next two calls.
    pub fn optimizer(&mut self) -> Option<&OptimizerAdaptor<O, M, B>> {
        if self.plan.is_some() {
            self.asked = Some(Cause::Optimizer);
        }
        self.leave_replay();
        self.trained.as_ref().map(|(_, optim)| optim)
    }

    /// The trained model.
    ///
    /// # Panics
    ///
    /// If a step failed half way and the model is lost; [`TrainStep::model`] tells.
    pub fn into_model(self) -> M {
        self.into_parts()
            .expect("a step failed while it replaced the parameters, and reported it")
            .0
    }

    /// The trained model and the optimizer; none after a step failed half way.
    pub fn into_parts(mut self) -> Option<(M, OptimizerAdaptor<O, M, B>)> {
        self.leave_replay();
        self.trained
    }

    /// How often the step was recorded and replayed.
    pub fn history(&self) -> &History {
        &self.history
    }

    /// What was compiled, why, what cut it, why calls were recorded, and what each tensor of the replayed step is bound to.
    pub fn explain(&self) -> Explain {
        Explain::new(self.region.report()).with_replay(&self.history, self.bindings())
    }

    /// What each input, output and result of the step is bound to when it is replayed; none while there is no plan for that.
    pub fn bindings(&self) -> Option<&record::Bindings> {
        self.plan.as_ref().map(|plan| plan.replay.bindings())
    }

    /// The numbers behind [`TrainStep::explain`].
    pub fn report(&self) -> RegionReport {
        self.region.report()
    }
}

/// `output` with handles of its own: each tensor gets a new id.
fn detach<L: StepInput>(output: L) -> Result<L, Error> {
    let mut failed = None;
    let output = output.map(&mut |tensor: KilnTensor| {
        let client = tensor.client;
        let dtype = burn_backend::TensorMetadata::dtype(&tensor);
        let ir = tensor.into_ir();
        match record::session::fetch(&ir, record::BreakReason::OutsideOperation) {
            Ok(elements) => client.adopt(elements),
            Err(error) => {
                failed.get_or_insert(error);
                KilnTensor::new(ir.id, ir.shape, dtype, client)
            }
        }
    });
    failed.map_or(Ok(output), Err)
}

/// Places that existed before and after a call.
fn pair(before: Vec<Found>, after: impl Iterator<Item = Found>) -> Vec<Place> {
    let after: std::collections::HashMap<_, _> = after.map(|found| (found.name, found.id)).collect();
    let both = before.into_iter().filter_map(|found| {
        Some(Place {
            after: *after.get(&found.name)?,
            before: found.id,
            name: found.name,
        })
    });
    both.collect()
}
