//! Shapes that vary under several kinds of precision and storage: what a shape computes with the kernels of
//! all shapes are the bits that it computes when it is compiled alone.

use burn::tensor::backend::Backend;
use burn::tensor::{DType, Tensor};
use burn_optim::AdamWConfig;
use burn_optim::grad_clipping::GradientClippingConfig;
use kiln::{CompileBackend, CompileOptions, Dynamic, Kiln, KilnDevice, TrainStep, Weights};

use crate::harness::*;
use crate::models::*;

/// Numbers of examples.
const SIZES: [usize; 7] = [8, 5, 12, 3, 5, 7, 8];

/// Trains the model of `new` on batches of [`SIZES`] twice, and compares every bit.
macro_rules! check {
    ($ty:ident, $new:expr, $options:expr, $weights:expr) => {{
        let _turn = turn();
        let device = KilnDevice::cpu();
        let start: $ty<Compiled> = initialised($new(&device));
        let train = |dynamic: Dynamic| {
            Kiln::seed(&device, 5);
            let model = copy_weights::<Compiled, Compiled, _, _>(start.clone(), $new(&device), &device);
            let clipping = GradientClippingConfig::Norm(0.5);
            let optim = AdamWConfig::new().with_grad_clipping(Some(clipping)).init();
            let loss = |model: &$ty<Compiled>, batch: Batch<Compiled>| model.loss(batch);
            let options = $options.with_backend(CompileBackend::Cpu);
            let mut step = TrainStep::new(model, optim, loss).with_options(options.with_dynamic(dynamic));
            if let Some(weights) = $weights {
                step = step.with_weights(weights);
            }
            let mut step = step.build().unwrap();
            let mut outcome = Outcome::default();
            for (index, &size) in SIZES.iter().enumerate() {
                let loss: Tensor<Compiled, 1> = step.step(rate(index), batch(index, size, &device)).unwrap();
                outcome.losses.push(value(loss));
            }
            let report = step.report();
            assert!(
                report
                    .compiles
                    .iter()
                    .all(|event| event.backend == CompileBackend::Cpu),
                "{:?}",
                report.compiles
            );
            let absorbed = report.compiles.iter().filter(|event| event.absorbed).count();
            outcome.parameters = parameters::<Compiled, _>(&step.into_model());
            (outcome, absorbed)
        };
        let (expected, absorbed) = train(Dynamic::Off);
        assert_eq!(absorbed, 0);
        let (outcome, absorbed) = train(Dynamic::Auto);
        assert!(absorbed > 0, "no shape was only planned");
        assert!(expected.losses.iter().all(|loss| loss.is_finite()));
        assert_eq!(outcome.losses, expected.losses);
        assert_eq!(outcome.parameters, expected.parameters);
    }};
}

fn options() -> CompileOptions {
    CompileOptions::default()
}

#[test]
fn a_network_in_bf16_with_a_master() {
    let weights = Some(Weights::BF16.with_master());
    check!(
        Encoder,
        |device: &_| Encoder::new(0.1, device),
        options().with_autocast(DType::BF16),
        weights
    );
}

#[test]
fn a_network_whose_loss_is_scaled() {
    check!(
        Mlp,
        |device: &_| Mlp::new(device),
        options().with_autocast(DType::F16),
        None::<Weights>
    );
}

#[test]
fn convolutions_with_weights_of_sixteen_bits() {
    check!(
        Cnn,
        |device: &_| Cnn::new(0.1, device),
        options(),
        Some(Weights::BF16)
    );
}

#[test]
fn recurrence_within_a_memory_budget() {
    check!(
        Recurrent,
        |device: &_| Recurrent::new(device),
        options().with_memory_budget(200_000),
        None::<Weights>
    );
}
