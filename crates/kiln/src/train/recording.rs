//! What a recorded call of a training step runs: the closure, Burn's autograd and the optimizer, and between
//! them what several ranks, a scaled loss and parameters of 16 bits ask for.
//!
//! ```text
//! closure ─► loss ─► scaled ─► gradients ─► means or shares of the ranks ─► unscaled ─► clipped shares
//!    ▲                                                                                      │
//! widened parameters                            narrowed ◄─ joined ◄─ unless skipped ◄─ optimizer
//! ```

use std::panic::resume_unwind;

use burn_core::module::AutodiffModule;
use burn_ir::ScalarIr;
use burn_optim::adaptor::OptimizerAdaptor;
use burn_optim::{GradientsParams, LearningRate, Optimizer, SimpleOptimizer};
use kiln_burn::record::{self, Position};
use kiln_burn::{Kiln, LossScaling};

use super::loss_scale::{self, LossScale, Parameters, Skip};
use super::masters::Masters;
use super::places::{self, Cells, Found};
use super::ranks;
use super::rehearsal::{HostParts, Rehearsal, trained_parameters};
use super::shards::{Shapes, Shards};
use super::weights::{Before, Copies, Stored};
use super::{Start, StepOutput, TrainBackend, Trained};

/// Why batch norms could not be synchronised: the payload with which a recording is given up.
pub(super) struct Refused(pub String);

/// The optimizer's scalars of a recorded call as a rehearsal found them, and the rehearsal.
pub(super) type Rehearsed<B, O> = (Vec<ScalarIr>, Rehearsal<B, O>);

/// A call to be recorded.
pub(super) struct Recording<'a, B: TrainBackend, M: AutodiffModule<B>, O: SimpleOptimizer<Kiln>, F> {
    /// The closure.
    pub loss: &'a F,
    /// The learning rate of the call.
    pub rate: LearningRate,
    /// The tensors of the model that its clones share.
    pub cells: &'a Cells,
    /// Whether all parameters have values.
    pub is_initialized: bool,
    /// Makes the optimizer's first state, if the step may be replayed.
    pub first_state: Option<Start<B, M, O>>,
    /// Whether the call may be compared with others.
    pub traced: bool,
    /// Whether there is another call to compare it with.
    pub rehearses: bool,
    /// The numbers of the optimizer's state before the call that are no tensors, if it rehearses.
    pub host: HostParts,
    /// How the loss is scaled, and where that stands or begins.
    pub scaling: Option<LossScaling>,
    /// See `scaling`.
    pub scale: Option<loss_scale::State>,
    /// See `scaling`.
    pub start_scale: LossScale,
    /// The parameters of 16 bits.
    pub stored: Option<Stored>,
    /// Whether other ranks take part.
    pub has_ranks: bool,
    /// This rank's part of the optimizer's state, if ranks divide it.
    pub shards: Option<&'a Shards>,
    /// This rank's shares of the master copy, if ranks divide one.
    pub masters: Option<Masters>,
    /// Whether batch norms look at the batches of all ranks.
    pub synchronised: bool,
    /// The places of the model's tensors before the call.
    pub before: Vec<Found>,
}

/// The results of a recorded call.
pub(super) struct Recorded<B: TrainBackend, M: AutodiffModule<B>, O: SimpleOptimizer<Kiln>, L> {
    /// Model and optimizer after the call.
    pub trained: Trained<B, M, O>,
    /// The result of the closure.
    pub output: L,
    /// Where the optimizer's part of the recording begins.
    pub optimizer: Option<Position>,
    /// The tensors of the model and of loss scaling before the call.
    pub before: Vec<Found>,
    /// The optimizer's tensors before the update.
    pub optimizer_before: Vec<Found>,
    /// The state of loss scaling after the step, if the loss is scaled.
    pub loss_scale: Option<loss_scale::State>,
    /// Where loss scaling stood before: its tensors outlive the step, as they do where a call fails.
    pub scale_before: Option<loss_scale::State>,
    /// The copies of parameters in 16 bits, if there are any.
    pub copies: Option<Copies>,
    /// This rank's shares of the master copy, if ranks divide one.
    pub masters: Option<Masters>,
    /// What the optimizer's host code does, if the call is compared with another.
    pub rehearsed: Option<Rehearsed<B, O>>,
}

/// Loss and gradients.
struct Differentiated<L> {
    output: L,
    scaling: Option<(LossScaling, loss_scale::State)>,
    gradients: GradientsParams,
}

impl<B, M, O, F> Recording<'_, B, M, O, F>
where
    B: TrainBackend,
    M: AutodiffModule<B> + Clone,
    O: SimpleOptimizer<Kiln>,
{
    /// Runs the call on `model` and `optim`.
    ///
    /// # Panics
    ///
    /// If the closure or the optimizer does; with [`Refused`] if batch norms cannot be synchronised.
    pub(super) fn run<I, L>(
        mut self,
        model: Box<M>,
        optim: OptimizerAdaptor<O, M, B>,
        input: I,
    ) -> Recorded<B, M, O, L>
    where
        F: Fn(&M, I) -> L,
        L: StepOutput<B>,
    {
        // Loss and gradients are computed of one model; the optimizer updates the other.
        let (computed, model, narrow) = match self.stored.take() {
            Some(stored) => {
                let (computed, updated, before) = stored.computed::<B, M>(model, self.cells);
                (Some(computed), updated, Some(before))
            }
            None => (None, model, None),
        };
        // The forward pass changes running statistics, which a skipped step keeps.
        let kept = self.scaling.map(|_| Parameters::of::<B, M>(&model));
        let differentiated = self.differentiate(computed.as_ref().unwrap_or(&model), input);
        drop(computed);
        let Differentiated {
            output,
            scaling,
            gradients,
        } = differentiated;
        let output = match self.has_ranks {
            true => ranks::average_loss(output),
            false => output,
        };
        // In front of whatever looks at their size: all ranks skip a step together.
        let (mut gradients, shapes) = match self.shards {
            Some(shards) => {
                let (shares, shapes) = shards.reduce(&*model, gradients);
                (shares, Some(shapes))
            }
            None if self.has_ranks => (ranks::average(&*model, gradients), None),
            None => (gradients, None),
        };
        if self.cells.any() {
            // Pending updates in the cells become their values now: a cell has one tensor between calls,
            // wherever the program looks.
            drop(model.valid());
        }
        let mut before = std::mem::take(&mut self.before);
        if !self.is_initialized {
            let (all, drawn) = places::with_drawn::<B, M>(&model, before);
            record::hoist(&drawn);
            before = all;
        }
        let scaled = scaling.map(|(scaling, state)| {
            before.extend(state.places());
            let skip = state.unscale(&*model, &mut gradients, shapes.is_some());
            (state.next(&skip, &scaling), skip)
        });
        let skip = scaled.as_ref().map(|(_, skip)| skip).zip(kept);
        let masters = self.masters.take();
        let updated = self.update((model, optim), masters, gradients, shapes, skip, narrow.as_ref());
        let (model, copies) = match narrow.filter(|_| updated.masters.is_none()) {
            Some(before) => {
                let (model, copies) = before.narrowed::<B>(*updated.model, self.cells);
                (Box::new(model), copies)
            }
            None => (updated.model, None),
        };
        Recorded {
            trained: (model, updated.optim),
            output,
            optimizer: updated.start,
            before,
            optimizer_before: updated.before,
            loss_scale: scaled.map(|(state, _)| state),
            scale_before: self.scale,
            copies,
            masters: updated.masters,
            rehearsed: updated.rehearsed,
        }
    }

    /// Loss and gradients of `model`.
    fn differentiate<I, L>(&mut self, model: &M, input: I) -> Differentiated<L>
    where
        F: Fn(&M, I) -> L,
        L: StepOutput<B>,
    {
        let (scaling, start) = (self.scaling, self.start_scale);
        let (loss, state) = (self.loss, &mut self.scale);
        let differentiate = || {
            let output = loss(model, input);
            let value = output.loss();
            let scaling = scaling.map(|scaling| {
                let device = value.device();
                let state = state.get_or_insert_with(|| loss_scale::State::new(start, device));
                (scaling, state.clone())
            });
            let value = match &scaling {
                Some((_, scale)) => scale.scaled(value),
                None => value,
            };
            let gradients = GradientsParams::from_grads(value.backward(), model);
            Differentiated {
                output,
                scaling,
                gradients,
            }
        };
        match self.synchronised {
            // A panic of its own: nothing of the recording is run.
            true => kiln_burn::ranks::synchronised(self.cells.count(), differentiate)
                .unwrap_or_else(|reason| resume_unwind(Box::new(Refused(reason)))),
            false => differentiate(),
        }
    }

    /// Runs the optimizer on a model, or on this rank's shares of its parameters, whose shapes are `shapes`
    /// then: those of the master copy if ranks divide one. A step that may be skipped comes with the tensors
    /// of the whole model before the forward pass.
    fn update(
        &self,
        (mut model, optim): Trained<B, M, O>,
        masters: Option<Masters>,
        mut gradients: GradientsParams,
        shapes: Option<Shapes>,
        skip: Option<(&Skip, Parameters)>,
        narrow: Option<&Before<M>>,
    ) -> Updated<B, M, O> {
        if let (Some(shards), Some(shapes)) = (self.shards, &shapes) {
            gradients = shards.clip(&*model, gradients);
            model = match &masters {
                Some(masters) => Box::new(masters.own::<B, M>(*model, self.cells, shapes)),
                None => Box::new(shards.own(*model, shapes)),
            };
        }
        let mut optim = match self.first_state {
            Some(start) => start(optim, &model, &gradients),
            None => optim,
        };
        let rehearsed = match self.rehearses {
            // Shares of a master are state of the step, and what is widened is not among them.
            true => self.rehearse(
                &model,
                &optim,
                &gradients,
                shapes.as_ref(),
                narrow.filter(|_| masters.is_none()),
            ),
            false => None,
        };
        let before = match self.traced {
            true => places::of_optimizer(&*model, &optim),
            false => Vec::new(),
        };
        let unless_skipped = skip.map(|(skip, kept)| {
            let parameters = Parameters::of::<B, M>(&model).or_before(kept);
            (skip, parameters, optim.to_record())
        });
        let start = record::position();
        let mut model = Box::new(optim.step(self.rate, *model, gradients));
        if let Some((skip, parameters, records)) = unless_skipped {
            model = Box::new(skip.model::<B, M>(parameters, *model));
            optim = skip.optimizer(&model, records, optim);
        }
        let mut masters = masters;
        if let (Some(shards), Some(shapes)) = (self.shards, shapes) {
            masters = masters.map(|masters| masters.updated::<B, M>(&model, self.cells, &shapes));
            model = Box::new(shards.join(*model, shapes, narrow.map(Before::dtype)));
        }
        Updated {
            model,
            masters,
            optim,
            start,
            before,
            rehearsed,
        }
    }

    /// The optimizer's host code in this call. It is rehearsed on the stored model, so that nothing keeps
    /// widened parameters alive.
    fn rehearse(
        &self,
        model: &M,
        optim: &OptimizerAdaptor<O, M, B>,
        gradients: &GradientsParams,
        shapes: Option<&Shapes>,
        narrow: Option<&Before<M>>,
    ) -> Option<Rehearsed<B, O>> {
        let parameters = trained_parameters(model, gradients);
        let stored = narrow.map(|before| &*before.model);
        let shares = match (stored, self.shards, shapes) {
            (Some(stored), Some(shards), Some(shapes)) => {
                record::rehearse(|| shards.own(M::clone(stored), shapes))
            }
            _ => None,
        };
        let shares = shares.as_ref().map(|(shares, _)| shares);
        let rehearsed = shares.or(stored).unwrap_or(model);
        let mut rehearsal = Rehearsal::new(rehearsed, optim, &parameters, narrow.is_some(), &self.host)?;
        let scalars = rehearsal.scalars(self.rate)?;
        rehearsal.commit();
        Some((scalars, rehearsal))
    }
}

/// Model and optimizer after an update.
struct Updated<B: TrainBackend, M: AutodiffModule<B>, O: SimpleOptimizer<Kiln>> {
    model: Box<M>,
    masters: Option<Masters>,
    optim: OptimizerAdaptor<O, M, B>,
    /// Where the update begins.
    start: Option<Position>,
    /// The optimizer's tensors before it.
    before: Vec<Found>,
    rehearsed: Option<Rehearsed<B, O>>,
}
