//! burn-train's `Learner` with compiled steps: an ordinary Burn training with metrics and checkpoints, and
//! one line more.

mod epochs;

use std::error::Error;
use std::sync::Arc;

use burn::data::dataloader::batcher::Batcher;
use burn::data::dataloader::{DataLoader, DataLoaderBuilder};
use burn::data::dataset::InMemDataset;
use burn::module::Module;
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::pool::{MaxPool2d, MaxPool2dConfig};
use burn::nn::{Linear, LinearConfig, PaddingConfig2d, Relu};
use burn::optim::AdamWConfig;
use burn::record::CompactRecorder;
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::{Int, Tensor, TensorData};
use burn_autodiff::Autodiff;
use burn_train::metric::{AccuracyMetric, LossMetric};
use burn_train::{ClassificationOutput, InferenceStep, Learner, SupervisedTraining, TrainOutput, TrainStep};
use kiln::{Kiln, KilnDevice};
use kiln_hub::data::{ImageSource, Pipeline, Shapes};
use kiln_learner::CompiledLearning;

use epochs::Epochs;

type B = Autodiff<Kiln>;

/// Pixels a side.
const SIZE: usize = 32;
const CLASSES: usize = 8;
const BATCH: usize = 32;

fn main() -> Result<(), Box<dyn Error>> {
    let given = |name: &str| std::env::args().any(|argument| argument == name);
    let (epochs, count) = if given("--short") { (2, 64) } else { (8, 2048) };
    let device = KilnDevice::default();
    B::seed(&device, 0);

    let folder = tempfile::tempdir()?;
    let learning = CompiledLearning::default();
    let mut training = SupervisedTraining::new(
        folder.path(),
        loader::<B>(count, 1)?,
        loader::<Kiln>(count / 4, 2)?,
    )
    .metrics((LossMetric::new(), AccuracyMetric::new()))
    .with_file_checkpointer(CompactRecorder::new())
    .renderer(Epochs::new())
    .num_epochs(epochs);
    if !given("--eager") {
        training = training.with_training_strategy(learning.clone().into());
    }
    let model = Classifier::<B>::new(&device);
    training.launch(Learner::new(model, AdamWConfig::new().init(), 1e-3));

    let report = learning.explain().into_report();
    println!(
        "{} iterations, {} compiled steps, {} graph breaks",
        report.calls,
        report.steps.len(),
        report.breaks.len()
    );
    Ok(())
}

/// Two convolutions and two linear layers.
#[derive(Module, Debug)]
struct Classifier<B: Backend> {
    first: Conv2d<B>,
    second: Conv2d<B>,
    pool: MaxPool2d,
    activation: Relu,
    hidden: Linear<B>,
    out: Linear<B>,
}

impl<B: Backend> Classifier<B> {
    fn new(device: &B::Device) -> Self {
        let convolution = |from, to| {
            Conv2dConfig::new([from, to], [3, 3])
                .with_padding(PaddingConfig2d::Same)
                .init(device)
        };
        Self {
            first: convolution(3, 16),
            second: convolution(16, 32),
            pool: MaxPool2dConfig::new([2, 2]).with_strides([2, 2]).init(),
            activation: Relu::new(),
            hidden: LinearConfig::new(32 * (SIZE / 4).pow(2), 64).init(device),
            out: LinearConfig::new(64, CLASSES).init(device),
        }
    }

    fn classify(&self, batch: Batch<B>) -> ClassificationOutput<B> {
        let hidden = self
            .pool
            .forward(self.activation.forward(self.first.forward(batch.images)));
        let hidden = self
            .pool
            .forward(self.activation.forward(self.second.forward(hidden)));
        let hidden = self.activation.forward(self.hidden.forward(hidden.flatten(1, 3)));
        let output = self.out.forward(hidden);
        let loss = CrossEntropyLossConfig::new()
            .init(&output.device())
            .forward(output.clone(), batch.labels.clone());
        ClassificationOutput::new(loss, output, batch.labels)
    }
}

impl<B: AutodiffBackend> TrainStep for Classifier<B> {
    type Input = Batch<B>;
    type Output = ClassificationOutput<B>;

    fn step(&self, batch: Batch<B>) -> TrainOutput<ClassificationOutput<B>> {
        let output = self.classify(batch);
        TrainOutput::new(self, output.loss.backward(), output)
    }
}

impl<B: Backend> InferenceStep for Classifier<B> {
    type Input = Batch<B>;
    type Output = ClassificationOutput<B>;

    fn step(&self, batch: Batch<B>) -> ClassificationOutput<B> {
        self.classify(batch)
    }
}

/// Pixels, `[3, SIZE, SIZE]`, and their class.
type Item = (Vec<f32>, usize);

#[derive(Clone, Debug)]
struct Batch<B: Backend> {
    images: Tensor<B, 4>,
    labels: Tensor<B, 1, Int>,
}

#[derive(Clone)]
struct Collate;

impl<B: Backend> Batcher<B, Item, Batch<B>> for Collate {
    fn batch(&self, items: Vec<Item>, device: &B::Device) -> Batch<B> {
        let labels: Vec<i32> = items.iter().map(|item| item.1 as i32).collect();
        let pixels: Vec<f32> = items.into_iter().flat_map(|item| item.0).collect();
        let shape = [labels.len(), 3, SIZE, SIZE];
        Batch {
            images: Tensor::from_data(TensorData::new(pixels, shape), device),
            labels: Tensor::from_data(TensorData::new(labels, [shape[0]]), device),
        }
    }
}

type Loader<B> = Arc<dyn DataLoader<B, Batch<B>>>;

/// Batches of `count` drawn shapes.
fn loader<B: Backend>(count: usize, seed: u64) -> Result<Loader<B>, Box<dyn Error>> {
    let shapes = Shapes::new(count, SIZE, seed);
    let pipeline = Pipeline::plain().with_normalisation([0.5; 3], [0.25; 3]);
    let item = |index| {
        shapes
            .picture(index)
            .map(|(picture, class)| (pipeline.normalise(&picture), class))
    };
    let items = (0..count).map(item).collect::<Result<Vec<Item>, _>>()?;
    Ok(DataLoaderBuilder::new(Collate)
        .batch_size(BATCH)
        .shuffle(seed)
        .build(InMemDataset::new(items)))
}
