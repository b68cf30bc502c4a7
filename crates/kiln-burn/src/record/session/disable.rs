//! Parts of a program that are not recorded, wherever they run.

use std::cell::Cell;
use std::panic::resume_unwind;

use super::rehearsal::is_rehearsing;
use super::{Aborted, CURRENT, Shared, lock};
use crate::record::breaks::BreakReason;

thread_local! {
    /// How many calls of [`disable`] this thread is in.
    static DISABLED: Cell<usize> = const { Cell::new(0) };
}

/// Whether this thread is inside of [`disable`]. A thread that is ending is not.
pub fn is_disabled() -> bool {
    DISABLED.try_with(|depth| depth.get() > 0).unwrap_or(false)
}

/// Runs `closure` with its operations run at once, in whatever region and on whatever device: the region
/// under way is cut here, and goes on with another segment afterwards.
///
/// # Panics
///
/// With the panic of `closure`. If the region cannot be cut, because it is compiled with `fullgraph` or its
/// recording so far fails, the region is left at once, and its `run` returns the error.
pub fn disable<R>(closure: impl FnOnce() -> R) -> R {
    if is_rehearsing() {
        // Operations of a rehearsal have no elements.
        resume_unwind(Box::new(Aborted));
    }
    if let Some(session) = CURRENT.with_borrow(Clone::clone) {
        let mut session = lock(&session);
        let segment = session.segment;
        let cut = session.cut(BreakReason::Disabled, None);
        // Operations after this part may need its results: even where nothing was recorded before, the
        // region is in parts.
        if session.segment == segment {
            session.segment += 1;
            session.look_up_lines();
        }
        drop(session);
        if cut.is_err() {
            resume_unwind(Box::new(Aborted));
        }
    }
    let _outside = Outside::new();
    closure()
}

/// Takes the thread out of its region; undone on drop, also by a panic.
struct Outside(Option<Shared>);

impl Outside {
    fn new() -> Self {
        DISABLED.set(DISABLED.get() + 1);
        Self(CURRENT.with_borrow_mut(Option::take))
    }
}

impl Drop for Outside {
    fn drop(&mut self) {
        CURRENT.with_borrow_mut(|current| *current = self.0.take());
        DISABLED.set(DISABLED.get() - 1);
    }
}
