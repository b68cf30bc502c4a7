//! Tensors that the program needs or drops: they are in the table, or pending in a session of this thread
//! or another.

use std::panic::resume_unwind;
use std::sync::Arc;

use burn_ir::{TensorId, TensorIr, TensorStatus};

use super::super::breaks::BreakReason;
use super::super::recording::Killed;
use super::super::wish::Wish;
use super::rehearsal::is_rehearsing;
use super::{Aborted, CURRENT, LAZY, SESSIONS, Shared, lock};
use crate::error::Error;
use crate::storage::Storage;
use crate::table::{self, Slot};

/// The elements of a tensor, wherever it is. Removes it from the table if `ir` is its last use.
pub fn fetch(ir: &TensorIr, reason: BreakReason) -> Result<Storage, Error> {
    if is_rehearsing() {
        resume_unwind(Box::new(Aborted));
    }
    // A thread that is ending is in no region any more.
    if let Ok(Some(session)) = CURRENT.try_with(|current| current.borrow().clone()) {
        let mut session = lock(&session);
        session.region.note_host_read(ir, &reason);
        if session.parent.is_some() {
            // Nothing has elements here, and nothing is cut for them.
            let _ = session.cut(reason, Some(ir.id));
            drop(session);
            resume_unwind(Box::new(Aborted));
        }
    }
    let last_use = ir.status == TensorStatus::ReadWrite;
    let found = match take(ir.id, last_use) {
        Some(found) => found,
        None => {
            cut_own(ir.id, reason)?;
            take(ir.id, last_use).unwrap_or_else(|| wait_for(ir.id, last_use))
        }
    };
    if last_use {
        kill_own(ir.id);
    }
    match found {
        Slot::Ready(tensor) => Ok(tensor),
        Slot::Failed(reason) => Err(Error::NoValue { reason }),
    }
}

/// Breaks this thread's own session if the tensor is pending in it. Under `fullgraph` the region is left at
/// once.
fn cut_own(id: TensorId, reason: BreakReason) -> Result<(), Error> {
    for session in own_sessions() {
        let mut session = lock(&session);
        if session.recording.is_pending(id) {
            let result = session.cut(reason, Some(id));
            let leave = matches!(result, Err(Error::GraphBreak { .. }));
            drop(session);
            if leave {
                resume_unwind(Box::new(Aborted));
            }
            return result;
        }
    }
    Ok(())
}

/// The sessions this thread records into.
pub(super) fn own_sessions() -> Vec<Shared> {
    let current = CURRENT
        .try_with(|current| current.borrow().clone())
        .ok()
        .flatten();
    let lazy = LAZY.try_with(|lazy| {
        lazy.borrow()
            .iter()
            .map(|(_, session)| session.clone())
            .collect::<Vec<_>>()
    });
    current.into_iter().chain(lazy.unwrap_or_default()).collect()
}

/// Materialises a tensor that is not in the table because some session, on this thread or another, has it
/// pending. Removes it from the table if no other use is possible: with `last_use`, or if a recording
/// regards it as consumed.
pub(super) fn wait_for(id: TensorId, last_use: bool) -> Slot {
    let wish = Wish::new(id);
    let own = own_sessions();
    let all = lock(&SESSIONS).clone();
    for session in &all {
        let mut guard = lock(session);
        if guard.recording.is_result(id) {
            let is_own = own.iter().any(|it| Arc::ptr_eq(it, session));
            let reason = match is_own {
                true => BreakReason::OutsideOperation,
                false => BreakReason::OtherThread,
            };
            // The error, if any, is in the table, and `run` of that session reports it too.
            let _ = guard.cut(reason, Some(id));
            // Still under the lock: the session's thread may be about to consume the tensor.
            return take(id, last_use || wish.was_consumed()).unwrap_or_else(never_computed);
        }
    }
    // Between looking at the table and at the sessions, the owner may have run by itself.
    take(id, last_use || wish.was_consumed()).unwrap_or_else(never_computed)
}

fn never_computed() -> Slot {
    Slot::Failed("it was never computed".into())
}

/// The table's entry for a tensor; it leaves the table with its last use.
fn take(id: TensorId, last_use: bool) -> Option<Slot> {
    match last_use {
        true => table::remove(id),
        false => table::get(id),
    }
}

/// A tensor was dropped.
pub(super) fn release(id: TensorId) {
    if matches!(kill_own(id), Killed::Result | Killed::Borrowed) || table::discard(id) {
        return;
    }
    let all = lock(&SESSIONS).clone();
    for session in &all {
        if lock(session).recording.kill(id) == Killed::Result {
            return;
        }
    }
    // Its session may have run since.
    table::remove(id);
}

/// Tells this thread's recordings that the program will not use a tensor any more; returns its role there.
/// Called for every tensor that is dropped, so it allocates nothing.
fn kill_own(id: TensorId) -> Killed {
    let kill = |session: &Shared| lock(session).recording.kill(id);
    // A thread that is ending has no sessions any more.
    let in_region = CURRENT.try_with(|current| current.borrow().as_ref().map(|session| kill_in(session, id)));
    match in_region {
        Ok(Some(killed)) if killed != Killed::Unknown => return killed,
        _ => {}
    }
    let in_lazy = LAZY.try_with(|sessions| {
        let sessions = sessions.borrow();
        let mut killed = sessions.iter().map(|(_, session)| kill(session));
        killed.find(|&killed| killed != Killed::Unknown)
    });
    in_lazy.ok().flatten().unwrap_or(Killed::Unknown)
}

/// Tells the recording of a region, or of a function inside of one, that the program will not use a tensor
/// any more.
fn kill_in(session: &Shared, id: TensorId) -> Killed {
    let mut session = lock(session);
    match (session.recording.kill(id), &session.parent) {
        (Killed::Input, Some(_)) => Killed::Borrowed,
        (Killed::Unknown, Some(parent)) => kill_in(parent, id),
        (killed, _) => killed,
    }
}
