//! Shapes that vary: one step compiled for all of them, with the results of the step of each shape.

use burn::tensor::Tensor;
use burn_optim::{AdamWConfig, SgdConfig};
use kiln::{CompileBackend, CompileOptions, Dynamic, KilnDevice, RegionReport, TrainStep};

use crate::harness::*;
use crate::models::*;

/// Numbers of examples, most of them twice.
const SIZES: [usize; 24] = [
    4, 2, 7, 5, 3, 11, 6, 13, 9, 8, 16, 10, 12, 14, 15, 5, 3, 11, 6, 13, 9, 8, 16, 10,
];

fn options(backend: CompileBackend) -> CompileOptions {
    CompileOptions::default().with_backend(backend)
}

/// Trains `model` on batches of [`SIZES`].
macro_rules! train {
    ($model:expr, $optim:expr, $options:expr) => {{
        let device = KilnDevice::cpu();
        let loss = |model: &_, batch: Batch<Compiled>| Trainable::<Compiled>::loss(model, batch);
        let step = TrainStep::new($model, $optim, loss).with_options($options);
        let mut step = step.build().unwrap();
        let mut outcome = Outcome::default();
        for (index, &size) in SIZES.iter().enumerate() {
            let loss: Tensor<Compiled, 1> = step.step(rate(index), batch(index, size, &device)).unwrap();
            outcome.losses.push(value(loss));
        }
        let report = step.report();
        outcome.parameters = parameters::<Compiled, _>(&step.into_model());
        (outcome, report)
    }};
}

/// How often something was compiled.
fn compiled(report: &RegionReport) -> usize {
    report.compiles.iter().filter(|event| !event.absorbed).count()
}

fn check(report: &RegionReport) {
    assert!(compiled(report) <= 4, "{:?}", report.compiles);
    assert!(
        report
            .compiles
            .iter()
            .all(|event| event.backend == CompileBackend::Cpu),
        "no shape runs on anything slower: {:?}",
        report.compiles
    );
    assert_eq!(report.compiles.len(), 15, "each size is planned once");
    assert_eq!(
        report.recompiles.len(),
        compiled(report) - 1,
        "{:?}",
        report.recompiles
    );
}

#[test]
fn batches_of_many_sizes_share_their_kernels() {
    let _turn = turn();
    let start = initialised(Mlp::<Compiled>::new(&KilnDevice::cpu()));
    let copy = || {
        copy_weights::<Compiled, Compiled, _, _>(
            start.clone(),
            Mlp::new(&KilnDevice::cpu()),
            &KilnDevice::cpu(),
        )
    };
    let (expected, _) = train!(
        copy(),
        AdamWConfig::new().init(),
        options(CompileBackend::AotEager)
    );
    let cpu = options(CompileBackend::Cpu).with_recompile_limit(4);
    let (outcome, report) = train!(copy(), AdamWConfig::new().init(), cpu.clone());
    outcome.assert_close(&expected, "sizes that vary");
    check(&report);

    let (outcome, report) = train!(copy(), AdamWConfig::new().init(), cpu.with_dynamic(Dynamic::Off));
    outcome.assert_close(&expected, "sizes that are compiled each");
    let slower = report
        .compiles
        .iter()
        .filter(|event| event.backend == CompileBackend::AotEager);
    assert_eq!(slower.count(), 11, "the limit counts each size");
}

#[test]
fn encoders_of_many_sizes_share_their_kernels() {
    let _turn = turn();
    let start = initialised(Encoder::<Compiled>::new(0.0, &KilnDevice::cpu()));
    let copy = || {
        copy_weights::<Compiled, Compiled, _, _>(
            start.clone(),
            Encoder::new(0.0, &KilnDevice::cpu()),
            &KilnDevice::cpu(),
        )
    };
    let (expected, _) = train!(copy(), SgdConfig::new().init(), options(CompileBackend::AotEager));
    let cpu = options(CompileBackend::Cpu).with_recompile_limit(4);
    let (outcome, report) = train!(copy(), SgdConfig::new().init(), cpu);
    outcome.assert_close(&expected, "sizes that vary");
    check(&report);
}

#[test]
fn convolutions_of_several_sizes_are_right() {
    let _turn = turn();
    let start = initialised(Cnn::<Compiled>::new(0.0, &KilnDevice::cpu()));
    let copy = || {
        let fresh = Cnn::new(0.0, &KilnDevice::cpu());
        copy_weights::<Compiled, Compiled, _, _>(start.clone(), fresh, &KilnDevice::cpu())
    };
    let (expected, _) = train!(
        copy(),
        SgdConfig::new().init(),
        options(CompileBackend::AotEager).with_recompile_limit(16)
    );
    let cpu = options(CompileBackend::Cpu).with_recompile_limit(16);
    let (outcome, report) = train!(copy(), SgdConfig::new().init(), cpu);
    outcome.assert_close(&expected, "images in batches of sizes that vary");
    let slower = report
        .compiles
        .iter()
        .filter(|event| event.backend != CompileBackend::Cpu);
    assert_eq!(slower.count(), 0, "{:?}", report.compiles);
}

#[test]
fn behind_the_limit_known_sizes_are_compiled_code() {
    let _turn = turn();
    let device = KilnDevice::cpu();
    let loss = |model: &Mlp<Compiled>, batch: Batch<Compiled>| model.loss(batch);
    let step = TrainStep::new(Mlp::<Compiled>::new(&device), SgdConfig::new().init(), loss);
    let mut step = step
        .with_options(options(CompileBackend::Cpu).with_recompile_limit(3))
        .build()
        .unwrap();
    for (index, size) in [12, 6, 7, 9, 10, 11].into_iter().enumerate() {
        step.step(0.1, batch(index, size, &device)).unwrap();
    }
    let report = step.report();
    let backends: Vec<_> = report
        .compiles
        .iter()
        .map(|event| (event.backend, event.absorbed))
        .collect();
    // The second size compiles for itself and a few others, the third that is new for all that are likely.
    let compiled = backends.iter().filter(|(_, absorbed)| !absorbed).count();
    assert!(compiled <= 3, "{backends:?}");
    assert!(
        backends
            .iter()
            .all(|(backend, _)| *backend == CompileBackend::Cpu),
        "{backends:?}"
    );
    // With nothing compiled nothing is known.
    let step = TrainStep::new(Mlp::<Compiled>::new(&device), SgdConfig::new().init(), loss);
    let mut step = step
        .with_options(options(CompileBackend::Cpu).with_recompile_limit(0))
        .build()
        .unwrap();
    step.step(0.1, batch(0, 4, &device)).unwrap();
    assert_eq!(step.report().compiles[0].backend, CompileBackend::AotEager);
}
