//! Token embedding with PyTorch's padding index.
//!
//! `nn.Embedding(padding_idx=p)` looks up row `p` like any other, but the lookup sends it no gradient, and
//! the row begins at zero. The same is done here by detaching the looked-up vectors where the token is the
//! padding token.

use burn::module::{Module, Param, ParamId};
use burn::tensor::backend::Backend;
use burn::tensor::module::{embedding, linear};
use burn::tensor::{Distribution, Int, Shape, Tensor};

/// Token embedding whose padding token gets no gradient from its lookup, as in PyTorch.
#[derive(Module, Debug)]
pub struct TokenEmbedding<B: Backend> {
    /// Table of shape `[tokens, width]`.
    pub weight: Param<Tensor<B, 2>>,
    padding_index: Option<usize>,
}

impl<B: Backend> TokenEmbedding<B> {
    /// A table with normal entries of standard deviation `std`; the padding row, if there is one, is zero.
    pub fn new(
        tokens: usize,
        width: usize,
        std: f64,
        padding_index: Option<usize>,
        device: &B::Device,
    ) -> Self {
        let padding_index = padding_index.filter(|index| *index < tokens);
        let init = move |device: &B::Device, require_grad: bool| {
            let mut table = Tensor::<B, 2>::random([tokens, width], Distribution::Normal(0.0, std), device);
            if let Some(row) = padding_index {
                table = table.slice_fill([row..row + 1, 0..width], 0.0);
            }
            table.set_require_grad(require_grad)
        };
        let shape = Shape::from([tokens, width]);
        Self {
            weight: Param::uninitialized(ParamId::new(), init, device.clone(), true, shape),
            padding_index,
        }
    }

    /// Vectors of tokens: `[batch, length]` to `[batch, length, width]`.
    pub fn forward(&self, tokens: Tensor<B, 2, Int>) -> Tensor<B, 3> {
        let vectors = embedding(self.weight.val(), tokens.clone());
        match self.padding_index {
            Some(index) if B::ad_enabled(&vectors.device()) => {
                let padding = tokens
                    .equal_elem(index as i64)
                    .unsqueeze_dim::<3>(2)
                    .expand(vectors.shape());
                vectors.clone().mask_where(padding, vectors.detach())
            }
            _ => vectors,
        }
    }

    /// The table used as the output projection (tied weights): `[batch, length, width]` to
    /// `[batch, length, tokens]`.
    pub fn logits(&self, hidden: Tensor<B, 3>) -> Tensor<B, 3> {
        linear(hidden, self.weight.val().transpose(), None)
    }
}
