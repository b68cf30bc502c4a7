//! A stream: work that runs in the order in which it was queued.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use super::device::Device;
use super::event::Event;
use crate::error::{CudaError, Result};
use crate::sys::driver::{CUstream, STREAM_NON_BLOCKING};

/// A stream of a device. Cheap to clone; clones are one stream. Work that is queued when the last clone goes
/// is done all the same.
#[derive(Clone)]
pub struct Stream {
    inner: Arc<Inner>,
}

struct Inner {
    device: Device,
    raw: CUstream,
    id: u64,
    /// Whether what is queued goes into a graph.
    capturing: AtomicBool,
}

impl Drop for Inner {
    fn drop(&mut self) {
        if self.device.enter().is_ok() {
            // SAFETY: created by `Stream::create`, destroyed here once; the driver frees it after its work.
            unsafe { (self.device.driver().cuStreamDestroy_v2)(self.raw) };
        }
    }
}

impl fmt::Debug for Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "Stream({} of cuda:{})",
            self.inner.id,
            self.inner.device.ordinal()
        )
    }
}

impl PartialEq for Stream {
    fn eq(&self, other: &Self) -> bool {
        self.inner.id == other.inner.id
    }
}

impl Eq for Stream {}

impl Stream {
    pub(super) fn create(device: &Device) -> Result<Self> {
        device.enter()?;
        let mut raw = CUstream::NULL;
        // SAFETY: the pointer is to a handle on this stack.
        let code = unsafe { (device.driver().cuStreamCreate)(&raw mut raw, STREAM_NON_BLOCKING) };
        device.check("cuStreamCreate", code, || "making a stream".into())?;
        Ok(Self::of(device, raw))
    }

    /// A stream whose kernels start before those of other streams.
    pub(super) fn create_urgent(device: &Device) -> Result<Self> {
        device.enter()?;
        let (mut least, mut greatest) = (0, 0);
        let driver = device.driver();
        // SAFETY: both pointers are to integers on this stack.
        let code = unsafe { (driver.cuCtxGetStreamPriorityRange)(&raw mut least, &raw mut greatest) };
        device.check("cuCtxGetStreamPriorityRange", code, || {
            "asking for priorities".into()
        })?;
        let mut raw = CUstream::NULL;
        // SAFETY: the pointer is to a handle on this stack.
        let code =
            unsafe { (driver.cuStreamCreateWithPriority)(&raw mut raw, STREAM_NON_BLOCKING, greatest) };
        device.check("cuStreamCreateWithPriority", code, || "making a stream".into())?;
        Ok(Self::of(device, raw))
    }

    fn of(device: &Device, raw: CUstream) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        Self {
            inner: Arc::new(Inner {
                device: device.clone(),
                raw,
                id: NEXT.fetch_add(1, Ordering::Relaxed),
                capturing: AtomicBool::new(false),
            }),
        }
    }

    /// The device.
    pub fn device(&self) -> &Device {
        &self.inner.device
    }

    /// Waits until everything queued so far is done.
    ///
    /// # Errors
    /// `CudaError::Lost` if something queued failed.
    pub fn synchronize(&self) -> Result<()> {
        if self.device().is_shared() {
            return self.record()?.synchronize();
        }
        self.device().enter()?;
        // SAFETY: the stream lives as long as `self`.
        let code = unsafe { (self.device().driver().cuStreamSynchronize)(self.raw()) };
        self.device()
            .check("cuStreamSynchronize", code, || "waiting for a stream".into())
    }

    /// Waits for what is queued, if that may wait for another process: a copy between a device and ordinary
    /// memory of the host waits inside the driver, where nothing ends it.
    ///
    /// # Errors
    /// Those of [`Self::synchronize`].
    pub(super) fn settle_if_shared(&self) -> Result<()> {
        match self.device().is_shared() {
            true => self.synchronize(),
            false => Ok(()),
        }
    }

    /// An event that happens when everything queued so far is done.
    ///
    /// # Errors
    /// `CudaError::Driver`, `CudaError::Lost`.
    pub fn record(&self) -> Result<Event> {
        let event = Event::untimed(self.device())?;
        event.record(self)?;
        Ok(event)
    }

    /// As [`Self::record`], with a time of its own: see [`Event::milliseconds_since`].
    ///
    /// # Errors
    /// `CudaError::Driver`, `CudaError::Lost`.
    pub fn record_time(&self) -> Result<Event> {
        let event = Event::timed(self.device())?;
        event.record(self)?;
        Ok(event)
    }

    /// Has what is queued from here on wait for `event`. The caller waits for nothing.
    ///
    /// # Errors
    /// `CudaError::Driver`, `CudaError::Lost`.
    pub fn wait(&self, event: &Event) -> Result<()> {
        self.device().enter()?;
        // SAFETY: stream and event live as long as the references.
        let code = unsafe { (self.device().driver().cuStreamWaitEvent)(self.raw(), event.raw(), 0) };
        self.device()
            .check("cuStreamWaitEvent", code, || "making a stream wait".into())
    }

    /// Says whether what is queued from here on goes into a graph.
    pub(super) fn set_capturing(&self, capturing: bool) {
        self.inner.capturing.store(capturing, Ordering::Release);
    }

    /// An error while the stream is captured. A graph runs long after the call that was captured, so it must
    /// hold no memory of the host, and none that is allocated or freed in the order of a stream.
    pub(crate) fn refuse_in_capture(&self, action: &'static str) -> Result<()> {
        match self.is_capturing() {
            true => Err(CudaError::Captured { action }),
            false => Ok(()),
        }
    }

    /// Whether what is queued goes into a graph.
    pub(super) fn is_capturing(&self) -> bool {
        self.inner.capturing.load(Ordering::Acquire)
    }

    pub(crate) fn raw(&self) -> CUstream {
        self.inner.raw
    }

    /// A number that no other stream of this process has.
    pub(super) fn id(&self) -> u64 {
        self.inner.id
    }
}
