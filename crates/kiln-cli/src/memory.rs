//! Memory against time: the step under several memory budgets.

use std::path::Path;
use std::time::Instant;

use kiln::{CompileOptions, KilnDevice, RegionReport, StepReport};
use kiln_burn::table;
use plotters::style::RGBColor;

use crate::architecture::Architecture;
use crate::error::CliError;
use crate::model::{Batch, initialise};
use crate::show;
use crate::train::TrainBackend;
use crate::train::curves::{Curve, Panel, picture};

/// Most budgets that are timed: each is a step of its own to compile.
const BUDGETS: usize = 8;

/// Timed steps for each budget.
const STEPS: usize = 7;

const MIB: f64 = 1_048_576.0;

/// The time of the fastest of several calls: the others were disturbed.
///
/// # Errors
///
/// Whatever `step` fails with.
pub fn seconds(mut step: impl FnMut() -> Result<(), CliError>) -> Result<f64, CliError> {
    let mut fastest = f64::INFINITY;
    for _ in 0..STEPS {
        let start = Instant::now();
        step()?;
        fastest = fastest.min(start.elapsed().as_secs_f64());
    }
    Ok(fastest)
}

/// One budget.
struct Measured {
    peak: u64,
    saved: u64,
    seconds: f64,
}

/// Bytes that Burn's autograd keeps alive for the backward pass after an eager forward pass over all batches
/// of a step: all tensors that exist then besides model and batches, which the caller keeps. The compiled
/// step holds what it keeps of all batches together, too.
///
/// # Errors
///
/// If the model cannot be built.
pub fn kept_by_autograd(
    architecture: &Architecture,
    batches: Vec<Batch<TrainBackend>>,
    device: &KilnDevice,
) -> Result<usize, CliError> {
    let model = architecture.init::<TrainBackend>(device)?;
    initialise(&model);
    let before = table::bytes();
    let losses: Vec<_> = batches.into_iter().map(|batch| model.loss(batch)).collect();
    let kept = table::bytes().saturating_sub(before);
    drop(losses);
    Ok(kept)
}

/// Times the compiled step of `report` under budgets from the largest that makes a difference to the
/// smallest that fits, prints them and draws them into `path`. `time` compiles and times the step with
/// given options; `eager` is the result of [`kept_by_autograd`].
///
/// # Errors
///
/// If nothing was compiled that has a backward pass, a budget fails, or the file cannot be written.
pub fn curve(
    path: &Path,
    report: &RegionReport,
    options: &CompileOptions,
    eager: usize,
    time: impl Fn(CompileOptions) -> Result<f64, CliError>,
) -> Result<(), CliError> {
    let partitioned = |step: &&StepReport| {
        let contract = step.contract.as_ref();
        contract.is_some_and(|contract| contract.partition.is_some())
    };
    let step = report.steps.iter().find(partitioned);
    let step = step.ok_or_else(|| {
        CliError::Usage("the memory curve needs a training step on the backend `cpu`".to_owned())
    })?;
    let points = kiln::memory_curve(step, options)?;
    show::line(format_args!(
        "\nmemory budgets of {}: peak memory of intermediate values, kept for the backward pass, step time",
        report.name
    ));
    show::line(format_args!(
        "  an eager forward pass keeps {:.1} MiB for the backward pass",
        eager as f64 / MIB
    ));
    let mut measured = Vec::new();
    for point in spread(&points, BUDGETS) {
        let seconds = time(options.clone().with_memory_budget(point.peak as usize))?;
        show::line(format_args!(
            "  {:>12} bytes  {:8.1} MiB  kept {:8.1} MiB ({:.2} of eager)  {:9.2} ms",
            point.peak,
            point.peak as f64 / MIB,
            point.saved as f64 / MIB,
            point.saved as f64 / eager.max(1) as f64,
            seconds * 1e3
        ));
        measured.push(Measured {
            peak: point.peak,
            saved: point.saved,
            seconds,
        });
    }
    std::fs::write(path, draw(&report.name, &measured)?).map_err(CliError::io("write", path))
}

/// At most `count` of `points`, the first and the last among them.
fn spread<T>(points: &[T], count: usize) -> Vec<&T> {
    let last = points.len().saturating_sub(1);
    let count = count.min(points.len());
    let mut chosen: Vec<usize> = (0..count)
        .map(|i| i * last / count.saturating_sub(1).max(1))
        .collect();
    chosen.dedup();
    chosen.into_iter().map(|index| &points[index]).collect()
}

fn draw(name: &str, measured: &[Measured]) -> Result<String, CliError> {
    let by = |y: &dyn Fn(&Measured) -> f64| -> Vec<(f64, f64)> {
        let mut points: Vec<(f64, f64)> = measured
            .iter()
            .map(|point| (point.peak as f64 / MIB, y(point)))
            .collect();
        points.sort_by(|a, b| a.0.total_cmp(&b.0));
        points
    };
    let panel = |height, points, colour, name| Panel {
        height,
        curves: vec![Curve {
            points,
            colour,
            width: 2,
            name,
        }],
    };
    picture(
        &format!("{name}: under a memory budget (MiB at the peak, from left to right)"),
        &[
            panel(
                310,
                by(&|point| point.seconds * 1e3),
                RGBColor(31, 95, 168),
                "step time, ms",
            ),
            panel(
                190,
                by(&|point| point.saved as f64 / MIB),
                RGBColor(74, 138, 60),
                "kept for the backward pass, MiB",
            ),
        ],
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn few_points_with_both_ends() {
        let points: Vec<u32> = (0..20).collect();
        let chosen = spread(&points, 5);
        assert_eq!((chosen.len(), *chosen[0], *chosen[4]), (5, 0, 19));
        assert_eq!(spread(&points[..3], 8), [&0, &1, &2]);
        assert_eq!(spread(&points[..1], 8), [&0]);
        assert!(spread(&points[..0], 8).is_empty());
    }

    #[test]
    fn a_picture_has_both_curves() {
        let point = |peak, saved, seconds| Measured { peak, saved, seconds };
        let svg = draw(
            "step",
            &[point(3 << 20, 2 << 20, 0.1), point(1 << 20, 1 << 20, 0.2)],
        );
        let svg = svg.unwrap();
        assert!(
            svg.contains("step time, ms") && svg.contains("kept for the backward pass"),
            "{svg}"
        );
        assert!(!svg.contains("NaN"), "{svg}");
    }
}
