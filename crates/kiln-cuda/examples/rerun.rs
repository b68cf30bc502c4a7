//! Runs a step alone, on random inputs, and prints how long each kernel takes: the code of a debug dump, or a recorded step, which is compiled first.
//!
//! ```text
//! cargo run --release -p kiln-cuda --example rerun -- DUMP/step/step-0 [ORDINAL]
//! cargo run --release -p kiln-cuda --example rerun -- STEP.kg [ORDINAL] [--tf32] [--bf16] [--without-cudnn] [--calls N] [--table] [--chain]
//! ```
//!
//! `--calls N` times the host's part of N settled calls, four at a time (it waits when it is more steps ahead), and prints the median, the mean and the 99th percentile.
//! `--table` prints every kernel with its bytes and operations instead of the longest forty. `--chain` runs one kernel after the other.

use std::error::Error;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kiln_compiler::{Contract, Options, compile};
use kiln_cuda::code::StepCode;
use kiln_cuda::execute::{CudaExecutable, Given, Gpu, NothingOutside};
use kiln_cuda::runtime::Storage;
use kiln_cuda::{CudaTarget, debug};
use kiln_graph::{DType, Graph};

/// Runs that are timed.
const RUNS: usize = 20;

/// Runs of which the host's part is timed: it waits when it is more steps ahead.
const AHEAD: usize = 4;

/// Bytes below which an input may be indices.
const SMALL: usize = 256 << 10;

/// The code of a dump, or that of a recorded step.
fn read(step: &Path, flags: &[String], gpu: &Gpu) -> Result<(StepCode, Contract), Box<dyn Error>> {
    if step.is_dir() {
        return Ok(debug::read(step)?);
    }
    let has = |flag: &str| flags.iter().any(|given| given == flag);
    let target = gpu.target();
    let target = CudaTarget {
        tf32: has("--tf32"),
        cudnn: target.cudnn && !has("--without-cudnn"),
        ..target
    };
    let graph = Graph::parse(&std::fs::read_to_string(step)?)?;
    let options = Options {
        autocast: has("--bf16").then_some(DType::BF16),
        ..Options::default()
    };
    let compiled = compile(&graph, &options, &target)?;
    let contract = compiled.contract();
    Ok((compiled.code, contract))
}

/// Times of calls whose arguments stay.
struct SettledTimes {
    /// One of calls that follow each other.
    queued: Duration,
    /// One that is waited for before the next, the median.
    waited: Duration,
    /// The host's part of each call.
    host: Vec<Duration>,
}

/// Times calls whose arguments stay, `calls` of them for the host's part. Small inputs that no output takes
/// over come from the host, as a batch does.
fn settled(
    executable: &CudaExecutable,
    gpu: &Gpu,
    inputs: &[Arc<Storage>],
    scalars: &[u64],
    calls: usize,
) -> Result<SettledTimes, Box<dyn Error>> {
    let aliases = &executable.contract().aliases;
    let is_fresh = |index: usize| inputs[index].bytes() < SMALL && !aliases.contains(&Some(index as u32));
    let stays = |(index, storage): (usize, &Arc<Storage>)| (!is_fresh(index)).then(|| storage.clone());
    let becomes: Vec<_> = aliases
        .iter()
        .map(|alias| alias.map(|input| input as usize))
        .collect();
    let mut settled = executable.settle(inputs.iter().enumerate().map(stays).collect(), &becomes)?;
    let fresh: Vec<Vec<u8>> = settled
        .fresh()
        .iter()
        .map(|&index| vec![0; inputs[index].bytes()])
        .collect();
    let given: Vec<_> = fresh.iter().map(|bytes| Given::Host(bytes)).collect();
    let mut run = |times: usize| -> Result<Duration, Box<dyn Error>> {
        let start = Instant::now();
        for _ in 0..times {
            executable.run_settled(&mut settled, &given, scalars, false)?;
        }
        Ok(start.elapsed() / times as u32)
    };
    // All blocks of pinned memory have been used once.
    run(16)?;
    gpu.stream().synchronize()?;
    let mut host = Vec::with_capacity(calls);
    for call in 0..calls.max(1) {
        host.push(run(1)?);
        if call % AHEAD == AHEAD - 1 {
            gpu.stream().synchronize()?;
        }
    }
    gpu.stream().synchronize()?;
    let start = Instant::now();
    run(RUNS)?;
    gpu.stream().synchronize()?;
    let queued = start.elapsed() / RUNS as u32;
    let mut waited = Vec::with_capacity(RUNS);
    for _ in 0..RUNS {
        let start = Instant::now();
        run(1)?;
        gpu.stream().synchronize()?;
        waited.push(start.elapsed());
    }
    host.sort();
    waited.sort();
    Ok(SettledTimes {
        queued,
        waited: waited[RUNS / 2],
        host,
    })
}

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments: Vec<String> = std::env::args().skip(1).collect();
    let calls = match arguments.iter().position(|text| text == "--calls") {
        Some(at) if at + 1 < arguments.len() => {
            let number = arguments.remove(at + 1).parse()?;
            arguments.remove(at);
            number
        }
        _ => AHEAD,
    };
    let (flags, places): (Vec<String>, Vec<String>) =
        arguments.into_iter().partition(|text| text.starts_with("--"));
    let step = places
        .first()
        .ok_or("give a recorded step, or the folder of a step in a debug dump")?;
    let ordinal = places.get(1).map_or(Ok(0), |text| text.parse())?;
    let gpu = Gpu::get(ordinal)?;
    let (mut code, contract) = read(Path::new(step), &flags, &gpu)?;
    if flags.iter().any(|flag| flag == "--chain") {
        code.orders.clear();
    }
    // Small numbers from 0 up in every type of 16 and 32 bits: some are second moments, whose roots must exist,
    // gradients of larger weights overflow, and attention leaves out no tile of scores that are NaN. Zeros in
    // small inputs, which may be indices. Products of zeros alone would be faster than those of numbers.
    let noise = |bytes: usize| -> Vec<u8> {
        // A half is a bf16 from 2^-11 to 2^-7, and an f16 from 0.75 to 1.
        let word = |at: usize| {
            let bits = (at.wrapping_mul(2_654_435_761) >> 7) as u32;
            (0x3a00_3a00 + (bits & 0x01ff_01ff)).to_ne_bytes()
        };
        match bytes {
            0..SMALL => vec![0; bytes],
            _ => (0..bytes.div_ceil(4)).flat_map(word).take(bytes).collect(),
        }
    };
    let inputs: Vec<_> = code
        .inputs
        .iter()
        .map(|&bytes| gpu.upload(&noise(bytes)))
        .collect::<Result<_, _>>()?;
    let places = contract.aliases.iter().zip(&code.outputs);
    let outputs: Vec<_> = places
        .map(|(alias, &bytes)| match alias {
            Some(input) => Ok(inputs[*input as usize].clone()),
            None => gpu.allocate(bytes),
        })
        .collect::<Result<_, _>>()?;
    let scalars = vec![1_f64.to_bits(); code.scalars];
    let start = Instant::now();
    let executable = CudaExecutable::from_code("rerun", code, contract, &gpu)?;
    println!("built in {:?}: {:?}", start.elapsed(), executable.stages);
    for _ in 0..3 {
        executable.run(&inputs, &outputs, &scalars, &NothingOutside, false)?;
    }
    gpu.stream().synchronize()?;
    let start = Instant::now();
    for _ in 0..AHEAD {
        executable.run(&inputs, &outputs, &scalars, &NothingOutside, false)?;
    }
    let host = start.elapsed() / AHEAD as u32;
    gpu.stream().synchronize()?;
    let start = Instant::now();
    for _ in 0..RUNS {
        executable.run(&inputs, &outputs, &scalars, &NothingOutside, false)?;
    }
    gpu.stream().synchronize()?;
    let step = start.elapsed() / RUNS as u32;
    println!("{step:?} a step, {host:?} of the host to queue it");
    if executable.can_settle() {
        let SettledTimes { queued, waited, host } = settled(&executable, &gpu, &inputs, &scalars, calls)?;
        let mean = host.iter().sum::<Duration>() / host.len().max(1) as u32;
        let (median, slow) = (host[host.len() / 2], host[host.len() * 99 / 100]);
        println!(
            "{queued:?} a settled step, {waited:?} one that is waited for; of the host to queue it {median:?} (median), \
             {mean:?} (mean), {slow:?} (99th percentile) of {} calls",
            host.len()
        );
    }
    let names: Vec<&str> = executable
        .contract()
        .kernels
        .iter()
        .map(|kernel| kernel.name.as_str())
        .collect();
    let mut times = executable.run_timed(&inputs, &outputs, &scalars, &NothingOutside)?;
    if flags.iter().any(|flag| flag == "--table") {
        let mut taken = vec![0.0; names.len()];
        for time in &times {
            taken[time.kernel as usize] += 1000.0 * (time.end - time.begin);
        }
        for (number, (kernel, taken)) in executable.contract().kernels.iter().zip(taken).enumerate() {
            let (bytes, flops) = (kernel.bytes, kernel.flops);
            println!(
                "{number:>5} {taken:>9.1} us {bytes:>12} B {flops:>16} FLOP {}",
                kernel.name
            );
        }
        return Ok(());
    }
    // Time of each kernel, and of each kind of kernel: the first word of its name.
    let mut kinds: Vec<(String, f32, usize)> = Vec::new();
    for time in &times {
        let name = names[time.kernel as usize];
        let kind = name.split([' ', '_']).take(2).collect::<Vec<_>>().join(" ");
        let kind = kind.trim_end_matches(|c: char| c.is_ascii_digit()).trim_end();
        let taken = 1000.0 * (time.end - time.begin);
        match kinds.iter_mut().find(|(known, ..)| known == kind) {
            Some((_, sum, count)) => (*sum, *count) = (*sum + taken, *count + 1),
            None => kinds.push((kind.to_owned(), taken, 1)),
        }
    }
    kinds.sort_by(|a, b| b.1.total_cmp(&a.1));
    for (kind, taken, count) in kinds.iter().take(12) {
        println!("{taken:>9.1} us  {count:>4} calls of {kind}");
    }
    times.sort_by(|a, b| (b.end - b.begin).total_cmp(&(a.end - a.begin)));
    for time in times.iter().take(40) {
        println!(
            "{:>9.1} us  kernel {:>4} {}",
            1000.0 * (time.end - time.begin),
            time.kernel,
            names[time.kernel as usize]
        );
    }
    Ok(())
}
