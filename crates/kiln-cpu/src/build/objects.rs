//! Object files of this process, by the inputs that they were compiled from.
//!
//! Steps of one program share most of their kernels: the first step of an optimizer and the following ones,
//! a step before and after a change of its last layers. The C compiler sees each file once; the next build
//! with the same file finds its object here. Reuse across restarts is left to the cache on disk, which
//! holds whole steps.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, PoisonError};

use sha2::{Digest, Sha256};

/// Most bytes of objects that are kept; the oldest are dropped first.
const LIMIT: usize = 64 << 20;

/// The identity of an object file: a hash over compiler, flags, headers and text.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct ObjectKey([u8; 32]);

impl ObjectKey {
    /// The key of the inputs that `parts` describe.
    pub fn new<'a>(parts: impl IntoIterator<Item = &'a str>) -> Self {
        let mut hash = Sha256::new();
        for part in parts {
            hash.update((part.len() as u64).to_le_bytes());
            hash.update(part.as_bytes());
        }
        Self(hash.finalize().into())
    }
}

/// Object files that builds of this process made.
#[derive(Debug, Default)]
pub struct Objects {
    kept: Mutex<Kept>,
}

#[derive(Debug, Default)]
struct Kept {
    files: HashMap<ObjectKey, Arc<[u8]>>,
    /// Keys, oldest first.
    order: VecDeque<ObjectKey>,
    bytes: usize,
}

impl Objects {
    pub(crate) fn get(&self, key: &ObjectKey) -> Option<Arc<[u8]>> {
        self.lock().files.get(key).cloned()
    }

    pub(crate) fn insert(&self, key: ObjectKey, object: Vec<u8>) {
        let mut kept = self.lock();
        let bytes = object.len();
        if bytes > LIMIT || kept.files.insert(key, object.into()).is_some() {
            return;
        }
        kept.bytes += bytes;
        kept.order.push_back(key);
        while kept.bytes > LIMIT {
            let Some(oldest) = kept.order.pop_front() else {
                break;
            };
            if let Some(object) = kept.files.remove(&oldest) {
                kept.bytes -= object.len();
            }
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Kept> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_objects_make_room() {
        let objects = Objects::default();
        let key = |number: usize| ObjectKey::new([number.to_string().as_str()]);
        let size = LIMIT / 4;
        for number in 0..6 {
            objects.insert(key(number), vec![number as u8; size]);
        }
        assert!(objects.get(&key(1)).is_none());
        for number in 2..6 {
            let object = objects.get(&key(number)).unwrap();
            assert_eq!((object.len(), object[0]), (size, number as u8));
        }
        objects.insert(key(9), vec![0; LIMIT + 1]);
        assert!(objects.get(&key(9)).is_none() && objects.get(&key(5)).is_some());
    }

    #[test]
    fn neighbouring_parts_do_not_run_together() {
        assert_ne!(ObjectKey::new(["ab", "c"]), ObjectKey::new(["a", "bc"]));
    }
}
