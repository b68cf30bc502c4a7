//! Measures the bytes that the partition of a recorded training step keeps and allocates, and its time.
//!
//! ```sh
//! KILN_DEBUG=/tmp/kiln cargo run --release -p kiln-cli -- explain --model llama-15m --batch 4 --seq 256
//! cargo run --release -p kiln-cpu --example partition_trade -- /tmp/kiln/train_step/step-0/0-recorded.kg
//! ```
//!
//! The step is built three times: keeping everything that the backward pass reads, as the partitioner
//! chooses, and under the smallest memory budget that fits. Printed for each: bytes kept for the backward
//! pass, the arena, and the time of a step. The three take turns, so that a ratio compares neighbours in
//! time. Built steps are cached: a second run only measures.
//!
//! Twelve budgets follow, between the smallest and the one that changes nothing, with the plan that each
//! gets. In the environment, `ROUNDS=21` sets how often each step runs, `THREADS=1` on how many threads
//! (one thread's time is not affected by other work of the machine); `BUDGET=BYTES` measures that budget
//! and skips the search for the smallest and the twelve.

use std::error::Error;
use std::time::{Duration, Instant};

use kiln_compiler::{Keep, Options, memory_curve};
use kiln_cpu::{BuildOptions, Cache, CpuExecutable, CpuTarget, NoHooks, ThreadPool, Toolchain};
use kiln_graph::Graph;
use kiln_partition::{Point, Strategy, assign_phases, partition};

mod harness;

use harness::Memory;

const MIB: f64 = 1_048_576.0;

/// Further budgets that are measured.
const BUDGETS: u64 = 12;

/// The step, built one way.
struct Built {
    name: &'static str,
    step: CpuExecutable,
    times: Vec<Duration>,
}

impl Built {
    fn new(
        name: &'static str,
        keep: Keep,
        graph: &Graph,
        target: &CpuTarget,
        toolchain: &Toolchain,
    ) -> Result<Self, Box<dyn Error>> {
        let options = Options {
            keep,
            ..Options::default()
        };
        let step = CpuExecutable::new(
            graph,
            &options,
            target,
            toolchain,
            &Cache::from_env(),
            &BuildOptions::default(),
        )?;
        Ok(Self {
            name,
            step,
            times: Vec::new(),
        })
    }

    fn kept(&self) -> u64 {
        let decision = self.step.contract().partition.as_ref();
        decision.map_or(0, |decision| decision.saved_bytes)
    }

    fn median(&self) -> f64 {
        harness::median(&self.times).as_secs_f64()
    }
}

/// What an eager autograd engine keeps: everything that the recorded backward pass reads of the recorded
/// forward pass, before any rewrite.
fn kept_by_eager(graph: &Graph) -> Result<u64, Box<dyn Error>> {
    let options = kiln_partition::Options {
        strategy: Strategy::KeepEverything,
        ..kiln_partition::Options::default()
    };
    Ok(partition(graph, &options)?.report.saved_bytes)
}

fn print_budgets(curve: &[Point]) {
    let (Some(first), Some(last)) = (curve.first(), curve.last()) else {
        return;
    };
    println!("budget MiB, then of the plan it gets: arena MiB, kept MiB, modelled cost ms");
    for share in 0..BUDGETS {
        let budget = last.peak + (first.peak - last.peak) * share / (BUDGETS - 1);
        // The curve goes from the fastest plan to the smallest.
        if let Some(point) = curve.iter().find(|point| point.peak <= budget) {
            println!(
                "{:10.1} {:10.1} {:10.1} {:10.3}",
                budget as f64 / MIB,
                point.peak as f64 / MIB,
                point.saved as f64 / MIB,
                point.cost as f64 * 1e-9
            );
        }
    }
}

fn print_results(built: &[Built], eager: u64) {
    println!("                     kept MiB   of eager  arena MiB    step ms  ratio");
    let base = built[0].median();
    for one in built {
        println!(
            "{:>18} {:10.1} {:10.3} {:10.1} {:10.2}  {:.3}",
            one.name,
            one.kept() as f64 / MIB,
            one.kept() as f64 / eager.max(1) as f64,
            one.step.contract().arena_bytes as f64 / MIB,
            one.median() * 1e3,
            one.median() / base,
        );
    }
    let [_, cheapest, smallest] = built else { return };
    let arena = |one: &Built| one.step.contract().arena_bytes as f64;
    println!(
        "smallest budget against none: arena {:.3}, step time {:.3}",
        arena(smallest) / arena(cheapest),
        smallest.median() / cheapest.median()
    );
}

fn main() -> Result<(), Box<dyn Error>> {
    let path = std::env::args()
        .nth(1)
        .ok_or("give a file with a recorded graph")?;
    let mut graph = harness::read(&path)?;
    let toolchain = Toolchain::detect()?;
    let pool = ThreadPool::new(harness::threads());
    // One build serves for one thread and for two.
    let target = CpuTarget::new(&toolchain, pool.threads().max(2));
    assign_phases(&mut graph);
    let start = Instant::now();
    let eager = kept_by_eager(&graph)?;
    println!(
        "{path}: {} nodes; eager autograd keeps {:.1} MiB of it (partitioned in {:.1?})",
        graph.num_nodes(),
        eager as f64 / MIB,
        start.elapsed()
    );

    let smallest = match std::env::var("BUDGET") {
        Ok(bytes) => bytes.parse()?,
        Err(_) => {
            let start = Instant::now();
            let curve = memory_curve(&graph, &Options::default(), &target)?;
            println!(
                "{} plans on the memory curve, found in {:.1?}",
                curve.len(),
                start.elapsed()
            );
            print_budgets(&curve);
            curve.last().ok_or("nothing to choose")?.peak
        }
    };
    let ways = [
        ("keep everything", Keep::Everything),
        ("as chosen", Keep::Cheapest),
        ("smallest budget", Keep::Within(smallest)),
    ];
    let mut built = Vec::new();
    for (name, keep) in ways {
        built.push(Built::new(name, keep, &graph, &target, &toolchain)?);
    }

    let mut memory = Memory::new(&graph)?;
    let rounds = std::env::var("ROUNDS").ok();
    let rounds: usize = rounds.and_then(|count| count.parse().ok()).unwrap_or(11);
    for round in 0..=rounds {
        for one in &mut built {
            let start = harness::now(&pool);
            memory.run(&one.step, &pool, &NoHooks)?;
            // The first round touches the memory.
            if round > 0 {
                one.times.push(harness::now(&pool) - start);
            }
        }
    }
    print_results(&built, eager);
    Ok(())
}
