//! A store: entries of one kind.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use crate::entry::{self, Files, Unusable};
use crate::folder::CacheFolder;
use crate::key::Key;

/// Entries of one kind, in a folder of the [`CacheFolder`]. Clones share their state.
#[derive(Debug, Clone)]
pub struct Store {
    root: CacheFolder,
    /// `None`: there is no cache.
    folder: Option<PathBuf>,
    /// How the files of contents end.
    extension: &'static str,
    /// Whether what is written reaches the disk before it gets its name.
    flushed: bool,
    patience: Patience,
}

/// How long [`Store::lock`] waits for another process.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Patience {
    /// Before it says that it waits.
    pub(crate) silent: Duration,
    /// Before it goes on without the lock.
    pub(crate) longest: Duration,
}

/// The first compilation of a large step takes minutes. A process that was stopped (Ctrl-Z) would be waited
/// for until somebody continues it.
const PATIENCE: Patience = Patience {
    silent: Duration::from_secs(5),
    longest: Duration::from_secs(600),
};

/// Pauses between two looks at a lock: the first one, doubled until the longest.
const PAUSES: [Duration; 2] = [Duration::from_millis(1), Duration::from_millis(100)];

/// One line of a listing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    pub(crate) folder: PathBuf,
    /// How the content's file ends; empty if there is none.
    pub(crate) extension: String,
    /// The key, 64 hexadecimal digits.
    pub key: String,
    /// Bytes on disk.
    pub bytes: u64,
    /// When it was last used.
    pub last_used: SystemTime,
}

/// An entry that was found, sound.
#[derive(Debug)]
pub struct Found {
    /// What was stored.
    pub content: Vec<u8>,
    /// Its name in listings.
    pub name: String,
    /// The text that was stored beside it.
    pub payload: String,
    /// The file that holds the content.
    pub path: PathBuf,
}

/// The right to make the entry of a key; other processes wait for it. Released on drop.
#[derive(Debug)]
#[must_use = "a lock that is dropped is released"]
pub struct Lock {
    path: PathBuf,
    /// The lock is the open file.
    file: File,
}

impl Lock {
    /// The lock of `key` in `folder`, not yet taken.
    fn open(folder: &Path, key: &Key) -> io::Result<Self> {
        fs::create_dir_all(folder)?;
        let key = key.to_string();
        let path = Files { folder, key: &key }.lock();
        let file = File::options().create(true).append(true).open(&path)?;
        Ok(Self { path, file })
    }

    /// Releases the lock of an entry that has been stored and removes its file, which would stay as long as
    /// the entry. Who waits for the lock meanwhile gets that of a file without a name, looks for the entry,
    /// and finds it.
    pub fn finish(self) {
        // A file that cannot be removed is as harmless as one that stays.
        let _ = fs::remove_file(&self.path);
    }
}

/// Another process, or another thread, has the lock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Held;

impl Store {
    pub(crate) fn new(root: CacheFolder, folder: Option<PathBuf>, extension: &'static str) -> Self {
        Self {
            root,
            folder,
            extension,
            flushed: true,
            patience: PATIENCE,
        }
    }

    /// A store that finds nothing and keeps nothing.
    pub fn disabled() -> Self {
        Self::new(CacheFolder::disabled(), None, "")
    }

    /// The same store for entries that are small, many and soon made again: nothing waits until they are on
    /// the disk. The checksum of an entry tells whether a crash of the machine cut it off.
    #[must_use]
    pub fn unflushed(mut self) -> Self {
        self.flushed = false;
        self
    }

    /// The folder that holds the entries, if there is one.
    pub fn folder(&self) -> Option<&Path> {
        self.folder.as_deref()
    }

    /// The entry of `key`, if there is one and it is sound. Damage is reported once and removed.
    pub fn get(&self, key: &Key) -> Option<Found> {
        self.get_if(key, Ok)
    }

    /// The result of `accept` for the entry of `key`. An entry that it refuses, with the reason, is damaged
    /// as well.
    pub fn get_if<T>(&self, key: &Key, accept: impl FnOnce(Found) -> Result<T, String>) -> Option<T> {
        let (folder, key) = (self.folder()?, key.to_string());
        let files = Files { folder, key: &key };
        let found = files.read(self.extension).map(|(content, name, payload)| Found {
            content,
            name,
            payload,
            path: files.with(self.extension),
        });
        let reason = match found {
            Ok(found) => match accept(found) {
                Ok(accepted) => {
                    files.touch();
                    return Some(accepted);
                }
                Err(reason) => reason,
            },
            Err(Unusable::Absent) => return None,
            Err(Unusable::Damaged(reason)) => reason,
        };
        kiln_log::warn!(key, reason, "a damaged entry of the cache is made again");
        if let Err(error) = files.remove(self.extension) {
            self.root.warn_once("removing a damaged entry of", &error);
        }
        None
    }

    /// Stores `content` under `key`, called `name` in listings, with a text beside it. Makes room where the
    /// cache is full.
    pub fn put(&self, key: &Key, content: &[u8], name: &str, payload: &str) {
        let Some(folder) = self.folder() else { return };
        let key = key.to_string();
        let files = Files { folder, key: &key };
        let written = fs::create_dir_all(folder)
            .and_then(|()| files.write(self.extension, content, name, payload, self.flushed));
        match written {
            Ok(()) => self.root.added(folder, &key, content.len() as u64),
            Err(error) => self.root.warn_once("writing to", &error),
        }
    }

    /// Stores what is in the file `built`, as [`Store::put`] does.
    pub fn put_file(&self, key: &Key, built: &Path, name: &str, payload: &str) {
        match fs::read(built) {
            Ok(content) => self.put(key, &content, name, payload),
            Err(error) => self.root.warn_once("reading what is stored in", &error),
        }
    }

    /// The lock of `key`, waiting for the process that holds it; `None` where nothing can be written. A file
    /// system without locks gives everybody the lock: several processes then make the entry, and the last
    /// one's stays. So it is also where a process holds the lock for too long, which may have been stopped.
    pub fn lock(&self, key: &Key) -> Option<Lock> {
        let folder = self.folder()?;
        self.wait_for(folder, key)
            .map_err(|error| self.root.warn_once("writing to", &error))
            .ok()
    }

    fn wait_for(&self, folder: &Path, key: &Key) -> io::Result<Lock> {
        let lock = Lock::open(folder, key)?;
        let [mut pause, longest_pause] = PAUSES;
        let (begun, mut silent) = (Instant::now(), true);
        while !entry::take(&lock.file)? {
            let waited = begun.elapsed();
            if silent && waited >= self.patience.silent {
                kiln_log::warn!(
                    lock = %lock.path.display(),
                    "another process has been making this entry of the cache for {} s: waiting (if it was \
                     stopped, continue or end it)",
                    waited.as_secs()
                );
                silent = false;
            }
            if waited >= self.patience.longest {
                kiln_log::warn!(
                    lock = %lock.path.display(),
                    "another process has been making this entry of the cache for {} s: it is made here as \
                     well",
                    waited.as_secs()
                );
                break;
            }
            thread::sleep(pause);
            pause = (pause * 2).min(longest_pause);
        }
        Ok(lock)
    }

    /// [`Store::lock`] without waiting.
    ///
    /// # Errors
    /// [`Held`] if another process has it.
    pub fn try_lock(&self, key: &Key) -> Result<Option<Lock>, Held> {
        let Some(folder) = self.folder() else {
            return Ok(None);
        };
        let taken = Lock::open(folder, key).and_then(|lock| Ok(entry::take(&lock.file)?.then_some(lock)));
        match taken {
            Ok(taken) => taken.map(Some).ok_or(Held),
            Err(error) => {
                self.root.warn_once("writing to", &error);
                Ok(None)
            }
        }
    }

    /// The text that is kept under `key`, if there is one.
    pub fn noted(&self, key: &Key) -> Option<String> {
        let (folder, key) = (self.folder()?, key.to_string());
        fs::read_to_string(Files { folder, key: &key }.note()).ok()
    }

    /// The text that is kept under `key`. If there is none, `make` makes it, once for all processes that
    /// ask at the same time. A text that is not `sound` is made again. Notes are small and no entries:
    /// listings and the limit do not count them.
    ///
    /// # Errors
    /// Those of `make`, of which nothing is kept. Trouble with the cache is a warning.
    pub fn note<E>(
        &self,
        key: &Key,
        sound: impl Fn(&str) -> bool,
        make: impl FnOnce() -> Result<String, E>,
    ) -> Result<String, E> {
        let Some(folder) = self.folder() else {
            return make();
        };
        let digits = key.to_string();
        let path = Files { folder, key: &digits }.note();
        let kept = || fs::read_to_string(&path).ok().filter(|text| sound(text));
        if let Some(text) = kept() {
            return Ok(text);
        }
        let lock = self.lock(key);
        if lock.is_some()
            && let Some(text) = kept()
        {
            // Another process made it while this one waited.
            return Ok(text);
        }
        let text = make()?;
        if lock.is_some()
            && let Err(error) = entry::write_atomically(folder, &path, text.as_bytes(), true)
        {
            self.root.warn_once("writing to", &error);
        }
        Ok(text)
    }
}

#[cfg(test)]
mod tests {
    use std::fmt;
    use std::sync::{Arc, Mutex};

    use tracing::field::{Field, Visit};
    use tracing::span::{Attributes, Id, Record};
    use tracing::{Event, Metadata, Subscriber};

    use super::*;

    /// Keeps the messages and fields of events.
    #[derive(Clone, Default)]
    struct Messages(Arc<Mutex<Vec<String>>>);

    impl Subscriber for Messages {
        fn enabled(&self, _: &Metadata<'_>) -> bool {
            true
        }
        fn new_span(&self, _: &Attributes<'_>) -> Id {
            Id::from_u64(1)
        }
        fn record(&self, _: &Id, _: &Record<'_>) {}
        fn record_follows_from(&self, _: &Id, _: &Id) {}
        fn event(&self, event: &Event<'_>) {
            struct Text(String);
            impl Visit for Text {
                fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
                    self.0 += &format!("{field}={value:?} ");
                }
            }
            let mut text = Text(String::new());
            event.record(&mut text);
            self.0.lock().unwrap().push(text.0);
        }
        fn enter(&self, _: &Id) {}
        fn exit(&self, _: &Id) {}
    }

    fn patient(folder: &Path, patience: Duration) -> Store {
        let mut store = CacheFolder::at(folder, 1 << 20).store("steps", "so");
        store.patience = Patience {
            silent: patience,
            longest: patience,
        };
        store
    }

    /// A lock that its process never gives back, because it was stopped in the middle.
    #[test]
    fn a_process_that_was_stopped_is_not_waited_for_without_end() {
        let folder = tempfile::tempdir().unwrap();
        let store = patient(folder.path(), Duration::ZERO);
        let key = Key::of(["step"]);
        let held = store.lock(&key).unwrap();
        let messages = Messages::default();
        let lock = tracing::subscriber::with_default(messages.clone(), || store.lock(&key));
        // What is made meanwhile is kept: nobody who comes later waits.
        assert!(lock.is_some());
        let said = messages.0.lock().unwrap().clone();
        let name = held.path.to_str().unwrap();
        assert_eq!(said.len(), 2, "{said:?}");
        assert!(said.iter().all(|text| text.contains(name)), "{said:?}");
        assert!(
            said[0].contains("waiting") && said[1].contains("made here as well"),
            "{said:?}"
        );
        let note = store.note(&key, |_| true, || Ok::<_, ()>("made".to_owned()));
        assert_eq!(
            (note, store.noted(&key)),
            (Ok("made".to_owned()), Some("made".to_owned()))
        );
        assert_eq!(store.try_lock(&key).unwrap_err(), Held);
    }

    #[test]
    fn who_waits_gets_the_lock_that_is_given_back() {
        let folder = tempfile::tempdir().unwrap();
        let key = Key::of(["step"]);
        let store = patient(folder.path(), Duration::MAX);
        let held = store.lock(&key).unwrap();
        let waiting = thread::spawn({
            let (store, key) = (store.clone(), key);
            move || store.lock(&key)
        });
        assert!(!waiting.is_finished());
        drop(held);
        let lock = waiting.join().unwrap();
        assert_eq!(store.try_lock(&key).unwrap_err(), Held);
        drop(lock);
        assert!(matches!(store.try_lock(&key), Ok(Some(_))));
    }
}
