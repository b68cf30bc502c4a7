//! Whole training steps in f32: the program run eagerly, in a region, and replayed gives the same losses and
//! parameters. (`steps_f64` compares with burn-flex itself.)
//!
//! Optimizers that divide by the gradient's size turn a gradient that is zero but for rounding (the bias of a
//! key in attention, a bias before batch norm) into a step of the size of their epsilon's choosing; here
//! epsilon is large enough that rounding stays rounding.

mod attention;
mod budgets;
mod checks;
mod control;
mod copies;
mod empty_cache;
mod flattened;
mod functions;
mod harness;
mod indices;
mod layouts;
mod leaves;
mod loss_scale;
mod models;
mod own_optimizers;
mod residual;
mod shapes;
mod shapes_bert;
mod shapes_marked;
mod shapes_pictures;
mod shapes_precision;
mod shapes_programs;
mod statistics;
mod thread_counts;
mod train_step;
mod weights;

use burn_optim::decay::WeightDecayConfig;
use burn_optim::grad_clipping::GradientClippingConfig;
use burn_optim::momentum::MomentumConfig;
use burn_optim::{AdaGradConfig, AdamConfig, AdamWConfig, AdanConfig, MuonConfig, RmsPropConfig, SgdConfig};

use harness::*;
use models::*;

const STEPS: usize = 20;
const EPSILON: f32 = 1e-3;

macro_rules! check {
    ($ty:ident, |$device:ident| $model:expr, $optim:expr) => {
        let _ = compare!(
            Compiled,
            $ty,
            |$device| $model,
            $optim,
            STEPS,
            [AotEager, Candle, Cpu]
        );
    };
}

/// One test for each optimizer, on the perceptron.
macro_rules! optimizers {
    ($($name:ident => $optim:expr),* $(,)?) => {$(
        #[test]
        fn $name() {
            check!(Mlp, |device| Mlp::new(device), $optim);
        }
    )*};
}

optimizers! {
    mlp_sgd => SgdConfig::new().init(),
    mlp_sgd_momentum => SgdConfig::new()
        .with_momentum(Some(MomentumConfig::new()))
        .with_weight_decay(Some(WeightDecayConfig::new(0.01)))
        .init(),
    mlp_adam => AdamConfig::new().with_epsilon(EPSILON).init(),
    mlp_adamw => AdamWConfig::new().with_epsilon(EPSILON).with_weight_decay(0.05).init(),
    mlp_amsgrad => AdamWConfig::new().with_epsilon(EPSILON).with_amsgrad(true).init(),
    mlp_cautious => AdamWConfig::new()
        .with_epsilon(EPSILON)
        .with_weight_decay(0.05)
        .with_cautious_weight_decay(true)
        .init(),
    mlp_clipped_by_norm => AdamWConfig::new()
        .with_epsilon(EPSILON)
        .with_grad_clipping(Some(GradientClippingConfig::Norm(0.1)))
        .init(),
    mlp_clipped_by_value => AdamWConfig::new()
        .with_epsilon(EPSILON)
        .with_grad_clipping(Some(GradientClippingConfig::Value(0.01)))
        .init(),
    mlp_adagrad => AdaGradConfig::new().with_epsilon(EPSILON).init(),
    mlp_adan => AdanConfig::new().with_epsilon(EPSILON).init(),
    mlp_rmsprop => RmsPropConfig::new().with_epsilon(EPSILON).init(),
    mlp_rmsprop_centered => RmsPropConfig::new().with_epsilon(EPSILON).with_centered(true).init(),
}

#[test]
fn matrices_with_muon() {
    check!(Matrices, |device| Matrices::new(device), MuonConfig::new().init());
}

#[test]
fn cnn_with_batch_norm_and_dropout() {
    check!(
        Cnn,
        |device| Cnn::new(0.3, device),
        AdamWConfig::new().with_epsilon(EPSILON).init()
    );
}

#[test]
fn transformer_encoder_with_dropout() {
    check!(
        Encoder,
        |device| Encoder::new(0.1, device),
        AdamWConfig::new().with_epsilon(EPSILON).init()
    );
}

#[test]
fn transformer_decoder() {
    check!(Decoder, |device| Decoder::new(device), SgdConfig::new().init());
}

#[test]
fn lstm() {
    check!(
        Recurrent,
        |device| Recurrent::new(device),
        SgdConfig::new().init()
    );
}

#[test]
fn interpreted_for_a_few_steps() {
    compare!(
        Compiled,
        Mlp,
        |device| Mlp::new(device),
        AdamWConfig::new().with_epsilon(EPSILON).init(),
        6,
        [Interpret]
    );
}
