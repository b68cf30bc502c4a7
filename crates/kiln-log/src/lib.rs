//! Warnings and errors that are seen.
//!
//! Kiln falls back to something slower in a few places, and says so once. It does with `tracing`, whose
//! events go nowhere in a program without a subscriber, and most programs have none. To install one for them
//! would make a later `tracing_subscriber::fmt().init()` of theirs panic. So [`warn!`] looks whether anybody
//! listens, and writes to standard error if nobody does.

use std::io::IsTerminal;

use tracing::Dispatch;
use tracing::level_filters::LevelFilter;
use tracing::subscriber::NoSubscriber;

#[doc(hidden)]
pub use tracing;

/// `tracing::warn!`, which is written to standard error if no subscriber listens.
///
/// ```
/// let error = std::io::Error::other("a full disk");
/// kiln_log::warn!(target: "kiln", %error, "nothing is kept for the next process");
/// ```
#[macro_export]
macro_rules! warn {
    ($($what:tt)*) => {
        $crate::at!($crate::tracing::Level::WARN, $($what)*)
    };
}

/// `tracing::error!`, which is written to standard error if no subscriber listens: for what no caller can be
/// given as an error, on a thread without a caller or before the process ends.
#[macro_export]
macro_rules! error {
    ($($what:tt)*) => {
        $crate::at!($crate::tracing::Level::ERROR, $($what)*)
    };
}

#[doc(hidden)]
#[macro_export]
macro_rules! at {
    ($level:expr, target: $target:expr, $($what:tt)*) => {
        $crate::heard(|| $crate::tracing::event!(target: $target, $level, $($what)*))
    };
    ($level:expr, $($what:tt)*) => {
        $crate::heard(|| $crate::tracing::event!($level, $($what)*))
    };
}

/// Runs `event` for this thread's subscriber, or, where there is none, for one that writes to standard error.
pub fn heard(event: impl FnOnce()) {
    if is_heard() {
        event();
    } else {
        tracing::dispatcher::with_default(&on_standard_error(), event);
    }
}

/// Whether this thread's events have a subscriber.
fn is_heard() -> bool {
    tracing::dispatcher::get_default(|subscriber| !subscriber.is::<NoSubscriber>())
}

fn on_standard_error() -> Dispatch {
    let subscriber = tracing_subscriber::fmt()
        .with_max_level(LevelFilter::WARN)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        .without_time()
        // Where standard error is closed there is nobody to tell, and telling panics.
        .log_internal_errors(false)
        .finish();
    Dispatch::new(subscriber)
}
