//! Working memory for compiled steps, shared by all steps of the process.
//!
//! The contents of an arena need not survive a run, and a program seldom runs two steps at once: the first
//! step of an optimizer, the following ones and the evaluation in between take turns in the same memory.
//! That memory is as large as the largest of them needs; two steps that do run at once have an arena each.
//! Memory larger than any living step needs is given back.

use std::ops::{Deref, DerefMut};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};

use crate::error::CpuError;
use crate::runtime::buffer::AlignedBuffer;

/// A set of arenas.
#[derive(Debug, Default)]
struct Arenas {
    pool: Mutex<Pool>,
}

/// Free arenas, and the needs of the living steps.
#[derive(Debug, Default)]
struct Pool {
    /// Arenas that no run uses now.
    free: Vec<AlignedBuffer>,
    /// What each living step needs, in bytes.
    needs: Vec<usize>,
}

impl Arenas {
    fn lock(&self) -> MutexGuard<'_, Pool> {
        self.pool.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Pool {
    /// Frees arenas that are larger than any step needs.
    fn trim(&mut self) {
        let most = self.needs.iter().copied().max().unwrap_or(0);
        self.free.retain(|arena| arena.len() <= most);
    }
}

/// A step's right to an arena.
#[derive(Debug)]
pub struct Claim {
    arenas: Arc<Arenas>,
    bytes: usize,
}

impl Claim {
    /// For a step that needs `bytes`, among all steps of the process.
    pub fn new(bytes: usize) -> Self {
        static ARENAS: LazyLock<Arc<Arenas>> = LazyLock::new(Arc::default);
        Self::among(&ARENAS, bytes)
    }

    fn among(arenas: &Arc<Arenas>, bytes: usize) -> Self {
        arenas.lock().needs.push(bytes);
        Self {
            arenas: arenas.clone(),
            bytes,
        }
    }

    /// An arena for one run: the smallest free one that is large enough, or a new one instead of those that
    /// are too small.
    ///
    /// # Errors
    /// [`CpuError::OutOfMemory`].
    pub fn arena(&self) -> Result<Arena<'_>, CpuError> {
        let mut pool = self.arenas.lock();
        let fitting = pool.free.iter().enumerate();
        let fitting = fitting.filter(|(_, arena)| arena.len() >= self.bytes);
        let buffer = match fitting.min_by_key(|(_, arena)| arena.len()) {
            Some((at, _)) => pool.free.swap_remove(at),
            None => {
                pool.free.clear();
                drop(pool);
                AlignedBuffer::zeroed(self.bytes)?
            }
        };
        Ok(Arena {
            arenas: &self.arenas,
            buffer: Some(buffer),
        })
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        let mut pool = self.arenas.lock();
        if let Some(at) = pool.needs.iter().position(|&bytes| bytes == self.bytes) {
            pool.needs.swap_remove(at);
        }
        pool.trim();
    }
}

/// An arena in use; free again when dropped.
#[derive(Debug)]
pub struct Arena<'a> {
    arenas: &'a Arenas,
    /// Until the drop.
    buffer: Option<AlignedBuffer>,
}

impl Deref for Arena<'_> {
    type Target = AlignedBuffer;

    fn deref(&self) -> &AlignedBuffer {
        self.buffer.as_ref().expect("the buffer stays until the drop")
    }
}

impl DerefMut for Arena<'_> {
    fn deref_mut(&mut self) -> &mut AlignedBuffer {
        self.buffer.as_mut().expect("the buffer stays until the drop")
    }
}

impl Drop for Arena<'_> {
    fn drop(&mut self) {
        let mut pool = self.arenas.lock();
        pool.free.extend(self.buffer.take());
        pool.trim();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn free(arenas: &Arenas) -> Vec<usize> {
        let mut sizes: Vec<usize> = arenas.lock().free.iter().map(|arena| arena.len()).collect();
        sizes.sort_unstable();
        sizes
    }

    #[test]
    fn steps_in_turn_share_one_arena() {
        let arenas = Arc::<Arenas>::default();
        let (small, large) = (Claim::among(&arenas, 100), Claim::among(&arenas, 900));
        drop(small.arena().unwrap());
        assert_eq!(free(&arenas), [100]);
        drop(large.arena().unwrap());
        assert_eq!(
            free(&arenas),
            [900],
            "the small one is given back for the large one"
        );
        assert_eq!(small.arena().unwrap().len(), 900);
        drop(large);
        assert!(free(&arenas).is_empty(), "nobody needs so much any more");
        assert_eq!(small.arena().unwrap().len(), 100);
    }

    #[test]
    fn steps_at_once_have_an_arena_each() {
        let arenas = Arc::<Arenas>::default();
        let claim = Claim::among(&arenas, 64);
        let (mut first, second) = (claim.arena().unwrap(), claim.arena().unwrap());
        assert_ne!(first.as_ptr(), second.as_ptr());
        first.as_mut_slice()[63] = 1;
        drop((first, second));
        assert_eq!(free(&arenas), [64, 64]);
        drop(claim);
        assert!(free(&arenas).is_empty());
    }
}
