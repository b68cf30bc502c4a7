//! Memory of the host that the device copies from and to by itself.
//!
//! A copy to or from pinned memory is over some time after the call that queued it. The memory therefore
//! keeps an event behind its last copy, and whoever looks at the bytes, changes or frees them waits for that
//! event first.

use std::ffi::c_void;
use std::ptr::{self, NonNull};
use std::slice;
use std::sync::{Mutex, PoisonError};

use super::device::Device;
use super::event::Event;
use super::stream::Stream;
use crate::error::{CudaError, Result};
use crate::sys::driver::{HOST_ALLOC_PORTABLE, result};

/// Pinned bytes of the host's memory.
#[derive(Debug)]
pub struct Pinned {
    device: Device,
    address: NonNull<u8>,
    bytes: usize,
    /// Behind the last copy.
    copied: Event,
    /// Whether a copy was queued since the last wait.
    in_flight: Mutex<bool>,
}

// SAFETY: the memory belongs to this value alone; the device touches it only in copies, which are waited for
// before the bytes are looked at.
unsafe impl Send for Pinned {}
// SAFETY: as above; `&Pinned` gives the bytes for reading only.
unsafe impl Sync for Pinned {}

impl Pinned {
    /// `bytes` zero bytes that `device` can copy from and to.
    ///
    /// # Errors
    /// [`CudaError::OutOfPinnedMemory`], [`CudaError::Driver`], [`CudaError::Lost`].
    pub fn allocate(device: &Device, bytes: usize) -> Result<Self> {
        device.enter()?;
        let copied = Event::untimed(device)?;
        let mut address: *mut c_void = ptr::null_mut();
        // SAFETY: the pointer is to a pointer on this stack.
        let code =
            unsafe { (device.driver().cuMemHostAlloc)(&raw mut address, bytes.max(1), HOST_ALLOC_PORTABLE) };
        if code == result::OUT_OF_MEMORY {
            return Err(CudaError::OutOfPinnedMemory {
                device: device.ordinal(),
                asked: bytes,
            });
        }
        device.check("cuMemHostAlloc", code, || format!("pinning {bytes} bytes"))?;
        let Some(address) = NonNull::new(address.cast::<u8>()) else {
            return Err(CudaError::OutOfPinnedMemory {
                device: device.ordinal(),
                asked: bytes,
            });
        };
        // SAFETY: the driver has just given out this many bytes.
        unsafe { address.as_ptr().write_bytes(0, bytes) };
        Ok(Self {
            device: device.clone(),
            address,
            bytes,
            copied,
            in_flight: Mutex::new(false),
        })
    }

    /// How many bytes.
    pub fn len(&self) -> usize {
        self.bytes
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    /// The bytes, after the last copy. Waits for it.
    ///
    /// # Errors
    /// [`CudaError::Lost`] if the copy, or what it waited for, failed.
    pub fn read(&self) -> Result<&[u8]> {
        self.wait()?;
        // SAFETY: the memory is this long and initialised; no copy is under way, and starting one that writes
        // takes `&mut self`.
        Ok(unsafe { slice::from_raw_parts(self.address.as_ptr(), self.bytes) })
    }

    /// The bytes, to be changed, after the last copy. Waits for it.
    ///
    /// # Errors
    /// [`CudaError::Lost`] if the copy, or what it waited for, failed.
    pub fn write(&mut self) -> Result<&mut [u8]> {
        self.wait()?;
        // SAFETY: the memory is this long and initialised, no copy is under way, and `self` is borrowed
        // alone.
        Ok(unsafe { slice::from_raw_parts_mut(self.address.as_ptr(), self.bytes) })
    }

    /// Marks a copy that was just queued on `stream`.
    pub(super) fn note_copy(&self, stream: &Stream) -> Result<()> {
        let mut in_flight = self.in_flight.lock().unwrap_or_else(PoisonError::into_inner);
        // Copies on two streams: the later event must stand for both.
        if *in_flight {
            stream.wait(&self.copied)?;
        }
        self.copied.record(stream)?;
        *in_flight = true;
        Ok(())
    }

    pub(super) fn address(&self) -> *mut u8 {
        self.address.as_ptr()
    }

    fn wait(&self) -> Result<()> {
        let mut in_flight = self.in_flight.lock().unwrap_or_else(PoisonError::into_inner);
        if *in_flight {
            self.copied.synchronize()?;
            *in_flight = false;
        }
        Ok(())
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        // On a device that is lost nothing copies any more, and its memory goes with the process.
        if self.wait().is_ok() && self.device.enter().is_ok() {
            // SAFETY: allocated by `allocate`, freed here once, after the last copy.
            unsafe { (self.device.driver().cuMemFreeHost)(self.address.as_ptr().cast()) };
        }
    }
}
