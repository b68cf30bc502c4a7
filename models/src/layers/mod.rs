//! Parts that several families share and that Burn's own library has not, or has with other details.

mod activation;
mod attention;
mod batch_norm;
mod conv;
mod embedding;
mod inverted;

pub use activation::{Activation, gelu};
pub use attention::{attention, causal_mask, merge_heads, split_heads};
pub use batch_norm::{BatchNorm2d, BatchNorm2dConfig};
pub use conv::{ConvInit, ConvSpec, adaptive_avg_pool, global_avg_pool, max_pool2d, normal_linear};
pub use embedding::TokenEmbedding;
pub use inverted::{ConvNorm, InvertedResidual, InvertedSpec, Rectifier, round_channels};
