//! Products of matrices through cuBLASLt.
//!
//! A [`Product`] says what is computed, in row-major terms; it is plain data. [`Multiplier::search`] times
//! the library's algorithms on that shape and returns a [`Choice`], plain data too, to be stored beside a
//! compiled step. From both, [`Multiplier::prepare`] makes a [`PreparedProduct`], whose calls are queued on a
//! stream or captured into a graph.
//!
//! A step's algorithms are fixed when the step is compiled, and each works in memory of its own: every run
//! gives the same bits.

mod describe;
mod product;
mod run;
mod search;
mod timing;

pub use product::{ALIGNED, Compute, Epilogue, MatrixIn, MatrixOut, Number, Product, ScalarsFrom, alignment};
pub use run::{Place, PreparedProduct, ProductArguments};
pub(crate) use search::{BLOCK, NANS, Operand, Trial, block, random, random_for};
pub use search::{Choice, SearchLimits};
pub(crate) use timing::{fastest, time_in_turns, time_runs};

use crate::error::{CudaError, Result};
use crate::libraries::CublasLt;
use crate::runtime::Device;
use crate::sys::cublaslt::{CublasStatus, LtHandle};

/// cuBLASLt on a device.
#[derive(Debug)]
pub struct Multiplier {
    device: Device,
    library: CublasLt,
    handle: LtHandle,
}

impl Multiplier {
    /// Starts the library on a device.
    ///
    /// # Errors
    /// [`CudaError::Product`] with the library's answer, [`CudaError::Lost`].
    pub fn new(device: &Device, library: CublasLt) -> Result<Self> {
        device.enter()?;
        let mut handle = LtHandle::NULL;
        // SAFETY: the device's context is current; the pointer is to a handle on this stack.
        let status = unsafe { (library.functions.cublasLtCreate)(&raw mut handle) };
        check(status, "cublasLtCreate", || "anything on this device".into())?;
        Ok(Self {
            device: device.clone(),
            library,
            handle,
        })
    }

    /// The library's version, which a [`Choice`] belongs to.
    pub fn version(&self) -> &str {
        &self.library.version
    }

    /// The device.
    pub fn device(&self) -> &Device {
        &self.device
    }
}

impl Drop for Multiplier {
    fn drop(&mut self) {
        if self.device.enter().is_ok() {
            // SAFETY: created by `new`, destroyed here once; the library waits for what it has queued.
            unsafe { (self.library.functions.cublasLtDestroy)(self.handle) };
        }
    }
}

/// Success, or an error that names product and answer.
fn check(status: CublasStatus, call: &'static str, product: impl FnOnce() -> String) -> Result<()> {
    let name = match status {
        0 => return Ok(()),
        1 => "CUBLAS_STATUS_NOT_INITIALIZED",
        3 => "CUBLAS_STATUS_ALLOC_FAILED",
        7 => "CUBLAS_STATUS_INVALID_VALUE",
        8 => "CUBLAS_STATUS_ARCH_MISMATCH",
        11 => "CUBLAS_STATUS_MAPPING_ERROR",
        13 => "CUBLAS_STATUS_EXECUTION_FAILED",
        14 => "CUBLAS_STATUS_INTERNAL_ERROR",
        15 => "CUBLAS_STATUS_NOT_SUPPORTED",
        16 => "CUBLAS_STATUS_LICENSE_ERROR",
        _ => "an unknown status",
    };
    Err(CudaError::Product {
        product: product(),
        call,
        what: format!("{name} ({status})"),
    })
}
