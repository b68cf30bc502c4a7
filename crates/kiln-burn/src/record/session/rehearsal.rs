//! Rehearsals: operations that are recorded and never run. Host code is executed for its scalars alone.

use std::cell::RefCell;
use std::hash::{Hash as _, Hasher as _};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use burn_backend::TensorData;
use burn_ir::OperationIr;
use rustc_hash::FxHasher;

use super::super::recording::{Killed, Recorded, Recording};
use super::Aborted;
use crate::{random, table};

thread_local! {
    /// A rehearsal under way on this thread.
    static REHEARSAL: RefCell<Option<Recording>> = const { RefCell::new(None) };
}

/// Whether a rehearsal is under way on this thread.
pub(super) fn is_rehearsing() -> bool {
    REHEARSAL
        .try_with(|rehearsal| rehearsal.borrow().is_some())
        .unwrap_or(false)
}

/// Runs `closure` with its operations recorded and never run: host code is executed for its scalars alone.
/// Tensors it makes never get a value, operands may be such tensors of earlier rehearsals, and random
/// operations take no streams. None if the closure read a value.
pub fn rehearse<R>(closure: impl FnOnce() -> R) -> Option<(R, Recorded)> {
    /// Ends the rehearsal also when the closure panics.
    struct Ended;
    impl Drop for Ended {
        fn drop(&mut self) {
            REHEARSAL.with_borrow_mut(|rehearsal| *rehearsal = None);
        }
    }
    let recording = Recording::new(table::id_watermark());
    REHEARSAL.with_borrow_mut(|rehearsal| *rehearsal = Some(recording));
    let ended = Ended;
    let result = catch_unwind(AssertUnwindSafe(closure));
    let recording = REHEARSAL.with_borrow_mut(Option::take);
    drop(ended);
    match result {
        Ok(value) => recording.map(|recording| (value, recording.finish())),
        Err(payload) if payload.is::<Aborted>() => None,
        Err(payload) => resume_unwind(payload),
    }
}

/// Makes the elements of a tensor of the host part of the rehearsal under way, if there is one: with others
/// it is another recording.
pub(super) fn note_data(data: &TensorData) {
    REHEARSAL.with_borrow_mut(|rehearsal| {
        if let Some(recording) = rehearsal.as_mut() {
            let mut hasher = FxHasher::default();
            data.as_bytes().hash(&mut hasher);
            recording.push_word(hasher.finish());
        }
    });
}

/// Hands the operation to the rehearsal under way; gives it back if there is none.
pub(super) fn offer_to_rehearsal(operation: OperationIr) -> Option<OperationIr> {
    REHEARSAL
        .try_with(|rehearsal| {
            let mut rehearsal = rehearsal.borrow_mut();
            let Some(recording) = rehearsal.as_mut() else {
                return Some(operation);
            };
            if let OperationIr::Drop(tensor) = &operation {
                return (recording.kill(tensor.id) != Killed::Result).then_some(operation);
            }
            for ir in operation.inputs() {
                if !recording.knows(ir.id) {
                    recording.add_placeholder(ir);
                }
            }
            recording.push(operation, || random::Stream { seed: 0, stream: 0 });
            for id in recording.take_consumed() {
                table::remove(id);
            }
            None
        })
        .unwrap_or(None)
}
