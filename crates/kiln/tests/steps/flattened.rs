//! A network of images whose normalised channels are flattened for a linear layer, as small classifiers are
//! written.

use burn::module::Module;
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::{BatchNorm, BatchNormConfig, Linear, LinearConfig};
use burn::tensor::Tensor;
use burn::tensor::backend::Backend;
use burn_optim::SgdConfig;

use crate::harness::*;
use crate::models::*;

/// Norms of the input, of images and of vectors.
#[derive(Module, Debug)]
struct Flattened<B: Backend> {
    input: BatchNorm<B>,
    first: Conv2d<B>,
    norm: BatchNorm<B>,
    second: Conv2d<B>,
    again: BatchNorm<B>,
    middle: Linear<B>,
    vectors: BatchNorm<B>,
    last: Linear<B>,
}

impl<B: Backend> Flattened<B> {
    fn new(device: &B::Device) -> Self {
        Self {
            input: BatchNormConfig::new(3).init(device),
            first: Conv2dConfig::new([3, 4], [3, 3])
                .with_padding(burn::nn::PaddingConfig2d::Explicit(1, 1, 1, 1))
                .init(device),
            norm: BatchNormConfig::new(4).init(device),
            second: Conv2dConfig::new([4, 4], [1, 1]).init(device),
            again: BatchNormConfig::new(4).init(device),
            middle: LinearConfig::new(4 * 4 * 4, 5).init(device),
            vectors: BatchNormConfig::new(5).init(device),
            last: LinearConfig::new(5, CLASSES).init(device),
        }
    }
}

impl<B: Backend> Trainable<B> for Flattened<B> {
    fn logits(&self, batch: &Batch<B>) -> Tensor<B, 2> {
        let x = batch.values.clone().reshape([-1, 3, 4, 4]);
        let x = self
            .norm
            .forward(self.first.forward(self.input.forward(x)))
            .tanh();
        let x = self.again.forward(self.second.forward(x)).tanh();
        let x = self.middle.forward(x.flatten::<2>(1, 3));
        self.last.forward(self.vectors.forward(x).tanh())
    }
}

#[test]
fn normalised_images_are_flattened_for_a_linear_layer() {
    compare!(
        burn_autodiff::Autodiff<burn_flex::Flex>,
        Flattened,
        |device| Flattened::new(device),
        SgdConfig::new().init(),
        4,
        [AotEager, Cpu]
    );
}
