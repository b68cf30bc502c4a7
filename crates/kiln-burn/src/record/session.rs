//! Sessions: the threads that record into regions, and the events that end a recording early.
//!
//! A [`Session`] is a region with the recording under way in it. `run` makes its session the thread's
//! current one for the time of the closure; the thread's operations go there, and operations of other
//! threads run eagerly. A device in lazy mode has one session for each thread, current whenever no region
//! is.
//!
//! A tensor that is pending in a session is not in the table. A thread that needs its elements finds the
//! session that has it and *breaks* it: the operations recorded so far are compiled and run, and recording
//! continues with an empty recording. A thread never waits for a session while it holds another one:
//! operands pending elsewhere are materialised before its own session is locked.

mod compiled;
mod disable;
mod part;
mod rehearsal;
mod single;
mod tensors;

use std::cell::RefCell;
use std::panic::resume_unwind;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use burn_backend::TensorData;
use burn_flex::FlexTensor;
use burn_ir::{OperationIr, TensorId, TensorIr};
use kiln_profile::Category;

use super::breaks::{BreakReason, GraphBreak};
use super::deferred;
use super::host_operations;
use super::location::user_location;
use super::recording::{Recorded, Recording};
use super::region::Region;
use super::salvage;
use super::sighting::{Lines, Sighting};
use super::wish;
use crate::device::{KilnDevice, Mode};
use crate::error::Error;
use crate::options::{CompileBackend, CompileOptions};
use crate::random::Stream;
use crate::storage::Storage;
use crate::table::{self, Slot, User};
use crate::{eager, random, stream};
pub use compiled::{CompiledRegion, Traced};
pub use disable::{disable, is_disabled};
use part::is_pending_above;
pub use part::{Interrupted, is_inside_region, record_part};
pub(crate) use part::{let_go, record_function};
pub use rehearsal::rehearse;
use rehearsal::{is_rehearsing, offer_to_rehearsal};
pub use tensors::fetch;
use tensors::{own_sessions, release, wait_for};

/// A lazy recording is run when it reaches this many operations: a loop that never reads a value must not
/// grow for ever.
const LAZY_LENGTH: usize = 20_000;

/// Steps a lazy session keeps.
const LAZY_STEPS: usize = 64;

/// A region and its recording.
struct Session {
    region: Region,
    recording: Recording,
    segment: usize,
    /// When the first operation of the recording came.
    since: Instant,
    /// The first error of this call; reported when `run` ends.
    error: Option<Error>,
    lazy: bool,
    /// Finds the user's line of each operation (in a lazy session, of those that take indices); none while
    /// the recording is expected to be a known step.
    lines: Option<Lines>,
    /// The thread whose operations these are. Another one may run them, if it needs one of their results.
    thread: Arc<User>,
    /// The session of which this one records a part: a function that is going to be one operation there. Such
    /// a recording never runs, and its inputs may be tensors that are pending there.
    parent: Option<Shared>,
    /// Inputs that a discarded part would have let go of.
    left: Vec<TensorId>,
}

type Shared = Arc<Mutex<Session>>;

thread_local! {
    /// The region this thread is in.
    static CURRENT: RefCell<Option<Shared>> = const { RefCell::new(None) };
    /// This thread's lazy sessions.
    static LAZY: RefCell<Vec<(CompileBackend, Shared)>> = const { RefCell::new(Vec::new()) };
}

/// Sessions that may have pending tensors, for threads that look for one.
static SESSIONS: Mutex<Vec<Shared>> = Mutex::new(Vec::new());

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // A panic while a session is locked can only come from a broken invariant of this crate; its recording
    // is then discarded like any other.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The payload that unwinds a thread when a break is an error. `run` catches it.
struct Aborted;

impl Session {
    fn new(region: Region, lazy: bool) -> Self {
        Self {
            region,
            recording: Recording::new(table::id_watermark()),
            segment: 0,
            since: Instant::now(),
            error: None,
            lazy,
            lines: lazy.then(Lines::default),
            thread: table::this_thread(),
            parent: None,
            left: Vec::new(),
        }
    }

    fn begin(&mut self) {
        self.region.begin();
        self.recording = Recording::new(table::id_watermark());
        self.thread = table::this_thread();
        self.segment = 0;
        self.error = None;
        self.look_up_lines();
    }

    /// Looks lines up while the region has no compiled step for this segment: recording one costs little
    /// beside compiling it, and much beside running it.
    fn look_up_lines(&mut self) {
        self.lines = match !self.lazy && self.region.has_compiled(self.segment) {
            true => None,
            false => Some(self.lines.take().unwrap_or_default()),
        };
    }

    /// Runs the last recording and ends the call. The value that its closure returned must not be dropped
    /// before the session is unlocked: dropping a tensor locks it.
    fn end(&mut self) -> Result<(), Error> {
        self.flush();
        self.error.take().map_or(Ok(()), Err)
    }

    /// The recording; the session continues with an empty one.
    fn take_recording(&mut self) -> Recorded {
        wish::grant(&mut self.recording);
        std::mem::replace(&mut self.recording, Recording::new(table::id_watermark())).finish()
    }

    /// Runs the recording; the session continues with an empty one.
    fn flush(&mut self) {
        if self.recording.is_empty() {
            return;
        }
        let recorded = self.take_recording();
        let segment = self.segment;
        if !self.lazy {
            self.segment += 1;
        }
        self.region.recorded_in = self.since.elapsed();
        let run = || self.region.run(segment, recorded);
        if let Err(error) = table::acting_for(&self.thread, run) {
            tracing::info!(target: "kiln", "{error}");
            self.error.get_or_insert(error);
        }
        self.look_up_lines();
    }

    /// Ends the recording of a closure that has panicked. Without Kiln its tensors would have values, and the
    /// program may go on with those that it has put somewhere: they are salvaged, or computed when they are
    /// used.
    fn leave(&mut self) {
        let recorded = self.take_recording();
        match self.region.salvages {
            true => salvage::run(&self.region.options, recorded),
            false => deferred::enter(&self.region.options, recorded),
        }
    }

    /// Discards the recording; its tensors report `reason`, unless they are salvaged.
    fn discard(&mut self, reason: &str) {
        let recorded = self.take_recording();
        if self.parent.is_some() {
            let ended = recorded.inputs.iter().filter(|input| input.tensor_dies());
            self.left.extend(ended.map(|input| input.ir.id));
        }
        if self.region.salvages {
            return salvage::run(&self.region.options, recorded);
        }
        let reason: Arc<str> = reason.into();
        recorded
            .output_ids
            .into_iter()
            .for_each(|id| table::fail(id, reason.clone()));
    }

    /// Cuts the recording because a value is needed. Under `fullgraph` that is an error and the recording
    /// is discarded; so it is in a part of another recording.
    fn cut(&mut self, reason: BreakReason, wanted: Option<TensorId>) -> Result<(), Error> {
        if !self.lazy {
            let operation = wanted.and_then(|id| self.recording.producer(id));
            let graph_break = GraphBreak {
                operation,
                method: match reason {
                    BreakReason::Read => host_operations::running(),
                    _ => None,
                },
                reason,
                location: user_location(),
            };
            if self.region.options.fullgraph || self.parent.is_some() {
                let region = self.region.options.name.clone();
                let error = Error::GraphBreak {
                    region,
                    graph_break: Box::new(graph_break),
                };
                self.discard(&error.to_string());
                self.error = Some(error.clone());
                return Err(error);
            }
            self.region.note_break(graph_break);
        }
        self.flush();
        match (self.lazy, &self.error) {
            // A lazy session has no `run` that would report it.
            (true, Some(_)) => self.error.take().map_or(Ok(()), Err),
            (false, Some(error)) => Err(error.clone()),
            (_, None) => Ok(()),
        }
    }

    /// Appends an operation whose operands are all known. It draws from the streams `drawn`, and then from
    /// the generator's.
    fn record(&mut self, operation: OperationIr, drawn: &[Stream]) {
        if self.recording.is_empty() {
            self.since = Instant::now();
        }
        if let Some(lines) = &mut self.lines {
            // A lazy session records as it goes: it looks only for what an error needs.
            let seen = match !self.lazy || stream::takes_indices(&operation) {
                true => lines.current(),
                false => Sighting::default(),
            };
            self.recording.note_line(seen);
        }
        let mut drawn = drawn.iter().copied();
        self.recording
            .push(operation, || drawn.next().unwrap_or_else(random::take));
        for id in self.recording.take_consumed() {
            if self.parent.is_none() {
                table::remove(id);
            }
        }
    }
}

/// The session that operations of this thread on `device` go to; none if they run at once.
fn current(device: KilnDevice) -> Option<Shared> {
    // A thread that is ending has no session any more; only drops happen then.
    if let Some(session) = CURRENT.try_with(|current| current.borrow().clone()).ok()? {
        return Some(session);
    }
    if is_disabled() {
        return None;
    }
    match device.mode() {
        Mode::Lazy(backend) if backend != CompileBackend::Eager => LAZY
            .try_with(|sessions| lazy_session(&mut sessions.borrow_mut(), backend))
            .ok(),
        _ => None,
    }
}

/// Whether operations of this thread on `device` are recorded now.
pub fn is_recording(device: KilnDevice) -> bool {
    is_rehearsing() || current(device).is_some()
}

/// Gives up tensors whose handles the caller keeps only in case the region under way fails: the step may
/// overwrite them as if they had been dropped. If the step fails before it runs, they have their elements
/// again; otherwise a tensor that was overwritten reports that when it is used. Outside a region this does
/// nothing.
pub fn surrender(ids: &[TensorId]) {
    let Some(session) = CURRENT.with_borrow(Clone::clone) else {
        return;
    };
    let mut session = lock(&session);
    for &id in ids {
        if session.recording.surrender(id) {
            table::remove(id);
        }
    }
}

/// Runs the recorded operations that make these tensors at once, and takes them out of the recording of the
/// region under way: the tensors are inputs of the step then. Operations that cannot run at once stay in
/// the step. Outside a region this does nothing.
pub fn hoist(ids: &[TensorId]) {
    let Some(session) = CURRENT.with_borrow(Clone::clone) else {
        return;
    };
    let hoisted = lock(&session).recording.hoist(ids);
    match hoisted {
        Ok(tensors) => tensors
            .into_iter()
            .for_each(|(id, tensor)| table::insert(id, tensor)),
        Err(error) => tracing::debug!(target: "kiln", "not run ahead of the step: {error}"),
    }
}

/// Whether all these tensors have their elements.
pub fn are_ready(ids: &[TensorId]) -> bool {
    ids.iter().all(|&id| table::is_ready(id))
}

/// Notes that this thread makes the tensor `id` from data on the host now.
pub fn note_host_data(id: TensorId, data: &TensorData) {
    rehearsal::note_data(data);
    if let Some(session) = CURRENT.with_borrow(Clone::clone) {
        lock(&session).recording.note_host_data(id);
    }
}

/// Notes that this thread seeds the generator of random numbers now.
pub fn note_seed() {
    if let Some(session) = CURRENT.with_borrow(Clone::clone) {
        lock(&session).region.note_seed();
    }
}

fn lazy_session(sessions: &mut Vec<(CompileBackend, Shared)>, backend: CompileBackend) -> Shared {
    if let Some((_, session)) = sessions.iter().find(|(of, _)| *of == backend) {
        return session.clone();
    }
    let options = CompileOptions::default()
        .with_backend(backend)
        .with_name("lazy")
        .with_recompile_limit(usize::MAX);
    let mut region = Region::new(options);
    region.capacity = LAZY_STEPS;
    let session = Arc::new(Mutex::new(Session::new(region, true)));
    sessions.push((backend, session.clone()));
    let mut all = lock(&SESSIONS);
    // Sessions of threads that ended and left nothing pending.
    all.retain(|session| {
        Arc::strong_count(session) > 1 || session.try_lock().is_ok_and(|it| !it.recording.is_empty())
    });
    all.push(session.clone());
    session
}

/// How far this thread's region has recorded.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Position {
    /// Segment of the region, from 0.
    pub segment: usize,
    /// Operations recorded in it.
    pub operations: usize,
    /// Runtime scalars recorded in it.
    pub scalars: usize,
    /// Tensors read in it that existed before.
    pub inputs: usize,
}

/// How far this thread's region has recorded; none outside a region.
pub fn position() -> Option<Position> {
    let session = CURRENT.with_borrow(Clone::clone)?;
    let session = lock(&session);
    let Session {
        segment, recording, ..
    } = &*session;
    Some(Position {
        segment: *segment,
        operations: recording.len(),
        scalars: recording.num_scalars(),
        inputs: recording.num_inputs(),
    })
}

/// Whether this thread is inside a region or a rehearsal, so that its operations are part of that, or in a
/// part that is not recorded ([`disable()`]).
pub fn is_nested() -> bool {
    CURRENT.with_borrow(Option::is_some) || is_rehearsing() || is_disabled()
}

/// Takes an operation from Burn: records it, or runs it at once.
pub fn submit(device: KilnDevice, operation: OperationIr) {
    // Announces a tensor that is in the table already.
    if let OperationIr::Init(_) = operation {
        return;
    }
    let operation = match is_rehearsing() {
        false => operation,
        true => match offer_to_rehearsal(operation) {
            Some(operation) => operation,
            None => return,
        },
    };
    if let OperationIr::Drop(tensor) = &operation {
        return release(tensor.id);
    }
    refuse_two_places(&operation);
    match current(device) {
        Some(session) => record(&session, operation, &[]),
        None if single::run(&operation) => {}
        None => run_now(&operation),
    }
}

/// Stops the user's program at an operation on tensors that live at two places. Burn's operations return no
/// errors.
fn refuse_two_places(operation: &OperationIr) {
    let mut operands = operation.inputs();
    let Some(first) = operands.next() else { return };
    let place = table::place(first.id);
    if let Some(other) = operands
        .map(|ir| table::place(ir.id))
        .find(|&other| other != place)
    {
        panic!(
            "{}: one operand is on {place} and another on {other}; move one of them with `to_device`",
            stream::name(operation)
        );
    }
}

fn record(session: &Shared, operation: OperationIr, drawn: &[Stream]) {
    let mut guard = lock(session);
    for ir in guard.recording.unknown_operands(&operation) {
        if guard.recording.knows(ir.id) {
            continue; // the same tensor twice among the operands
        }
        let slot = match table::get(ir.id) {
            Some(slot) => slot,
            None => {
                let parent = guard.parent.clone();
                drop(guard);
                let found = match is_pending_above(parent, ir.id) {
                    true => Slot::Ready(Storage::nothing(ir.dtype)),
                    false => wait_for(ir.id, false),
                };
                guard = lock(session);
                found
            }
        };
        match slot {
            Slot::Ready(tensor) => guard.recording.add_input(&ir, tensor),
            Slot::Failed(reason) => {
                let failed = stream::name(&operation);
                drop(guard);
                no_value(&failed, &reason);
            }
        }
    }
    guard.record(operation, drawn);
    if guard.lazy && guard.recording.len() >= LAZY_LENGTH {
        // An error is with the tensors it concerns.
        let _ = guard.cut(BreakReason::Length, None);
    }
}

/// Stops the user's program at an operation whose operand has no value. Burn's operations return no errors.
fn no_value(operation: &str, reason: &str) -> ! {
    panic!("{operation}: an operand has no value: {reason}")
}

/// Runs an operation on burn-flex now.
fn run_now(operation: &OperationIr) {
    let _span = kiln_profile::span_with(Category::Eager, || stream::name(operation).into());
    let mut tensors = Materialised { operation };
    let mut streams = || {
        let random::Stream { seed, stream } = random::take();
        (seed, stream)
    };
    if let Err(error) = eager::run(operation, &mut tensors, &mut streams) {
        panic!("{error}");
    }
}

/// The table, as the eager executor sees it.
struct Materialised<'a> {
    operation: &'a OperationIr,
}

impl eager::TensorStore for Materialised<'_> {
    fn take(&mut self, ir: &TensorIr) -> Result<FlexTensor, eager::OperationError> {
        match fetch(ir, BreakReason::OutsideOperation) {
            Ok(tensor) => Ok(tensor.into_host()),
            Err(error) => no_value(&stream::name(self.operation), &error.to_string()),
        }
    }

    fn put(&mut self, ir: &TensorIr, tensor: FlexTensor) {
        table::insert(ir.id, tensor.into());
    }
}

/// Runs everything this thread has pending.
pub fn sync() -> Result<(), Error> {
    for session in own_sessions() {
        let mut session = lock(&session);
        if session.recording.is_empty() {
            continue;
        }
        let result = session.cut(BreakReason::Sync, None);
        let leave = matches!(result, Err(Error::GraphBreak { .. }));
        drop(session);
        if leave {
            resume_unwind(Box::new(Aborted));
        }
        result?;
    }
    Ok(())
}
