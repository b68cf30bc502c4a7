//! Measured times in the report: how long each kernel took, and how that compares with what the machine can do.
//!
//! The limits are measured, not looked up, and briefly: a copy of more memory than caches hold, on all threads, and a matrix product of the step compiler's own. They say which
//! kernels leave much on the table; they are no benchmark.

use std::hint::black_box;
use std::time::{Duration, Instant};

use burn_tensor::{Distribution, Tensor};
use kiln_burn::{CompileOptions, Error, Kiln, KilnDevice};
use kiln_profile::Summary;

use super::report::{Kernel, Machine, Report};

/// Elements that each thread copies: twice 64 MB, beyond the last cache of most machines' cores.
const COPIED: usize = 16 << 20;

/// Rows and columns of the matrix product.
const SIDE: usize = 1024;

/// How often each is tried; the best counts.
const TRIES: usize = 4;

impl Machine {
    /// Measures what `threads` threads of this machine can do; 0 means all cores. Takes about a second, the first time on a machine some more for
    /// the C compiler.
    ///
    /// # Errors
    ///
    /// If the matrix product cannot be compiled or run.
    pub fn measure(threads: usize) -> Result<Self, Error> {
        let threads = match threads {
            0 => std::thread::available_parallelism().map_or(1, usize::from),
            threads => threads,
        };
        Ok(Self {
            bytes_per_second: copy_speed(threads),
            flops_per_second: product_speed(threads)?,
            threads,
        })
    }

    /// The shortest time in seconds in which this machine could do the work of `kernel`.
    pub fn least_seconds(&self, kernel: &Kernel) -> f64 {
        let moving = kernel.bytes as f64 / self.bytes_per_second;
        let computing = kernel.flops as f64 / self.flops_per_second;
        moving.max(computing)
    }
}

/// Bytes read and written a second by `threads` threads that copy.
fn copy_speed(threads: usize) -> f64 {
    let mut buffers: Vec<(Vec<f32>, Vec<f32>)> = (0..threads)
        .map(|_| (vec![1.0; COPIED], vec![0.0; COPIED]))
        .collect();
    let copy = |buffers: &mut Vec<(Vec<f32>, Vec<f32>)>| {
        let start = Instant::now();
        std::thread::scope(|scope| {
            for (from, to) in buffers.iter_mut() {
                scope.spawn(move || black_box(to).copy_from_slice(black_box(from)));
            }
        });
        start.elapsed()
    };
    let best = (0..TRIES).map(|_| copy(&mut buffers)).min().unwrap_or_default();
    (threads * COPIED * 8) as f64 / positive(best)
}

/// Floating point operations a second of a compiled matrix product.
fn product_speed(threads: usize) -> Result<f64, Error> {
    let device = KilnDevice::cpu();
    let matrix = || Tensor::<Kiln, 2>::random([SIDE, SIDE], Distribution::Default, &device);
    let (a, b) = (matrix(), matrix());
    let options = CompileOptions::default()
        .with_threads(threads)
        .with_name("machine_limit");
    let mut region = crate::compile(options);
    let mut best = Duration::MAX;
    for _ in 0..=TRIES {
        let start = Instant::now();
        black_box(region.run(|| a.clone().matmul(b.clone()))?);
        best = best.min(start.elapsed());
    }
    Ok(2.0 * (SIDE as f64).powi(3) / positive(best))
}

fn positive(time: Duration) -> f64 {
    time.as_secs_f64().max(1e-9)
}

impl Report {
    /// Adds the times of a profile: for each kernel that ran in it, the mean time of a run, and its share of what `machine` can do at most.
    pub fn add_times(&mut self, summary: &Summary, machine: Option<Machine>) {
        self.machine = machine.or(self.machine);
        for row in &summary.kernels {
            let mut steps = self.steps.iter_mut();
            let Some(step) = steps.find(|step| step.executable == row.step) else {
                continue;
            };
            let Some(kernel) = step.kernels.get_mut(row.kernel as usize) else {
                continue;
            };
            let seconds = row.seconds / row.calls.max(1) as f64;
            kernel.machine_share = machine.map(|machine| machine.least_seconds(kernel) / seconds.max(1e-9));
            kernel.seconds = Some(seconds);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::explain::Step;

    #[test]
    fn times_go_to_the_kernel_they_are_of() {
        let machine = Machine {
            bytes_per_second: 1e9,
            flops_per_second: 1e10,
            threads: 1,
        };
        let kernel = Kernel {
            bytes: 1000,
            flops: 1_000_000,
            ..Kernel::default()
        };
        let step = |executable| Step {
            executable,
            kernels: vec![Kernel::default(), kernel.clone()],
            ..Step::default()
        };
        let mut report = Report {
            steps: vec![step(3), step(7)],
            ..Report::default()
        };
        let row = kiln_profile::KernelRow {
            region: String::new(),
            step: 7,
            kernel: 1,
            name: String::new(),
            phase: String::new(),
            fused: String::new(),
            calls: 2,
            seconds: 4e-4,
            share: 1.0,
            bytes: 1000,
            flops: 1_000_000,
        };
        let summary = Summary {
            kernels: vec![row],
            ..Summary::default()
        };
        report.add_times(&summary, Some(machine));
        let measured = &report.steps[1].kernels[1];
        assert_eq!(measured.seconds, Some(2e-4));
        // Arithmetic binds: 10^6 operations take 10^-4 s, moving 1000 bytes 10^-6 s.
        assert!((measured.machine_share.unwrap() - 0.5).abs() < 1e-9);
        assert_eq!(report.steps[0].kernels[1].seconds, None);
        assert_eq!(report.steps[1].kernels[0].seconds, None);
    }
}
