//! Running statistics of batch norms: cells that clones of a module share, and that a forward pass changes.

use burn::module::Module;
use burn::nn::{BatchNorm, BatchNormConfig, Linear, LinearConfig};
use burn::tensor::activation::tanh;
use burn::tensor::backend::Backend;
use burn::tensor::{DType, Tensor};
use burn_optim::{AdamWConfig, GradientsParams, Optimizer, SgdConfig};
use kiln::{CompileBackend, CompileOptions, KilnDevice, TrainStep};

use crate::harness::*;

const BACKENDS: [CompileBackend; 3] = [
    CompileBackend::Eager,
    CompileBackend::AotEager,
    CompileBackend::Cpu,
];

const WIDTH: usize = 6;

#[derive(Module, Debug)]
struct Net<B: Backend> {
    into: Linear<B>,
    norms: Vec<BatchNorm<B>>,
    out: Linear<B>,
}

impl Net<Compiled> {
    /// With two batch norms, which are clones of one if it `shares` them.
    fn new(shares: bool) -> Self {
        let device = KilnDevice::cpu();
        let norm = || BatchNormConfig::new(WIDTH).init(&device);
        let first = norm();
        let second = match shares {
            true => first.clone(),
            false => norm(),
        };
        let layer = |outputs: usize| LinearConfig::new(WIDTH, outputs).init(&device);
        initialised(Self {
            into: layer(WIDTH),
            norms: vec![first, second],
            out: layer(1),
        })
    }

    fn loss(&self, x: Tensor<Compiled, 2>) -> Tensor<Compiled, 1> {
        let hidden = self
            .norms
            .iter()
            .fold(self.into.forward(x), |x, norm| tanh(norm.forward(x)));
        self.out.forward(hidden).powi_scalar(2).mean()
    }
}

fn input(call: usize) -> Tensor<Compiled, 2> {
    let values: Vec<f32> = (0..8 * WIDTH)
        .map(|at| ((at * 7 + call * 5) % 13) as f32 / 6.0 - 1.0)
        .collect();
    Tensor::<Compiled, 1>::from_floats(values.as_slice(), &KilnDevice::cpu()).reshape([8, WIDTH])
}

/// Clones of one batch norm in two places of a model share what they have counted.
#[test]
fn places_of_a_model_share_statistics() {
    let _turn = turn();
    for backend in BACKENDS {
        let mut plain = Net::new(true);
        let mut optim = SgdConfig::new().init();
        let step = TrainStep::new(
            Net::new(true),
            SgdConfig::new().init(),
            |net: &Net<Compiled>, x| net.loss(x),
        );
        let mut step = step.with_backend(backend).build().unwrap();
        for call in 0..9 {
            let gradients = GradientsParams::from_grads(plain.loss(input(call)).backward(), &plain);
            plain = optim.step(0.05, plain, gradients);
            step.step(0.05, input(call)).unwrap();
        }
        let expected = trained::<Compiled, _>(&plain);
        let found = trained::<Compiled, _>(step.model().unwrap());
        assert_eq!(found.len(), expected.len());
        for (number, (found, expected)) in found.iter().zip(&expected).enumerate() {
            let error = relative_error(found, expected, 1e-3);
            assert!(error <= TOLERANCE, "{backend}: {number} differs by {error}");
        }
    }
}

/// A step that is skipped changes nothing, and its forward pass has seen what made it be skipped.
#[test]
fn a_skipped_step_keeps_statistics() {
    let _turn = turn();
    let infinite = || Tensor::<Compiled, 2>::full([8, WIDTH], f32::INFINITY, &KilnDevice::cpu());
    for backend in BACKENDS {
        let options = CompileOptions::default()
            .with_backend(backend)
            .with_autocast(DType::F16);
        let step = TrainStep::new(
            Net::new(false),
            AdamWConfig::new().init(),
            |net: &Net<Compiled>, x| net.loss(x),
        );
        let mut step = step.with_options(options).build().unwrap();
        let mut skipped = 0;
        // Some of the calls are recorded and some are replayed, the first one among them.
        for call in 0..16 {
            let before = trained::<Compiled, _>(step.model().unwrap());
            let breaks = [0, 3, 4, 11, 14].contains(&call);
            let x = if breaks { infinite() } else { input(call) };
            step.step(0.01, x).unwrap();
            let after = trained::<Compiled, _>(step.model().unwrap());
            assert!(after.iter().flatten().all(|x| x.is_finite()), "{backend} {call}");
            assert_eq!(after == before, breaks, "{backend} {call}");
            skipped += u32::from(breaks);
            assert_eq!(step.loss_scale().unwrap().skipped, skipped, "{backend} {call}");
        }
    }
}
