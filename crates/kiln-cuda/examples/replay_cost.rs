//! What the host pays for a call of a step, without a GPU: the driver is one that keeps its calls, and takes
//! next to no time for them.
//!
//! ```text
//! cargo run --release -p kiln-cuda --features testing --example replay_cost -- [ARGUMENTS]
//! ```
//!
//! The step updates some 600 tensors by AdamW, as a training step does, and is given a batch from the host.
//! What NVIDIA's driver takes comes on top: some 3 microseconds for a small copy, 2.5 and one nanosecond a
//! node for a graph's launch.

use std::error::Error;
use std::fmt::Write as _;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kiln_compiler::{Options, compile};
use kiln_cuda::execute::{CudaExecutable, Given, Gpu, NothingOutside};
use kiln_cuda::libraries::Nvrtc;
use kiln_cuda::runtime::Device;
use kiln_cuda::testing::FakeDriver;
use kiln_cuda::{CudaTarget, Search};
use kiln_graph::Graph;

/// Calls that are timed at once; their median counts.
const CALLS: usize = 200;

/// A step that updates `tensors` tensors with two moments each.
fn step(tensors: usize) -> String {
    let mut text = String::from("graph @step {\n");
    let (mut body, mut results) = (String::new(), Vec::new());
    for number in 0..tensors {
        for (at, name) in ["w", "m", "v"].iter().enumerate() {
            let _ = writeln!(
                text,
                "  %{name}{number} = parameter {} : f32[64]",
                3 * number + at
            );
        }
        let _ = write!(
            body,
            "  %a{number} = add %m{number}, %x : f32[64]\n  %q{number} = mul %x, %x : f32[64]\n  \
             %b{number} = add %v{number}, %q{number} : f32[64]\n  %r{number} = mul %a{number}, %rate : f32[64]\n  \
             %c{number} = sub %w{number}, %r{number} : f32[64]\n"
        );
        results.push(format!(
            "%c{number} (alias {}), %a{number} (alias {}), %b{number} (alias {})",
            3 * number,
            3 * number + 1,
            3 * number + 2
        ));
    }
    let _ = write!(
        text,
        "  %x = parameter {} : f32[64]\n  %s = scalar 0 : f32[]\n  %rate = broadcast %s {{dims=[]}} : f32[64]\n{body}  \
         %loss = reduce sum %x {{axes=[0]}} : f32[]\n  return {}, %loss\n}}\n",
        3 * tensors,
        results.join(", ")
    );
    text
}

fn median(mut times: Vec<Duration>) -> Duration {
    times.sort();
    times[times.len() / 2]
}

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: usize = std::env::args().nth(1).map_or(Ok(600), |text| text.parse())?;
    let graph = Graph::parse(&step(arguments / 3))?;
    let compiled = compile(&graph, &Options::default(), &CudaTarget::default())?;
    let contract = compiled.contract();
    let fake = FakeDriver::start(1, 1 << 30)?;
    for function in &compiled.code.functions {
        let pointers = function.text.parameters.len() + usize::from(function.guarded);
        fake.declare(&function.name, &vec![8; pointers]);
    }
    let device = Device::open(fake.driver(), 0)?;
    let gpu = Arc::new(Gpu::new(&device, Nvrtc::open(&Search::from_env())?)?);
    let executable = CudaExecutable::from_code("step", compiled.code, contract, &gpu)?;
    let state: Vec<_> = executable.code().inputs[..arguments / 3 * 3]
        .iter()
        .map(|&bytes| gpu.allocate(bytes))
        .collect::<Result<_, _>>()?;
    let batch = [0; 256];
    let scalars = [0];
    let count = state.len();

    let plain = || -> Result<Duration, Box<dyn Error>> {
        let start = Instant::now();
        let mut inputs = state.clone();
        inputs.push(gpu.upload(&batch)?);
        let mut outputs = state.clone();
        outputs.push(gpu.allocate(4)?);
        executable.run(&inputs, &outputs, &scalars, &NothingOutside, false)?;
        Ok(start.elapsed())
    };
    for _ in 0..3 {
        plain()?;
    }
    fake.calls();
    let mut times = Vec::new();
    for _ in 0..CALLS {
        times.push(plain()?);
        fake.calls();
    }
    println!(
        "{count} arguments of state, {} calls of the driver in the graph",
        executable.code().calls.len()
    );
    println!(
        "every argument given at each call: {} ns",
        median(times).as_nanos()
    );

    let mut inputs: Vec<_> = state.iter().cloned().map(Some).collect();
    inputs.push(None);
    let mut becomes: Vec<_> = (0..count).map(Some).collect();
    becomes.push(None);
    let start = Instant::now();
    let mut settled = executable.settle(inputs, &becomes)?;
    let mut call = || -> Result<Duration, Box<dyn Error>> {
        let start = Instant::now();
        executable.run_settled(&mut settled, &[Given::Host(&batch)], &scalars, false)?;
        Ok(start.elapsed())
    };
    call()?;
    println!("settling, and the first call: {} us", start.elapsed().as_micros());
    fake.calls();
    let mut times = Vec::new();
    let mut asked = 0;
    for _ in 0..CALLS {
        times.push(call()?);
        asked = fake.calls().len();
    }
    println!(
        "settled: {} ns a call, {asked} calls of the driver",
        median(times).as_nanos()
    );
    Ok(())
}
