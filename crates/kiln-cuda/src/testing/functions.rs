//! The functions of the fake driver.
//!
//! SAFETY of all of them: the runtime passes pointers to values that live during the call, which is what the
//! real driver requires of its callers too. Addresses of device memory are checked against what is allocated.

#![allow(non_snake_case, reason = "the names are the driver's")]

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};

use super::graphs::{
    cuGraphAddChildGraphNode, cuGraphAddEmptyNode, cuGraphAddKernelNode_v2, cuGraphAddMemcpyNode,
    cuGraphAddMemsetNode, cuGraphCreate, cuGraphDestroy, cuGraphExecDestroy,
    cuGraphExecKernelNodeSetParams_v2, cuGraphGetNodes, cuGraphInstantiateWithFlags, cuGraphLaunch,
    cuGraphUpload, cuStreamBeginCapture_v2, cuStreamBeginCaptureToGraph, cuStreamEndCapture,
    cuStreamGetCaptureInfo_v3,
};
use super::{State, with};
use crate::sys::driver::{
    CUcontext, CUdevice, CUdeviceptr, CUevent, CUfunction, CUmemPoolProps, CUmemoryPool, CUmodule, CUresult,
    CUstream, DriverFunctions, TensorMap, device_attribute, function_attribute, pool_attribute, result,
};

/// `CUDA_ERROR_NOT_FOUND`.
const NOT_FOUND: c_int = 500;

/// Records a call and does it, unless it is to fail.
pub(super) fn call(name: &'static str, given: &str, work: impl FnOnce(&mut State) -> CUresult) -> CUresult {
    with(|state| match state.note(name, given) {
        Some(code) => code,
        None => work(state),
    })
}

pub(super) fn number(handle: *mut c_void) -> usize {
    handle as usize
}

pub(super) fn pointer(number: usize) -> *mut c_void {
    number as *mut c_void
}

/// Writes a new handle to where the caller wants it.
pub(super) unsafe fn give(state: &mut State, to: *mut *mut c_void) -> CUresult {
    // SAFETY: see the module.
    unsafe { *to = pointer(state.handle()) };
    result::SUCCESS
}

unsafe extern "C" fn cuInit(_: c_uint) -> CUresult {
    call("cuInit", "", |_| result::SUCCESS)
}

unsafe extern "C" fn cuDriverGetVersion(version: *mut c_int) -> CUresult {
    // SAFETY: see the module.
    unsafe { *version = 13000 };
    result::SUCCESS
}

unsafe extern "C" fn cuGetErrorName(error: CUresult, name: *mut *const c_char) -> CUresult {
    let text = match error {
        result::OUT_OF_MEMORY => c"CUDA_ERROR_OUT_OF_MEMORY",
        result::ILLEGAL_ADDRESS => c"CUDA_ERROR_ILLEGAL_ADDRESS",
        _ => return result::INVALID_VALUE,
    };
    // SAFETY: see the module.
    unsafe { *name = text.as_ptr() };
    result::SUCCESS
}

unsafe extern "C" fn cuGetErrorString(error: CUresult, text: *mut *const c_char) -> CUresult {
    let words = match error {
        result::OUT_OF_MEMORY => c"out of memory",
        result::ILLEGAL_ADDRESS => c"an illegal memory access was encountered",
        _ => return result::INVALID_VALUE,
    };
    // SAFETY: see the module.
    unsafe { *text = words.as_ptr() };
    result::SUCCESS
}

unsafe extern "C" fn cuDeviceGetCount(count: *mut c_int) -> CUresult {
    // SAFETY: see the module.
    unsafe { *count = with(|state| state.devices) as c_int };
    result::SUCCESS
}

unsafe extern "C" fn cuDeviceGet(device: *mut CUdevice, ordinal: c_int) -> CUresult {
    // SAFETY: see the module.
    unsafe { *device = ordinal };
    result::SUCCESS
}

unsafe extern "C" fn cuDeviceGetName(name: *mut c_char, _: c_int, _: CUdevice) -> CUresult {
    for (index, &byte) in b"Fake GPU\0".iter().enumerate() {
        // SAFETY: see the module; the caller has room for a name.
        unsafe { *name.add(index) = byte as c_char };
    }
    result::SUCCESS
}

unsafe extern "C" fn cuDeviceTotalMem_v2(bytes: *mut usize, _: CUdevice) -> CUresult {
    // SAFETY: see the module.
    unsafe { *bytes = with(|state| state.memory) };
    result::SUCCESS
}

unsafe extern "C" fn cuDeviceGetAttribute(value: *mut c_int, attribute: c_int, _: CUdevice) -> CUresult {
    let found = match attribute {
        device_attribute::COMPUTE_CAPABILITY_MAJOR => 9,
        device_attribute::COMPUTE_CAPABILITY_MINOR => 0,
        device_attribute::MULTIPROCESSOR_COUNT => 132,
        device_attribute::MAX_THREADS_PER_BLOCK => 1024,
        device_attribute::MAX_SHARED_MEMORY_PER_BLOCK_OPTIN => 232_448,
        device_attribute::L2_CACHE_SIZE => 60 << 20,
        _ => return result::INVALID_VALUE,
    };
    // SAFETY: see the module.
    unsafe { *value = found };
    result::SUCCESS
}

unsafe extern "C" fn cuDevicePrimaryCtxRetain(context: *mut CUcontext, device: CUdevice) -> CUresult {
    call("cuDevicePrimaryCtxRetain", &format!("device {device}"), |state| {
        // SAFETY: see the module.
        unsafe { give(state, context.cast()) }
    })
}

unsafe extern "C" fn cuDevicePrimaryCtxRelease_v2(device: CUdevice) -> CUresult {
    call("cuDevicePrimaryCtxRelease", &format!("device {device}"), |_| {
        result::SUCCESS
    })
}

unsafe extern "C" fn cuCtxSetCurrent(_: CUcontext) -> CUresult {
    // Not recorded: every operation begins with this call, and the record would be full of it.
    result::SUCCESS
}

unsafe extern "C" fn cuCtxSynchronize() -> CUresult {
    call("cuCtxSynchronize", "", |state| {
        if state.capturing.is_empty() {
            return result::SUCCESS;
        }
        let captures = state.capturing.values_mut();
        captures.for_each(|capture| capture.invalidated = true);
        result::CAPTURE_UNSUPPORTED
    })
}

unsafe extern "C" fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) -> CUresult {
    with(|state| {
        // SAFETY: see the module.
        unsafe { (*free, *total) = (state.memory - state.used(), state.memory) };
    });
    result::SUCCESS
}

unsafe extern "C" fn cuStreamCreate(stream: *mut CUstream, _: c_uint) -> CUresult {
    call("cuStreamCreate", "", |state| {
        // SAFETY: see the module.
        unsafe { give(state, stream.cast()) }
    })
}

unsafe extern "C" fn cuStreamCreateWithPriority(
    stream: *mut CUstream,
    _: c_uint,
    priority: c_int,
) -> CUresult {
    call("cuStreamCreateWithPriority", &priority.to_string(), |state| {
        // SAFETY: see the module.
        unsafe { give(state, stream.cast()) }
    })
}

unsafe extern "C" fn cuCtxGetStreamPriorityRange(least: *mut c_int, greatest: *mut c_int) -> CUresult {
    // SAFETY: see the module.
    unsafe { (*least, *greatest) = (0, -5) };
    result::SUCCESS
}

unsafe extern "C" fn cuStreamDestroy_v2(stream: CUstream) -> CUresult {
    call("cuStreamDestroy", &format!("stream {}", number(stream.0)), |_| {
        result::SUCCESS
    })
}

unsafe extern "C" fn cuStreamSynchronize(stream: CUstream) -> CUresult {
    call(
        "cuStreamSynchronize",
        &format!("stream {}", number(stream.0)),
        |_| result::SUCCESS,
    )
}

unsafe extern "C" fn cuStreamWaitEvent(stream: CUstream, event: CUevent, _: c_uint) -> CUresult {
    let given = format!("stream {} for event {}", number(stream.0), number(event.0));
    call("cuStreamWaitEvent", &given, |_| result::SUCCESS)
}

unsafe extern "C" fn cuEventCreate(event: *mut CUevent, _: c_uint) -> CUresult {
    // SAFETY: see the module.
    with(|state| unsafe { give(state, event.cast()) })
}

unsafe extern "C" fn cuEventDestroy_v2(_: CUevent) -> CUresult {
    result::SUCCESS
}

unsafe extern "C" fn cuEventRecord(event: CUevent, stream: CUstream) -> CUresult {
    let given = format!("event {} on stream {}", number(event.0), number(stream.0));
    call("cuEventRecord", &given, |_| result::SUCCESS)
}

unsafe extern "C" fn cuEventSynchronize(event: CUevent) -> CUresult {
    call(
        "cuEventSynchronize",
        &format!("event {}", number(event.0)),
        |_| result::SUCCESS,
    )
}

unsafe extern "C" fn cuEventQuery(_: CUevent) -> CUresult {
    call("cuEventQuery", "", |_| result::SUCCESS)
}

unsafe extern "C" fn cuEventElapsedTime(milliseconds: *mut f32, _: CUevent, _: CUevent) -> CUresult {
    // SAFETY: see the module.
    unsafe { *milliseconds = 1.0 };
    result::SUCCESS
}

unsafe extern "C" fn cuMemHostAlloc(address: *mut *mut c_void, bytes: usize, _: c_uint) -> CUresult {
    call("cuMemHostAlloc", &format!("{bytes} bytes"), |state| {
        let start = state.allocate(bytes, true);
        // SAFETY: see the module.
        unsafe { *address = start as *mut c_void };
        result::SUCCESS
    })
}

unsafe extern "C" fn cuMemFreeHost(address: *mut c_void) -> CUresult {
    call("cuMemFreeHost", "", |state| {
        match state.allocated.remove(&(address as u64)) {
            Some(_) => result::SUCCESS,
            None => result::INVALID_VALUE,
        }
    })
}

unsafe extern "C" fn cuMemPoolCreate(pool: *mut CUmemoryPool, properties: *const CUmemPoolProps) -> CUresult {
    // SAFETY: see the module.
    let device = unsafe { (*properties).location_id };
    call("cuMemPoolCreate", &format!("device {device}"), |state| {
        // SAFETY: see the module.
        unsafe { give(state, pool.cast()) }
    })
}

unsafe extern "C" fn cuMemPoolDestroy(_: CUmemoryPool) -> CUresult {
    call("cuMemPoolDestroy", "", |_| result::SUCCESS)
}

unsafe extern "C" fn cuMemPoolSetAttribute(
    _: CUmemoryPool,
    attribute: c_int,
    value: *mut c_void,
) -> CUresult {
    with(|state| {
        if attribute == pool_attribute::USED_MEM_HIGH {
            state.peak = state.used();
        }
    });
    // SAFETY: see the module; every attribute that the runtime sets is a `u64`.
    let value = unsafe { *value.cast::<u64>() };
    call(
        "cuMemPoolSetAttribute",
        &format!("{attribute} to {value}"),
        |_| result::SUCCESS,
    )
}

unsafe extern "C" fn cuMemPoolGetAttribute(
    _: CUmemoryPool,
    attribute: c_int,
    value: *mut c_void,
) -> CUresult {
    let bytes = with(|state| {
        if attribute == pool_attribute::USED_MEM_HIGH {
            state.peak
        } else {
            state.used()
        }
    });
    // SAFETY: see the module; every attribute that the runtime asks for is a `u64`.
    unsafe { *value.cast::<u64>() = bytes as u64 };
    result::SUCCESS
}

unsafe extern "C" fn cuMemPoolTrimTo(_: CUmemoryPool, bytes: usize) -> CUresult {
    call("cuMemPoolTrimTo", &format!("{bytes} bytes"), |_| result::SUCCESS)
}

unsafe extern "C" fn cuMemAllocFromPoolAsync(
    address: *mut CUdeviceptr,
    bytes: usize,
    _: CUmemoryPool,
    stream: CUstream,
) -> CUresult {
    let given = format!("{bytes} bytes on stream {}", number(stream.0));
    call("cuMemAllocFromPoolAsync", &given, |state| {
        if state.used() + bytes > state.memory {
            return result::OUT_OF_MEMORY;
        }
        // SAFETY: see the module.
        unsafe { *address = state.allocate(bytes, false) };
        result::SUCCESS
    })
}

unsafe extern "C" fn cuMemFreeAsync(address: CUdeviceptr, stream: CUstream) -> CUresult {
    let given = format!("on stream {}", number(stream.0));
    call("cuMemFreeAsync", &given, |state| {
        match state.allocated.remove(&address) {
            Some(_) => result::SUCCESS,
            None => result::INVALID_VALUE,
        }
    })
}

/// Copies, if the ends on the device are allocated.
unsafe fn copy(state: &mut State, to: u64, from: u64, bytes: usize, ends: &[u64]) -> CUresult {
    if !ends.iter().all(|&end| state.holds(end, bytes)) {
        return result::ILLEGAL_ADDRESS;
    }
    // SAFETY: ends on the device were checked, ends on the host are the runtime's promise; they do not
    // overlap.
    unsafe { std::ptr::copy_nonoverlapping(from as *const u8, to as *mut u8, bytes) };
    result::SUCCESS
}

unsafe extern "C" fn cuMemcpyHtoDAsync_v2(
    to: CUdeviceptr,
    from: *const c_void,
    bytes: usize,
    stream: CUstream,
) -> CUresult {
    let given = format!("{bytes} bytes on stream {}", number(stream.0));
    call("cuMemcpyHtoDAsync", &given, |state| {
        // SAFETY: see the module.
        unsafe { copy(state, to, from as u64, bytes, &[to]) }
    })
}

unsafe extern "C" fn cuMemcpyDtoHAsync_v2(
    to: *mut c_void,
    from: CUdeviceptr,
    bytes: usize,
    stream: CUstream,
) -> CUresult {
    let given = format!("{bytes} bytes on stream {}", number(stream.0));
    call("cuMemcpyDtoHAsync", &given, |state| {
        // SAFETY: see the module.
        unsafe { copy(state, to as u64, from, bytes, &[from]) }
    })
}

unsafe extern "C" fn cuMemcpyDtoDAsync_v2(
    to: CUdeviceptr,
    from: CUdeviceptr,
    bytes: usize,
    stream: CUstream,
) -> CUresult {
    let given = format!("{bytes} bytes on stream {}", number(stream.0));
    call("cuMemcpyDtoDAsync", &given, |state| {
        // SAFETY: see the module.
        unsafe { copy(state, to, from, bytes, &[to, from]) }
    })
}

unsafe extern "C" fn cuMemsetD8Async(to: CUdeviceptr, value: u8, count: usize, stream: CUstream) -> CUresult {
    let given = format!("{count} bytes to {value} on stream {}", number(stream.0));
    call("cuMemsetD8Async", &given, |state| {
        if !state.holds(to, count) {
            return result::ILLEGAL_ADDRESS;
        }
        // SAFETY: the range was checked.
        unsafe { (to as *mut u8).write_bytes(value, count) };
        result::SUCCESS
    })
}

unsafe extern "C" fn cuModuleLoadData(module: *mut CUmodule, _: *const c_void) -> CUresult {
    call("cuModuleLoadData", "", |state| {
        // SAFETY: see the module.
        unsafe { give(state, module.cast()) }
    })
}

unsafe extern "C" fn cuModuleUnload(_: CUmodule) -> CUresult {
    call("cuModuleUnload", "", |_| result::SUCCESS)
}

unsafe extern "C" fn cuModuleGetFunction(
    function: *mut CUfunction,
    _: CUmodule,
    name: *const c_char,
) -> CUresult {
    // SAFETY: see the module; the name ends with a zero.
    let name = unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned();
    with(|state| {
        if !state.kernels.contains_key(&name) {
            return NOT_FOUND;
        }
        state.functions.push(name);
        // SAFETY: see the module. A function's handle is its place in the list, counted from one.
        unsafe { *function = CUfunction(pointer(state.functions.len())) };
        result::SUCCESS
    })
}

/// Name of a kernel.
pub(super) fn kernel(state: &State, function: CUfunction) -> String {
    state.functions[number(function.0) - 1].clone()
}

unsafe extern "C" fn cuFuncSetAttribute(function: CUfunction, attribute: c_int, value: c_int) -> CUresult {
    let given = format!(
        "{attribute} of {} to {value}",
        with(|state| kernel(state, function))
    );
    call("cuFuncSetAttribute", &given, |_| result::SUCCESS)
}

unsafe extern "C" fn cuFuncGetAttribute(value: *mut c_int, attribute: c_int, _: CUfunction) -> CUresult {
    let found = match attribute {
        function_attribute::MAX_THREADS_PER_BLOCK => 512,
        function_attribute::SHARED_SIZE_BYTES => 1024,
        function_attribute::NUM_REGS => 32,
        _ => 0,
    };
    // SAFETY: see the module.
    unsafe { *value = found };
    result::SUCCESS
}

unsafe extern "C" fn cuFuncGetParamInfo(
    function: CUfunction,
    index: usize,
    _: *mut usize,
    bytes: *mut usize,
) -> CUresult {
    with(|state| match state.kernels[&kernel(state, function)].get(index) {
        Some(&size) => {
            // SAFETY: see the module.
            unsafe { *bytes = size };
            result::SUCCESS
        }
        None => result::INVALID_VALUE,
    })
}

unsafe extern "C" fn cuLaunchKernel(
    function: CUfunction,
    grid_x: c_uint,
    grid_y: c_uint,
    grid_z: c_uint,
    block_x: c_uint,
    block_y: c_uint,
    block_z: c_uint,
    shared_bytes: c_uint,
    stream: CUstream,
    _: *mut *mut c_void,
    _: *mut *mut c_void,
) -> CUresult {
    let given = format!(
        "{} grid {:?} block {:?} shared {shared_bytes} on stream {}",
        with(|state| kernel(state, function)),
        [grid_x, grid_y, grid_z],
        [block_x, block_y, block_z],
        number(stream.0)
    );
    call("cuLaunchKernel", &given, |state| {
        state.queued(number(stream.0));
        result::SUCCESS
    })
}

unsafe extern "C" fn cuTensorMapEncodeTiled(
    map: *mut TensorMap,
    _: c_uint,
    rank: c_uint,
    address: *const c_void,
    extents: *const u64,
    strides: *const u64,
    _: *const c_uint,
    _: *const c_uint,
    _: c_uint,
    _: c_uint,
    _: c_uint,
    _: c_uint,
) -> CUresult {
    // SAFETY: see the module; the caller gives two extents and a stride.
    let (extents, stride) = unsafe { ([*extents, *extents.add(1)], *strides) };
    let given = format!("{extents:?}, {stride} bytes from row to row");
    call("cuTensorMapEncodeTiled", &given, |_| {
        let address = address as u64;
        if rank != 2 || !address.is_multiple_of(16) || !stride.is_multiple_of(16) {
            return result::INVALID_VALUE;
        }
        // SAFETY: see the module.
        unsafe { map.cast::<[u64; 2]>().write([address, stride]) };
        result::SUCCESS
    })
}

unsafe extern "C" fn cuTensorMapEncodeIm2col(
    map: *mut TensorMap,
    _: c_uint,
    rank: c_uint,
    address: *const c_void,
    extents: *const u64,
    strides: *const u64,
    lower: *const c_int,
    upper: *const c_int,
    _: c_uint,
    _: c_uint,
    _: *const c_uint,
    _: c_uint,
    _: c_uint,
    _: c_uint,
    _: c_uint,
) -> CUresult {
    // SAFETY: see the module; the caller gives four extents, three strides and two corners of two places.
    let (extents, strides, corners) = unsafe {
        (
            *extents.cast::<[u64; 4]>(),
            *strides.cast::<[u64; 3]>(),
            [*lower.cast::<[c_int; 2]>(), *upper.cast::<[c_int; 2]>()],
        )
    };
    let given = format!("{extents:?}, {strides:?} bytes apart, windows from {corners:?}");
    call("cuTensorMapEncodeIm2col", &given, |_| {
        let address = address as u64;
        let apart = |stride: &u64| stride.is_multiple_of(16);
        if rank != 4 || !address.is_multiple_of(16) || !strides.iter().all(apart) {
            return result::INVALID_VALUE;
        }
        // SAFETY: see the module.
        unsafe { map.cast::<[u64; 2]>().write([address, strides[0]]) };
        result::SUCCESS
    })
}

macro_rules! table {
    ($($name:ident),* $(,)?) => {
        /// The fake driver's functions.
        pub(super) const TABLE: DriverFunctions = DriverFunctions { $($name),* };
    };
}

table! {
    cuInit, cuDriverGetVersion, cuGetErrorName, cuGetErrorString, cuDeviceGetCount, cuDeviceGet,
    cuDeviceGetName, cuDeviceTotalMem_v2, cuDeviceGetAttribute, cuDevicePrimaryCtxRetain,
    cuDevicePrimaryCtxRelease_v2, cuCtxSetCurrent, cuCtxSynchronize, cuMemGetInfo_v2, cuStreamCreate,
    cuStreamCreateWithPriority, cuCtxGetStreamPriorityRange, cuStreamDestroy_v2, cuStreamSynchronize, cuStreamWaitEvent, cuEventCreate, cuEventDestroy_v2,
    cuEventRecord, cuEventSynchronize, cuEventQuery, cuEventElapsedTime, cuMemHostAlloc, cuMemFreeHost,
    cuMemPoolCreate, cuMemPoolDestroy, cuMemPoolSetAttribute, cuMemPoolGetAttribute, cuMemPoolTrimTo,
    cuMemAllocFromPoolAsync, cuMemFreeAsync, cuMemcpyHtoDAsync_v2, cuMemcpyDtoHAsync_v2,
    cuMemcpyDtoDAsync_v2, cuMemsetD8Async, cuModuleLoadData, cuModuleUnload, cuModuleGetFunction,
    cuFuncSetAttribute, cuFuncGetAttribute, cuFuncGetParamInfo, cuLaunchKernel, cuTensorMapEncodeTiled,
    cuTensorMapEncodeIm2col,
    cuGraphCreate, cuGraphDestroy, cuGraphAddKernelNode_v2, cuGraphAddMemcpyNode, cuGraphAddMemsetNode,
    cuGraphAddEmptyNode, cuGraphAddChildGraphNode, cuGraphGetNodes, cuGraphInstantiateWithFlags,
    cuGraphUpload, cuGraphLaunch, cuGraphExecKernelNodeSetParams_v2, cuGraphExecDestroy,
    cuStreamBeginCapture_v2, cuStreamBeginCaptureToGraph, cuStreamGetCaptureInfo_v3, cuStreamEndCapture,
}
