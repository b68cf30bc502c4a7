//! Runs a step of a debug dump alone, on random inputs, and prints how long each kernel takes.
//!
//! ```text
//! cargo run --release -p kiln-cuda --example rerun -- DUMP/step/step-0 [ORDINAL]
//! ```

use std::error::Error;
use std::path::Path;
use std::time::Instant;

use kiln_cuda::debug;
use kiln_cuda::execute::{CudaExecutable, Gpu, NothingOutside};

/// Runs that are timed.
const RUNS: usize = 20;

/// Runs of which the host's part is timed: it waits when it is more steps ahead.
const AHEAD: usize = 4;

/// Bytes below which an input may be indices.
const SMALL: usize = 256 << 10;

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let folder = arguments
        .next()
        .ok_or("give the folder of a step in a debug dump")?;
    let ordinal = arguments.next().map_or(Ok(0), |text| text.parse())?;
    let (code, contract) = debug::read(Path::new(&folder))?;
    let gpu = Gpu::get(ordinal)?;
    // Small numbers of either sign in f32; zeros in small inputs, which may be indices. Products of zeros
    // alone would be faster than those of numbers.
    let noise = |bytes: usize| -> Vec<u8> {
        let word =
            |at: usize| (((at.wrapping_mul(2_654_435_761) >> 7) % 2001) as f32 / 1000.0 - 1.0).to_ne_bytes();
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
    let executable = CudaExecutable::from_code("rerun", code, contract, &gpu)?;
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
    let names: Vec<&str> = executable
        .contract()
        .kernels
        .iter()
        .map(|kernel| kernel.name.as_str())
        .collect();
    let mut times = executable.run_timed(&inputs, &outputs, &scalars, &NothingOutside)?;
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
