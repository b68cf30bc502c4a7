//! burn-train's `Learner` on `Autodiff<Kiln>`: eagerly, as on any other backend, and with compiled steps.
//! What it learns and every loss its metrics see are compared with the same training on `Autodiff<Flex>`.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::{Arc, Mutex};

use burn::data::dataloader::batcher::Batcher;
use burn::data::dataloader::{DataLoader, DataLoaderBuilder};
use burn::data::dataset::InMemDataset;
use burn::module::{Module, ModuleVisitor, Param};
use burn::nn::{Linear, LinearConfig};
use burn::record::{BinBytesRecorder, BinFileRecorder, FullPrecisionSettings, Recorder};
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::{Tensor, TensorData};
use burn_autodiff::Autodiff;
use burn_flex::Flex;
use burn_optim::adaptor::OptimizerAdaptor;
use burn_optim::lr_scheduler::cosine::{CosineAnnealingLrScheduler, CosineAnnealingLrSchedulerConfig};
use burn_optim::{AdamW, AdamWConfig};
use burn_train::metric::store::{Aggregate, Direction, Split};
use burn_train::metric::{LossMetric, MetricDefinition};
use burn_train::renderer::{
    EvaluationName, EvaluationProgress, MetricState, MetricsRenderer, MetricsRendererEvaluation,
    MetricsRendererTraining, ProgressType, TrainingProgress,
};
use burn_train::{
    InferenceStep, Learner, LearningComponentsMarker, MetricEarlyStoppingStrategy, RegressionOutput,
    StoppingCondition, SupervisedTraining, TrainOutput, TrainStep,
};
use kiln::{CompileBackend, CompileOptions, Kiln};
use kiln_learner::CompiledLearning;

type Reference = Autodiff<Flex>;
type Compiled = Autodiff<Kiln>;

const WIDTH: usize = 5;
const BATCH: usize = 8;
/// Six batches an epoch.
const ITEMS: usize = 48;
const EPOCHS: usize = 4;

#[derive(Module, Debug)]
struct Model<B: Backend> {
    hidden: Linear<B>,
    out: Linear<B>,
    /// Whether a training step reads its loss.
    reads: bool,
}

impl<B: Backend> Model<B> {
    fn new(device: &B::Device) -> Self {
        Self {
            hidden: LinearConfig::new(WIDTH, 8).init(device),
            out: LinearConfig::new(8, 1).init(device),
            reads: false,
        }
    }

    fn regress(&self, batch: Batch<B>) -> RegressionOutput<B> {
        let output = self.out.forward(self.hidden.forward(batch.inputs).tanh());
        let loss = (output.clone() - batch.targets.clone()).powf_scalar(2.0).mean();
        RegressionOutput::new(loss, output, batch.targets)
    }

    fn weights(&self) -> Vec<f32> {
        struct Visitor(Vec<f32>);
        impl<B: Backend> ModuleVisitor<B> for Visitor {
            fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
                let data = param.val().into_data();
                self.0.extend(data.to_vec::<f32>().unwrap());
            }
        }
        let mut visitor = Visitor(Vec::new());
        self.visit(&mut visitor);
        visitor.0
    }
}

impl<B: AutodiffBackend> TrainStep for Model<B> {
    type Input = Batch<B>;
    type Output = RegressionOutput<B>;

    fn step(&self, batch: Batch<B>) -> TrainOutput<RegressionOutput<B>> {
        let output = self.regress(batch);
        if self.reads {
            output.loss.to_data();
        }
        TrainOutput::new(self, output.loss.backward(), output)
    }
}

impl<B: Backend> InferenceStep for Model<B> {
    type Input = Batch<B>;
    type Output = RegressionOutput<B>;

    fn step(&self, batch: Batch<B>) -> RegressionOutput<B> {
        self.regress(batch)
    }
}

#[derive(Clone, Debug)]
struct Batch<B: Backend> {
    inputs: Tensor<B, 2>,
    targets: Tensor<B, 2>,
}

type Item = ([f32; WIDTH], f32);

#[derive(Clone)]
struct Collate;

impl<B: Backend> Batcher<B, Item, Batch<B>> for Collate {
    fn batch(&self, items: Vec<Item>, device: &B::Device) -> Batch<B> {
        let inputs: Vec<f32> = items.iter().flat_map(|item| item.0).collect();
        let targets: Vec<f32> = items.iter().map(|item| item.1).collect();
        Batch {
            inputs: Tensor::from_data(TensorData::new(inputs, [items.len(), WIDTH]), device),
            targets: Tensor::from_data(TensorData::new(targets, [items.len(), 1]), device),
        }
    }
}

fn loader<B: Backend>(items: usize) -> Arc<dyn DataLoader<B, Batch<B>>> {
    let item = |index: usize| {
        let input: [f32; WIDTH] = std::array::from_fn(|k| ((index * 31 + k * 17) % 23) as f32 / 11.5 - 1.0);
        (input, input[0] * input[1] - input[2])
    };
    DataLoaderBuilder::new(Collate)
        .batch_size(BATCH)
        .build(InMemDataset::new((0..items).map(item).collect()))
}

/// Every value of the loss that training and validation report.
#[derive(Clone, Default)]
struct Reported(Arc<Mutex<(Vec<f64>, Vec<f64>)>>);

impl MetricsRendererTraining for Reported {
    fn update_train(&mut self, state: MetricState) {
        if let MetricState::Numeric(_, value) = state {
            self.0.lock().unwrap().0.push(value.current());
        }
    }

    fn update_valid(&mut self, state: MetricState) {
        if let MetricState::Numeric(_, value) = state {
            self.0.lock().unwrap().1.push(value.current());
        }
    }

    fn render_train(&mut self, _: TrainingProgress, _: Vec<ProgressType>) {}

    fn render_valid(&mut self, _: TrainingProgress, _: Vec<ProgressType>) {}
}

impl MetricsRendererEvaluation for Reported {
    fn update_test(&mut self, _: EvaluationName, _: MetricState) {}

    fn render_test(&mut self, _: EvaluationProgress, _: Vec<ProgressType>) {}
}

impl MetricsRenderer for Reported {
    fn manual_close(&mut self) {}

    fn register_metric(&mut self, _: MetricDefinition) {}
}

/// What a training came to.
#[derive(Debug)]
struct Outcome {
    weights: Vec<f32>,
    training: Vec<f64>,
    validation: Vec<f64>,
}

impl Outcome {
    fn assert_close(&self, expected: &Self) {
        let close = |what: &str, ours: &[f64], theirs: &[f64]| {
            assert_eq!(ours.len(), theirs.len(), "{what}");
            for (index, (a, b)) in ours.iter().zip(theirs).enumerate() {
                assert!(
                    (a - b).abs() <= 1e-5 * b.abs().max(0.1),
                    "{what} {index}: {a}, expected {b}"
                );
            }
        };
        let wide = |weights: &[f32]| weights.iter().copied().map(f64::from).collect::<Vec<_>>();
        close("training loss", &self.training, &expected.training);
        close("validation loss", &self.validation, &expected.validation);
        close("weight", &wide(&self.weights), &wide(&expected.weights));
    }
}

type Components<B> =
    LearningComponentsMarker<B, CosineAnnealingLrScheduler, Model<B>, OptimizerAdaptor<AdamW, Model<B>, B>>;
type Training<B> = SupervisedTraining<Components<B>>;

/// The same weights for every training of the process, as a record.
fn start() -> Vec<u8> {
    static START: Mutex<Option<Vec<u8>>> = Mutex::new(None);
    let recorder = BinBytesRecorder::<FullPrecisionSettings>::new();
    let make = || {
        // Some draws start so well that nothing is left to learn.
        let device = Default::default();
        Flex::seed(&device, 7);
        Recorder::<Flex>::record(&recorder, Model::<Flex>::new(&device).into_record(), ())
    };
    START
        .lock()
        .unwrap()
        .get_or_insert_with(|| make().unwrap())
        .clone()
}

fn model<B: Backend>() -> Model<B> {
    let device = B::Device::default();
    let recorder = BinBytesRecorder::<FullPrecisionSettings>::new();
    Model::new(&device).load_record(recorder.load(start(), &device).unwrap())
}

/// Trains `model` on `items` items under a learning rate that changes at every step. `configure` sets what
/// differs from test to test.
fn learn<B: AutodiffBackend>(
    folder: &Path,
    model: Model<B>,
    items: usize,
    configure: impl FnOnce(Training<B>) -> Training<B>,
) -> Outcome {
    let reported = Reported::default();
    let training = SupervisedTraining::new(folder, loader::<B>(items), loader::<B::InnerBackend>(items / 2))
        .metrics((LossMetric::new(),))
        .renderer(reported.clone())
        .with_application_logger(None)
        .num_epochs(EPOCHS);
    let optim = AdamWConfig::new().with_epsilon(1e-3).init();
    let schedule = CosineAnnealingLrSchedulerConfig::new(2e-2, 40).init().unwrap();
    let result = configure(training).launch(Learner::new(model, optim, schedule));
    let (training, validation) = std::mem::take(&mut *reported.0.lock().unwrap());
    Outcome {
        weights: result.model.weights(),
        training,
        validation,
    }
}

/// [`learn`] in a folder of its own.
fn learn_anew<B: AutodiffBackend>(
    items: usize,
    configure: impl FnOnce(Training<B>) -> Training<B>,
) -> Outcome {
    let folder = tempfile::tempdir().unwrap();
    learn(folder.path(), model::<B>(), items, configure)
}

fn learning(backend: CompileBackend) -> CompiledLearning {
    CompiledLearning::new(CompileOptions::default().with_backend(backend))
}

#[test]
fn a_learner_trains_as_on_flex() {
    let expected = learn_anew::<Reference>(ITEMS, |training| training);
    assert_eq!(expected.training.len(), EPOCHS * ITEMS / BATCH);
    let (first, last) = (expected.validation[0], expected.validation.last().unwrap());
    assert!(*last < 0.9 * first, "nothing was learned: {expected:?}");
    learn_anew::<Compiled>(ITEMS, |training| training).assert_close(&expected);
}

#[test]
fn iterations_are_compiled_as_one_step_each() {
    let expected = learn_anew::<Reference>(ITEMS, |training| training);
    for backend in [CompileBackend::AotEager, CompileBackend::Cpu] {
        let learning = learning(backend);
        let strategy = learning.clone().into();
        learn_anew::<Compiled>(ITEMS, |training| training.with_training_strategy(strategy))
            .assert_close(&expected);

        let report = learning.explain().report().clone();
        assert_eq!(report.calls, (EPOCHS * ITEMS / BATCH) as u64, "{backend}");
        assert_eq!(report.breaks.len(), 0, "{backend}");
        // Before the optimizer has its state, and with it. The schedule makes no others.
        assert_eq!(report.steps.len(), 2, "{backend}");
    }
}

#[test]
fn the_smaller_last_batch_is_a_step_of_its_own() {
    let items = ITEMS - BATCH / 2;
    let expected = learn_anew::<Reference>(items, |training| training);
    let learning = learning(CompileBackend::AotEager);
    let strategy = learning.clone().into();
    learn_anew::<Compiled>(items, |training| training.with_training_strategy(strategy))
        .assert_close(&expected);
    assert!(
        learning.explain().to_string().contains("[8, 5]"),
        "{}",
        learning.explain()
    );
}

#[test]
fn gradients_accumulate_over_steps() {
    // Six batches an epoch: two are left over and dropped.
    let expected = learn_anew::<Reference>(ITEMS, |training| training.grads_accumulation(4));
    let strategy = learning(CompileBackend::AotEager).into();
    learn_anew::<Compiled>(ITEMS, |training| {
        training.grads_accumulation(4).with_training_strategy(strategy)
    })
    .assert_close(&expected);
}

#[test]
fn a_training_resumes_from_a_checkpoint() {
    let expected = learn_anew::<Reference>(ITEMS, |training| training);
    let folder = tempfile::tempdir().unwrap();
    let recorder = BinFileRecorder::<FullPrecisionSettings>::new();
    let compiled = |training: Training<Compiled>| {
        training
            .with_file_checkpointer(recorder.clone())
            .with_training_strategy(learning(CompileBackend::AotEager).into())
    };
    learn(folder.path(), model(), ITEMS, |training| {
        compiled(training).num_epochs(2)
    });
    let resumed = learn(folder.path(), model(), ITEMS, |training| {
        compiled(training).checkpoint(2)
    });
    let skipped = expected.training.len() / 2;
    let rest = Outcome {
        training: expected.training[skipped..].to_vec(),
        validation: expected.validation[expected.validation.len() / 2..].to_vec(),
        weights: expected.weights,
    };
    resumed.assert_close(&rest);
}

#[test]
fn early_stopping_stops_where_it_does_elsewhere() {
    // The loss falls, so a strategy that wants it to rise gives up.
    fn stopped<B: AutodiffBackend>(training: Training<B>) -> Training<B> {
        training.early_stopping(MetricEarlyStoppingStrategy::new(
            &LossMetric::<B>::new(),
            Aggregate::Mean,
            Direction::Highest,
            Split::Train,
            StoppingCondition::NoImprovementSince { n_epochs: 1 },
        ))
    }
    let expected = learn_anew::<Reference>(ITEMS, stopped);
    assert!(
        expected.training.len() < EPOCHS * ITEMS / BATCH,
        "it did not stop"
    );
    let strategy = learning(CompileBackend::AotEager).into();
    learn_anew::<Compiled>(ITEMS, |training| {
        stopped(training).with_training_strategy(strategy)
    })
    .assert_close(&expected);
}

#[test]
fn an_interrupted_training_ends_at_once() {
    let strategy = learning(CompileBackend::AotEager).into();
    let outcome = learn_anew::<Compiled>(ITEMS, |training| {
        training.interrupter().stop(Some("enough"));
        training.with_training_strategy(strategy)
    });
    assert_eq!((outcome.training.len(), outcome.validation.len()), (1, 0));
}

#[test]
fn a_step_that_cannot_be_compiled_says_why() {
    let options = CompileOptions::default()
        .with_backend(CompileBackend::AotEager)
        .with_fullgraph(true);
    let learning = CompiledLearning::new(options);
    let folder = tempfile::tempdir().unwrap();
    let model = Model::<Compiled> {
        reads: true,
        ..model()
    };
    let payload = catch_unwind(AssertUnwindSafe(|| {
        learn(folder.path(), model, ITEMS, |training| {
            training.with_training_strategy(learning.clone().into())
        })
    }))
    .unwrap_err();
    let message = payload.downcast_ref::<String>().unwrap();
    assert!(
        message.contains("graph break") && message.contains("learner.rs"),
        "{message}"
    );
    // Another training can use what was compiled.
    let strategy = learning.into();
    let expected = learn_anew::<Reference>(ITEMS, |training| training);
    learn_anew::<Compiled>(ITEMS, |training| training.with_training_strategy(strategy))
        .assert_close(&expected);
}
