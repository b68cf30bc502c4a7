//! Parameters stored in 16 bits: the step computes what a loop computes that rounds its parameters by hand.

use std::panic::{AssertUnwindSafe, catch_unwind};

use burn::module::{AutodiffModule, Module, ModuleMapper, ModuleVisitor, Param};
use burn::tensor::{DType, Tensor};
use burn_optim::adaptor::OptimizerAdaptor;
use burn_optim::{AdamWConfig, GradientsParams, Optimizer, SgdConfig, SimpleOptimizer};
use kiln::{CompileBackend, CompileOptions, Kiln, KilnDevice, TrainStep, Weights};

use crate::harness::*;
use crate::models::*;

/// How far a compiled step may be from the reference, relative: a sum in another order moves a parameter now and
/// then to the next number of 8 bits.
const OF_ROUNDED: f64 = 5e-3;

/// The share of elements that differ where nothing is rounded, from which on a step must have half of it at
/// most: the few that a sum in another order moves are told from all those that are rounded elsewhere or not
/// at all.
const SHOWS: f64 = 0.05;

fn device() -> KilnDevice {
    KilnDevice::cpu()
}

/// Rounds parameters to the numbers of a type: all of them, or those that are trained.
struct Round {
    dtype: DType,
    all: bool,
}

impl ModuleMapper<Compiled> for Round {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<Compiled, D>>) -> Param<Tensor<Compiled, D>> {
        let tracked = param.val().is_require_grad();
        if !tracked && !self.all {
            return param;
        }
        param.map(|tensor| {
            let rounded = tensor.inner().cast(self.dtype).cast(DType::F32);
            Tensor::from_inner(rounded).set_require_grad(tracked)
        })
    }
}

fn rounded<M: Module<Compiled>>(model: M, dtype: DType) -> M {
    model.map(&mut Round { dtype, all: false })
}

/// A loop that rounds by hand.
fn train_by_hand<M, O>(
    mut model: M,
    mut optim: OptimizerAdaptor<O, M, Compiled>,
    steps: usize,
    weights: Weights,
) -> Outcome
where
    M: AutodiffModule<Compiled> + Trainable<Compiled> + Clone,
    O: SimpleOptimizer<Kiln>,
{
    let step = |index| {
        let read = rounded(model.clone(), weights.dtype());
        let loss = read.loss(batch(index, EXAMPLES, &device()));
        let gradients = GradientsParams::from_grads(loss.backward(), &read);
        let updated = match weights.has_master() {
            true => model.clone(),
            false => read,
        };
        model = optim.step(rate(index), updated, gradients);
        value(loss)
    };
    let losses = (0..steps).map(step).collect();
    if !weights.has_master() {
        model = rounded(model, weights.dtype());
    }
    Outcome {
        losses,
        parameters: trained::<Compiled, M>(&model),
    }
}

/// The types of the parameters, in order, as words.
fn types<M: Module<Compiled>>(model: &M) -> Vec<DType> {
    struct Types(Vec<DType>);
    impl ModuleVisitor<Compiled> for Types {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<Compiled, D>>) {
            self.0.push(param.val().dtype());
        }
    }
    let mut types = Types(Vec::new());
    model.visit(&mut types);
    types.0
}

/// The share of elements that differ by more than [`TOLERANCE`], relative to their tensor's mean size.
fn moved(parameters: &[Vec<f64>], expected: &[Vec<f64>]) -> f64 {
    let (mut differ, mut all) = (0, 0);
    for (values, expected) in parameters.iter().zip(expected) {
        let size = expected.iter().map(|x| x.abs()).sum::<f64>() / expected.len() as f64;
        let pairs = values.iter().zip(expected);
        differ += pairs
            .filter(|(a, b)| (*a - *b).abs() > TOLERANCE * size.max(1e-3))
            .count();
        all += expected.len();
    }
    differ as f64 / all as f64
}

/// The same weights each time: those of `model` after rounding, so that frozen ones are the same with and
/// without a master.
fn copies<M: Module<Compiled> + Clone>(model: impl Fn() -> M, dtype: DType) -> impl Fn() -> M {
    let start = initialised(model()).map(&mut Round { dtype, all: true });
    move || copy_weights::<Compiled, Compiled, _, _>(start.clone(), model(), &device())
}

fn options(backend: CompileBackend) -> CompileOptions {
    CompileOptions::default().with_backend(backend)
}

fn compare_with_loop<M, O>(
    model: impl Fn() -> M,
    optim: impl Fn() -> OptimizerAdaptor<O, M, Compiled>,
    statistics: usize,
) where
    M: AutodiffModule<Compiled> + Trainable<Compiled> + Clone,
    O: SimpleOptimizer<Kiln> + 'static,
{
    const STEPS: usize = 9;
    let _turn = turn();
    for weights in [
        Weights::BF16,
        Weights::BF16.with_master(),
        Weights::F16.with_master(),
    ] {
        let fresh = copies(&model, weights.dtype());
        let expected = train_by_hand(fresh(), optim(), STEPS, weights);
        let plain = train_plain(fresh(), optim(), STEPS, &device());
        assert_ne!(
            expected.losses, plain.losses,
            "rounding must show, or this test compares nothing"
        );
        let unrounded = moved(&plain.parameters, &expected.parameters);
        assert!(weights != Weights::BF16 || unrounded >= SHOWS, "{unrounded}");
        for backend in [
            CompileBackend::Eager,
            CompileBackend::AotEager,
            CompileBackend::Cpu,
        ] {
            let what = format!("{weights:?} on {backend}");
            let step = TrainStep::new(fresh(), optim(), |model: &M, batch: Batch<Compiled>| {
                model.loss(batch)
            });
            let step = step.with_options(options(backend)).with_weights(weights);
            let mut step = step.build().unwrap();
            let losses = (0..STEPS)
                .map(|index| value(step.step(rate(index), batch(index, EXAMPLES, &device())).unwrap()));
            let losses: Vec<f64> = losses.collect();
            if backend != CompileBackend::Eager {
                assert!(step.history().replayed >= 3, "{what}: {:?}", step.history());
            }
            let model = step.into_model();
            let stored = match weights.has_master() {
                true => DType::F32,
                false => weights.dtype(),
            };
            let found = types(&model);
            let kept = found.iter().filter(|&&dtype| dtype == stored).count();
            let wanted = match weights.has_master() {
                true => found.len(),
                false => found.len() - statistics,
            };
            assert_eq!(kept, wanted, "{what}: {found:?}");
            let model = kiln::cast_parameters::<Compiled, M>(model, DType::F32);
            let parameters = trained::<Compiled, M>(&model);
            let tolerance = match backend {
                CompileBackend::Eager => TOLERANCE,
                _ => OF_ROUNDED,
            };
            for (index, (a, b)) in losses.iter().zip(&expected.losses).enumerate() {
                assert!(
                    (a - b).abs() <= tolerance * b.abs(),
                    "{what}: loss {index} is {a}, by hand {b}"
                );
            }
            for (index, (a, b)) in parameters.iter().zip(&expected.parameters).enumerate() {
                let error = relative_error(a, b, 1e-3);
                assert!(error <= tolerance, "{what}: parameter {index} differs by {error}");
            }
            let moved = moved(&parameters, &expected.parameters);
            assert!(
                unrounded < SHOWS || moved <= unrounded / 2.0,
                "{what}: {moved} of all elements differ"
            );
        }
    }
}

#[test]
fn a_perceptron_is_what_a_loop_makes_that_rounds_by_hand() {
    let optim = || AdamWConfig::new().with_epsilon(1e-3).init();
    compare_with_loop(|| Mlp::new(&device()), optim, 0);
}

#[test]
fn running_statistics_stay_in_f32() {
    let optim = || SgdConfig::new().init();
    compare_with_loop(|| Cnn::new(0.0, &device()), optim, 2);
}

#[test]
fn frozen_parameters_are_stored_and_never_written() {
    let optim = || AdamWConfig::new().with_epsilon(1e-3).init();
    compare_with_loop(|| Encoder::new(0.0, &device()).freeze_embedding(), optim, 0);
}

#[test]
fn a_run_goes_on_from_its_parts_as_if_it_had_never_stopped() {
    type Step<O> = TrainStep<Compiled, Mlp<Compiled>, O, LossOf, Batch<Compiled>, Tensor<Compiled, 1>>;
    type LossOf = fn(&Mlp<Compiled>, Batch<Compiled>) -> Tensor<Compiled, 1>;
    fn loss(model: &Mlp<Compiled>, batch: Batch<Compiled>) -> Tensor<Compiled, 1> {
        model.loss(batch)
    }
    fn go<O: SimpleOptimizer<Kiln>>(step: &mut Step<O>, range: std::ops::Range<usize>) -> Vec<f64> {
        range
            .map(|index| value(step.step(rate(index), batch(index, EXAMPLES, &device())).unwrap()))
            .collect()
    }
    let _turn = turn();
    for weights in [Weights::BF16, Weights::BF16.with_master()] {
        let fresh = copies(|| Mlp::new(&device()), DType::F32);
        let build = |model, optim: OptimizerAdaptor<_, _, _>| -> Step<_> {
            let step = TrainStep::new(model, optim, loss as LossOf);
            step.with_options(options(CompileBackend::AotEager))
                .with_weights(weights)
                .build()
                .unwrap()
        };
        let mut whole = build(fresh(), AdamWConfig::new().init());
        let expected = go(&mut whole, 0..12);
        let mut first = build(fresh(), AdamWConfig::new().init());
        let mut losses = go(&mut first, 0..7);
        let (model, optim) = first.into_parts().unwrap();
        let mut second = build(model, optim);
        losses.extend(go(&mut second, 7..12));
        assert_eq!(losses, expected, "{weights:?}");
        assert_eq!(
            parameters::<Compiled, _>(&second.into_model()),
            parameters::<Compiled, _>(&whole.into_model())
        );
    }
}

#[test]
fn a_step_that_panics_leaves_parameters_and_copies_as_they_were() {
    let _turn = turn();
    for weights in [Weights::BF16, Weights::BF16.with_master()] {
        let fresh = copies(|| Mlp::new(&device()), DType::F32);
        let train = |panics: bool| {
            let loss = |model: &Mlp<Compiled>, (batch, fails): (Batch<Compiled>, bool)| {
                let loss = model.loss(batch);
                assert!(!fails, "asked for");
                loss
            };
            let step = TrainStep::new(fresh(), AdamWConfig::new().init(), loss);
            let step = step
                .with_options(options(CompileBackend::Cpu))
                .with_weights(weights);
            let mut step = step.build().unwrap();
            let mut losses = Vec::new();
            for index in 0..8 {
                let batch = || batch(index, EXAMPLES, &device());
                if panics && index % 3 == 1 {
                    let failed = catch_unwind(AssertUnwindSafe(|| step.step(rate(index), (batch(), true))));
                    assert!(failed.is_err());
                }
                losses.push(value(step.step(rate(index), (batch(), false)).unwrap()));
            }
            (losses, parameters::<Compiled, _>(&step.into_model()))
        };
        assert_eq!(train(true), train(false), "{weights:?}");
    }
}
