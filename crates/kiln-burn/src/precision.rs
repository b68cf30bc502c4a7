//! Which operations autocast leaves as they are.

use std::cell::Cell;

thread_local! {
    /// How many calls of [`full_precision`] this thread is in.
    static DEPTH: Cell<u32> = const { Cell::new(0) };
}

/// Runs `part`, and keeps its operations and their gradients in f32 when the step that records them is
/// compiled with autocast ([`crate::CompileOptions::with_autocast`]). Without autocast this changes
/// nothing.
///
/// Losses are f32 anyway. Put sums here in which many small changes add up, such as the residual stream of a
/// deep network whose branches are scaled down: in 16 bits changes of less than half a unit of the sum's last
/// place (0.2 to 0.4 % of the sum in bf16) are lost.
///
/// ```
/// let five = kiln_burn::full_precision(|| 2 + 3);
/// assert_eq!(five, 5);
/// ```
pub fn full_precision<R>(part: impl FnOnce() -> R) -> R {
    /// Leaves the call, when it panics, too.
    struct Inside;
    impl Drop for Inside {
        fn drop(&mut self) {
            DEPTH.set(DEPTH.get() - 1);
        }
    }
    DEPTH.set(DEPTH.get() + 1);
    let _inside = Inside;
    part()
}

/// Whether this thread is in [`full_precision`].
pub(crate) fn is_full() -> bool {
    DEPTH.get() > 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_leaves_the_call() {
        assert!(!is_full());
        full_precision(|| {
            assert!(full_precision(is_full));
            assert!(is_full());
        });
        let panic = std::panic::catch_unwind(|| full_precision(|| panic!("inside")));
        assert!(panic.is_err() && !is_full());
    }
}
