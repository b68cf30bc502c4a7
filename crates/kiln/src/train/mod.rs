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
//! Anything the replay does not cover (another batch shape, a step whose host code takes another branch) is recorded again; the optimizer's state is brought up to date
//! first ([`rehearsal::Rehearsal::catch_up`]).

mod rehearsal;
mod renew;
mod zeros;

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, Ordering};

use burn_backend::AutodiffBackend;
use burn_core::module::AutodiffModule;
use burn_ir::{ScalarIr, TensorId, TensorIr};
use burn_optim::adaptor::OptimizerAdaptor;
use burn_optim::{GradientsParams, LearningRate, Optimizer, SimpleOptimizer};
use burn_tensor::Tensor;
use kiln_burn::record::{self, LastRun, Position, Replay};
use kiln_burn::{
    CompileBackend, CompileOptions, CompiledRegion, Error, Kiln, KilnClient, KilnDevice, RegionReport,
};
use kiln_profile::Category;

use crate::explain::Explain;
use crate::input::{KilnBackend, KilnTensor, Signature, StepInput, inspect};
use rehearsal::{Rehearsal, trained_parameters};

/// The backends a model can be trained on: `Autodiff<Kiln>`, with any checkpointing strategy.
pub trait TrainBackend: KilnBackend + AutodiffBackend<InnerBackend = Kiln> {}

impl<B: KilnBackend + AutodiffBackend<InnerBackend = Kiln>> TrainBackend for B {}

/// An optimizer that [`TrainStep`] can drive: every `SimpleOptimizer` of burn-optim, as its `init` makes it, with or without gradient clipping.
#[diagnostic::on_unimplemented(
    message = "`TrainStep` cannot drive `{Self}`",
    label = "not an `OptimizerAdaptor` around a `SimpleOptimizer`",
    note = "an optimizer that evaluates the model itself, such as `LBFGS`, has no single step to replay; call it inside `kiln::compile(..).run(..)`"
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
            region: CompiledRegion::new(self.options).for_replay(),
            trained: Some((self.model, self.optim)),
            loss: self.loss,
            start: self.start,
            previous: None,
            plan: None,
            lent: AtomicBool::new(false),
            history: History::default(),
            types: std::marker::PhantomData,
        })
    }
}

/// How often a step was recorded and replayed, and why it is not replayed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct History {
    /// Calls that ran model, autograd and optimizer code.
    pub recorded: u64,
    /// Calls that ran none of it.
    pub replayed: u64,
    /// Why the step is recorded each time, if it is.
    pub obstacle: Option<String>,
}

/// A training step that owns model and optimizer.
///
/// `F` is the loss closure: `Fn(&M, I) -> L` with an input `I` ([`StepInput`]) and an output `L` ([`StepOutput`]). The closure runs on the first calls
/// only, therefore it must compute the same function of its input at every call: no counters, no reading of tensors. Its random operations (dropout) draw
/// new numbers at each call all the same.
pub struct TrainStep<B: TrainBackend, M: AutodiffModule<B>, O: SimpleOptimizer<Kiln>, F, I, L> {
    region: CompiledRegion,
    /// None once a step failed half way.
    trained: Option<(M, OptimizerAdaptor<O, M, B>)>,
    loss: F,
    start: Start<B, M, O>,
    previous: Option<Trace>,
    plan: Option<Plan<B, M, O, L>>,
    /// Whether the model was shown to the program, which may have copied it, since the last step.
    lent: AtomicBool,
    /// Whether replay is tried at all.
    replays: bool,
    history: History,
    types: std::marker::PhantomData<fn(I) -> L>,
}

/// A recorded call.
struct Trace {
    run: LastRun,
    signature: Signature,
    /// Where the optimizer's part of the recording begins.
    optimizer: Position,
}

/// A step ready to be replayed.
struct Plan<B: TrainBackend, M: AutodiffModule<B>, O: SimpleOptimizer<Kiln>, L> {
    replay: Replay,
    signature: Signature,
    rehearsal: Rehearsal<B, M, O>,
    /// The scalars of the model's part; they are the same at each call.
    model_scalars: Vec<ScalarIr>,
    /// Structure of the output.
    output: L,
    outputs: usize,
    device: KilnDevice,
}

/// What the closure of a recorded call leaves behind.
struct Recorded<M, T, L> {
    trained: (M, T),
    output: L,
    optimizer: Option<Position>,
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
    /// If the step cannot be compiled or run. If the error occurred while parameters were being replaced they are lost, and every later call says so.
    ///
    /// # Panics
    ///
    /// If the closure or the optimizer panics, with the same payload. Model and optimizer are then as before the call.
    pub fn step(&mut self, lr: LearningRate, input: I) -> Result<L, TrainError> {
        let _call = kiln_profile::span(Category::Host, "train step");
        let (tensors, signature) = inspect(&input);
        if let Some(plan) = self.plan.as_mut().filter(|plan| plan.signature == signature)
            && let Some(scalars) = plan.rehearsal.scalars(lr)
        {
            if std::mem::take(self.lent.get_mut())
                && let Some((model, optim)) = self.trained.take()
            {
                let (model, names) = renew::renew(model)?;
                plan.replay.rename(&names);
                self.trained = Some((model, optim));
            }
            let output = plan.run(&tensors, input, &scalars);
            self.history.replayed += 1;
            return Ok(output?);
        }
        self.leave_replay();
        self.record(lr, input, &tensors, signature)
    }

    /// Records one call; prepares replay if it was the same step as the one before.
    fn record(
        &mut self,
        lr: LearningRate,
        input: I,
        tensors: &[TensorIr],
        signature: Signature,
    ) -> Result<L, TrainError> {
        let (model, optim) = self.trained.take().ok_or(TrainError::Lost)?;
        let previous = self
            .previous
            .take()
            .filter(|previous| self.replays && previous.signature == signature);
        let backup = (model.clone(), optim.clone());
        let device = model.devices().first().copied().unwrap_or_default();

        // The rehearsal must start from the state before this call.
        let backup_slot = &mut Some(backup);
        let loss = &self.loss;
        let first_state = self.replays.then_some(self.start);
        let mut rehearsed = None;
        let result = catch_unwind(AssertUnwindSafe(|| {
            self.region.run(|| {
                let output = loss(&model, input);
                let gradients = GradientsParams::from_grads(output.loss().backward(), &model);
                let mut optim = match first_state {
                    Some(start) => start(optim, &model, &gradients),
                    None => optim,
                };
                if previous.is_some() {
                    let parameters = trained_parameters(&model, &gradients);
                    rehearsed = Rehearsal::new(&model, &optim, &parameters)
                        .and_then(|mut rehearsal| Some((rehearsal.scalars(lr)?, rehearsal)));
                }
                let start = record::position();
                let model = optim.step(lr, model, gradients);
                // The old parameters and state end here, so that the step may reuse their buffers.
                *backup_slot = None;
                let output = output.map(&mut |tensor: KilnTensor| tensor);
                Recorded {
                    trained: (model, optim),
                    output,
                    optimizer: start,
                }
            })
        }));
        let recorded = match result {
            Ok(Ok(recorded)) => recorded,
            Ok(Err(error)) => {
                self.trained = backup_slot.take();
                return Err(error.into());
            }
            Err(payload) => {
                self.trained = backup_slot.take();
                resume_unwind(payload)
            }
        };
        self.history.recorded += 1;
        let Recorded {
            trained,
            output,
            optimizer,
        } = recorded;
        self.trained = Some(trained);
        let (Some(run), Some(optimizer)) = (self.region.last_run(), optimizer) else {
            return Ok(output);
        };
        let trace = Trace {
            run,
            signature,
            optimizer,
        };
        if let Some(previous) = previous {
            match Plan::new(&previous, &trace, rehearsed, tensors, &output, device) {
                Ok(plan) => {
                    self.history.obstacle = None;
                    self.plan = Some(plan);
                }
                Err(Obstacle::NotYet) => {}
                Err(Obstacle::Reason(reason)) => self.give_up(reason),
            }
        }
        self.previous = Some(trace);
        Ok(output)
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
        self.previous = None;
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

    /// What was compiled, why, and what cut it.
    pub fn explain(&self) -> Explain {
        Explain::new(self.region.report())
    }

    /// The numbers behind [`TrainStep::explain`].
    pub fn report(&self) -> RegionReport {
        self.region.report()
    }
}

/// Why there is no plan.
enum Obstacle {
    /// The two calls were not the same step; others may be.
    NotYet,
    /// The step can never be replayed.
    Reason(String),
}

impl<B: TrainBackend, M: AutodiffModule<B> + Clone, O: SimpleOptimizer<Kiln>, L: StepOutput<B>>
    Plan<B, M, O, L>
{
    fn new(
        previous: &Trace,
        last: &Trace,
        rehearsed: Option<(Vec<ScalarIr>, Rehearsal<B, M, O>)>,
        inputs: &[TensorIr],
        output: &L,
        device: KilnDevice,
    ) -> Result<Self, Obstacle> {
        if last.run.step.is_provisional() {
            return Err(Obstacle::NotYet);
        }
        let fresh: Vec<TensorId> = inputs.iter().map(|ir| ir.id).collect();
        let results: Vec<TensorId> = inspect(output).0.iter().map(|ir| ir.id).collect();
        let replay = match Replay::new(&previous.run, &last.run, &fresh, &results) {
            Ok(replay) => replay,
            Err(record::ReplayError::Differs) => return Err(Obstacle::NotYet),
            Err(error) => return Err(Obstacle::Reason(error.to_string())),
        };
        let begin = last.optimizer.scalars;
        let (model_scalars, optimizer_scalars) = last.run.scalars.split_at(begin);
        if previous.run.scalars.get(..previous.optimizer.scalars) != Some(model_scalars) {
            return Err(Obstacle::Reason(
                "a scalar of the model or loss changes from call to call; pass it as a tensor input of the step".into(),
            ));
        }
        match rehearsed {
            Some((scalars, rehearsal)) if scalars == optimizer_scalars => Ok(Self {
                replay,
                signature: last.signature.clone(),
                rehearsal,
                model_scalars: model_scalars.to_vec(),
                output: output.clone(),
                outputs: results.len(),
                device,
            }),
            _ => Err(Obstacle::Reason(
                "the optimizer's scalars do not follow from its own state alone, or it reads tensors on the host".into(),
            )),
        }
    }

    fn run(
        &self,
        inputs: &[TensorIr],
        input: impl StepInput,
        optimizer_scalars: &[ScalarIr],
    ) -> Result<L, Error> {
        let _span = kiln_profile::span(Category::Host, "replay");
        let fetch = |ir: &TensorIr| record::session::fetch(ir, record::BreakReason::Read);
        let fresh = inputs.iter().map(fetch).collect::<Result<Vec<_>, _>>()?;
        // The batch may be overwritten if nobody else holds it.
        drop(input);
        let scalars: Vec<ScalarIr> = self
            .model_scalars
            .iter()
            .chain(optimizer_scalars)
            .copied()
            .collect();
        let mut results = self.replay.run(&fresh, &scalars, self.outputs)?.into_iter();
        let client = KilnClient::new(self.device);
        let mut next = |recorded: KilnTensor| match results.next().flatten() {
            Some(tensor) => client.adopt(tensor),
            // An output the step does not compute, such as one of its inputs, is what it was.
            None => recorded,
        };
        Ok(self.output.clone().map(&mut next))
    }
}
