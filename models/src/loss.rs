//! Losses with the meaning of `torch.nn.functional`, written so that a target is an index, never a one-hot
//! matrix.

use burn::tensor::activation::{log_sigmoid, log_softmax};
use burn::tensor::backend::Backend;
use burn::tensor::{Int, Tensor};

/// Cross entropy of logits against class indices, averaged over the samples that count.
///
/// ```
/// use burn::tensor::Tensor;
/// use kiln_models::loss::CrossEntropy;
///
/// # type B = burn_flex::Flex;
/// let device = Default::default();
/// let logits = Tensor::<B, 2>::zeros([3, 4], &device);
/// let targets = Tensor::<B, 1, burn::tensor::Int>::from_ints([0, 1, 2], &device);
/// let loss = CrossEntropy::new().with_label_smoothing(0.1).forward(logits, targets);
/// assert!((loss.into_scalar() - 4f32.ln()).abs() < 1e-6);
/// ```
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct CrossEntropy {
    label_smoothing: f64,
    ignore_index: Option<i64>,
}

impl CrossEntropy {
    /// Plain cross entropy: no smoothing, every target counts.
    pub fn new() -> Self {
        Self::default()
    }

    /// Mixes each target distribution with the uniform one: `(1 - alpha) * one_hot + alpha / classes`.
    pub fn with_label_smoothing(mut self, alpha: f64) -> Self {
        self.label_smoothing = alpha;
        self
    }

    /// Samples with this target count neither in the sum nor in the mean (PyTorch's `ignore_index`, usually
    /// -100).
    ///
    /// A batch in which no target counts has loss 0, where PyTorch returns NaN.
    pub fn with_ignore_index(mut self, index: i64) -> Self {
        self.ignore_index = Some(index);
        self
    }

    /// Mean loss over the samples that count.
    ///
    /// # Shapes
    ///
    /// - logits: `[samples, classes]`
    /// - targets: `[samples]`, each below `classes` or the ignored index
    /// - output: `[1]`
    ///
    /// # Panics
    ///
    /// If a target is neither a class nor the ignored index. A compiled step reports it as an error.
    pub fn forward<B: Backend>(&self, logits: Tensor<B, 2>, targets: Tensor<B, 1, Int>) -> Tensor<B, 1> {
        let [samples, _] = logits.dims();
        let log_probs = log_softmax(logits, 1);
        let ignored = self.ignore_index.map(|index| targets.clone().equal_elem(index));
        // An ignored target picks class 0 and its term is masked away below. Any other target outside of the
        // classes reaches the gather as it is, so that the backend refuses it.
        let indices = match &ignored {
            Some(ignored) => targets.mask_fill(ignored.clone(), 0),
            None => targets,
        };
        let picked = log_probs
            .clone()
            .gather(1, indices.reshape([samples, 1]))
            .reshape([samples]);
        let gain = if self.label_smoothing > 0.0 {
            let uniform = log_probs.mean_dim(1).reshape([samples]);
            picked.mul_scalar(1.0 - self.label_smoothing) + uniform.mul_scalar(self.label_smoothing)
        } else {
            picked
        };
        match ignored {
            None => gain.mean().neg(),
            Some(ignored) => {
                let counted = ignored
                    .clone()
                    .bool_not()
                    .float()
                    .cast(gain.dtype())
                    .sum()
                    .clamp_min(1.0);
                gain.mask_fill(ignored, 0.0).sum().neg() / counted
            }
        }
    }
}

/// Cross entropy of every position of a sequence: `logits` `[batch, length, classes]`, `targets`
/// `[batch, length]`.
pub fn sequence_cross_entropy<B: Backend>(
    loss: &CrossEntropy,
    logits: Tensor<B, 3>,
    targets: Tensor<B, 2, Int>,
) -> Tensor<B, 1> {
    let [batch, length, classes] = logits.dims();
    loss.forward(
        logits.reshape([batch * length, classes]),
        targets.reshape([batch * length]),
    )
}

/// Mean squared error over all elements; output `[1]`.
pub fn mean_squared_error<B: Backend, const D: usize>(
    prediction: Tensor<B, D>,
    target: Tensor<B, D>,
) -> Tensor<B, 1> {
    (prediction - target).square().mean()
}

/// Binary cross entropy of logits against targets in `[0, 1]`, mean over all elements; output `[1]`.
pub fn binary_cross_entropy<B: Backend, const D: usize>(
    logits: Tensor<B, D>,
    target: Tensor<B, D>,
) -> Tensor<B, 1> {
    // -(t log s(x) + (1 - t) log s(-x)), and log s(-x) = log s(x) - x.
    let log_sigmoid = log_sigmoid(logits.clone());
    (logits.clone() - logits * target - log_sigmoid).mean()
}
