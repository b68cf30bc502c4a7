//! One pass over the training data, and one over the validation data: burn-train's loops for one device,
//! with a region around the work on a batch.

use burn_core::data::dataloader::{DataLoader, Progress};
use burn_core::module::AutodiffModule;
use burn_core::tensor::backend::AutodiffBackend;
use burn_optim::{GradientsAccumulator, GradientsParams};
use burn_train::{
    EventProcessorTraining, InferenceStep, Interrupter, Learner, LearnerEvent, LearningComponentsTypes,
    SupervisedTrainingEventProcessor, TrainStep, TrainingItem,
};
use kiln::Compiled;

/// The position of a training.
pub(crate) struct Place<'a> {
    pub(crate) epoch: usize,
    pub(crate) num_epochs: usize,
    pub(crate) interrupter: &'a Interrupter,
}

impl Place<'_> {
    fn progress(&self) -> Progress {
        Progress::new(self.epoch, self.num_epochs)
    }

    /// Trains on every batch once.
    pub(crate) fn train<LC: LearningComponentsTypes>(
        &self,
        region: &mut Compiled,
        learner: &mut Learner<LC>,
        batches: &dyn DataLoader<LC::Backend, <LC::TrainingModel as TrainStep>::Input>,
        grad_accumulation: Option<usize>,
        processor: &mut SupervisedTrainingEventProcessor<LC>,
    ) {
        let mut update = Update::new(grad_accumulation);
        let mut batches = batches.iter();
        let mut iteration = 0;
        while let Some(batch) = batches.next() {
            iteration += 1;
            learner.lr_step();
            let progress = batches.progress();
            let output = compiled(region, || {
                let output = learner.train_step(batch);
                update.apply(learner, output.grads);
                output.item
            });
            let item = TrainingItem::new(
                output,
                progress,
                self.progress(),
                Some(iteration),
                Some(learner.lr_current()),
            );
            processor.process_train(LearnerEvent::ProcessedItem(item));
            if self.interrupter.should_stop() {
                break;
            }
        }
        processor.process_train(LearnerEvent::EndEpoch(self.epoch));
    }

    /// Evaluates every batch once.
    pub(crate) fn validate<LC: LearningComponentsTypes>(
        &self,
        region: &mut Compiled,
        learner: &Learner<LC>,
        batches: &dyn DataLoader<
            <LC::Backend as AutodiffBackend>::InnerBackend,
            <LC::InferenceModel as InferenceStep>::Input,
        >,
        processor: &mut SupervisedTrainingEventProcessor<LC>,
    ) {
        let model = learner.model().valid();
        let mut batches = batches.iter();
        let mut iteration = 0;
        while let Some(batch) = batches.next() {
            iteration += 1;
            let progress = batches.progress();
            let output = compiled(region, || model.step(batch));
            let item = TrainingItem::new(output, progress, self.progress(), Some(iteration), None);
            processor.process_valid(LearnerEvent::ProcessedItem(item));
            if self.interrupter.should_stop() {
                break;
            }
        }
        processor.process_valid(LearnerEvent::EndEpoch(self.epoch));
    }
}

/// The use of a batch's gradients: the optimizer takes them, or the sum of those of `every` batches. The
/// rest of a sum at the end of an epoch is dropped, as burn-train does.
struct Update<M> {
    every: Option<usize>,
    sum: GradientsAccumulator<M>,
    batches: usize,
}

impl<M> Update<M> {
    fn new(every: Option<usize>) -> Self {
        Self {
            every,
            sum: GradientsAccumulator::new(),
            batches: 0,
        }
    }

    fn apply<LC: LearningComponentsTypes<TrainingModel = M>>(
        &mut self,
        learner: &mut Learner<LC>,
        gradients: GradientsParams,
    ) where
        M: AutodiffModule<LC::Backend>,
    {
        let Some(every) = self.every else {
            return learner.optimizer_step(gradients);
        };
        self.sum.accumulate(&learner.model(), gradients);
        self.batches += 1;
        if self.batches >= every {
            self.batches = 0;
            learner.optimizer_step(self.sum.grads());
        }
    }
}

/// Runs `closure` in `region`.
fn compiled<R>(region: &mut Compiled, closure: impl FnOnce() -> R) -> R {
    // burn-train's interface has no error here.
    region.run(closure).unwrap_or_else(|error| panic!("{error}"))
}
