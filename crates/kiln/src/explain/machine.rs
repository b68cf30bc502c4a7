//! The limits of this machine, measured.
//!
//! Two kinds of rates are measured briefly: how fast all threads together read and copy, for amounts from
//! those that the first cache holds to those that no cache holds, and how fast a matrix product of the step
//! compiler's own runs. Kernels are compared with these limits; they are no benchmark.

use std::collections::BTreeMap;
use std::hint::black_box;
use std::sync::{Barrier, Mutex, PoisonError};
use std::time::{Duration, Instant};

use burn_tensor::{DType, Distribution, Tensor};
use kiln_burn::{CompileOptions, Error, Kiln, KilnDevice, Place};
use kiln_cuda::execute::{Gpu, Limits};
use kiln_cuda::products::Number;

use super::report::{Kernel, Machine, Rate};

/// Bytes that all threads together work on, the smallest first: within the caches of most machines, and
/// beyond.
const AMOUNTS: [u64; 6] = [64 << 10, 512 << 10, 2 << 20, 8 << 20, 32 << 20, 256 << 20];

/// Bytes that a thread moves, at least, in one measurement: some milliseconds.
const MOVED: u64 = 32 << 20;

/// Rows and columns of the matrix product.
const SIDE: usize = 1024;

/// How often each is tried; the best counts.
const TRIES: usize = 4;

/// The resource that limits a kernel.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Limit {
    /// Arithmetic.
    Arithmetic,
    /// Moving bytes that caches hold.
    Cache,
    /// Moving more bytes than caches hold.
    Memory,
}

impl Limit {
    /// The limit in a word.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Arithmetic => "arithmetic",
            Self::Cache => "cache",
            Self::Memory => "memory",
        }
    }
}

/// The most bytes of a GPU's memory that this process has held at once: tensors, and the arenas of compiled
/// steps. The driver and the libraries hold some more. None for a device in the host's memory.
///
/// # Errors
///
/// If there is no such GPU.
pub fn device_memory_peak(device: KilnDevice) -> Result<Option<u64>, Error> {
    match device.place() {
        Place::Host => Ok(None),
        Place::Cuda(ordinal) => {
            let gpu = Gpu::get(usize::from(ordinal))?;
            Ok(Some(gpu.device().memory_peak()? as u64))
        }
    }
}

impl Machine {
    /// Measures the limits of `threads` threads of this machine; 0 means all cores. Takes about a second,
    /// once for each number of threads in a process; the first time on a machine the C compiler adds some
    /// more.
    ///
    /// # Errors
    ///
    /// If the matrix product cannot be compiled or run.
    pub fn measure(threads: usize) -> Result<Self, Error> {
        static KNOWN: Mutex<BTreeMap<usize, Machine>> = Mutex::new(BTreeMap::new());
        let threads = match threads {
            0 => std::thread::available_parallelism().map_or(1, usize::from),
            threads => threads,
        };
        let mut known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(machine) = known.get(&threads) {
            return Ok(machine.clone());
        }
        let mut rates: Vec<Rate> = AMOUNTS
            .iter()
            .map(|&bytes| Rate {
                bytes,
                bytes_per_second: moving_speed(threads, bytes),
            })
            .collect();
        // More data is never faster: if a measurement of less data was disturbed, the rate of more data
        // replaces it.
        for at in (1..rates.len()).rev() {
            rates[at - 1].bytes_per_second = rates[at - 1].bytes_per_second.max(rates[at].bytes_per_second);
        }
        let memory = rates.pop().map_or(0.0, |rate| rate.bytes_per_second);
        let machine = Self {
            bytes_per_second: memory,
            caches: rates,
            flops_per_second: product_speed(threads)?,
            threads,
            gpu: None,
        };
        known.insert(threads, machine.clone());
        Ok(machine)
    }

    /// Measures the limits of the GPU of this ordinal for steps with these options, whose `tf32` and `autocast`
    /// decide which product is the measure; takes some milliseconds.
    ///
    /// # Errors
    ///
    /// If there is no such GPU, or it has less than 1 GiB of memory left.
    pub fn measure_gpu(ordinal: usize, options: &CompileOptions) -> Result<Self, Error> {
        let gpu = Gpu::get(ordinal)?;
        let numbers = match options.autocast {
            Some(DType::BF16) => Number::Bf16,
            Some(DType::F16) => Number::F16,
            _ => Number::F32,
        };
        let Limits {
            moving,
            flops_per_second,
        } = Limits::measure(&gpu, numbers, options.tf32)?;
        let rate = |&(bytes, bytes_per_second): &(u64, f64)| Rate {
            bytes,
            bytes_per_second,
        };
        let mut caches: Vec<Rate> = moving.iter().map(rate).collect();
        let memory = caches.pop().map_or(0.0, |rate| rate.bytes_per_second);
        Ok(Self {
            bytes_per_second: memory,
            caches,
            flops_per_second,
            threads: 1,
            gpu: Some(gpu.device().description().name.clone()),
        })
    }

    /// Bytes a second at which the machine moves `bytes` of them: at the rate of caches where they fit, and
    /// between two measurements by the logarithm of the amount.
    pub fn moving_rate(&self, bytes: u64) -> f64 {
        let memory = Rate {
            bytes: AMOUNTS[AMOUNTS.len() - 1],
            bytes_per_second: self.bytes_per_second,
        };
        let mut below: Option<Rate> = None;
        for rate in self.caches.iter().copied().chain([memory]) {
            if bytes <= rate.bytes {
                let Some(below) = below else {
                    return rate.bytes_per_second;
                };
                let log = |bytes: u64| (bytes.max(1) as f64).ln();
                let share = (log(bytes) - log(below.bytes)) / (log(rate.bytes) - log(below.bytes));
                return below.bytes_per_second + share * (rate.bytes_per_second - below.bytes_per_second);
            }
            below = Some(rate);
        }
        self.bytes_per_second
    }

    /// The machine that was measured, in words: `with 8 threads`, `on NVIDIA H200`.
    pub fn what(&self) -> String {
        match &self.gpu {
            Some(gpu) => format!("on {gpu}"),
            None => format!("with {} threads", self.threads),
        }
    }

    /// The shortest time in seconds in which this machine could do the work of `kernel`, and the resource
    /// that limits it.
    pub fn least_seconds(&self, kernel: &Kernel) -> (f64, Limit) {
        let moving = kernel.bytes as f64 / self.moving_rate(kernel.bytes);
        let computing = kernel.flops as f64 / self.flops_per_second;
        let largest_cache = self.caches.last().map_or(0, |rate| rate.bytes);
        match moving > computing {
            true if kernel.bytes <= largest_cache => (moving, Limit::Cache),
            true => (moving, Limit::Memory),
            false => (computing, Limit::Arithmetic),
        }
    }
}

/// Bytes a second by `threads` threads that copy from one half of `bytes` to the other, or read all of it,
/// whichever is faster.
fn moving_speed(threads: usize, bytes: u64) -> f64 {
    let elements = (bytes as usize / 4 / threads / 2).max(1024);
    let rounds = (MOVED as usize / (elements * 8)).max(1);
    let barrier = Barrier::new(threads);
    let work = |from: &[f32], to: &mut [f32]| {
        let mut best = [Duration::MAX; 2];
        for _ in 0..TRIES {
            for (kind, best) in best.iter_mut().enumerate() {
                barrier.wait();
                let start = Instant::now();
                for _ in 0..rounds {
                    match kind {
                        0 => black_box(&mut *to).copy_from_slice(black_box(from)),
                        _ => {
                            black_box(sum(black_box(from)) + sum(black_box(to)));
                        }
                    }
                }
                *best = start.elapsed().min(*best);
            }
        }
        best
    };
    let run = || {
        let (from, mut to) = (vec![1.0f32; elements], vec![0.0f32; elements]);
        work(&from, &mut to)
    };
    let times: Vec<[Duration; 2]> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..threads).map(|_| scope.spawn(run)).collect();
        threads
            .into_iter()
            .filter_map(|thread| thread.join().ok())
            .collect()
    });
    let slowest = |kind: usize| times.iter().map(|best| best[kind]).max().unwrap_or_default();
    let moved = (threads * rounds * elements * 8) as f64;
    moved / positive(slowest(0).min(slowest(1)))
}

/// The sum of the elements, with so many partial sums that reading limits its speed.
fn sum(values: &[f32]) -> f32 {
    let mut sums = [0.0f32; 64];
    for chunk in values.chunks_exact(sums.len()) {
        sums.iter_mut().zip(chunk).for_each(|(sum, x)| *sum += x);
    }
    sums.iter().sum()
}

/// Floating point operations a second of a compiled matrix product, by the time in compiled code.
fn product_speed(threads: usize) -> Result<f64, Error> {
    let device = KilnDevice::cpu();
    let matrix = || Tensor::<Kiln, 2>::random([SIDE, SIDE], Distribution::Default, &device);
    let (a, b) = (matrix(), matrix());
    let options = CompileOptions::default()
        .with_threads(threads)
        .with_name("machine_limit");
    let mut region = crate::compile(options);
    let mut best = Duration::MAX;
    let mut before = Duration::ZERO;
    for _ in 0..=TRIES {
        black_box(region.run(|| a.clone().matmul(b.clone()))?);
        let code = region.report().steps.iter().map(|step| step.code_time).sum();
        best = best.min(code - before);
        before = code;
    }
    Ok(2.0 * (SIDE as f64).powi(3) / positive(best))
}

fn positive(time: Duration) -> f64 {
    time.as_secs_f64().max(1e-9)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn machine() -> Machine {
        let rate = |bytes, bytes_per_second| Rate {
            bytes,
            bytes_per_second,
        };
        Machine {
            bytes_per_second: 1e10,
            caches: vec![rate(1 << 16, 1e11), rate(1 << 20, 5e10)],
            flops_per_second: 1e11,
            threads: 1,
            gpu: None,
        }
    }

    #[test]
    fn what_caches_hold_moves_at_their_rate() {
        let machine = machine();
        assert_eq!(machine.moving_rate(100), 1e11);
        assert_eq!(machine.moving_rate(1 << 16), 1e11);
        // Half way between two measurements, by the logarithm.
        assert!((machine.moving_rate(1 << 18) - 7.5e10).abs() < 1.0);
        assert_eq!(machine.moving_rate(1 << 20), 5e10);
        assert_eq!(machine.moving_rate(1 << 40), 1e10);
    }

    #[test]
    fn the_limit_is_what_takes_longest() {
        let machine = machine();
        let least = |bytes, flops| {
            let kernel = Kernel {
                bytes,
                flops,
                ..Kernel::default()
            };
            machine.least_seconds(&kernel)
        };
        assert_eq!(least(1 << 16, 0).1, Limit::Cache);
        assert_eq!(least(1 << 30, 0).1, Limit::Memory);
        let (seconds, limit) = least(1 << 16, 100_000_000);
        assert_eq!(limit, Limit::Arithmetic);
        assert!((seconds - 1e-3).abs() < 1e-9);
    }
}
