//! Sums of elements over ranks.

use half::{bf16, f16};
use kiln_graph::DType;

/// Writes the sums of the elements of `blocks`, one block of equal length for each rank, to `out`, in the
/// order of ranks; divided by the number of ranks, if `mean`. Types of 16 bits add up in f32 and are
/// rounded once; integers wrap.
///
/// Bools have no sum: nothing is written.
pub(crate) fn sum(dtype: DType, blocks: &[&[u8]], mean: bool, out: &mut [u8]) {
    let ranks = blocks.len() as f64;
    macro_rules! sums {
        ($ty:ty, $wide:ty, $widen:expr, $add:expr, $narrow:expr) => {{
            const SIZE: usize = size_of::<$ty>();
            let (widen, add, narrow) = ($widen, $add, $narrow);
            // Elements that stay in the cache while the loop adds those of every rank.
            const BLOCK: usize = 512;
            let mut sums: [$wide; BLOCK] = [Default::default(); BLOCK];
            for (number, out) in out.chunks_mut(BLOCK * SIZE).enumerate() {
                let count = out.len() / SIZE;
                let range = number * BLOCK * SIZE..number * BLOCK * SIZE + count * SIZE;
                for (rank, block) in blocks.iter().enumerate() {
                    let (elements, _) = block[range.clone()].as_chunks::<SIZE>();
                    for (sum, element) in sums[..count].iter_mut().zip(elements) {
                        let x: $wide = widen(<$ty>::from_ne_bytes(*element));
                        *sum = if rank == 0 { x } else { add(*sum, x) };
                    }
                }
                let (elements, _) = out.as_chunks_mut::<SIZE>();
                for (element, &sum) in elements.iter_mut().zip(&sums[..count]) {
                    let x: $ty = narrow(sum);
                    *element = x.to_ne_bytes();
                }
            }
        }};
    }
    macro_rules! floats {
        ($ty:ty, $wide:ty, $widen:expr, $narrow:expr) => {{
            let divisor = if mean { ranks as $wide } else { 1.0 };
            sums!(
                $ty,
                $wide,
                $widen,
                |a: $wide, b: $wide| a + b,
                |x: $wide| $narrow(x / divisor)
            )
        }};
    }
    macro_rules! ints {
        ($ty:ty) => {
            sums!($ty, $ty, |x: $ty| x, <$ty>::wrapping_add, |x: $ty| x)
        };
    }
    match dtype {
        DType::F32 => floats!(f32, f32, |x| x, |x| x),
        DType::F64 => floats!(f64, f64, |x| x, |x| x),
        DType::F16 => floats!(f16, f32, f16::to_f32, f16::from_f32),
        DType::BF16 => floats!(bf16, f32, bf16::to_f32, bf16::from_f32),
        DType::I8 => ints!(i8),
        DType::I16 => ints!(i16),
        DType::I32 => ints!(i32),
        DType::I64 => ints!(i64),
        DType::U8 => ints!(u8),
        DType::U16 => ints!(u16),
        DType::U32 => ints!(u32),
        DType::U64 => ints!(u64),
        DType::Bool => {}
    }
}

#[cfg(test)]
mod tests {
    use kiln_graph::collective::combine;
    use kiln_graph::{Collective, CollectiveKind, HostTensor};

    use super::*;

    #[test]
    fn sums_are_what_the_graph_means() {
        // More than a block, and no multiple of one.
        let count = 1300;
        for dtype in [
            DType::F32,
            DType::F64,
            DType::F16,
            DType::BF16,
            DType::I8,
            DType::U16,
            DType::I32,
            DType::U64,
        ] {
            for mean in [false, true] {
                if mean && !dtype.is_float() {
                    continue;
                }
                // Multiples of 1/4 of at most 8 bits: every sum is exact.
                let operand = |rank: usize| {
                    let number = |i: usize| {
                        ((i * 7 + rank * 13) % 61) as i64 - if dtype.is_unsigned_int() { 0 } else { 30 }
                    };
                    match dtype.is_float() {
                        true => HostTensor::from_floats(
                            dtype,
                            [count],
                            (0..count).map(|i| number(i) as f64 / 4.0),
                        ),
                        false => HostTensor::from_ints(dtype, [count], (0..count).map(number)),
                    }
                };
                let operands: Vec<HostTensor> = (0..4).map(operand).collect();
                let collective = Collective {
                    mean,
                    ..Collective::new(CollectiveKind::AllReduce, 4)
                };
                let expected = combine(&collective, &operands).expect("it fits");
                let blocks: Vec<&[u8]> = operands.iter().map(HostTensor::bytes).collect();
                let mut out = vec![0; blocks[0].len()];
                sum(dtype, &blocks, mean, &mut out);
                assert_eq!(out, expected[0].bytes(), "{dtype} mean={mean}");
            }
        }
    }
}
