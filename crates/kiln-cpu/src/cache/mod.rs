//! Compiled steps on disk, so that a second process starts without compiling.
//!
//! The folder is `$KILN_CACHE_DIR`, else `$XDG_CACHE_HOME/kiln`, else `~/.cache/kiln`; inside it `steps/`
//! holds one entry for each [`CacheKey`]. Losing the cache is never an error: a damaged entry is rebuilt with
//! a warning, and a folder that cannot be written (read-only, full, no home) means one warning and steps that
//! are built for this process alone.
//!
//! Two processes that want the same step: the first takes the lock file of the key and builds, the second
//! waits and then finds the entry. Where locks do not work (some network file systems) both build and the
//! later rename wins; either object is right.
//!
//! Small texts that are dear to find out, such as what the machine can do, lie there as well
//! ([`Cache::note`]).
//!
//! The total size is kept under a limit (`$KILN_CACHE_BYTES`, 2 GiB by default) by removing the entries that
//! were used longest ago. A process that has an evicted object loaded keeps it: its pages outlive the name.

mod entry;
mod key;

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant, SystemTime};

pub use key::{CacheKey, KeyBuilder};

use crate::build::objects::Objects;
use crate::build::{BuildOptions, SourceFile, Toolchain};
use crate::error::{CpuError, Result};
use crate::runtime::library::Library;
use entry::Unusable;

/// Limit of the cache's size unless told otherwise, in bytes.
const DEFAULT_LIMIT: u64 = 2 << 30;

/// What the step compiler hands over when a step is not in the cache.
#[derive(Debug, Clone)]
pub struct StepSource {
    /// What the step is called in listings.
    pub name: String,
    /// The generated source tree.
    pub files: Vec<SourceFile>,
    /// Text that is stored with the object and given back with it (a plan, kernel names); may be empty.
    pub payload: String,
}

/// Where a step came from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Origin {
    /// Found in the cache.
    Cache,
    /// Built now, in this much time of compiler and linker.
    Built(Duration),
}

/// A step ready to run, with what was stored beside it.
#[derive(Debug)]
pub struct CachedStep {
    /// The loaded object.
    pub library: Library,
    /// The payload of its [`StepSource`].
    pub payload: String,
    /// Where it came from.
    pub origin: Origin,
    /// Time of loading the object.
    pub load_time: Duration,
}

/// One line of a listing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CacheEntry {
    /// The key, 64 hexadecimal digits.
    pub key: String,
    /// What the step is called; empty if its description cannot be read.
    pub name: String,
    /// Bytes on disk.
    pub bytes: u64,
    /// When it was last used.
    pub last_used: SystemTime,
}

/// The cache of compiled steps. Cheap to clone; clones share their state.
#[derive(Debug, Clone)]
pub struct Cache {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    /// `None`: no folder could be determined, or the cache is switched off.
    folder: Option<PathBuf>,
    limit: u64,
    /// Whether the warning about a folder that cannot be written was given.
    warned: AtomicBool,
    /// What builds of this process compiled.
    objects: Objects,
}

/// Loads an object and says how long that took.
fn load(path: &Path) -> Result<(Library, Duration)> {
    let _span = kiln_profile::span(kiln_profile::Category::Compile, "load");
    let start = Instant::now();
    Ok((Library::load(path)?, start.elapsed()))
}

impl Cache {
    /// The cache of this user, where the environment says (see the module).
    pub fn from_env() -> Self {
        let variable = |name| {
            std::env::var_os(name)
                .filter(|value| !value.is_empty())
                .map(PathBuf::from)
        };
        let folder = variable("KILN_CACHE_DIR")
            .or_else(|| variable("XDG_CACHE_HOME").map(|folder| folder.join("kiln")))
            .or_else(|| variable("HOME").map(|home| home.join(".cache").join("kiln")));
        let limit = std::env::var("KILN_CACHE_BYTES").ok().and_then(|value| match value.trim().parse() {
            Ok(bytes) => Some(bytes),
            Err(error) => {
                tracing::warn!(%value, %error, "KILN_CACHE_BYTES is not a number of bytes; using the default");
                None
            }
        });
        if folder.is_none() {
            tracing::warn!("no cache folder: set KILN_CACHE_DIR; steps are compiled for this process alone");
        }
        Self::with(folder, limit.unwrap_or(DEFAULT_LIMIT))
    }

    /// A cache in `folder` that holds at most `limit` bytes.
    pub fn at(folder: impl Into<PathBuf>, limit: u64) -> Self {
        Self::with(Some(folder.into()), limit)
    }

    /// No cache: every step is built.
    pub fn disabled() -> Self {
        Self::with(None, 0)
    }

    fn with(folder: Option<PathBuf>, limit: u64) -> Self {
        let folder = folder.map(|folder| folder.join("steps"));
        Self {
            inner: Arc::new(Inner {
                folder,
                limit,
                warned: AtomicBool::new(false),
                objects: Objects::default(),
            }),
        }
    }

    /// The folder that holds the entries, if there is one.
    pub fn folder(&self) -> Option<&Path> {
        self.inner.folder.as_deref()
    }

    /// The step of `key`, if the cache has it and it is sound. Damage is reported once and removed.
    pub fn get(&self, key: &CacheKey) -> Option<CachedStep> {
        let folder = self.folder()?;
        let name = key.to_string();
        let reason = match entry::read(folder, &name) {
            Ok(description) => match load(&entry::object_path(folder, &name)) {
                Ok((library, load_time)) => {
                    entry::touch(folder, &name);
                    tracing::debug!(target: "kiln::cache", key = name, name = description.name, ?load_time, "hit");
                    return Some(CachedStep {
                        library,
                        payload: description.payload,
                        origin: Origin::Cache,
                        load_time,
                    });
                }
                Err(error) => error.to_string(),
            },
            Err(Unusable::Absent) => return None,
            Err(Unusable::Damaged(reason)) => reason,
        };
        tracing::warn!(key = name, reason, "a damaged entry of the cache is rebuilt");
        if let Err(error) = entry::remove(folder, &name) {
            self.warn_once("removing a damaged entry", &error);
        }
        None
    }

    /// The step of `key` from the cache; else `source` is asked for the step, which is built, stored and
    /// loaded.
    ///
    /// # Errors
    /// Those of `source`, of [`Toolchain::build`] and of [`Library::load`]. Trouble with the cache itself is
    /// a warning.
    pub fn get_or_build<E: From<CpuError>>(
        &self,
        key: &CacheKey,
        toolchain: &Toolchain,
        options: &BuildOptions,
        source: impl FnOnce() -> std::result::Result<StepSource, E>,
    ) -> std::result::Result<CachedStep, E> {
        if let Some(found) = self.get(key) {
            return Ok(found);
        }
        let lock = self.lock(key);
        if lock.is_some()
            && let Some(found) = self.get(key)
        {
            // Another process built it while we waited.
            return Ok(found);
        }
        let StepSource { name, files, payload } = source()?;
        tracing::debug!(target: "kiln::cache", key = %key, name, files = files.len(), "miss: the step is built");
        let built = toolchain.build_reusing(&files, options, &self.inner.objects)?;
        // Loaded from where it was built: what others do to the cache from now on is no concern of ours.
        let (library, load_time) = load(built.path())?;
        if lock.is_some() {
            self.store(key, built.path(), &name, &payload);
        }
        Ok(CachedStep {
            library,
            payload,
            origin: Origin::Built(built.elapsed),
            load_time,
        })
    }

    /// The text that is kept under `key`; else `make` makes it, once for all processes that ask at the same
    /// time. A text that is not `sound` is made again. Texts are no entries: they have no part in
    /// [`Cache::list`] and the limit, and [`Cache::clear`] removes them.
    ///
    /// # Errors
    /// Those of `make`, of which nothing is kept. Trouble with the cache is a warning.
    pub fn note<E>(
        &self,
        key: &CacheKey,
        sound: impl Fn(&str) -> bool,
        make: impl FnOnce() -> std::result::Result<String, E>,
    ) -> std::result::Result<String, E> {
        let Some(folder) = self.folder() else {
            return make();
        };
        let path = entry::note_path(folder, &key.to_string());
        let kept = || fs::read_to_string(&path).ok().filter(|text| sound(text));
        if let Some(text) = kept() {
            return Ok(text);
        }
        let lock = self.lock(key);
        if lock.is_some()
            && let Some(text) = kept()
        {
            // Another process made it while we waited.
            return Ok(text);
        }
        let text = make()?;
        if lock.is_some()
            && let Err(error) = entry::write_atomically(folder, &path, text.as_bytes())
        {
            self.warn_once("writing to", &error);
        }
        Ok(text)
    }

    /// All entries, last used first.
    ///
    /// # Errors
    /// [`CpuError::Io`] when the folder exists but cannot be read.
    pub fn list(&self) -> Result<Vec<CacheEntry>> {
        let Some(folder) = self.folder() else {
            return Ok(Vec::new());
        };
        let mut entries: Vec<CacheEntry> = Vec::new();
        for key in keys(folder).map_err(CpuError::io("reading", folder))? {
            let description = entry::description_path(folder, &key);
            let size = |path: &Path| fs::metadata(path).map_or(0, |data| data.len());
            let name = fs::read(&description)
                .ok()
                .and_then(|text| serde_json::from_slice::<entry::Description>(&text).ok())
                .map_or_else(String::new, |description| description.name);
            entries.push(CacheEntry {
                bytes: size(&description) + size(&entry::object_path(folder, &key)),
                last_used: fs::metadata(&description)
                    .and_then(|data| data.modified())
                    .unwrap_or(SystemTime::UNIX_EPOCH),
                name,
                key,
            });
        }
        entries.sort_by(|a, b| b.last_used.cmp(&a.last_used).then_with(|| a.key.cmp(&b.key)));
        Ok(entries)
    }

    /// Bytes on disk of all entries.
    ///
    /// # Errors
    /// [`CpuError::Io`] when the folder exists but cannot be read.
    pub fn size(&self) -> Result<u64> {
        Ok(self.list()?.iter().map(|entry| entry.bytes).sum())
    }

    /// Removes all entries; returns how many there were and the bytes freed.
    ///
    /// # Errors
    /// [`CpuError::Io`] when an entry cannot be removed.
    pub fn clear(&self) -> Result<(usize, u64)> {
        let Some(folder) = self.folder() else {
            return Ok((0, 0));
        };
        let entries = self.list()?;
        for entry in &entries {
            entry::remove(folder, &entry.key).map_err(CpuError::io("removing an entry of", folder))?;
        }
        entry::remove_notes(folder).map_err(CpuError::io("removing an entry of", folder))?;
        Ok((entries.len(), entries.iter().map(|entry| entry.bytes).sum()))
    }

    /// The lock of `key`, waiting for whoever holds it; `None` when the folder cannot be written. Released on
    /// drop.
    fn lock(&self, key: &CacheKey) -> Option<File> {
        let folder = self.folder()?;
        let take = || -> io::Result<File> {
            fs::create_dir_all(folder)?;
            let path = entry::lock_path(folder, &key.to_string());
            let file = File::options().create(true).append(true).open(path)?;
            match file.lock() {
                // No locks on this file system: build without, as the module says.
                Err(error) if error.kind() == io::ErrorKind::Unsupported => Ok(file),
                other => other.map(|()| file),
            }
        };
        take().map_err(|error| self.warn_once("writing to", &error)).ok()
    }

    fn store(&self, key: &CacheKey, object: &Path, name: &str, payload: &str) {
        let Some(folder) = self.folder() else { return };
        let key = key.to_string();
        match entry::write(folder, &key, object, name, payload) {
            Ok(()) => self.evict(folder, &key),
            Err(error) => self.warn_once("writing to", &error),
        }
    }

    /// Removes the entries used longest ago until the rest fits the limit. `newest` stays.
    fn evict(&self, folder: &Path, newest: &str) {
        let Ok(entries) = self.list() else { return };
        let mut total: u64 = entries.iter().map(|entry| entry.bytes).sum();
        for old in entries.iter().rev().filter(|entry| entry.key != newest) {
            if total <= self.inner.limit {
                return;
            }
            match entry::remove(folder, &old.key) {
                Ok(()) => {
                    tracing::debug!(key = old.key, bytes = old.bytes, "evicted from the cache");
                    total -= old.bytes;
                }
                Err(error) => self.warn_once("removing an old entry of", &error),
            }
        }
    }

    fn warn_once(&self, action: &str, error: &io::Error) {
        if !self.inner.warned.swap(true, Ordering::Relaxed) {
            let folder = self
                .folder()
                .map_or_else(String::new, |folder| folder.display().to_string());
            tracing::warn!(
                "{action} the cache {folder}: {error}; steps are compiled for this process alone (set \
                 KILN_CACHE_DIR to a folder that can be written)"
            );
        }
    }
}

/// Keys of the entries in `folder`, also of incomplete ones; none if there is no such folder.
fn keys(folder: &Path) -> io::Result<Vec<String>> {
    let files = match fs::read_dir(folder) {
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
    let mut keys: Vec<String> = files
        .filter_map(|file| file.ok()?.file_name().into_string().ok())
        .filter_map(|name| {
            let key = name.strip_suffix(".json").or_else(|| name.strip_suffix(".so"))?;
            (key.len() == 64).then(|| key.to_owned())
        })
        .collect();
    keys.sort();
    keys.dedup();
    Ok(keys)
}
