//! Pinned memory through which inputs reach the device without the host waiting for it.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use crate::error::Result;
use crate::runtime::{Pinned, Storage, Stream};

/// Blocks of one size: the host may be this many copies ahead of the device.
const BLOCKS: usize = 4;

/// The smallest block.
const LEAST: usize = 4 << 10;

/// Larger inputs are copied while the host waits: pinning so much memory takes longer than the copy.
const MOST: usize = 64 << 20;

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
    /// Queues the copy of `bytes` into `to`, which is as large, on `stream`. `bytes` may change as soon as
    /// this returns.
    pub fn upload(&self, stream: &Stream, bytes: &[u8], to: &Storage) -> Result<()> {
        if bytes.is_empty() {
            return Ok(());
        }
        if bytes.len() > MOST {
            return stream.write(bytes, to, 0);
        }
        let size = bytes.len().next_power_of_two().max(LEAST);
        let mut sizes = self.sizes.lock().unwrap_or_else(PoisonError::into_inner);
        let ring = sizes.entry(size).or_default();
        if ring.blocks.len() < BLOCKS {
            ring.blocks.push(Pinned::allocate(stream.device(), size)?);
            ring.next = ring.blocks.len() - 1;
        }
        let block = &mut ring.blocks[ring.next];
        ring.next = (ring.next + 1) % BLOCKS;
        block.write()?[..bytes.len()].copy_from_slice(bytes);
        stream.upload(block, 0..bytes.len(), to, 0)
    }
}
