//! The activations that configurations of transformers name.

use burn::config::Config;
use burn::tensor::Tensor;
use burn::tensor::activation::{gelu_approximate, relu, silu};
use burn::tensor::backend::Backend;

/// A pointwise activation.
#[derive(Config, Debug, Copy, PartialEq, Eq)]
pub enum Activation {
    /// Exact GELU, `x Φ(x)`.
    Gelu,
    /// GELU by the hyperbolic tangent.
    GeluTanh,
    /// `max(0, x)`.
    Relu,
    /// `x σ(x)`, also called swish.
    Silu,
}

impl Activation {
    /// Names that [`Activation::from_name`] accepts.
    pub const NAMES: &'static str = "gelu, gelu_new, gelu_pytorch_tanh, relu, silu, swish";

    /// The activation that transformers calls `name`.
    pub fn from_name(name: &str) -> Option<Self> {
        match name {
            "gelu" | "gelu_python" => Some(Self::Gelu),
            "gelu_new" | "gelu_pytorch_tanh" => Some(Self::GeluTanh),
            "relu" => Some(Self::Relu),
            "silu" | "swish" => Some(Self::Silu),
            _ => None,
        }
    }

    /// The name under which transformers knows the activation.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Gelu => "gelu",
            Self::GeluTanh => "gelu_new",
            Self::Relu => "relu",
            Self::Silu => "silu",
        }
    }

    /// Applies the activation to every element.
    pub fn forward<B: Backend, const D: usize>(&self, input: Tensor<B, D>) -> Tensor<B, D> {
        match self {
            Self::Gelu => gelu(input),
            Self::GeluTanh => gelu_approximate(input),
            Self::Relu => relu(input),
            Self::Silu => silu(input),
        }
    }
}

/// Exact GELU, `x Φ(x) = x (1 + erf(x / √2)) / 2`, of any shape.
///
/// Composed rather than Burn's own function: backends that do not bring a gradient of their own for that one
/// get its approximation by the hyperbolic tangent, which is up to 1e-3 off.
pub fn gelu<B: Backend, const D: usize>(x: Tensor<B, D>) -> Tensor<B, D> {
    let twice = (x.clone() * std::f64::consts::FRAC_1_SQRT_2).erf() + 1.0;
    x * twice * 0.5
}
