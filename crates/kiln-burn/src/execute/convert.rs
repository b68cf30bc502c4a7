//! Tensors between burn-flex, the graph's plain host tensors and compiled kernels.
//!
//! Element types map one to one with two exceptions: Burn stores truth values in one byte under two names,
//! and `Flex32` (a float whose precision is the backend's choice) is f32. Buffers whose elements lie
//! row-major from the start are handed over without a copy; compiled kernels also need them on a 64-byte
//! border, and [`aligned`] makes such buffers for burn-flex to own.

use std::mem::MaybeUninit;

use burn_backend::{BoolStore, DType as BurnDType, Shape as BurnShape};
use burn_flex::{FlexTensor, Layout};
use burn_std::{AllocationController, AllocationProperty, Bytes};
use kiln_cpu::{ALIGNMENT, AlignedBuffer};
use kiln_graph::{DType, HostTensor, Shape, TensorType};

use crate::lend;

/// The graph's element type for Burn's; none for quantized, complex and four-byte bool types.
pub fn dtype(dtype: BurnDType) -> Option<DType> {
    Some(match dtype {
        BurnDType::F64 => DType::F64,
        BurnDType::F32 | BurnDType::Flex32 => DType::F32,
        BurnDType::F16 => DType::F16,
        BurnDType::BF16 => DType::BF16,
        BurnDType::I64 => DType::I64,
        BurnDType::I32 => DType::I32,
        BurnDType::I16 => DType::I16,
        BurnDType::I8 => DType::I8,
        BurnDType::U64 => DType::U64,
        BurnDType::U32 => DType::U32,
        BurnDType::U16 => DType::U16,
        BurnDType::U8 => DType::U8,
        BurnDType::Bool(BoolStore::Native | BoolStore::U8) => DType::Bool,
        _ => return None,
    })
}

/// Burn's element type for the graph's.
pub fn burn_dtype(dtype: DType) -> BurnDType {
    match dtype {
        DType::F64 => BurnDType::F64,
        DType::F32 => BurnDType::F32,
        DType::F16 => BurnDType::F16,
        DType::BF16 => BurnDType::BF16,
        DType::I64 => BurnDType::I64,
        DType::I32 => BurnDType::I32,
        DType::I16 => BurnDType::I16,
        DType::I8 => BurnDType::I8,
        DType::U64 => BurnDType::U64,
        DType::U32 => BurnDType::U32,
        DType::U16 => BurnDType::U16,
        DType::U8 => BurnDType::U8,
        DType::Bool => BurnDType::Bool(BoolStore::Native),
    }
}

/// Burn's shape for the graph's.
pub fn burn_shape(shape: &Shape) -> BurnShape {
    BurnShape::from(shape.to_vec())
}

/// The graph's type of a burn-flex tensor; none if its element type has no counterpart.
pub fn tensor_type(tensor: &FlexTensor) -> Option<TensorType> {
    Some(TensorType::new(
        dtype(tensor.dtype())?,
        Shape::new(tensor.layout().shape().iter().copied()),
    ))
}

/// Whether [`tensor_type`] is `ty`.
pub fn has_type(tensor: &FlexTensor, ty: &TensorType) -> bool {
    let shape = tensor.layout().shape();
    dtype(tensor.dtype()) == Some(ty.dtype) && shape.iter().eq(ty.shape.iter())
}

/// `tensor` with its elements row-major from the start of a buffer of exactly their size. Copies only if they
/// are not.
pub fn contiguous(tensor: FlexTensor) -> FlexTensor {
    tensor.to_contiguous()
}

/// Whether a compiled kernel can read `tensor` in place: its buffer starts on a 64-byte border and holds
/// its elements row-major and nothing else.
pub fn is_kernel_ready(tensor: &FlexTensor) -> bool {
    let layout = tensor.layout();
    let bytes = tensor.bytes();
    layout.is_contiguous()
        && layout.start_offset() == 0
        && (bytes.is_empty() || bytes.as_ptr().addr().is_multiple_of(ALIGNMENT))
        && dtype(tensor.dtype()).is_some_and(|dtype| bytes.len() == layout.num_elements() * dtype.size())
}

/// Whether a compiled kernel can read the elements where they are: row-major, in a buffer that has nothing
/// else. A border is not needed for reading: vectors are loaded from any address, and a copy costs more than
/// what that does.
fn is_kernel_readable(tensor: &FlexTensor) -> bool {
    let layout = tensor.layout();
    let bytes = tensor.bytes();
    layout.is_contiguous()
        && layout.start_offset() == 0
        && dtype(tensor.dtype()).is_some_and(|dtype| {
            bytes.len() == layout.num_elements() * dtype.size()
                && bytes.as_ptr().addr().is_multiple_of(dtype.size())
        })
}

/// `tensor` where a kernel can read it, which may be any address: itself if its elements lie row-major, a
/// copy otherwise.
pub fn kernel_readable(tensor: FlexTensor) -> FlexTensor {
    if is_kernel_readable(&tensor) {
        return tensor;
    }
    let ready = kernel_ready(tensor);
    lend::note_copy(ready.bytes().len());
    ready
}

/// `tensor` in a buffer that [`is_kernel_ready`]: itself if it is, a copy otherwise.
pub fn kernel_ready(tensor: FlexTensor) -> FlexTensor {
    if is_kernel_ready(&tensor) {
        return tensor;
    }
    let tensor = tensor.to_contiguous();
    let mut bytes = aligned(tensor.bytes().len());
    bytes.copy_from_slice(tensor.bytes());
    FlexTensor::new(
        bytes,
        Layout::contiguous(tensor.layout().shape().clone()),
        tensor.dtype(),
    )
}

/// The row-major elements as a host tensor (a copy); none if the element type has no counterpart.
pub fn to_host(tensor: &FlexTensor) -> Option<HostTensor> {
    let ty = tensor_type(tensor)?;
    let tensor = tensor.to_contiguous();
    // Burn-flex keeps every byte of a bool tensor 0 or 1; a tensor from elsewhere may not.
    if ty.dtype == DType::Bool && tensor.bytes().iter().any(|&byte| byte > 1) {
        let bytes: Vec<u8> = tensor.bytes().iter().map(|&byte| u8::from(byte != 0)).collect();
        return HostTensor::from_bytes(ty, bytes);
    }
    HostTensor::from_bytes(ty, tensor.bytes())
}

/// A burn-flex tensor with the elements of `tensor`, as Burn's `dtype` where that is another name for the
/// same elements (`Bool(U8)`, `Flex32`) and as the natural one otherwise.
pub fn from_host(tensor: &HostTensor, announced: BurnDType) -> FlexTensor {
    let ty = tensor.ty();
    let natural = burn_dtype(ty.dtype);
    let same = matches!((natural, announced), (BurnDType::Bool(_), BurnDType::Bool(_)));
    let mut bytes = aligned(tensor.bytes().len());
    bytes.copy_from_slice(tensor.bytes());
    FlexTensor::new(
        bytes,
        Layout::contiguous(burn_shape(&ty.shape)),
        if same { announced } else { natural },
    )
}

/// `size` zeroed bytes on a 64-byte border, for a burn-flex tensor to own.
///
/// # Panics
///
/// If the system has no such memory, as any allocation of a tensor does.
pub fn aligned(size: usize) -> Bytes {
    let buffer = AlignedBuffer::zeroed(size).unwrap_or_else(|error| panic!("{error}"));
    from_aligned(buffer)
}

/// A buffer that a compiled step filled, for a burn-flex tensor to own. Nothing is copied.
pub fn from_aligned(buffer: AlignedBuffer) -> Bytes {
    let size = buffer.len();
    // SAFETY: all `size` bytes of an `AlignedBuffer` are initialised from the start.
    unsafe { Bytes::from_controller(Box::new(Controller(buffer)), size) }
}

/// Owns an aligned buffer on behalf of [`Bytes`].
struct Controller(AlignedBuffer);

impl AllocationController for Controller {
    /// The alignment that burn-std promises for tensors. The true alignment is larger, but copies that
    /// burn-std makes of these bytes can only have the largest alignment it knows.
    fn alloc_align(&self) -> usize {
        align_of::<u128>()
    }

    fn property(&self) -> AllocationProperty {
        // Not `Native`: the memory is not a vector's, so it must not be converted into one.
        AllocationProperty::Other
    }

    unsafe fn memory_mut(&mut self) -> &mut [MaybeUninit<u8>] {
        // SAFETY: the caller promises to write initialised bytes only.
        unsafe { as_uninit_mut(self.0.as_mut_slice()) }
    }

    fn memory(&self) -> &[MaybeUninit<u8>] {
        as_uninit(self.0.as_slice())
    }
}

/// Initialised bytes in the type that [`AllocationController::memory`] wants.
pub(crate) fn as_uninit(bytes: &[u8]) -> &[MaybeUninit<u8>] {
    // SAFETY: `MaybeUninit<u8>` has the layout of `u8`, and shared bytes are only read.
    unsafe { &*(std::ptr::from_ref(bytes) as *const [MaybeUninit<u8>]) }
}

/// Initialised bytes in the type that [`AllocationController::memory_mut`] wants.
///
/// # Safety
///
/// Nothing but initialised bytes may be written through the result.
pub(crate) unsafe fn as_uninit_mut(bytes: &mut [u8]) -> &mut [MaybeUninit<u8>] {
    // SAFETY: `MaybeUninit<u8>` has the layout of `u8`; the caller keeps the bytes initialised.
    unsafe { &mut *(std::ptr::from_mut(bytes) as *mut [MaybeUninit<u8>]) }
}

#[cfg(test)]
mod tests {
    use burn_backend::TensorData;

    use super::*;

    #[test]
    fn aligned_bytes_belong_to_a_tensor() {
        let mut bytes = aligned(24);
        bytes.copy_from_slice(&[1u8; 24]);
        let tensor = FlexTensor::new(bytes, Layout::contiguous(vec![24].into()), BurnDType::U8);
        assert!(is_kernel_ready(&tensor));
        // A copy that burn-std makes is its own, with its own alignment.
        let data = tensor.clone().into_data();
        assert_eq!(data.bytes[..], [1u8; 24]);
        assert_eq!(tensor.into_data().to_vec::<u8>().unwrap(), [1u8; 24]);
        assert_eq!(aligned(0).len(), 0);
    }

    #[test]
    fn kernels_get_rows_on_a_border() {
        let tensor = FlexTensor::from_data(TensorData::from([[1.0f32, 2.0], [3.0, 4.0]]));
        let view = tensor.transpose(0, 1);
        assert!(!is_kernel_ready(&view));
        let ready = kernel_ready(view);
        assert!(is_kernel_ready(&ready));
        assert_eq!(ready.storage::<f32>(), [1.0, 3.0, 2.0, 4.0]);
        let place = ready.bytes().as_ptr();
        assert_eq!(
            kernel_ready(ready).bytes().as_ptr(),
            place,
            "what is ready is not copied"
        );
    }

    #[test]
    fn rows_are_read_at_any_address() {
        let tensor = FlexTensor::from_data(TensorData::from([[1.0f32, 2.0], [3.0, 4.0]]));
        let place = tensor.bytes().as_ptr();
        assert_eq!(kernel_readable(tensor.clone()).bytes().as_ptr(), place);
        let copied = lend::copied_bytes();
        let ready = kernel_readable(tensor.transpose(0, 1));
        assert_eq!(ready.storage::<f32>(), [1.0, 3.0, 2.0, 4.0]);
        assert!(lend::copied_bytes() >= copied + 16);
    }

    #[test]
    fn every_type_survives_the_way_to_the_host_and_back() {
        for dtype in DType::ALL {
            let host = HostTensor::from_ints(dtype, [2, 3], [0, 1, 1, 0, 1, 0]);
            let tensor = from_host(&host, burn_dtype(dtype));
            assert_eq!(tensor_type(&tensor).as_ref(), Some(host.ty()));
            assert_eq!(to_host(&tensor), Some(host));
        }
        let bools = HostTensor::from_vec([2], [true, false]);
        assert_eq!(
            from_host(&bools, BurnDType::Bool(BoolStore::U8)).dtype(),
            BurnDType::Bool(BoolStore::U8)
        );
    }
}
