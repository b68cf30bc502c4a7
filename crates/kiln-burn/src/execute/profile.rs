//! Executors report to an open profile how long each kernel took.
//!
//! While a step runs only times are noted. The kernels are described once for each executable, when it
//! first runs under a profile.

use std::cell::{Cell, RefCell};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use kiln_compiler::overlap::Overlap;
use kiln_compiler::report::arena_in_use;
use kiln_compiler::{Contract, FusedNode, KernelReport};
use kiln_graph::{Graph, NodeData, Phase};
use kiln_profile::{KernelDescription, KernelTime, OperationShare, StepDescription, StepRun};

use crate::options::CompileBackend;

/// A number for an executable, in the order in which they are made.
pub fn next_id() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

/// The phase in words; empty if unknown. `name` is that of the text form of graphs.
pub fn phase_word(name: &str) -> &'static str {
    match Phase::from_name(name) {
        Some(Phase::Forward) => "forward",
        Some(Phase::Backward) => "backward",
        Some(Phase::Optimizer) => "optimizer",
        _ => "",
    }
}

/// Describes compiled code.
pub fn describe_contract(
    backend: CompileBackend,
    region: &str,
    number: u64,
    contract: &Contract,
) -> StepDescription {
    let in_use = arena_in_use(&contract.kernels, &contract.buffers);
    let mut names = Overlap::of(contract, &[]).names();
    let kernel = |(number, (kernel, arena_bytes)): (usize, (&KernelReport, u64))| KernelDescription {
        name: names.remove(&number).unwrap_or_else(|| kernel.name.clone()),
        phase: phase_word(kernel.phase()),
        operations: kernel.nodes.iter().map(share).collect(),
        bytes: kernel.bytes,
        flops: kernel.flops,
        arena_bytes,
    };
    StepDescription {
        region: region.to_owned(),
        number,
        backend: backend.name(),
        kernels: contract
            .kernels
            .iter()
            .zip(in_use)
            .enumerate()
            .map(kernel)
            .collect(),
    }
}

fn share(node: &FusedNode) -> OperationShare {
    OperationShare {
        op: node.op.clone(),
        operation: node.operation.clone(),
        gradient_of: node.gradient_of.clone(),
        location: node.location.clone(),
        weight: node.flops.max(node.elements),
    }
}

/// Describes nodes that run one by one.
pub fn describe_nodes<'a>(
    graph: &Graph,
    number: u64,
    nodes: impl Iterator<Item = &'a NodeData>,
) -> StepDescription {
    let kernel = |data: &NodeData| {
        let bytes = data
            .inputs
            .iter()
            .chain(&data.outputs)
            .map(|&value| graph.ty(value).bytes() as u64);
        let text = |text: &Option<Arc<str>>| text.as_deref().map(str::to_owned);
        KernelDescription {
            name: data.op.name().to_owned(),
            phase: phase_word(data.provenance.phase.name()),
            operations: vec![OperationShare {
                op: data.op.name().to_owned(),
                operation: text(&data.provenance.operation),
                gradient_of: text(&data.provenance.gradient_of),
                location: text(&data.provenance.location),
                weight: 1,
            }],
            bytes: bytes.sum(),
            flops: 0,
            arena_bytes: 0,
        }
    };
    StepDescription {
        region: graph.name.clone(),
        number,
        backend: CompileBackend::AotEager.name(),
        kernels: nodes.map(kernel).collect(),
    }
}

/// The times of one run.
#[derive(Debug)]
pub struct RunClock {
    row: u32,
    begin: u64,
    /// When the kernel that runs now began.
    kernel: Cell<u64>,
    times: RefCell<Vec<KernelTime>>,
    /// Position of the last entry of the calling thread.
    last: Cell<Option<usize>>,
}

impl RunClock {
    /// Starts the clock, if a profile is open.
    pub fn start() -> Option<Self> {
        kiln_profile::is_active().then(|| Self {
            row: kiln_profile::row(),
            begin: kiln_profile::now(),
            kernel: Cell::new(0),
            times: RefCell::new(Vec::new()),
            last: Cell::new(None),
        })
    }

    /// A kernel begins.
    pub fn begin(&self) {
        self.kernel.set(kiln_profile::now());
    }

    /// Kernel number `kernel` ends. A kernel that consists of several loops is one entry.
    pub fn end(&self, kernel: usize) {
        let end = kiln_profile::now();
        let mut times = self.times.borrow_mut();
        let kernel = kernel as u32;
        if let Some(last) = self.last.get()
            && times[last].kernel == kernel
        {
            times[last].end = end;
            return;
        }
        self.last.set(Some(times.len()));
        times.push(KernelTime {
            kernel,
            thread: 0,
            begin: self.kernel.get(),
            end,
        });
    }

    /// Another thread had a piece of a kernel.
    pub fn piece(&self, kernel: usize, thread: usize, begin: u64, end: u64) {
        self.times.borrow_mut().push(KernelTime {
            kernel: kernel as u32,
            thread: thread as u32,
            begin,
            end,
        });
    }

    /// Hands the times to the profile.
    pub fn finish(self, step: &Arc<StepDescription>) {
        kiln_profile::add_run(StepRun {
            step: step.clone(),
            row: self.row,
            begin: self.begin,
            end: kiln_profile::now(),
            kernels: self.times.into_inner(),
        });
    }
}
