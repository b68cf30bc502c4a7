//! Pinned memory through which inputs reach the device without the host waiting for it.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use super::pinned::Pinned;
use super::storage::Storage;
use super::stream::Stream;
use crate::error::Result;

/// Blocks of one size: the host may be this many copies ahead of the device.
const BLOCKS: usize = 4;

/// The smallest block.
const LEAST: usize = 4 << 10;

/// Blocks of pinned memory, used in turn.
#[derive(Debug, Default)]
pub struct Staging {
    sizes: Mutex<BTreeMap<usize, Ring>>,
}

#[derive(Debug, Default)]
struct Ring {
    blocks: Vec<Pinned>,
    next: usize,
}

impl Staging {
    /// The largest block. More is copied while the host waits: pinning so much memory takes longer than the
    /// copy.
    pub const MOST: usize = 64 << 20;

    /// Queues the copy of `bytes` to the beginning of `to` on `stream`. `bytes` may change as soon as this
    /// returns.
    ///
    /// # Errors
    /// [`crate::CudaError::Range`], [`crate::CudaError::OutOfPinnedMemory`], [`crate::CudaError::Driver`],
    /// [`crate::CudaError::Lost`].
    pub fn upload(&self, stream: &Stream, bytes: &[u8], to: &Storage) -> Result<()> {
        match bytes.len() {
            0 => Ok(()),
            1..=Self::MOST => self.fill(stream, bytes.len(), to, |block| block.copy_from_slice(bytes)),
            _ => stream.write(bytes, to, 0),
        }
    }

    /// Queues the copy of what `write` fills in, `bytes` bytes of at most [`Staging::MOST`], to the beginning
    /// of `to` on `stream`. Bytes that it leaves as they are have any value.
    ///
    /// # Errors
    /// Those of [`Staging::upload`].
    pub fn fill(
        &self,
        stream: &Stream,
        bytes: usize,
        to: &Storage,
        write: impl FnOnce(&mut [u8]),
    ) -> Result<()> {
        let size = bytes.next_power_of_two().max(LEAST);
        let mut sizes = self.sizes.lock().unwrap_or_else(PoisonError::into_inner);
        let ring = sizes.entry(size).or_default();
        if ring.blocks.len() < BLOCKS {
            ring.blocks.push(Pinned::allocate(stream.device(), size)?);
            ring.next = ring.blocks.len() - 1;
        }
        let block = &mut ring.blocks[ring.next];
        ring.next = (ring.next + 1) % BLOCKS;
        write(&mut block.write()?[..bytes]);
        stream.upload(block, 0..bytes, to, 0)
    }
}
