//! What the host sends in front of each call: numbers that change (learning rate, bias correction, random
//! streams) and inputs of a few kilobytes.
//!
//! A parcel is one block of bytes in the device's memory, at an address that never changes, so that the
//! kernels of a graph can read it. [`Parcel::send`] copies the next call's bytes there, in the order of the
//! stream, from a ring of pinned blocks: the host may be several calls ahead of the device, and a block is
//! written again only when the copy from it is over.

use std::sync::Arc;

use super::pinned::Pinned;
use super::storage::Storage;
use super::stream::Stream;
use crate::error::{CudaError, Result};

/// How many calls the host may be ahead before [`Parcel::send`] waits.
const DEPTH: usize = 8;

/// A block of bytes that the host writes and the device reads.
#[derive(Debug)]
pub struct Parcel {
    device: Arc<Storage>,
    ring: Vec<Pinned>,
    next: usize,
}

impl Parcel {
    /// A block of `bytes` bytes, first used on `stream`.
    ///
    /// # Errors
    /// [`CudaError::OutOfMemory`], [`CudaError::OutOfPinnedMemory`], [`CudaError::Driver`],
    /// [`CudaError::Lost`].
    pub fn new(stream: &Stream, bytes: usize) -> Result<Self> {
        let ring: Result<Vec<Pinned>> = (0..DEPTH)
            .map(|_| Pinned::allocate(stream.device(), bytes))
            .collect();
        Ok(Self {
            device: Arc::new(Storage::allocate(stream, bytes)?),
            ring: ring?,
            next: 0,
        })
    }

    /// Where kernels find the bytes.
    pub fn storage(&self) -> &Arc<Storage> {
        &self.device
    }

    /// Queues the copy of the first `bytes` bytes on `stream`; `write` fills them in. Bytes that `write`
    /// does not touch are those of an earlier call. Zero bytes queue no copy.
    ///
    /// # Errors
    /// [`CudaError::Range`] if the block has fewer, [`CudaError::Driver`], [`CudaError::Lost`].
    pub fn send(&mut self, stream: &Stream, bytes: usize, write: impl FnOnce(&mut [u8])) -> Result<()> {
        if bytes > self.device.bytes() {
            return Err(CudaError::Range {
                action: "sending a parcel",
                start: 0,
                end: bytes,
                size: self.device.bytes(),
            });
        }
        if bytes == 0 {
            return Ok(());
        }
        let block = &mut self.ring[self.next];
        self.next = (self.next + 1) % DEPTH;
        write(&mut block.write()?[..bytes]);
        stream.upload(block, 0..bytes, &self.device, 0)
    }
}
