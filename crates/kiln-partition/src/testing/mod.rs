//! Joint graphs of real models, for tests and benchmarks: behind the feature `testing`.
//!
//! The functions here panic where a test would want to know: on shapes that do not fit, and on operations
//! without a gradient.

mod models;
mod ranks;
mod tape;

use kiln_graph::{DType, Graph, HostTensor, Scalar, TensorType};

pub use models::{
    Sizes, accumulating_step, adversarial_step, apply, decoder, decoder_step, perceptron, repeated_step,
    squared,
};
pub use ranks::{arguments_of_ranks, averaged_decoder, averaged_gradients, sharded_decoder};
pub use tape::Tape;

/// An f32 type.
pub fn f32s(shape: &[usize]) -> TensorType {
    TensorType::new(DType::F32, shape)
}

/// Arguments for a graph: small floats, small indices, scalars of their type.
pub fn arguments(graph: &Graph, seed: u64) -> (Vec<HostTensor>, Vec<Scalar>) {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut next = move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 11) as f64 / (1u64 << 53) as f64
    };
    let tensors = graph.parameters().iter().map(|&value| {
        let ty = graph.ty(value);
        if ty.dtype.is_float() {
            let values: Vec<f64> = (0..ty.numel()).map(|_| 0.05 + 0.5 * next()).collect();
            HostTensor::from_floats(ty.dtype, ty.shape.clone(), values)
        } else {
            let values: Vec<i64> = (0..ty.numel()).map(|_| (next() * 3.0) as i64).collect();
            HostTensor::from_ints(ty.dtype, ty.shape.clone(), values)
        }
    });
    let tensors = tensors.collect();
    let scalars = graph
        .scalars()
        .iter()
        .enumerate()
        .map(|(i, &value)| match graph.dtype(value) {
            DType::U64 => Scalar::UInt(7 + i as u64),
            _ => Scalar::Float(0.01),
        });
    (tensors, scalars.collect())
}
