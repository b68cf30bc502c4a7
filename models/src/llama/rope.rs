//! Rotary positions: pairs of coordinates of each query and key turn by an angle that grows with the
//! position.
//!
//! Coordinate `i` of the first half of a head is paired with coordinate `i` of the second half, and the pair
//! at position `p` turns by `p * theta^(-2 i / head_dim)`. Scaling changes these frequencies:
//!
//! - linear divides all of them by a factor;
//! - dynamic raises `theta` as the sequence outgrows the trained length;
//! - llama3 leaves high frequencies alone, divides low ones by a factor, and interpolates between.
//!
//! The cosines and sines of the first positions are constants of the module. They are computed on the host in
//! f32, as the original does, because the angle of a late position is large enough for the rounding to show.
//! Sequences beyond the table get theirs when they come, still from shapes alone.

use burn::config::Config;
use burn::module::Module;
use burn::tensor::backend::Backend;
use burn::tensor::{Tensor, TensorData};
use std::f32::consts::PI;

/// Positions whose cosines and sines are kept.
const TABLE_POSITIONS: usize = 4096;

/// How rotary frequencies are scaled, see the formulas of transformers' `rope_type` of the same names.
#[derive(Config, Debug, Copy, PartialEq)]
pub enum RopeScaling {
    /// Not at all.
    None,
    /// All frequencies divided by `factor`.
    Linear {
        /// The divisor.
        factor: f64,
    },
    /// `theta` grows with sequences longer than `max_position_embeddings`.
    Dynamic {
        /// Stretch of the context.
        factor: f64,
    },
    /// Low frequencies divided by `factor`, high ones kept.
    Llama3 {
        /// The divisor of low frequencies.
        factor: f64,
        /// Wavelengths above `original_max_position_embeddings / low_freq_factor` are low frequencies.
        low_freq_factor: f64,
        /// Wavelengths below `original_max_position_embeddings / high_freq_factor` are high frequencies.
        high_freq_factor: f64,
        /// Length of the sequences the model was first trained on.
        original_max_position_embeddings: usize,
    },
}

impl RopeScaling {
    /// Numeric fields that must be positive, with their names.
    pub(super) fn positive_fields(&self) -> Vec<(&'static str, f64)> {
        match *self {
            Self::None => Vec::new(),
            Self::Linear { factor } | Self::Dynamic { factor } => vec![("factor", factor)],
            Self::Llama3 {
                factor,
                low_freq_factor,
                high_freq_factor,
                original_max_position_embeddings,
            } => {
                vec![
                    ("factor", factor),
                    ("low_freq_factor", low_freq_factor),
                    ("high_freq_factor", high_freq_factor),
                    (
                        "original_max_position_embeddings",
                        original_max_position_embeddings as f64,
                    ),
                ]
            }
        }
    }

    /// The value of `rope_scaling` in a `config.json`; `None` for no scaling.
    pub(super) fn to_hf(self) -> Option<serde_json::Value> {
        match self {
            Self::None => None,
            Self::Linear { factor } => Some(serde_json::json!({ "rope_type": "linear", "factor": factor })),
            Self::Dynamic { factor } => Some(serde_json::json!({ "rope_type": "dynamic", "factor": factor })),
            Self::Llama3 {
                factor,
                low_freq_factor,
                high_freq_factor,
                original_max_position_embeddings,
            } => Some(serde_json::json!({
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": low_freq_factor,
                "high_freq_factor": high_freq_factor,
                "original_max_position_embeddings": original_max_position_embeddings,
            })),
        }
    }
}

/// What the frequencies depend on.
#[derive(Debug, Clone, Copy)]
pub(super) struct RopeSpec {
    pub head_dim: usize,
    pub theta: f64,
    pub max_positions: usize,
    pub scaling: RopeScaling,
}

impl RopeSpec {
    /// Angle per position of each pair, for sequences of `length` positions.
    fn frequencies(&self, length: usize) -> Vec<f32> {
        let dim = self.head_dim as f64;
        let theta = match self.scaling {
            RopeScaling::Dynamic { factor } if length > self.max_positions => {
                let stretch = factor * length as f64 / self.max_positions as f64 - (factor - 1.0);
                self.theta * stretch.powf(dim / (dim - 2.0))
            }
            _ => self.theta,
        };
        let plain = (0..self.head_dim / 2).map(|pair| {
            let exponent = (2 * pair) as f32 / self.head_dim as f32;
            1.0 / (theta as f32).powf(exponent)
        });
        match self.scaling {
            RopeScaling::None | RopeScaling::Dynamic { .. } => plain.collect(),
            RopeScaling::Linear { factor } => plain.map(|frequency| frequency / factor as f32).collect(),
            RopeScaling::Llama3 {
                factor,
                low_freq_factor,
                high_freq_factor,
                original_max_position_embeddings,
            } => {
                let (factor, low, high) = (factor as f32, low_freq_factor as f32, high_freq_factor as f32);
                let trained = original_max_position_embeddings as f32;
                plain
                    .map(|frequency| {
                        let wavelength = 2.0 * PI / frequency;
                        if wavelength < trained / high {
                            frequency
                        } else if wavelength > trained / low {
                            frequency / factor
                        } else {
                            let smooth = (trained / wavelength - low) / (high - low);
                            (1.0 - smooth) * frequency / factor + smooth * frequency
                        }
                    })
                    .collect()
            }
        }
    }

    /// Cosines and sines of positions `from..to`, each of shape `[to - from, head_dim / 2]`, in a sequence of
    /// `to` positions.
    fn tables<B: Backend>(&self, from: usize, to: usize, device: &B::Device) -> [Tensor<B, 2>; 2] {
        let frequencies = self.frequencies(to);
        let shape = [to - from, frequencies.len()];
        let angles: Vec<f32> = (from..to)
            .flat_map(|position| {
                frequencies
                    .iter()
                    .map(move |frequency| position as f32 * frequency)
            })
            .collect();
        let tensor = |values: Vec<f32>| Tensor::from_data(TensorData::new(values, shape), device);
        [
            tensor(angles.iter().map(|angle| angle.cos()).collect()),
            tensor(angles.iter().map(|angle| angle.sin()).collect()),
        ]
    }
}

/// Rotary positions of one model.
#[derive(Module, Debug)]
pub struct RotaryEmbedding<B: Backend> {
    /// Cosines of the first positions, `[positions, head_dim / 2]`.
    cos: Tensor<B, 2>,
    /// Sines of the first positions, `[positions, head_dim / 2]`.
    sin: Tensor<B, 2>,
    #[module(skip)]
    spec: RopeSpec,
}

impl<B: Backend> RotaryEmbedding<B> {
    pub(super) fn new(spec: RopeSpec, device: &B::Device) -> Self {
        let [cos, sin] = spec.tables(0, spec.max_positions.min(TABLE_POSITIONS), device);
        Self { cos, sin, spec }
    }

    /// Cosines and sines of positions `from..to`, each `[to - from, head_dim / 2]`.
    pub fn positions(&self, from: usize, to: usize) -> [Tensor<B, 2>; 2] {
        if to <= self.cos.dims()[0] {
            [
                self.cos.clone().slice_dim(0, from..to),
                self.sin.clone().slice_dim(0, from..to),
            ]
        } else {
            self.spec.tables(from, to, &self.cos.device())
        }
    }

    /// Turns heads `[batch, heads, length, head_dim]` by the angles of their positions.
    pub fn rotate(heads: Tensor<B, 4>, [cos, sin]: &[Tensor<B, 2>; 2]) -> Tensor<B, 4> {
        let [_, _, length, dim] = heads.dims();
        let dtype = heads.dtype();
        let cos = cos.clone().cast(dtype).reshape([1, 1, length, dim / 2]);
        let sin = sin.clone().cast(dtype).reshape([1, 1, length, dim / 2]);
        let first = heads.clone().slice_dim(3, 0..dim / 2);
        let second = heads.slice_dim(3, dim / 2..dim);
        let turned_first = first.clone() * cos.clone() - second.clone() * sin.clone();
        let turned_second = second * cos + first * sin;
        Tensor::cat(vec![turned_first, turned_second], 3)
    }
}
