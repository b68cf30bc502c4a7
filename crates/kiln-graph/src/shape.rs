//! Shapes and tensor types.

use std::fmt;
use std::ops::{Deref, DerefMut};

use smallvec::SmallVec;

use crate::DType;

/// The extents of a tensor, outermost first. Rank 0 is a scalar; an extent may be 0.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Shape(SmallVec<[usize; 4]>);

impl Shape {
    /// A shape from its extents.
    pub fn new(dims: impl IntoIterator<Item = usize>) -> Self {
        Self(dims.into_iter().collect())
    }

    /// The shape of a scalar: rank 0, one element.
    pub fn scalar() -> Self {
        Self::default()
    }

    /// Number of dimensions.
    pub fn rank(&self) -> usize {
        self.0.len()
    }

    /// Number of elements: the product of the extents, 1 for a scalar.
    pub fn numel(&self) -> usize {
        self.0.iter().product()
    }

    /// The extents as a slice.
    pub fn dims(&self) -> &[usize] {
        &self.0
    }

    /// Row-major strides, in elements.
    pub fn strides(&self) -> SmallVec<[usize; 4]> {
        let mut strides: SmallVec<[usize; 4]> = SmallVec::from_elem(1, self.rank());
        for axis in (1..self.rank()).rev() {
            strides[axis - 1] = strides[axis] * self.0[axis];
        }
        strides
    }

    /// This shape without the dimensions in `axes`.
    pub fn without(&self, axes: &[usize]) -> Self {
        Self::new(
            (0..self.rank())
                .filter(|axis| !axes.contains(axis))
                .map(|axis| self.0[axis]),
        )
    }

    /// This shape with extent `dim` at `axis`.
    pub fn with(&self, axis: usize, dim: usize) -> Self {
        let mut shape = self.clone();
        shape[axis] = dim;
        shape
    }
}

impl Deref for Shape {
    type Target = [usize];

    fn deref(&self) -> &[usize] {
        &self.0
    }
}

impl DerefMut for Shape {
    fn deref_mut(&mut self) -> &mut [usize] {
        &mut self.0
    }
}

impl From<&[usize]> for Shape {
    fn from(dims: &[usize]) -> Self {
        Self::new(dims.iter().copied())
    }
}

impl<const N: usize> From<[usize; N]> for Shape {
    fn from(dims: [usize; N]) -> Self {
        Self::new(dims)
    }
}

impl From<Vec<usize>> for Shape {
    fn from(dims: Vec<usize>) -> Self {
        Self::new(dims)
    }
}

impl FromIterator<usize> for Shape {
    fn from_iter<I: IntoIterator<Item = usize>>(dims: I) -> Self {
        Self::new(dims)
    }
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("[")?;
        for (axis, dim) in self.0.iter().enumerate() {
            write!(f, "{}{dim}", if axis == 0 { "" } else { "," })?;
        }
        f.write_str("]")
    }
}

impl fmt::Debug for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// What is known of a value at compile time: element type and shape. Prints as `f32[8,128]`.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct TensorType {
    /// Element type.
    pub dtype: DType,
    /// Extents, outermost first.
    pub shape: Shape,
}

impl TensorType {
    /// A tensor type.
    pub fn new(dtype: DType, shape: impl Into<Shape>) -> Self {
        Self {
            dtype,
            shape: shape.into(),
        }
    }

    /// The type of a scalar (rank 0).
    pub fn scalar(dtype: DType) -> Self {
        Self {
            dtype,
            shape: Shape::scalar(),
        }
    }

    /// Number of elements.
    pub fn numel(&self) -> usize {
        self.shape.numel()
    }

    /// Whether sizes and strides of this type can be computed without overflow: the product of the extents (0
    /// counted as 1) and the size of an element is at most `isize::MAX`. Every type in a graph does.
    pub fn fits_memory(&self) -> bool {
        let bytes = self
            .shape
            .iter()
            .try_fold(self.dtype.size(), |bytes, &dim| bytes.checked_mul(dim.max(1)));
        bytes.is_some_and(|bytes| isize::try_from(bytes).is_ok())
    }

    /// Size of the row-major buffer in bytes.
    pub fn bytes(&self) -> usize {
        self.numel() * self.dtype.size()
    }
}

impl fmt::Display for TensorType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}", self.dtype, self.shape)
    }
}

impl fmt::Debug for TensorType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}
