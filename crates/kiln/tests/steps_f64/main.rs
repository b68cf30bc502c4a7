//! Whole training steps in f64 against burn-flex: every optimizer, as its configuration makes it, and every
//! model.
//!
//! In f32 the same program on two backends differs by more than the rounding of its operations: burn-router
//! composes softmax of primitives where burn-flex has kernels, and optimizers that divide by the gradient's
//! size magnify what is left of a gradient that should be zero. In f64 all this is far below the tolerance,
//! and a wrong operation is far above it. Default element types are the process's, hence a program of its
//! own.
//!
//! The models have tanh where those of `steps` have GELU: burn-router takes burn-backend's default gradient
//! of GELU, that of the tanh approximation with constants of six digits, where burn-flex has the exact one.
//! They differ by up to 9e-4 (the exact one is about 1) in any precision. (The default sigmoid, in the LSTM,
//! is in f32 whatever the type of its operand; that is below the tolerance.)

#[path = "../steps/harness.rs"]
mod harness;
#[path = "../steps/models.rs"]
#[allow(dead_code)] // what only the f32 tests use
mod models;

use std::sync::Once;

use burn::nn::activation::ActivationConfig;
use burn::tensor::{DType, set_default_dtypes};
use burn_autodiff::Autodiff;
use burn_flex::{Flex, FlexDevice};
use burn_optim::grad_clipping::GradientClippingConfig;
use burn_optim::momentum::MomentumConfig;
use burn_optim::{AdaGradConfig, AdamConfig, AdamWConfig, AdanConfig, MuonConfig, RmsPropConfig, SgdConfig};
use kiln::KilnDevice;

use harness::*;
use models::*;

type Reference = Autodiff<Flex>;

const STEPS: usize = 20;

/// Makes tensors f64 unless the program says otherwise.
fn double_precision() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        set_default_dtypes::<Reference>(&FlexDevice, DType::F64, DType::I32).unwrap();
        set_default_dtypes::<Compiled>(&KilnDevice::cpu(), DType::F64, DType::I32).unwrap();
    });
}

macro_rules! check {
    ($ty:ident, |$device:ident| $model:expr, $optim:expr) => {{
        double_precision();
        compare!(
            Reference,
            $ty,
            |$device| $model,
            $optim,
            STEPS,
            [AotEager, Candle, Cpu]
        );
    }};
}

/// One test for each optimizer, on the perceptron.
macro_rules! optimizers {
    ($($name:ident => $optim:expr),* $(,)?) => {$(
        #[test]
        fn $name() {
            check!(Mlp, |device| Mlp::with_activation(ActivationConfig::Tanh, device), $optim);
        }
    )*};
}

optimizers! {
    mlp_sgd => SgdConfig::new().init(),
    mlp_sgd_momentum => SgdConfig::new().with_momentum(Some(MomentumConfig::new())).init(),
    mlp_adam => AdamConfig::new().init(),
    mlp_adamw => AdamWConfig::new().with_weight_decay(0.05).init(),
    mlp_amsgrad => AdamWConfig::new().with_amsgrad(true).init(),
    mlp_cautious => AdamWConfig::new().with_weight_decay(0.05).with_cautious_weight_decay(true).init(),
    mlp_clipped_by_norm => AdamWConfig::new()
        .with_grad_clipping(Some(GradientClippingConfig::Norm(0.1)))
        .init(),
    mlp_clipped_by_value => AdamWConfig::new()
        .with_grad_clipping(Some(GradientClippingConfig::Value(0.01)))
        .init(),
    mlp_adagrad => AdaGradConfig::new().init(),
    mlp_adan => AdanConfig::new().init(),
    mlp_rmsprop => RmsPropConfig::new().init(),
    mlp_rmsprop_centered => RmsPropConfig::new().with_centered(true).init(),
}

#[test]
fn matrices_with_muon() {
    check!(Matrices, |device| Matrices::new(device), MuonConfig::new().init());
}

#[test]
fn cnn_with_batch_norm() {
    check!(Cnn, |device| Cnn::new(0.0, device), AdamWConfig::new().init());
}

#[test]
fn transformer_encoder() {
    check!(
        Encoder,
        |device| Encoder::with_activation(ActivationConfig::Tanh, 0.0, device),
        AdamWConfig::new().init()
    );
}

#[test]
fn transformer_decoder() {
    check!(
        Decoder,
        |device| Decoder::with_activation(ActivationConfig::Tanh, device),
        AdamConfig::new().init()
    );
}

#[test]
fn lstm() {
    check!(
        Recurrent,
        |device| Recurrent::new(device),
        AdamWConfig::new().init()
    );
}
