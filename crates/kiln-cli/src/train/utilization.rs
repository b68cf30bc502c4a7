//! How much of a GPU's arithmetic a step uses: the operations of its products, convolutions and attention over its
//! time, beside the rate of a large product that this GPU reaches.

use kiln::explain::Machine;
use kiln::{CompileOptions, KilnDevice, Place, RegionReport};

use super::Trainer;
use crate::error::CliError;

/// See the module.
pub struct Utilization {
    device: KilnDevice,
    options: CompileOptions,
    /// Calls that had been recorded when the step was looked at last.
    recorded: u64,
    /// Operations of a step; none before it is replayed, and where steps of several shapes run.
    flops: Option<u64>,
    /// Operations a second that the GPU reaches; none before it was measured.
    most: Option<f64>,
}

impl Utilization {
    /// Of steps on `device` with these options. Nothing is measured on the CPU.
    pub fn new(device: KilnDevice, options: CompileOptions) -> Self {
        Self {
            device,
            options,
            recorded: 0,
            flops: None,
            most: None,
        }
    }

    /// Looks at the step again if it was recorded since; the first time measures the GPU, some milliseconds.
    ///
    /// # Errors
    ///
    /// Those of [`Machine::measure_gpu`].
    pub fn look(&mut self, trainer: &dyn Trainer) -> Result<(), CliError> {
        let (Place::Cuda(ordinal), history) = (self.device.place(), trainer.history()) else {
            return Ok(());
        };
        if history.replayed == 0 || history.recorded == self.recorded {
            return Ok(());
        }
        self.recorded = history.recorded;
        self.flops = flops(&trainer.report());
        if self.most.is_none() {
            let machine = Machine::measure_gpu(usize::from(ordinal), &self.options)?;
            self.most = Some(machine.flops_per_second);
        }
        Ok(())
    }

    /// The part of the GPU's arithmetic that a step of so many seconds uses.
    pub fn share(&self, seconds: f64) -> Option<f64> {
        Some(self.flops? as f64 / seconds / self.most?)
    }
}

/// Operations of the one step that runs again and again.
fn flops(report: &RegionReport) -> Option<u64> {
    let mut lasting = report
        .steps
        .iter()
        .filter(|step| !step.provisional && step.runs > 1);
    let contract = lasting.next()?.contract.as_ref()?;
    if lasting.next().is_some() {
        return None;
    }
    Some(contract.kernels.iter().map(|kernel| kernel.flops).sum())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_share_is_arithmetic_over_time_and_peak() {
        let mut utilization = Utilization::new(KilnDevice::cpu(), CompileOptions::default());
        assert_eq!(utilization.share(1.0), None);
        (utilization.flops, utilization.most) = (Some(500), Some(1000.0));
        assert_eq!(utilization.share(0.5), Some(1.0));
        assert_eq!(utilization.share(1.0), Some(0.5));
    }
}
