//! For tests (feature `testing`): a driver without a GPU, which records its calls, and [`host`], which runs
//! generated kernels.
//!
//! The fake devices' memory is memory of the host: allocations count against a size, copies and fills
//! happen at once and are checked against the allocations. Kernels do nothing; a test declares them with
//! the sizes of their parameters, and the driver records their launches. A test can make any call fail.
//! Streams and events are only names: the recorded calls show how the runtime orders work by them.
//!
//! A table of functions carries no state, so only one such driver exists at a time: [`FakeDriver::start`]
//! waits until the one before is dropped.

mod convolutions;
mod functions;
mod graphs;
pub mod host;
mod nccl;

use std::collections::{BTreeMap, HashMap, HashSet};
use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, PoisonError};

pub use convolutions::{FakeEngine, fake_cudnn, fake_cudnn_descriptors};
pub use nccl::{fake_library, fake_nccl};

use crate::error::Result;
use crate::libraries::{Driver, Opened};

/// The fake driver. Its calls and settings go with it.
#[derive(Debug)]
pub struct FakeDriver {
    driver: Driver,
    _alone: MutexGuard<'static, ()>,
}

/// State of the fake driver.
#[derive(Debug, Default)]
struct State {
    calls: Vec<String>,
    /// Calls that fail, with what they answer.
    failing: HashMap<&'static str, i32>,
    /// The same, for one call.
    failing_once: HashMap<&'static str, i32>,
    /// Calls of NCCL's that do not return.
    blocked: HashSet<&'static str>,
    /// Whether NCCL was aborted.
    aborted: bool,
    /// The answer of every call after a fault.
    fault: Option<i32>,
    devices: usize,
    memory: usize,
    kernels: HashMap<String, Vec<usize>>,
    functions: Vec<String>,
    allocated: BTreeMap<u64, Allocation>,
    peak: usize,
    /// Number of the next handle.
    handles: usize,
    /// Nodes of every graph, and which graph each stream captures into.
    nodes: HashMap<usize, Vec<usize>>,
    capturing: HashMap<usize, Capture>,
    /// The capture in which NCCL met a graph.
    met: HashMap<usize, usize>,
    /// The array that the last look at a capture points to.
    last_nodes: Vec<usize>,
    cudnn: convolutions::Library,
}

#[derive(Debug)]
struct Allocation {
    bytes: usize,
    /// Keeps the memory; a whole number of words, so that it is aligned.
    _words: Vec<u64>,
    pinned: bool,
}

#[derive(Debug)]
struct Capture {
    /// No other capture has it.
    number: usize,
    graph: usize,
    last: Vec<usize>,
    /// Whether something ended it that captures do not allow.
    invalidated: bool,
}

static STATE: Mutex<Option<State>> = Mutex::new(None);
static ALONE: Mutex<()> = Mutex::new(());

impl FakeDriver {
    /// A driver with `devices` devices that have `memory` bytes each.
    ///
    /// # Errors
    /// None so far; those of a driver that does not start.
    pub fn start(devices: usize, memory: usize) -> Result<Self> {
        let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        *STATE.lock().unwrap_or_else(PoisonError::into_inner) = Some(State {
            devices,
            memory,
            handles: 1,
            ..State::default()
        });
        let driver = Driver::start(Opened {
            functions: functions::TABLE,
            path: PathBuf::from("fake"),
            version: "CUDA 13.0".into(),
        })?;
        Ok(Self {
            driver,
            _alone: alone,
        })
    }

    /// The driver as the runtime takes it.
    pub fn driver(&self) -> &Driver {
        &self.driver
    }

    /// Every module has a kernel called `name` with parameters of these sizes.
    pub fn declare(&self, name: &str, parameters: &[usize]) {
        with(|state| state.kernels.insert(name.to_owned(), parameters.to_vec()));
    }

    /// From here on `call` (such as `cuGraphLaunch`) answers `code`; zero lets it succeed again.
    pub fn fail(&self, call: &'static str, code: i32) {
        with(|state| match code {
            0 => state.failing.remove(call),
            _ => state.failing.insert(call, code),
        });
    }

    /// The next `call` answers `code`.
    pub fn fail_next(&self, call: &'static str, code: i32) {
        with(|state| state.failing_once.insert(call, code));
    }

    /// From here on `call`, one of NCCL's, waits for ranks that never come: a collective until NCCL is
    /// aborted, another one as long as the fake is there, or until it is released.
    pub fn block(&self, call: &'static str) {
        with(|state| state.blocked.insert(call));
    }

    /// Ends what [`FakeDriver::block`] began.
    pub fn release(&self, call: &'static str) {
        with(|state| state.blocked.remove(call));
    }

    /// From here on every call that reaches the device answers `code`.
    pub fn fault(&self, code: i32) {
        with(|state| state.fault = Some(code));
    }

    /// The calls since the last look, each a line: the function and what it was given.
    pub fn calls(&self) -> Vec<String> {
        with(|state| std::mem::take(&mut state.calls))
    }

    /// Bytes of device memory in use.
    pub fn used(&self) -> usize {
        with(|state| state.used())
    }

    /// Pinned blocks of the host in use.
    pub fn pinned(&self) -> usize {
        with(|state| {
            state
                .allocated
                .values()
                .filter(|allocation| allocation.pinned)
                .count()
        })
    }
}

/// Does something with the state of the driver that was started last.
fn with<T>(work: impl FnOnce(&mut State) -> T) -> T {
    let mut state = STATE.lock().unwrap_or_else(PoisonError::into_inner);
    work(state.get_or_insert_default())
}

impl State {
    fn used(&self) -> usize {
        let device = self.allocated.values().filter(|allocation| !allocation.pinned);
        device.map(|allocation| allocation.bytes).sum()
    }

    /// Records a call; returns the error that it answers, if a test asked for one.
    fn note(&mut self, call: &'static str, given: &str) -> Option<i32> {
        let line = if given.is_empty() {
            call.to_owned()
        } else {
            format!("{call} {given}")
        };
        self.calls.push(line);
        let once = self.failing_once.remove(call);
        once.or_else(|| self.failing.get(call).copied()).or(self.fault)
    }

    fn handle(&mut self) -> usize {
        self.handles += 1;
        self.handles
    }

    fn allocate(&mut self, bytes: usize, pinned: bool) -> u64 {
        let words = vec![0xa5a5_a5a5_a5a5_a5a5_u64; bytes.div_ceil(8)];
        let address = words.as_ptr() as u64;
        let allocation = Allocation {
            bytes,
            _words: words,
            pinned,
        };
        self.allocated.insert(address, allocation);
        self.peak = self.peak.max(self.used());
        address
    }

    /// A stream begins to capture into a graph, behind the nodes `last`.
    fn capture(&mut self, stream: usize, graph: usize, last: Vec<usize>) {
        let number = self.handle();
        let capture = Capture {
            number,
            graph,
            last,
            invalidated: false,
        };
        self.capturing.insert(stream, capture);
    }

    /// Whether NCCL can be captured on a stream: it takes every capture into one graph for the first.
    fn is_new_to_nccl(&mut self, stream: usize) -> bool {
        match self.capturing.get(&stream) {
            Some(capture) => *self.met.entry(capture.graph).or_insert(capture.number) == capture.number,
            None => true,
        }
    }

    /// Something was queued on a stream: a node after what was captured before, if the stream is capturing.
    fn queued(&mut self, stream: usize) {
        let Some(graph) = self.capturing.get(&stream).map(|capture| capture.graph) else {
            return;
        };
        let node = self.handle();
        self.nodes.entry(graph).or_default().push(node);
        if let Some(capture) = self.capturing.get_mut(&stream) {
            capture.last = vec![node];
        }
    }

    /// Whether all of a range of the device's memory is allocated.
    fn holds(&self, address: u64, bytes: usize) -> bool {
        let before = self.allocated.range(..=address).next_back();
        before.is_some_and(|(&start, allocation)| {
            !allocation.pinned && address + bytes as u64 <= start + allocation.bytes as u64
        })
    }
}
