//! Resources that all compiled steps of the process share: thread pools, the C compiler, the disk cache.

use std::collections::HashMap;
use std::sync::{Arc, LazyLock, Mutex, PoisonError};

use kiln_cpu::{Cache, CpuError, ThreadPool, Toolchain};

use crate::execute::ExecuteError;

/// The pool of each number of threads: steps of one program share it.
static POOLS: LazyLock<Mutex<HashMap<usize, Arc<ThreadPool>>>> = LazyLock::new(Mutex::default);

pub(super) fn pool(threads: usize) -> Arc<ThreadPool> {
    let threads = match threads {
        0 => std::thread::available_parallelism().map_or(1, usize::from),
        threads => threads,
    };
    let mut pools = POOLS.lock().unwrap_or_else(PoisonError::into_inner);
    pools
        .entry(threads)
        .or_insert_with(|| Arc::new(ThreadPool::new(threads)))
        .clone()
}

/// The C compiler that steps are built with, found and tried once: a compiler that has compiled something
/// wrongly is passed over.
///
/// # Errors
///
/// [`ExecuteError::NoCompiler`], with what was tried.
pub fn toolchain() -> Result<&'static Toolchain, ExecuteError> {
    static TOOLCHAIN: LazyLock<Result<Toolchain, Arc<CpuError>>> = LazyLock::new(|| {
        Toolchain::find(|toolchain| kiln_cpu::try_compiler(toolchain, &CACHE)).map_err(Arc::new)
    });
    TOOLCHAIN
        .as_ref()
        .map_err(|error| ExecuteError::NoCompiler(error.clone()))
}

/// The disk cache of compiled steps.
pub(super) static CACHE: LazyLock<Cache> = LazyLock::new(Cache::from_env);
