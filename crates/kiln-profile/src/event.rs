//! The parts of a profile.

use std::borrow::Cow;
use std::sync::Arc;

/// The kind of work of an event.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, PartialOrd, Ord)]
pub enum Category {
    /// Kiln's work on the host: recording, guards, replay.
    Host,
    /// A stage of compilation.
    Compile,
    /// One run of a compiled step.
    Step,
    /// The forward, backward or optimizer part of a run.
    Phase,
    /// A kernel.
    Kernel,
    /// An operation that ran at once, outside any region.
    Eager,
    /// The program's data.
    Data,
    /// A collective between ranks, on the thread that carries it out.
    Ranks,
    /// Something that happened at one moment: a graph break.
    Break,
    /// Anything else a program marks.
    User,
}

impl Category {
    /// The category's name in traces.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Host => "host",
            Self::Compile => "compile",
            Self::Step => "step",
            Self::Phase => "phase",
            Self::Kernel => "kernel",
            Self::Eager => "eager",
            Self::Data => "data",
            Self::Ranks => "ranks",
            Self::Break => "graph_break",
            Self::User => "user",
        }
    }
}

/// Names and values that say more about an event.
pub type Arguments = Vec<(&'static str, serde_json::Value)>;

/// How an event lies in time.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum EventKind {
    /// It lasted so many nanoseconds.
    Slice(u64),
    /// It has no length.
    Instant,
    /// A quantity has a new value.
    Counter(f64),
}

/// One event on the host.
#[derive(Clone, PartialEq, Debug)]
pub struct Event {
    /// Its kind of work.
    pub category: Category,
    /// Its name.
    pub name: Cow<'static, str>,
    /// The row (thread) it belongs to, by position in [`Trace::rows`].
    pub row: u32,
    /// When it began, in nanoseconds of [`crate::now`].
    pub start: u64,
    /// Its extent.
    pub kind: EventKind,
    /// More about it.
    pub arguments: Arguments,
}

/// A Burn operation inside a kernel, and its share of the kernel's work.
#[derive(Clone, PartialEq, Debug)]
pub struct OperationShare {
    /// Mnemonic of the primitive.
    pub op: String,
    /// The recorded Burn operation, if known.
    pub operation: Option<String>,
    /// The forward operation whose gradient it belongs to, by Burn's name, if it is one; the line is that
    /// operation's.
    pub gradient_of: Option<String>,
    /// `file:line` of the user's call, if known.
    pub location: Option<String>,
    /// Its work, in units that compare within the kernel.
    pub weight: u64,
}

/// The description of a kernel, shared by all its runs.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct KernelDescription {
    /// Its name.
    pub name: String,
    /// `forward`, `backward`, `optimizer`, or empty.
    pub phase: &'static str,
    /// The operations that it computes.
    pub operations: Vec<OperationShare>,
    /// Bytes read and written.
    pub bytes: u64,
    /// Floating point operations.
    pub flops: u64,
    /// Bytes of the arena in use while it runs.
    pub arena_bytes: u64,
}

/// The description of a compiled step, shared by all its runs.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct StepDescription {
    /// Name of the region.
    pub region: String,
    /// Which executable of the process, from 0.
    pub number: u64,
    /// The backend that runs it.
    pub backend: &'static str,
    /// Its kernels, by number.
    pub kernels: Vec<KernelDescription>,
}

/// A kernel, or one thread's piece of it, in a run of a step.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct KernelTime {
    /// The kernel's number.
    pub kernel: u32,
    /// The thread of the pool; 0 is the one that called the step.
    pub thread: u32,
    /// When it began.
    pub begin: u64,
    /// When it ended.
    pub end: u64,
}

/// One run of a compiled step.
#[derive(Clone, PartialEq, Debug)]
pub struct StepRun {
    /// The step.
    pub step: Arc<StepDescription>,
    /// The row of the calling thread.
    pub row: u32,
    /// When it began.
    pub begin: u64,
    /// When it ended.
    pub end: u64,
    /// Whole kernels on the calling thread (thread 0), and the pieces that other threads did.
    pub kernels: Vec<KernelTime>,
}

/// Everything that happened while a profile was open.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Trace {
    /// The rank of the process, if it is one of several.
    pub rank: Option<u32>,
    /// Names of the rows.
    pub rows: Vec<String>,
    /// Events on the host, by start.
    pub events: Vec<Event>,
    /// Runs of compiled steps, by start.
    pub runs: Vec<StepRun>,
    /// When the profile was opened.
    pub begin: u64,
    /// When the trace was taken.
    pub end: u64,
}
