//! Memory budgets of small models, by the allocator: the step allocates the bytes that were planned, and
//! more memory never makes a slower plan or another result.
//!
//! The whole file is one test, so that nothing else allocates in its process.

mod support;

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

use kiln_compiler::{CompileError, Keep, Options, memory_curve, split};
use kiln_cpu::{
    BuildOptions, Cache, CpuExecutable, CpuTarget, OptLevel, ThreadPool, Toolchain, current_bytes,
    peak_bytes, reset_peak,
};
use kiln_graph::alias::assign_aliases;
use kiln_graph::{Graph, HostTensor, Scalar};
use kiln_partition::testing::{
    Sizes, Tape, accumulating_step, adversarial_step, arguments, decoder as decoder_loss, decoder_step, f32s,
};
use kiln_partition::{PartitionError, Point, assign_phases};
use support::Memory;

/// The system's allocator, counting.
struct Counting;

static NOW: AtomicUsize = AtomicUsize::new(0);
static MOST: AtomicUsize = AtomicUsize::new(0);

// SAFETY: all memory is the system allocator's.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let now = NOW.fetch_add(layout.size(), Ordering::Relaxed) + layout.size();
        MOST.fetch_max(now, Ordering::Relaxed);
        // SAFETY: the caller's contract.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        NOW.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller's contract.
        unsafe { System.dealloc(memory, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Bytes that a call may allocate besides the arena: lists of pointers.
const LISTS: usize = 32 << 10;

const BUDGETS: u64 = 12;

fn sizes(layers: usize, keep: f64) -> Sizes {
    Sizes {
        layers,
        batch: 2,
        length: 16,
        width: 32,
        heads: 2,
        hidden: 96,
        vocabulary: 40,
        keep,
    }
}

/// The graph of a step whose arguments may all be overwritten.
fn ready(mut tape: Tape) -> Graph {
    let dies = vec![true; tape.graph.parameters().len()];
    assign_aliases(&mut tape.graph, &dies);
    assign_phases(&mut tape.graph);
    tape.graph
}

/// The largest difference of two tensors, in units of the largest element.
fn difference(a: &HostTensor, b: &HostTensor) -> f64 {
    let (a, b) = (a.to_f64s(), b.to_f64s());
    let scale = b.iter().fold(1e-30, |scale: f64, x| scale.max(x.abs()));
    let most = a.iter().zip(&b).map(|(x, y)| (x - y).abs()).fold(0.0, f64::max);
    most / scale
}

/// The measurements of one run of a step.
struct Measured {
    results: Vec<HostTensor>,
    /// Bytes beside arguments and results, by the allocator.
    bytes: u64,
    planned: u64,
}

/// The step, built without optimisation, because these steps are small.
fn built(graph: &Graph, keep: Keep) -> CpuExecutable {
    let toolchain = Toolchain::detect().unwrap();
    let options = Options {
        keep,
        ..Options::default()
    };
    let target = CpuTarget::new(&toolchain, 3);
    let build = BuildOptions {
        level: OptLevel::None,
        ..BuildOptions::default()
    };
    CpuExecutable::new(graph, &options, &target, &toolchain, &Cache::disabled(), &build).unwrap()
}

/// Builds the step and runs it once.
fn measure(graph: &Graph, keep: Keep, tensors: &[HostTensor], scalars: &[Scalar]) -> Measured {
    let pool = ThreadPool::new(2);
    let before = current_bytes();
    reset_peak();
    let step = built(graph, keep);
    let mut memory = Memory::new(&step, graph, tensors, scalars);
    let buffers = current_bytes() - before;

    // The first run gets the arena, the second finds it.
    let now = NOW.load(Ordering::Relaxed);
    MOST.store(now, Ordering::Relaxed);
    memory.run(&pool);
    let call = MOST.load(Ordering::Relaxed) - now;
    let bytes = peak_bytes() - before - buffers;
    assert!(call <= bytes + LISTS, "{keep}: a call allocates {call} bytes");
    let results = memory.results();
    let now = NOW.load(Ordering::Relaxed);
    MOST.store(now, Ordering::Relaxed);
    memory.run(&pool);
    let call = MOST.load(Ordering::Relaxed) - now;
    assert!(call <= LISTS, "{keep}: a second call allocates {call} bytes");
    Measured {
        results,
        bytes: bytes as u64,
        planned: step.contract().arena_bytes as u64,
    }
}

/// Twelve budgets for a step, from the smallest that fits to the one that changes nothing.
fn check(name: &str, graph: &Graph) {
    let toolchain = Toolchain::detect().unwrap();
    let (tensors, scalars) = arguments(graph, 3);
    let everything = measure(graph, Keep::Everything, &tensors, &scalars);
    assert_eq!(everything.bytes, everything.planned, "{name}");

    let curve = memory_curve(graph, &Options::default(), &CpuTarget::new(&toolchain, 3)).unwrap();
    let (smallest, largest) = (curve[curve.len() - 1].peak, curve[0].peak);
    let mut last: Option<(Point, Measured)> = None;
    for share in 0..BUDGETS {
        let budget = smallest + (largest - smallest) * share / (BUDGETS - 1);
        let point = *curve.iter().find(|point| point.peak <= budget).unwrap();
        if last.as_ref().is_some_and(|(last, _)| *last == point) {
            continue;
        }
        let found = measure(graph, Keep::Within(budget), &tensors, &scalars);
        assert_eq!(found.bytes, found.planned, "{name} within {budget} bytes");
        assert_eq!(found.planned, point.peak, "{name} within {budget} bytes");
        assert!(
            found.bytes <= budget,
            "{name}: {} bytes within {budget}",
            found.bytes
        );
        for (number, (found, expected)) in found.results.iter().zip(&everything.results).enumerate() {
            let error = difference(found, expected);
            assert!(
                error < 1e-5,
                "{name} within {budget}: output {number} is off by {error:e}"
            );
        }
        if let Some((smaller, less)) = &last {
            assert!(found.bytes > less.bytes, "{name}: more memory, the same plan");
            assert!(point.cost <= smaller.cost, "{name}: a larger budget is slower");
        }
        last = Some((point, found));
    }
}

/// A function's forward and backward pass under a budget for both: their arena and the tensors between them
/// take the bytes that were planned.
fn check_halves() {
    let mut tape = Tape::new("function");
    let loss = decoder_loss(&mut tape, sizes(2, 0.8));
    let tangent = tape.input(f32s(&[]));
    let weights = tape.parameters.clone();
    let gradients = tape.backward_from(&[(loss, tangent)], &weights);
    tape.graph.output(loss, None);
    gradients
        .into_iter()
        .for_each(|gradient| tape.graph.output(gradient, None));
    let tangents = [tape.graph.parameters().len() as u32 - 1];
    let toolchain = Toolchain::detect().unwrap();
    let within = |budget: u64| {
        let options = Options {
            keep: Keep::Within(budget),
            ..Options::default()
        };
        split(
            &tape.graph,
            &tangents,
            &[],
            &options,
            &CpuTarget::new(&toolchain, 3),
        )
    };
    let smallest = match within(0) {
        Err(CompileError::Partition(PartitionError::BudgetTooSmall { smallest, .. })) => smallest,
        other => panic!("nothing fits in nothing: {:?}", other.map(|split| split.report)),
    };
    let largest = within(u64::MAX).unwrap().report.peak.unwrap();
    assert!(smallest < largest, "{smallest} of {largest}");
    for budget in [smallest, largest] {
        let split = within(budget).unwrap();
        let kept = split.forward.outputs[split.forward_outputs.len()..].iter();
        let kept: usize = kept.map(|output| split.forward.ty(output.value).bytes()).sum();
        let halves = [&split.forward, &split.backward].map(|half| built(half, Keep::default()));
        let arenas = halves.map(|half| half.contract().arena_bytes);
        // They take turns in one arena, which the larger needs.
        let allocated = (arenas[0].max(arenas[1]) + kept) as u64;
        assert_eq!(Some(allocated), split.report.peak);
        assert!(allocated <= budget, "{allocated} within {budget}");
    }
}

#[test]
fn what_was_planned_is_allocated_under_every_budget() {
    check("decoder with dropout", &ready(decoder_step(sizes(2, 0.8))));
    check("two models against each other", &ready(adversarial_step()));
    check("micro-batches", &ready(accumulating_step()));
    check_halves();
}
