//! Tensors of the interpreter: every float as f64, every integer (bool as 0 and 1) as i128.
//!
//! i128 holds all of i64 and u64, and sums, differences and products of them modulo 2^128, which is exact
//! modulo the width of every integer type. Results are therefore left unwrapped by the primitives and wrapped
//! once by [`Array::settle`].

use crate::rounding::round;
use crate::{DType, HostTensor, Scalar, Shape, TensorType};

/// A tensor; `data` is row-major.
#[derive(Clone, Debug)]
pub(crate) struct Array {
    pub(crate) ty: TensorType,
    pub(crate) data: Data,
}

/// Elements.
#[derive(Clone, Debug)]
pub(crate) enum Data {
    Float(Vec<f64>),
    Int(Vec<i128>),
}

/// Evaluates `$body` for the elements of `$data`, of whichever kind, and wraps the resulting vector again.
macro_rules! map_data {
    ($data:expr, $values:ident => $body:expr) => {
        match &$data {
            $crate::interpret::array::Data::Float($values) => $crate::interpret::array::Data::Float($body),
            $crate::interpret::array::Data::Int($values) => $crate::interpret::array::Data::Int($body),
        }
    };
}

/// [`map_data`] of two tensors of one dtype.
macro_rules! map_data2 {
    ($a:expr, $b:expr, ($x:ident, $y:ident) => $body:expr) => {
        match (&$a, &$b) {
            ($crate::interpret::array::Data::Float($x), $crate::interpret::array::Data::Float($y)) => {
                $crate::interpret::array::Data::Float($body)
            }
            ($crate::interpret::array::Data::Int($x), $crate::interpret::array::Data::Int($y)) => {
                $crate::interpret::array::Data::Int($body)
            }
            _ => unreachable!("typing gives both operands one dtype"),
        }
    };
}

pub(crate) use {map_data, map_data2};

/// What reductions and products need of an element.
pub(crate) trait Number: Copy {
    const ZERO: Self;
    const ONE: Self;
    fn add(self, other: Self) -> Self;
    fn mul(self, other: Self) -> Self;
    /// The larger; NaN if either is.
    fn max(self, other: Self) -> Self;
    /// The smaller; NaN if either is.
    fn min(self, other: Self) -> Self;
    fn is_nan(self) -> bool;
    fn greater(self, other: Self) -> bool;
    /// A sum of elements of type `dtype` as 64 bits hold it.
    fn in_64_bits(self, dtype: DType) -> Self;
    /// The quotient by a count, truncated for integers; 0 if the count is 0.
    fn divide(self, count: usize) -> Self;
    /// The neutral elements of max and min.
    fn extremes(dtype: DType) -> (Self, Self);
}

impl Number for f64 {
    const ZERO: f64 = 0.0;
    const ONE: f64 = 1.0;

    fn add(self, other: f64) -> f64 {
        self + other
    }

    fn mul(self, other: f64) -> f64 {
        self * other
    }

    fn max(self, other: f64) -> f64 {
        if self.is_nan() || self > other {
            self
        } else {
            other
        }
    }

    fn min(self, other: f64) -> f64 {
        if self.is_nan() || self < other {
            self
        } else {
            other
        }
    }

    fn is_nan(self) -> bool {
        f64::is_nan(self)
    }

    fn greater(self, other: f64) -> bool {
        self > other
    }

    fn in_64_bits(self, _: DType) -> f64 {
        self
    }

    fn divide(self, count: usize) -> f64 {
        if count == 0 { 0.0 } else { self / count as f64 }
    }

    fn extremes(_: DType) -> (f64, f64) {
        (f64::NEG_INFINITY, f64::INFINITY)
    }
}

impl Number for i128 {
    const ZERO: i128 = 0;
    const ONE: i128 = 1;

    fn add(self, other: i128) -> i128 {
        self.wrapping_add(other)
    }

    fn mul(self, other: i128) -> i128 {
        self.wrapping_mul(other)
    }

    fn max(self, other: i128) -> i128 {
        Ord::max(self, other)
    }

    fn min(self, other: i128) -> i128 {
        Ord::min(self, other)
    }

    fn is_nan(self) -> bool {
        false
    }

    fn greater(self, other: i128) -> bool {
        self > other
    }

    fn in_64_bits(self, dtype: DType) -> i128 {
        match dtype.is_unsigned_int() {
            true => wrap(DType::U64, self),
            false => wrap(DType::I64, self),
        }
    }

    fn divide(self, count: usize) -> i128 {
        if count == 0 { 0 } else { self / count as i128 }
    }

    fn extremes(dtype: DType) -> (i128, i128) {
        int_range(dtype)
    }
}

/// The smallest and the largest number of an integer type.
pub(crate) fn int_range(dtype: DType) -> (i128, i128) {
    let bits = 8 * dtype.size();
    match dtype {
        DType::Bool => (0, 1),
        _ if dtype.is_signed_int() => (-(1 << (bits - 1)), (1 << (bits - 1)) - 1),
        _ => (0, (1 << bits) - 1),
    }
}

/// `value` modulo the width of `dtype`; for bool, whether it is not zero.
pub(crate) fn wrap(dtype: DType, value: i128) -> i128 {
    match dtype {
        DType::Bool => i128::from(value != 0),
        DType::I64 => i128::from(value as i64),
        DType::I32 => i128::from(value as i32),
        DType::I16 => i128::from(value as i16),
        DType::I8 => i128::from(value as i8),
        DType::U64 => i128::from(value as u64),
        DType::U32 => i128::from(value as u32),
        DType::U16 => i128::from(value as u16),
        DType::U8 => i128::from(value as u8),
        DType::F64 | DType::F32 | DType::F16 | DType::BF16 => value,
    }
}

impl Array {
    pub(crate) fn new(ty: TensorType, data: Data) -> Self {
        Self { ty, data }
    }

    pub(crate) fn from_ints(dtype: DType, shape: Shape, values: Vec<i128>) -> Self {
        Self::new(TensorType { dtype, shape }, Data::Int(values))
    }

    pub(crate) fn from_tensor(tensor: &HostTensor) -> Self {
        let dtype = tensor.ty().dtype;
        let data = if dtype.is_float() {
            Data::Float(tensor.to_f64s())
        } else {
            // u64 arrives as the i64 of the same bits.
            Data::Int(
                tensor
                    .to_i64s()
                    .into_iter()
                    .map(|x| wrap(dtype, i128::from(x)))
                    .collect(),
            )
        };
        Self::new(tensor.ty().clone(), data)
    }

    /// A rank-0 array of `value`, rounded to `dtype`.
    pub(crate) fn from_scalar(value: Scalar, dtype: DType) -> Self {
        Self::from_tensor(&HostTensor::scalar(dtype, value))
    }

    /// The tensor; with `wide`, floats as f64.
    pub(crate) fn to_tensor(&self, wide: bool) -> HostTensor {
        let shape = self.ty.shape.clone();
        match &self.data {
            Data::Float(values) => {
                let dtype = if wide { DType::F64 } else { self.ty.dtype };
                HostTensor::from_floats(dtype, shape, values.iter().copied())
            }
            Data::Int(values) => {
                HostTensor::from_ints(self.ty.dtype, shape, values.iter().map(|&x| x as i64))
            }
        }
    }

    /// The elements of a float array.
    pub(crate) fn floats(&self) -> &[f64] {
        match &self.data {
            Data::Float(values) => values,
            Data::Int(_) => unreachable!("typing makes {} a float array", self.ty),
        }
    }

    /// The elements of an integer or bool array.
    pub(crate) fn ints(&self) -> &[i128] {
        match &self.data {
            Data::Int(values) => values,
            Data::Float(_) => unreachable!("typing makes {} an integer array", self.ty),
        }
    }

    /// Brings computed elements into the dtype: integers wrap, floats round unless they stay `wide`.
    pub(crate) fn settle(&mut self, wide: bool) {
        let dtype = self.ty.dtype;
        match &mut self.data {
            Data::Int(values) => values.iter_mut().for_each(|x| *x = wrap(dtype, *x)),
            Data::Float(values) if !wide => values.iter_mut().for_each(|x| *x = round(dtype, *x)),
            Data::Float(_) => {}
        }
    }
}

/// Row-major strides, signed.
pub(crate) fn strides(shape: &[usize]) -> Vec<isize> {
    let mut strides = vec![1; shape.len()];
    for axis in (1..shape.len()).rev() {
        strides[axis - 1] = strides[axis] * shape[axis] as isize;
    }
    strides
}

/// The positions of a strided walk: for each index of `shape` in row-major order,
/// `start + sum(index * strides)`.
pub(crate) fn walk(shape: &[usize], strides: &[isize], start: isize) -> Walk {
    Walk {
        left: shape.iter().product(),
        index: vec![0; shape.len()],
        shape: shape.to_vec(),
        strides: strides.to_vec(),
        at: start,
    }
}

/// See [`walk`].
pub(crate) struct Walk {
    left: usize,
    index: Vec<usize>,
    shape: Vec<usize>,
    strides: Vec<isize>,
    at: isize,
}

impl Iterator for Walk {
    type Item = usize;

    fn next(&mut self) -> Option<usize> {
        self.left = self.left.checked_sub(1)?;
        let position = self.at as usize;
        // Count up like an odometer: the last dimension first, carrying into the one before.
        for axis in (0..self.shape.len()).rev() {
            self.index[axis] += 1;
            self.at += self.strides[axis];
            if self.index[axis] < self.shape[axis] {
                break;
            }
            self.at -= self.strides[axis] * self.shape[axis] as isize;
            self.index[axis] = 0;
        }
        Some(position)
    }
}

/// A shape seen along one dimension: `outer` blocks of `extent` rows of `inner` elements.
#[derive(Clone, Copy)]
pub(crate) struct Lanes {
    pub(crate) outer: usize,
    pub(crate) extent: usize,
    pub(crate) inner: usize,
}

impl Lanes {
    pub(crate) fn new(shape: &[usize], axis: usize) -> Self {
        Self {
            outer: shape[..axis].iter().product(),
            extent: shape[axis],
            inner: shape[axis + 1..].iter().product(),
        }
    }

    /// First position of every lane, in row-major order of the other dimensions. A lane's elements are
    /// `inner` apart.
    pub(crate) fn starts(self) -> impl Iterator<Item = usize> {
        (0..self.outer).flat_map(move |o| (0..self.inner).map(move |i| o * self.extent * self.inner + i))
    }
}
