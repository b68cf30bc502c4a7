//! Where the time of a compiled step goes, kernel by kernel.
//!
//! ```sh
//! cargo run --release -p kiln-cpu --example step_profile                  # a decoder's training step
//! cargo run --release -p kiln-cpu --example step_profile -- graph.kg      # a graph in its text form
//! ```
//!
//! Prints compile times, what is kept, the arena, the median time of a step, and for the slowest kernels
//! time, GB/s and GFLOP/s. With a second argument the generated sources are written to that folder. In the
//! environment, `KEEP=everything` or `KEEP=BYTES` sets what the backward pass keeps, `TOP=100` shows more
//! kernels, `THREADS=1` runs on one thread, `AUTOCAST=bf16` (or `f16`) computes products in 16 bits.

use std::cell::RefCell;
use std::error::Error;
use std::ffi::c_void;
use std::time::Duration;

use kiln_compiler::{Keep, Options, compile};
use kiln_cpu::{
    BuildOptions, Cache, CpuExecutable, CpuTarget, KernelEvent, StepHooks, ThreadPool, Toolchain,
};
use kiln_graph::DType;
use kiln_partition::assign_phases;
use kiln_partition::testing::{Sizes, decoder_step};

mod harness;

use harness::Memory;

struct Profile {
    events: RefCell<Vec<Duration>>,
    begin: RefCell<Option<Duration>>,
    on: bool,
}

impl StepHooks for Profile {
    fn call_extern(&self, index: usize, _: *mut *mut c_void) -> Result<(), String> {
        Err(format!("operation {index} is not known here"))
    }

    fn wants_events(&self) -> bool {
        self.on
    }

    fn kernel_event(&self, kernel: usize, event: KernelEvent) {
        match event {
            KernelEvent::Begin => *self.begin.borrow_mut() = Some(harness::thread_time()),
            KernelEvent::End => {
                if let Some(begin) = self.begin.borrow_mut().take() {
                    self.events.borrow_mut()[kernel] += harness::thread_time() - begin;
                }
            }
        }
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
        events: RefCell::new(vec![Duration::ZERO; contract.kernels.len()]),
        begin: RefCell::new(None),
        on: false,
    };
    let mut run = |profile: &Profile| -> Result<Duration, Box<dyn Error>> {
        let start = harness::now(&pool);
        memory.run(&step, &pool, profile)?;
        Ok(harness::now(&pool) - start)
    };
    for _ in 0..2 {
        run(&profile)?;
    }
    let mut times = Vec::new();
    for _ in 0..9 {
        times.push(run(&profile)?);
    }
    let median = harness::median(&times).as_secs_f64();
    let best = times.iter().min().map_or(0.0, Duration::as_secs_f64);
    println!(
        "step: {:.2} ms (median of 9), best {:.2} ms",
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
    let rounds = 5;
    let shown = std::env::var("TOP")
        .ok()
        .and_then(|n| n.parse().ok())
        .unwrap_or(40);
    for _ in 0..rounds {
        run(&profile)?;
    }
    let events = profile.events.into_inner();
    let mut by_time: Vec<usize> = (0..events.len()).collect();
    by_time.sort_by_key(|&k| std::cmp::Reverse(events[k]));
    let mut kinds: std::collections::BTreeMap<String, (Duration, usize, u64, u64)> =
        std::collections::BTreeMap::new();
    for (kernel, report) in contract.kernels.iter().enumerate() {
        let kind = report.name.split('_').next().unwrap_or("").to_owned();
        let entry = kinds.entry(kind).or_default();
        entry.0 += events[kernel] / rounds;
        entry.1 += 1;
        entry.2 += report.bytes;
        entry.3 += report.flops;
    }
    for (kind, (time, count, bytes, flops)) in kinds {
        let seconds = time.as_secs_f64().max(1e-9);
        println!(
            "{kind:>12}: {:8.2} ms in {count:4} kernels, {:6.1} GB/s, {:6.1} GFLOP/s",
            seconds * 1e3,
            bytes as f64 / 1e9 / seconds,
            flops as f64 / 1e9 / seconds
        );
    }
    for &kernel in by_time.iter().take(shown) {
        let report = &contract.kernels[kernel];
        let seconds = (events[kernel] / rounds).as_secs_f64().max(1e-9);
        let nodes: Vec<&str> = report.nodes.iter().map(|node| &*node.op).collect();
        println!(
            "{kernel:4} {:>14} {:8.3} ms {:6.1} GB/s {:6.1} GFLOP/s  {}",
            report.name,
            seconds * 1e3,
            report.bytes as f64 / 1e9 / seconds,
            report.flops as f64 / 1e9 / seconds,
            nodes.join(" ").chars().take(100).collect::<String>()
        );
    }
    Ok(())
}
