//! What the program sees of a training step between its calls: the model, the optimizer, reports.

use std::sync::atomic::Ordering;

use burn_core::module::AutodiffModule;
use burn_optim::SimpleOptimizer;
use burn_optim::adaptor::OptimizerAdaptor;
use kiln_burn::{Kiln, RegionReport, record};

use super::masters::Masters;
use super::places::{self, Cells};
use super::shards::Shards;
use super::weights::Copies;
use super::{History, LossScale, StepOutput, TrainBackend, TrainError, TrainStep, loss_scale};
use crate::explain::{Explain, State};
use crate::input::StepInput;

impl<B, M, O, F, I, L> TrainStep<B, M, O, F, I, L>
where
    B: TrainBackend,
    M: AutodiffModule<B> + Clone,
    O: SimpleOptimizer<Kiln>,
    F: Fn(&M, I) -> L,
    I: StepInput,
    L: StepOutput<B>,
{
    /// From now on a call that would compile is an error, [`crate::Error::Frozen`], that names the guard that
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

    /// Takes [`TrainStep::freeze`] back, and [`crate::CompileOptions::frozen`].
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
    /// call is recorded. Where the ranks divide the state, every rank calls this, and gets the whole state,
    /// which it has until the next step; none if a rank is gone ([`TrainStep::whole_optimizer`] says which).
    pub fn optimizer(&mut self) -> Option<&OptimizerAdaptor<O, M, B>> {
        self.whole_optimizer().ok()
    }

    /// [`TrainStep::optimizer`] with the reason why there is none.
    ///
    /// # Errors
    ///
    /// [`TrainError::Lost`] after a step failed half way; [`TrainError::Ranks`] if the state is divided and
    /// another rank did not give its share.
    pub fn whole_optimizer(&mut self) -> Result<&OptimizerAdaptor<O, M, B>, TrainError> {
        self.leave_replay();
        let (model, optim) = self.trained.as_ref().ok_or(TrainError::Lost)?;
        match &self.shards {
            Some(shards) => Ok(self.whole.insert(shards.whole(&**model, optim)?)),
            None => Ok(optim),
        }
    }

    /// The model with its current parameters, for a checkpoint: a copy, which stays as it is when training
    /// goes on. Where the ranks divide a master copy ([`crate::Weights::with_master`],
    /// [`crate::TrainStepBuilder::with_sharded_state`]) every rank calls this, and gets the whole of it, in
    /// `f32`; the next call is recorded then.
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
    /// ([`crate::CompileOptions::loss_scaling`]). Waits for the steps under way.
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

    /// What the step keeps from call to call, on this rank; none before the first call, and after a step
    /// failed half way.
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
