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
//! ([`rehearsal::Rehearsal::catch_up`]). Some calls of a variant are proofs: they are recorded although they
//! could be replayed, and compared with the plan ([`plan`]).

mod access;
mod backup;
mod builder;
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
mod shadow;
mod shards;
mod variants;
mod weights;
mod zeros;

use std::sync::atomic::AtomicBool;

use burn_backend::AutodiffBackend;
use burn_core::module::AutodiffModule;
use burn_ir::{TensorId, TensorIr};
use burn_optim::adaptor::OptimizerAdaptor;
use burn_optim::{GradientsParams, LearningRate, Optimizer, SimpleOptimizer};
use burn_tensor::Tensor;
use kiln_burn::record;
use kiln_burn::{CompiledRegion, Error, Kiln, LossScaling};
use kiln_distributed::World;
use kiln_profile::Category;

use self::masters::Masters;
use crate::input::{KilnBackend, Signature, StepInput, inspect};
pub use builder::TrainStepBuilder;
pub use export::ExportError;
pub use history::{Cause, History};
pub use loss_scale::LossScale;
use places::Cells;
use shards::Shards;
use variants::Variants;
use weights::Copies;
pub use weights::{Weights, cast_parameters};

/// The backends a model can be trained on: `Autodiff<Kiln>`, with any checkpointing strategy.
#[diagnostic::on_unimplemented(
    message = "a `TrainStep` trains models on `Autodiff<Kiln>`, not on `{Self}`",
    note = "put model and data on that backend: `type B = Autodiff<Kiln>;`"
)]
pub trait TrainBackend: KilnBackend + AutodiffBackend<InnerBackend = Kiln> {}

impl<B: KilnBackend + AutodiffBackend<InnerBackend = Kiln>> TrainBackend for B {}

/// An optimizer that [`TrainStep`] can drive: every `SimpleOptimizer` of burn-optim, as its `init` makes
/// it, with or without gradient clipping, and one of your own.
///
/// `SimpleOptimizer::step` is called more often than parameters are updated: where a step is replayed it runs
/// on tensors without elements, for the numbers of the next update. So what it computes must follow from the
/// learning rate, its settings and its `State`; what it counts elsewhere (an atomic, a cell) would move with
/// each such call.
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
#[diagnostic::on_unimplemented(
    message = "the closure of a `TrainStep` returns no loss",
    label = "the closure returns `{Self}`",
    note = "return the loss, a `Tensor<B, 1>`, or a pair of the loss and all other results: `(loss, (logits, hits))`"
)]
pub trait StepOutput<B: TrainBackend>: StepInput + Clone {
    /// The loss whose gradients train the model, of one element; of a larger one the sum is trained on, as
    /// Burn's `backward` does.
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
    /// A number of [`crate::CompileOptions::loss_scaling`] makes no sense.
    #[error("the loss scaling's `{field}` is {value}; it must be {rule}")]
    LossScaling {
        /// The field of [`crate::LossScaling`].
        field: &'static str,
        /// Its value.
        value: f32,
        /// What it must be.
        rule: &'static str,
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
    /// Under [`crate::CompileOptions::strict`]: the closure is not the same function of its input at every
    /// call. The call that noticed this was recorded, so its own update is right.
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

/// Model and optimizer. The model is on the heap: without optimisation each function has room for every copy
/// that it moves, and layers of a model that hold each other in place would fill the stack of a thread.
type Trained<B, M, O> = (Box<M>, OptimizerAdaptor<O, M, B>);

/// Makes the state that an optimizer starts from ([`zeros::start`]).
type Start<B, M, O> = fn(OptimizerAdaptor<O, M, B>, &M, &GradientsParams) -> OptimizerAdaptor<O, M, B>;

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
/// - A closure that reads a tensor on the host, seeds the generator, returns a plain number, or keeps a
///   tensor that it computed from call to call outside the model is recorded at every call, with a warning
///   that names the reason and the line ([`History::obstacle`]). A clone of its input or of a parameter that
///   it puts aside is that of the last recorded call.
/// - A captured tensor that the program drops, or replaces while nothing else keeps the old one, and state of
///   the model that it replaces, end the replay; the step is recorded once or twice and replayed again. While
///   something keeps the old tensor, it is replayed with that one until the next of the calls that are
///   compared.
/// - Inputs of several signatures (batches of two sizes, the smaller last batch of an epoch, batches that are
///   tracked and batches that are not) are recorded and replayed separately; the state is one.
/// - Calls 4, 9, 21, 39, .. and one of each 1024 of a signature are recorded again and compared. For example,
///   a number in a `Cell` that changes after some calls is found there: a warning names it (an error under
///   [`crate::CompileOptions::strict`]), and the step is recorded from then on. What the closure does at one
///   of many calls alone may not be met for long; pass such a choice as a plain value of the input.
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
    variants: Variants<B, O, L>,
    /// Whether the model was shown to the program, which may have copied it, since the last step.
    lent: AtomicBool,
    /// Which tensors of the model are in cells that clones share; none before the first call.
    cells: Option<Cells>,
    /// What was in them when plans were last compared with it.
    seen_in_cells: Vec<TensorId>,
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

/// From here on one of so many calls of a signature is a proof.
const PROOF_EVERY: u64 = 1024;

/// Makes calls 9, 21 and 39 the next ones: the first few meet what a closure does at every second to fifth
/// call.
const SALT: u64 = 2248;

/// Whether call `number` of a signature is recorded, though it could be replayed, and compared with the plan:
/// call 4, one of 8 to 15, one of 16 to 31, .., and one of each 1024. Which of them is drawn, the same at
/// each run: calls at even distances would never meet what a closure does at every other call.
const fn is_proof(number: u64) -> bool {
    if number < 8 {
        return number == 4;
    }
    let block = if number < PROOF_EVERY {
        1 << number.ilog2()
    } else {
        PROOF_EVERY
    };
    let start = number / block * block;
    number - start == mixed(start + SALT) % block
}

/// A number that looks drawn: a step of SplitMix64 (Steele, Lea and Flood, 2014).
const fn mixed(number: u64) -> u64 {
    let bits = number.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    bits ^ (bits >> 31)
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
        if record::is_nested() {
            return Ok(Err(Cause::Nested));
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
        // The program may have a clone of the model that it gave, or of one that it was shown.
        let shares_cells = self.cells.as_ref().is_some_and(Cells::any);
        if (!lent && !shares_cells) || self.variants.plans().next().is_none() {
            return Ok(());
        }
        let Some((model, optim)) = self.trained.take() else {
            return Ok(());
        };
        if let Some(cells) = self.cells.as_ref().filter(|_| shares_cells) {
            // A clone that ran in training mode has left updates in the cells: they become the cells'
            // values.
            drop(model.valid());
            // That ends the replay, also where the program still has the tensors from before.
            let ids = places::ids_in_cells::<B, M>(&*model, cells);
            if ids != self.seen_in_cells {
                let found = places::in_cells::<B, M>(&*model, cells);
                if let Some(replaced) = self.variants.replaced(&found) {
                    self.variants.watch().trip(replaced);
                }
                self.seen_in_cells = ids;
            }
        }
        if !lent {
            self.trained = Some((model, optim));
            return Ok(());
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
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn proofs_come_at_uneven_distances() {
        let proofs =
            |range: std::ops::Range<u64>| -> Vec<u64> { range.filter(|&number| is_proof(number)).collect() };
        assert_eq!(proofs(0..64), [4, 9, 21, 39]);
        for block in [64..128, 512..1024, 1024..2048, 10 << 10..11 << 10] {
            assert_eq!(proofs(block).len(), 1);
        }
        // Whatever a closure does at every so many calls, a proof meets it.
        let proofs = proofs(0..2_000_000);
        for period in 2..=100 {
            for first in 0..period {
                assert!(
                    proofs.iter().any(|proof| proof % period == first),
                    "{period} {first}"
                );
            }
        }
    }
}
