//! burn-train's `Learner` with compiled steps.
//!
//! A `Learner` trains on `Autodiff<Kiln>` as on any other backend, operation by operation. With
//! [`CompiledLearning`] as its training strategy each iteration is one compiled step: what the model's
//! `TrainStep::step` does, the backward pass, and the update by the optimizer. Validation is compiled, too.
//! Model, data loaders, metrics, checkpoints, early stopping and learning-rate schedules stay what they are.
//!
//! ```no_run
//! # use burn_core::data::dataloader::DataLoader;
//! # use burn_core::module::AutodiffModule;
//! # use burn_core::tensor::backend::AutodiffBackend;
//! # use burn_optim::{AdamWConfig, Optimizer};
//! # use burn_train::{InferenceStep, Learner, SupervisedTraining, TrainStep};
//! # use kiln::Kiln;
//! # use kiln_learner::CompiledLearning;
//! # use std::sync::Arc;
//! # fn train<B, M, O>(
//! #     model: M,
//! #     optim: O,
//! #     train: Arc<dyn DataLoader<B, M::Input>>,
//! #     valid: Arc<dyn DataLoader<Kiln, <M::InnerModule as InferenceStep>::Input>>,
//! # ) -> M::InnerModule
//! # where
//! #     B: AutodiffBackend<InnerBackend = Kiln>,
//! #     M: TrainStep + AutodiffModule<B> + core::fmt::Display + 'static,
//! #     M::InnerModule: InferenceStep,
//! #     O: Optimizer<M, B> + 'static,
//! # {
//! let learning = CompiledLearning::default();
//! let result = SupervisedTraining::new("runs/first", train, valid)
//!     .num_epochs(10)
//!     .with_training_strategy(learning.clone().into())
//!     .launch(Learner::new(model, optim, 1e-3));
//! println!("{}", learning.explain());
//! # result.model
//! # }
//! ```
//!
//! The strategy is burn-train's loop for one device with a region around each iteration ([`kiln::compile`]).
//! The model's Rust code runs in every iteration, its tensor operations do not. Metrics read losses and
//! outputs on a thread of their own, when the step has run.

mod epoch;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use burn_core::module::Module;
use burn_core::tensor::backend::{AutodiffBackend, DeviceOps};
use burn_train::{
    Learner, LearningComponentsTypes, SupervisedLearningStrategy, SupervisedTrainingEventProcessor,
    TrainLoader, TrainingComponents, TrainingModel, TrainingStrategy, ValidLoader,
};
use kiln::{CompileOptions, Compiled, Explain, Kiln};

/// A training strategy for burn-train's `SupervisedTraining` that compiles each iteration as one step, and
/// each batch of the validation as another. See the [crate's documentation](crate).
///
/// Clones share their compiled steps, so a clone that stays behind can report them:
/// [`CompiledLearning::explain`].
///
/// # Panics
///
/// A training strategy cannot return errors. A step that cannot be compiled or run ends the training with a
/// panic that carries the [`kiln::Error`].
#[derive(Clone)]
pub struct CompiledLearning {
    regions: Arc<Regions>,
}

/// The compiled regions.
struct Regions {
    training: Mutex<Compiled>,
    validation: Mutex<Compiled>,
}

impl CompiledLearning {
    /// A strategy that compiles with `options`.
    pub fn new(options: CompileOptions) -> Self {
        let region = |part: &str| {
            let name = format!("{} {part}", options.name);
            Mutex::new(kiln::compile(options.clone().with_name(name)))
        };
        Self {
            regions: Arc::new(Regions {
                training: region("training"),
                validation: region("validation"),
            }),
        }
    }

    /// The report on the compiled training: what was compiled, why, and what cut it.
    pub fn explain(&self) -> Explain {
        lock(&self.regions.training).explain()
    }

    /// The report on the compiled validation: what was compiled, why, and what cut it.
    pub fn explain_validation(&self) -> Explain {
        lock(&self.regions.validation).explain()
    }
}

impl Default for CompiledLearning {
    fn default() -> Self {
        Self::new(CompileOptions::default().with_name("learner"))
    }
}

impl<LC> From<CompiledLearning> for TrainingStrategy<LC>
where
    LC: LearningComponentsTypes,
    LC::Backend: AutodiffBackend<InnerBackend = Kiln>,
{
    fn from(learning: CompiledLearning) -> Self {
        Self::Custom(Arc::new(learning))
    }
}

impl<LC> SupervisedLearningStrategy<LC> for CompiledLearning
where
    LC: LearningComponentsTypes,
    LC::Backend: AutodiffBackend<InnerBackend = Kiln>,
{
    fn fit(
        &self,
        components: TrainingComponents<LC>,
        mut learner: Learner<LC>,
        train: TrainLoader<LC>,
        valid: ValidLoader<LC>,
        starting_epoch: usize,
    ) -> (TrainingModel<LC>, SupervisedTrainingEventProcessor<LC>) {
        let (train, valid) = on_device_of(&mut learner, train, valid);
        let TrainingComponents {
            num_epochs,
            mut checkpointer,
            grad_accumulation,
            interrupter,
            mut early_stopping,
            mut event_processor,
            event_store,
            ..
        } = components;

        for epoch in starting_epoch..=num_epochs {
            let place = epoch::Place {
                epoch,
                num_epochs,
                interrupter: &interrupter,
            };
            let region = &mut *lock(&self.regions.training);
            place.train(
                region,
                &mut learner,
                &*train,
                grad_accumulation,
                &mut event_processor,
            );
            if interrupter.should_stop() {
                break;
            }
            let region = &mut *lock(&self.regions.validation);
            place.validate(region, &learner, &*valid, &mut event_processor);
            if let Some(checkpointer) = &mut checkpointer {
                // Its threads read what the next epoch overwrites.
                kiln::share_tensors();
                checkpointer.checkpoint(&learner, epoch, &event_store);
            }
            if early_stopping
                .as_mut()
                .is_some_and(|strategy| strategy.should_stop(epoch, &event_store))
            {
                break;
            }
        }
        (learner.model(), event_processor)
    }
}

/// Brings model and data to the first device of the model, as burn-train does for a training on one device.
fn on_device_of<LC: LearningComponentsTypes>(
    learner: &mut Learner<LC>,
    train: TrainLoader<LC>,
    valid: ValidLoader<LC>,
) -> (TrainLoader<LC>, ValidLoader<LC>) {
    let device = learner.model().devices().first().cloned().unwrap_or_default();
    learner.fork(&device);
    (train.to_device(&device), valid.to_device(device.inner()))
}

fn lock(region: &Mutex<Compiled>) -> MutexGuard<'_, Compiled> {
    // A training that panicked has discarded what it recorded; the region is as good as before.
    region.lock().unwrap_or_else(PoisonError::into_inner)
}
