//! Llama 2 and 3: decoder-only transformers with RMS norm, rotary positions, grouped-query attention and
//! SwiGLU.
//!
//! The modules mirror transformers' `LlamaForCausalLM`: pre-norm layers, key and value heads shared by groups
//! of query heads, no biases unless the configuration says so, the output projection tied to the embeddings
//! if it says so. All weights begin normal with standard deviation 0.02. TinyLlama, SmolLM and other models
//! with the same configuration format read as they are.

mod cache;
mod config;
mod decoder;
mod generate;
mod rope;
mod sample;

pub use cache::{KvCache, LayerCache};
pub use config::LlamaConfig;
pub use decoder::{DecoderLayer, Llama, LlamaAttention, LlamaMlp, LlamaModel};
pub use generate::GenerateConfig;
pub use rope::{RopeScaling, RotaryEmbedding};
pub use sample::Sampler;
