//! Tensors that some thread is about to read.
//!
//! Burn counts the handles of a tensor, and the last one to use it consumes it. A thread that reads a tensor
//! gives its handle up first and asks for the elements afterwards. Another thread that meanwhile records an
//! operation on its own handle finds that this is the last one: the recording takes the tensor for consumed
//! and would not compute it for anybody. So a reader says which tensor it is going to ask for before it waits
//! for a session, and a recording that ends computes what is asked for.

use std::sync::{Mutex, MutexGuard, PoisonError};

use burn_ir::TensorId;

use super::recording::Recording;

/// What readers wait for: each tensor with whether a recording has taken it for consumed.
static WISHES: Mutex<Vec<(TensorId, bool)>> = Mutex::new(Vec::new());

fn wishes() -> MutexGuard<'static, Vec<(TensorId, bool)>> {
    // Every critical section leaves a list that can be read: a panic elsewhere changes nothing.
    WISHES.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A reader waits for a tensor as long as this lives.
pub(super) struct Wish(TensorId);

impl Wish {
    pub(super) fn new(id: TensorId) -> Self {
        wishes().push((id, false));
        Self(id)
    }

    /// Whether a recording that computed the tensor had taken it for consumed: no handle of it is left, and
    /// nobody but the reader will take it out of the table.
    pub(super) fn was_consumed(&self) -> bool {
        wishes().iter().any(|&(id, consumed)| id == self.0 && consumed)
    }
}

impl Drop for Wish {
    fn drop(&mut self) {
        let mut wishes = wishes();
        if let Some(position) = wishes.iter().position(|&(id, _)| id == self.0) {
            wishes.swap_remove(position);
        }
    }
}

/// Makes the results of `recording` that readers wait for outlive it.
pub(super) fn grant(recording: &mut Recording) {
    for (id, consumed) in wishes().iter_mut() {
        *consumed |= recording.revive(*id);
    }
}
