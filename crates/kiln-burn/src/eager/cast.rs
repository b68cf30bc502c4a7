//! Casts between float types.
//!
//! A cast rounds once, to the nearest number, and in the middle to the even one, as compiled code does.
//! burn-flex 0.21 casts to 16 bits by way of `f64` and the functions of `half`, which round a number a little
//! above the middle of two results as if it were the middle ([`kiln_graph::rounding`]). So casts of `f32` and
//! `f64` to 16 bits are made here. Those of 16 bits to 16 bits have too few digits for that fault.

use burn_backend::ops::FloatTensorOps;
use burn_backend::{DType, Element, FloatDType};
use burn_flex::{Flex, FlexTensor, Layout};
use burn_std::Bytes;
use half::{bf16, f16};
use kiln_graph::rounding;

/// `tensor` in the float type `dtype`.
pub(crate) fn float_cast(tensor: FlexTensor, dtype: FloatDType) -> FlexTensor {
    match (tensor.dtype(), dtype) {
        (DType::F32, FloatDType::BF16) => narrowed(&tensor, bf16::from_f32),
        (DType::F32, FloatDType::F16) => narrowed(&tensor, f16::from_f32),
        (DType::F64, FloatDType::BF16) => narrowed(&tensor, rounding::to_bf16),
        (DType::F64, FloatDType::F16) => narrowed(&tensor, rounding::to_f16),
        _ => Flex::float_cast(tensor, dtype),
    }
}

/// The elements of `tensor`, which are of type `S`, through `round`.
fn narrowed<S, E>(tensor: &FlexTensor, round: fn(S) -> E) -> FlexTensor
where
    S: Element + bytemuck::Pod,
    E: Element + bytemuck::Pod,
{
    let tensor = tensor.to_contiguous();
    let shape = tensor.layout().shape().clone();
    let numbers: &[S] = tensor.storage();
    let rounded: Vec<E> = numbers.iter().map(|&number| round(number)).collect();
    FlexTensor::new(Bytes::from_elems(rounded), Layout::contiguous(shape), E::dtype())
}

#[cfg(test)]
mod tests {
    use burn_backend::TensorData;

    use super::*;

    /// The bits of 16 whose number, as `of` has it, is nearest to `number`: the distance in f64 decides, and
    /// where two are equally near, the even bits. `start` is at most one away.
    fn nearest(number: f64, of: fn(u16) -> f64, start: u16) -> u16 {
        let distance = |bits: u16| (of(bits) - number).abs();
        let candidates = [start.wrapping_sub(1), start, start.wrapping_add(1)];
        let least = candidates.map(distance).into_iter().fold(f64::INFINITY, f64::min);
        let nearest = candidates.into_iter().filter(|&bits| distance(bits) == least);
        nearest.min_by_key(|bits| bits % 2).unwrap()
    }

    /// Compares the casts of `tensor` to 16 bits with the numbers nearest to `numbers`, its elements.
    fn check(tensor: &FlexTensor, numbers: &[f64]) {
        let cast = float_cast(tensor.clone(), FloatDType::BF16);
        let cast: Vec<u16> = cast.storage::<bf16>().iter().map(|x| x.to_bits()).collect();
        let brain = |&number: &f64| {
            let start = bf16::from_f32(number as f32).to_bits();
            nearest(number, |bits| bf16::from_bits(bits).to_f64(), start)
        };
        assert_eq!(cast, numbers.iter().map(brain).collect::<Vec<u16>>());
        let cast = float_cast(tensor.clone(), FloatDType::F16);
        let cast: Vec<u16> = cast.storage::<f16>().iter().map(|x| x.to_bits()).collect();
        let half = |&number: &f64| {
            let start = f16::from_f32(number as f32).to_bits();
            nearest(number, |bits| f16::from_bits(bits).to_f64(), start)
        };
        assert_eq!(cast, numbers.iter().map(half).collect::<Vec<u16>>());
    }

    /// Numbers around the middle between 1 and the next number of 16 bits, and random ones.
    #[test]
    fn casts_round_to_the_nearest_and_then_to_the_even_number() {
        let near = |middle: u32| (0..16).map(move |step| f32::from_bits(middle - 8 + step));
        let mut numbers: Vec<f32> = near(0x3f80_8000).chain(near(0x3f80_1000)).collect();
        let mut state = 1_u32;
        numbers.extend((0..4096).map(|_| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as f32 / 1e4 - 800.0
        }));
        let mut wide: Vec<f64> = numbers.iter().map(|&number| f64::from(number)).collect();
        let data = TensorData::new(numbers.clone(), [numbers.len()]);
        check(&FlexTensor::from_data(data), &wide);
        // Beside these are the numbers that f32 would round to them.
        let beside = |number: f64| [number.next_down(), number, number.next_up()];
        wide = wide.into_iter().flat_map(beside).collect();
        let data = TensorData::new(wide.clone(), [wide.len()]);
        check(&FlexTensor::from_data(data), &wide);
    }
}
