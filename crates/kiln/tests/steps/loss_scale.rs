//! Loss scaling: what it computes is what the step computes without it, and a step with a gradient that is not
//! finite changes nothing but the scale.

use burn::module::Module;
use burn::tensor::{DType, Tensor, TensorData};
use burn_optim::grad_clipping::GradientClippingConfig;
use burn_optim::momentum::MomentumConfig;
use burn_optim::{AdamWConfig, SgdConfig};
use kiln::{CompileBackend, CompileOptions, KilnDevice, LossScale, LossScaling, TrainStep};

use crate::harness::*;
use crate::models::*;

const BACKENDS: [CompileBackend; 3] = [
    CompileBackend::Eager,
    CompileBackend::AotEager,
    CompileBackend::Cpu,
];

const SCALING: LossScaling = LossScaling {
    initial: 1024.0,
    growth: 4.0,
    backoff: 0.5,
    interval: 7,
};

fn device() -> KilnDevice {
    KilnDevice::cpu()
}

fn loss(model: &Mlp<Compiled>, batch: Batch<Compiled>) -> Tensor<Compiled, 1> {
    model.loss(batch)
}

/// The same weights each time.
fn start() -> Mlp<Compiled> {
    let start = Mlp::<Compiled>::new(&device());
    let mut seed = 0;
    let mut value = || {
        seed = (seed * 75 + 74) % 65537;
        (f64::from(seed) / 32768.0 - 1.0) as f32 * 0.3
    };
    start.map(&mut Filled(&mut value))
}

/// Fills parameters with numbers of a function.
struct Filled<'a>(&'a mut dyn FnMut() -> f32);

impl burn::module::ModuleMapper<Compiled> for Filled<'_> {
    fn map_float<const D: usize>(
        &mut self,
        param: burn::module::Param<Tensor<Compiled, D>>,
    ) -> burn::module::Param<Tensor<Compiled, D>> {
        param.map(|tensor| {
            let shape = tensor.shape();
            let values: Vec<f32> = (0..shape.num_elements()).map(|_| (self.0)()).collect();
            Tensor::from_data(TensorData::new(values, shape), &tensor.device()).require_grad()
        })
    }
}

fn options(backend: CompileBackend) -> CompileOptions {
    CompileOptions::default().with_backend(backend)
}

/// A batch whose gradients are not finite.
fn broken(index: usize) -> Batch<Compiled> {
    let values = TensorData::new(vec![f32::INFINITY; EXAMPLES * WIDTH], [EXAMPLES, WIDTH]);
    Batch {
        values: Tensor::from_data(values, &device()),
        ..batch(index, EXAMPLES, &device())
    }
}

#[test]
fn a_scaled_loss_trains_the_same_model() {
    let _turn = turn();
    let run = |options: CompileOptions| {
        let optim = AdamWConfig::new()
            .with_epsilon(1e-3)
            .with_grad_clipping(Some(GradientClippingConfig::Norm(0.1)));
        let step = TrainStep::new(start(), optim.init(), loss).with_options(options);
        let mut step = step.build().unwrap();
        let losses = (0..20).map(|index| step.step(rate(index), batch(index, EXAMPLES, &device())).unwrap());
        let losses = losses.map(value).collect();
        let parameters = parameters::<Compiled, _>(step.model().unwrap());
        let outcome = Outcome { losses, parameters };
        (outcome, step.loss_scale(), step.history().replayed)
    };
    for backend in BACKENDS {
        let (expected, none, replayed) = run(options(backend));
        assert_eq!(none, None);
        let (outcome, scale, also_replayed) = run(options(backend).with_loss_scaling(SCALING));
        assert_eq!(also_replayed, replayed);
        // Twice seven steps and six.
        let grown = LossScale {
            scale: 1024.0 * 4.0 * 4.0,
            steps: 6,
            skipped: 0,
        };
        assert_eq!(scale, Some(grown), "{backend}");
        // A power of two scales without rounding.
        match backend {
            CompileBackend::Cpu => outcome.assert_close(&expected, "scaled"),
            _ => assert_eq!(
                (outcome.losses, outcome.parameters),
                (expected.losses, expected.parameters),
                "{backend}"
            ),
        }
    }
}

/// A parameter that a model has twice has one gradient, which is divided by the scale once.
#[test]
fn a_parameter_in_two_places_is_scaled_once() {
    let _turn = turn();
    let start = initialised(Tied::<Compiled>::new(&device()));
    let run = |options: CompileOptions| {
        let step = TrainStep::new(
            start.clone(),
            SgdConfig::new().init(),
            |model: &Tied<Compiled>, x: Tensor<Compiled, 2>| model.energy(x),
        );
        let mut step = step.with_options(options).build().unwrap();
        let x = Tensor::<Compiled, 2>::ones([4, 6], &device()) * 0.3;
        let losses: Vec<f64> = (0..6)
            .map(|_| value(step.step(0.1, x.clone()).unwrap()))
            .collect();
        (losses, parameters::<Compiled, _>(step.model().unwrap()))
    };
    let options = options(CompileBackend::AotEager);
    let (losses, parameters) = run(options.clone());
    assert!(losses[5] < 0.9 * losses[0], "{losses:?}");
    assert_eq!(run(options.with_loss_scaling(SCALING)), (losses, parameters));
}

/// A scale that never grows.
#[test]
fn an_interval_beyond_all_counters_never_ends() {
    let _turn = turn();
    let scaling = LossScaling {
        interval: u32::MAX,
        ..SCALING
    };
    let options = options(CompileBackend::AotEager).with_loss_scaling(scaling);
    let step = TrainStep::new(start(), SgdConfig::new().init(), loss).with_options(options);
    let mut step = step.build().unwrap();
    for index in 0..4 {
        step.step(rate(index), batch(index, EXAMPLES, &device())).unwrap();
    }
    let scale = step.loss_scale().unwrap();
    assert_eq!((scale.scale, scale.steps), (1024.0, 4));
}

#[test]
fn a_step_with_infinite_gradients_is_skipped() {
    let _turn = turn();
    let optim = || {
        SgdConfig::new()
            .with_momentum(Some(MomentumConfig::new()))
            .init::<Compiled, Mlp<Compiled>>()
    };
    for backend in BACKENDS {
        let step =
            TrainStep::new(start(), optim(), loss).with_options(options(backend).with_loss_scaling(SCALING));
        let mut step = step.build().unwrap();
        let mut expected = TrainStep::new(start(), optim(), loss)
            .with_options(options(backend))
            .build()
            .unwrap();
        let mut skipped = 0;
        for index in 0..30 {
            // Of these calls some are recorded and some are replayed.
            if [3, 5, 6, 16, 23].contains(&index) {
                let before = parameters::<Compiled, _>(step.model().unwrap());
                let scale = step.loss_scale().unwrap();
                step.step(rate(index), broken(index)).unwrap();
                assert_eq!(
                    parameters::<Compiled, _>(step.model().unwrap()),
                    before,
                    "{backend} {index}"
                );
                skipped += 1;
                let now = LossScale {
                    scale: scale.scale * 0.5,
                    steps: 0,
                    skipped,
                };
                assert_eq!(step.loss_scale(), Some(now), "{backend} {index}");
            } else {
                let batch = || batch(index, EXAMPLES, &device());
                let now = value(step.step(rate(index), batch()).unwrap());
                let then = value(expected.step(rate(index), batch()).unwrap());
                assert!(
                    (now - then).abs() <= 1e-5 * then.abs(),
                    "{backend} {index}: {now} {then}"
                );
            }
        }
        if backend != CompileBackend::Eager {
            assert!(step.history().replayed > 12, "{}", step.history());
        }
    }
}

#[test]
fn a_first_step_that_is_skipped_leaves_finite_state() {
    let _turn = turn();
    for backend in BACKENDS {
        let optim = SgdConfig::new().with_momentum(Some(MomentumConfig::new())).init();
        let step =
            TrainStep::new(start(), optim, loss).with_options(options(backend).with_loss_scaling(SCALING));
        let mut step = step.build().unwrap();
        let before = parameters::<Compiled, _>(&start());
        step.step(0.1, broken(0)).unwrap();
        assert_eq!(
            parameters::<Compiled, _>(step.model().unwrap()),
            before,
            "{backend}"
        );
        let losses = (1..5).map(|index| value(step.step(0.1, batch(index, EXAMPLES, &device())).unwrap()));
        assert!(losses.into_iter().all(f64::is_finite), "{backend}");
        let after = parameters::<Compiled, _>(step.model().unwrap());
        assert!(
            after != before && after.iter().flatten().all(|x| x.is_finite()),
            "{backend}"
        );
    }
}

#[test]
fn small_gradients_survive_f16() {
    let _turn = turn();
    // Gradients of some 1e-9: zero in f16.
    const SMALL: f32 = 1e-8;
    let small = |model: &Mlp<Compiled>, batch: Batch<Compiled>| model.loss(batch) * SMALL;
    let run = |options: CompileOptions| {
        let step = TrainStep::new(start(), SgdConfig::new().init(), small).with_options(options);
        let mut step = step.build().unwrap();
        for index in 0..12 {
            step.step(0.1 / f64::from(SMALL), batch(index, EXAMPLES, &device()))
                .unwrap();
        }
        (
            parameters::<Compiled, _>(step.model().unwrap()),
            step.loss_scale(),
        )
    };
    let moved = |from: &[Vec<f64>], to: &[Vec<f64>]| {
        let pairs = from.iter().flatten().zip(to.iter().flatten());
        pairs.map(|(a, b)| (a - b).powi(2)).sum::<f64>().sqrt()
    };
    let begin = parameters::<Compiled, _>(&start());
    let (exact, _) = run(options(CompileBackend::Cpu));
    let f16 = options(CompileBackend::Cpu).with_autocast(DType::F16);
    let (scaled, scale) = run(f16.clone());
    assert_eq!(scale.unwrap().skipped, 0);
    let length = moved(&begin, &exact);
    assert!(length > 0.05, "the model moves: {length}");
    let apart = moved(&exact, &scaled) / length;
    assert!(apart < 0.02, "{apart} of the way apart");
    let idle = LossScaling {
        initial: 1.0,
        growth: 1.0,
        ..LossScaling::default()
    };
    let (lost, _) = run(f16.with_loss_scaling(idle));
    let apart = moved(&exact, &lost) / length;
    assert!(
        apart > 0.2,
        "gradients are lost without a scale: {apart} of the way apart"
    );
}

#[test]
fn a_scale_goes_on_where_another_run_stopped() {
    let _turn = turn();
    let build = || {
        TrainStep::new(start(), SgdConfig::new().init(), loss)
            .with_options(options(CompileBackend::AotEager).with_loss_scaling(SCALING))
    };
    let mut first = build().build().unwrap();
    (0..5).for_each(|index| drop(first.step(0.1, batch(index, EXAMPLES, &device())).unwrap()));
    first.step(0.1, broken(5)).unwrap();
    (6..9).for_each(|index| drop(first.step(0.1, batch(index, EXAMPLES, &device())).unwrap()));
    let left = first.loss_scale().unwrap();
    assert_eq!((left.steps, left.skipped), (3, 1));
    let mut second = build().with_loss_scale(left).build().unwrap();
    assert_eq!(second.loss_scale(), Some(left));
    (0..4).for_each(|index| drop(second.step(0.1, batch(index, EXAMPLES, &device())).unwrap()));
    let now = LossScale {
        scale: left.scale * 4.0,
        steps: 0,
        skipped: 1,
    };
    assert_eq!(second.loss_scale(), Some(now));
}

#[test]
fn scales_that_make_no_sense_are_errors() {
    let build = |scaling| {
        TrainStep::new(start(), AdamWConfig::new().init(), loss)
            .with_options(CompileOptions {
                loss_scaling: Some(scaling),
                ..CompileOptions::default()
            })
            .build::<Batch<Compiled>, _>()
            .map(drop)
    };
    assert!(build(SCALING).is_ok());
    let of = |initial, growth, backoff, interval| LossScaling {
        initial,
        growth,
        backoff,
        interval,
    };
    for (scaling, said) in [
        (of(f32::NAN, 2.0, 0.5, 9), "`initial` is NaN"),
        (of(0.0, 2.0, 0.5, 9), "`initial` is 0"),
        (of(8.0, 0.5, 0.5, 9), "`growth` is 0.5"),
        (of(8.0, 2.0, 1.5, 9), "`backoff` is 1.5"),
        (of(8.0, 2.0, 0.0, 9), "`backoff` is 0"),
        (of(8.0, 2.0, 0.5, 0), "`interval` is 0"),
    ] {
        let error = build(scaling).unwrap_err().to_string();
        assert!(error.contains(said) && error.contains("must be"), "{error}");
    }
}
