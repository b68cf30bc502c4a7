//! A region and its calls: the closure is recorded, then the recording runs.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::{Arc, Mutex};

use kiln_profile::Category;

use super::super::location::Location;
use super::super::recording::Recorded;
use super::super::region::{HostRead, LastRun, Region};
use super::super::report::RegionReport;
use super::super::sighting::Lines;
use super::{CURRENT, SESSIONS, Session, Shared, is_disabled, lock};
use crate::error::Error;
use crate::options::{CompileBackend, CompileOptions};

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

    /// The same region, whose failed calls still have their effects: the operations of the closure before a
    /// panic or an error are run on burn-flex. Tensors that a function leaves in cells of its own, such as
    /// running statistics, then have a value, as they would without Kiln.
    pub fn for_function(self) -> Self {
        lock(&self.session).region.salvages = true;
        self
    }

    /// The same region, which keeps what a [`Replay`](crate::record::Replay) needs of its last run.
    pub fn for_replay(self) -> Self {
        lock(&self.session).region.keeps_host_data = true;
        self
    }

    /// The same region, whose calls compute on placeholders: [`CompiledRegion::last_host_read`] tells
    /// whether a call read a value.
    pub fn for_placeholders(self) -> Self {
        lock(&self.session).region.on_placeholders = true;
        self
    }

    /// Runs `closure` with its tensor operations recorded, then runs the compiled step. Tensors that
    /// outlive the closure have their elements when `run` returns.
    ///
    /// Inside another region, or with backend `eager`, the closure just runs: the inner region joins the
    /// outer one. It also just runs in parts that are not recorded ([`disable`](super::disable())).
    ///
    /// # Errors
    ///
    /// If a break occurs under `fullgraph`, or the step cannot be imported, compiled or run. Tensors the
    /// closure left behind then report the error when they are used.
    ///
    /// # Panics
    ///
    /// With the panic of `closure`; its recording is discarded.
    pub fn run<R>(&self, closure: impl FnOnce() -> R) -> Result<R, Error> {
        if self.backend == CompileBackend::Eager || CURRENT.with_borrow(Option::is_some) || is_disabled() {
            return Ok(closure());
        }
        let _turn = lock(&self.turn);
        lock(&self.session).begin();
        // Other threads find the session until its results are in the table: a thread that asks for one
        // meanwhile waits.
        let _listed = Listed::new(self.session.clone());
        let value = self.record(closure)?;
        let ended = lock(&self.session).end();
        ended.map(|()| value)
    }

    /// Records `closure` as [`CompiledRegion::run`] does, and gives the recording to `run_whole` instead of
    /// running it, if no graph break cut it. A recording that was cut ([`position`](super::position())
    /// tells the closure) is run like any other, and `run_whole` is not called. Tensors that outlive the
    /// closure have no elements until `run_whole` enters them into the table. `lines` says whether to look
    /// up the user's lines.
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
            let ended = session.end();
            drop(session);
            return ended.map(|()| Traced::Cut(value));
        }
        let recorded = session.take_recording();
        drop(session);
        run_whole(value, recorded).map(Traced::Whole)
    }

    /// Runs `closure` with its operations recorded. After a panic nothing is recorded any more.
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
                match session.error.take() {
                    Some(error) => {
                        session.discard(&error.to_string());
                        Err(error)
                    }
                    None => {
                        session.leave();
                        drop(session);
                        resume_unwind(payload)
                    }
                }
            }
        }
    }

    /// Its name in reports and errors.
    pub fn name(&self) -> String {
        lock(&self.session).region.options.name.clone()
    }

    /// From now on a call that would compile is an error ([`Error::Frozen`]), before anything ran.
    pub fn freeze(&self) {
        lock(&self.session).region.frozen = true;
    }

    /// Takes [`CompiledRegion::freeze`] back.
    pub fn unfreeze(&self) {
        lock(&self.session).region.frozen = false;
    }

    /// Whether a call that would compile is an error.
    pub fn is_frozen(&self) -> bool {
        lock(&self.session).region.frozen
    }

    /// The read of a value on the host in the last call of [`CompiledRegion::run`], which a replay would
    /// not do; none if there was none.
    pub fn last_host_read(&self) -> Option<HostRead> {
        lock(&self.session).region.host_read.clone()
    }

    /// Where the last call of [`CompiledRegion::run`] seeded the generator of random numbers, which a replay
    /// would not do: a line, if one was found; none if it did not.
    pub fn last_seed(&self) -> Option<Option<Location>> {
        lock(&self.session).region.seeded.clone()
    }

    /// The step the last call of [`CompiledRegion::run`] ended with; none if it recorded nothing or failed.
    pub fn last_run(&self) -> Option<LastRun> {
        lock(&self.session).region.last_run().cloned()
    }

    /// Keeps the tensors that the program makes from data on the host during a call, for
    /// [`CompiledRegion::last_run`].
    pub fn keep_host_data(&self, keeps: bool) {
        lock(&self.session).region.keeps_host_data = keeps;
    }

    /// How its steps are compiled.
    pub fn options(&self) -> CompileOptions {
        lock(&self.session).region.options.clone()
    }

    /// The report on the region so far.
    pub fn report(&self) -> RegionReport {
        lock(&self.session).region.report()
    }
}

/// The outcome of a trace.
pub enum Traced<T, R> {
    /// No graph break cut it: the result of `run_whole`.
    Whole(R),
    /// A value was needed: the closure's own result, after all its operations ran.
    Cut(T),
}

/// Makes a session the thread's current one; undone on drop, also by a panic. A part of a region comes back
/// to that.
pub(super) struct Entered(Option<Shared>);

impl Entered {
    pub(super) fn new(session: Shared) -> Self {
        Self(CURRENT.with_borrow_mut(|current| current.replace(session)))
    }
}

impl Drop for Entered {
    fn drop(&mut self) {
        CURRENT.with_borrow_mut(|current| *current = self.0.take());
    }
}

/// Makes a session known to other threads that look for a pending tensor; undone on drop, also by a panic.
pub(super) struct Listed(Shared);

impl Listed {
    pub(super) fn new(session: Shared) -> Self {
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
