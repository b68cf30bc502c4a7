//! Collecting events, and the profile that asks for them.
//!
//! One list for the process, behind a lock that is taken once for each event: events come a few thousand a
//! second, kernels in one bundle for each run of a step ([`add_run`]).

use std::borrow::Cow;
use std::cell::Cell;
use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Instant;

use crate::event::{Arguments, Category, Event, EventKind, StepRun, Trace};
use crate::summary::Summary;
use crate::{chrome, summary};

/// Whether any profile is open.
static ACTIVE: AtomicBool = AtomicBool::new(false);

/// The rank of the process, plus 1; 0 where it is not one of several.
static RANK: AtomicU32 = AtomicU32::new(0);

static COLLECTED: Mutex<Collected> = Mutex::new(Collected {
    open: 0,
    rows: Vec::new(),
    events: Vec::new(),
    runs: Vec::new(),
});

struct Collected {
    /// Profiles that are open.
    open: usize,
    rows: Vec<String>,
    events: Vec<Event>,
    runs: Vec<StepRun>,
}

fn collected() -> MutexGuard<'static, Collected> {
    // The lists are consistent after any panic: each is changed by one push.
    COLLECTED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Whether a profile is open: code that collects more than a span asks first.
pub fn is_active() -> bool {
    ACTIVE.load(Ordering::Relaxed)
}

/// Says which of several ranks the process is: traces have its number.
pub fn set_rank(rank: u32) {
    RANK.store(rank + 1, Ordering::Relaxed);
}

/// Nanoseconds since the process first asked.
pub fn now() -> u64 {
    static START: OnceLock<Instant> = OnceLock::new();
    START.get_or_init(Instant::now).elapsed().as_nanos() as u64
}

/// The row of this thread, named like the thread.
pub fn row() -> u32 {
    thread_local! {
        static ROW: Cell<u32> = const { Cell::new(u32::MAX) };
    }
    let known = ROW.get();
    if known != u32::MAX {
        return known;
    }
    let mut collected = collected();
    let name = std::thread::current().name().map(str::to_owned);
    let row = collected.rows.len() as u32;
    let name = name.unwrap_or_else(|| format!("thread {row}"));
    collected.rows.push(name);
    ROW.set(row);
    row
}

/// The row of thread number `thread` of the pool that runs steps; threads of this number share it.
pub fn worker_row(thread: u32) -> u32 {
    named_row(&mut collected(), &format!("kiln-{thread}"))
}

fn named_row(collected: &mut Collected, name: &str) -> u32 {
    let known = collected.rows.iter().position(|row| row == name);
    let row = known.unwrap_or_else(|| {
        collected.rows.push(name.to_owned());
        collected.rows.len() - 1
    });
    row as u32
}

/// An event that lasts until this is dropped.
#[must_use = "the span ends when this is dropped"]
#[derive(Debug)]
pub struct Span(Option<Event>);

impl Span {
    /// Says more about the event.
    pub fn argument(&mut self, name: &'static str, value: impl Into<serde_json::Value>) {
        if let Some(event) = &mut self.0 {
            event.arguments.push((name, value.into()));
        }
    }
}

impl Drop for Span {
    fn drop(&mut self) {
        if let Some(mut event) = self.0.take() {
            event.kind = EventKind::Slice(now() - event.start);
            collected().events.push(event);
        }
    }
}

/// Begins an event on this thread's row. Nothing happens while no profile is open.
pub fn span(category: Category, name: &'static str) -> Span {
    span_with(category, || name.into())
}

/// [`span`] with a name that is made only if a profile is open.
pub fn span_with(category: Category, name: impl FnOnce() -> Cow<'static, str>) -> Span {
    if !is_active() {
        return Span(None);
    }
    Span(Some(Event {
        category,
        name: name(),
        row: row(),
        start: now(),
        kind: EventKind::Instant,
        arguments: Arguments::new(),
    }))
}

/// Notes something that happens now on this thread's row.
pub fn instant(category: Category, name: impl Into<Cow<'static, str>>, arguments: Arguments) {
    event(category, name, now(), EventKind::Instant, arguments);
}

/// Notes an event of any kind on this thread's row.
pub fn event(
    category: Category,
    name: impl Into<Cow<'static, str>>,
    start: u64,
    kind: EventKind,
    arguments: Arguments,
) {
    if !is_active() {
        return;
    }
    let event = Event {
        category,
        name: name.into(),
        row: row(),
        start,
        kind,
        arguments,
    };
    collected().events.push(event);
}

/// Notes a run of a compiled step.
pub fn add_run(run: StepRun) {
    if is_active() {
        collected().runs.push(run);
    }
}

/// Collects events from its creation until it is dropped. Several may be open at once; each sees what happens
/// in its own time.
///
/// ```no_run
/// let profile = kiln_profile::Profile::start();
/// // some training steps
/// profile.export_chrome_trace("trace.json")?;
/// println!("{}", profile.summary());
/// # Ok::<(), std::io::Error>(())
/// ```
#[derive(Debug)]
pub struct Profile {
    begin: u64,
}

impl Profile {
    /// Opens a profile.
    pub fn start() -> Self {
        let mut collected = collected();
        collected.open += 1;
        ACTIVE.store(true, Ordering::Relaxed);
        Self { begin: now() }
    }

    /// The events so far.
    pub fn trace(&self) -> Trace {
        let collected = collected();
        let mut events: Vec<Event> = collected
            .events
            .iter()
            .filter(|event| event.start >= self.begin)
            .cloned()
            .collect();
        // A span that encloses another ends later, so it comes later in the list.
        events.sort_by_key(|event| event.start);
        let mut runs: Vec<StepRun> = collected
            .runs
            .iter()
            .filter(|run| run.begin >= self.begin)
            .cloned()
            .collect();
        runs.sort_by_key(|run| run.begin);
        Trace {
            rank: RANK.load(Ordering::Relaxed).checked_sub(1),
            rows: collected.rows.clone(),
            events,
            runs,
            begin: self.begin,
            end: now(),
        }
    }

    /// Writes the events so far as a Chrome trace, which Perfetto (<https://ui.perfetto.dev>) and
    /// `chrome://tracing` open.
    ///
    /// # Errors
    ///
    /// If the file cannot be written.
    pub fn export_chrome_trace(&self, path: impl AsRef<Path>) -> io::Result<()> {
        let file = io::BufWriter::new(std::fs::File::create(path)?);
        chrome::write(&self.trace(), file)
    }

    /// Time by kernel, by Burn operation and by the host's work.
    pub fn summary(&self) -> Summary {
        summary::summarise(&self.trace())
    }
}

impl Drop for Profile {
    fn drop(&mut self) {
        let mut collected = collected();
        collected.open -= 1;
        if collected.open == 0 {
            ACTIVE.store(false, Ordering::Relaxed);
            collected.events = Vec::new();
            collected.runs = Vec::new();
        }
    }
}
