//! Code that the examples share: a graph from a file, arguments for it, and runs of compiled steps on them.

use std::error::Error;
use std::sync::LazyLock;
use std::time::{Duration, Instant};

use kiln_cpu::{AlignedBuffer, CpuExecutable, Observer, StepError, StepHooks, ThreadPool};
use kiln_graph::{Graph, HostTensor, Scalar, TensorType};

/// The graph in the text file at `path`.
pub fn read(path: &str) -> Result<Graph, Box<dyn Error>> {
    let text = std::fs::read_to_string(path).map_err(|error| format!("{path}: {error}"))?;
    Ok(Graph::parse(&text)?)
}

/// Threads as `THREADS` in the environment says, or two.
pub fn threads() -> usize {
    let wanted = std::env::var("THREADS").ok();
    wanted.and_then(|count| count.parse().ok()).unwrap_or(2)
}

/// Time of this thread on a core: with one thread, other processes do not affect it.
pub fn thread_time() -> Duration {
    let mut time = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: the clock exists on every unix, and `time` is written before it is read.
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut time) };
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// A clock for work on `pool`: time on the core for one thread, and time that passes for several.
pub fn now(pool: &ThreadPool) -> Duration {
    static START: LazyLock<Instant> = LazyLock::new(Instant::now);
    match pool.threads() {
        1 => thread_time(),
        _ => START.elapsed(),
    }
}

/// The median of `times`, in any order.
pub fn median<T: Ord + Copy>(times: &[T]) -> T {
    let mut sorted = times.to_vec();
    sorted.sort();
    sorted[sorted.len() / 2]
}

/// Numbers of an argument that are drawn; from there on they repeat.
const DRAWN: usize = 1 << 16;

/// Small numbers; zeros and ones for integers, so that indices are in range.
fn argument(ty: &TensorType, seed: u64) -> HostTensor {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut next = move || {
        state = state
            .wrapping_mul(6364136223846793005)
            .wrapping_add(1442695040888963407);
        (state >> 40) as f64 / (1u64 << 24) as f64
    };
    let count = ty.numel().min(DRAWN);
    let shape = [count];
    if ty.dtype.is_float() {
        let values: Vec<f64> = (0..count).map(|_| (next() - 0.5) * 0.1).collect();
        HostTensor::from_floats(ty.dtype, shape, values)
    } else {
        let values: Vec<i64> = (0..count).map(|_| (next() * 2.0) as i64).collect();
        HostTensor::from_ints(ty.dtype, shape, values)
    }
}

/// Memory for the arguments and results of a graph. All executables of the graph can run on it, one after the
/// other.
pub struct Memory {
    /// The elements of each parameter.
    pub arguments: Vec<AlignedBuffer>,
    results: Vec<AlignedBuffer>,
    scalars: Vec<u64>,
}

impl Memory {
    /// Arguments for `graph`, the same at each call.
    pub fn new(graph: &Graph) -> Result<Self, Box<dyn Error>> {
        let mut arguments = Vec::new();
        for (seed, &value) in graph.parameters().iter().enumerate() {
            let ty = graph.ty(value);
            let mut buffer = AlignedBuffer::zeroed(ty.bytes())?;
            let tensor = argument(ty, seed as u64 + 1);
            let drawn = tensor.bytes();
            for part in buffer.as_mut_slice().chunks_mut(drawn.len().max(1)) {
                part.copy_from_slice(&drawn[..part.len()]);
            }
            arguments.push(buffer);
        }
        let mut results = Vec::new();
        for output in &graph.outputs {
            results.push(AlignedBuffer::zeroed(graph.ty(output.value).bytes())?);
        }
        let scalars = graph.scalars().iter();
        Ok(Self {
            arguments,
            results,
            scalars: scalars
                .map(|&value| Scalar::Float(0.5).to_bits(graph.dtype(value)))
                .collect(),
        })
    }

    /// Runs `step`, which must be compiled from the graph that this memory was made for. Outputs overwrite
    /// the arguments whose memory they take over.
    pub fn run(
        &mut self,
        step: &CpuExecutable,
        pool: &ThreadPool,
        hooks: &dyn StepHooks,
    ) -> Result<(), StepError> {
        self.run_observed(step, pool, hooks, None)
    }

    /// [`Memory::run`] with an observer of the memory between kernels.
    pub fn run_observed(
        &mut self,
        step: &CpuExecutable,
        pool: &ThreadPool,
        hooks: &dyn StepHooks,
        observer: Option<&mut Observer<'_>>,
    ) -> Result<(), StepError> {
        let inputs: Vec<*const u8> = self.arguments.iter().map(AlignedBuffer::as_ptr).collect();
        let mut outputs = Vec::new();
        for (buffer, alias) in self.results.iter_mut().zip(&step.contract().aliases) {
            outputs.push(match alias {
                Some(index) => self.arguments[*index as usize].as_mut_ptr(),
                None => buffer.as_mut_ptr(),
            });
        }
        // SAFETY: one buffer of the declared size for each parameter and output; an output that takes over an
        // argument's memory shares its pointer.
        unsafe { step.run_observed(pool, &inputs, &outputs, &self.scalars, hooks, observer) }
    }
}
