//! Which machine code a device runs.

use std::ffi::c_int;
use std::fmt;

use crate::error::{CudaError, Result};
use crate::libraries::Nvrtc;

/// An architecture that NVRTC compiles for, such as `sm_90a`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Architecture {
    name: String,
}

/// First number of the capability from which on devices have instructions that no later device has
/// (`sm_90a`).
const FIRST_WITH_OWN_INSTRUCTIONS: u32 = 9;

impl Architecture {
    /// The architecture of devices of `capability`. From 9.0 on with the instructions that only this
    /// architecture has.
    ///
    /// # Errors
    /// [`CudaError::UnknownArchitecture`].
    pub(super) fn of(nvrtc: &Nvrtc, capability: (u32, u32)) -> Result<Self> {
        let (major, minor) = capability;
        let number = major * 10 + minor;
        if !supported(nvrtc).contains(&number) {
            return Err(CudaError::UnknownArchitecture {
                version: nvrtc.version.clone(),
                capability: format!("{major}.{minor}"),
            });
        }
        let own = if major >= FIRST_WITH_OWN_INSTRUCTIONS {
            "a"
        } else {
            ""
        };
        Ok(Self {
            name: format!("sm_{number}{own}"),
        })
    }

    /// NVRTC's name.
    pub fn name(&self) -> &str {
        &self.name
    }
}

impl fmt::Display for Architecture {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)
    }
}

/// The numbers (90 for `sm_90`) that this NVRTC compiles for.
fn supported(nvrtc: &Nvrtc) -> Vec<u32> {
    let mut count: c_int = 0;
    // SAFETY: the pointer is to an integer on this stack.
    let code = unsafe { (nvrtc.functions.nvrtcGetNumSupportedArchs)(&raw mut count) };
    let Ok(count) = usize::try_from(count) else {
        return Vec::new();
    };
    let mut numbers: Vec<c_int> = vec![0; count];
    if code == 0 {
        // SAFETY: the array has as many places as NVRTC said that it needs.
        unsafe { (nvrtc.functions.nvrtcGetSupportedArchs)(numbers.as_mut_ptr()) };
    }
    numbers
        .into_iter()
        .filter_map(|number| u32::try_from(number).ok())
        .collect()
}
