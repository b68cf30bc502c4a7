//! The device's random generator: a seed, and the number of the next stream.
//!
//! Every random operation takes one stream of its own when it is *called*, whether it runs now, is
//! recorded, or is replayed; [`kiln_graph::philox`] defines the numbers of a stream. So a program draws the
//! same numbers however it is run, and streams never overlap.

use std::collections::hash_map::RandomState;
use std::hash::BuildHasher;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The source of a random operation's numbers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Stream {
    /// The generator's seed.
    pub seed: u64,
    /// The stream's number under that seed.
    pub stream: u64,
}

static NEXT: Mutex<Option<Stream>> = Mutex::new(None);

fn next() -> MutexGuard<'static, Option<Stream>> {
    // A stream number is one assignment: a panic elsewhere cannot leave it half done.
    NEXT.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Starts over from `seed`.
pub fn seed(seed: u64) {
    *next() = Some(Stream { seed, stream: 0 });
}

/// The state of the generator, for a checkpoint: the stream that the next random operation will take; none
/// if the generator was never seeded nor used.
pub fn state() -> Option<Stream> {
    *next()
}

/// Restores a [`state`], so that a resumed program draws the numbers that the uninterrupted one would have
/// drawn.
pub fn restore(state: Stream) {
    *next() = Some(state);
}

/// Takes the next stream. A generator that was never seeded seeds itself from the system's entropy.
pub fn take() -> Stream {
    let mut next = next();
    let current = next.unwrap_or_else(|| Stream {
        seed: RandomState::new().hash_one(0u8),
        stream: 0,
    });
    *next = Some(Stream {
        stream: current.stream.wrapping_add(1),
        ..current
    });
    current
}
