//! Tensors in memory, as plain as possible. The interpreter takes and returns them, and executors exchange
//! them.

use std::sync::Arc;

use half::{bf16, f16};

use crate::{DType, Scalar, Shape, TensorType, rounding};

/// A tensor as row-major bytes in native byte order.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct HostTensor {
    ty: TensorType,
    bytes: Arc<[u8]>,
}

/// Rust types that are elements of a tensor.
pub trait Element: Copy {
    /// The element type.
    const DTYPE: DType;
    /// Appends the bytes of one element.
    fn write(self, bytes: &mut Vec<u8>);
    /// Reads one element from its bytes.
    fn read(bytes: &[u8]) -> Self;
}

macro_rules! element {
    ($($ty:ty => $dtype:ident),* $(,)?) => {$(
        impl Element for $ty {
            const DTYPE: DType = DType::$dtype;

            fn write(self, bytes: &mut Vec<u8>) {
                bytes.extend_from_slice(&self.to_ne_bytes());
            }

            fn read(bytes: &[u8]) -> Self {
                let mut raw = [0; size_of::<$ty>()];
                raw.copy_from_slice(bytes);
                <$ty>::from_ne_bytes(raw)
            }
        }
    )*};
}

element!(f64 => F64, f32 => F32, f16 => F16, bf16 => BF16, i64 => I64, i32 => I32, i16 => I16, i8 => I8, u64 => U64,
    u32 => U32, u16 => U16, u8 => U8);

impl Element for bool {
    const DTYPE: DType = DType::Bool;

    fn write(self, bytes: &mut Vec<u8>) {
        bytes.push(u8::from(self));
    }

    fn read(bytes: &[u8]) -> Self {
        bytes[0] != 0
    }
}

/// Runs `$body` with `$ty` standing for the Rust type of the elements of `$dtype`.
macro_rules! with_element {
    ($dtype:expr, $ty:ident => $body:expr) => {
        match $dtype {
            DType::F64 => {
                type $ty = f64;
                $body
            }
            DType::F32 => {
                type $ty = f32;
                $body
            }
            DType::F16 => {
                type $ty = f16;
                $body
            }
            DType::BF16 => {
                type $ty = bf16;
                $body
            }
            DType::I64 => {
                type $ty = i64;
                $body
            }
            DType::I32 => {
                type $ty = i32;
                $body
            }
            DType::I16 => {
                type $ty = i16;
                $body
            }
            DType::I8 => {
                type $ty = i8;
                $body
            }
            DType::U64 => {
                type $ty = u64;
                $body
            }
            DType::U32 => {
                type $ty = u32;
                $body
            }
            DType::U16 => {
                type $ty = u16;
                $body
            }
            DType::U8 => {
                type $ty = u8;
                $body
            }
            DType::Bool => {
                type $ty = bool;
                $body
            }
        }
    };
}

/// Conversion of one element from and to the widest numbers, by the rules of [`crate::Op::Cast`].
trait Convert: Element {
    fn to_f64(self) -> f64;
    fn to_i64(self) -> i64;
    fn from_f64(value: f64) -> Self;
    fn from_i64(value: i64) -> Self;
}

macro_rules! convert_int {
    ($($ty:ty),*) => {$(
        impl Convert for $ty {
            fn to_f64(self) -> f64 { self as f64 }
            fn to_i64(self) -> i64 { self as i64 }
            fn from_f64(value: f64) -> Self { value as $ty }
            fn from_i64(value: i64) -> Self { value as $ty }
        }
    )*};
}

convert_int!(i64, i32, i16, i8, u64, u32, u16, u8, f64, f32);

macro_rules! convert_half {
    ($($ty:ty, $round:ident);*) => {$(
        impl Convert for $ty {
            fn to_f64(self) -> f64 { <$ty>::to_f64(self) }
            fn to_i64(self) -> i64 { <$ty>::to_f64(self) as i64 }
            fn from_f64(value: f64) -> Self { rounding::$round(value) }
            fn from_i64(value: i64) -> Self { rounding::$round(rounding::of_integer(value.into())) }
        }
    )*};
}

convert_half!(f16, to_f16; bf16, to_bf16);

impl Convert for bool {
    fn to_f64(self) -> f64 {
        f64::from(u8::from(self))
    }

    fn to_i64(self) -> i64 {
        i64::from(self)
    }

    fn from_f64(value: f64) -> Self {
        value != 0.0
    }

    fn from_i64(value: i64) -> Self {
        value != 0
    }
}

impl HostTensor {
    /// A tensor from its row-major bytes; none if their number does not fit the type.
    pub fn from_bytes(ty: TensorType, bytes: impl Into<Arc<[u8]>>) -> Option<Self> {
        let bytes = bytes.into();
        (bytes.len() == ty.bytes()).then_some(Self { ty, bytes })
    }

    /// A tensor from its row-major elements.
    ///
    /// # Panics
    ///
    /// If the number of elements does not fit the shape.
    pub fn from_vec<E: Element>(shape: impl Into<Shape>, values: impl AsRef<[E]>) -> Self {
        let ty = TensorType::new(E::DTYPE, shape);
        let values = values.as_ref();
        assert_eq!(values.len(), ty.numel(), "{ty} takes {} elements", ty.numel());
        let mut bytes = Vec::with_capacity(ty.bytes());
        values.iter().for_each(|value| value.write(&mut bytes));
        Self {
            ty,
            bytes: bytes.into(),
        }
    }

    /// A tensor of any dtype from numbers, each converted by the rules of [`crate::Op::Cast`].
    ///
    /// # Panics
    ///
    /// If the number of elements does not fit the shape.
    pub fn from_floats(dtype: DType, shape: impl Into<Shape>, values: impl IntoIterator<Item = f64>) -> Self {
        with_element!(dtype, E => Self::from_vec(shape, values.into_iter().map(<E as Convert>::from_f64).collect::<Vec<E>>()))
    }

    /// A tensor of any dtype from integers, each keeping its low bits (u64 as the i64 of the same bits).
    ///
    /// # Panics
    ///
    /// If the number of elements does not fit the shape.
    pub fn from_ints(dtype: DType, shape: impl Into<Shape>, values: impl IntoIterator<Item = i64>) -> Self {
        with_element!(dtype, E => Self::from_vec(shape, values.into_iter().map(<E as Convert>::from_i64).collect::<Vec<E>>()))
    }

    /// A rank-0 tensor.
    pub fn scalar(dtype: DType, value: Scalar) -> Self {
        match value.cast(dtype) {
            Scalar::Float(x) => Self::from_floats(dtype, Shape::scalar(), [x]),
            other => Self::from_ints(dtype, Shape::scalar(), [other.to_i64()]),
        }
    }

    /// Element type and shape.
    pub fn ty(&self) -> &TensorType {
        &self.ty
    }

    /// The row-major bytes.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// The elements; none if `E` is not the element type.
    pub fn to_vec<E: Element>(&self) -> Option<Vec<E>> {
        let size = self.ty.dtype.size();
        (E::DTYPE == self.ty.dtype).then(|| self.bytes.chunks_exact(size).map(E::read).collect())
    }

    /// The elements as f64 (bool as 0 and 1, large integers rounded).
    pub fn to_f64s(&self) -> Vec<f64> {
        with_element!(self.ty.dtype, E => self.bytes.chunks_exact(size_of::<E>()).map(|b| Convert::to_f64(E::read(b))).collect())
    }

    /// The elements as i64 (floats truncated, u64 as the i64 of the same bits).
    pub fn to_i64s(&self) -> Vec<i64> {
        with_element!(self.ty.dtype, E => self.bytes.chunks_exact(size_of::<E>()).map(|b| Convert::to_i64(E::read(b))).collect())
    }
}
