//! The elements of a tensor, wherever they are.
//!
//! The table of tensors, recordings, executables and replays hand [`Storage`]s to each other and never look
//! at an element. Only executors read elements: those that run on burn-flex by [`Storage::into_host`],
//! compiled code by address.

use burn_backend::{DType, Shape, TensorData};
use burn_flex::{FlexTensor, Layout};
use kiln_cuda::CudaError;
use kiln_cuda::execute::{Gpu, SMALL_INPUT};
use kiln_graph::{HostTensor, TensorType};

use crate::device::Place;
use crate::execute::convert;
use crate::gpu_tensor::GpuTensor;

/// The elements of a tensor. A clone shares them.
#[derive(Clone, Debug)]
pub enum Storage {
    /// In the memory of the host, as burn-flex has them: strided, in a buffer that several tensors may share.
    Host(FlexTensor),
    /// In the memory of a GPU.
    Gpu(GpuTensor),
}

impl From<GpuTensor> for Storage {
    fn from(tensor: GpuTensor) -> Self {
        Self::Gpu(tensor)
    }
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

    /// The elements in the best memory for a tensor that lives at `place`: large floats for a GPU are
    /// copied there now, once, and not at each step that reads them. Integers stay where they are, because
    /// indices that are on the host are checked without waiting for the GPU. Elements that cannot be copied
    /// stay, too; the step that needs them reports why.
    pub fn at_home(self, place: Place) -> Self {
        let Self::Host(tensor) = self else { return self };
        let large =
            tensor.dtype().is_float() && tensor.layout().num_elements() * tensor.dtype().size() > SMALL_INPUT;
        let Some(gpu) = place
            .gpu()
            .filter(|_| large)
            .and_then(|ordinal| Gpu::get(ordinal).ok())
        else {
            return Self::Host(tensor);
        };
        match GpuTensor::upload(&gpu, tensor.clone()) {
            Ok(uploaded) => uploaded.into(),
            Err(_) => Self::Host(tensor),
        }
    }

    /// No elements, of a type.
    pub fn nothing(dtype: DType) -> Self {
        Self::Host(FlexTensor::empty(Shape::from([0usize; 1]), dtype))
    }

    /// The shape.
    pub fn shape(&self) -> &Shape {
        match self {
            Self::Host(tensor) => tensor.layout().shape(),
            Self::Gpu(tensor) => tensor.shape(),
        }
    }

    /// The element type.
    pub fn dtype(&self) -> DType {
        match self {
            Self::Host(tensor) => tensor.dtype(),
            Self::Gpu(tensor) => tensor.dtype(),
        }
    }

    /// The type in a graph; none if graphs have no such element type.
    pub fn tensor_type(&self) -> Option<TensorType> {
        Some(TensorType::new(
            convert::dtype(self.dtype())?,
            kiln_graph::Shape::new(self.shape().iter().copied()),
        ))
    }

    /// Whether [`Storage::tensor_type`] is `ty`.
    pub fn has_type(&self, ty: &TensorType) -> bool {
        convert::dtype(self.dtype()) == Some(ty.dtype) && self.shape().iter().eq(ty.shape.iter())
    }

    /// Where the buffer begins, and its bytes: equal for storages that share a buffer.
    pub fn buffer(&self) -> (*const u8, usize) {
        match self {
            Self::Host(tensor) => (tensor.bytes().as_ptr(), tensor.bytes().len()),
            Self::Gpu(tensor) => {
                let storage = tensor.storage();
                (storage.address() as *const u8, storage.bytes())
            }
        }
    }

    /// The elements on the host, copied there if they are on a GPU.
    ///
    /// # Panics
    ///
    /// If the GPU is lost: [`Storage::try_into_host`] says so with an error.
    pub fn into_host(self) -> FlexTensor {
        self.try_into_host().unwrap_or_else(|error| panic!("{error}"))
    }

    /// The elements on the host, copied there if they are on a GPU.
    ///
    /// # Errors
    ///
    /// If the GPU is lost.
    pub fn try_into_host(self) -> Result<FlexTensor, CudaError> {
        match self {
            Self::Host(tensor) => Ok(tensor),
            Self::Gpu(tensor) => tensor.download(),
        }
    }

    /// The same elements on the host, row-major: for [`Storage::row_major`]. What a step has computed on the host
    /// stays where it is.
    ///
    /// # Errors
    ///
    /// As [`Storage::try_into_host`].
    pub fn try_into_row_major(self) -> Result<Self, CudaError> {
        Ok(Self::Host(self.try_into_host()?.to_contiguous()))
    }

    /// The bytes of the elements, if they are on the host and row-major.
    pub fn row_major(&self) -> Option<&[u8]> {
        let Self::Host(tensor) = self else { return None };
        let (begin, end) = tensor.layout().contiguous_offsets()?;
        let size = tensor.dtype().size();
        tensor.bytes().get(begin * size..end * size)
    }

    /// The elements on the host, row-major.
    ///
    /// # Errors
    ///
    /// As [`Storage::try_into_host`].
    pub fn try_into_data(self) -> Result<TensorData, CudaError> {
        self.try_into_host().map(FlexTensor::into_data)
    }

    /// The same elements under another name of their type: Burn distinguishes types that are one type in a
    /// graph (bools of several widths). A type of another size changes nothing.
    pub fn with_dtype(self, dtype: DType) -> Self {
        match self {
            Self::Host(tensor) if tensor.dtype() != dtype && tensor.dtype().size() == dtype.size() => {
                Self::Host(FlexTensor::from_arc(
                    tensor.data_arc(),
                    tensor.layout().clone(),
                    dtype,
                ))
            }
            Self::Gpu(tensor) if tensor.dtype().size() == dtype.size() => Self::Gpu(tensor.with_dtype(dtype)),
            same => same,
        }
    }

    /// A copy of the elements for an executor of host tensors; none if graphs have no such element type.
    pub fn to_host_tensor(&self) -> Option<HostTensor> {
        match self {
            Self::Host(tensor) => convert::to_host(tensor),
            Self::Gpu(_) => convert::to_host(&self.clone().into_host()),
        }
    }

    /// The same elements as compiled code for the host reads them: row-major, on a 64-byte border.
    pub fn kernel_ready(self) -> Self {
        Self::Host(convert::kernel_ready(self.into_host()))
    }

    /// The same elements where compiled code for the host can read them: row-major, at any address.
    pub fn kernel_readable(self) -> Self {
        Self::Host(convert::kernel_readable(self.into_host()))
    }

    /// Whether both have the same type, shape and bits.
    pub fn has_equal_elements(&self, other: &Self) -> bool {
        self.dtype() == other.dtype() && self.shape() == other.shape() && {
            let (a, b) = (self.clone().into_host(), other.clone().into_host());
            a.to_contiguous().bytes() == b.to_contiguous().bytes()
        }
    }
}
