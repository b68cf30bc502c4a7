//! Compiled steps on disk ([`kiln_store`]), so that a second process starts without a C compiler.
//!
//! An entry is a shared object, which is loaded from the cache's folder, and beside it the step's plan. Of
//! two processes that want the same step, the first takes the lock of the key and builds; the second waits
//! and then finds the entry. The objects that steps are linked from have a store of their own
//! ([`Objects`]): a program that is started again after an edit compiles the kernels that the edit changed.
//!
//! The cache also keeps small texts that are expensive to produce, such as the verdict on a C compiler
//! ([`Cache::notes`]).

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use kiln_store::{CacheFolder, Key, KeyBuilder, Store};

use crate::build::objects::Objects;
use crate::build::{BuildOptions, SourceFile, Toolchain};
use crate::error::{CpuError, Result};
use crate::runtime::abi::{ABI_VERSION, RUNTIME_HEADER};
use crate::runtime::functions::FunctionLibrary;
use crate::runtime::library::Library;
use crate::target::CPU_SOURCES;

/// Starts the key of a step with what every step depends on: Kiln's version, the ABI, compiler, CPU and build
/// options. Add the rest (graph text, compile options) as fields.
pub fn step_key(toolchain: &Toolchain, options: &BuildOptions) -> KeyBuilder {
    Key::builder()
        .field("kiln", env!("CARGO_PKG_VERSION"))
        .field("abi", ABI_VERSION.to_string())
        .field("header", RUNTIME_HEADER)
        .field("toolchain", toolchain.identity())
        .field("build", options.identity(toolchain))
}

/// The sources that the step compiler hands over when a step is not in the cache.
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

/// A step ready to run, with the text that was stored beside it.
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

/// The cache of compiled steps. Cheap to clone; clones share their state.
#[derive(Debug, Clone)]
pub struct Cache {
    steps: Store,
    /// The objects that steps are linked from.
    objects: Arc<Objects>,
}

/// Loads an object and says how long that took.
fn load(path: &Path) -> Result<(Library, Duration)> {
    let _span = kiln_profile::span(kiln_profile::Category::Compile, "load");
    let start = Instant::now();
    Ok((Library::load(path)?, start.elapsed()))
}

impl Cache {
    /// The cache of this user, where the environment says ([`CacheFolder::from_env`]).
    pub fn from_env() -> Self {
        Self::of(&CacheFolder::from_env())
    }

    /// A cache in `folder` that holds at most `limit` bytes.
    pub fn at(folder: impl Into<PathBuf>, limit: u64) -> Self {
        Self::of(&CacheFolder::at(folder, limit))
    }

    /// No cache: every step is built.
    pub fn disabled() -> Self {
        Self::of(&CacheFolder::disabled())
    }

    /// The cache in the folder of all stores.
    pub fn of(folder: &CacheFolder) -> Self {
        Self {
            steps: folder.store("steps", "so"),
            objects: Arc::new(Objects::in_folder(folder)),
        }
    }

    /// The folder that holds the entries, if there is one.
    pub fn folder(&self) -> Option<&Path> {
        self.steps.folder()
    }

    /// The store of texts that are expensive to produce.
    pub fn notes(&self) -> &Store {
        &self.steps
    }

    /// The step of `key`, if the cache has it, it is sound, and it can be loaded.
    pub fn get(&self, key: &Key) -> Option<CachedStep> {
        self.steps.get_if(key, |found| {
            let (library, load_time) = load(&found.path).map_err(|error| error.to_string())?;
            tracing::debug!(target: "kiln::cache", %key, name = found.name, ?load_time, "hit");
            Ok(CachedStep {
                library,
                payload: found.payload,
                origin: Origin::Cache,
                load_time,
            })
        })
    }

    /// The step of `key` from the cache. If the cache has no such step, `source` is asked for it, and the
    /// step is built, stored and loaded.
    ///
    /// # Errors
    /// Those of `source`, of [`Toolchain::build`] and of [`Library::load`]. Trouble with the cache itself is
    /// a warning.
    pub fn get_or_build<E: From<CpuError>>(
        &self,
        key: &Key,
        toolchain: &Toolchain,
        options: &BuildOptions,
        source: impl FnOnce() -> std::result::Result<StepSource, E>,
    ) -> std::result::Result<CachedStep, E> {
        if let Some(found) = self.get(key) {
            return Ok(found);
        }
        let lock = self.steps.lock(key);
        if lock.is_some()
            && let Some(found) = self.get(key)
        {
            // Another process built it while this one waited.
            return Ok(found);
        }
        let StepSource { name, files, payload } = source()?;
        tracing::debug!(target: "kiln::cache", %key, name, files = files.len(), "miss: the step is built");
        let built = toolchain.build_reusing(&files, options, &self.objects)?;
        // The object is loaded from the folder of its build, so later changes of the cache do not affect
        // it.
        let (library, load_time) = load(built.path())?;
        if lock.is_some() {
            self.steps.put_file(key, built.path(), &name, &payload);
        }
        Ok(CachedStep {
            library,
            payload,
            origin: Origin::Built(built.elapsed),
            load_time,
        })
    }

    /// The functions of `files`, from the cache or built, stored with `payload` and loaded; their key, and where they
    /// came from. Functions have no other identity than their text.
    ///
    /// # Errors
    /// Those of [`Toolchain::build`] and of [`FunctionLibrary::load`]. Trouble with the cache itself is a warning.
    pub(crate) fn functions(
        &self,
        name: &str,
        files: &[SourceFile],
        payload: &str,
        toolchain: &Toolchain,
        options: &BuildOptions,
    ) -> Result<(Key, FunctionLibrary, Origin)> {
        let texts = files.iter().flat_map(|file| [&*file.name, &*file.text]);
        let key = step_key(toolchain, options)
            .field("sources", CPU_SOURCES)
            .field("functions", Key::of(texts).to_string())
            .finish();
        let get = || {
            self.stored_functions(&key)
                .map(|(_, library)| (key, library, Origin::Cache))
        };
        if let Some(found) = get() {
            return Ok(found);
        }
        let lock = self.steps.lock(&key);
        if lock.is_some()
            && let Some(found) = get()
        {
            return Ok(found);
        }
        let built = toolchain.build_reusing(files, options, &self.objects)?;
        let library = FunctionLibrary::load(built.path())?;
        if lock.is_some() {
            self.steps.put_file(&key, built.path(), name, payload);
        }
        Ok((key, library, Origin::Built(built.elapsed)))
    }

    /// The functions under `key` with the text beside them, if the cache has them.
    pub(crate) fn stored_functions(&self, key: &Key) -> Option<(String, FunctionLibrary)> {
        self.steps.get_if(key, |found| {
            let library = FunctionLibrary::load(&found.path).map_err(|error| error.to_string())?;
            Ok((found.payload, library))
        })
    }
}
