//! A store: entries of one kind.

use std::fs::{self, File, TryLockError};
use std::io;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

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
}

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
    #[expect(dead_code, reason = "the lock is the open file")]
    file: File,
}

impl Lock {
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
    /// one's stays.
    pub fn lock(&self, key: &Key) -> Option<Lock> {
        let folder = self.folder()?;
        let take = || {
            let (path, file) = lock_file(folder, key)?;
            match file.lock() {
                Err(error) if error.kind() != io::ErrorKind::Unsupported => Err(error),
                _ => Ok(Lock { path, file }),
            }
        };
        take()
            .map_err(|error| self.root.warn_once("writing to", &error))
            .ok()
    }

    /// [`Store::lock`] without waiting.
    ///
    /// # Errors
    /// [`Held`] if another process has it.
    pub fn try_lock(&self, key: &Key) -> Result<Option<Lock>, Held> {
        let Some(folder) = self.folder() else {
            return Ok(None);
        };
        let taken = lock_file(folder, key).and_then(|(path, file)| match file.try_lock() {
            Err(TryLockError::WouldBlock) => Ok(Err(Held)),
            Err(TryLockError::Error(error)) if error.kind() != io::ErrorKind::Unsupported => Err(error),
            _ => Ok(Ok(Lock { path, file })),
        });
        match taken {
            Ok(taken) => taken.map(Some),
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

/// The file in `folder` whose lock is that of `key`, opened.
fn lock_file(folder: &Path, key: &Key) -> io::Result<(PathBuf, File)> {
    fs::create_dir_all(folder)?;
    let key = key.to_string();
    let path = Files { folder, key: &key }.lock();
    let file = File::options().create(true).append(true).open(&path)?;
    Ok((path, file))
}
