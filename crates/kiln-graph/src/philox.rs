//! Random numbers: Philox4x32-10, and what [`Op::Random`](crate::Op::Random) draws from it.
//!
//! Philox (Salmon, Moraes, Dror and Shaw, *Parallel random numbers: as easy as 1, 2, 3*, SC 2011) is a keyed
//! bijection of a 128-bit counter: ten rounds of two 32-bit multiplications and a Weyl sequence on the key.
//! Block `n` of a stream is a pure function of (seed, stream, n), so any element of a random tensor can be
//! computed alone, in any order, twice.
//!
//! Layout, fixed for all executors: the key is the seed (low word first); counter words 0 and 1 are the block
//! number, words 2 and 3 the stream (low words first). Streams therefore never overlap: each random operation
//! draws from a stream of its own and a stream has 2^64 blocks.
//!
//! Element `i` of a random tensor (row-major) takes from its stream:
//! - uniform and normal in f32, f16, bf16: word `i % 4` of block `i / 4` (normal: see [`normal_pair`]);
//! - uniform and normal in f64, and integers: words `2 (i % 2)` and `2 (i % 2) + 1` of block `i / 2`, low
//!   word first.

use rayon::prelude::*;

use crate::op::RandomKind;
use crate::{DType, HostTensor, Shape};

const MULTIPLIERS: [u32; 2] = [0xD251_1F53, 0xCD9E_8D57];
const WEYL: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];

/// Ten rounds of Philox on `counter` under `key`.
pub fn philox4x32_10(counter: [u32; 4], key: [u32; 2]) -> [u32; 4] {
    let [mut c0, mut c1, mut c2, mut c3] = counter;
    let [mut k0, mut k1] = key;
    for _ in 0..10 {
        let p0 = u64::from(MULTIPLIERS[0]) * u64::from(c0);
        let p1 = u64::from(MULTIPLIERS[1]) * u64::from(c2);
        (c0, c1, c2, c3) = (
            (p1 >> 32) as u32 ^ c1 ^ k0,
            p1 as u32,
            (p0 >> 32) as u32 ^ c3 ^ k1,
            p0 as u32,
        );
        k0 = k0.wrapping_add(WEYL[0]);
        k1 = k1.wrapping_add(WEYL[1]);
    }
    [c0, c1, c2, c3]
}

/// Block `block` of stream `stream` under `seed`.
pub fn block(seed: u64, stream: u64, block: u64) -> [u32; 4] {
    let counter = [
        block as u32,
        (block >> 32) as u32,
        stream as u32,
        (stream >> 32) as u32,
    ];
    philox4x32_10(counter, [seed as u32, (seed >> 32) as u32])
}

/// The 64 bits of element `i` for types that take two words an element.
fn wide(seed: u64, stream: u64, i: u64) -> u64 {
    let words = block(seed, stream, i / 2);
    let first = 2 * (i % 2) as usize;
    u64::from(words[first]) | u64::from(words[first + 1]) << 32
}

/// Element `i` of a uniform tensor: in `[0, 1)`, a multiple of 2^-24 (f32), 2^-53 (f64), 2^-11 (f16) or 2^-8
/// (bf16), so that it is exact in `dtype`.
pub fn uniform(seed: u64, stream: u64, i: u64, dtype: DType) -> f64 {
    if dtype == DType::F64 {
        return (wide(seed, stream, i) >> 11) as f64 * (1.0 / (1u64 << 53) as f64);
    }
    let bits = match dtype {
        DType::F16 => 11,
        DType::BF16 => 8,
        _ => 24,
    };
    let word = block(seed, stream, i / 4)[(i % 4) as usize];
    f64::from(word >> (32 - bits)) / f64::from(1u32 << bits)
}

/// Two independent standard normal numbers from two uniform ones, `u1` in `(0, 1]` and `u2` in `[0, 1)` (Box
/// and Muller 1958): `r cos(2 pi u2)` and `r sin(2 pi u2)` with `r = sqrt(-2 ln u1)`.
///
/// Element pairs `(2 j, 2 j + 1)` of a normal tensor are one call: `u1` is one minus the uniform draw of
/// element `2 j`, `u2` is that of element `2 j + 1`, both as [`uniform`] draws them in f32 (half types too)
/// or f64.
pub fn normal_pair(u1: f64, u2: f64) -> (f64, f64) {
    let radius = (-2.0 * u1.ln()).sqrt();
    let (sin, cos) = (std::f64::consts::TAU * u2).sin_cos();
    (radius * cos, radius * sin)
}

/// Element `i` of a standard normal tensor.
pub fn normal(seed: u64, stream: u64, i: u64, dtype: DType) -> f64 {
    let draw = if dtype == DType::F64 {
        DType::F64
    } else {
        DType::F32
    };
    let first = i & !1;
    let pair = normal_pair(
        1.0 - uniform(seed, stream, first, draw),
        uniform(seed, stream, first + 1, draw),
    );
    if i == first { pair.0 } else { pair.1 }
}

/// Element `i` of an integer tensor in `[low, high)`: `low + bits mod (high - low)`, with 64 bits an element;
/// `low` if the range is empty. The bias is below `(high - low) / 2^64`.
pub fn int_range(seed: u64, stream: u64, i: u64, low: i64, high: i64) -> i64 {
    if high <= low {
        return low;
    }
    let span = high.wrapping_sub(low) as u64;
    low.wrapping_add((wide(seed, stream, i) % span) as i64)
}

/// A whole random tensor. `range` is `(low, high)` and only read for [`RandomKind::IntRange`].
pub fn fill(
    kind: RandomKind,
    dtype: DType,
    shape: &Shape,
    seed: u64,
    stream: u64,
    range: (i64, i64),
) -> HostTensor {
    let count = shape.numel() as u64;
    match kind {
        RandomKind::IntRange => {
            let values = (0..count).map(|i| int_range(seed, stream, i, range.0, range.1));
            HostTensor::from_ints(dtype, shape.clone(), values)
        }
        RandomKind::Uniform if dtype == DType::F32 => {
            let values = by_block(shape.numel(), seed, stream, |words| words.map(unit_f32));
            HostTensor::from_vec(shape.clone(), values)
        }
        RandomKind::Normal if dtype == DType::F32 => {
            let values = by_block(shape.numel(), seed, stream, |words| {
                let [u1, u2, u3, u4] = words.map(|word| f64::from(unit_f32(word)));
                let ((a, b), (c, d)) = (normal_pair(1.0 - u1, u2), normal_pair(1.0 - u3, u4));
                [a, b, c, d].map(|x| x as f32)
            });
            HostTensor::from_vec(shape.clone(), values)
        }
        RandomKind::Uniform => {
            let values = (0..count).map(|i| uniform(seed, stream, i, dtype));
            HostTensor::from_floats(dtype, shape.clone(), values)
        }
        RandomKind::Normal => {
            let draw = if dtype == DType::F64 {
                DType::F64
            } else {
                DType::F32
            };
            let pairs = (0..count.div_ceil(2)).flat_map(|pair| {
                let u1 = 1.0 - uniform(seed, stream, 2 * pair, draw);
                let (a, b) = normal_pair(u1, uniform(seed, stream, 2 * pair + 1, draw));
                [a, b]
            });
            HostTensor::from_floats(dtype, shape.clone(), pairs.take(shape.numel()))
        }
    }
}

/// The uniform draw in f32 from a word.
fn unit_f32(word: u32) -> f32 {
    (word >> 8) as f32 * (1.0 / 16_777_216.0)
}

/// The first `count` numbers of a stream, computed by all threads: `numbers` turns each block into some of
/// them.
fn by_block(count: usize, seed: u64, stream: u64, numbers: impl Fn([u32; 4]) -> [f32; 4] + Sync) -> Vec<f32> {
    /// Blocks that a thread computes at a time: some ten microseconds of work.
    const BLOCKS: usize = 512;
    let mut values = vec![0.0; count];
    values
        .par_chunks_mut(4 * BLOCKS)
        .enumerate()
        .for_each(|(piece, values)| {
            for (at, four) in values.chunks_mut(4).enumerate() {
                let numbers = numbers(block(seed, stream, (piece * BLOCKS + at) as u64));
                four.copy_from_slice(&numbers[..four.len()]);
            }
        });
    values
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The known-answer vectors published with Random123 (`kat_vectors`, philox4x32 with 10 rounds).
    #[test]
    fn known_answers() {
        let pi = (
            [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344],
            [0xa409_3822, 0x299f_31d0],
        );
        let cases = [
            (
                [0; 4],
                [0; 2],
                [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8],
            ),
            (
                [u32::MAX; 4],
                [u32::MAX; 2],
                [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd],
            ),
            (pi.0, pi.1, [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1]),
        ];
        for (counter, key, expected) in cases {
            assert_eq!(philox4x32_10(counter, key), expected);
        }
    }

    #[test]
    fn filling_a_tensor_agrees_with_drawing_each_element() {
        let shape = Shape::from([7, 3]);
        for dtype in [DType::F64, DType::F32, DType::F16, DType::BF16] {
            let tensor = fill(RandomKind::Uniform, dtype, &shape, 7, 9, (0, 0));
            let each: Vec<f64> = (0..21).map(|i| uniform(7, 9, i, dtype)).collect();
            assert_eq!(tensor.to_f64s(), each, "{dtype}");
        }
        for dtype in [DType::F64, DType::F32] {
            let tensor = fill(RandomKind::Normal, dtype, &shape, 7, 9, (0, 0));
            let each = (0..21).map(|i| normal(7, 9, i, dtype));
            assert_eq!(
                tensor,
                HostTensor::from_floats(dtype, shape.clone(), each),
                "{dtype}"
            );
        }
        // More blocks than a thread computes at a time.
        let tensor = fill(
            RandomKind::Uniform,
            DType::F32,
            &Shape::from([5001]),
            7,
            9,
            (0, 0),
        );
        let each: Vec<f64> = (0..5001).map(|i| uniform(7, 9, i, DType::F32)).collect();
        assert_eq!(tensor.to_f64s(), each);
    }

    #[test]
    fn moments_of_the_distributions() {
        let n = 200_000;
        let shape = Shape::from([n]);
        let moments = |values: &[f64]| {
            let mean = values.iter().sum::<f64>() / n as f64;
            let var = values.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / n as f64;
            (mean, var)
        };
        let uniform = fill(RandomKind::Uniform, DType::F32, &shape, 1, 2, (0, 0)).to_f64s();
        assert!(uniform.iter().all(|x| (0.0..1.0).contains(x)));
        let (mean, var) = moments(&uniform);
        // Five standard errors: sqrt(1/12/n) for the mean, sqrt((1/80 - 1/144)/n) for the variance.
        assert!((mean - 0.5).abs() < 5.0 * (1.0 / 12.0 / n as f64).sqrt());
        assert!((var - 1.0 / 12.0).abs() < 5.0 * ((1.0 / 80.0 - 1.0 / 144.0) / n as f64).sqrt());

        let normal = fill(RandomKind::Normal, DType::F32, &shape, 1, 3, (0, 0)).to_f64s();
        let (mean, var) = moments(&normal);
        assert!(mean.abs() < 5.0 / (n as f64).sqrt());
        assert!((var - 1.0).abs() < 5.0 * (2.0 / n as f64).sqrt());

        let ints = fill(RandomKind::IntRange, DType::I32, &shape, 1, 4, (-3, 4)).to_f64s();
        for value in -3..4 {
            let count = ints.iter().filter(|&&x| x == f64::from(value)).count() as f64;
            let expected = n as f64 / 7.0;
            assert!((count - expected).abs() < 5.0 * (expected * 6.0 / 7.0).sqrt());
        }
    }

    #[test]
    fn streams_and_seeds_differ() {
        let draw = |seed, stream| {
            fill(
                RandomKind::Uniform,
                DType::F32,
                &Shape::from([64]),
                seed,
                stream,
                (0, 0),
            )
            .to_f64s()
        };
        let base = draw(5, 5);
        for other in [draw(5, 6), draw(6, 5), draw(5, 5 + (1 << 32))] {
            assert!(base.iter().zip(&other).filter(|(a, b)| a == b).count() < 3);
        }
    }
}
