//! Memory of a device that one tensor, arena or table is in.
//!
//! A storage knows the stream of its last use. Whoever is about to queue work that touches the storage calls
//! [`Storage::take_to`]: if the last use was on another stream, the new stream waits for it (the host does
//! not). So the uses of one storage form a chain, and freeing in the order of the last stream is freeing
//! after every use.
//!
//! ```text
//! stream 1   ── kernel writes ──●
//! stream 2                      └─wait─ copy reads ──●
//! stream 1                                           └─wait─ kernel writes ── free
//! ```

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::device::Device;
use super::event::Event;
use super::stream::Stream;
use crate::error::{CudaError, Result};
use crate::sys::driver::CUdeviceptr;

/// Bytes of a device's memory, freed when dropped and no longer in use.
#[derive(Debug)]
pub struct Storage {
    device: Device,
    address: CUdeviceptr,
    bytes: usize,
    /// The stream of the last use, for a look without the lock.
    stream: AtomicU64,
    last: Mutex<LastUse>,
}

#[derive(Debug)]
struct LastUse {
    stream: Stream,
    /// The end of the use, where the user has marked it; otherwise the use ends with whatever the stream has
    /// queued.
    end: Option<Event>,
}

impl Storage {
    /// Allocates `bytes` bytes, to be used on `stream` first. Their content is whatever was there. No bytes
    /// take no memory.
    ///
    /// # Errors
    /// [`CudaError::OutOfMemory`] with all sizes, [`CudaError::Captured`], [`CudaError::Driver`],
    /// [`CudaError::Lost`].
    pub fn allocate(stream: &Stream, bytes: usize) -> Result<Self> {
        stream.refuse_in_capture("allocating memory")?;
        let device = stream.device();
        let address = if bytes == 0 {
            0
        } else {
            device.pool().allocate(stream, bytes)?
        };
        Ok(Self {
            device: device.clone(),
            address,
            bytes,
            stream: AtomicU64::new(stream.id()),
            last: Mutex::new(LastUse {
                stream: stream.clone(),
                end: None,
            }),
        })
    }

    /// The device.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Where the bytes are, in the device's memory. A multiple of 256.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// How many bytes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Has `stream` wait for the last use if that was on another stream. Work queued on `stream` from here on
    /// may use the bytes. A stream that captures uses nothing: the graph takes the storage at each launch,
    /// and other threads may use it in the meantime.
    ///
    /// # Errors
    /// [`CudaError::TwoDevices`], [`CudaError::Driver`], [`CudaError::Lost`].
    pub fn take_to(&self, stream: &Stream) -> Result<()> {
        // A thread that reads its own stream here stored it itself, or was told of it by the thread that
        // did.
        if self.stream.load(Ordering::Acquire) == stream.id() {
            return Ok(());
        }
        self.device.same_as(stream.device(), "using memory on a stream")?;
        if stream.is_capturing() {
            return Ok(());
        }
        let mut last = self.last();
        match &last.end {
            _ if last.stream == *stream => {}
            Some(end) => stream.wait(end)?,
            None => stream.wait(&last.stream.record()?)?,
        }
        *last = LastUse {
            stream: stream.clone(),
            end: None,
        };
        self.stream.store(stream.id(), Ordering::Release);
        Ok(())
    }

    /// Marks the end of the use on the last stream: what is queued there later does not touch the bytes, and
    /// the next user need not wait for it.
    ///
    /// # Errors
    /// [`CudaError::Driver`], [`CudaError::Lost`].
    pub fn end_use(&self) -> Result<()> {
        let mut last = self.last();
        last.end = Some(last.stream.record()?);
        // The next use, also on the same stream, goes through the lock and starts a use of its own.
        self.stream.store(0, Ordering::Release);
        Ok(())
    }

    /// Whether the end of the last use was marked.
    pub(crate) fn has_end(&self) -> bool {
        self.last().end.is_some()
    }

    /// The address of `range`, which must lie inside.
    pub(crate) fn part(&self, range: &std::ops::Range<usize>, action: &'static str) -> Result<CUdeviceptr> {
        if range.start > range.end || range.end > self.bytes {
            return Err(CudaError::Range {
                action,
                start: range.start,
                end: range.end,
                size: self.bytes,
            });
        }
        Ok(self.address + range.start as u64)
    }

    fn last(&self) -> MutexGuard<'_, LastUse> {
        self.last.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Storage {
    fn drop(&mut self) {
        if self.bytes == 0 || self.device.enter().is_err() {
            return;
        }
        let stream = self.last().stream.clone();
        // SAFETY: allocated from the pool by `allocate`, freed here once, after everything that the last
        // stream has queued; every earlier use was waited for by a later one.
        let code = unsafe { (self.device.driver().cuMemFreeAsync)(self.address, stream.raw()) };
        if let Err(error) = self
            .device
            .check("cuMemFreeAsync", code, || "freeing memory".into())
        {
            kiln_log::warn!("{error}");
        }
    }
}
