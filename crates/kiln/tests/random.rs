//! Random numbers: the same however a program is run. The generator is the process's, so these tests take
//! turns, and have a program of their own.

use std::sync::{Mutex, PoisonError};

use burn::module::Module;
use burn::nn::{Dropout, DropoutConfig, Linear, LinearConfig};
use burn_autodiff::Autodiff;
use burn_optim::{AdamWConfig, GradientsParams, Optimizer};
use burn_tensor::backend::Backend;
use burn_tensor::{Distribution, Int, Tensor};
use kiln::{CompileBackend, CompileOptions, Kiln, KilnDevice, TrainStep};

type B = Autodiff<Kiln>;

static TURN: Mutex<()> = Mutex::new(());

fn device() -> KilnDevice {
    KilnDevice::cpu()
}

fn options(backend: CompileBackend) -> CompileOptions {
    CompileOptions::default().with_backend(backend)
}

#[test]
fn draws_are_those_of_the_eager_program() {
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let draw = || {
        let uniform = Tensor::<Kiln, 2>::random([3, 5], Distribution::Uniform(-1.0, 2.0), &device());
        let normal = Tensor::<Kiln, 1>::random([7], Distribution::Normal(1.0, 0.5), &device());
        let coin = Tensor::<Kiln, 1>::random([9], Distribution::Bernoulli(0.3), &device());
        let die = Tensor::<Kiln, 1, Int>::random([9], Distribution::Uniform(1.0, 7.0), &device());
        (uniform, normal, coin, die)
    };
    for backend in [
        CompileBackend::AotEager,
        CompileBackend::Candle,
        CompileBackend::Interpret,
        CompileBackend::Cpu,
    ] {
        Kiln::seed(&device(), 42);
        let eager: Vec<_> = (0..3).map(|_| draw()).collect();
        Kiln::seed(&device(), 42);
        let mut region = kiln::compile(options(backend));
        for expected in eager {
            let drawn = region.run(draw).unwrap();
            expected
                .0
                .into_data()
                .assert_approx_eq::<f32>(&drawn.0.into_data(), Default::default());
            expected
                .1
                .into_data()
                .assert_approx_eq::<f32>(&drawn.1.into_data(), Default::default());
            expected.2.into_data().assert_eq(&drawn.2.into_data(), true);
            expected.3.into_data().assert_eq(&drawn.3.into_data(), true);
        }
        assert_eq!(region.report().steps.len(), 1, "new draws are the same step");
    }
}

#[derive(Module, Debug)]
struct Net<B: Backend> {
    first: Linear<B>,
    dropout: Dropout,
    second: Linear<B>,
}

impl<B: Backend> Net<B> {
    fn new(device: &B::Device) -> Self {
        Self {
            first: LinearConfig::new(6, 16).init(device),
            dropout: DropoutConfig::new(0.4).init(),
            second: LinearConfig::new(16, 1).init(device),
        }
    }

    fn loss(&self, x: Tensor<B, 2>) -> Tensor<B, 1> {
        let hidden = self.dropout.forward(self.first.forward(x).tanh());
        self.second.forward(hidden).powf_scalar(2.0).mean()
    }
}

const STEPS: usize = 12;

fn input() -> Tensor<B, 2> {
    let values: Vec<f32> = (0..24).map(|index| (index % 7) as f32 / 3.5 - 1.0).collect();
    Tensor::<B, 1>::from_floats(values.as_slice(), &device()).reshape([4, 6])
}

/// Trains from seed 7, calling `step` with model and optimizer; returns the losses.
fn losses(mut step: impl FnMut() -> Tensor<B, 1>) -> Vec<f32> {
    (0..STEPS).map(|_| step().into_scalar()).collect()
}

#[test]
fn dropout_draws_the_same_masks_eagerly_compiled_and_replayed() {
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let start = || {
        B::seed(&device(), 7);
        let model = Net::<B>::new(&device());
        // Parameters are drawn at first use.
        model.loss(input());
        model
    };
    let body = |model: &mut Option<Net<B>>,
                optim: &mut burn_optim::adaptor::OptimizerAdaptor<_, Net<B>, B>| {
        let current = model.take().unwrap();
        let loss = current.loss(input());
        let grads = GradientsParams::from_grads(loss.backward(), &current);
        *model = Some(optim.step(1e-2, current, grads));
        loss
    };

    let (mut model, mut optim) = (Some(start()), AdamWConfig::new().init());
    let expected = losses(|| body(&mut model, &mut optim));
    assert!(
        expected.windows(2).any(|pair| pair[0] < pair[1]),
        "dropout makes the loss jump: {expected:?}"
    );

    let close = |losses: Vec<f32>, what: &str| {
        for (a, b) in losses.iter().zip(&expected) {
            assert!(
                (a - b).abs() <= 1e-4 * b.abs(),
                "{what}: {losses:?}, eager {expected:?}"
            );
        }
    };
    for backend in [
        CompileBackend::AotEager,
        CompileBackend::Candle,
        CompileBackend::Cpu,
    ] {
        let mut region = kiln::compile(options(backend));
        let (mut model, mut optim) = (Some(start()), AdamWConfig::new().init());
        close(
            losses(|| region.run(|| body(&mut model, &mut optim)).unwrap()),
            backend.name(),
        );
        assert!(
            region.report().steps.len() <= 2,
            "a new mask recompiled: {:?}",
            region.report().recompiles
        );

        let model = start();
        let mut step = TrainStep::new(model, AdamWConfig::new().init(), |model: &Net<B>, x| {
            model.loss(x)
        })
        .with_backend(backend)
        .build()
        .unwrap();
        close(
            losses(|| step.step(1e-2, input()).unwrap()),
            &format!("{backend} replayed"),
        );
        assert!(step.history().replayed > 0, "{:?}", step.history());
    }
}
