//! Every optimizer of burn-optim, and what programs do with learning rates.
//!
//! An epsilon of 1e-3 keeps a gradient that is zero but for rounding from becoming a step of full size.

use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::tensor::Tensor;
use burn::tensor::backend::Backend;
use burn_optim::adaptor::OptimizerAdaptor;
use burn_optim::decay::WeightDecayConfig;
use burn_optim::grad_clipping::GradientClippingConfig;
use burn_optim::lr_scheduler::LrScheduler;
use burn_optim::lr_scheduler::cosine::CosineAnnealingLrSchedulerConfig;
use burn_optim::lr_scheduler::noam::NoamLrSchedulerConfig;
use burn_optim::momentum::MomentumConfig;
use burn_optim::{
    AdaGradConfig, AdamConfig, AdamWConfig, AdanConfig, LearningRate, MuonConfig, RmsPropConfig, SgdConfig,
    SimpleOptimizer,
};

use crate::models::*;
use crate::program::{B, CALLS, Program};
use crate::programs;

programs! {
    sgd_with_decay => Replayed,
    sgd_with_nesterov => Replayed,
    adam => Replayed,
    adam_with_decay => Replayed,
    adamw_with_amsgrad => Replayed,
    adagrad => Replayed,
    adan => Replayed,
    rmsprop => Replayed,
    rmsprop_centered_with_momentum => Replayed,
    muon => Replayed,
    clipping_by_norm => Replayed,
    clipping_by_value => Replayed,
    a_warm_up_from_zero => Replayed,
    a_rate_of_zero_for_a_while => Replayed,
    a_rate_that_falls_at_every_call => Replayed,
    a_rate_from_the_last_loss => Replayed,
    cosine_annealing => Replayed,
    noam => Replayed,
    two_rates_that_alternate => Replayed,
    numbers_that_follow_from_shapes => Replayed,
    numbers_that_follow_from_shapes_later => Replayed,
}

/// Trains with an optimizer at a rate that changes with the call.
macro_rules! trains {
    ($p:expr, $model:expr, $optim:expr, |$call:ident| $rate:expr) => {{
        let p: &Program = $p;
        let mut step = p.train($model, $optim, |model, x: T2| energy(model.forward(x)));
        for $call in 0..CALLS + 2 {
            step.step($rate, p.x($call));
        }
    }};
}

fn sgd_with_decay(p: &Program) {
    let optim = SgdConfig::new()
        .with_weight_decay(Some(WeightDecayConfig::new(0.05)))
        .init();
    trains!(p, p.mlp(), optim, |call| LR / (1.0 + call as f64));
}

fn sgd_with_nesterov(p: &Program) {
    let momentum = MomentumConfig::new().with_nesterov(true).with_dampening(0.0);
    trains!(
        p,
        p.mlp(),
        SgdConfig::new().with_momentum(Some(momentum)).init(),
        |call| LR / (1.0 + call as f64)
    );
}

fn adam(p: &Program) {
    trains!(p, p.mlp(), AdamConfig::new().with_epsilon(1e-3).init(), |_call| {
        LR
    });
}

fn adam_with_decay(p: &Program) {
    let optim = AdamConfig::new()
        .with_epsilon(1e-3)
        .with_weight_decay(Some(WeightDecayConfig::new(0.05)));
    trains!(p, p.mlp(), optim.init(), |_call| LR);
}

fn adamw_with_amsgrad(p: &Program) {
    let optim = AdamWConfig::new()
        .with_epsilon(1e-3)
        .with_weight_decay(0.05)
        .with_amsgrad(true)
        .init();
    trains!(p, p.normed(), optim, |call| LR / (1.0 + call as f64));
}

fn adagrad(p: &Program) {
    trains!(
        p,
        p.mlp(),
        AdaGradConfig::new().with_epsilon(1e-3).init(),
        |_call| LR
    );
}

fn adan(p: &Program) {
    trains!(
        p,
        p.mlp(),
        AdanConfig::new().with_epsilon(1e-3).init(),
        |_call| 0.1 * LR
    );
}

fn rmsprop(p: &Program) {
    trains!(
        p,
        p.mlp(),
        RmsPropConfig::new().with_epsilon(1e-3).init(),
        |_call| 0.1 * LR
    );
}

fn rmsprop_centered_with_momentum(p: &Program) {
    let optim = RmsPropConfig::new()
        .with_epsilon(1e-3)
        .with_centered(true)
        .with_momentum(0.9)
        .init();
    trains!(p, p.mlp(), optim, |_call| 0.1 * LR);
}

/// Matrices alone: Muon takes nothing else.
#[derive(Module, Debug)]
struct Matrices<B: Backend> {
    first: Linear<B>,
    second: Linear<B>,
}

impl Matrices<B> {
    fn forward(&self, x: T2) -> T2 {
        self.second.forward(self.first.forward(x).tanh())
    }
}

fn muon(p: &Program) {
    let linear = |from, to| LinearConfig::new(from, to).with_bias(false).init(&p.device());
    let model = drawn(Matrices {
        first: linear(WIDTH, HIDDEN),
        second: linear(HIDDEN, CLASSES),
    });
    p.tolerate(1e-4);
    trains!(p, model, MuonConfig::new().init(), |_call| LR);
}

fn clipping_by_norm(p: &Program) {
    let optim = AdamWConfig::new()
        .with_epsilon(1e-3)
        .with_grad_clipping(Some(GradientClippingConfig::Norm(0.05)));
    trains!(p, p.mlp(), optim.init(), |_call| LR);
}

fn clipping_by_value(p: &Program) {
    let optim = SgdConfig::new().with_gradient_clipping(Some(GradientClippingConfig::Value(0.01)));
    trains!(p, p.mlp(), optim.init(), |_call| LR);
}

fn a_warm_up_from_zero(p: &Program) {
    let optim = AdamWConfig::new()
        .with_epsilon(1e-3)
        .with_weight_decay(0.1)
        .init();
    trains!(p, p.mlp(), optim, |call| LR * call as f64 / 10.0);
}

fn a_rate_of_zero_for_a_while(p: &Program) {
    trains!(p, p.normed(), adamw(), |call| if (4..6).contains(&call) {
        0.0
    } else {
        LR
    });
}

fn a_rate_that_falls_at_every_call(p: &Program) {
    trains!(p, p.mlp(), momentum(), |call| LR * 0.7f64.powi(call as i32));
}

fn a_rate_from_the_last_loss(p: &Program) {
    let mut step = p.train(p.mlp(), adamw(), |model, x: T2| energy(model.forward(x)));
    let mut rate = LR;
    for call in 0..CALLS {
        let loss: f32 = step.step(rate, p.x(call)).into_scalar();
        rate = LR * f64::from(loss.min(1.0));
    }
}

fn cosine_annealing(p: &Program) {
    let mut schedule = CosineAnnealingLrSchedulerConfig::new(LR, 5).init().unwrap();
    trains!(p, p.mlp(), adamw(), |_call| schedule.step());
}

fn noam(p: &Program) {
    let mut schedule = NoamLrSchedulerConfig::new(LR)
        .with_warmup_steps(4)
        .with_model_size(16)
        .init()
        .unwrap();
    trains!(p, p.mlp(), adamw(), |_call| schedule.step());
}

fn two_rates_that_alternate(p: &Program) {
    trains!(p, p.normed(), adamw(), |call| if call % 2 == 0 {
        LR
    } else {
        2.0 * LR
    });
}

/// Steps that are smaller for larger parameters, from a call on, and smaller at each call.
#[derive(Clone)]
struct ByShape {
    from: usize,
}

impl<K: Backend> SimpleOptimizer<K> for ByShape {
    type State<const D: usize> = usize;

    fn step<const D: usize>(
        &self,
        lr: LearningRate,
        tensor: Tensor<K, D>,
        grad: Tensor<K, D>,
        state: Option<usize>,
    ) -> (Tensor<K, D>, Option<usize>) {
        let call = state.unwrap_or(0);
        let size = match call >= self.from {
            true => tensor.shape().num_elements(),
            false => 1,
        };
        let rate = lr / (size as f64).sqrt() / (1.0 + call as f64);
        (tensor - grad.mul_scalar(rate), Some(call + 1))
    }

    fn to_device<const D: usize>(state: usize, _: &K::Device) -> usize {
        state
    }
}

fn numbers_that_follow_from_shapes(p: &Program) {
    trains!(p, p.mlp(), OptimizerAdaptor::from(ByShape { from: 0 }), |_call| {
        LR
    });
}

/// The first calls do not tell that they will.
fn numbers_that_follow_from_shapes_later(p: &Program) {
    trains!(p, p.mlp(), OptimizerAdaptor::from(ByShape { from: 6 }), |_call| {
        LR
    });
}
