//! Training under a memory budget: the same losses and parameters as without, dropout included.

use burn::tensor::backend::Backend;
use burn_optim::AdamWConfig;
use kiln::{CompileOptions, Kiln, KilnDevice, RegionReport};

use crate::harness::{Compiled, Outcome, copy_weights, initialised, train_region, turn};
use crate::models::{Cnn, Encoder};

const STEPS: usize = 4;

/// The smallest budget that fits each step that a region compiled.
fn smallest_budget(report: &RegionReport) -> usize {
    let smallest = report.steps.iter().map(|step| {
        let curve = kiln::memory_curve(step, &CompileOptions::default()).unwrap();
        curve.last().unwrap().peak as usize
    });
    smallest.max().unwrap()
}

/// The largest arena that a region has.
fn arena(report: &RegionReport) -> usize {
    let arenas = report.steps.iter().filter_map(|step| step.arena_bytes);
    arenas.max().unwrap()
}

/// `train` trains a fresh model with given options. Without a budget and with the smallest it does the same.
fn check(train: impl Fn(CompileOptions) -> (Outcome, RegionReport)) {
    let seeded = |options| {
        Kiln::seed(&KilnDevice::cpu(), 11);
        train(options)
    };
    let (expected, report) = seeded(CompileOptions::default());
    let budget = smallest_budget(&report);
    assert!(budget <= arena(&report), "{budget} of {}", arena(&report));
    let (found, report) = seeded(CompileOptions::default().with_memory_budget(budget));
    assert!(arena(&report) <= budget, "{} within {budget}", arena(&report));
    found.assert_close(&expected, "under the smallest budget");
}

macro_rules! within_budget {
    ($name:ident, $ty:ident, |$device:ident| $model:expr) => {
        #[test]
        fn $name() {
            // From here on: weights are drawn from the process's generator, too.
            let _turn = turn();
            let $device = &KilnDevice::cpu();
            let start: $ty<Compiled> = initialised($model);
            check(|options| {
                let fresh: $ty<Compiled> =
                    copy_weights::<Compiled, Compiled, _, _>(start.clone(), $model, $device);
                let optim = AdamWConfig::new().with_epsilon(1e-3).init();
                train_region(fresh, optim, STEPS, options)
            });
        }
    };
}

within_budget!(cnn_with_batch_norm_and_dropout, Cnn, |device| Cnn::new(
    0.3, device
));
within_budget!(transformer_encoder_with_dropout, Encoder, |device| Encoder::new(
    0.1, device
));
