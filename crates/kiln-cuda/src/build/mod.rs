//! From CUDA C++ to machine code for the device at hand.
//!
//! ```text
//! Source ──► key ──► Store (disk) ──hit──► Cubin
//!                       │ miss               ▲
//!                       └──► NVRTC ───────────┘   one program a thread
//! ```
//!
//! Code is made for the device's own architecture (`sm_90a`), not for the portable intermediate language:
//! nothing is left for the driver to compile when a module is loaded. Sources include nothing, since NVRTC
//! brings no headers along. A source that occurs twice in one call is compiled once.
//!
//! NVRTC spends some 30 ms on a program before its first kernel, some 10 of them behind a lock of its own.
//! 128 small kernels took 4.0 s one after the other, 1.5 s as programs of their own on 16 threads, and 0.29
//! s as 16 programs of eight (NVRTC 13.0, on the host of an H200): the emitter should put some eight
//! kernels into each source.

mod architecture;
mod messages;
mod nvrtc;

use std::collections::HashMap;
use std::num::NonZero;
use std::sync::Mutex;
use std::sync::PoisonError;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

pub use architecture::Architecture;
pub use kiln_store::{CacheFolder, Key, Store};

use crate::error::Result;
use crate::libraries::Nvrtc;

/// A program in CUDA C++, whose kernels are declared `extern "C"`.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Source {
    /// Name of the program in messages.
    pub name: String,
    /// The program.
    pub text: String,
}

/// Machine code.
#[derive(Debug, Clone)]
pub struct Cubin {
    /// The image that a module is loaded from.
    pub image: Vec<u8>,
    /// Whether the machine code was on disk.
    pub cached: bool,
    /// Time that NVRTC took; zero if the machine code was on disk.
    pub compile_time: Duration,
}

/// Compiles sources for one architecture.
#[derive(Debug)]
pub struct Compiler {
    nvrtc: Nvrtc,
    architecture: Architecture,
    /// Options besides the architecture.
    options: Vec<String>,
    store: Store,
    threads: NonZero<usize>,
}

/// The store of machine code in the cache.
pub fn code_store(folder: &CacheFolder) -> Store {
    folder.store("cuda-code", "cubin")
}

/// Options of every compilation: the language, and functions that run on the device unless they say
/// otherwise.
const OPTIONS: [&str; 2] = ["--std=c++17", "--device-as-default-execution-space"];

impl Compiler {
    /// A compiler for devices of `capability`, two numbers such as 9 and 0. As many programs are compiled at
    /// a time as the machine has threads.
    ///
    /// # Errors
    /// [`crate::CudaError::UnknownArchitecture`] if NVRTC is older than the device.
    pub fn new(nvrtc: Nvrtc, capability: (u32, u32), store: Store) -> Result<Self> {
        let architecture = Architecture::of(&nvrtc, capability)?;
        Ok(Self {
            nvrtc,
            architecture,
            options: OPTIONS.map(String::from).to_vec(),
            store,
            threads: std::thread::available_parallelism().unwrap_or(NonZero::<usize>::MIN),
        })
    }

    /// Compiles `threads` programs at a time.
    #[must_use]
    pub fn with_threads(mut self, threads: NonZero<usize>) -> Self {
        self.threads = threads;
        self
    }

    /// Adds an option of NVRTC's, such as `--use_fast_math`.
    #[must_use]
    pub fn with_option(mut self, option: impl Into<String>) -> Self {
        self.options.push(option.into());
        self
    }

    /// The architecture that it compiles for.
    pub fn architecture(&self) -> &Architecture {
        &self.architecture
    }

    /// Machine code of each source, in their order.
    ///
    /// # Errors
    /// [`crate::CudaError::Compile`] of the first source that does not compile, [`crate::CudaError::Nvrtc`].
    pub fn compile(&self, sources: &[Source]) -> Result<Vec<Cubin>> {
        let keys: Vec<Key> = sources.iter().map(|source| self.key(source)).collect();
        let mut distinct: Vec<usize> = Vec::new();
        let mut place: HashMap<&Key, usize> = HashMap::new();
        for (index, key) in keys.iter().enumerate() {
            place.entry(key).or_insert_with(|| {
                distinct.push(index);
                distinct.len() - 1
            });
        }
        let made = self.each(&distinct, |index| self.one(&sources[index], &keys[index]));
        let made: Vec<Cubin> = made.into_iter().collect::<Result<_>>()?;
        Ok(keys.iter().map(|key| made[place[key]].clone()).collect())
    }

    /// Whether the machine code of `source` is on disk.
    pub fn has(&self, source: &Source) -> bool {
        self.store.get(&self.key(source)).is_some()
    }

    fn one(&self, source: &Source, key: &Key) -> Result<Cubin> {
        if let Some(found) = self.store.get(key) {
            return Ok(Cubin {
                image: found.content,
                cached: true,
                compile_time: Duration::ZERO,
            });
        }
        let start = Instant::now();
        let image = nvrtc::compile(&self.nvrtc, source, &self.architecture, &self.options)?;
        let compile_time = start.elapsed();
        tracing::debug!(
            source = source.name,
            ?compile_time,
            bytes = image.len(),
            "compiled"
        );
        self.store.put(key, &image, &source.name, "");
        Ok(Cubin {
            image,
            cached: false,
            compile_time,
        })
    }

    /// Everything that the machine code depends on.
    fn key(&self, source: &Source) -> Key {
        let mut parts = vec![
            env!("CARGO_PKG_VERSION"),
            &self.nvrtc.version,
            self.architecture.name(),
            &source.text,
        ];
        parts.extend(self.options.iter().map(String::as_str));
        Key::of(parts)
    }

    /// `work` on each of `items`, on the compiler's threads; results in the order of the items.
    fn each<T: Send>(&self, items: &[usize], work: impl Fn(usize) -> T + Sync) -> Vec<T> {
        let next = AtomicUsize::new(0);
        let done = Mutex::new(Vec::with_capacity(items.len()));
        let take = || {
            while let Some(&item) = items.get(next.fetch_add(1, Ordering::Relaxed)) {
                let result = work(item);
                done.lock()
                    .unwrap_or_else(PoisonError::into_inner)
                    .push((item, result));
            }
        };
        let threads = self.threads.get().min(items.len());
        std::thread::scope(|scope| {
            for _ in 1..threads {
                scope.spawn(take);
            }
            take();
        });
        let mut done = done.into_inner().unwrap_or_else(PoisonError::into_inner);
        // Items are indices in rising order.
        done.sort_by_key(|&(item, _)| item);
        done.into_iter().map(|(_, result)| result).collect()
    }
}
