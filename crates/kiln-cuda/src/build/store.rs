//! What was made, on disk, so that a second process makes nothing again: machine code, steps, the choice of
//! algorithms.
//!
//! A store is a folder, such as `cubins`, in the user's cache folder for Kiln (`$KILN_CACHE_DIR`, else
//! `$XDG_CACHE_HOME/kiln`, else `~/.cache/kiln`), with one file for each key. A file is the SHA-256 of its
//! content and then the content, written to a temporary name, flushed and renamed: it is whole or absent,
//! and damage shows. Two processes that want the same both make it, and the later name wins; either file is
//! right. Losing the cache is never an error.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::SystemTime;

use sha2::{Digest, Sha256};

/// Limit of the cache's size unless told otherwise, in bytes: some ten thousand kernels.
const DEFAULT_LIMIT: u64 = 512 << 20;

/// Bytes of the checksum in front of the content.
const CHECKSUM: usize = 32;

/// Identity of what is stored: a SHA-256 over everything it depends on, in hexadecimal.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Key(String);

impl Key {
    /// Order counts; lengths are hashed too, so that neighbours cannot run together.
    fn of(parts: &[impl AsRef<[u8]>]) -> Self {
        let mut hash = Sha256::new();
        for part in parts {
            let part = part.as_ref();
            hash.update((part.len() as u64).to_le_bytes());
            hash.update(part);
        }
        Self(hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect())
    }
}

/// A cache on disk.
#[derive(Debug)]
pub struct Store {
    /// How its files' names end.
    extension: &'static str,
    /// `None`: no folder could be determined, or the cache is switched off.
    folder: Option<PathBuf>,
    limit: u64,
    /// Whether something was added since the last look at the size.
    grown: AtomicBool,
    /// Whether the warning about a folder that cannot be written was given.
    warned: AtomicBool,
}

impl Store {
    /// This user's store called `name`, where the environment says, with files that end in `extension`.
    pub fn from_env(name: &str, extension: &'static str) -> Self {
        let variable = |name| {
            std::env::var_os(name)
                .filter(|value| !value.is_empty())
                .map(PathBuf::from)
        };
        let folder = variable("KILN_CACHE_DIR")
            .or_else(|| variable("XDG_CACHE_HOME").map(|folder| folder.join("kiln")))
            .or_else(|| variable("HOME").map(|home| home.join(".cache").join("kiln")));
        Self::with(folder.map(|folder| folder.join(name)), extension, DEFAULT_LIMIT)
    }

    /// The store of this user's machine code.
    pub fn of_cubins() -> Self {
        Self::from_env("cubins", "cubin")
    }

    /// A store in `folder` that holds at most `limit` bytes.
    pub fn at(folder: impl Into<PathBuf>, limit: u64) -> Self {
        Self::with(Some(folder.into()), "cubin", limit)
    }

    /// No cache.
    pub fn disabled() -> Self {
        Self::with(None, "", 0)
    }

    fn with(folder: Option<PathBuf>, extension: &'static str, limit: u64) -> Self {
        Self {
            extension,
            folder,
            limit,
            grown: AtomicBool::new(false),
            warned: AtomicBool::new(false),
        }
    }

    /// The key of what depends on `parts` and nothing else.
    pub fn key(parts: &[impl AsRef<[u8]>]) -> Key {
        Key::of(parts)
    }

    /// What is stored under `key`, if it is there and sound. Damage is reported and removed.
    pub fn get(&self, key: &Key) -> Option<Vec<u8>> {
        let path = self.path(key)?;
        let mut bytes = fs::read(&path).ok()?;
        if bytes.len() > CHECKSUM && Sha256::digest(&bytes[CHECKSUM..])[..] == bytes[..CHECKSUM] {
            // The time of last use; in a folder that cannot be written nothing is evicted either.
            let _ = File::options()
                .append(true)
                .open(&path)
                .and_then(|file| file.set_modified(SystemTime::now()));
            return Some(bytes.split_off(CHECKSUM));
        }
        tracing::warn!(file = %path.display(), "a damaged file of the cache is made again");
        if let Err(error) = fs::remove_file(&path) {
            self.warn_once("removing a damaged file of", &error);
        }
        None
    }

    /// Stores `content` under `key`.
    pub fn put(&self, key: &Key, content: &[u8]) {
        let Some(path) = self.path(key) else { return };
        let write = || -> io::Result<()> {
            let folder = path.parent().unwrap_or(Path::new("."));
            fs::create_dir_all(folder)?;
            let mut file = tempfile::Builder::new().prefix(".writing-").tempfile_in(folder)?;
            file.write_all(&Sha256::digest(content))?;
            file.write_all(content)?;
            file.as_file().sync_all()?;
            file.persist(&path).map_err(|error| error.error)?;
            Ok(())
        };
        match write() {
            Ok(()) => self.grown.store(true, Ordering::Relaxed),
            Err(error) => self.warn_once("writing to", &error),
        }
    }

    /// Removes the files used longest ago until the rest fits the limit.
    pub(super) fn evict(&self) {
        let Some(folder) = &self.folder else { return };
        if !self.grown.swap(false, Ordering::Relaxed) {
            return;
        }
        let Ok(entries) = fs::read_dir(folder) else { return };
        let mut files: Vec<(SystemTime, u64, PathBuf)> = entries
            .filter_map(|entry| {
                let path = entry.ok()?.path();
                let data = fs::metadata(&path).ok()?;
                let is_ours = path
                    .extension()
                    .is_some_and(|extension| extension == self.extension);
                is_ours.then_some((data.modified().ok()?, data.len(), path))
            })
            .collect();
        files.sort();
        let mut total: u64 = files.iter().map(|(_, bytes, _)| bytes).sum();
        for (_, bytes, path) in files {
            if total <= self.limit {
                return;
            }
            match fs::remove_file(&path) {
                Ok(()) => total -= bytes,
                Err(error) => self.warn_once("removing an old file of", &error),
            }
        }
    }

    fn path(&self, key: &Key) -> Option<PathBuf> {
        Some(
            self.folder
                .as_ref()?
                .join(format!("{}.{}", key.0, self.extension)),
        )
    }

    fn warn_once(&self, action: &str, error: &io::Error) {
        if !self.warned.swap(true, Ordering::Relaxed) {
            let folder = self
                .folder
                .as_ref()
                .map_or_else(String::new, |folder| folder.display().to_string());
            tracing::warn!(
                "{action} the cache {folder}: {error}; what is made is made for this process alone (set \
                 KILN_CACHE_DIR to a folder that can be written)"
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{Key, Store};
    use std::fs;

    #[test]
    fn what_was_put_is_found_and_damage_is_not_given_out() {
        let folder = tempfile::tempdir().unwrap();
        let cache = Store::at(folder.path(), 1 << 20);
        let key = Key::of(&["a", "b"]);
        assert_ne!(key, Key::of(&["ab", ""]));
        assert_eq!(cache.get(&key), None);
        cache.put(&key, b"machine code");
        assert_eq!(cache.get(&key).as_deref(), Some(&b"machine code"[..]));
        let path = cache.path(&key).unwrap();
        let mut bytes = fs::read(&path).unwrap();
        *bytes.last_mut().unwrap() ^= 1;
        fs::write(&path, bytes).unwrap();
        assert_eq!(cache.get(&key), None);
        assert!(!path.exists());
    }

    #[test]
    fn the_file_used_longest_ago_goes_first() {
        let folder = tempfile::tempdir().unwrap();
        let cache = Store::at(folder.path(), 150);
        let keys = [Key::of(&["1"]), Key::of(&["2"])];
        for (age, key) in [20, 10].into_iter().zip(&keys) {
            cache.put(key, &[0; 60]);
            let file = fs::File::options()
                .append(true)
                .open(cache.path(key).unwrap())
                .unwrap();
            file.set_modified(std::time::SystemTime::now() - std::time::Duration::from_secs(age))
                .unwrap();
        }
        cache.evict();
        assert_eq!(cache.get(&keys[0]), None);
        assert!(cache.get(&keys[1]).is_some());
    }

    #[test]
    fn without_a_folder_nothing_is_kept() {
        let cache = Store::disabled();
        cache.put(&Key::of(&["1"]), b"code");
        assert_eq!(cache.get(&Key::of(&["1"])), None);
    }
}
