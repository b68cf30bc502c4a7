//! Sessions: which thread records into which region, and what ends a recording early.
//!
//! A [`Session`] is a region with the recording under way in it. `run` makes its session the thread's current one for the time of the closure;
//! operations the thread issues go there, operations of other threads run eagerly. A device in lazy mode has one session a thread, current whenever no
//! region is.
//!
//! A tensor that is pending in a session is not in the table. Whoever needs its elements finds the session that has it and *breaks* it: what was recorded so
//! far is compiled and run, and recording goes on with an empty recording. A thread never waits for a session while it holds another one: operands pending
//! elsewhere are materialised before the own session is locked.

use std::cell::RefCell;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use burn_flex::FlexTensor;
use burn_ir::{OperationIr, TensorId, TensorIr, TensorStatus};
use kiln_profile::Category;

use super::breaks::{BreakReason, GraphBreak};
use super::host_operations;
use super::location::user_location;
use super::recording::{Killed, Recorded, Recording};
use super::region::{HostRead, LastRun, Region};
use super::report::RegionReport;
use super::salvage;
use super::sighting::{Lines, Sighting};
use super::step::panic_message;
use super::wish::{self, Wish};
use crate::device::{KilnDevice, Mode};
use crate::error::Error;
use crate::options::{CompileBackend, CompileOptions};
use crate::storage::Storage;
use crate::table::{self, Slot};
use crate::{eager, random, stream};

/// A lazy recording is run when it reaches this many operations: a loop that never reads a value must not grow for ever.
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
    /// Finds the user's line of each operation (of those that take indices, in a lazy session); none while the recording is expected to be a
    /// step that is known.
    lines: Option<Lines>,
    /// Tensors that other threads have read as the last ones. The session's own thread may have an operation on its way that was given such a
    /// tensor before: they stay in the table until what it records next is complete.
    read_elsewhere: Vec<TensorId>,
}

type Shared = Arc<Mutex<Session>>;

thread_local! {
    /// The region this thread is in.
    static CURRENT: RefCell<Option<Shared>> = const { RefCell::new(None) };
    /// A rehearsal under way on this thread.
    static REHEARSAL: RefCell<Option<Recording>> = const { RefCell::new(None) };
    /// This thread's lazy sessions.
    static LAZY: RefCell<Vec<(CompileBackend, Shared)>> = const { RefCell::new(Vec::new()) };
}

/// Sessions that may have pending tensors, for threads that look for one.
static SESSIONS: Mutex<Vec<Shared>> = Mutex::new(Vec::new());

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // A panic while a session is locked can only come from an invariant of ours; its recording is then discarded like any other.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What a thread is unwound with when a break is an error. `run` catches it.
struct Aborted;

/// A closure that is recorded and compiled: the engine behind `kiln::compile`.
pub struct CompiledRegion {
    session: Shared,
    backend: CompileBackend,
    /// Held during a call: threads that share a region take turns.
    turn: Mutex<()>,
}

impl CompiledRegion {
    /// A region that has compiled nothing yet.
    pub fn new(options: CompileOptions) -> Self {
        let backend = options.backend;
        Self {
            session: Arc::new(Mutex::new(Session::new(Region::new(options), false))),
            backend,
            turn: Mutex::default(),
        }
    }

    /// The same region, of which a call that fails has happened as far as it came: what the closure did
    /// before a panic or an error is run on burn-flex. What a function leaves in cells of its own, such as
    /// running statistics, then has a value, as it would have without Kiln.
    pub fn for_function(self) -> Self {
        lock(&self.session).region.salvages = true;
        self
    }

    /// The same region, which remembers what [`Replay`](super::Replay) needs to see of its last run.
    pub fn for_replay(self) -> Self {
        lock(&self.session).region.keeps_host_data = true;
        self
    }

    /// Runs `closure` with its tensor operations recorded, then runs the compiled step. Tensors that outlive the closure have their elements
    /// when `run` returns.
    ///
    /// Inside another region, or with backend `eager`, the closure just runs: the inner region joins the outer one.
    ///
    /// # Errors
    ///
    /// If a break occurs under `fullgraph`, or the step cannot be imported, compiled or run. Tensors the closure left behind then report the error when
    /// they are used.
    ///
    /// # Panics
    ///
    /// With what `closure` panics with; what it recorded is discarded.
    pub fn run<R>(&self, closure: impl FnOnce() -> R) -> Result<R, Error> {
        if self.backend == CompileBackend::Eager || CURRENT.with_borrow(Option::is_some) {
            return Ok(closure());
        }
        let _turn = lock(&self.turn);
        lock(&self.session).begin();
        // Other threads find the session until its results are in the table: who asks for one meanwhile waits.
        let _listed = Listed::new(self.session.clone());
        let value = self.record(closure)?;
        lock(&self.session).end(value)
    }

    /// Records `closure` as [`CompiledRegion::run`] does, and gives the recording to `run_whole` in place of
    /// running it if nothing cut it; a recording that was cut ([`position`] tells the closure) is run like any
    /// other, and `run_whole` is not called. Tensors that outlive the closure have no elements until
    /// `run_whole` enters them into the table. `lines` says whether to look the user's lines up.
    ///
    /// # Errors
    ///
    /// As [`CompiledRegion::run`], and those of `run_whole`.
    ///
    /// # Panics
    ///
    /// As [`CompiledRegion::run`].
    pub fn trace<T, R>(
        &self,
        lines: bool,
        closure: impl FnOnce() -> T,
        run_whole: impl FnOnce(T, Recorded) -> Result<R, Error>,
    ) -> Result<Traced<T, R>, Error> {
        let _turn = lock(&self.turn);
        let _listed = Listed::new(self.session.clone());
        let mut session = lock(&self.session);
        session.begin();
        session.lines = lines.then(Lines::default);
        drop(session);
        let value = self.record(closure)?;
        let mut session = lock(&self.session);
        if session.segment > 0 || session.error.is_some() {
            return session.end(value).map(Traced::Cut);
        }
        let recorded = session.take_recording();
        drop(session);
        run_whole(value, recorded).map(Traced::Whole)
    }

    /// Runs `closure` with its operations recorded. After a panic the recording is gone.
    fn record<T>(&self, closure: impl FnOnce() -> T) -> Result<T, Error> {
        let result = {
            let _entered = Entered::new(self.session.clone());
            let _span = kiln_profile::span(Category::Host, "recording");
            catch_unwind(AssertUnwindSafe(closure))
        };
        match result {
            Ok(value) => Ok(value),
            Err(payload) => {
                let mut session = lock(&self.session);
                let message = format!(
                    "the region `{}` panicked: {}",
                    session.region.options.name,
                    panic_message(&*payload)
                );
                session.discard(&message);
                match session.error.take() {
                    Some(error) => Err(error),
                    None => {
                        drop(session);
                        resume_unwind(payload)
                    }
                }
            }
        }
    }

    /// What the last call of [`CompiledRegion::run`] did on the host that a replay would not do; none if nothing.
    pub fn last_host_read(&self) -> Option<HostRead> {
        lock(&self.session).region.host_read.clone()
    }

    /// The step the last call of [`CompiledRegion::run`] ended with; none if it recorded nothing or failed.
    pub fn last_run(&self) -> Option<LastRun> {
        lock(&self.session).region.last_run().cloned()
    }

    /// What the region compiled so far.
    pub fn report(&self) -> RegionReport {
        lock(&self.session).region.report()
    }
}

/// What became of a trace.
pub enum Traced<T, R> {
    /// Nothing cut it: what was made of the recording.
    Whole(R),
    /// Something needed a value: the closure's own result, with everything it did run.
    Cut(T),
}

/// Makes a session the thread's current one; undone on drop, also by a panic.
struct Entered;

impl Entered {
    fn new(session: Shared) -> Self {
        CURRENT.with_borrow_mut(|current| *current = Some(session));
        Self
    }
}

impl Drop for Entered {
    fn drop(&mut self) {
        CURRENT.with_borrow_mut(|current| *current = None);
    }
}

/// Makes a session known to other threads that look for a pending tensor; undone on drop, also by a panic.
struct Listed(Shared);

impl Listed {
    fn new(session: Shared) -> Self {
        lock(&SESSIONS).push(session.clone());
        Self(session)
    }
}

impl Drop for Listed {
    fn drop(&mut self) {
        let mut all = lock(&SESSIONS);
        // Only once: another thread may be in the same region.
        if let Some(position) = all.iter().position(|session| Arc::ptr_eq(session, &self.0)) {
            all.remove(position);
        }
    }
}

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
            read_elsewhere: Vec::new(),
        }
    }

    fn begin(&mut self) {
        self.region.begin();
        self.recording = Recording::new(table::id_watermark());
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

    /// Runs what was recorded last and ends the call, whose closure returned `value`.
    fn end<R>(&mut self, value: R) -> Result<R, Error> {
        self.flush();
        self.error.take().map_or(Ok(value), Err)
    }

    /// What was recorded; goes on with an empty recording.
    fn take_recording(&mut self) -> Recorded {
        wish::grant(&mut self.recording);
        for id in self.read_elsewhere.drain(..) {
            table::remove(id);
        }
        std::mem::replace(&mut self.recording, Recording::new(table::id_watermark())).finish()
    }

    /// Runs what was recorded and goes on with an empty recording.
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
        if let Err(error) = self.region.run(segment, recorded) {
            tracing::error!(target: "kiln", "{error}");
            self.error.get_or_insert(error);
        }
        self.look_up_lines();
    }

    /// Throws away what was recorded; its tensors report `reason`, unless they are salvaged.
    fn discard(&mut self, reason: &str) {
        let recorded = self.take_recording();
        if self.region.salvages {
            return salvage::run(&self.region.options, recorded);
        }
        let reason: Arc<str> = reason.into();
        recorded
            .output_ids
            .into_iter()
            .for_each(|id| table::fail(id, reason.clone()));
    }

    /// Cuts the recording because something needs a value. Under `fullgraph` that is an error and the recording is discarded.
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
            if self.region.options.fullgraph {
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

    /// Appends an operation whose operands are all known.
    fn record(&mut self, operation: OperationIr) {
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
        self.recording.push(operation, random::take);
        for id in self.recording.take_consumed() {
            table::remove(id);
        }
    }
}

/// The session that operations of this thread on `device` go to; none if they run at once.
fn current(device: KilnDevice) -> Option<Shared> {
    // A thread that is ending has no session any more; only drops happen then.
    if let Some(session) = CURRENT.try_with(|current| current.borrow().clone()).ok()? {
        return Some(session);
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

fn is_rehearsing() -> bool {
    REHEARSAL
        .try_with(|rehearsal| rehearsal.borrow().is_some())
        .unwrap_or(false)
}

/// Gives up tensors whose handles the caller keeps only in case the region under way fails: the step may overwrite them as if they had been dropped.
/// If it fails before it ran they have their elements again, and a tensor that was overwritten says so when it is used. Outside a region this does nothing.
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

/// Runs at once what the region under way has recorded of the making of these tensors, and takes it out of the
/// recording: they are inputs of the step then. What cannot run at once stays in the step. Outside a region this does nothing.
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
pub fn note_host_data(id: TensorId) {
    if let Some(session) = CURRENT.with_borrow(Clone::clone) {
        lock(&session).recording.note_host_data(id);
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

/// Runs `closure` with its operations recorded and never run: host code is executed for its scalars alone. Tensors it makes never get a value, operands may be
/// such tensors of earlier rehearsals, and random operations take no streams. None if the closure read a value.
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

/// Whether this thread is inside a region or a rehearsal: what it does is part of that.
pub fn is_nested() -> bool {
    CURRENT.with_borrow(Option::is_some) || REHEARSAL.with_borrow(Option::is_some)
}

/// Hands the operation to the rehearsal under way; gives it back if there is none.
fn offer_to_rehearsal(operation: OperationIr) -> Option<OperationIr> {
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
    match current(device) {
        Some(session) => record(&session, operation),
        None => run_now(&operation),
    }
}

fn record(session: &Shared, operation: OperationIr) {
    let mut guard = lock(session);
    for ir in guard.recording.unknown_operands(&operation) {
        if guard.recording.knows(ir.id) {
            continue; // the same tensor twice among the operands
        }
        let slot = match table::get(ir.id) {
            Some(slot) => slot,
            None => {
                drop(guard);
                let found = wait_for(ir.id, false);
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
    guard.record(operation);
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

/// The elements of a tensor, wherever it is. Takes it out of the table if `ir` is its last use.
pub fn fetch(ir: &TensorIr, reason: BreakReason) -> Result<Storage, Error> {
    if is_rehearsing() {
        resume_unwind(Box::new(Aborted));
    }
    if let (BreakReason::Read, Some(session)) = (&reason, CURRENT.with_borrow(Clone::clone)) {
        lock(&session).region.note_host_read(ir);
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

/// Breaks this thread's own session if the tensor is pending in it. Under `fullgraph` the region is left at once.
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
fn own_sessions() -> Vec<Shared> {
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

/// Materialises a tensor that is not in the table: some session has it pending, on this thread or another. Takes it out of the table if
/// nobody else can ask for it: with `last_use`, or if a recording has taken it for consumed.
fn wait_for(id: TensorId, last_use: bool) -> Slot {
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
            // Still under the lock: the session's thread may be about to consume the tensor, or to read it once more.
            let found = match last_use && !is_own {
                true => {
                    guard.read_elsewhere.push(id);
                    table::get(id)
                }
                false => take(id, last_use || wish.was_consumed()),
            };
            return found.unwrap_or_else(never_computed);
        }
    }
    // Between looking at the table and at the sessions, the owner may have run by itself.
    take(id, last_use || wish.was_consumed()).unwrap_or_else(never_computed)
}

fn never_computed() -> Slot {
    Slot::Failed("it was never computed".into())
}

/// What the table has for a tensor; it leaves the table with its last use.
fn take(id: TensorId, last_use: bool) -> Option<Slot> {
    match last_use {
        true => table::remove(id),
        false => table::get(id),
    }
}

/// A tensor was dropped.
fn release(id: TensorId) {
    if kill_own(id) == Killed::Result || table::remove(id).is_some() {
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

/// Tells this thread's recordings that the program will not use a tensor any more; says what it was to them.
/// Called for every tensor that is dropped, so it allocates nothing.
fn kill_own(id: TensorId) -> Killed {
    let kill = |session: &Shared| lock(session).recording.kill(id);
    // A thread that is ending has no sessions any more.
    let in_region = CURRENT.try_with(|current| current.borrow().as_ref().map(kill));
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
