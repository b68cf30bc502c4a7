//! Ctrl-C and other requests to end: the step finishes, and the run saves.

use std::sync::atomic::{AtomicU64, Ordering};

/// The exit code of a program that Ctrl-C ended.
pub(super) const INTERRUPTED: u8 = 130;

/// Milliseconds after the first request in which others belong to the same event: a terminal that is closed
/// sends several signals.
const EVENT: u64 = 1000;

static REQUESTS: Requests = Requests::new();

/// Requests to end.
struct Requests {
    /// When the first one came, in milliseconds; 0 if none did.
    first: AtomicU64,
}

impl Requests {
    const fn new() -> Self {
        Self {
            first: AtomicU64::new(0),
        }
    }

    /// Takes one that comes `now`; true if the program is to end at once. `hangup`: nobody is there who could
    /// ask for that.
    fn take(&self, now: u64, hangup: bool) -> bool {
        let first = self
            .first
            .compare_exchange(0, now.max(1), Ordering::SeqCst, Ordering::SeqCst);
        first.is_err_and(|first| !hangup && now.saturating_sub(first) >= EVENT)
    }

    fn are_there(&self) -> bool {
        self.first.load(Ordering::SeqCst) > 0
    }
}

/// Whether the run is to end.
pub(super) fn is_requested() -> bool {
    REQUESTS.are_there()
}

/// Ctrl-C, a request to terminate and a terminal that is closed let the step finish. A request that comes a
/// second later ends the program at once. `nohup` is left alone: a hangup that was ignored when the program
/// started stays ignored.
pub(super) fn install() {
    if let Err(error) = handle() {
        kiln_log::warn!("Ctrl-C will not save a checkpoint: {error}");
    }
}

#[cfg(unix)]
fn handle() -> std::io::Result<()> {
    use std::io::Error;
    use std::mem::zeroed;

    /// Calls nothing but what a signal handler may.
    extern "C" fn handler(signal: libc::c_int) {
        // SAFETY: both may be called in a signal handler; the time is written before it is read.
        unsafe {
            let mut time: libc::timespec = zeroed();
            libc::clock_gettime(libc::CLOCK_MONOTONIC, &mut time);
            let now = time.tv_sec as u64 * 1000 + time.tv_nsec as u64 / 1_000_000;
            if REQUESTS.take(now, signal == libc::SIGHUP) {
                libc::_exit(i32::from(INTERRUPTED));
            }
        }
    }

    for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP] {
        // SAFETY: of an action all zeros are values; the handler lives as long as the program.
        unsafe {
            let mut action: libc::sigaction = zeroed();
            if libc::sigaction(signal, std::ptr::null(), &mut action) != 0 {
                return Err(Error::last_os_error());
            }
            if signal == libc::SIGHUP && action.sa_sigaction == libc::SIG_IGN {
                continue;
            }
            action = zeroed();
            action.sa_sigaction = handler as extern "C" fn(libc::c_int) as usize;
            action.sa_flags = libc::SA_RESTART;
            libc::sigemptyset(&mut action.sa_mask);
            if libc::sigaction(signal, &action, std::ptr::null_mut()) != 0 {
                return Err(Error::last_os_error());
            }
        }
    }
    Ok(())
}

#[cfg(not(unix))]
fn handle() -> Result<(), ctrlc::Error> {
    let start = std::time::Instant::now();
    ctrlc::set_handler(move || {
        // The first one is not at 0.
        if REQUESTS.take(start.elapsed().as_millis() as u64 + 1, false) {
            std::process::exit(i32::from(INTERRUPTED));
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signals_of_one_event_are_one_request() {
        let requests = Requests::new();
        assert!(!requests.are_there());
        assert!(!requests.take(5000, true), "a terminal is closed");
        assert!(requests.are_there());
        assert!(!requests.take(5000, true) && !requests.take(5999, false));
        assert!(!requests.take(60_000, true), "a hangup never ends at once");
        assert!(requests.take(6000, false));
    }
}
