//! Convolutions through cuDNN's backend API.
//!
//! A [`Convolution`] says what is computed; it is plain data. [`Convolver::search`] asks the library's
//! heuristic for engines, leaves out those whose results vary from run to run or are rounded more than asked
//! for or are not what was asked for, times the best on that shape, and returns a [`Plan`] to store beside a
//! compiled step. From both,
//! [`Convolver::prepare`] makes a [`PreparedConvolution`], whose calls are queued on a stream or captured
//! into a graph.
//!
//! A step's plans are fixed when the step is compiled, and each works in memory of its own: every run gives
//! the same bits.

mod check;
mod convolution;
mod describe;
mod descriptor;
mod run;
mod search;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

pub use convolution::{Convolution, Task, Tensor};
pub use run::{ConvolutionArguments, PreparedConvolution};
pub(crate) use search::{Found, Trial};
pub use search::{Plan, PlanLimits};

use crate::error::{CudaError, Result};
use crate::libraries::Cudnn;
use crate::runtime::{Device, Stream};
use crate::sys::cudnn::{CudnnFunctions, CudnnHandle, CudnnStatus};

/// cuDNN on a device. Cheap to clone; clones are one.
#[derive(Debug, Clone)]
pub struct Convolver {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    device: Device,
    library: Cudnn,
    /// The library does not allow two calls with one handle at the same time, and a plan has the handle that
    /// it was made with.
    handle: Mutex<Handle>,
    /// On which nothing is ever queued or captured.
    idle: Stream,
}

/// A handle of the library, with the stream that it has.
///
/// Where it is given another stream, the library looks at the one before. It refuses if that is captured by
/// then, for which another thread is enough; and what is captured must not wait for what is still under way
/// there. So a capture begins when all that was queued with the handle is over, and leaves the handle on a
/// stream that nobody uses.
#[derive(Debug)]
struct Handle {
    raw: CudnnHandle,
    /// Kept for as long as the library may look at it.
    stream: Stream,
}

impl Convolver {
    /// Starts the library on a device.
    ///
    /// # Errors
    /// [`CudaError::Convolution`] with the library's answer, [`CudaError::Lost`].
    pub fn new(device: &Device, library: Cudnn) -> Result<Self> {
        let idle = device.stream()?;
        device.enter()?;
        let mut raw = CudnnHandle::NULL;
        // SAFETY: the device's context is current; the pointer is to a handle on this stack.
        let status = unsafe { (library.functions.cudnnCreate)(&raw mut raw) };
        check(status, "cudnnCreate", || "anything on this device".into())?;
        let inner = Inner {
            device: device.clone(),
            library,
            handle: Mutex::new(Handle {
                raw,
                stream: idle.clone(),
            }),
            idle,
        };
        let convolver = Self {
            inner: Arc::new(inner),
        };
        convolver.set_stream(raw, &convolver.inner.idle)?;
        Ok(convolver)
    }

    /// The library's version, which a [`Plan`] belongs to.
    pub fn version(&self) -> &str {
        &self.inner.library.version
    }

    /// The device.
    pub fn device(&self) -> &Device {
        &self.inner.device
    }

    fn functions(&self) -> &CudnnFunctions {
        &self.inner.library.functions
    }

    fn handle(&self) -> MutexGuard<'_, Handle> {
        self.inner.handle.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Does `work` with the library's handle, which nothing else uses meanwhile. The device's context is
    /// current.
    fn with_handle<R>(&self, work: impl FnOnce(CudnnHandle) -> Result<R>) -> Result<R> {
        // Kiln keeps no state in the handle besides the stream.
        let handle = self.handle();
        self.device().enter()?;
        work(handle.raw)
    }

    /// As [`Self::with_handle`], for work that queues on `stream`, which is not captured now or later.
    pub(crate) fn queue<R>(&self, stream: &Stream, work: impl FnOnce(CudnnHandle) -> Result<R>) -> Result<R> {
        let mut handle = self.handle();
        self.device().enter()?;
        if handle.stream != *stream {
            // Then all that was queued with the handle is over when this stream is.
            stream.wait(&handle.stream.record()?)?;
            self.set_stream(handle.raw, stream)?;
            handle.stream = stream.clone();
        }
        work(handle.raw)
    }

    /// As [`Self::with_handle`], for work that gives the handle a stream that it captures, and no longer does
    /// when it is done.
    fn capture<R>(&self, work: impl FnOnce(CudnnHandle) -> Result<R>) -> Result<R> {
        let mut handle = self.handle();
        handle.stream.synchronize()?;
        self.device().enter()?;
        let done = work(handle.raw);
        let left = self.set_stream(handle.raw, &self.inner.idle);
        handle.stream = self.inner.idle.clone();
        done.and_then(|done| left.map(|()| done))
    }

    /// Has the caller's handle queue on a stream from here on.
    fn set_stream(&self, handle: CudnnHandle, stream: &Stream) -> Result<()> {
        self.device().enter()?;
        // SAFETY: the device's context is current and the caller has the handle; the stream lives until the
        // handle has another.
        let status = unsafe { (self.functions().cudnnSetStream)(handle, stream.raw()) };
        check(status, "cudnnSetStream", || "anything on this stream".into())
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        if self.device.enter().is_ok() {
            let handle = self.handle.get_mut().unwrap_or_else(PoisonError::into_inner);
            // SAFETY: created by `Convolver::new`, destroyed here once; the library waits for what it has
            // queued.
            unsafe { (self.library.functions.cudnnDestroy)(handle.raw) };
        }
    }
}

/// Success, or an error that names convolution and answer.
fn check(status: CudnnStatus, call: &'static str, convolution: impl FnOnce() -> String) -> Result<()> {
    let kind = match status {
        0 => return Ok(()),
        1001 => "CUDNN_STATUS_NOT_INITIALIZED",
        1008 => "CUDNN_STATUS_SUBLIBRARY_LOADING_FAILED",
        1000..=1999 => "an error of the library's set-up",
        2000..=2999 => "CUDNN_STATUS_BAD_PARAM",
        3000..=3999 => "CUDNN_STATUS_NOT_SUPPORTED",
        4000..=4999 => "CUDNN_STATUS_INTERNAL_ERROR",
        5000..=5999 => "CUDNN_STATUS_EXECUTION_FAILED",
        _ => "an unknown status",
    };
    Err(CudaError::Convolution {
        convolution: convolution(),
        call,
        what: format!("{kind} ({status})"),
    })
}
