//! Tensors that some thread is about to read.
//!
//! Burn counts the handles of a tensor, and the use of the last handle consumes the tensor. A thread that
//! reads a tensor gives up its handle first and asks for the elements afterwards. Another thread that
//! meanwhile records an operation on its own handle finds that this is the last handle: the recording
//! regards the tensor as consumed and would not compute it. So a reader announces the tensor that it is
//! going to ask for before it waits for a session, and a recording that ends computes announced tensors.

use std::sync::{Mutex, MutexGuard, PoisonError};

use burn_ir::TensorId;

use super::recording::Recording;

/// The tensors that readers wait for, each with whether a recording regards it as consumed.
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

    /// Whether a recording that computed the tensor regarded it as consumed: no handle of it is left, so
    /// only the reader will remove it from the table.
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
