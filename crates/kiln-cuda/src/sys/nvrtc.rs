//! `libnvrtc`: from CUDA C++ to machine code.

use std::ffi::{c_char, c_int};

use super::{functions, handles};

/// What a call answers; zero is success.
pub type NvrtcResult = c_int;

/// The program does not compile; the log says why.
pub const ERROR_COMPILATION: NvrtcResult = 6;

handles! {
    /// A program under compilation.
    NvrtcProgram;
}

functions! {
    /// NVRTC's functions, of CUDA 12 and later.
    NvrtcFunctions
    fn nvrtcVersion(major: *mut c_int, minor: *mut c_int) -> NvrtcResult;
    fn nvrtcGetErrorString(result: NvrtcResult) -> *const c_char;
    fn nvrtcGetNumSupportedArchs(count: *mut c_int) -> NvrtcResult;
    fn nvrtcGetSupportedArchs(architectures: *mut c_int) -> NvrtcResult;
    fn nvrtcCreateProgram(
        program: *mut NvrtcProgram, source: *const c_char, name: *const c_char,
        headers: c_int, texts: *const *const c_char, names: *const *const c_char,
    ) -> NvrtcResult;
    fn nvrtcDestroyProgram(program: *mut NvrtcProgram) -> NvrtcResult;
    fn nvrtcCompileProgram(program: NvrtcProgram, count: c_int, options: *const *const c_char) -> NvrtcResult;
    fn nvrtcGetCUBINSize(program: NvrtcProgram, bytes: *mut usize) -> NvrtcResult;
    fn nvrtcGetCUBIN(program: NvrtcProgram, cubin: *mut c_char) -> NvrtcResult;
    fn nvrtcGetProgramLogSize(program: NvrtcProgram, bytes: *mut usize) -> NvrtcResult;
    fn nvrtcGetProgramLog(program: NvrtcProgram, log: *mut c_char) -> NvrtcResult;
}
