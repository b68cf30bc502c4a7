//! A multilayer perceptron with GELU: the smallest model that has every phase of a training step.
//!
//! The original is `nn.Sequential(Linear, GELU, Linear, GELU, ..., Linear)`, whose parameters are numbered by
//! their place in the sequence; the activations count, so layer `i` is item `2 i`.

use crate::keys::Pretrained;
use crate::layers::gelu;
use crate::loss::CrossEntropy;
use burn::config::Config;
use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::tensor::backend::Backend;
use burn::tensor::{Int, Tensor};

/// Configuration of an [`Mlp`].
#[derive(Config, Debug)]
pub struct MlpConfig {
    /// Widths of the input, the hidden layers and the output. Default: 784, 1024, 1024, 10
    #[config(default = "vec![784, 1024, 1024, 10]")]
    pub widths: Vec<usize>,
}

/// A multilayer perceptron, see the [module's documentation](self).
#[derive(Module, Debug)]
pub struct Mlp<B: Backend> {
    /// The linear layers in order.
    pub layers: Vec<Linear<B>>,
}

impl MlpConfig {
    /// Builds the model with PyTorch's default initialisation of linear layers.
    pub fn init<B: Backend>(&self, device: &B::Device) -> Mlp<B> {
        let layers = self
            .widths
            .windows(2)
            .map(|pair| LinearConfig::new(pair[0], pair[1]).init(device));
        Mlp {
            layers: layers.collect(),
        }
    }
}

impl<B: Backend> Mlp<B> {
    /// Logits of a batch of vectors: `[batch, input]` to `[batch, output]`.
    pub fn forward(&self, input: Tensor<B, 2>) -> Tensor<B, 2> {
        let mut hidden = input;
        for (index, layer) in self.layers.iter().enumerate() {
            if index > 0 {
                hidden = gelu(hidden);
            }
            hidden = layer.forward(hidden);
        }
        hidden
    }

    /// Mean cross entropy against class indices `[batch]`; output `[1]`.
    pub fn loss(&self, input: Tensor<B, 2>, targets: Tensor<B, 1, Int>) -> Tensor<B, 1> {
        CrossEntropy::new().forward(self.forward(input), targets)
    }
}

impl<B: Backend> Pretrained<B> for Mlp<B> {
    fn family(&self) -> &'static str {
        "mlp"
    }

    fn original_key(&self, path: &str) -> String {
        let item = path.strip_prefix("layers.").and_then(|rest| rest.split_once('.'));
        match item.and_then(|(index, leaf)| Some((index.parse::<usize>().ok()?, leaf))) {
            Some((index, leaf)) => format!("{}.{leaf}", 2 * index),
            None => path.to_string(),
        }
    }
}
