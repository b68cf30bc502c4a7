//! One program through NVRTC.

use std::ffi::{CStr, CString, c_char, c_int};
use std::ptr;

use super::messages::excerpt;
use super::{Architecture, Source};
use crate::error::{CudaError, Result};
use crate::libraries::Nvrtc;
use crate::sys::nvrtc::{ERROR_COMPILATION, NvrtcProgram, NvrtcResult};

/// A program that is destroyed when dropped.
struct Program<'a> {
    nvrtc: &'a Nvrtc,
    name: &'a str,
    raw: NvrtcProgram,
}

impl Drop for Program<'_> {
    fn drop(&mut self) {
        // SAFETY: created by `compile`, destroyed here once.
        unsafe { (self.nvrtc.functions.nvrtcDestroyProgram)(&raw mut self.raw) };
    }
}

/// Machine code of `source`.
pub(super) fn compile(
    nvrtc: &Nvrtc,
    source: &Source,
    architecture: &Architecture,
    options: &[String],
) -> Result<Vec<u8>> {
    let c_string = |text: &str| {
        CString::new(text).map_err(|_| CudaError::Nvrtc {
            call: "nvrtcCreateProgram",
            name: source.name.clone(),
            what: "source, name or option has a zero in it".into(),
        })
    };
    let (text, name) = (c_string(&source.text)?, c_string(&source.name)?);
    let target = format!("--gpu-architecture={architecture}");
    let options: Vec<CString> = std::iter::once(target.as_str())
        .chain(options.iter().map(String::as_str))
        .map(c_string)
        .collect::<Result<_>>()?;
    let mut program = Program {
        nvrtc,
        name: &source.name,
        raw: NvrtcProgram::NULL,
    };
    // SAFETY: both texts end with a zero and outlive the call; there are no headers.
    let code = unsafe {
        (nvrtc.functions.nvrtcCreateProgram)(
            &raw mut program.raw,
            text.as_ptr(),
            name.as_ptr(),
            0,
            ptr::null(),
            ptr::null(),
        )
    };
    program.check("nvrtcCreateProgram", code)?;
    let pointers: Vec<*const c_char> = options.iter().map(|option| option.as_ptr()).collect();
    let count = c_int::try_from(pointers.len()).unwrap_or(c_int::MAX);
    // SAFETY: the options end with zeros and outlive the call.
    let code = unsafe { (nvrtc.functions.nvrtcCompileProgram)(program.raw, count, pointers.as_ptr()) };
    if code == ERROR_COMPILATION {
        let log = program.log();
        return Err(CudaError::Compile {
            name: source.name.clone(),
            architecture: architecture.to_string(),
            excerpt: excerpt(&log, &source.name, &source.text),
            log,
        });
    }
    program.check("nvrtcCompileProgram", code)?;
    program.cubin()
}

impl Program<'_> {
    fn cubin(&self) -> Result<Vec<u8>> {
        let mut bytes = 0;
        // SAFETY: the pointer is to an integer on this stack.
        let code = unsafe { (self.nvrtc.functions.nvrtcGetCUBINSize)(self.raw, &raw mut bytes) };
        self.check("nvrtcGetCUBINSize", code)?;
        let mut image = vec![0_u8; bytes];
        // SAFETY: the image has as many bytes as NVRTC said that it needs.
        let code = unsafe { (self.nvrtc.functions.nvrtcGetCUBIN)(self.raw, image.as_mut_ptr().cast()) };
        self.check("nvrtcGetCUBIN", code)?;
        Ok(image)
    }

    /// What the compiler printed; empty if it cannot be had.
    fn log(&self) -> String {
        let mut bytes = 0;
        // SAFETY: the pointer is to an integer on this stack.
        let sized = unsafe { (self.nvrtc.functions.nvrtcGetProgramLogSize)(self.raw, &raw mut bytes) };
        let mut log = vec![0_u8; bytes];
        // SAFETY: the text has as many bytes as NVRTC said that it needs.
        let got = sized == 0
            && unsafe { (self.nvrtc.functions.nvrtcGetProgramLog)(self.raw, log.as_mut_ptr().cast()) } == 0;
        if !got {
            return String::new();
        }
        String::from_utf8_lossy(&log).trim_end_matches('\0').to_owned()
    }

    fn check(&self, call: &'static str, code: NvrtcResult) -> Result<()> {
        if code == 0 {
            return Ok(());
        }
        // SAFETY: NVRTC answers with a constant text for every number.
        let text = unsafe { CStr::from_ptr((self.nvrtc.functions.nvrtcGetErrorString)(code)) };
        let log = self.log();
        Err(CudaError::Nvrtc {
            call,
            name: self.name.to_owned(),
            what: format!("{} ({code}) {log}", text.to_string_lossy()),
        })
    }
}
