//! A point in a stream that others wait for, or measure from.

use std::time::{Duration, Instant};

use super::device::Device;
use super::stream::Stream;
use crate::error::Result;
use crate::sys::driver::{CUevent, EVENT_DISABLE_TIMING, result};

/// How long a wait takes a core for itself, where it looks at the device again and again.
const SHORT: Duration = Duration::from_millis(20);

/// How long such a wait sleeps between two looks from then on.
const NAP: Duration = Duration::from_micros(50);

/// An event of a device.
#[derive(Debug)]
pub struct Event {
    device: Device,
    raw: CUevent,
}

impl Drop for Event {
    fn drop(&mut self) {
        if self.device.enter().is_ok() {
            // SAFETY: created by `Event::create`, destroyed here once; the driver frees it when it has
            // happened.
            unsafe { (self.device.driver().cuEventDestroy_v2)(self.raw) };
        }
    }
}

impl Event {
    pub(super) fn untimed(device: &Device) -> Result<Self> {
        Self::create(device, EVENT_DISABLE_TIMING)
    }

    pub(super) fn timed(device: &Device) -> Result<Self> {
        Self::create(device, 0)
    }

    fn create(device: &Device, flags: u32) -> Result<Self> {
        device.enter()?;
        let mut raw = CUevent::NULL;
        // SAFETY: the pointer is to a handle on this stack.
        let code = unsafe { (device.driver().cuEventCreate)(&raw mut raw, flags) };
        device.check("cuEventCreate", code, || "making an event".into())?;
        Ok(Self {
            device: device.clone(),
            raw,
        })
    }

    /// Moves the event to the end of what is queued on `stream`.
    pub(super) fn record(&self, stream: &Stream) -> Result<()> {
        self.device.enter()?;
        // SAFETY: event and stream live as long as the references.
        let code = unsafe { (self.device.driver().cuEventRecord)(self.raw, stream.raw()) };
        self.device
            .check("cuEventRecord", code, || "recording an event".into())
    }

    /// Waits until the event has happened.
    ///
    /// # Errors
    /// `CudaError::Lost` if what it waits for failed.
    pub fn synchronize(&self) -> Result<()> {
        if self.device.is_shared() {
            return self.look_until_it_has_happened();
        }
        self.device.enter()?;
        // SAFETY: the event lives as long as `self`.
        let code = unsafe { (self.device.driver().cuEventSynchronize)(self.raw) };
        self.device
            .check("cuEventSynchronize", code, || "waiting for an event".into())
    }

    /// Waits in a way that [`Device::call_off`] ends: what the event stands behind may wait for another
    /// process.
    fn look_until_it_has_happened(&self) -> Result<()> {
        let begun = Instant::now();
        while !self.has_happened()? {
            match begun.elapsed() < SHORT {
                true => std::thread::yield_now(),
                false => std::thread::sleep(NAP),
            }
        }
        Ok(())
    }

    /// Whether the event has happened, without waiting.
    ///
    /// # Errors
    /// `CudaError::Lost` if what it waits for failed.
    pub fn has_happened(&self) -> Result<bool> {
        self.device.enter()?;
        // SAFETY: the event lives as long as `self`.
        let code = unsafe { (self.device.driver().cuEventQuery)(self.raw) };
        if code == result::NOT_READY {
            return Ok(false);
        }
        self.device
            .check("cuEventQuery", code, || "looking at an event".into())?;
        Ok(true)
    }

    /// Milliseconds of the device's clock between `start` and this event, both of [`Stream::record_time`].
    /// Waits for this event.
    ///
    /// # Errors
    /// `CudaError::Driver` for events without time, `CudaError::Lost`.
    pub fn milliseconds_since(&self, start: &Self) -> Result<f32> {
        self.synchronize()?;
        let mut milliseconds = 0.0;
        // SAFETY: both events live; the pointer is to a number on this stack.
        let code =
            unsafe { (self.device.driver().cuEventElapsedTime)(&raw mut milliseconds, start.raw, self.raw) };
        self.device.check("cuEventElapsedTime", code, || {
            "measuring between two events".into()
        })?;
        Ok(milliseconds)
    }

    pub(super) fn raw(&self) -> CUevent {
        self.raw
    }
}
