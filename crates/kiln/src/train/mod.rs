//! `TrainStep`: a training step that is traced once and replayed.
//!
//! The first calls run the loss closure, Burn's autograd and the optimizer under recording, like
//! [`crate::compile`]. When two calls in a row were the same step, the flow of state is known
//! (`kiln_burn::record::replay`) and no model or autograd code runs any more. Only the optimizer's scalars
//! still change from step to step: learning rate, bias correction. They come from the optimizer's own host
//! code, which a rehearsal runs on a few parameters ([`rehearsal`]).
//!
//! ```text
//!   call 1     recorded: the steady step, compiled
//!   call 2     recorded and checked: same step again, rehearsed scalars equal the recorded ones
//!   call 3 ..  replayed
//! ```
//!
//! Batches of two sizes are two variants of the step, each with calls 1, 2 and 3 of its own, and one state
//! ([`variants`]).
//!
//! An optimizer whose state does not start from zeros ([`zeros`]) needs one call more: the first creates
//! the state, by a graph of its own.
//!
//! A call that the replay does not cover (another batch shape, a step whose host code takes another branch,
//! state that the program replaced) is recorded again; the optimizer's state is brought up to date first
//! ([`rehearsal::Rehearsal::catch_up`]). Calls 4, 8, 16, .. of a variant are proofs: they are recorded
//! although they could be replayed, and compared with the plan ([`plan`]).

mod backup;
mod export;
mod history;
mod loss_scale;
mod masters;
mod ownership;
mod places;
mod plan;
pub(crate) mod ranks;
mod recorded;
mod recording;
mod rehearsal;
mod shards;
mod variants;
mod weights;
mod zeros;

use std::sync::atomic::{AtomicBool, Ordering};

use burn_backend::AutodiffBackend;
use burn_core::module::AutodiffModule;
use burn_ir::TensorIr;
use burn_optim::adaptor::OptimizerAdaptor;
use burn_optim::{GradientsParams, LearningRate, Optimizer, SimpleOptimizer};
use burn_tensor::Tensor;
use kiln_burn::record;
use kiln_burn::{
    CompileBackend, CompileOptions, CompiledRegion, Dynamic, Error, Kiln, LossScaling, RegionReport,
};
use kiln_distributed::World;
use kiln_profile::Category;

use self::masters::Masters;
use crate::explain::{Explain, State};
use crate::input::{KilnBackend, Signature, StepInput, inspect};
pub use export::ExportError;
pub use history::{Cause, History};
pub use loss_scale::LossScale;
use places::Cells;
use shards::Shards;
use variants::Variants;
use weights::Copies;
pub use weights::{Weights, cast_parameters};

/// The backends a model can be trained on: `Autodiff<Kiln>`, with any checkpointing strategy.
pub trait TrainBackend: KilnBackend + AutodiffBackend<InnerBackend = Kiln> {}

impl<B: KilnBackend + AutodiffBackend<InnerBackend = Kiln>> TrainBackend for B {}

/// An optimizer that [`TrainStep`] can drive: every `SimpleOptimizer` of burn-optim, as its `init` makes
/// it, with or without gradient clipping.
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

/// The result of the loss closure of a [`TrainStep`]: the loss, alone or first in a pair with other tensors
/// that should leave the step (logits, metrics). Both leave without their autodiff history.
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
    /// The ranks do not begin together.
    #[error(transparent)]
    Ranks(#[from] kiln_distributed::Error),
    /// The ranks cannot divide the update and its state ([`TrainStepBuilder::with_sharded_state`]).
    #[error("the optimizer's state cannot be divided among ranks: {reason}; train without sharded state")]
    Sharding {
        /// What stands in the way.
        reason: String,
    },
    /// Statistics of batch norm cannot be taken over all ranks
    /// ([`TrainStepBuilder::with_synchronised_batch_norm`]). Nothing was run.
    #[error("the batch norms of the step cannot be synchronised: {reason}")]
    BatchNorm {
        /// What stands in the way.
        reason: String,
    },
    /// Model and optimizer were lost in an earlier step that failed after it had consumed them.
    #[error(
        "the training step has no model any more: an earlier step failed while it replaced the parameters; restart from a checkpoint"
    )]
    Lost,
    /// Under [`CompileOptions::strict`]: the closure is not the same function of its input at every call.
    /// The call that noticed this was recorded, so its own update is right.
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
    model: Box<M>,
    optim: OptimizerAdaptor<O, M, B>,
    loss: F,
    start: Start<B, M, O>,
    options: CompileOptions,
    /// Where loss scaling begins, if the program says so.
    start_scale: Option<LossScale>,
    weights: Option<Weights>,
    keeps_copies: bool,
    world: Option<World>,
    sharded: bool,
    synchronised: bool,
}

/// Model and optimizer. The model is on the heap: without optimisation each function has room for every copy
/// that it moves, and layers of a model that hold each other in place would fill the stack of a thread.
type Trained<B, M, O> = (Box<M>, OptimizerAdaptor<O, M, B>);

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

    /// Sets the backend of the compiled step.
    pub fn with_backend(mut self, backend: CompileBackend) -> Self {
        self.options.backend = backend;
        self
    }

    /// Sets where the scaling of the loss goes on: [`TrainStep::loss_scale`] of the run that is resumed. A
    /// step that does not scale its loss ([`CompileOptions::loss_scaling`]) ignores it.
    pub fn with_loss_scale(mut self, scale: LossScale) -> Self {
        self.start_scale = Some(scale);
        self
    }

    /// Stores the parameters of the model in 16 bits. The model is cast when the step is made, so parameters that
    /// Burn draws when they are first used are drawn then.
    pub fn with_weights(mut self, weights: Weights) -> Self {
        self.weights = Some(weights);
        self
    }

    /// Whether a step under autocast ([`CompileOptions::autocast`]) keeps a copy of 16 bits of each parameter that
    /// a product may read, one of two dimensions and more: the update writes it, and the next step reads it
    /// instead of casting the parameter. It does by default. No number depends on that. The copies take two
    /// bytes an element between steps; without them a step makes them at its start, and has them until its end.
    ///
    /// Parameters that Burn draws when they are first used have copies from the second call on, which is compiled
    /// once more for that; [`TrainStep::freeze`] before that call leaves the step without. There are none where
    /// the parameters themselves have 16 bits ([`Self::with_weights`]), where ranks divide the update
    /// ([`Self::with_sharded_state`]), where a graph break cuts the step, and where two parameters of the model are
    /// one tensor.
    pub fn with_kept_copies(mut self, keeps: bool) -> Self {
        self.keeps_copies = keeps;
        self
    }

    /// Trains on all ranks of `world` together ([`crate::distributed`]): parameters and the optimizer's state
    /// are those of rank 0 at the start, gradients and loss are averaged over the ranks at each step. All
    /// ranks must have equal optimizers, and give each step the same learning rate: otherwise they would go
    /// different ways, and get an error (for the rate on CPUs alone). With one rank this changes nothing.
    pub fn with_data_parallel(mut self, world: &World) -> Self {
        self.world = Some(world.clone());
        self
    }

    /// Divides the optimizer's state among the ranks of [`Self::with_data_parallel`]: each rank gets its share of
    /// the averaged gradients, updates its share of each parameter, and keeps its share of the state; then the
    /// parameters are gathered. Losses are those without it, up to rounding; memory of the state is divided by the
    /// number of ranks. State that was loaded is whole, and so is what [`TrainStep::optimizer`] and
    /// [`TrainStep::into_parts`] return: any number of ranks can go on with it. Both must be called on every rank.
    ///
    /// A master copy ([`Weights::with_master`]) is state as well. Its share is updated, and what is gathered
    /// are the parameters of 16 bits. [`TrainStep::model`] shows these, without any other rank; a checkpoint
    /// takes those of `f32` from [`TrainStep::whole_model`], on every rank.
    ///
    /// The optimizer's update must compute each element from those at the same place, as those of Adam, AdamW,
    /// SGD, RMSprop and AdaGrad do; clipping is no part of it. Muon multiplies matrices:
    /// [`TrainError::Sharding`]. With one rank this changes nothing.
    pub fn with_sharded_state(mut self) -> Self {
        self.sharded = true;
        self
    }

    /// Takes the statistics of batch norm over the examples of all ranks of [`Self::with_data_parallel`], so that
    /// `n` ranks with batches of `b` train as one rank with a batch of `n * b`; by default each rank looks at its
    /// own batch. The batches of all ranks must be equally large. Batch norm is recognised by its operations, those
    /// of burn-nn and of kiln-models; a step in which that fails is [`TrainError::BatchNorm`]. With one rank this
    /// changes nothing.
    pub fn with_synchronised_batch_norm(mut self) -> Self {
        self.synchronised = true;
        self
    }

    /// Makes the step. Nothing is compiled before the first call.
    ///
    /// # Errors
    ///
    /// [`TrainError::Ranks`] if other ranks have another model or another optimizer, or do not answer;
    /// [`TrainError::Sharding`] if the optimizer's state cannot be divided.
    pub fn build<I, L>(mut self) -> Result<TrainStep<B, M, O, F, I, L>, TrainError>
    where
        F: Fn(&M, I) -> L,
        I: StepInput,
        L: StepOutput<B>,
    {
        crate::log::init_if_asked();
        let scaling = loss_scale::scaling(&self.options);
        self.options.loss_scaling = scaling;
        let least = match self.options.dynamic {
            Dynamic::Auto | Dynamic::Marked => VARIANTS.1 / 4,
            Dynamic::Off => VARIANTS.0,
        };
        let capacity = self.options.recompile_limit.clamp(least, VARIANTS.1);
        let model = match &self.world {
            Some(world) => ranks::begin::<B, M>(*self.model, world)?,
            None => *self.model,
        };
        let model = match self.weights {
            Some(weights) if weights.has_master() => cast_parameters::<B, M>(model, burn_tensor::DType::F32),
            Some(weights) => cast_parameters::<B, M>(model, weights.dtype()),
            None => model,
        };
        let world = self.world.filter(|world| world.size() > 1);
        let optim = match &world {
            Some(world) => {
                shards::agree_on_numbers::<B, M, O>(&model, &self.optim, world)?;
                ranks::share_state(&model, self.optim, world)?
            }
            None => self.optim,
        };
        let (shards, optim) = match world.as_ref().filter(|_| self.sharded) {
            Some(world) => {
                let (shards, optim) = Shards::new(world, &model, optim)?;
                (Some(shards), optim)
            }
            None => (None, optim),
        };
        let master = self.weights.filter(|weights| weights.has_master());
        let (model, masters) = match (&shards, &world, master) {
            (Some(_), Some(world), Some(weights)) => {
                let cells = Cells::of::<B, M>(&model);
                let masters = Masters::of::<B, M>(world, &model, &cells)?;
                (cast_parameters::<B, M>(model, weights.dtype()), Some(masters))
            }
            _ => (model, None),
        };
        let has_whole_master = master.is_some() && masters.is_none();
        let widened = self.weights.is_some() && !has_whole_master;
        let rounded = self.options.autocast.filter(|_| {
            let compiles = self.options.backend.compiles();
            self.keeps_copies && compiles && self.weights.is_none() && shards.is_none()
        });
        let variants = Variants::new(capacity, widened, shards.clone());
        Ok(TrainStep {
            replays: self.options.backend != CompileBackend::Eager,
            strict: self.options.strict,
            region: CompiledRegion::new(self.options).for_replay(),
            trained: Some((Box::new(model), optim)),
            synchronised: self.synchronised && world.is_some(),
            world,
            shards,
            whole: None,
            loss: self.loss,
            start: self.start,
            scaling,
            start_scale: self
                .start_scale
                .unwrap_or_else(|| LossScale::start(&scaling.unwrap_or_default())),
            loss_scale: None,
            weights: self.weights,
            rounded,
            copies: None,
            keeps_copies: false,
            masters,
            variants,
            lent: AtomicBool::new(false),
            was_lent: false,
            cells: None,
            rate: None,
            warned: Vec::new(),
            history: History::default(),
            types: std::marker::PhantomData,
        })
    }
}

/// A training step that owns model and optimizer.
///
/// Parameters that were not used before the first step are drawn in the first call, in the order of their
/// use, as in a loop without `TrainStep`.
///
/// `F` is the loss closure: `Fn(&M, I) -> L` with an input `I` ([`StepInput`]) and an output `L`
/// ([`StepOutput`]). The closure runs in the first calls and in a few later ones, so it should compute the
/// same function of its input at every call. Its random operations (dropout) still draw new numbers at each
/// call. Everything else that it does is noticed:
///
/// - A closure that reads a tensor on the host, returns a plain number, or keeps a tensor from call to call
///   outside the model is recorded at every call, with a warning that names the reason and the line
///   ([`History::obstacle`]).
/// - A captured tensor that the program drops or replaces, and state of the model that it replaces, end the
///   replay; the step is recorded once or twice and replayed again.
/// - Inputs of several signatures (batches of two sizes, the smaller last batch of an epoch) are recorded
///   and replayed separately; the state is one.
/// - Calls 4, 8, 16, .. and every 1024th of a signature are recorded again and compared. For example, a
///   number counted in a `Cell` is found there: a warning names it (an error under
///   [`CompileOptions::strict`]), and the step is recorded from then on.
pub struct TrainStep<B: TrainBackend, M: AutodiffModule<B>, O: SimpleOptimizer<Kiln>, F, I, L> {
    region: CompiledRegion,
    /// None once a step failed half way.
    trained: Option<Trained<B, M, O>>,
    /// The ranks it trains with; none if there are no others.
    world: Option<World>,
    /// Whether statistics of batch norm are taken over all ranks.
    synchronised: bool,
    /// How the ranks divide the optimizer's state; none if each has all of it.
    shards: Option<Shards>,
    /// The optimizer with the whole state, where it was asked for and is divided otherwise.
    whole: Option<OptimizerAdaptor<O, M, B>>,
    loss: F,
    start: Start<B, M, O>,
    /// How the loss is scaled; none if it is not.
    scaling: Option<LossScaling>,
    /// Where loss scaling begins.
    start_scale: LossScale,
    /// Where it stands; none before the first call.
    loss_scale: Option<loss_scale::State>,
    /// How parameters are stored, if in 16 bits.
    weights: Option<Weights>,
    /// The type of the copies that products under autocast read, if the step keeps such.
    rounded: Option<burn_tensor::DType>,
    /// The copies of 16 bits beside parameters of f32; none before the first call, and after one that failed.
    copies: Option<Copies>,
    /// Whether a call was compiled with copies for autocast.
    keeps_copies: bool,
    /// This rank's shares of the master, if ranks divide one; lost together with the model.
    masters: Option<Masters>,
    /// The recorded calls and plans of each signature.
    variants: Variants<B, M, O, L>,
    /// Whether the model was shown to the program, which may have copied it, since the last step.
    lent: AtomicBool,
    /// Whether it ever was: the program may have a clone, which shares cells with the model.
    was_lent: bool,
    /// Which tensors of the model are in cells that clones share; none before the first call.
    cells: Option<Cells>,
    /// The learning rate of the last call; none before the first.
    rate: Option<LearningRate>,
    /// The reasons for recording that a warning has named.
    warned: Vec<String>,
    /// Whether replay is tried at all.
    replays: bool,
    /// Whether a closure that is not the same function at every call is an error.
    strict: bool,
    history: History,
    types: std::marker::PhantomData<fn(I) -> L>,
}

/// Least and greatest number of signatures that are kept; between them it is that of executables
/// ([`CompileOptions::recompile_limit`]). Where shapes share executables the least is a quarter of the
/// greatest.
const VARIANTS: (usize, usize) = (8, 256);

/// From here on one of so many calls of a signature is a proof; before, calls are proofs whose number is a
/// power of two, from 4 on.
const PROOF_EVERY: u64 = 1024;

/// Whether call `number` of a signature is recorded, though it could be replayed, and compared with the plan.
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
            model: Box::new(model),
            optim: optim.into_adaptor(),
            loss,
            start: zeros::start,
            options,
            start_scale: None,
            weights: None,
            keeps_copies: true,
            world: None,
            sharded: false,
            synchronised: false,
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
    /// Trains on one input: forward, backward, update with learning rate `lr`. Returns the result of the
    /// closure, outside any autodiff graph.
    ///
    /// # Errors
    ///
    /// If the step cannot be compiled or run. Model and optimizer are then as before the call, unless the
    /// step failed after it had begun to replace parameters: they are lost then, and every later call
    /// reports that.
    ///
    /// # Panics
    ///
    /// If the closure or the optimizer panics, with the same payload. Model and optimizer are then as
    /// before the call.
    pub fn step(&mut self, lr: LearningRate, input: I) -> Result<L, TrainError> {
        let _call = kiln_profile::span(Category::Host, "train step");
        self.rate = Some(lr);
        if let Some(world) = &self.world {
            world.set_rate(lr);
        }
        self.whole = None;
        let (tensors, signature) = inspect(&input);
        let cause = match self.replay(lr, &tensors, &signature)? {
            Ok((variant, scalars)) => return self.run_plan(variant, &tensors, input, &scalars),
            Err(cause) => cause,
        };
        self.refuse_if_frozen(&tensors, &signature)?;
        self.leave_replay();
        self.record(lr, input, &tensors, signature, cause)
    }

    /// Under [`TrainStep::freeze`]: an error if the input has a signature for which nothing was compiled.
    /// For other inputs the step's guard decides, before anything runs.
    fn refuse_if_frozen(&self, tensors: &[TensorIr], signature: &Signature) -> Result<(), Error> {
        let known = || self.variants.position(signature).is_some();
        if !self.replays || record::is_nested() || !self.region.is_frozen() || known() {
            return Ok(());
        }
        let types: Vec<String> = tensors.iter().map(record::type_text).collect();
        Err(Error::Frozen {
            region: self.region.name(),
            guard: self.variants.difference(&types),
        })
    }

    /// The variant that can be replayed and the optimizer's scalars for it, or why the call is recorded.
    fn replay(
        &mut self,
        lr: LearningRate,
        tensors: &[TensorIr],
        signature: &Signature,
    ) -> Result<Result<(usize, Vec<burn_ir::ScalarIr>), Cause>, TrainError> {
        if record::is_disabled() {
            return Ok(Err(Cause::Disabled));
        }
        let Some(index) = self.variants.planned(tensors, signature) else {
            return Ok(Err(self.unplanned(signature)));
        };
        if self.variants.is_suspended() {
            return Ok(Err(Cause::Optimizer));
        }
        self.take_possession()?;
        let variant = self.variants.get(index);
        let proof = is_proof(variant.calls + 1);
        let disturbance = variant.plan.as_ref().and_then(|plan| plan.replay.disturbed());
        if let Some(disturbance) = disturbance {
            return Ok(Err(Cause::Disturbed(disturbance.to_string())));
        }
        match self.variants.scalars(index, lr, &mut self.trained) {
            None => Ok(Err(Cause::Optimizer)),
            Some(_) if proof => Ok(Err(Cause::Proof)),
            Some(scalars) => Ok(Ok((index, scalars))),
        }
    }

    /// Why a call is recorded for which there is no plan.
    fn unplanned(&mut self, signature: &Signature) -> Cause {
        if let (false, Some(obstacle)) = (self.replays, &self.history.obstacle) {
            return Cause::Obstacle(obstacle.clone());
        }
        let Some(index) = self.variants.position(signature) else {
            return match self.history.calls() {
                0 => Cause::First,
                _ => Cause::Input,
            };
        };
        let variant = self.variants.get_mut(index);
        match (&variant.obstacle, variant.lapsed.take(), &variant.plan) {
            (Some(obstacle), ..) => Cause::Obstacle(obstacle.clone()),
            (None, Some(cause), _) => cause,
            // A tensor that was the same at each call is another one.
            (None, None, Some(_)) => Cause::Input,
            (None, None, None) => Cause::Confirming,
        }
    }

    /// Makes the model the only owner of its state again, if the program may have copied it.
    fn take_possession(&mut self) -> Result<(), TrainError> {
        let lent = std::mem::take(self.lent.get_mut());
        self.was_lent |= lent;
        let shares_cells = self.was_lent && self.cells.as_ref().is_some_and(Cells::any);
        if (!lent && !shares_cells) || self.variants.plans().next().is_none() {
            return Ok(());
        }
        let Some((model, optim)) = self.trained.take() else {
            return Ok(());
        };
        if shares_cells {
            // A clone that ran in training mode has left updates in the cells: they become the cells'
            // values, which ends the replay.
            drop(model.valid());
        }
        let mut renewed = None;
        self.variants.rename(|state| {
            let (model, names) = ownership::renew::<B, M>(*model, state)?;
            renewed = Some(Box::new(model));
            Ok(names)
        })?;
        self.trained = renewed.map(|model| (model, optim));
        Ok(())
    }

    /// Replays a variant.
    fn run_plan(
        &mut self,
        variant: usize,
        tensors: &[TensorIr],
        input: I,
        scalars: &[burn_ir::ScalarIr],
    ) -> Result<L, TrainError> {
        match self.variants.run(variant, tensors, input, scalars) {
            Ok(output) => {
                self.history.replayed += 1;
                Ok(output)
            }
            Err(error) => {
                if !self.variants.have_state() {
                    self.variants.drop_plans();
                    self.trained = None;
                }
                Err(error.into())
            }
        }
    }

    /// Ends replay until the next recorded call: brings the optimizer's host state up to date.
    fn leave_replay(&mut self) {
        if let Some((model, optim)) = self.trained.take() {
            self.trained = Some((model, self.variants.suspend(optim)));
        }
    }

    /// From now on a call that would compile is an error, [`Error::Frozen`], that names the guard that
    /// failed, before anything runs: model and optimizer are as they were. Input of a new signature is
    /// refused before the closure runs. Calls that are recorded now and then although nothing has to be
    /// compiled (proofs, the call after [`TrainStep::optimizer`]) are still recorded.
    ///
    /// ```
    /// use burn_autodiff::Autodiff;
    /// use burn_nn::{Linear, LinearConfig};
    /// use burn_optim::AdamWConfig;
    /// use burn_tensor::Tensor;
    /// use kiln::{CompileBackend, Kiln, KilnDevice, TrainStep};
    ///
    /// type B = Autodiff<Kiln>;
    ///
    /// let device = KilnDevice::cpu();
    /// let model: Linear<B> = LinearConfig::new(2, 1).init(&device);
    /// let loss = |model: &Linear<B>, x: Tensor<B, 2>| model.forward(x).powf_scalar(2.0).mean();
    /// let optim = AdamWConfig::new().init();
    /// let mut train = TrainStep::new(model, optim, loss).with_backend(CompileBackend::AotEager).build()?;
    /// train.step(0.1, Tensor::ones([4, 2], &device))?;
    /// train.freeze();
    /// train.step(0.1, Tensor::ones([4, 2], &device))?;
    /// let error = train.step(0.1, Tensor::ones([3, 2], &device)).unwrap_err();
    /// assert!(error.to_string().contains("tensor 0 of the input: f32 [4, 2] became f32 [3, 2]"), "{error}");
    /// train.unfreeze();
    /// train.step(0.1, Tensor::ones([3, 2], &device))?;
    /// # Ok::<(), kiln::TrainError>(())
    /// ```
    pub fn freeze(&mut self) {
        self.region.freeze();
    }

    /// Takes [`TrainStep::freeze`] back, and [`CompileOptions::frozen`].
    pub fn unfreeze(&mut self) {
        self.region.unfreeze();
    }

    /// The model with its current parameters; none after a step failed half way. A copy of it stays as it
    /// is when training goes on. Where ranks divide a master copy its parameters are those of 16 bits
    /// ([`TrainStep::whole_model`]).
    pub fn model(&self) -> Option<&M> {
        self.lent.store(true, Ordering::Relaxed);
        self.trained.as_ref().map(|(model, _)| &**model)
    }

    /// The optimizer with its current state, for a checkpoint; none after a step failed half way. The next
    /// call is recorded. Where the ranks divide the state, every rank calls this, and gets the whole state, which
    /// it has until the next step; none if a rank is gone ([`TrainStep::whole_optimizer`] says which).
    pub fn optimizer(&mut self) -> Option<&OptimizerAdaptor<O, M, B>> {
        self.whole_optimizer().ok()
    }

    /// [`TrainStep::optimizer`] with the reason why there is none.
    ///
    /// # Errors
    ///
    /// [`TrainError::Lost`] after a step failed half way; [`TrainError::Ranks`] if the state is divided and another
    /// rank did not give its share.
    pub fn whole_optimizer(&mut self) -> Result<&OptimizerAdaptor<O, M, B>, TrainError> {
        self.leave_replay();
        let (model, optim) = self.trained.as_ref().ok_or(TrainError::Lost)?;
        match &self.shards {
            Some(shards) => Ok(self.whole.insert(shards.whole(&**model, optim)?)),
            None => Ok(optim),
        }
    }

    /// The model with its current parameters, for a checkpoint: a copy, which stays as it is when training
    /// goes on. Where the ranks divide a master copy ([`Weights::with_master`],
    /// [`TrainStepBuilder::with_sharded_state`]) every rank calls this, and gets the whole of it, in `f32`;
    /// the next call is recorded then.
    ///
    /// # Errors
    ///
    /// [`TrainError::Lost`] after a step failed half way; [`TrainError::Ranks`] if a master copy is divided
    /// and another rank did not give its share.
    pub fn whole_model(&mut self) -> Result<M, TrainError> {
        if self.masters.is_some() {
            self.leave_replay();
        }
        self.lent.store(true, Ordering::Relaxed);
        let (model, _) = self.trained.as_ref().ok_or(TrainError::Lost)?;
        let model = M::clone(model);
        match (&self.masters, &self.world) {
            (Some(masters), Some(world)) => {
                let cells = Cells::of::<B, M>(&model);
                masters.whole::<B, M>(world, model, &cells)
            }
            _ => Ok(model),
        }
    }

    /// The trained model. Where ranks divide a master copy its parameters are those of 16 bits
    /// ([`TrainStep::whole_model`], [`TrainStep::into_parts`]).
    ///
    /// # Panics
    ///
    /// If a step failed half way and the model is lost; [`TrainStep::model`] tells.
    pub fn into_model(mut self) -> M {
        self.leave_replay();
        let trained = self.trained;
        *trained
            .expect("a step failed while it replaced the parameters, and reported it")
            .0
    }

    /// The trained model and the optimizer; none after a step failed half way. Where the ranks divide the
    /// optimizer's state, every rank calls this, and gets the whole state and the whole of a master copy;
    /// none if a rank is gone.
    pub fn into_parts(mut self) -> Option<(M, OptimizerAdaptor<O, M, B>)> {
        self.leave_replay();
        let whole = match self.masters {
            Some(_) => Some(self.whole_model().ok()?),
            None => None,
        };
        let (model, optim) = self.trained?;
        let optim = match &self.shards {
            Some(shards) => shards.whole(&*model, &optim).ok()?,
            None => optim,
        };
        Some((whole.unwrap_or(*model), optim))
    }

    /// Where the scaling of the loss stands, for a log or a checkpoint; none if the loss is not scaled
    /// ([`CompileOptions::loss_scaling`]). Waits for the steps under way.
    pub fn loss_scale(&self) -> Option<LossScale> {
        let now = || {
            self.loss_scale
                .as_ref()
                .map_or(self.start_scale, loss_scale::State::read)
        };
        self.scaling.map(|_| now())
    }

    /// How often the step was recorded and replayed.
    pub fn history(&self) -> &History {
        &self.history
    }

    /// The report: what was compiled, why, what cut it, why calls were recorded, and what each tensor of
    /// the replayed step is bound to.
    pub fn explain(&self) -> Explain {
        Explain::new(self.region.report())
            .with_replay(&self.history, self.bindings())
            .with_state(self.state())
    }

    /// What the step keeps from call to call, on this rank; none before the first call, and after a step failed
    /// half way.
    pub fn state(&self) -> Option<State> {
        let (model, optim) = self.trained.as_ref().filter(|_| self.cells.is_some())?;
        let (model_bytes, optimizer_bytes) = places::bytes(&**model, optim);
        Some(State {
            model_bytes,
            optimizer_bytes,
            master_bytes: self.masters.as_ref().map_or(0, Masters::bytes),
            copy_bytes: self.copies.as_ref().map_or(0, Copies::bytes),
            ranks: self.shards.as_ref().map_or(1, Shards::ranks),
        })
    }

    /// The bindings of each input, output and result of the step when it is replayed with input of the
    /// signature that was called last; none while nothing is replayed.
    pub fn bindings(&self) -> Option<&record::Bindings> {
        self.variants.plans().next().map(|plan| plan.replay.bindings())
    }

    /// How many signatures of the input (shapes, types, plain values) are replayed.
    pub fn replayed_signatures(&self) -> usize {
        self.variants.plans().count()
    }

    /// The numbers behind [`TrainStep::explain`].
    pub fn report(&self) -> RegionReport {
        self.region.report()
    }
}
