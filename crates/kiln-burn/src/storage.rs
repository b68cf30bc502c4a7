//! The elements of a tensor, wherever they are.
//!
//! The table of tensors, recordings, executables and replays hand [`Storage`]s to each other and never look at an
//! element. An executor takes the elements where it computes: those that run on burn-flex by [`Storage::into_host`], compiled code by
//! address.

use burn_backend::{DType, Shape, TensorData};
use burn_flex::{FlexTensor, Layout};
use kiln_graph::{HostTensor, TensorType};

use crate::execute::convert;

/// The elements of a tensor. A clone shares them.
#[derive(Clone, Debug)]
pub enum Storage {
    /// In the memory of the host, as burn-flex has them: strided, in a buffer that several tensors may share.
    Host(FlexTensor),
}

impl From<FlexTensor> for Storage {
    fn from(tensor: FlexTensor) -> Self {
        Self::Host(tensor)
    }
}

impl Storage {
    /// Elements from the host.
    pub fn from_data(data: TensorData) -> Self {
        Self::Host(FlexTensor::from_data(data))
    }

    /// Zeros of a shape, row-major in a buffer of their own.
    ///
    /// # Panics
    ///
    /// If the system has no such memory.
    pub fn zeros(shape: Shape, dtype: DType) -> Self {
        let bytes = convert::aligned(shape.num_elements() * dtype.size());
        Self::Host(FlexTensor::new(bytes, Layout::contiguous(shape), dtype))
    }

    /// No elements, of a type.
    pub fn nothing(dtype: DType) -> Self {
        Self::Host(FlexTensor::empty(Shape::from([0usize; 1]), dtype))
    }

    /// The shape.
    pub fn shape(&self) -> &Shape {
        match self {
            Self::Host(tensor) => tensor.layout().shape(),
        }
    }

    /// The element type.
    pub fn dtype(&self) -> DType {
        match self {
            Self::Host(tensor) => tensor.dtype(),
        }
    }

    /// The type in a graph; none if graphs have no such element type.
    pub fn tensor_type(&self) -> Option<TensorType> {
        match self {
            Self::Host(tensor) => convert::tensor_type(tensor),
        }
    }

    /// Whether [`Storage::tensor_type`] is `ty`.
    pub fn has_type(&self, ty: &TensorType) -> bool {
        match self {
            Self::Host(tensor) => convert::has_type(tensor, ty),
        }
    }

    /// Where the buffer begins, and its bytes: equal for storages that share a buffer.
    pub fn buffer(&self) -> (*const u8, usize) {
        match self {
            Self::Host(tensor) => (tensor.bytes().as_ptr(), tensor.bytes().len()),
        }
    }

    /// The elements on the host.
    pub fn into_host(self) -> FlexTensor {
        match self {
            Self::Host(tensor) => tensor,
        }
    }

    /// The elements on the host, row-major.
    pub fn into_data(self) -> TensorData {
        self.into_host().into_data()
    }

    /// The same elements under another name of their type: Burn distinguishes types that are one type in a graph (bools of several
    /// widths). A type of another size changes nothing.
    pub fn with_dtype(self, dtype: DType) -> Self {
        match self {
            Self::Host(tensor) if tensor.dtype() != dtype && tensor.dtype().size() == dtype.size() => {
                Self::Host(FlexTensor::from_arc(
                    tensor.data_arc(),
                    tensor.layout().clone(),
                    dtype,
                ))
            }
            same => same,
        }
    }

    /// A copy of the elements for an executor of host tensors; none if graphs have no such element type.
    pub fn to_host_tensor(&self) -> Option<HostTensor> {
        match self {
            Self::Host(tensor) => convert::to_host(tensor),
        }
    }

    /// The same elements as compiled code for the host reads them: row-major, on a 64-byte border.
    pub fn kernel_ready(self) -> Self {
        Self::Host(convert::kernel_ready(self.into_host()))
    }

    /// Whether both have the same type, shape and bits.
    pub fn has_equal_elements(&self, other: &Self) -> bool {
        let (Self::Host(a), Self::Host(b)) = (self, other);
        a.dtype() == b.dtype()
            && a.layout().shape() == b.layout().shape()
            && a.to_contiguous().bytes() == b.to_contiguous().bytes()
    }
}
