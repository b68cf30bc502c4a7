//! Pictures of many sizes in a convolutional network with global pooling.

use burn::module::Module;
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::pool::{AdaptiveAvgPool2d, AdaptiveAvgPool2dConfig, MaxPool2d, MaxPool2dConfig};
use burn::nn::{BatchNorm, BatchNormConfig, Linear, LinearConfig, PaddingConfig2d};
use burn::tensor::activation::relu;
use burn::tensor::backend::Backend;
use burn::tensor::{Int, Tensor, TensorData};
use burn_optim::SgdConfig;
use kiln::{CompileBackend, CompileOptions, KilnDevice, RegionReport, TrainStep};

use crate::empty_cache::with_empty_cache;
use crate::harness::*;

const BATCH: usize = 4;
const CLASSES: usize = 5;

/// Sides of the pictures of two epochs. The second one has sizes that the first has not.
const SIDES: [&[usize]; 2] = [
    &[64, 48, 56, 96, 40, 72, 88, 32, 64, 48],
    &[80, 24, 48, 104, 64, 112, 56, 16, 96, 120],
];

#[derive(Module, Debug)]
struct Net<B: Backend> {
    first: Conv2d<B>,
    first_norm: BatchNorm<B>,
    pool: MaxPool2d,
    second: Conv2d<B>,
    second_norm: BatchNorm<B>,
    third: Conv2d<B>,
    mean: AdaptiveAvgPool2d,
    out: Linear<B>,
}

impl<B: Backend> Net<B> {
    fn new(device: &B::Device) -> Self {
        let conv = |channels: [usize; 2], stride: usize| {
            Conv2dConfig::new(channels, [3, 3])
                .with_padding(PaddingConfig2d::Explicit(1, 1, 1, 1))
                .with_stride([stride, stride])
        };
        Self {
            first: conv([3, 16], 1).with_bias(false).init(device),
            first_norm: BatchNormConfig::new(16).init(device),
            pool: MaxPool2dConfig::new([2, 2]).with_strides([2, 2]).init(),
            second: conv([16, 32], 2).with_bias(false).init(device),
            second_norm: BatchNormConfig::new(32).init(device),
            third: conv([32, 32], 1).init(device),
            mean: AdaptiveAvgPool2dConfig::new([1, 1]).init(),
            out: LinearConfig::new(32, CLASSES).init(device),
        }
    }

    fn loss(&self, images: Tensor<B, 4>, labels: Tensor<B, 1, Int>) -> Tensor<B, 1> {
        let x = relu(self.first_norm.forward(self.first.forward(images)));
        let x = self.second.forward(self.pool.forward(x));
        let x = relu(self.second_norm.forward(x));
        let x = x.clone() + relu(self.third.forward(x));
        let logits = self.out.forward(self.mean.forward(x).flatten(1, 3));
        CrossEntropyLossConfig::new()
            .init(&logits.device())
            .forward(logits, labels)
    }
}

fn batch(number: usize, side: usize) -> (Tensor<Compiled, 4>, Tensor<Compiled, 1, Int>) {
    let device = KilnDevice::cpu();
    let value = |at: usize| ((at * 37 + number * 101) % 255) as f32 / 127.0 - 1.0;
    let values: Vec<f32> = (0..BATCH * 3 * side * side).map(value).collect();
    let labels: Vec<i64> = (0..BATCH).map(|at| ((at + number) % CLASSES) as i64).collect();
    (
        Tensor::from_data(TensorData::new(values, [BATCH, 3, side, side]), &device),
        Tensor::from_data(TensorData::new(labels, [BATCH]), &device),
    )
}

/// Trains for two epochs; how often something was compiled by the end of each, besides.
fn train(start: &Net<Compiled>, backend: CompileBackend) -> (Outcome, RegionReport, Vec<usize>) {
    let device = KilnDevice::cpu();
    let model = copy_weights::<Compiled, Compiled, _, _>(start.clone(), Net::new(&device), &device);
    let loss = |model: &Net<Compiled>, (images, labels): (Tensor<Compiled, 4>, Tensor<Compiled, 1, Int>)| {
        model.loss(images, labels)
    };
    let options = CompileOptions::default()
        .with_backend(backend)
        .with_recompile_limit(32);
    let step = TrainStep::new(model, SgdConfig::new().init(), loss).with_options(options);
    let mut step = step.build().unwrap();
    let (mut outcome, mut compiled) = (Outcome::default(), Vec::new());
    for sides in SIDES {
        for &side in sides {
            let batch = batch(outcome.losses.len(), side);
            outcome.losses.push(value(step.step(1e-2, batch).unwrap()));
        }
        let report = step.report();
        compiled.push(report.compiles.iter().filter(|event| !event.absorbed).count());
    }
    let report = step.report();
    outcome.parameters = parameters::<Compiled, _>(&step.into_model());
    (outcome, report, compiled)
}

/// Sizes that a program scales pictures to have a factor in common, and those that come have it, too.
#[test]
fn pictures_of_many_sizes_take_three_compilations() {
    with_empty_cache(
        "shapes_pictures::pictures_of_many_sizes_take_three_compilations",
        || {
            let start = initialised(Net::<Compiled>::new(&KilnDevice::cpu()));
            let (expected, ..) = train(&start, CompileBackend::Eager);
            let (outcome, report, compiled) = train(&start, CompileBackend::Cpu);
            outcome.assert_close(&expected, "pictures of sizes that vary");
            let slower = report
                .compiles
                .iter()
                .filter(|event| event.backend != CompileBackend::Cpu);
            assert_eq!(slower.count(), 0, "{:?}", report.compiles);
            assert!(compiled[0] <= 3, "{compiled:?} {:?}", report.compiles);
            assert_eq!(compiled[1], compiled[0], "{:?}", report.compiles);
        },
    );
}
