//! Seeing inside: reports, traces, dumps, checks.

mod check;
mod dump;
mod format;
mod gradients;
mod html;
mod log;
mod newcomer;
mod report;
mod trace;

use burn::nn::{Linear, LinearConfig};
use burn::tensor::Tensor;
use burn_autodiff::Autodiff;
use burn_optim::AdamWConfig;
use kiln::{CompileOptions, Explain, Kiln, KilnDevice, TrainStep};

type B = Autodiff<Kiln>;

fn device() -> KilnDevice {
    KilnDevice::cpu()
}

/// Values that are exact in f32, also when a few are multiplied and added.
fn matrix<const R: usize, const C: usize>(start: i32) -> Tensor<Kiln, 2> {
    let values: Vec<f32> = (0..(R * C) as i32)
        .map(|index| ((index * 7 + start) % 5 - 2) as f32)
        .collect();
    Tensor::<Kiln, 1>::from_floats(&*values, &device()).reshape([R, C])
}

/// Trains a small model for `steps` steps; what became of it.
fn train(options: CompileOptions, steps: i32) -> Explain {
    train_width(8, options, steps)
}

/// The same of a model with so many outputs.
fn train_width(width: usize, options: CompileOptions, steps: i32) -> Explain {
    let model: Linear<B> = LinearConfig::new(32, width).init(&device());
    let loss = |model: &Linear<B>, x: Tensor<B, 2>| model.forward(x).powf_scalar(2.0).mean();
    let mut step = TrainStep::new(model, AdamWConfig::new().init(), loss)
        .with_options(options)
        .build()
        .unwrap();
    for index in 0..steps {
        step.step(1e-3, Tensor::from_inner(matrix::<16, 32>(index)))
            .unwrap();
    }
    step.explain()
}
