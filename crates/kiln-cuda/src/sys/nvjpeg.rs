//! `libnvjpeg`: JPEGs decoded by a GPU.

use std::ffi::{c_int, c_uint, c_void};

use super::driver::CUstream;
use super::{functions, handles};

/// What a call answers; zero is success.
pub type NvjpegStatus = c_int;

/// `nvjpegBackend_t`: the engines of the GPU, which are no part of its multiprocessors.
pub const BACKEND_HARDWARE: c_int = 3;

/// `nvjpegOutputFormat_t`: red, green and blue of a pixel beside each other.
pub const OUTPUT_RGBI: c_int = 5;

/// `libraryPropertyType_t`: the three parts of the version.
pub const VERSION_PARTS: [c_int; 3] = [0, 1, 2];

handles! {
    /// The library's state on a device.
    NvjpegHandle;
    /// What a decoder keeps from call to call.
    JpegState;
}

/// `nvjpegImage_t`: where a decoded picture goes.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct Image {
    /// Address of each plane; the first one's only where pixels are interleaved.
    pub channel: [u64; 4],
    /// Bytes from row to row.
    pub pitch: [usize; 4],
}

const _: () = assert!(size_of::<Image>() == 64);

functions! {
    /// nvJPEG's functions, of CUDA 12 and later.
    NvjpegFunctions
    fn nvjpegGetProperty(part: c_int, value: *mut c_int) -> NvjpegStatus;
    fn nvjpegCreateEx(
        backend: c_int, device_allocator: *mut c_void, pinned_allocator: *mut c_void, flags: c_uint,
        handle: *mut NvjpegHandle,
    ) -> NvjpegStatus;
    fn nvjpegDestroy(handle: NvjpegHandle) -> NvjpegStatus;
    fn nvjpegGetHardwareDecoderInfo(
        handle: NvjpegHandle, engines: *mut c_uint, cores: *mut c_uint,
    ) -> NvjpegStatus;
    fn nvjpegJpegStateCreate(handle: NvjpegHandle, state: *mut JpegState) -> NvjpegStatus;
    fn nvjpegJpegStateDestroy(state: JpegState) -> NvjpegStatus;
    fn nvjpegGetImageInfo(
        handle: NvjpegHandle, data: *const u8, bytes: usize, components: *mut c_int, sampling: *mut c_int,
        widths: *mut c_int, heights: *mut c_int,
    ) -> NvjpegStatus;
    fn nvjpegDecodeBatchedInitialize(
        handle: NvjpegHandle, state: JpegState, count: c_int, threads: c_int, format: c_int,
    ) -> NvjpegStatus;
    fn nvjpegDecodeBatched(
        handle: NvjpegHandle, state: JpegState, data: *const *const u8, bytes: *const usize,
        images: *mut Image, stream: CUstream,
    ) -> NvjpegStatus;
}

/// What the library means by a status.
pub fn meaning(status: NvjpegStatus) -> &'static str {
    match status {
        1 => "not initialised",
        2 => "an invalid parameter",
        3 => "a damaged JPEG",
        4 => "a kind of JPEG that it does not decode",
        5 => "no memory left",
        6 => "the device failed",
        7 => "the device has no engines for JPEGs",
        8 => "an error of its own",
        9 => "not implemented on this device",
        10 => "a JPEG that ends too early",
        _ => "an unknown status",
    }
}
