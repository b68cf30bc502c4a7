//! Parts of a recording that are recorded by themselves: functions that are one operation of a region
//! ([`super::super::inline`]).
//!
//! While such a function is recorded, a session of its own is the thread's current one, and the region's
//! waits. An operand that is pending there is an input without elements here, because a part never runs. A
//! tensor that the function uses for the last time stays with the region until the operation is recorded
//! there, which is its last use then.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::{Arc, Mutex};

use burn_ir::{OperationIr, TensorId};

use super::compiled::{Entered, Listed};
use super::{CURRENT, Session, Shared, is_rehearsing, lock, record, refuse_two_places, release};
use crate::error::Error;
use crate::options::CompileOptions;
use crate::random::Stream;
use crate::record::recording::Recorded;
use crate::record::region::{HostRead, Region};
use crate::record::sighting::Lines;
use crate::record::step::panic_message;

/// Whether operations of this thread are recorded into a region, or into a function inside of one.
pub fn is_inside_region() -> bool {
    CURRENT.with_borrow(Option::is_some) && !is_rehearsing()
}

/// Why a part could not be recorded.
#[derive(Debug)]
pub struct Interrupted {
    /// What interrupted it: a graph break, which a part has no elements for.
    pub error: Error,
    /// The tensor that was read on the host, if that was it.
    pub read: Option<HostRead>,
}

/// Records `closure` by itself, as a part of the recording of the region under way. Its inputs may be pending
/// there. Inputs that end in it ([`Input::tensor_dies`](crate::record::recording::Input::tensor_dies)) stay
/// where they are: they end with the operation that the region records for the part, or are let go of.
///
/// # Errors
///
/// If the closure reads a value, or another thread needs one of its tensors. The closure is left at once.
///
/// # Panics
///
/// With the panic of `closure`; its recording is discarded.
pub fn record_part<T>(name: &str, closure: impl FnOnce() -> T) -> Result<(T, Recorded), Box<Interrupted>> {
    let parent = CURRENT.with_borrow(Clone::clone);
    let (segment, lines) = parent.as_ref().map_or((0, None), take_lines);
    let mut region = Region::for_part(CompileOptions::default().with_name(name));
    region.on_placeholders = true;
    let mut session = Session::new(region, false);
    session.parent.clone_from(&parent);
    session.lines = lines;
    let session = Arc::new(Mutex::new(session));
    // Other threads find the session: what they do with its tensors is an error.
    let listed = Listed::new(session.clone());
    let result = {
        let _entered = Entered::new(session.clone());
        catch_unwind(AssertUnwindSafe(closure))
    };
    let (ended, read, left, lines) = {
        let mut session = lock(&session);
        let ended = end(&mut session, result);
        let left = std::mem::take(&mut session.left);
        (ended, session.region.host_read.take(), left, session.lines.take())
    };
    drop(listed);
    if let Some(parent) = &parent {
        give_back(parent, segment, lines);
    }
    left.into_iter().for_each(release);
    match ended {
        Ended::Whole(value, recorded) => Ok((value, *recorded)),
        Ended::Failed(error) => Err(Box::new(Interrupted { error, read })),
        Ended::Panicked(payload) => resume_unwind(payload),
    }
}

/// How the recording of a part ended.
enum Ended<T> {
    Whole(T, Box<Recorded>),
    Failed(Error),
    Panicked(Box<dyn Any + Send>),
}

fn end<T>(session: &mut Session, result: std::thread::Result<T>) -> Ended<T> {
    match (result, session.error.take()) {
        (Ok(value), None) => Ended::Whole(value, Box::new(session.take_recording())),
        (_, Some(error)) => {
            session.discard(&error.to_string());
            Ended::Failed(error)
        }
        (Err(payload), None) => {
            let name = session.region.options.name.clone();
            session.discard(&format!(
                "the function `{name}` panicked: {}",
                panic_message(&*payload)
            ));
            Ended::Panicked(payload)
        }
    }
}

/// The region's look-ups of lines, which a part goes on with, and the segment they belong to.
fn take_lines(region: &Shared) -> (usize, Option<Lines>) {
    let mut region = lock(region);
    (region.segment, region.lines.take())
}

/// Returns the look-ups of lines, unless another thread has cut the region meanwhile.
fn give_back(region: &Shared, segment: usize, lines: Option<Lines>) {
    let mut region = lock(region);
    if region.segment == segment {
        region.lines = lines;
    }
}

/// Whether the tensor is a result of the recording of `parent`, or of one that this is a part of.
pub(super) fn is_pending_above(mut parent: Option<Shared>, id: TensorId) -> bool {
    while let Some(session) = parent {
        let session = lock(&session);
        if session.recording.is_result(id) {
            return true;
        }
        parent = session.parent.clone();
    }
    false
}

/// Records the operation of a part, with the streams that it has drawn. `host_data` are operands that it has
/// made from data on the host. Returns false outside of regions, where nothing is recorded.
pub(crate) fn record_function(operation: OperationIr, drawn: &[Stream], host_data: &[TensorId]) -> bool {
    let Some(session) = CURRENT.with_borrow(Clone::clone) else {
        return false;
    };
    refuse_two_places(&operation);
    let mut guard = lock(&session);
    host_data
        .iter()
        .for_each(|&id| guard.recording.note_host_data(id));
    drop(guard);
    record(&session, operation, drawn);
    true
}

/// Lets go of a tensor that a part has used for the last time.
pub(crate) fn let_go(id: TensorId) {
    release(id);
}
