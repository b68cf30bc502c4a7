//! Fresh inputs of a graph whose addresses never change.
//!
//! A feed has two slots, used in turn, each with pinned memory on the host and as much on the device. While a
//! step reads what came through one slot, the next input is copied into the other, on a stream of the feed's
//! own; in front of the next launch a copy inside the device puts it where the graph reads.
//!
//! ```text
//! feed's stream   host ─► slot 0      host ─► slot 1          host ─► slot 0
//!                            │                    │
//! step's stream           slot 0 ─► input, graph   slot 1 ─► input, graph
//! ```

use std::sync::Arc;

use super::device::Device;
use super::pinned::Pinned;
use super::storage::Storage;
use super::stream::Stream;
use crate::error::Result;

/// Two slots for an input.
#[derive(Debug)]
pub struct Feed {
    copies: Stream,
    slots: [Slot; 2],
    next: usize,
}

#[derive(Debug)]
struct Slot {
    host: Pinned,
    device: Storage,
}

impl Feed {
    /// A feed for inputs of `bytes` bytes.
    ///
    /// # Errors
    /// `CudaError::OutOfMemory`, `CudaError::OutOfPinnedMemory`, `CudaError::Driver`, `CudaError::Lost`.
    pub fn new(device: &Device, bytes: usize) -> Result<Self> {
        let copies = device.stream()?;
        let slot = || -> Result<Slot> {
            Ok(Slot {
                host: Pinned::allocate(device, bytes)?,
                device: Storage::allocate(&copies, bytes)?,
            })
        };
        let slots = [slot()?, slot()?];
        Ok(Self {
            copies,
            slots,
            next: 0,
        })
    }

    /// Takes the next input, which `write` puts into the bytes it is given, and queues everything that brings
    /// it to `input` before what `stream` is given from here on. Waits only if the host is two inputs ahead
    /// of the copies.
    ///
    /// # Errors
    /// `CudaError::Range` if `input` is smaller, `CudaError::Driver`, `CudaError::Lost`.
    pub fn deliver(
        &mut self,
        stream: &Stream,
        input: &Arc<Storage>,
        write: impl FnOnce(&mut [u8]),
    ) -> Result<()> {
        let slot = &mut self.slots[self.next];
        self.next = 1 - self.next;
        write(slot.host.write()?);
        let bytes = slot.host.len();
        self.copies.upload(&slot.host, 0..bytes, &slot.device, 0)?;
        stream.copy(&slot.device, 0..bytes, input, 0)?;
        // The slot is free when this copy is over, long before the step that `stream` is given next.
        slot.device.end_use()
    }
}
