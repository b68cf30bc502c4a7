//! Steps of several shapes on a GPU: as a family, whose kernels they share, and each compiled by itself.
//!
//! ```text
//! cargo run --release -p kiln-cuda --example family_gpu -- [--bf16] STEP.kg STEP.kg ..
//! cargo run --release -p kiln-cuda --example family_gpu -- [--bf16] STEP.kg LENGTH LENGTH ..
//! ```
//!
//! With lengths, a recorded step is resized in dimension 1 of its integer inputs that have two. For each
//! shape it prints how long the first call's compilation takes, how long a step takes in both ways, whether
//! results have equal bits, and the kernels that differ most. The disk cache is not used.

use std::error::Error;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kiln_compiler::Options;
use kiln_cuda::Search;
use kiln_cuda::build::CacheFolder;
use kiln_cuda::execute::{CudaExecutable, Gpu, NothingOutside};
use kiln_cuda::family::{CudaMaker, Family, Outcome};
use kiln_cuda::libraries::{Driver, Nvrtc};
use kiln_cuda::runtime::{Device, Storage};
use kiln_family::Maker as _;
use kiln_graph::{DType, Dimension, Graph, Resizer};

/// Runs that are timed at once, and how often.
const RUNS: usize = 10;
const ROUNDS: usize = 9;

/// Bytes below which an input may be indices.
const SMALL: usize = 256 << 10;

/// Kernels that are printed.
const WORST: usize = 4;

type Answer<T> = Result<T, Box<dyn Error>>;

/// A step with its memory.
struct Loaded {
    executable: CudaExecutable,
    inputs: Vec<Arc<Storage>>,
    outputs: Vec<Arc<Storage>>,
    scalars: Vec<u64>,
}

/// Numbers from 0 to 1 in f32; zeros in small inputs, which may be indices.
fn noise(bytes: usize) -> Vec<u8> {
    let word = |at: usize| (((at.wrapping_mul(2_654_435_761) >> 7) % 2001) as f32 / 2000.0).to_ne_bytes();
    match bytes {
        0..SMALL => vec![0; bytes],
        _ => (0..bytes.div_ceil(4)).flat_map(word).take(bytes).collect(),
    }
}

impl Loaded {
    fn new(gpu: &Arc<Gpu>, executable: CudaExecutable) -> Answer<Self> {
        let code = executable.code();
        let inputs: Vec<_> = code
            .inputs
            .iter()
            .map(|&bytes| gpu.upload(&noise(bytes)))
            .collect::<Result<_, _>>()?;
        let places = executable.contract().aliases.iter().zip(&code.outputs);
        let outputs = places
            .map(|(alias, &bytes)| match alias {
                Some(input) => Ok(inputs[*input as usize].clone()),
                None => gpu.allocate(bytes),
            })
            .collect::<Result<_, _>>()?;
        Ok(Self {
            scalars: vec![1_f64.to_bits(); code.scalars],
            executable,
            inputs,
            outputs,
        })
    }

    fn run(&self) -> Answer<()> {
        Ok(self
            .executable
            .run(&self.inputs, &self.outputs, &self.scalars, &NothingOutside, false)?)
    }

    /// The time of a step among steps that follow each other.
    fn time(&self, gpu: &Gpu) -> Answer<Duration> {
        let start = Instant::now();
        for _ in 0..RUNS {
            self.run()?;
        }
        gpu.stream().synchronize()?;
        Ok(start.elapsed() / RUNS as u32)
    }

    /// The elements of all outputs after one run.
    fn results(&self, gpu: &Arc<Gpu>) -> Answer<Vec<Vec<u8>>> {
        self.run()?;
        let read = |storage: &Arc<Storage>| {
            let mut bytes = vec![0; storage.bytes()];
            gpu.download(storage, &mut bytes)?;
            Ok(bytes)
        };
        self.outputs.iter().map(read).collect()
    }

    /// Microseconds of each kernel of the schedule.
    fn kernels(&self) -> Answer<Vec<f32>> {
        let mut taken = vec![0.0; self.executable.contract().kernels.len()];
        for time in self
            .executable
            .run_timed(&self.inputs, &self.outputs, &self.scalars, &NothingOutside)?
        {
            taken[time.kernel as usize] += 1000.0 * (time.end - time.begin);
        }
        Ok(taken)
    }
}

/// The graphs that the arguments ask for.
fn graphs(arguments: &[String]) -> Answer<Vec<(String, Graph)>> {
    let mut graphs: Vec<(String, Graph)> = Vec::new();
    for argument in arguments {
        let Ok(length) = argument.parse::<usize>() else {
            let graph = Graph::parse(&std::fs::read_to_string(argument)?)?;
            let name = argument.rsplit('/').next().unwrap_or(argument);
            graphs.push((name.to_owned(), graph));
            continue;
        };
        let (_, first) = graphs.first().ok_or("give a recorded step before lengths")?;
        let parameters = first.parameters().iter().enumerate();
        let is_batch = |&(_, &value): &(usize, &kiln_graph::Value)| {
            first.shape(value).rank() == 2 && !first.dtype(value).is_float()
        };
        let dimensions = parameters.filter(is_batch).map(|(parameter, _)| Dimension {
            parameter: parameter as u32,
            axis: 1,
        });
        let sizes: Vec<(Dimension, usize)> = dimensions.map(|dimension| (dimension, length)).collect();
        let resizer = Resizer::new(first, &vec![true; first.parameters().len()]);
        let graph = resizer
            .at(&sizes)
            .map_err(|pinned| format!("length {length}: {pinned}"))?;
        graphs.push((format!("length {length}"), graph));
    }
    Ok(graphs)
}

fn main() -> Answer<()> {
    let (flags, arguments): (Vec<String>, Vec<String>) =
        std::env::args().skip(1).partition(|text| text.starts_with("--"));
    let search = Search::from_env();
    let device = Device::open(&Driver::open(&search)?, 0)?;
    let gpu = Arc::new(Gpu::in_cache(
        &device,
        Nvrtc::open(&search)?,
        &CacheFolder::disabled(),
    )?);
    let options = Options {
        autocast: flags.iter().any(|flag| flag == "--bf16").then_some(DType::BF16),
        ..Options::default()
    };
    let maker = || CudaMaker::new(&options, &gpu.target(), gpu.clone());
    let (family, own) = (Family::new(maker()), maker());
    let mut sums = [0.0; 2];
    for (name, graph) in graphs(&arguments)? {
        let start = Instant::now();
        let (step, outcome) = family.compile_into(&graph, None)?;
        let executable = CudaExecutable::from_shared(&name, step, &gpu)?;
        let took = start.elapsed();
        let stages = executable.stages.clone();
        let shared = Loaded::new(&gpu, executable)?;
        let start = Instant::now();
        let alone = CudaExecutable::from_shared(&name, own.alone(&graph)?, &gpu)?;
        let alone_took = start.elapsed();
        let alone_stages = alone.stages.clone();
        let alone = Loaded::new(&gpu, alone)?;
        let same = shared.results(&gpu)? == alone.results(&gpu)?;
        for loaded in [&shared, &alone] {
            for _ in 0..3 {
                loaded.run()?;
            }
        }
        gpu.stream().synchronize()?;
        let mut times = [Vec::new(), Vec::new()];
        for _ in 0..ROUNDS {
            for (times, loaded) in times.iter_mut().zip([&shared, &alone]) {
                times.push(loaded.time(&gpu)?.as_secs_f64() * 1e3);
            }
        }
        times.iter_mut().for_each(|times| times.sort_by(f64::total_cmp));
        let [one, other] = times.map(|times| times[ROUNDS / 2]);
        sums[0] += one / other;
        sums[1] += 1.0;
        let built = match &outcome {
            Outcome::Built { functions, .. } => format!("{functions} kernels built"),
            Outcome::General { functions, .. } => format!("{functions} kernels, general"),
            Outcome::Known => "all known".to_owned(),
            Outcome::Alone(_) => "alone".to_owned(),
        };
        println!(
            "{name}: {one:.3} ms shared, {other:.3} ms alone, ratio {:.3}; bits {}; new shape {took:.2?} ({built}), alone {alone_took:.2?}; {} builds",
            one / other,
            if same { "equal" } else { "DIFFER" },
            family.stats().builds
        );
        let of = |stages: &[(&'static str, Duration)]| -> String {
            let wanted = ["samples", "nvrtc", "load", "products", "choices"];
            let own = stages.iter().filter(|(name, _)| wanted.contains(name));
            own.map(|(name, time)| format!(" {name} {:.0}", time.as_secs_f64() * 1e3))
                .collect()
        };
        println!(
            "    stages in ms, shared:{}; alone:{}",
            of(&stages),
            of(&alone_stages)
        );
        shared.kernels()?;
        alone.kernels()?;
        let pairs = shared.kernels()?.into_iter().zip(alone.kernels()?).enumerate();
        let mut pairs: Vec<_> = pairs.collect();
        pairs.sort_by(|a, b| (b.1.0 - b.1.1).total_cmp(&(a.1.0 - a.1.1)));
        let names = &shared.executable.contract().kernels;
        let worst = pairs.iter().take(WORST).map(|(number, (one, other))| {
            format!(
                " {} {one:.1}/{other:.1}",
                names[*number].name.chars().take(24).collect::<String>()
            )
        });
        println!("    kernels in us:{}", worst.collect::<String>());
    }
    println!("mean ratio {:.3}", sums[0] / sums[1]);
    Ok(())
}
