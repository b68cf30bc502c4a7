//! A tensor whose elements are in the memory of a GPU.

use std::fmt;
use std::sync::Arc;

use burn_backend::{DType, Shape};
use burn_flex::{FlexTensor, Layout};
use kiln_cuda::CudaError;
use kiln_cuda::execute::Gpu;
use kiln_cuda::runtime::Storage;

use crate::execute::convert;

/// Row-major elements in the memory of a GPU. A clone shares them.
#[derive(Clone)]
pub struct GpuTensor {
    memory: Arc<Memory>,
    shape: Shape,
    dtype: DType,
}

/// Memory of a GPU that tensors share. A compiled step's graph holds the storage as well, but the graph is
/// no tensor of the program.
struct Memory {
    gpu: Arc<Gpu>,
    storage: Arc<Storage>,
}

impl fmt::Debug for GpuTensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let device = self.memory.gpu.device();
        write!(f, "GpuTensor({:?} of {:?} on {device:?})", self.shape, self.dtype)
    }
}

impl GpuTensor {
    /// The elements in `storage`, which is exactly as large.
    pub fn new(gpu: &Arc<Gpu>, storage: Arc<Storage>, shape: Shape, dtype: DType) -> Self {
        debug_assert_eq!(storage.bytes(), shape.num_elements() * dtype.size());
        Self {
            memory: Arc::new(Memory {
                gpu: gpu.clone(),
                storage,
            }),
            shape,
            dtype,
        }
    }

    /// A copy of a tensor of the host. The copy is under way when this returns.
    ///
    /// # Errors
    ///
    /// If the GPU has no memory left, or is lost.
    pub fn upload(gpu: &Arc<Gpu>, tensor: FlexTensor) -> Result<Self, CudaError> {
        let tensor = convert::contiguous(tensor);
        let storage = gpu.upload(tensor.bytes())?;
        let shape = tensor.layout().shape().clone();
        Ok(Self::new(gpu, storage, shape, tensor.dtype()))
    }

    /// A copy on the host. Waits for everything that is going to write the elements.
    ///
    /// # Errors
    ///
    /// If the step that writes them failed: the GPU is lost then.
    pub fn download(&self) -> Result<FlexTensor, CudaError> {
        let mut bytes = convert::aligned(self.memory.storage.bytes());
        self.memory.gpu.download(&self.memory.storage, &mut bytes)?;
        Ok(FlexTensor::new(
            bytes,
            Layout::contiguous(self.shape.clone()),
            self.dtype,
        ))
    }

    /// The shape.
    pub fn shape(&self) -> &Shape {
        &self.shape
    }

    /// The element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// The GPU.
    pub fn gpu(&self) -> &Arc<Gpu> {
        &self.memory.gpu
    }

    /// The memory.
    pub fn storage(&self) -> &Arc<Storage> {
        &self.memory.storage
    }

    /// Whether no other tensor is in this memory.
    pub fn is_unique(&self) -> bool {
        Arc::strong_count(&self.memory) == 1
    }

    /// The same elements under another name of their type, of the same size.
    pub fn with_dtype(mut self, dtype: DType) -> Self {
        self.dtype = dtype;
        self
    }
}
