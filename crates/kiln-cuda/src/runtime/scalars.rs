//! What changes from call to call of a graph that does not: learning rate, bias correction, random streams.
//!
//! The numbers are one block of bytes in the device's memory, which the graph's kernels read.
//! [`Scalars::send`] copies the next call's numbers there, in the order of the stream, from a ring of pinned
//! blocks: the host may be several calls ahead of the device, and a block is written again only when the copy
//! from it is over.

use std::sync::Arc;

use super::pinned::Pinned;
use super::storage::Storage;
use super::stream::Stream;
use crate::error::{CudaError, Result};

/// How many calls the host may be ahead before [`Scalars::send`] waits.
const DEPTH: usize = 8;

/// A block of scalars.
#[derive(Debug)]
pub struct Scalars {
    device: Arc<Storage>,
    ring: Vec<Pinned>,
    next: usize,
}

impl Scalars {
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

    /// Where kernels find the numbers.
    pub fn storage(&self) -> &Arc<Storage> {
        &self.device
    }

    /// Queues the copy of `bytes`, the whole block, on `stream`.
    ///
    /// # Errors
    /// [`CudaError::Range`] if `bytes` are more or fewer, [`CudaError::Driver`], [`CudaError::Lost`].
    pub fn send(&mut self, stream: &Stream, bytes: &[u8]) -> Result<()> {
        if bytes.len() != self.device.bytes() {
            return Err(CudaError::Range {
                action: "sending scalars",
                start: 0,
                end: bytes.len(),
                size: self.device.bytes(),
            });
        }
        let block = &mut self.ring[self.next];
        self.next = (self.next + 1) % DEPTH;
        block.write()?[..bytes.len()].copy_from_slice(bytes);
        stream.upload(block, 0..bytes.len(), &self.device, 0)
    }
}
