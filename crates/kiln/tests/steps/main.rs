//! Whole training steps: the same program on burn-flex, eagerly, in a region, and replayed, must give the same losses and
//! parameters.

mod harness;
mod models;
mod train_step;

use burn_flex::FlexDevice;
use burn_optim::grad_clipping::GradientClippingConfig;
use burn_optim::momentum::MomentumConfig;
use burn_optim::{AdamConfig, AdamWConfig, SgdConfig};
use kiln::{CompileBackend, KilnDevice};

use harness::*;
use models::*;

const STEPS: usize = 20;

/// Largest relative difference of a parameter after an optimizer that is linear in the gradient.
const SMOOTH: f64 = 1e-4;

/// The same for optimizers that divide by the gradient's size: where a gradient is zero but for rounding (the bias of a key in attention, a bias before batch norm)
/// they move the parameter by its noise. Losses agree all the same.
const NORMALISED: f64 = 1e-3;

/// Trains a model with an optimizer in every way and compares with burn-flex. `$model` and `$optim` are expressions generic over the backend.
macro_rules! compare {
    ($ty:ident, |$device:ident| $model:expr, $optim:expr, $steps:expr, $tolerance:expr, [$($backend:ident),*]) => {{
        let $device = &FlexDevice;
        <Reference as burn::tensor::backend::Backend>::seed($device, 3);
        let reference: $ty<Reference> = initialised($model);
        // A clone would share the running statistics of batch norm.
        let start: $ty<Reference> = copy_weights::<Reference, Reference, _, _>(reference.clone(), $model, $device);
        let expected = train_plain(reference, $optim, $steps, $device);
        assert!(expected.losses.iter().all(|loss| loss.is_finite()));

        let $device = &KilnDevice::cpu();
        let fresh = || -> $ty<Compiled> { copy_weights::<Reference, Compiled, _, _>(start.clone(), $model, $device) };
        let what = stringify!($ty $optim);
        train_plain(fresh(), $optim, $steps, $device).assert_close(&expected, $tolerance, &format!("eager {what}"));
        $(
            let backend = CompileBackend::$backend;
            let (outcome, report) = train_region(fresh(), $optim, $steps, backend);
            outcome.assert_close(&expected, $tolerance, &format!("{backend} {what}"));
            assert!(report.breaks.is_empty(), "{:?}", report.breaks);
            assert!(report.steps.len() <= 3, "a schedule recompiled: {:?}", report.recompiles);
            train_replayed(fresh(), $optim, $steps, backend).assert_close(&expected, $tolerance, &format!("{backend} replayed {what}"));
        )*
    }};
}

#[test]
fn mlp_with_several_optimizers() {
    macro_rules! with {
        ($($optim:expr),* $(,)?) => {
            $(compare!(Mlp, |device| Mlp::new(device), $optim, STEPS, NORMALISED, [AotEager, Candle, Cpu]);)*
        };
    }
    with!(
        AdamWConfig::new().with_weight_decay(0.05).init(),
        AdamWConfig::new().with_amsgrad(true).init(),
        AdamConfig::new().init(),
        AdamWConfig::new()
            .with_grad_clipping(Some(GradientClippingConfig::Norm(0.1)))
            .init(),
        AdamWConfig::new()
            .with_grad_clipping(Some(GradientClippingConfig::Value(0.01)))
            .init(),
        SgdConfig::new().init(),
        SgdConfig::new().with_momentum(Some(MomentumConfig::new())).init(),
    );
}

#[test]
fn cnn_with_batch_norm() {
    compare!(
        Cnn,
        |device| Cnn::new(0.0, device),
        AdamWConfig::new().init(),
        STEPS,
        NORMALISED,
        [AotEager, Candle, Cpu]
    );
}

#[test]
fn transformer_encoder() {
    compare!(
        Encoder,
        |device| Encoder::new(0.0, device),
        AdamWConfig::new().init(),
        STEPS,
        NORMALISED,
        [AotEager, Candle, Cpu]
    );
}

#[test]
fn transformer_encoder_without_normalisation() {
    compare!(
        Encoder,
        |device| Encoder::new(0.0, device),
        SgdConfig::new().init(),
        STEPS,
        SMOOTH,
        [AotEager, Candle, Cpu]
    );
}

#[test]
fn transformer_decoder() {
    compare!(
        Decoder,
        |device| Decoder::new(device),
        AdamConfig::new().init(),
        STEPS,
        NORMALISED,
        [AotEager, Candle, Cpu]
    );
}

#[test]
fn lstm() {
    compare!(
        Recurrent,
        |device| Recurrent::new(device),
        SgdConfig::new().init(),
        STEPS,
        SMOOTH,
        [AotEager, Candle, Cpu]
    );
}

#[test]
fn interpreted_for_a_few_steps() {
    compare!(
        Mlp,
        |device| Mlp::new(device),
        AdamWConfig::new().init(),
        6,
        NORMALISED,
        [Interpret]
    );
}
