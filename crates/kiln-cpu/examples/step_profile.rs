//! Where the time of a compiled step goes, kernel by kernel.
//!
//! ```sh
//! cargo run --release -p kiln-cpu --example step_profile                  # a decoder's training step
//! cargo run --release -p kiln-cpu --example step_profile -- graph.kg      # a graph in its text form
//! ```
//!
//! Prints compile times, what is kept, the arena, the median time of a step, what the machine can do, and
//! for kernels the least time beside the time that their arithmetic or their bytes alone would take, those
//! first that take most beyond it. `shares` is a thread's even share of the time on cores that the kernel's
//! loops take, and how much longer their longest pieces are, for which the other threads wait. That is
//! computed from time on cores, so that a few cores can judge a step for many threads; all other times are
//! those that pass, where there are several threads.
//!
//! With a second argument the generated sources are written to that folder. In the environment,
//! `KEEP=everything` or `KEEP=BYTES` sets what the backward pass keeps, `RUNS=3` runs the step less often,
//! `TOP=100` shows more kernels, `BY=waiting` puts those first whose threads wait most, `THREADS=1` runs on
//! one thread, `AUTOCAST=bf16` (or `f16`) computes products in 16 bits.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::error::Error;
use std::ffi::c_void;
use std::time::Duration;

use kiln_compiler::report::KernelReport;
use kiln_compiler::{Keep, Options, compile};
use kiln_cpu::{
    BuildOptions, Cache, CpuExecutable, CpuTarget, KernelEvent, StepHooks, ThreadPool, Toolchain,
};
use kiln_graph::DType;
use kiln_partition::assign_phases;
use kiln_partition::testing::{Sizes, decoder_step};

mod harness;
#[path = "harness/limits.rs"]
mod limits;

use harness::Memory;
use limits::Limits;

/// Most runs that kernels are timed in.
const ROUNDS: usize = 7;

/// Bytes of a kernel below which its operands may still lie in a cache.
const CACHED: f64 = 4e6;

/// Times of a kernel: that passes, of the calling thread on its core, and those of [`ThreadPool::busy`].
type Times = [Duration; 5];

/// The times of each kernel in the run in which it took least.
struct Profile<'a> {
    pool: &'a ThreadPool,
    least: RefCell<Vec<Times>>,
    begin: Cell<Times>,
    on: bool,
}

impl Profile<'_> {
    fn now(&self) -> Times {
        let [busy, longest, own] = self.pool.busy();
        let thread = harness::thread_time();
        [harness::now(self.pool), thread, busy, longest, own]
    }
}

impl StepHooks for Profile<'_> {
    fn call_extern(&self, index: usize, _: *mut *mut c_void) -> Result<(), String> {
        Err(format!("operation {index} is not known here"))
    }

    fn wants_events(&self) -> bool {
        self.on
    }

    fn kernel_event(&self, kernel: usize, event: KernelEvent) {
        match event {
            KernelEvent::Begin => self.begin.set(self.now()),
            KernelEvent::End => {
                let (begin, end) = (self.begin.get(), self.now());
                let times = std::array::from_fn(|clock| end[clock] - begin[clock]);
                let least = &mut self.least.borrow_mut()[kernel];
                if times[0] < least[0] {
                    *least = times;
                }
            }
        }
    }
}

/// Times and work of a kernel, or of several.
#[derive(Clone, Copy, Default)]
struct Row {
    count: usize,
    seconds: f64,
    /// Of all threads together, in loops that were split.
    busy: f64,
    /// Of the longest pieces of these loops.
    longest: f64,
    bytes: f64,
    flops: f64,
    /// The time that arithmetic or memory alone would take, whichever is longer.
    floor: f64,
}

impl Row {
    fn add(&mut self, other: &Self) {
        self.count += other.count;
        self.seconds += other.seconds;
        self.busy += other.busy;
        self.longest += other.longest;
        self.bytes += other.bytes;
        self.flops += other.flops;
        self.floor += other.floor;
    }

    /// Time beyond the floor.
    fn excess(&self) -> f64 {
        self.seconds - self.floor
    }

    /// Time that threads would wait for the longest piece on as many cores.
    fn waiting(&self, threads: usize) -> f64 {
        self.longest - self.busy / threads as f64
    }

    fn text(&self, threads: usize) -> String {
        let seconds = self.seconds.max(1e-9);
        format!(
            "{:8.3} ms, floor {:8.3}, {:5.2} times; shares {:8.3} + {:7.3} ms; {:6.1} GB/s {:7.1} GFLOP/s",
            seconds * 1e3,
            self.floor * 1e3,
            seconds / self.floor.max(1e-9),
            1e3 * self.busy / threads as f64,
            1e3 * self.waiting(threads),
            self.bytes / 1e9 / seconds,
            self.flops / 1e9 / seconds
        )
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let mut graph = match arguments.next() {
        Some(path) if path != "-" => harness::read(&path)?,
        _ => {
            decoder_step(Sizes {
                layers: 4,
                batch: 8,
                length: 128,
                width: 256,
                heads: 8,
                hidden: 688,
                vocabulary: 2000,
                keep: 1.0,
            })
            .graph
        }
    };
    let toolchain = Toolchain::detect()?;
    let pool = ThreadPool::new(harness::threads());
    assign_phases(&mut graph);
    let target = CpuTarget::new(&toolchain, pool.threads());
    let keep = match std::env::var("KEEP").as_deref() {
        Ok("everything") => Keep::Everything,
        Ok(bytes) => Keep::Within(bytes.parse()?),
        Err(_) => Keep::Cheapest,
    };
    let autocast = match std::env::var("AUTOCAST").as_deref() {
        Ok("bf16") => Some(DType::BF16),
        Ok("f16") => Some(DType::F16),
        _ => None,
    };
    let options = Options {
        keep,
        autocast,
        ..Options::default()
    };
    let compiled = compile(&graph, &options, &target)?;
    if let Some(folder) = arguments.next() {
        std::fs::create_dir_all(&folder)?;
        for file in &compiled.code {
            std::fs::write(format!("{folder}/{}", file.name), &file.text)?;
        }
        std::fs::write(
            format!("{folder}/schedule.txt"),
            compiled.schedule.to_text(&compiled.graph),
        )?;
        std::fs::write(
            format!("{folder}/plan.txt"),
            compiled.plan.to_text(&compiled.graph),
        )?;
        std::fs::write(format!("{folder}/graph.kg"), compiled.graph.to_string())?;
    }
    println!(
        "graph: {} nodes, {} after transforms",
        graph.num_nodes(),
        compiled.graph.num_nodes()
    );
    for (stage, time) in &compiled.times {
        println!("{stage}: {time:.1?}");
    }
    if let Some(report) = &compiled.partition {
        println!("{report}");
    }
    let step = CpuExecutable::new(
        &graph,
        &options,
        &target,
        &toolchain,
        &Cache::disabled(),
        &BuildOptions::default(),
    )?;
    let contract = step.contract().clone();
    println!(
        "cc: {:.2?} for {} bytes of C; {} kernels, arena {:.1} MB (lower bound {:.1})",
        step.build_time,
        compiled.code.iter().map(|file| file.text.len()).sum::<usize>(),
        contract.kernels.len(),
        contract.arena_bytes as f64 / 1e6,
        compiled.plan.lower_bound as f64 / 1e6
    );

    let mut memory = Memory::new(&graph)?;
    let mut profile = Profile {
        pool: &pool,
        least: RefCell::new(vec![[Duration::MAX; 5]; contract.kernels.len()]),
        begin: Cell::new([Duration::ZERO; 5]),
        on: false,
    };
    let mut run = |profile: &Profile<'_>| -> Result<Duration, Box<dyn Error>> {
        let start = harness::now(&pool);
        memory.run(&step, &pool, profile)?;
        Ok(harness::now(&pool) - start)
    };
    let runs = std::env::var("RUNS")
        .ok()
        .and_then(|n| n.parse().ok())
        .unwrap_or(9);
    for _ in 0..runs.min(2) {
        run(&profile)?;
    }
    let mut times = Vec::new();
    for _ in 0..runs {
        times.push(run(&profile)?);
    }
    let median = harness::median(&times).as_secs_f64();
    let best = times.iter().min().map_or(0.0, Duration::as_secs_f64);
    println!(
        "step: {:.2} ms (median of {runs}), best {:.2} ms",
        median * 1e3,
        best * 1e3
    );
    let flops: u64 = contract.kernels.iter().map(|kernel| kernel.flops).sum();
    println!(
        "{:.1} GFLOP, {:.0} GFLOP/s",
        flops as f64 / 1e9,
        flops as f64 / 1e9 / median
    );
    profile.on = true;
    pool.measure_busy();
    for _ in 0..runs.min(ROUNDS) {
        run(&profile)?;
    }
    let limits = Limits::measure(&toolchain, &pool)?;
    println!("limits: {limits}");
    let least = profile.least.into_inner();
    print_table(&contract.kernels, &least, &limits, autocast, pool.threads());
    Ok(())
}

/// Kernels by what they take beyond their floors, after the sums over all kernels and over each kind.
fn print_table(
    kernels: &[KernelReport],
    least: &[Times],
    limits: &Limits,
    autocast: Option<DType>,
    threads: usize,
) {
    let rows: Vec<Row> = kernels
        .iter()
        .zip(least)
        .map(|(report, times)| {
            let narrow = autocast == Some(DType::BF16)
                && ["product", "attention", "convolution"]
                    .iter()
                    .any(|kind| report.name.starts_with(kind));
            let rate = if narrow { limits.bf16 } else { limits.f32 };
            let (bytes, flops) = (report.bytes as f64, report.flops as f64);
            // What is less than a share of the second cache may never come from memory.
            let moved = if bytes > CACHED { bytes } else { 0.0 };
            Row {
                count: 1,
                seconds: times[0].as_secs_f64(),
                busy: times[2].as_secs_f64(),
                longest: times[3].as_secs_f64(),
                bytes,
                flops,
                floor: (flops / rate).max(moved / limits.reading) / 1e9,
            }
        })
        .collect();
    let mut kinds: BTreeMap<&str, Row> = BTreeMap::new();
    for (report, row) in kernels.iter().zip(&rows) {
        let kind = report.name.split('_').next().unwrap_or_default();
        kinds.entry(kind).or_default().add(row);
        kinds.entry("all").or_default().add(row);
    }
    for (kind, row) in kinds {
        println!("{kind:>12}: {:4} kernels {}", row.count, row.text(threads));
    }
    let mut order: Vec<usize> = (0..rows.len()).collect();
    let by_waiting = std::env::var("BY").is_ok_and(|by| by == "waiting");
    let key = |row: &Row| match by_waiting {
        true => row.waiting(threads),
        false => row.excess(),
    };
    order.sort_by(|&a, &b| key(&rows[b]).total_cmp(&key(&rows[a])));
    let shown = std::env::var("TOP").ok().and_then(|n| n.parse().ok());
    for &kernel in order.iter().take(shown.unwrap_or(40)) {
        let report = &kernels[kernel];
        let nodes: Vec<&str> = report.nodes.iter().map(|node| &*node.op).collect();
        println!(
            "{kernel:4} {:>14} {}  {}",
            report.name,
            rows[kernel].text(threads),
            nodes.join(" ").chars().take(60).collect::<String>()
        );
    }
}
