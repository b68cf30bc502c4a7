//! Object files, by the inputs that they were compiled from.
//!
//! Steps of one program share most of their kernels: the first step of an optimizer and the following ones,
//! a step before and after a change of its last layers, the program as it was before an edit. The C compiler
//! sees each file once; the next build with the same file finds its object here, in the memory of this
//! process or in the cache on disk.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use kiln_store::{CacheFolder, Key, Lock, Store};

/// Most bytes of objects that are kept in memory; the oldest are dropped first.
const LIMIT: usize = 64 << 20;

/// Object files that builds have made. The default keeps those of this process, in memory.
#[derive(Debug)]
pub struct Objects {
    kept: Mutex<Kept>,
    /// Those that any process has made.
    stored: Store,
    /// How long a build with nothing else to do waits for objects of other processes.
    pub(crate) patience: Duration,
}

/// No file takes a compiler that long. A process that was stopped would be waited for until somebody
/// continues it.
const PATIENCE: Duration = Duration::from_secs(20);

#[derive(Debug, Default)]
struct Kept {
    files: HashMap<Key, Arc<[u8]>>,
    /// Keys, oldest first.
    order: VecDeque<Key>,
    bytes: usize,
}

/// What there is to do for an object.
#[derive(Debug)]
pub(crate) enum Claim {
    /// Nothing: here it is.
    Made(Arc<[u8]>),
    /// To compile it. Other processes wait while the lock is held; there is none where there is no cache.
    Ours(Option<Lock>),
    /// To wait for the process that compiles it.
    Theirs,
}

impl Default for Objects {
    fn default() -> Self {
        Self::in_folder(&CacheFolder::disabled())
    }
}

impl Objects {
    /// Object files that are also found and kept in `folder`, for other processes.
    pub fn in_folder(folder: &CacheFolder) -> Self {
        Self {
            kept: Mutex::default(),
            stored: folder.store("objects", "o").unflushed(),
            patience: PATIENCE,
        }
    }

    /// The object of `key`, whoever made it.
    pub(crate) fn get(&self, key: &Key) -> Option<Arc<[u8]>> {
        if let Some(object) = self.lock().files.get(key) {
            return Some(object.clone());
        }
        let object: Arc<[u8]> = self.stored.get(key)?.content.into();
        self.keep(*key, object.clone());
        Some(object)
    }

    /// The object of `key`, or who compiles it.
    pub(crate) fn claim(&self, key: &Key) -> Claim {
        if let Some(object) = self.get(key) {
            return Claim::Made(object);
        }
        let Ok(lock) = self.stored.try_lock(key) else {
            return Claim::Theirs;
        };
        match self.get(key) {
            // Its process has just stored it.
            Some(object) => Claim::Made(object),
            None => Claim::Ours(lock),
        }
    }

    /// Keeps the object of `key` that was compiled from the file called `name`, and lets others have it.
    pub(crate) fn insert(&self, key: Key, name: &str, object: Vec<u8>, lock: Option<Lock>) {
        self.stored.put(&key, &object, name, "");
        if let Some(lock) = lock {
            lock.finish();
        }
        self.keep(key, object.into());
    }

    fn keep(&self, key: Key, object: Arc<[u8]>) {
        let mut kept = self.lock();
        let bytes = object.len();
        if bytes > LIMIT || kept.files.insert(key, object).is_some() {
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

    fn key(number: usize) -> Key {
        Key::of([number.to_string()])
    }

    #[test]
    fn the_oldest_objects_make_room() {
        let objects = Objects::default();
        let size = LIMIT / 4;
        for number in 0..6 {
            objects.insert(key(number), "kernels.c", vec![number as u8; size], None);
        }
        assert!(objects.get(&key(1)).is_none());
        for number in 2..6 {
            let object = objects.get(&key(number)).unwrap();
            assert_eq!((object.len(), object[0]), (size, number as u8));
        }
        objects.insert(key(9), "kernels.c", vec![0; LIMIT + 1], None);
        assert!(objects.get(&key(9)).is_none() && objects.get(&key(5)).is_some());
    }

    #[test]
    fn other_processes_find_what_is_in_the_folder() {
        let folder = tempfile::tempdir().unwrap();
        let process = || Objects::in_folder(&CacheFolder::at(folder.path(), 1 << 20));
        let first = process();
        first.insert(key(1), "kernels.c", vec![1, 2, 3], None);
        assert_eq!(process().get(&key(1)).as_deref(), Some(&[1, 2, 3][..]));
        assert!(process().get(&key(2)).is_none());
        // What the disk loses is compiled again, and what the process has it keeps.
        let file = folder.path().join("objects").join(format!("{}.o", key(1)));
        std::fs::write(file, [1, 2]).unwrap();
        assert!(process().get(&key(1)).is_none());
        assert_eq!(first.get(&key(1)).as_deref(), Some(&[1, 2, 3][..]));
    }
    #[test]
    fn one_process_compiles_and_others_wait() {
        let folder = tempfile::tempdir().unwrap();
        let process = || Objects::in_folder(&CacheFolder::at(folder.path(), 1 << 20));
        let (first, second) = (process(), process());
        let Claim::Ours(lock @ Some(_)) = first.claim(&key(1)) else {
            panic!("nobody else has asked");
        };
        assert!(matches!(second.claim(&key(1)), Claim::Theirs));
        assert!(matches!(second.claim(&key(2)), Claim::Ours(Some(_))));
        first.insert(key(1), "kernels.c", vec![1, 2, 3], lock);
        let Claim::Made(object) = second.claim(&key(1)) else {
            panic!("the first one has stored it");
        };
        assert_eq!(object[..], [1, 2, 3]);
        // Of what is stored no lock stays, and a process that ends without an object leaves none that holds.
        let lock = |number| {
            folder
                .path()
                .join("objects")
                .join(format!("{}.lock", key(number)))
        };
        assert!(!lock(1).exists() && lock(2).exists());
        let claimed = first.claim(&key(3));
        assert!(matches!(second.claim(&key(3)), Claim::Theirs));
        drop(claimed);
        assert!(matches!(second.claim(&key(3)), Claim::Ours(Some(_))));
        // Without a cache everybody compiles.
        assert!(matches!(Objects::default().claim(&key(1)), Claim::Ours(None)));
    }
}
