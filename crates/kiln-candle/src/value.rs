//! Values of the graph as candle tensors.
//!
//! candle has fewer element types than the graph, and its integer kernels panic on overflow in debug builds.
//! The mapping:
//!
//! | graph | candle | held as |
//! | --- | --- | --- |
//! | f64, f32, f16, bf16 | the same | itself; arithmetic on the half types is in f32 or f64 and rounds once |
//! | i64, i32, i16, i8, u32, u16, u8 | i64 | the number; wrapped into the type's range after each operation |
//! | u64 | i64 | the i64 of the same bits |
//! | bool | u8 | 0 or 1 |
//!
//! What holds for every [`Val`]: its tensor has the candle type of this table and, for integers, only numbers
//! in range.

use std::sync::Arc;

use bytemuck::{AnyBitPattern, NoUninit};
use candle_core::{DType as CandleType, Device, Result, Tensor, WithDType};
use half::{bf16, f16};
use kiln_graph::{DType, HostTensor, Shape, TensorType, rounding};

/// A value of the graph: a candle tensor and the element type it stands for.
#[derive(Clone, Debug)]
pub(crate) struct Val {
    pub tensor: Tensor,
    pub dtype: DType,
}

impl Val {
    pub fn new(tensor: Tensor, dtype: DType) -> Self {
        Self { tensor, dtype }
    }

    /// Zeros (false for bool).
    pub fn zeros(shape: &Shape, dtype: DType) -> Result<Self> {
        let tensor = Tensor::zeros(shape.dims(), storage(dtype), &Device::Cpu)?;
        Ok(Self::new(tensor, dtype))
    }

    /// The tensor in the type that carries its arithmetic: f32 for the half types, itself for the rest.
    pub fn compute(&self) -> Result<Tensor> {
        self.tensor.to_dtype(storage(self.dtype.compute()))
    }

    /// The tensor in the type in which sums are accumulated: f64 for floats, itself for the rest.
    pub fn wide(&self) -> Result<Tensor> {
        if self.dtype.is_float() {
            self.tensor.to_dtype(CandleType::F64)
        } else {
            Ok(self.tensor.clone())
        }
    }

    /// A value of type `dtype` from the result of arithmetic on [`Val::compute`] or [`Val::wide`]: floats
    /// round, integers of fewer than 64 bits wrap.
    pub fn narrow(tensor: Tensor, dtype: DType) -> Result<Self> {
        let tensor = if dtype.is_int() {
            wrap(&tensor, dtype)?
        } else {
            rounded(&tensor, dtype)?
        };
        Ok(Self::new(tensor, dtype))
    }

    pub fn ty(&self) -> TensorType {
        TensorType::new(self.dtype, self.dims())
    }

    pub fn dims(&self) -> &[usize] {
        self.tensor.dims()
    }

    pub fn numel(&self) -> usize {
        self.tensor.elem_count()
    }

    pub fn from_host(host: &HostTensor) -> Result<Self> {
        let ty = host.ty();
        let dims = ty.shape.dims();
        let tensor = match ty.dtype {
            DType::F64 => copied::<f64>(host, dims)?,
            DType::F32 => copied::<f32>(host, dims)?,
            DType::F16 => copied::<f16>(host, dims)?,
            DType::BF16 => copied::<bf16>(host, dims)?,
            DType::I64 | DType::U64 => copied::<i64>(host, dims)?,
            DType::Bool => {
                let bytes: Vec<u8> = host.bytes().iter().map(|&byte| u8::from(byte != 0)).collect();
                Tensor::from_vec(bytes, dims, &Device::Cpu)?
            }
            _ => Tensor::from_vec(host.to_i64s(), dims, &Device::Cpu)?,
        };
        Ok(Self::new(tensor, ty.dtype))
    }

    pub fn to_host(&self) -> Result<HostTensor> {
        let ty = self.ty();
        let bytes = match self.dtype {
            DType::F64 => bytes_of::<f64>(&self.tensor)?,
            DType::F32 => bytes_of::<f32>(&self.tensor)?,
            DType::F16 => bytes_of::<f16>(&self.tensor)?,
            DType::BF16 => bytes_of::<bf16>(&self.tensor)?,
            DType::I64 | DType::U64 => bytes_of::<i64>(&self.tensor)?,
            DType::Bool => bytes_of::<u8>(&self.tensor)?,
            dtype => {
                let numbers = self.tensor.flatten_all()?.to_vec1::<i64>()?;
                return Ok(HostTensor::from_ints(dtype, ty.shape, numbers));
            }
        };
        match HostTensor::from_bytes(ty, bytes) {
            Some(host) => Ok(host),
            None => candle_core::bail!("a tensor of {:?} has not the bytes of its type", self.dims()),
        }
    }

    /// The one element of a rank-0 integer, bits for u64.
    pub fn to_i64(&self) -> Result<i64> {
        self.tensor.to_scalar::<i64>()
    }
}

/// A candle tensor with the bytes of a host tensor of elements `T`.
fn copied<T: WithDType + AnyBitPattern + NoUninit>(host: &HostTensor, dims: &[usize]) -> Result<Tensor> {
    let mut elements = vec![<T as bytemuck::Zeroable>::zeroed(); host.ty().numel()];
    bytemuck::cast_slice_mut(&mut elements).copy_from_slice(host.bytes());
    Tensor::from_vec(elements, dims, &Device::Cpu)
}

/// The row-major bytes of a tensor of elements `T`.
fn bytes_of<T: WithDType + NoUninit>(tensor: &Tensor) -> Result<Arc<[u8]>> {
    Ok(bytemuck::cast_slice(&tensor.flatten_all()?.to_vec1::<T>()?).into())
}

/// The candle type that holds elements of `dtype`.
pub(crate) const fn storage(dtype: DType) -> CandleType {
    match dtype {
        DType::F64 => CandleType::F64,
        DType::F32 => CandleType::F32,
        DType::F16 => CandleType::F16,
        DType::BF16 => CandleType::BF16,
        DType::Bool => CandleType::U8,
        _ => CandleType::I64,
    }
}

/// The floats `x` in the float type `dtype`, rounded once. From f64 to 16 bits candle's own conversion, which
/// is that of `half`, rounds twice ([`kiln_graph::rounding`]).
pub(crate) fn rounded(x: &Tensor, dtype: DType) -> Result<Tensor> {
    let numbers = || Ok::<_, candle_core::Error>(x.flatten_all()?.to_vec1::<f64>()?.into_iter());
    match (x.dtype(), dtype) {
        (CandleType::F64, DType::F16) => vector(numbers()?.map(rounding::to_f16), x.dims()),
        (CandleType::F64, DType::BF16) => vector(numbers()?.map(rounding::to_bf16), x.dims()),
        _ => x.to_dtype(storage(dtype)),
    }
}

/// A tensor of these elements, in row-major order.
pub(crate) fn vector<T: WithDType>(elements: impl Iterator<Item = T>, dims: &[usize]) -> Result<Tensor> {
    Tensor::from_vec(elements.collect::<Vec<T>>(), dims, &Device::Cpu)
}

/// Numbers held as i64 reduced to the range of the integer type `dtype` by keeping their low bits.
pub(crate) fn wrap(x: &Tensor, dtype: DType) -> Result<Tensor> {
    let through = |ty| x.to_dtype(ty)?.to_dtype(CandleType::I64);
    match dtype {
        DType::I32 => through(CandleType::I32),
        DType::I16 => through(CandleType::I16),
        DType::U32 => through(CandleType::U32),
        DType::U8 => through(CandleType::U8),
        DType::I8 => {
            let low = through(CandleType::U8)?;
            select(&low.ge(&int(&low, 128)?)?, &low.sub(&int(&low, 256)?)?, &low)
        }
        DType::U16 => {
            let low = through(CandleType::I16)?;
            select(&low.lt(&int(&low, 0)?)?, &low.add(&int(&low, 65536)?)?, &low)
        }
        _ => Ok(x.clone()),
    }
}

/// `x` repeated to `shape` along dimensions of extent 1 (and new ones in front), as a view.
///
/// A view with strides of zero along dimensions of extent 1 counts as contiguous for candle, but its
/// reductions divide by the stride; such a view gets ordinary strides here.
pub(crate) fn repeat(x: &Tensor, shape: impl Into<candle_core::Shape>) -> Result<Tensor> {
    let view = x.broadcast_as(shape)?;
    if view.is_contiguous() {
        view.reshape(view.shape())
    } else {
        Ok(view)
    }
}

/// `value` repeated to the shape of the floating point tensor `like`, in its type.
pub(crate) fn float(like: &Tensor, value: f64) -> Result<Tensor> {
    let value = Tensor::new(value, &Device::Cpu)?.to_dtype(like.dtype())?;
    repeat(&value, like.shape())
}

/// `value` repeated to the shape of `like`, as i64.
pub(crate) fn int(like: &Tensor, value: i64) -> Result<Tensor> {
    repeat(&Tensor::new(value, &Device::Cpu)?, like.shape())
}

/// `condition ? a : b`.
pub(crate) fn select(condition: &Tensor, a: &Tensor, b: &Tensor) -> Result<Tensor> {
    condition.where_cond(a, b)
}

/// Logical and of two u8 masks.
pub(crate) fn both(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    a.minimum(b)
}

/// Logical or of two u8 masks.
pub(crate) fn either(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    a.maximum(b)
}

/// Logical not of a u8 mask.
pub(crate) fn not(a: &Tensor) -> Result<Tensor> {
    a.eq(&a.zeros_like()?)
}

/// Where a float tensor is NaN.
pub(crate) fn is_nan(x: &Tensor) -> Result<Tensor> {
    x.ne(x)
}

/// Indices computed on the host, as a tensor.
pub(crate) fn indices(values: Vec<i64>) -> Result<Tensor> {
    let count = values.len();
    Tensor::from_vec(values, count, &Device::Cpu)
}
