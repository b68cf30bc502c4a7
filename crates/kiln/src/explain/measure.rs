//! Measured times in the report: how long each kernel took, and how that compares with the limits of the
//! machine.

use kiln_profile::Summary;

use super::machine::Limit;
use super::report::{Machine, Report};

/// How much slower than the limit a kernel must be for a cause to be named: less is noise of the
/// measurement.
const NOISE: f64 = 1.2;

impl Report {
    /// Adds the times of a profile: for each kernel that ran in it, the mean time of a run, and the share
    /// of the limit of `machine` that it reaches.
    pub fn add_times(&mut self, summary: &Summary, machine: Option<Machine>) {
        self.machine = machine.or_else(|| self.machine.take());
        for row in &summary.kernels {
            let mut steps = self.steps.iter_mut();
            let Some(step) = steps.find(|step| step.executable == row.step) else {
                continue;
            };
            let Some(kernel) = step.kernels.get_mut(row.kernel as usize) else {
                continue;
            };
            let seconds = row.seconds / row.calls.max(1) as f64;
            kernel.seconds = Some(seconds);
            let number = row.kernel as usize;
            let mut travellers = step.collectives.iter_mut();
            if let Some(traveller) = travellers.find(|it| it.start == number || it.wait == number) {
                if traveller.wait == number {
                    traveller.exposed = Some(seconds);
                }
                continue;
            }
            if let Some(machine) = &self.machine {
                let (least, limit) = machine.least_seconds(kernel);
                let share = least / seconds.max(1e-9);
                // Bytes are counted by whole buffers. A kernel that seems to exceed the limit reads only
                // parts of its buffers.
                kernel.machine_share = Some(share.min(1.0));
                kernel.limit = Some(match share > NOISE && limit != Limit::Arithmetic {
                    true => format!("{}, a part of its buffers", limit.name()),
                    false => limit.name().to_owned(),
                });
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::explain::{Kernel, Step};

    #[test]
    fn times_go_to_the_kernel_they_are_of() {
        let machine = Machine {
            bytes_per_second: 1e9,
            caches: Vec::new(),
            flops_per_second: 1e10,
            threads: 1,
            gpu: None,
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
        assert_eq!(measured.limit.as_deref(), Some("arithmetic"));
        assert_eq!(report.steps[0].kernels[1].seconds, None);
        assert_eq!(report.steps[1].kernels[0].seconds, None);
    }

    #[test]
    fn no_kernel_beats_the_machine() {
        let kernel = Kernel {
            bytes: 1_000_000,
            ..Kernel::default()
        };
        let mut report = Report {
            steps: vec![Step {
                kernels: vec![kernel],
                ..Step::default()
            }],
            ..Report::default()
        };
        let row = kiln_profile::KernelRow {
            region: String::new(),
            step: 0,
            kernel: 0,
            name: String::new(),
            phase: String::new(),
            fused: String::new(),
            calls: 1,
            seconds: 1e-5,
            share: 1.0,
            bytes: 1_000_000,
            flops: 0,
        };
        let summary = Summary {
            kernels: vec![row],
            ..Summary::default()
        };
        let machine = Machine {
            bytes_per_second: 1e10,
            flops_per_second: 1e10,
            ..Machine::default()
        };
        // A gather of a few rows: by whole buffers it would be ten times as fast as memory.
        report.add_times(&summary, Some(machine));
        let kernel = &report.steps[0].kernels[0];
        assert_eq!(kernel.machine_share, Some(1.0));
        assert_eq!(kernel.limit.as_deref(), Some("memory, a part of its buffers"));
    }
}
