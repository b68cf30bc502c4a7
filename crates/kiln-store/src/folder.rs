//! The folder of all stores: its place, its limit and its contents.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use crate::entry::{self, Files};
use crate::error::StoreError;
use crate::store::{Entry, Store};

/// Limit of the cache's size unless told otherwise, in bytes.
const DEFAULT_LIMIT: u64 = 2 << 30;

/// No write takes that long: its file is one that a killed program left behind.
const ABANDONED: Duration = Duration::from_hours(24);

/// The folder of all stores. Cheap to clone; clones share their state.
#[derive(Debug, Clone)]
pub struct CacheFolder {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    /// `None`: no folder could be determined, or the cache is switched off.
    root: Option<PathBuf>,
    /// Bytes that all entries may take together.
    limit: u64,
    /// Bytes of all entries when they were last counted, and of those that this process has added since; none
    /// before the first count. Other processes count for themselves.
    bytes: Mutex<Option<u64>>,
    /// Whether the warning about a folder that cannot be written was given.
    warned: AtomicBool,
}

/// The contents of one store.
#[derive(Debug, Clone)]
pub struct Listing {
    /// The store, such as `steps`.
    pub store: String,
    /// Its entries, last used first.
    pub entries: Vec<Entry>,
}

impl Listing {
    /// Bytes on disk of all entries.
    pub fn bytes(&self) -> u64 {
        self.entries.iter().map(|entry| entry.bytes).sum()
    }
}

impl CacheFolder {
    /// The cache of this user, where the environment says (see the [crate]).
    pub fn from_env() -> Self {
        let variable = |name| {
            std::env::var_os(name)
                .filter(|value| !value.is_empty())
                .map(PathBuf::from)
        };
        let root = variable("KILN_CACHE_DIR")
            .or_else(|| variable("XDG_CACHE_HOME").map(|folder| folder.join("kiln")))
            .or_else(|| variable("HOME").map(|home| home.join(".cache").join("kiln")));
        let limit = std::env::var("KILN_CACHE_BYTES").ok().and_then(|value| match value.trim().parse() {
            Ok(bytes) => Some(bytes),
            Err(error) => {
                kiln_log::warn!(%value, %error, "KILN_CACHE_BYTES is not a number of bytes; using the default");
                None
            }
        });
        if root.is_none() {
            kiln_log::warn!("no cache folder: set KILN_CACHE_DIR; steps are compiled for this process alone");
        }
        Self::with(root, limit.unwrap_or(DEFAULT_LIMIT))
    }

    /// A cache in `root` whose entries take at most `limit` bytes.
    pub fn at(root: impl Into<PathBuf>, limit: u64) -> Self {
        Self::with(Some(root.into()), limit)
    }

    /// No cache: nothing is found and nothing is kept.
    pub fn disabled() -> Self {
        Self::with(None, 0)
    }

    fn with(root: Option<PathBuf>, limit: u64) -> Self {
        Self {
            inner: Arc::new(Inner {
                root,
                limit,
                bytes: Mutex::new(None),
                warned: AtomicBool::new(false),
            }),
        }
    }

    /// Where it is, if it is anywhere.
    pub fn path(&self) -> Option<&Path> {
        self.inner.root.as_deref()
    }

    /// The store `name`, whose contents are files that end in `extension`.
    pub fn store(&self, name: &str, extension: &'static str) -> Store {
        Store::new(self.clone(), self.path().map(|root| root.join(name)), extension)
    }

    /// What each store holds, by name.
    ///
    /// # Errors
    /// [`StoreError`] if the folder exists and cannot be read.
    pub fn list(&self) -> Result<Vec<Listing>, StoreError> {
        let Some(root) = self.path() else {
            return Ok(Vec::new());
        };
        let mut stores = self.folders().map_err(StoreError::of("reading", root))?;
        stores.sort();
        let listing = |folder: PathBuf| {
            let mut entries = entry::entries(&folder).map_err(StoreError::of("reading", &folder))?;
            entries.sort_by(|a, b| b.last_used.cmp(&a.last_used).then_with(|| a.key.cmp(&b.key)));
            let store = folder
                .file_name()
                .unwrap_or_default()
                .to_string_lossy()
                .into_owned();
            Ok(Listing { store, entries })
        };
        stores.into_iter().map(listing).collect()
    }

    /// Removes all entries and notes of all stores, and what killed programs left behind; returns how many
    /// entries there were and the bytes freed.
    ///
    /// # Errors
    /// [`StoreError`] if an entry cannot be removed.
    pub fn clear(&self) -> Result<(usize, u64), StoreError> {
        let (mut count, mut bytes) = (0, 0);
        for listing in self.list()? {
            for entry in &listing.entries {
                entry
                    .remove()
                    .map_err(StoreError::of("removing an entry of", &entry.folder))?;
            }
            count += listing.entries.len();
            bytes += listing.bytes();
        }
        let Some(root) = self.path() else {
            return Ok((0, 0));
        };
        for folder in self.folders().map_err(StoreError::of("reading", root))? {
            entry::remove_notes(&folder).map_err(StoreError::of("removing a note of", &folder))?;
            bytes += entry::remove_unfinished(&folder, Duration::ZERO)
                .map_err(StoreError::of("removing an unfinished file of", &folder))?;
            entry::remove_locks(&folder).map_err(StoreError::of("removing a lock of", &folder))?;
        }
        Ok((count, bytes))
    }

    /// Counts an entry that was written, and makes room if the limit is exceeded. The entry itself stays.
    pub(crate) fn added(&self, folder: &Path, key: &str, bytes: u64) {
        let mut known = self.inner.bytes.lock().unwrap_or_else(PoisonError::into_inner);
        let estimate = known.map(|known| known + bytes);
        *known = match estimate {
            Some(total) if total <= self.inner.limit => estimate,
            _ => self.evict(folder, key),
        };
    }

    /// Removes what killed programs left behind, and the entries used longest ago, of whichever store, until
    /// the rest fits the limit; `newest` of the store in `folder` stays. Returns the bytes that are left;
    /// none if the folder cannot be read.
    fn evict(&self, folder: &Path, newest: &str) -> Option<u64> {
        let listings = self.list().ok()?;
        for folder in self.folders().ok()? {
            if let Err(error) = entry::remove_unfinished(&folder, ABANDONED) {
                self.warn_once("removing an unfinished file of", &error);
            }
        }
        let mut total: u64 = listings.iter().map(Listing::bytes).sum();
        let mut entries: Vec<Entry> = listings.into_iter().flat_map(|listing| listing.entries).collect();
        entries.retain(|entry| entry.key != newest || entry.folder != folder);
        entries.sort_by(|a, b| a.last_used.cmp(&b.last_used).then_with(|| b.key.cmp(&a.key)));
        for old in &entries {
            if total <= self.inner.limit {
                break;
            }
            match old.remove() {
                Ok(()) => {
                    tracing::debug!(key = old.key, bytes = old.bytes, "evicted from the cache");
                    total -= old.bytes;
                }
                Err(error) => self.warn_once("removing an old entry of", &error),
            }
        }
        Some(total)
    }

    /// Warns, the first time that anything of the cache fails.
    pub(crate) fn warn_once(&self, action: &str, error: &io::Error) {
        if !self.inner.warned.swap(true, Ordering::Relaxed) {
            let root = self
                .path()
                .map_or_else(String::new, |root| root.display().to_string());
            kiln_log::warn!(
                "{action} the cache {root}: {error}; what is made is made for this process alone (set \
                 KILN_CACHE_DIR to a folder that can be written)"
            );
        }
    }

    /// The folders of the stores.
    fn folders(&self) -> io::Result<Vec<PathBuf>> {
        let Some(root) = self.path() else {
            return Ok(Vec::new());
        };
        let files = match fs::read_dir(root) {
            Err(error)
                if matches!(
                    error.kind(),
                    io::ErrorKind::NotFound | io::ErrorKind::NotADirectory
                ) =>
            {
                return Ok(Vec::new());
            }
            other => other?,
        };
        Ok(files
            .filter_map(|file| Some(file.ok()?.path()))
            .filter(|path| path.is_dir())
            .collect())
    }
}

impl Entry {
    /// The entry's name; empty if its description cannot be read.
    pub fn name(&self) -> String {
        self.files().name()
    }

    pub(crate) fn remove(&self) -> io::Result<()> {
        self.files().remove(&self.extension)
    }

    fn files(&self) -> Files<'_> {
        Files {
            folder: &self.folder,
            key: &self.key,
        }
    }
}
