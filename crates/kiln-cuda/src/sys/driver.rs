//! `libcuda`: devices, memory, streams, modules, graphs.

use std::ffi::{c_char, c_int, c_uint, c_ulonglong, c_void};

use super::{functions, handles};

/// What a call answers; zero is success.
pub type CUresult = c_int;
/// Ordinal of a device.
pub type CUdevice = c_int;
/// Address in device memory.
pub type CUdeviceptr = u64;

handles! {
    /// A context.
    CUcontext;
    /// A stream.
    CUstream;
    /// An event.
    CUevent;
    /// A pool of memory.
    CUmemoryPool;
    /// A loaded module.
    CUmodule;
    /// A kernel of a module.
    CUfunction;
    /// A graph under construction.
    CUgraph;
    /// A node of a graph.
    CUgraphNode;
    /// A graph that can be launched.
    CUgraphExec;
}

/// Results that the runtime tells apart.
pub mod result {
    use super::CUresult;
    /// The call succeeded.
    pub const SUCCESS: CUresult = 0;
    /// An argument is not what the call takes.
    pub const INVALID_VALUE: CUresult = 1;
    /// Memory of the device or of the host is used up.
    pub const OUT_OF_MEMORY: CUresult = 2;
    /// The driver finds no device.
    pub const NO_DEVICE: CUresult = 100;
    /// The stream or event has work that is not finished.
    pub const NOT_READY: CUresult = 600;
    /// A kernel read or wrote outside its memory.
    pub const ILLEGAL_ADDRESS: CUresult = 700;
    /// What a capture does not allow.
    pub const CAPTURE_UNSUPPORTED: CUresult = 900;
    /// A capture was ended by what it does not allow, on any thread.
    pub const CAPTURE_INVALIDATED: CUresult = 901;
}

/// Attributes of devices.
pub mod device_attribute {
    use std::ffi::c_int;
    /// Largest product of a block's extents.
    pub const MAX_THREADS_PER_BLOCK: c_int = 1;
    /// Number of multiprocessors.
    pub const MULTIPROCESSOR_COUNT: c_int = 16;
    /// Bytes of the second-level cache.
    pub const L2_CACHE_SIZE: c_int = 38;
    /// First number of the compute capability.
    pub const COMPUTE_CAPABILITY_MAJOR: c_int = 75;
    /// Second number of the compute capability.
    pub const COMPUTE_CAPABILITY_MINOR: c_int = 76;
    /// Bytes of shared memory that a block gets if its kernel asks for them.
    pub const MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: c_int = 97;
    /// Whether the device has pools of memory.
    pub const MEMORY_POOLS_SUPPORTED: c_int = 115;
}

/// Attributes of kernels.
pub mod function_attribute {
    use std::ffi::c_int;
    /// Threads that a block of the kernel may have.
    pub const MAX_THREADS_PER_BLOCK: c_int = 0;
    /// Bytes of shared memory in the kernel's own declarations.
    pub const SHARED_SIZE_BYTES: c_int = 1;
    /// Bytes of local memory a thread: a stack frame or spilled registers.
    pub const LOCAL_SIZE_BYTES: c_int = 3;
    /// Registers a thread.
    pub const NUM_REGS: c_int = 4;
    /// Bytes of shared memory that a launch may ask for besides.
    pub const MAX_DYNAMIC_SHARED_SIZE_BYTES: c_int = 8;
}

/// Attributes of pools of memory, each a `u64` where nothing else is said.
pub mod pool_attribute {
    use std::ffi::c_int;
    /// Whether an allocation may wait for another stream, to take what that stream frees; an `int`.
    pub const REUSE_ALLOW_INTERNAL_DEPENDENCIES: c_int = 3;
    /// Bytes that the pool keeps when they are free.
    pub const RELEASE_THRESHOLD: c_int = 4;
    /// Bytes that the pool holds.
    pub const RESERVED_MEM_CURRENT: c_int = 5;
    /// Bytes of it that are in use.
    pub const USED_MEM_CURRENT: c_int = 7;
    /// The most bytes that were in use since this was set to zero.
    pub const USED_MEM_HIGH: c_int = 8;
}

/// A stream that does not wait for the default stream.
pub const STREAM_NON_BLOCKING: c_uint = 1;
/// An event without a time.
pub const EVENT_DISABLE_TIMING: c_uint = 2;
/// Host memory that every context sees as pinned.
pub const HOST_ALLOC_PORTABLE: c_uint = 1;
/// Memory type of a copy's end on the host.
pub const MEMORY_TYPE_HOST: c_uint = 1;
/// Memory type of a copy's end on a device.
pub const MEMORY_TYPE_DEVICE: c_uint = 2;
/// A capture that forbids unsafe calls on this thread alone.
pub const CAPTURE_MODE_THREAD_LOCAL: c_uint = 1;

/// Properties of a pool of memory.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
#[allow(missing_docs)]
pub struct CUmemPoolProps {
    pub alloc_type: c_uint,
    pub handle_types: c_uint,
    pub location_type: c_uint,
    pub location_id: c_int,
    pub win32_security_attributes: *mut c_void,
    pub max_size: usize,
    pub usage: u16,
    pub reserved: [u8; 54],
}

const _: () = assert!(size_of::<CUmemPoolProps>() == 88);

/// A kernel node.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
#[allow(missing_docs)]
pub struct CudaKernelNodeParams {
    pub function: CUfunction,
    pub grid: [c_uint; 3],
    pub block: [c_uint; 3],
    pub shared_bytes: c_uint,
    pub parameters: *mut *mut c_void,
    pub extra: *mut *mut c_void,
    pub kernel: *mut c_void,
    pub context: CUcontext,
}

const _: () = assert!(size_of::<CudaKernelNodeParams>() == 72);

/// A memset node.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
#[allow(missing_docs)]
pub struct CudaMemsetNodeParams {
    pub destination: CUdeviceptr,
    pub pitch: usize,
    pub value: c_uint,
    pub element_size: c_uint,
    pub width: usize,
    pub height: usize,
}

const _: () = assert!(size_of::<CudaMemsetNodeParams>() == 40);

/// One end of a copy.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
#[allow(missing_docs)]
pub struct CopyEnd {
    pub x_in_bytes: usize,
    pub y: usize,
    pub z: usize,
    pub level_of_detail: usize,
    pub memory_type: c_uint,
    pub host: *mut c_void,
    pub device: CUdeviceptr,
    pub array: *mut c_void,
    pub reserved: *mut c_void,
    pub pitch: usize,
    pub height: usize,
}

/// A copy between two places, in up to three dimensions.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
#[allow(missing_docs)]
pub struct CudaMemcpy3D {
    pub source: CopyEnd,
    pub destination: CopyEnd,
    pub width_in_bytes: usize,
    pub height: usize,
    pub depth: usize,
}

const _: () = assert!(size_of::<CudaMemcpy3D>() == 200);

/// A matrix as the copy engine takes it.
#[repr(C, align(64))]
#[derive(Debug, Clone, Copy)]
pub struct TensorMap(pub [u64; 16]);

/// What describes a [`TensorMap`].
pub mod tensor_map {
    use std::ffi::c_uint;
    /// Elements of f16.
    pub const FLOAT16: c_uint = 6;
    /// Elements of bf16.
    pub const BFLOAT16: c_uint = 9;
    /// The 16-byte pieces of 128 bytes are exchanged among eight rows.
    pub const SWIZZLE_128B: c_uint = 3;
    /// L2 reads 128 bytes at a time.
    pub const PROMOTION_128B: c_uint = 2;
}

functions! {
    /// The driver's functions. `cuFuncGetParamInfo` is the youngest, of CUDA 12.4 (driver 550).
    DriverFunctions
    fn cuInit(flags: c_uint) -> CUresult;
    fn cuDriverGetVersion(version: *mut c_int) -> CUresult;
    fn cuGetErrorName(error: CUresult, name: *mut *const c_char) -> CUresult;
    fn cuGetErrorString(error: CUresult, text: *mut *const c_char) -> CUresult;
    fn cuDeviceGetCount(count: *mut c_int) -> CUresult;
    fn cuDeviceGet(device: *mut CUdevice, ordinal: c_int) -> CUresult;
    fn cuDeviceGetName(name: *mut c_char, length: c_int, device: CUdevice) -> CUresult;
    fn cuDeviceTotalMem_v2(bytes: *mut usize, device: CUdevice) -> CUresult;
    fn cuDeviceGetAttribute(value: *mut c_int, attribute: c_int, device: CUdevice) -> CUresult;
    fn cuDevicePrimaryCtxRetain(context: *mut CUcontext, device: CUdevice) -> CUresult;
    fn cuDevicePrimaryCtxRelease_v2(device: CUdevice) -> CUresult;
    fn cuCtxSetCurrent(context: CUcontext) -> CUresult;
    fn cuCtxSynchronize() -> CUresult;
    fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) -> CUresult;
    fn cuStreamCreate(stream: *mut CUstream, flags: c_uint) -> CUresult;
    fn cuStreamCreateWithPriority(stream: *mut CUstream, flags: c_uint, priority: c_int) -> CUresult;
    fn cuCtxGetStreamPriorityRange(least: *mut c_int, greatest: *mut c_int) -> CUresult;
    fn cuStreamDestroy_v2(stream: CUstream) -> CUresult;
    fn cuStreamSynchronize(stream: CUstream) -> CUresult;
    fn cuStreamWaitEvent(stream: CUstream, event: CUevent, flags: c_uint) -> CUresult;
    fn cuEventCreate(event: *mut CUevent, flags: c_uint) -> CUresult;
    fn cuEventDestroy_v2(event: CUevent) -> CUresult;
    fn cuEventRecord(event: CUevent, stream: CUstream) -> CUresult;
    fn cuEventSynchronize(event: CUevent) -> CUresult;
    fn cuEventQuery(event: CUevent) -> CUresult;
    fn cuEventElapsedTime(milliseconds: *mut f32, start: CUevent, end: CUevent) -> CUresult;
    fn cuMemHostAlloc(address: *mut *mut c_void, bytes: usize, flags: c_uint) -> CUresult;
    fn cuMemFreeHost(address: *mut c_void) -> CUresult;
    fn cuMemPoolCreate(pool: *mut CUmemoryPool, properties: *const CUmemPoolProps) -> CUresult;
    fn cuMemPoolDestroy(pool: CUmemoryPool) -> CUresult;
    fn cuMemPoolSetAttribute(pool: CUmemoryPool, attribute: c_int, value: *mut c_void) -> CUresult;
    fn cuMemPoolGetAttribute(pool: CUmemoryPool, attribute: c_int, value: *mut c_void) -> CUresult;
    fn cuMemPoolTrimTo(pool: CUmemoryPool, bytes: usize) -> CUresult;
    fn cuMemAllocFromPoolAsync(
        address: *mut CUdeviceptr, bytes: usize, pool: CUmemoryPool, stream: CUstream,
    ) -> CUresult;
    fn cuMemFreeAsync(address: CUdeviceptr, stream: CUstream) -> CUresult;
    fn cuMemcpyHtoDAsync_v2(to: CUdeviceptr, from: *const c_void, bytes: usize, stream: CUstream) -> CUresult;
    fn cuMemcpyDtoHAsync_v2(to: *mut c_void, from: CUdeviceptr, bytes: usize, stream: CUstream) -> CUresult;
    fn cuMemcpyDtoDAsync_v2(to: CUdeviceptr, from: CUdeviceptr, bytes: usize, stream: CUstream) -> CUresult;
    fn cuMemsetD8Async(to: CUdeviceptr, value: u8, count: usize, stream: CUstream) -> CUresult;
    fn cuModuleLoadData(module: *mut CUmodule, image: *const c_void) -> CUresult;
    fn cuModuleUnload(module: CUmodule) -> CUresult;
    fn cuModuleGetFunction(function: *mut CUfunction, module: CUmodule, name: *const c_char) -> CUresult;
    fn cuFuncSetAttribute(function: CUfunction, attribute: c_int, value: c_int) -> CUresult;
    fn cuFuncGetAttribute(value: *mut c_int, attribute: c_int, function: CUfunction) -> CUresult;
    fn cuFuncGetParamInfo(
        function: CUfunction, index: usize, offset: *mut usize, bytes: *mut usize,
    ) -> CUresult;
    fn cuLaunchKernel(
        function: CUfunction,
        grid_x: c_uint, grid_y: c_uint, grid_z: c_uint,
        block_x: c_uint, block_y: c_uint, block_z: c_uint,
        shared_bytes: c_uint, stream: CUstream, parameters: *mut *mut c_void, extra: *mut *mut c_void,
    ) -> CUresult;
    fn cuTensorMapEncodeTiled(
        map: *mut TensorMap, number: c_uint, rank: c_uint, address: *const c_void,
        extents: *const u64, strides: *const u64, boxes: *const c_uint, steps: *const c_uint,
        interleave: c_uint, swizzle: c_uint, promotion: c_uint, beyond: c_uint,
    ) -> CUresult;
    fn cuTensorMapEncodeIm2col(
        map: *mut TensorMap, number: c_uint, rank: c_uint, address: *const c_void,
        extents: *const u64, strides: *const u64, lower: *const c_int, upper: *const c_int,
        channels: c_uint, pixels: c_uint, steps: *const c_uint,
        interleave: c_uint, swizzle: c_uint, promotion: c_uint, beyond: c_uint,
    ) -> CUresult;
    fn cuGraphCreate(graph: *mut CUgraph, flags: c_uint) -> CUresult;
    fn cuGraphDestroy(graph: CUgraph) -> CUresult;
    fn cuGraphAddKernelNode_v2(
        node: *mut CUgraphNode, graph: CUgraph, after: *const CUgraphNode, count: usize,
        parameters: *const CudaKernelNodeParams,
    ) -> CUresult;
    fn cuGraphAddMemcpyNode(
        node: *mut CUgraphNode, graph: CUgraph, after: *const CUgraphNode, count: usize,
        parameters: *const CudaMemcpy3D, context: CUcontext,
    ) -> CUresult;
    fn cuGraphAddMemsetNode(
        node: *mut CUgraphNode, graph: CUgraph, after: *const CUgraphNode, count: usize,
        parameters: *const CudaMemsetNodeParams, context: CUcontext,
    ) -> CUresult;
    fn cuGraphAddEmptyNode(
        node: *mut CUgraphNode, graph: CUgraph, after: *const CUgraphNode, count: usize,
    ) -> CUresult;
    fn cuGraphAddChildGraphNode(
        node: *mut CUgraphNode, graph: CUgraph, after: *const CUgraphNode, count: usize, child: CUgraph,
    ) -> CUresult;
    fn cuGraphGetNodes(graph: CUgraph, nodes: *mut CUgraphNode, count: *mut usize) -> CUresult;
    fn cuGraphInstantiateWithFlags(
        executable: *mut CUgraphExec, graph: CUgraph, flags: c_ulonglong,
    ) -> CUresult;
    fn cuGraphUpload(executable: CUgraphExec, stream: CUstream) -> CUresult;
    fn cuGraphLaunch(executable: CUgraphExec, stream: CUstream) -> CUresult;
    fn cuGraphExecKernelNodeSetParams_v2(
        executable: CUgraphExec, node: CUgraphNode, parameters: *const CudaKernelNodeParams,
    ) -> CUresult;
    fn cuGraphExecDestroy(executable: CUgraphExec) -> CUresult;
    fn cuStreamBeginCapture_v2(stream: CUstream, mode: c_uint) -> CUresult;
    fn cuStreamBeginCaptureToGraph(
        stream: CUstream, graph: CUgraph, after: *const CUgraphNode, edges: *const c_void, count: usize,
        mode: c_uint,
    ) -> CUresult;
    fn cuStreamGetCaptureInfo_v3(
        stream: CUstream, status: *mut c_uint, id: *mut u64, graph: *mut CUgraph,
        last: *mut *const CUgraphNode, edges: *mut *const c_void, count: *mut usize,
    ) -> CUresult;
    fn cuStreamEndCapture(stream: CUstream, graph: *mut CUgraph) -> CUresult;
}
