//! Batch normalisation over `[batch, channels, height, width]` with PyTorch's running statistics.
//!
//! Burn's `BatchNorm` stores the batch's biased variance in its running average; PyTorch stores the unbiased
//! one (divided by `n - 1`). Evaluation reads the running average, so a model trained here and evaluated
//! there, or the other way round, only agrees when both keep the same number. The arithmetic of the forward
//! pass is that of Burn's layer.

use burn::config::Config;
use burn::module::{Initializer, Module, Param, RunningState};
use burn::tensor::Tensor;
use burn::tensor::backend::Backend;

/// Configuration of a [`BatchNorm2d`].
#[derive(Config, Debug)]
pub struct BatchNorm2dConfig {
    /// Number of channels.
    pub channels: usize,
    /// Added to the variance. Default: 1e-5
    #[config(default = 1e-5)]
    pub epsilon: f64,
    /// Share of the batch's statistics in the new running statistics. Default: 0.1
    #[config(default = 0.1)]
    pub momentum: f64,
}

/// Batch normalisation of images with PyTorch's running statistics: the running variance is the unbiased one.
#[derive(Module, Debug)]
pub struct BatchNorm2d<B: Backend> {
    /// Scale, shape `[channels]`.
    pub gamma: Param<Tensor<B, 1>>,
    /// Shift, shape `[channels]`.
    pub beta: Param<Tensor<B, 1>>,
    /// Running mean, shape `[channels]`.
    pub running_mean: RunningState<Tensor<B, 1>>,
    /// Running unbiased variance, shape `[channels]`.
    pub running_var: RunningState<Tensor<B, 1>>,
    epsilon: f64,
    momentum: f64,
}

impl BatchNorm2dConfig {
    /// Scale 1, shift 0, running mean 0, running variance 1.
    pub fn init<B: Backend>(&self, device: &B::Device) -> BatchNorm2d<B> {
        BatchNorm2d {
            gamma: Initializer::Ones.init([self.channels], device),
            beta: Initializer::Zeros.init([self.channels], device),
            running_mean: RunningState::new(Tensor::zeros([self.channels], device)),
            running_var: RunningState::new(Tensor::ones([self.channels], device)),
            epsilon: self.epsilon,
            momentum: self.momentum,
        }
    }
}

impl<B: Backend> BatchNorm2d<B> {
    /// Normalises each channel: by the batch's statistics on an autodiff backend (and updates the running
    /// ones), by the running statistics otherwise.
    ///
    /// # Shapes
    ///
    /// - input, output: `[batch, channels, height, width]`
    pub fn forward(&self, input: Tensor<B, 4>) -> Tensor<B, 4> {
        if B::ad_enabled(&input.device()) {
            self.forward_train(input)
        } else {
            self.forward_inference(input)
        }
    }

    fn forward_inference(&self, input: Tensor<B, 4>) -> Tensor<B, 4> {
        let shape = [1, input.dims()[1], 1, 1];
        let mean = self.running_mean.value().reshape(shape);
        let var = self.running_var.value().reshape(shape);
        self.normalise(input, mean, var)
    }

    fn forward_train(&self, input: Tensor<B, 4>) -> Tensor<B, 4> {
        let [batch, channels, height, width] = input.dims();
        let count = batch * height * width;
        let shape = [1, channels, 1, 1];
        let rows = |tensor: Tensor<B, 4>| tensor.swap_dims(0, 1).reshape([channels, count]);

        let mean = rows(input.clone()).mean_dim(1).reshape(shape);
        let var = rows(input.clone().sub(mean.clone()).square())
            .mean_dim(1)
            .reshape(shape);

        let unbias = if count > 1 {
            count as f64 / (count as f64 - 1.0)
        } else {
            1.0
        };
        self.update(
            &self.running_mean,
            mean.clone().detach().reshape([channels]),
            self.momentum,
        );
        self.update(
            &self.running_var,
            var.clone().detach().reshape([channels]),
            self.momentum * unbias,
        );
        self.normalise(input, mean, var)
    }

    /// `running = (1 - momentum) * running + weight * batch`.
    fn update(&self, running: &RunningState<Tensor<B, 1>>, batch: Tensor<B, 1>, weight: f64) {
        let old = running.value_sync().to_device(&batch.device());
        running.update((old.mul_scalar(1.0 - self.momentum) + batch.mul_scalar(weight)).detach());
    }

    fn normalise(&self, input: Tensor<B, 4>, mean: Tensor<B, 4>, var: Tensor<B, 4>) -> Tensor<B, 4> {
        let shape = [1, input.dims()[1], 1, 1];
        let std = var.add_scalar(self.epsilon).sqrt();
        input
            .sub(mean)
            .div(std)
            .mul(self.gamma.val().reshape(shape))
            .add(self.beta.val().reshape(shape))
    }
}
