//! Resources that all compiled steps of the process share: thread pools, the C compiler, the disk cache.

use std::collections::HashMap;
use std::sync::{Arc, LazyLock, Mutex, OnceLock, PoisonError};

use kiln_cpu::{Cache, CpuError, Distrust, StepError, ThreadPool, Toolchain};

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
/// wrongly is passed over. One that the machine did not let be tried (a full disk) is tried again.
///
/// # Errors
///
/// [`ExecuteError::NoCompiler`], with what was tried; [`CpuError::Untried`].
pub fn toolchain() -> Result<&'static Toolchain, ExecuteError> {
    static TOOLCHAIN: OnceLock<Result<Toolchain, Arc<CpuError>>> = OnceLock::new();
    static TURN: Mutex<()> = Mutex::new(());
    if TOOLCHAIN.get().is_none() {
        let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        if TOOLCHAIN.get().is_none() {
            // The one who has the turn is the only one to set it.
            let _ = TOOLCHAIN.set(find_toolchain()?);
        }
    }
    let found = TOOLCHAIN.wait().as_ref();
    found.map_err(|error| ExecuteError::NoCompiler(error.clone()))
}

/// The compiler, or that there is none.
fn find_toolchain() -> Result<Result<Toolchain, Arc<CpuError>>, ExecuteError> {
    let mut untried = None;
    let found = Toolchain::find(|toolchain| {
        kiln_cpu::try_compiler(toolchain, &CACHE).map_err(|distrust| {
            let reason = distrust.to_string();
            if let Distrust::Untried(error) = distrust {
                untried.get_or_insert(error);
            }
            reason
        })
    });
    match (found, untried) {
        (Err(_), Some(error)) => Err(ExecuteError::Step(StepError::Cpu(error))),
        (found, _) => Ok(found.map_err(Arc::new)),
    }
}

/// The disk cache of compiled steps.
pub(super) static CACHE: LazyLock<Cache> = LazyLock::new(Cache::from_env);
