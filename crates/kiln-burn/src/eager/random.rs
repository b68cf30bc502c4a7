//! Random tensors, eagerly: the same numbers that every executor draws.
//!
//! The steps of each distribution are a table in [`crate::eager`].

use burn_backend::Distribution;
use burn_flex::FlexTensor;
use burn_ir::TensorIr;
use kiln_graph::op::RandomKind;
use kiln_graph::rounding::round;
use kiln_graph::{DType, HostTensor, Scalar, Shape, philox};

use crate::execute::convert;

/// The bounds of [`Distribution::Default`] for an integer type, as the half-open range of
/// [`RandomKind::IntRange`].
pub(crate) fn full_range(dtype: DType) -> (i64, i64) {
    match dtype {
        DType::I8 => (i64::from(i8::MIN), i64::from(i8::MAX) + 1),
        DType::I16 => (i64::from(i16::MIN), i64::from(i16::MAX) + 1),
        DType::I32 => (i64::from(i32::MIN), i64::from(i32::MAX) + 1),
        DType::U8 => (0, i64::from(u8::MAX) + 1),
        DType::U16 => (0, i64::from(u16::MAX) + 1),
        DType::U32 => (0, i64::from(u32::MAX) + 1),
        // u64 keeps the bits of the i64.
        _ => (i64::MIN, i64::MAX),
    }
}

/// The type in which a Bernoulli trial for a tensor of type `dtype` is drawn and compared.
pub(crate) fn trial_dtype(dtype: DType) -> DType {
    if dtype == DType::F64 {
        DType::F64
    } else {
        DType::F32
    }
}

/// Draws a tensor of the type of `out` from stream `position.1` under seed `position.0`.
pub(crate) fn draw(out: &TensorIr, distribution: Distribution, position: (u64, u64)) -> FlexTensor {
    let dtype = convert::dtype(out.dtype).unwrap_or(DType::F32);
    let shape = Shape::new(out.shape.iter().copied());
    let tensor = draw_host(dtype, &shape, distribution, position);
    convert::from_host(&tensor, out.dtype)
}

fn draw_host(
    dtype: DType,
    shape: &Shape,
    distribution: Distribution,
    (seed, stream): (u64, u64),
) -> HostTensor {
    let fill = |kind, dtype| philox::fill(kind, dtype, shape, seed, stream, (0, 0));
    let range = |bounds| philox::fill(RandomKind::IntRange, dtype, shape, seed, stream, bounds);
    match distribution {
        Distribution::Default if dtype.is_float() => fill(RandomKind::Uniform, dtype),
        Distribution::Default => range(full_range(dtype)),
        Distribution::Uniform(low, high) if dtype.is_float() => {
            let low = round(dtype, low);
            let span = round(dtype, round(dtype, high) - low);
            affine(&fill(RandomKind::Uniform, dtype), span, low, dtype)
        }
        Distribution::Uniform(low, high) => {
            range((Scalar::Float(low).to_i64(), Scalar::Float(high).to_i64()))
        }
        Distribution::Normal(mean, deviation) => {
            let draw = if dtype.is_float() { dtype } else { DType::F64 };
            let (mean, deviation) = (round(draw, mean), round(draw, deviation));
            let tensor = affine(&fill(RandomKind::Normal, draw), deviation, mean, draw);
            if draw == dtype {
                tensor
            } else {
                HostTensor::from_floats(dtype, shape.clone(), tensor.to_f64s())
            }
        }
        Distribution::Bernoulli(probability) => {
            let trial = trial_dtype(dtype);
            let threshold = round(trial, probability);
            let draws = fill(RandomKind::Uniform, trial).to_f64s();
            let hits = draws.into_iter().map(|u| f64::from(u8::from(u < threshold)));
            HostTensor::from_floats(dtype, shape.clone(), hits)
        }
    }
}

/// `x * scale + shift`, each step done in the type `dtype` computes in and rounded to `dtype`.
fn affine(x: &HostTensor, scale: f64, shift: f64, dtype: DType) -> HostTensor {
    let shape = x.ty().shape.clone();
    match dtype {
        DType::F64 => {
            HostTensor::from_floats(dtype, shape, x.to_f64s().into_iter().map(|x| x * scale + shift))
        }
        DType::F32 => {
            let (scale, shift) = (scale as f32, shift as f32);
            let values = x.to_vec::<f32>().unwrap_or_default();
            let values: Vec<f32> = values.into_iter().map(|x| x * scale + shift).collect();
            HostTensor::from_vec(shape, values)
        }
        _ => {
            let half = |value: f32| round(dtype, f64::from(value));
            let (scale, shift) = (scale as f32, shift as f32);
            let values = x.to_f64s().into_iter();
            let values = values.map(|x| half(half(x as f32 * scale) as f32 + shift));
            HostTensor::from_floats(dtype, shape, values)
        }
    }
}
