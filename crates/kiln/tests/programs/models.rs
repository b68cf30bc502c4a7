//! What programs train: tiny models, batches that depend on the call alone, and short names for what every
//! program uses.

use burn::module::Module;
use burn::nn::loss::{CrossEntropyLossConfig, MseLoss, Reduction};
use burn::nn::{BatchNorm, BatchNormConfig, Dropout, DropoutConfig, Linear, LinearConfig};
use burn::tensor::activation::relu;
use burn::tensor::backend::Backend;
use burn::tensor::{Int, Tensor, TensorData};
use burn_optim::adaptor::OptimizerAdaptor;
use burn_optim::momentum::MomentumConfig;
use burn_optim::{AdamWConfig, SgdConfig};
use kiln::Kiln;

use crate::program::{B, Program};
use crate::trainer::parameters;

pub type T1 = Tensor<B, 1>;
pub type T2 = Tensor<B, 2>;
pub type T3 = Tensor<B, 3>;
pub type T4 = Tensor<B, 4>;
pub type I1 = Tensor<B, 1, Int>;
pub type I2 = Tensor<B, 2, Int>;

pub const EXAMPLES: usize = 4;
pub const WIDTH: usize = 6;
pub const HIDDEN: usize = 8;
pub const CLASSES: usize = 3;
pub const LENGTH: usize = 5;
pub const VOCABULARY: usize = 7;

/// A learning rate that suits every optimizer here.
pub const LR: f64 = 0.05;

/// Two layers.
#[derive(Module, Debug)]
pub struct Mlp<B: Backend> {
    pub first: Linear<B>,
    pub second: Linear<B>,
}

impl<B: Backend> Mlp<B> {
    pub fn new(device: &B::Device) -> Self {
        Self {
            first: LinearConfig::new(WIDTH, HIDDEN).init(device),
            second: LinearConfig::new(HIDDEN, CLASSES).init(device),
        }
    }

    pub fn forward(&self, x: Tensor<B, 2>) -> Tensor<B, 2> {
        self.second.forward(relu(self.first.forward(x)))
    }
}

/// Two layers with batch norm between.
#[derive(Module, Debug)]
pub struct Normed<B: Backend> {
    pub first: Linear<B>,
    pub norm: BatchNorm<B>,
    pub second: Linear<B>,
}

impl<B: Backend> Normed<B> {
    pub fn new(device: &B::Device) -> Self {
        Self {
            first: LinearConfig::new(WIDTH, HIDDEN).init(device),
            norm: BatchNormConfig::new(HIDDEN).init(device),
            second: LinearConfig::new(HIDDEN, CLASSES).init(device),
        }
    }

    pub fn forward(&self, x: Tensor<B, 2>) -> Tensor<B, 2> {
        self.second
            .forward(relu(self.norm.forward(self.first.forward(x))))
    }
}

/// Two layers with dropout between.
#[derive(Module, Debug)]
pub struct Dropped<B: Backend> {
    pub first: Linear<B>,
    pub dropout: Dropout,
    pub second: Linear<B>,
}

impl<B: Backend> Dropped<B> {
    pub fn new(device: &B::Device) -> Self {
        Self {
            first: LinearConfig::new(WIDTH, HIDDEN).init(device),
            dropout: DropoutConfig::new(0.3).init(),
            second: LinearConfig::new(HIDDEN, CLASSES).init(device),
        }
    }

    pub fn forward(&self, x: Tensor<B, 2>) -> Tensor<B, 2> {
        self.second
            .forward(self.dropout.forward(relu(self.first.forward(x))))
    }
}

/// `model` with its weights drawn. Burn draws them at first use, and each clone of an unused model would
/// draw its own.
pub fn drawn<M: Module<B>>(model: M) -> M {
    parameters::<B, M>(&model);
    model
}

impl Program {
    pub fn mlp(&self) -> Mlp<B> {
        drawn(Mlp::new(&self.device()))
    }

    pub fn normed(&self) -> Normed<B> {
        drawn(Normed::new(&self.device()))
    }

    pub fn dropped(&self) -> Dropped<B> {
        drawn(Dropped::new(&self.device()))
    }

    /// Numbers between -1.3 and 1.3 that depend on `seed` and shape alone.
    pub fn waves<const D: usize>(&self, seed: usize, shape: [usize; D]) -> Tensor<B, D> {
        let value = |index: usize| (((index * 37 + seed * 101 + 13) % 97) as f32 / 48.5 - 1.0) * 1.3;
        let values: Vec<f32> = (0..shape.iter().product()).map(value).collect();
        Tensor::from_data(TensorData::new(values, shape), &self.device())
    }

    /// Integers below `bound` that depend on `seed` and shape alone.
    pub fn indices<const D: usize>(&self, seed: usize, shape: [usize; D], bound: usize) -> Tensor<B, D, Int> {
        let values: Vec<i64> = (0..shape.iter().product())
            .map(|index| ((index * 7 + seed * 11 + index * index) % bound) as i64)
            .collect();
        Tensor::from_data(TensorData::new(values, shape), &self.device())
    }

    /// The inputs of a call: `[EXAMPLES, WIDTH]`.
    pub fn x(&self, call: usize) -> T2 {
        self.waves(call, [EXAMPLES, WIDTH])
    }

    /// Targets of a regression: `[EXAMPLES, CLASSES]`.
    pub fn y(&self, call: usize) -> T2 {
        self.waves(call + 1000, [EXAMPLES, CLASSES])
    }

    /// Labels: `[EXAMPLES]`.
    pub fn labels(&self, call: usize) -> I1 {
        self.indices(call, [EXAMPLES], CLASSES)
    }

    /// Inputs and labels.
    pub fn batch(&self, call: usize) -> (T2, I1) {
        (self.x(call), self.labels(call))
    }
}

pub fn mse(found: T2, target: T2) -> T1 {
    MseLoss::new().forward(found, target, Reduction::Mean)
}

pub fn cross_entropy(logits: T2, labels: I1) -> T1 {
    let device = logits.device();
    CrossEntropyLossConfig::new()
        .init(&device)
        .forward(logits, labels)
}

/// A loss without a target.
pub fn energy<const D: usize>(x: Tensor<B, D>) -> T1 {
    x.powf_scalar(2.0).mean()
}

pub fn sgd<M: burn::module::AutodiffModule<B>>() -> OptimizerAdaptor<burn_optim::Sgd<Kiln>, M, B> {
    SgdConfig::new().init()
}

pub fn momentum<M: burn::module::AutodiffModule<B>>() -> OptimizerAdaptor<burn_optim::Sgd<Kiln>, M, B> {
    SgdConfig::new().with_momentum(Some(MomentumConfig::new())).init()
}

/// AdamW with an epsilon that leaves the rounding of a gradient that should be zero rounding.
pub fn adamw<M: burn::module::AutodiffModule<B>>() -> OptimizerAdaptor<burn_optim::AdamW, M, B> {
    AdamWConfig::new().with_epsilon(1e-3).init()
}
