//! A training step on several ranks: predicted, and measured.
//!
//! ```sh
//! cargo build --release -p kiln-cpu --example ranks
//! mpirun -n 2 target/release/examples/ranks            # two ranks of one thread each, on this machine
//! mpirun -n 2 target/release/examples/ranks graph.kg   # a step of one rank, in its text form
//! ```
//!
//! Each round runs the step alone (all ranks at once, with collectives that do nothing), which gives the times of its
//! kernels while the others compute, and the step with its collectives, for several sizes of buckets. The shortest of all
//! rounds counts, of each kernel and of the whole: the step is short enough to run undisturbed now and then on a machine
//! that does other things. The prediction takes the kernels of the first, a link that each round measures, and the places
//! of starts and waits ([`kiln_compiler::overlap`]). In the environment, `ROUNDS=1000` runs more rounds and `THREADS=2` has
//! two threads in a rank.

use std::cell::RefCell;
use std::error::Error;
use std::ffi::c_void;
use std::time::Instant;

use kiln_compiler::buckets::Buckets;
use kiln_compiler::overlap::Overlap;
use kiln_compiler::{Contract, Options};
use kiln_cpu::{
    BuildOptions, Cache, CpuExecutable, CpuTarget, KernelEvent, StepHooks, ThreadPool, Toolchain,
};
use kiln_distributed::{InFlight, Link, Operand, World};
use kiln_graph::{DType, Graph};
use kiln_partition::assign_phases;
use kiln_partition::testing::{Sizes, averaged_gradients, decoder_step};

// Not all of it is needed here.
#[allow(dead_code)]
mod harness;

use harness::Memory;

/// Bytes of the buckets that are tried: every gradient by itself, 0.4 MB, 25 MB.
const BUCKETS: [usize; 3] = [0, 25 << 14, 25 << 20];

/// Bytes of the sum that the bandwidth is measured with: about as many as the step's gradients.
const SUM: usize = 2 << 20;

/// The ranks' part of a run; without a world, collectives do nothing.
struct Calls<'a> {
    contract: &'a Contract,
    world: Option<&'a World>,
    begun: InFlight,
    /// Seconds of each kernel.
    kernels: RefCell<Vec<f64>>,
    begin: RefCell<Instant>,
}

impl StepHooks for Calls<'_> {
    fn wants_events(&self) -> bool {
        true
    }

    fn kernel_event(&self, kernel: usize, event: KernelEvent) {
        match event {
            KernelEvent::Begin => *self.begin.borrow_mut() = Instant::now(),
            KernelEvent::End => {
                self.kernels.borrow_mut()[kernel] += self.begin.borrow().elapsed().as_secs_f64();
            }
        }
    }

    fn over(&self) {
        self.begun.finish();
    }

    fn call_extern(&self, index: usize, buffers: *mut *mut c_void) -> Result<(), String> {
        let Some(world) = self.world else { return Ok(()) };
        let call = &self.contract.externs[index];
        let (dtype, dims) = &call.inputs[0];
        let dtype: DType = dtype.parse().map_err(|_| "an element type that is not known")?;
        let bytes = dtype.size() * dims.iter().product::<usize>();
        let part = call.collective.ok_or("an operation that is not known here")?;
        let (result, dims) = &call.outputs[0];
        let result: DType = result.parse().map_err(|_| "an element type that is not known")?;
        let result_bytes = result.size() * dims.iter().product::<usize>();
        // SAFETY: the step passes the operands' pointers and the result's; all are valid until the wait.
        let done = unsafe {
            let (from, to) = (
                (*buffers).cast::<u8>(),
                (*buffers.add(call.inputs.len())).cast::<u8>(),
            );
            match part.collective() {
                Some(collective) => {
                    let operand = Operand { dtype, from, bytes };
                    self.begun.begin(world, &collective, operand, to)
                }
                None => self.begun.wait(from, to, result_bytes),
            }
        };
        done.map_err(|error| error.to_string())
    }
}

/// One run: its seconds, and those of each kernel.
fn run(
    step: &CpuExecutable,
    memory: &mut Memory,
    pool: &ThreadPool,
    world: Option<&World>,
) -> Result<(f64, Vec<f64>), Box<dyn Error>> {
    let calls = Calls {
        contract: step.contract(),
        world,
        begun: InFlight::default(),
        kernels: RefCell::new(vec![0.0; step.contract().kernels.len()]),
        begin: RefCell::new(Instant::now()),
    };
    let start = Instant::now();
    memory.run(step, pool, &calls)?;
    Ok((start.elapsed().as_secs_f64(), calls.kernels.into_inner()))
}

/// Times a sum of each number of bytes; keeps the shortest time.
fn time_sums(world: &World, sums: &mut [(usize, f64)]) -> Result<(), Box<dyn Error>> {
    for (bytes, best) in sums {
        let mut elements = vec![0; *bytes];
        world.broadcast(0, &mut [0])?;
        let begun = Instant::now();
        world.all_reduce(DType::F32, true, &mut elements)?;
        *best = best.min(begun.elapsed().as_secs_f64());
    }
    Ok(())
}

/// The decoder's step, or that of a file, with means over the ranks.
fn graph(ranks: usize) -> Result<Graph, Box<dyn Error>> {
    let mut graph = match std::env::args().nth(1) {
        Some(path) => harness::read(&path)?,
        None => {
            decoder_step(Sizes {
                layers: 2,
                batch: 2,
                length: 64,
                width: 128,
                heads: 4,
                hidden: 344,
                vocabulary: 1000,
                keep: 1.0,
            })
            .graph
        }
    };
    assign_phases(&mut graph);
    Ok(averaged_gradients(&graph, ranks))
}

/// The shortest times of a step: with the others, and alone with its kernels.
struct Best {
    together: f64,
    alone: f64,
    kernels: Vec<f64>,
}

fn main() -> Result<(), Box<dyn Error>> {
    let number = |name: &str, default: usize| {
        let text = std::env::var(name).ok();
        text.and_then(|text| text.parse().ok()).unwrap_or(default)
    };
    let world = kiln_distributed::init()?;
    if world.size() == 1 {
        println!("there is one rank: start this with `mpirun -n 2`");
        return Ok(());
    }
    let (ranks, threads) = (world.size(), number("THREADS", 1));
    let graph = graph(ranks)?;
    let toolchain = Toolchain::detect()?;
    let (target, pool) = (CpuTarget::new(&toolchain, threads), ThreadPool::new(threads));
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let speed = match threads < cores / world.local_size() {
        true => 1.0,
        false => threads as f64 / (threads as f64 + 1.0),
    };
    let mut steps = Vec::new();
    for bytes in BUCKETS {
        let options = Options {
            buckets: Buckets::with_others(bytes),
            ..Options::default()
        };
        let build = BuildOptions::default();
        steps.push(CpuExecutable::new(
            &graph,
            &options,
            &target,
            &toolchain,
            &Cache::disabled(),
            &build,
        )?);
    }
    world.agree(&[("steps", "compiled".into())])?;
    let mut memory = Memory::new(&graph)?;
    let mut best: Vec<Best> = (0..steps.len())
        .map(|_| Best {
            together: f64::INFINITY,
            alone: f64::INFINITY,
            kernels: Vec::new(),
        })
        .collect();
    let mut sums = [(8, f64::INFINITY), (SUM, f64::INFINITY)];
    for round in 0..number("ROUNDS", 100) + 2 {
        time_sums(&world, &mut sums)?;
        for (step, best) in steps.iter().zip(&mut best) {
            world.broadcast(0, &mut [0])?;
            let (alone, kernels) = run(step, &mut memory, &pool, None)?;
            world.broadcast(0, &mut [0])?;
            let (together, _) = run(step, &mut memory, &pool, Some(&world))?;
            // The first ones touch their memory for the first time.
            if round >= 2 {
                best.together = best.together.min(together);
                best.alone = best.alone.min(alone);
                let shortest = best.kernels.iter().zip(&kernels).map(|(&a, &b)| b.min(a));
                best.kernels = match best.kernels.is_empty() {
                    true => kernels,
                    false => shortest.collect(),
                };
            }
        }
    }
    if !world.is_first() {
        return Ok(());
    }
    let link = Link::of_times(sums[0].1, sums[1], ranks);
    println!(
        "{ranks} ranks of {threads} threads on {cores} cores: {link}; speed beside each other {speed:.2}"
    );
    let apart = Overlap::of(steps[0].contract(), &best[0].kernels);
    for ((bytes, step), best) in BUCKETS.iter().zip(&steps).zip(&best) {
        let own = Overlap::of(step.contract(), &best.kernels);
        let play = |overlap: &Overlap| {
            overlap.timeline(|travel| link.seconds(travel.kind, travel.bytes, ranks), speed)
        };
        let (predicted, joined) = (play(&own), play(&apart.joined(&Buckets::with_others(*bytes))));
        println!(
            "buckets of {:6.2} MB ({:3}): alone {:7.2} ms, together {:7.2} ms; predicted {:7.2} ms ({:.2} of measured), \
             {:6.2} ms exposed; from buckets of none {:7.2} ms ({:.2})",
            *bytes as f64 / f64::from(1 << 20),
            own.travels.len(),
            best.alone * 1e3,
            best.together * 1e3,
            predicted.step * 1e3,
            predicted.step / best.together,
            predicted.exposed() * 1e3,
            joined.step * 1e3,
            joined.step / best.together,
        );
    }
    Ok(())
}
