//! The end of a process that is connected through NCCL.
//!
//! What NCCL and the driver do at the end of a process may wait for kernels, threads and processes that are
//! not going to end: `ncclCommAbort`, for one, returns no sooner than every graph is destroyed that has its
//! calls. A rank that has printed its error and then stays would keep the launcher from ending the others. So
//! the process has a limited time for its exit handlers, and then ends with the status that it gave itself.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Time for exit handlers.
const ORDERLY: Duration = Duration::from_secs(30);

/// Time for exit handlers where NCCL was given up.
const AFTER_FAILURE: Duration = Duration::from_secs(3);

/// Whether NCCL was given up.
static FAILED: AtomicBool = AtomicBool::new(false);

/// Says that NCCL was given up, and limits the time of all exit handlers.
pub(super) fn note_failure() {
    FAILED.store(true, Ordering::Release);
    limit();
}

/// Limits the time of the exit handlers that are registered so far: the last one registered runs first.
/// Called again it limits that of the later ones, too.
pub(super) fn limit() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: the function lives as long as the process, and takes no argument.
    unsafe {
        handler::on_exit(handler::start_the_clock, std::ptr::null_mut());
    }
}

/// Ends the process now, without exit handlers.
pub(super) fn now(status: i32) -> ! {
    // SAFETY: the call has no conditions.
    unsafe { libc::_exit(status) }
}

#[cfg(all(target_os = "linux", target_env = "gnu"))]
mod handler {
    use std::ffi::{c_int, c_void};

    use super::*;

    unsafe extern "C" {
        /// As `atexit`; the handler is told the status. A function of glibc's.
        pub(super) fn on_exit(function: extern "C" fn(c_int, *mut c_void), argument: *mut c_void) -> c_int;
    }

    pub(super) extern "C" fn start_the_clock(status: c_int, _: *mut c_void) {
        let time = match FAILED.load(Ordering::Acquire) {
            true => AFTER_FAILURE,
            false => ORDERLY,
        };
        let thread = std::thread::Builder::new().name("kiln end".into());
        // Without the thread the process ends as it would without Kiln.
        let _ = thread.spawn(move || {
            std::thread::sleep(time);
            now(status)
        });
    }
}
