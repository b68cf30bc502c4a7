//! Copies between host and device, on a stream.
//!
//! A copy from or to [`Pinned`] memory is queued, and the call returns. Ordinary memory of the host could
//! be freed before such a copy is over, so [`Stream::write`] and [`Stream::read`], which take ordinary
//! memory, wait.

use std::ops::Range;

use super::pinned::Pinned;
use super::storage::Storage;
use super::stream::Stream;
use crate::error::{CudaError, Result};

/// An error if `range` is not inside `size` bytes of the host.
fn inside(range: &Range<usize>, size: usize, action: &'static str) -> Result<()> {
    if range.start <= range.end && range.end <= size {
        return Ok(());
    }
    Err(CudaError::Range {
        action,
        start: range.start,
        end: range.end,
        size,
    })
}

impl Stream {
    /// Queues a copy of bytes `range` of `from` to byte `at` of `to`.
    ///
    /// # Errors
    /// [`CudaError::Range`], [`CudaError::TwoDevices`], [`CudaError::Captured`], [`CudaError::Driver`],
    /// [`CudaError::Lost`].
    pub fn upload(&self, from: &Pinned, range: Range<usize>, to: &Storage, at: usize) -> Result<()> {
        const ACTION: &str = "copying to a device";
        self.refuse_in_capture(ACTION)?;
        inside(&range, from.len(), ACTION)?;
        let address = to.part(&(at..at.saturating_add(range.len())), ACTION)?;
        to.take_to(self)?;
        if range.is_empty() {
            return Ok(());
        }
        self.device().enter()?;
        let source = from.address().wrapping_add(range.start).cast_const().cast();
        // SAFETY: both ranges are inside their memory. The pinned memory stays until the copy is over
        // (`note_copy`), the storage is freed in the order of this stream.
        let code = unsafe {
            (self.device().driver().cuMemcpyHtoDAsync_v2)(address, source, range.len(), self.raw())
        };
        self.device().check("cuMemcpyHtoDAsync", code, || ACTION.into())?;
        from.note_copy(self)
    }

    /// Queues a copy of bytes `range` of `from` to byte `at` of `to`; [`Pinned::read`] waits for it.
    ///
    /// # Errors
    /// [`CudaError::Range`], [`CudaError::TwoDevices`], [`CudaError::Captured`], [`CudaError::Driver`],
    /// [`CudaError::Lost`].
    pub fn download(&self, from: &Storage, range: Range<usize>, to: &mut Pinned, at: usize) -> Result<()> {
        const ACTION: &str = "copying from a device";
        self.refuse_in_capture(ACTION)?;
        inside(&(at..at.saturating_add(range.len())), to.len(), ACTION)?;
        let address = from.part(&range, ACTION)?;
        from.take_to(self)?;
        if range.is_empty() {
            return Ok(());
        }
        self.device().enter()?;
        let target = to.address().wrapping_add(at).cast();
        // SAFETY: both ranges are inside their memory. The pinned memory is borrowed alone now, and its bytes
        // cannot be looked at, changed or freed before the copy is over (`note_copy`).
        let code = unsafe {
            (self.device().driver().cuMemcpyDtoHAsync_v2)(target, address, range.len(), self.raw())
        };
        self.device().check("cuMemcpyDtoHAsync", code, || ACTION.into())?;
        to.note_copy(self)
    }

    /// Queues a copy inside the device, of bytes `range` of `from` to byte `at` of `to`. Two ranges of one
    /// storage must not overlap.
    ///
    /// # Errors
    /// [`CudaError::Range`], [`CudaError::TwoDevices`], [`CudaError::Captured`], [`CudaError::Driver`],
    /// [`CudaError::Lost`].
    pub fn copy(&self, from: &Storage, range: Range<usize>, to: &Storage, at: usize) -> Result<()> {
        const ACTION: &str = "copying inside a device";
        let source = from.part(&range, ACTION)?;
        let target = to.part(&(at..at.saturating_add(range.len())), ACTION)?;
        from.take_to(self)?;
        to.take_to(self)?;
        if range.is_empty() {
            return Ok(());
        }
        self.device().enter()?;
        // SAFETY: both ranges are inside their storages, which are freed in the order of this stream.
        let code =
            unsafe { (self.device().driver().cuMemcpyDtoDAsync_v2)(target, source, range.len(), self.raw()) };
        self.device().check("cuMemcpyDtoDAsync", code, || ACTION.into())
    }

    /// Queues setting bytes `range` of `to` to `value`.
    ///
    /// # Errors
    /// [`CudaError::Range`], [`CudaError::TwoDevices`], [`CudaError::Captured`], [`CudaError::Driver`],
    /// [`CudaError::Lost`].
    pub fn fill(&self, to: &Storage, range: Range<usize>, value: u8) -> Result<()> {
        const ACTION: &str = "filling memory of a device";
        let address = to.part(&range, ACTION)?;
        to.take_to(self)?;
        if range.is_empty() {
            return Ok(());
        }
        self.device().enter()?;
        // SAFETY: the range is inside the storage, which is freed in the order of this stream.
        let code =
            unsafe { (self.device().driver().cuMemsetD8Async)(address, value, range.len(), self.raw()) };
        self.device().check("cuMemsetD8Async", code, || ACTION.into())
    }

    /// Copies `bytes` to byte `at` of `to`, after what is queued on the stream, and waits.
    ///
    /// # Errors
    /// [`CudaError::Range`], [`CudaError::TwoDevices`], [`CudaError::Captured`], [`CudaError::Driver`],
    /// [`CudaError::Lost`].
    pub fn write(&self, bytes: &[u8], to: &Storage, at: usize) -> Result<()> {
        const ACTION: &str = "copying to a device";
        self.refuse_in_capture(ACTION)?;
        let address = to.part(&(at..at.saturating_add(bytes.len())), ACTION)?;
        to.take_to(self)?;
        if bytes.is_empty() {
            return Ok(());
        }
        self.settle_if_shared()?;
        self.device().enter()?;
        let source = bytes.as_ptr().cast();
        // SAFETY: both ranges are inside their memory, and `bytes` is borrowed until the copy is over.
        let code = unsafe {
            (self.device().driver().cuMemcpyHtoDAsync_v2)(address, source, bytes.len(), self.raw())
        };
        self.device().check("cuMemcpyHtoDAsync", code, || ACTION.into())?;
        self.synchronize()
    }

    /// Copies `bytes.len()` bytes from byte `at` of `from`, after what is queued on the stream, and waits.
    ///
    /// # Errors
    /// [`CudaError::Range`], [`CudaError::TwoDevices`], [`CudaError::Captured`], [`CudaError::Driver`],
    /// [`CudaError::Lost`].
    pub fn read(&self, from: &Storage, at: usize, bytes: &mut [u8]) -> Result<()> {
        const ACTION: &str = "copying from a device";
        self.refuse_in_capture(ACTION)?;
        let address = from.part(&(at..at.saturating_add(bytes.len())), ACTION)?;
        from.take_to(self)?;
        if bytes.is_empty() {
            return Ok(());
        }
        self.settle_if_shared()?;
        self.device().enter()?;
        let target = bytes.as_mut_ptr().cast();
        // SAFETY: both ranges are inside their memory, and `bytes` is borrowed alone until the copy is over.
        let code = unsafe {
            (self.device().driver().cuMemcpyDtoHAsync_v2)(target, address, bytes.len(), self.raw())
        };
        let queued = self.device().check("cuMemcpyDtoHAsync", code, || ACTION.into());
        // A copy that was refused halfway must not outlive the borrow either.
        self.synchronize().and(queued)
    }
}
