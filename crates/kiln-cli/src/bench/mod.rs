//! `kiln bench`: one training step, timed.
//!
//! The step is what users run: forward pass, loss, backward pass and AdamW through [`kiln::TrainStep`], on
//! random inputs, one step after the other. `first` is the time of the first call, which records, compiles
//! and runs the step. `median` and `min` are of calls after the step is replayed. The fields are those of the
//! peers in `crates/kiln-cli/peers`, so that lines can stand beside each other.
//!
//! Started as several ranks (`torchrun`, `mpirun`, `srun`), the ranks train together, each on `--batch`
//! examples of its own, and rank 0 prints.

mod subject;
mod table;

use std::time::Instant;

use burn::tensor::backend::Backend;
use kiln::distributed::{self, World};
use kiln::{CompileOptions, Kiln, Place, RegionReport};
use serde::{Deserialize, Serialize};

use crate::args::BenchArguments;
use crate::config::OptimizerConfig;
use crate::error::CliError;
use crate::model::{initialise, without_autodiff};
use crate::show;
use crate::train::{Setting, Together, TrainBackend, build_trainer, peak_memory_mb, threads};
pub use subject::Subject;

/// Calls before the timed ones: compilation, the check that it was the same step, one replay.
const WARMUP: usize = 3;
const RATE: f64 = 1e-4;

/// One measurement.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Measurement {
    /// The program that was measured: `kiln-BACKEND`, `torch-MODE`, `jax-MODE`.
    pub peer: String,
    /// Model.
    pub model: String,
    /// Examples in a batch.
    pub batch: usize,
    /// Tokens in an example.
    pub seq: usize,
    /// Element type.
    pub dtype: String,
    /// Whether it is the forward pass alone.
    pub infer: bool,
    /// Median time of a step in seconds.
    pub median: f64,
    /// Shortest time of a step in seconds.
    pub min: f64,
    /// Time of the first call, in seconds.
    pub first: f64,
    /// Peak memory of the process in MiB.
    pub mem_mb: u64,
    /// The most memory of the GPU that was held at once in MiB; none on the CPU.
    #[serde(default)]
    pub device_mb: Option<u64>,
    /// Last loss; of a forward pass the mean of its output.
    pub loss: f64,
    /// The compiled step's block of intermediate values in MiB.
    #[serde(default)]
    pub arena_mb: Option<f64>,
    /// Time to compile, in seconds.
    #[serde(default)]
    pub compile_s: Option<f64>,
    /// Timed calls that were recorded instead of replayed: proofs.
    #[serde(default)]
    pub proofs: usize,
    /// The time of these calls beyond the median of all calls, as a part of the time of all calls; at least
    /// 0.
    #[serde(default)]
    pub proof_share: f64,
}

/// `kiln bench`.
///
/// # Errors
///
/// [`CliError::Unknown`] for a model that is not known, or whatever its step fails with.
pub fn command(arguments: &BenchArguments) -> Result<(), CliError> {
    if arguments.table {
        return table::command(arguments);
    }
    let name = arguments
        .model
        .as_deref()
        .ok_or_else(|| CliError::Usage("give a model, or --table".to_owned()))?;
    let world = distributed::init()?;
    let measurement = measure(name, arguments, &world)?;
    if !world.is_first() {
        return Ok(());
    }
    if arguments.json {
        show::line(format_args!(
            "{}",
            serde_json::to_string(&measurement).map_err(|error| CliError::Usage(error.to_string()))?
        ));
        return Ok(());
    }
    let Measurement {
        peer,
        median,
        min,
        first,
        mem_mb,
        device_mb,
        loss,
        arena_mb,
        compile_s,
        proofs,
        proof_share,
        ..
    } = &measurement;
    let what = if arguments.infer {
        "forward pass"
    } else {
        "training step"
    };
    show::line(format_args!(
        "{name} on {peer}: {what} {:.1} ms (fastest {:.1} ms)",
        median * 1e3,
        min * 1e3
    ));
    show::line(format_args!(
        "first call {first:.1} s, of which compiling {:.1} s",
        compile_s.unwrap_or(0.0)
    ));
    if *proofs > 0 {
        show::line(format_args!(
            "{proofs} of the timed calls were recorded as proofs, which took {:.2} % of all",
            100.0 * proof_share
        ));
    }
    let arena = arena_mb.map_or_else(String::new, |arena| format!(", arena {arena:.1} MiB"));
    let of_gpu = device_mb.map_or_else(String::new, |mb| format!(", of the GPU {mb} MiB"));
    show::line(format_args!(
        "peak memory {mem_mb} MiB{of_gpu}{arena}, last {} {loss:.4}",
        if arguments.infer {
            "mean of the output"
        } else {
            "loss"
        }
    ));
    Ok(())
}

/// Seconds of the first call, of each timed one, and of those of them that were recorded.
struct Times {
    first: f64,
    timed: Vec<f64>,
    recorded: Vec<f64>,
}

impl Times {
    fn median(&self) -> f64 {
        self.timed[self.timed.len() / 2]
    }

    /// The time of the recorded calls beyond the median, as a part of the time of all calls. Calls that took
    /// less than the median cost nothing.
    fn proof_share(&self) -> f64 {
        let beyond = total(self.recorded.iter().map(|time| time - self.median()));
        beyond.max(0.0) / total(self.timed.iter().copied())
    }
}

/// The sum of some seconds. That of none is 0, where [`Iterator::sum`] has -0.
fn total(seconds: impl Iterator<Item = f64>) -> f64 {
    seconds.fold(0.0, |sum, seconds| sum + seconds)
}

/// Calls `step` until it is warm and then `steps` times. `step` also returns how many calls were recorded
/// so far.
fn time<T>(
    steps: usize,
    mut step: impl FnMut() -> Result<(T, u64), CliError>,
) -> Result<(Times, T), CliError> {
    let start = Instant::now();
    let mut last = step()?;
    let first = start.elapsed().as_secs_f64();
    for _ in 1..WARMUP {
        last = step()?;
    }
    let mut times = Times {
        first,
        timed: Vec::with_capacity(steps),
        recorded: Vec::new(),
    };
    for _ in 0..steps.max(1) {
        let recorded = last.1;
        let start = Instant::now();
        last = step()?;
        let time = start.elapsed().as_secs_f64();
        times.timed.push(time);
        times.recorded.extend((last.1 > recorded).then_some(time));
    }
    times.timed.sort_by(f64::total_cmp);
    Ok((times, last.0))
}

fn measure(name: &str, arguments: &BenchArguments, world: &World) -> Result<Measurement, CliError> {
    // Each rank takes a GPU of its own.
    let device = match arguments.device.place() {
        Place::Cuda(_) if world.size() > 1 => distributed::device(world),
        _ => arguments.device,
    };
    Kiln::seed(&device, 0);
    let subject = Subject::new(name, arguments.batch, arguments.seq, arguments.size)?;
    let options = CompileOptions {
        threads: threads(world),
        memory_budget: arguments.memory_budget,
        tf32: arguments.tf32,
        autocast: arguments.autocast,
        ..CompileOptions::default()
            .with_backend(arguments.backend)
            .with_name("bench")
    };
    let model = subject.architecture.init::<TrainBackend>(&device)?;
    initialise(&model);
    let (times, loss, report) = if arguments.infer {
        let model = without_autodiff(&model);
        let forward = kiln::compile_fn(|batch| model.logits(batch)).with_options(options);
        let batch = subject.batch::<Kiln>(&device);
        let (times, output) = time(arguments.steps, || Ok((forward.call(batch.clone())?, 0)))?;
        let data = output
            .try_into_data()
            .map_err(|error| CliError::Usage(format!("the output cannot be read: {error}")))?;
        let (sum, count) = data
            .iter::<f64>()
            .fold((0.0, 0usize), |(sum, count), value| (sum + value, count + 1));
        (times, sum / count.max(1) as f64, forward.report())
    } else {
        let optimizer = OptimizerConfig::default();
        let mut trainer = build_trainer(
            model,
            &optimizer,
            Setting {
                options,
                weights: arguments.weights,
                together: Some(Together {
                    sharded: arguments.sharded,
                    ..Together::plain(world)
                }),
                ..Setting::default()
            },
        )?;
        let batch = subject.batch::<TrainBackend>(&device);
        let (times, loss) = time(arguments.steps, || {
            let loss = trainer.step(RATE, vec![batch.clone()])?.read()?;
            Ok((loss, trainer.history().recorded))
        })?;
        (times, f64::from(loss), trainer.report())
    };
    Ok(Measurement {
        peer: match device.place() {
            Place::Host => format!("kiln-{}", arguments.backend),
            place => format!("kiln-{place}"),
        },
        model: name.to_owned(),
        batch: arguments.batch,
        seq: arguments.seq,
        dtype: "f32".to_owned(),
        infer: arguments.infer,
        median: times.median(),
        min: times.timed[0],
        first: times.first,
        mem_mb: peak_memory_mb().unwrap_or(0),
        device_mb: kiln::explain::device_memory_peak(device)?.map(|bytes| bytes >> 20),
        loss,
        arena_mb: arena_mb(&report),
        compile_s: Some(total(
            report.steps.iter().map(|step| step.compile_time.as_secs_f64()),
        )),
        proofs: times.recorded.len(),
        proof_share: times.proof_share(),
    })
}

/// The largest arena among the compiled steps of a region.
fn arena_mb(report: &RegionReport) -> Option<f64> {
    let bytes = report.steps.iter().filter_map(|step| step.arena_bytes).max()?;
    Some(bytes as f64 / 1_048_576.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn proofs_cost_no_time_below_zero() {
        let share = |timed: &[f64], recorded: &[f64]| {
            let times = Times {
                first: 1.0,
                timed: timed.to_vec(),
                recorded: recorded.to_vec(),
            };
            times.proof_share()
        };
        assert_eq!(share(&[1.0, 1.0, 2.0], &[2.0]), 0.25);
        // Of two calls the slower one is the median.
        assert_eq!(share(&[1.0, 2.0], &[1.0, 2.0]), 0.0);
        for none in [share(&[1.0, 2.0], &[]), share(&[1.0, 2.0], &[1.0])] {
            assert!(none == 0.0 && none.is_sign_positive(), "{none}");
        }
        assert!(total(std::iter::empty()).is_sign_positive());
    }
}
