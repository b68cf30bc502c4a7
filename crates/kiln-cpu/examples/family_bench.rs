//! What steps of one family cost beside those compiled for their shapes alone.
//!
//! ```sh
//! cargo run --release -p kiln-cpu --example family_bench -- one.kg two.kg 16..128        # what is built for these sizes
//! cargo run --release -p kiln-cpu --example family_bench -- one.kg two.kg time 24 77 128  # and how fast it is
//! cargo run --release -p kiln-cpu --example family_bench -- one.kg two.kg epochs:8x300    # what two epochs build
//! ```
//!
//! The files hold one step, recorded at two sizes; the sizes that follow are those of graphs on the line
//! through them. Files may follow too, of the same step at other sizes. `epochs:8x300` are two epochs of
//! sentences of 300 lengths (from 4 on), in batches of 8 padded to their longest, the last batch smaller; the
//! files then only show which dimension is the length, and are not compiled. Times are the best of several
//! runs, of the family's step and of the other in turns. `THREADS=1` runs on one thread. `CACHE=folder` keeps
//! what is built there, for another run. `RUST_LOG=kiln::family=debug` shows what is learned.

use std::error::Error;
use std::time::Instant;

use kiln_compiler::Options;
use kiln_cpu::{
    BuildOptions, Cache, CpuExecutable, CpuTarget, Family, NoHooks, Outcome, ThreadPool, Toolchain,
};
use kiln_graph::{Dimension, Graph, Line, Resizer};
use kiln_partition::assign_phases;

// Not all of it is needed here.
#[allow(dead_code)]
mod harness;

use harness::Memory;

/// Runs of each step.
const ROUNDS: usize = 12;

fn read(path: &str) -> Result<Graph, Box<dyn Error>> {
    let mut graph = harness::read(path)?;
    assign_phases(&mut graph);
    Ok(graph)
}

/// The cache in the folder `CACHE`, or none.
fn cache() -> Cache {
    std::env::var("CACHE").map_or_else(|_| Cache::disabled(), |folder| Cache::at(folder, 1 << 30))
}

/// The graphs that `77`, `16..128` or the path of a file names, each with a word for it.
fn graphs(text: &str, line: Option<&Line>) -> Result<Vec<(String, Graph)>, Box<dyn Error>> {
    if text.ends_with(".kg") {
        return Ok(vec![(text.to_owned(), read(text)?)]);
    }
    let line = line.ok_or("no line leads through the two graphs")?;
    let sizes: Vec<i64> = match text.split_once("..") {
        Some((from, to)) => (from.parse()?..=to.parse()?).collect(),
        None => vec![text.parse()?],
    };
    let graphs = sizes
        .iter()
        .filter_map(|&size| Some((format!("size {size}"), line.at(size)?)));
    Ok(graphs.collect())
}

/// The batches of two epochs, by their number of sentences and longest sentence: each epoch has all lengths,
/// in an order of its own.
fn epochs(batch: usize, lengths: usize) -> Vec<(usize, usize)> {
    let epoch = |number: usize| -> Vec<(usize, usize)> {
        let step = [77, 151][number];
        let all: Vec<usize> = (0..lengths)
            .map(|at| 4 + (13 * number + at * step) % lengths)
            .collect();
        let batches = all.chunks(batch);
        batches
            .map(|all| (all.len(), all.iter().copied().max().unwrap_or(4)))
            .collect()
    };
    (0..2).flat_map(epoch).collect()
}

/// Compiles the step of each batch of `epochs:8x300`, and prints what was built.
fn train(text: &str, one: &Graph, two: &Graph, family: &Family) -> Result<(), Box<dyn Error>> {
    let (batch, lengths) = text.split_once('x').ok_or("epochs:BATCHxLENGTHS is wanted")?;
    let varying = one.parameters().iter().zip(two.parameters()).enumerate();
    let length = varying.filter_map(|(parameter, (&a, &b))| {
        let mut axes = one.shape(a).iter().zip(two.shape(b).iter());
        let axis = axes.position(|(a, b)| a != b)?;
        Some(Dimension {
            parameter: parameter as u32,
            axis,
        })
    });
    let length = length
        .into_iter()
        .next()
        .ok_or("the two graphs have equal sizes")?;
    let batches = Dimension { axis: 0, ..length };
    let resizer = Resizer::new(one, &vec![true; one.parameters().len()]);
    let epochs = epochs(batch.parse()?, lengths.parse()?);
    let mut planned = 0;
    for (number, &(size, longest)) in epochs.iter().enumerate() {
        let graph = resizer.at(&[(batches, size), (length, longest)])?;
        let start = Instant::now();
        let (executable, outcome) = family.compile(&graph)?;
        if outcome == Outcome::Known {
            planned += 1;
            continue;
        }
        let epoch = 1 + number / (epochs.len() / 2);
        println!(
            "epoch {epoch}: {size}x{longest} after {planned} that were known: {:.1?} {outcome:?}, {:?}\n   {:.1?}",
            start.elapsed(),
            family.stats(),
            executable.stages,
        );
        planned = 0;
    }
    println!("{planned} more were known");
    Ok(())
}

/// The best times of two steps of `graph`, in seconds.
fn compare(graph: &Graph, steps: [&CpuExecutable; 2], pool: &ThreadPool) -> Result<[f64; 2], Box<dyn Error>> {
    let mut memories = [Memory::new(graph)?, Memory::new(graph)?];
    let mut best = [f64::MAX; 2];
    for _ in 0..ROUNDS {
        for (at, memory) in memories.iter_mut().enumerate() {
            let start = harness::now(pool);
            memory.run(steps[at], pool, &NoHooks)?;
            best[at] = best[at].min((harness::now(pool) - start).as_secs_f64());
        }
    }
    Ok(best)
}

fn main() -> Result<(), Box<dyn Error>> {
    tracing_subscriber::fmt::init();
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [one, two, rest @ ..] = &arguments[..] else {
        return Err("two graphs are wanted".into());
    };
    let (one, two) = (read(one)?, read(two)?);
    let line = Line::through(&one, &two);
    let toolchain = Toolchain::detect()?;
    let pool = ThreadPool::new(harness::threads());
    let target = CpuTarget::new(&toolchain, pool.threads());
    let (options, build, cache) = (Options::default(), BuildOptions::default(), cache());
    let family = Family::new(&options, &target, &toolchain, &cache, &build);
    if let Some(text) = rest.iter().find_map(|word| word.strip_prefix("epochs:")) {
        return train(text, &one, &two, &family);
    }
    for graph in [&one, &two] {
        let start = Instant::now();
        let (executable, outcome) = family.compile(graph)?;
        println!("{:.1?}: {outcome:?}, {:?}", start.elapsed(), family.stats());
        println!("   {:.1?}", executable.stages);
    }
    let timed = rest.iter().any(|word| word == "time");
    for word in rest.iter().filter(|word| *word != "time") {
        for (what, graph) in graphs(word, line.as_ref())? {
            let start = harness::thread_time();
            let (executable, outcome) = family.compile(&graph)?;
            let spent = harness::thread_time() - start;
            if timed || outcome != Outcome::Known {
                println!("{what}: {spent:.1?}, {outcome:?}, {:?}", family.stats());
            }
            if timed {
                let alone = CpuExecutable::new(&graph, &options, &target, &toolchain, &cache, &build)?;
                let [own, other] = compare(&graph, [&executable, &alone], &pool)?;
                println!("   {:.1?}", executable.stages);
                println!(
                    "   family {:.2} ms, alone {:.2} ms, ratio {:.3}",
                    own * 1e3,
                    other * 1e3,
                    own / other
                );
            }
        }
    }
    Ok(())
}
