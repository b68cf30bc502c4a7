//! A word to whoever waits for a compilation that takes long.

use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread;
use std::time::Duration;

use kiln_graph::Graph;
use kiln_log::tracing::dispatcher;

use crate::CompileBackend;

/// How long a compilation goes on without a word. Most take less, see `kiln bench`.
const PATIENCE: Duration = Duration::from_secs(20);

/// Runs `compile`, which compiles `graph` for `backend`, and warns once if that takes longer than
/// [`PATIENCE`]: a program that stands still without a word looks as if it hung.
pub(super) fn compiling<T>(graph: &Graph, backend: CompileBackend, compile: impl FnOnce() -> T) -> T {
    let operations = graph.nodes().count();
    let seconds = PATIENCE.as_secs();
    // A subscriber may be that of the thread which waits.
    let subscriber = dispatcher::get_default(Clone::clone);
    let say = move || {
        dispatcher::with_default(&subscriber, || {
            kiln_log::warn!(
                target: "kiln",
                "a step of {operations} operations has been compiling for {seconds} s on {backend}, and goes on; \
                 later runs take what it makes from the cache"
            );
        });
    };
    saying_so(PATIENCE, say, compile)
}

/// Runs `work`, and `say` on another thread if `work` goes on for longer than `patience`.
fn saying_so<T>(patience: Duration, say: impl FnOnce() + Send + 'static, work: impl FnOnce() -> T) -> T {
    // Dropped when `work` returns, or panics.
    let (_goes_on, end) = channel::<()>();
    let wait = move || {
        if end.recv_timeout(patience) == Err(RecvTimeoutError::Timeout) {
            say();
        }
    };
    // Where no thread can be started nothing is said.
    let _ = thread::Builder::new()
        .name("kiln-patience".to_owned())
        .spawn(wait);
    work()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_waits_long_is_told_while_it_goes_on() {
        let (say, said) = channel();
        let heard = saying_so(
            Duration::ZERO,
            move || say.send("goes on").unwrap(),
            || said.recv(),
        );
        assert_eq!(heard, Ok("goes on"));
    }

    #[test]
    fn who_waits_shortly_is_told_nothing() {
        let (say, said) = channel::<()>();
        let hours = Duration::from_secs(1 << 20);
        assert_eq!(saying_so(hours, move || say.send(()).unwrap(), || 7), 7);
        // The other thread ends, without a word.
        assert!(said.recv().is_err());
    }
}
