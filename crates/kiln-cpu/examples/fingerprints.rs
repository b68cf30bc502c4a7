//! For each step a hash of its generated C, its arena and the bytes that its backward pass keeps: for
//! changes that must not change the generated code.
//!
//! ```sh
//! cargo run -p kiln-cpu --example fingerprints -- [STEP.kg ..] > before.txt    # on the unchanged commit
//! cargo run -p kiln-cpu --example fingerprints -- [STEP.kg ..] > after.txt     # on the changed one
//! diff before.txt after.txt
//! ```
//!
//! It compiles the graphs of the tests, random graphs of fixed seeds, and the recorded steps that are given
//! as files; for each instruction set, on one thread and two, with and without a memory budget. Nothing
//! depends on the machine that runs the program. A recorded step is the file
//! `DIR/train_step/step-0/0-recorded.kg` that `KILN_DEBUG=DIR kiln explain --model NAME` writes.

use std::error::Error;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::path::{Path, PathBuf};

use kiln_compiler::{CompileError, Keep, Options, compile};
use kiln_cpu::{CpuStep, CpuTarget, Isa, SourceFile};
use kiln_graph::testing::{Family, GraphConfig, random_graph};
use kiln_graph::{DType, Graph};
use kiln_partition::assign_phases;
use kiln_partition::testing::{Sizes, decoder_step};

/// Instruction sets that C is generated for.
const SETS: [Isa; 4] = [Isa::Avx512Bf16, Isa::Avx512, Isa::Avx2, Isa::Sse2];

/// Random graphs of each kind.
const SEEDS: u64 = 24;

/// A compilation for `isa` and `threads`.
fn compiled(graph: &Graph, isa: Isa, threads: usize, keep: Keep) -> Result<CpuStep, CompileError> {
    let options = Options {
        keep,
        ..Options::default()
    };
    compile(graph, &options, &CpuTarget::of(isa, threads))
}

/// The hash of a source tree.
fn hash(sources: &[SourceFile]) -> u64 {
    let mut hasher = DefaultHasher::new();
    for file in sources {
        file.name.hash(&mut hasher);
        file.text.hash(&mut hasher);
    }
    hasher.finish()
}

/// One line for a compilation; the step's arena in bytes.
fn line(name: &str, what: &str, compiled: Result<CpuStep, CompileError>) -> Option<u64> {
    match compiled {
        Ok(step) => {
            let saved = step.partition.as_ref().map_or(0, |report| report.saved_bytes);
            let arena = step.plan.arena_bytes;
            println!(
                "{name} {what}: {:016x} arena {arena} saved {saved}",
                hash(&step.code)
            );
            Some(arena as u64)
        }
        Err(error) => {
            println!("{name} {what}: {error}");
            None
        }
    }
}

/// The lines of a graph: each instruction set and number of threads, each with no budget, with budgets below
/// what the step takes then, and with everything kept.
fn lines(name: &str, graph: &Graph, sets: &[Isa]) {
    for &isa in sets {
        for threads in [1, 2] {
            let step = |keep| compiled(graph, isa, threads, keep);
            let what = format!("{isa} threads {threads}");
            let Some(arena) = line(name, &what, step(Keep::Cheapest)) else {
                continue;
            };
            line(name, &format!("{what} everything kept"), step(Keep::Everything));
            for percent in [90, 60] {
                let budget = Keep::Within(arena * percent / 100);
                line(name, &format!("{what} within {percent}%"), step(budget));
            }
        }
    }
}

/// The `.kg` files of a folder, by name.
fn files(folder: &Path) -> Result<Vec<PathBuf>, Box<dyn Error>> {
    let mut files = Vec::new();
    for entry in std::fs::read_dir(folder)? {
        let path = entry?.path();
        if path.extension().is_some_and(|extension| extension == "kg") {
            files.push(path);
        }
    }
    files.sort();
    Ok(files)
}

/// The graph in a file. Lines that begin with `//` are a test's expectations.
fn read(path: &Path) -> Result<Graph, Box<dyn Error>> {
    let text = std::fs::read_to_string(path).map_err(|error| format!("{}: {error}", path.display()))?;
    let body: Vec<&str> = text.lines().filter(|line| !line.starts_with("//")).collect();
    Ok(Graph::parse(&body.join("\n")).map_err(|error| format!("{}: {error}", path.display()))?)
}

/// Random graphs: of every kind of operation, and of each kind that has kernels of its own in every float
/// type.
fn random() {
    for seed in 0..SEEDS {
        let graph = random_graph(seed, &GraphConfig::default()).graph;
        lines(&format!("random {seed}"), &graph, &SETS);
    }
    let large = GraphConfig {
        families: vec![Family::Pointwise, Family::Reduce, Family::Movement],
        max_elements: 60_000,
        steps: 20,
        ..GraphConfig::default()
    };
    for seed in 0..SEEDS {
        lines(&format!("large {seed}"), &random_graph(seed, &large).graph, &SETS);
    }
    for family in [
        Family::Dot,
        Family::Conv,
        Family::Pool,
        Family::Attention,
        Family::Sort,
        Family::Index,
    ] {
        let config = GraphConfig {
            families: vec![family, Family::Pointwise],
            floats: vec![DType::F32, DType::F64, DType::F16, DType::BF16],
            ..GraphConfig::default()
        };
        for seed in 0..SEEDS {
            let graph = random_graph(seed, &config).graph;
            lines(&format!("{family:?} {seed}"), &graph, &SETS);
        }
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    for owner in ["kiln-compiler", "kiln-partition"] {
        for path in files(&crates.join(owner).join("tests/cases"))? {
            let mut graph = read(&path)?;
            assign_phases(&mut graph);
            let name = path.file_stem().unwrap_or_default().to_string_lossy();
            lines(&format!("{owner} {name}"), &graph, &SETS);
        }
    }
    random();
    for layers in [1, 3] {
        let sizes = Sizes {
            layers,
            batch: 2,
            length: 33,
            width: 64,
            heads: 4,
            hidden: 96,
            vocabulary: 500,
            keep: 0.8,
        };
        lines(&format!("decoder {layers}"), &decoder_step(sizes).graph, &SETS);
    }
    for path in std::env::args().skip(1) {
        let mut graph = read(Path::new(&path))?;
        assign_phases(&mut graph);
        let name = Path::new(&path)
            .file_stem()
            .unwrap_or_default()
            .to_string_lossy()
            .into_owned();
        lines(&name, &graph, &[Isa::Avx512]);
    }
    Ok(())
}
