//! A small module with one of everything, and safetensors files written by hand.

use burn_core as burn;
use burn_core::module::Module;
use burn_flex::Flex;
use burn_nn::{BatchNorm, BatchNormConfig, Embedding, EmbeddingConfig, Linear, LinearConfig};
use burn_tensor::backend::Backend;
use kiln_hub::{KeyMap, Transform};
use safetensors::tensor::{Dtype, TensorView};

pub type B = Flex;

#[derive(Module, Debug)]
pub struct Net<B: Backend> {
    pub embed: Embedding<B>,
    pub layers: Vec<Linear<B>>,
    pub norm: BatchNorm<B>,
    pub head: Option<Linear<B>>,
}

impl<B: Backend> Net<B> {
    pub fn new(device: &B::Device) -> Self {
        Self {
            embed: EmbeddingConfig::new(7, 4).init(device),
            layers: vec![
                LinearConfig::new(4, 6).init(device),
                LinearConfig::new(6, 4).with_bias(false).init(device),
            ],
            norm: BatchNormConfig::new(4).init(device),
            head: Some(LinearConfig::new(4, 3).init(device)),
        }
    }
}

/// The module's parameters under the names that PyTorch would give them.
pub fn torch_map() -> KeyMap {
    let rules = [
        ("embed.weight", "word_embeddings.weight", Transform::None),
        ("layers.0.weight", "mlp.0.weight", Transform::Transpose),
        ("layers.0.bias", "mlp.0.bias", Transform::None),
        ("layers.1.weight", "mlp.2.weight", Transform::Transpose),
        ("norm.gamma", "bn.weight", Transform::None),
        ("norm.beta", "bn.bias", Transform::None),
        ("norm.running_mean", "bn.running_mean", Transform::None),
        ("norm.running_var", "bn.running_var", Transform::None),
        ("head.weight", "classifier.weight", Transform::Transpose),
        ("head.bias", "classifier.bias", Transform::None),
    ];
    rules
        .into_iter()
        .map(|(param, key, transform)| (param.to_string(), key.to_string(), transform))
        .collect()
}

/// Key and shape of every tensor that `torch_map` names.
pub const TORCH_SHAPES: [(&str, &[usize]); 10] = [
    ("word_embeddings.weight", &[7, 4]),
    ("mlp.0.weight", &[6, 4]),
    ("mlp.0.bias", &[6]),
    ("mlp.2.weight", &[4, 6]),
    ("bn.weight", &[4]),
    ("bn.bias", &[4]),
    ("bn.running_mean", &[4]),
    ("bn.running_var", &[4]),
    ("classifier.weight", &[3, 4]),
    ("classifier.bias", &[3]),
];

/// A value for each element of each tensor; exact in bf16 below 64.
pub fn element(tensor: usize, index: usize) -> f32 {
    (tensor as f32 + 1.0) * 8.0 + (index % 31) as f32 * 0.25
}

pub fn f32_bytes(values: impl Iterator<Item = f32>) -> Vec<u8> {
    values.flat_map(f32::to_le_bytes).collect()
}

/// A checkpoint file in memory with the given tensors of f32.
pub fn safetensors_of(tensors: &[(&str, &[usize])]) -> Vec<u8> {
    let data: Vec<Vec<u8>> = tensors
        .iter()
        .enumerate()
        .map(|(t, (_, shape))| f32_bytes((0..shape.iter().product::<usize>()).map(|i| element(t, i))))
        .collect();
    let views = tensors
        .iter()
        .zip(&data)
        .map(|((name, shape), bytes)| (*name, TensorView::new(Dtype::F32, shape.to_vec(), bytes).unwrap()));
    safetensors::serialize(views, None).unwrap()
}

/// A safetensors file from a header and data, valid or not.
pub fn raw_safetensors(header: &str, data: &[u8]) -> Vec<u8> {
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend_from_slice(header.as_bytes());
    bytes.extend_from_slice(data);
    bytes
}
