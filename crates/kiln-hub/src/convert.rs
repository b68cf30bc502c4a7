//! From bytes in a file to tensor data in memory, and back.
//!
//! Checkpoints store little-endian, row-major elements of some fifteen types. Models want one of Burn's float
//! types (or integers and booleans as they are). Float types convert among each other with
//! round-to-nearest-even; nothing else converts, because a checkpoint whose weights are integers is quantized
//! and means something else than their values. A transpose happens on the stored bytes, before the
//! conversion, so half-precision files move half the memory.

use burn_tensor::{BoolStore, DType, TensorData};
use half::{bf16, f16};
use kiln_graph::rounding;
use safetensors::tensor::Dtype;

use crate::error::HubError;

/// The kind of a tensor's elements, for matching a file against a module.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Float,
    Int,
    Bool,
}

impl Kind {
    pub fn name(self) -> &'static str {
        match self {
            Kind::Float => "float",
            Kind::Int => "int",
            Kind::Bool => "bool",
        }
    }
}

/// The kind of a stored type; `None` for types that have no counterpart in Burn (8-bit floats and smaller,
/// complex).
pub(crate) fn kind_of(dtype: Dtype) -> Option<Kind> {
    match dtype {
        Dtype::F64 | Dtype::F32 | Dtype::F16 | Dtype::BF16 => Some(Kind::Float),
        Dtype::I64
        | Dtype::I32
        | Dtype::I16
        | Dtype::I8
        | Dtype::U64
        | Dtype::U32
        | Dtype::U16
        | Dtype::U8 => Some(Kind::Int),
        Dtype::BOOL => Some(Kind::Bool),
        _ => None,
    }
}

/// The Burn type that holds a stored type unchanged.
pub(crate) fn to_burn(dtype: Dtype) -> Option<DType> {
    Some(match dtype {
        Dtype::F64 => DType::F64,
        Dtype::F32 => DType::F32,
        Dtype::F16 => DType::F16,
        Dtype::BF16 => DType::BF16,
        Dtype::I64 => DType::I64,
        Dtype::I32 => DType::I32,
        Dtype::I16 => DType::I16,
        Dtype::I8 => DType::I8,
        Dtype::U64 => DType::U64,
        Dtype::U32 => DType::U32,
        Dtype::U16 => DType::U16,
        Dtype::U8 => DType::U8,
        Dtype::BOOL => DType::Bool(BoolStore::Native),
        _ => return None,
    })
}

/// The stored type that holds a Burn type unchanged.
pub(crate) fn to_stored(dtype: DType) -> Option<Dtype> {
    Some(match dtype {
        DType::F64 => Dtype::F64,
        DType::F32 | DType::Flex32 => Dtype::F32,
        DType::F16 => Dtype::F16,
        DType::BF16 => Dtype::BF16,
        DType::I64 => Dtype::I64,
        DType::I32 => Dtype::I32,
        DType::I16 => Dtype::I16,
        DType::I8 => Dtype::I8,
        DType::U64 => Dtype::U64,
        DType::U32 => Dtype::U32,
        DType::U16 => Dtype::U16,
        DType::U8 => Dtype::U8,
        DType::Bool(BoolStore::Native) => Dtype::BOOL,
        _ => return None,
    })
}

/// The least and the greatest value of an integer type; `None` for other types.
pub(crate) fn int_range(dtype: DType) -> Option<(i64, u64)> {
    Some(match dtype {
        DType::I64 => (i64::MIN, i64::MAX.unsigned_abs()),
        DType::I32 => (i32::MIN.into(), i32::MAX.unsigned_abs().into()),
        DType::I16 => (i16::MIN.into(), i16::MAX.unsigned_abs().into()),
        DType::I8 => (i8::MIN.into(), i8::MAX.unsigned_abs().into()),
        DType::U64 => (0, u64::MAX),
        DType::U32 => (0, u32::MAX.into()),
        DType::U16 => (0, u16::MAX.into()),
        DType::U8 => (0, u8::MAX.into()),
        _ => return None,
    })
}

/// Whether integers can be converted to another integer type, which Burn panics about if they cannot.
pub(crate) fn ints_fit(data: &TensorData, wanted: DType) -> bool {
    let Some((least, greatest)) = int_range(wanted) else {
        return false;
    };
    match data.dtype {
        DType::U64 => data.iter::<u64>().all(|value| value <= greatest),
        dtype if int_range(dtype).is_some() => data
            .iter::<i64>()
            .all(|value| value >= least && (value < 0 || value.unsigned_abs() <= greatest)),
        _ => false,
    }
}

/// Bytes of an element; `None` for types of less than a byte.
pub(crate) fn itemsize(dtype: Dtype) -> Option<usize> {
    let bits = dtype.bitsize();
    bits.is_multiple_of(8).then_some(bits / 8)
}

/// A tensor as it lies in a file.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RawTensor<'a> {
    pub name: &'a str,
    pub dtype: Dtype,
    pub shape: &'a [usize],
    /// Little endian, row major, exactly as long as shape and type say.
    pub bytes: &'a [u8],
}

impl RawTensor<'_> {
    /// The tensor in the type it is stored in.
    pub fn to_data(self) -> Result<TensorData, HubError> {
        let dtype = to_burn(self.dtype).ok_or_else(|| self.refuse("any element type of Burn"))?;
        if self.dtype == Dtype::BOOL {
            // Any other byte is not a valid `bool`, and Burn does not check the bytes.
            let bytes = self.bytes.iter().map(|&b| u8::from(b != 0)).collect();
            return Ok(TensorData::from_bytes_vec(bytes, self.shape.to_vec(), dtype));
        }
        Ok(TensorData::from_bytes_vec(
            self.bytes.to_vec(),
            self.shape.to_vec(),
            dtype,
        ))
    }

    /// The tensor's floats as another float type.
    pub fn to_floats(self, wanted: DType) -> Result<TensorData, HubError> {
        if kind_of(self.dtype) != Some(Kind::Float) {
            return Err(self.refuse(&format!("{wanted:?}")));
        }
        if to_burn(self.dtype) == Some(wanted) {
            return self.to_data();
        }
        let shape = self.shape.to_vec();
        Ok(match wanted {
            DType::F32 | DType::Flex32 => TensorData::new(self.map(|x| x as f32, |x| x), shape),
            DType::F64 => TensorData::new(self.map(|x| x, f64::from), shape),
            DType::F16 => TensorData::new(self.map(rounding::to_f16, f16::from_f32), shape),
            DType::BF16 => TensorData::new(self.map(rounding::to_bf16, bf16::from_f32), shape),
            other => return Err(self.refuse(&format!("{other:?}"))),
        })
    }

    /// Applies the conversion that fits the stored type; every narrower type is exact in f32.
    fn map<T>(self, from_f64: impl Fn(f64) -> T, from_f32: impl Fn(f32) -> T) -> Vec<T> {
        match self.dtype {
            Dtype::F64 => elements(self.bytes)
                .map(|b| from_f64(f64::from_le_bytes(b)))
                .collect(),
            Dtype::F32 => elements(self.bytes)
                .map(|b| from_f32(f32::from_le_bytes(b)))
                .collect(),
            Dtype::F16 => elements(self.bytes)
                .map(|b| from_f32(f16::from_le_bytes(b).to_f32()))
                .collect(),
            // `to_floats` let only float types through; the one left is bf16.
            _ => elements(self.bytes)
                .map(|b| from_f32(bf16::from_le_bytes(b).to_f32()))
                .collect(),
        }
    }

    fn refuse(self, wanted: &str) -> HubError {
        HubError::DType {
            name: self.name.to_string(),
            stored: format!("{:?}", self.dtype),
            wanted: wanted.to_string(),
        }
    }
}

/// Splits bytes into elements of N bytes.
fn elements<const N: usize>(bytes: &[u8]) -> impl Iterator<Item = [u8; N]> + '_ {
    bytes.as_chunks::<N>().0.iter().copied()
}

/// Transposes a matrix of elements of `width` bytes, in tiles that stay in the first-level cache.
pub(crate) fn transpose_bytes(bytes: &[u8], rows: usize, cols: usize, width: usize) -> Vec<u8> {
    match width {
        1 => transpose_elements::<1>(bytes, rows, cols),
        2 => transpose_elements::<2>(bytes, rows, cols),
        4 => transpose_elements::<4>(bytes, rows, cols),
        _ => transpose_elements::<8>(bytes, rows, cols),
    }
}

fn transpose_elements<const N: usize>(bytes: &[u8], rows: usize, cols: usize) -> Vec<u8> {
    const TILE: usize = 32;
    let source = bytes.as_chunks::<N>().0;
    let mut target = vec![0u8; bytes.len()];
    let out = target.as_chunks_mut::<N>().0;
    for row_tile in (0..rows).step_by(TILE) {
        for col_tile in (0..cols).step_by(TILE) {
            for col in col_tile..(col_tile + TILE).min(cols) {
                for row in row_tile..(row_tile + TILE).min(rows) {
                    out[col * rows + row] = source[row * cols + col];
                }
            }
        }
    }
    target
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn raw(dtype: Dtype, bytes: &[u8], n: usize) -> TensorData {
        let shape = [n];
        RawTensor {
            name: "x",
            dtype,
            shape: &shape,
            bytes,
        }
        .to_floats(DType::F32)
        .unwrap()
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..Default::default() })]
        /// Widening is exact, and the widened value rounds back to the same bits.
        #[test]
        fn half_types_widen_exactly(bits in prop::collection::vec(any::<u16>(), 1..50)) {
            let bytes: Vec<u8> = bits.iter().flat_map(|b| b.to_le_bytes()).collect();
            let widened = raw(Dtype::BF16, &bytes, bits.len());
            for (&b, &x) in bits.iter().zip(widened.as_slice::<f32>().unwrap()) {
                // A signalling NaN becomes a quiet one.
                prop_assert!(x.is_nan() || u32::from(b) << 16 == x.to_bits());
            }
            let widened = raw(Dtype::F16, &bytes, bits.len());
            for (&b, &x) in bits.iter().zip(widened.as_slice::<f32>().unwrap()) {
                if !x.is_nan() {
                    prop_assert_eq!(f16::from_f32(x).to_bits(), b);
                }
            }
        }

        #[test]
        fn transposing_twice_is_the_identity_and_once_moves_each_element(
            rows in 1usize..70, cols in 1usize..70, width in prop::sample::select(vec![1usize, 2, 4, 8]),
            seed in any::<u8>(),
        ) {
            let bytes: Vec<u8> = (0..rows * cols * width).map(|i| (i as u8).wrapping_mul(31).wrapping_add(seed)).collect();
            let once = transpose_bytes(&bytes, rows, cols, width);
            for r in [0, rows / 2, rows - 1] {
                for c in [0, cols / 2, cols - 1] {
                    let (from, to) = ((r * cols + c) * width, (c * rows + r) * width);
                    prop_assert_eq!(&bytes[from..from + width], &once[to..to + width]);
                }
            }
            prop_assert_eq!(transpose_bytes(&once, cols, rows, width), bytes);
        }
    }

    #[test]
    fn integers_do_not_pass_for_weights() {
        let shape = [4];
        let quantized = RawTensor {
            name: "w",
            dtype: Dtype::I8,
            shape: &shape,
            bytes: &[1, 2, 3, 4],
        };
        assert!(matches!(
            quantized.to_floats(DType::F32),
            Err(HubError::DType { .. })
        ));
        let fp8 = RawTensor {
            name: "w",
            dtype: Dtype::F8_E4M3,
            shape: &shape,
            bytes: &[1, 2, 3, 4],
        };
        assert!(matches!(fp8.to_floats(DType::F32), Err(HubError::DType { .. })));
    }
}
