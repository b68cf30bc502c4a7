//! Copies of parameters that products under autocast read, and that the update writes: no number depends on
//! them, whatever the program does between calls.

use std::panic::{AssertUnwindSafe, catch_unwind};

use burn::module::{AutodiffModule, Module};
use burn::tensor::{DType, Tensor};
use burn_optim::adaptor::OptimizerAdaptor;
use burn_optim::{AdamWConfig, SgdConfig, SimpleOptimizer};
use kiln::{CompileBackend, CompileOptions, Error, Kiln, KilnDevice, TrainError, TrainStep};

use crate::harness::*;
use crate::models::*;

const STEPS: usize = 11;

fn device() -> KilnDevice {
    KilnDevice::cpu()
}

fn options(dtype: DType) -> CompileOptions {
    CompileOptions::default()
        .with_backend(CompileBackend::Cpu)
        .with_autocast(dtype)
}

/// The same weights each time.
fn same<M: Module<Compiled> + Clone>(model: impl Fn() -> M) -> impl Fn() -> M {
    let start = initialised(model());
    move || copy_weights::<Compiled, Compiled, _, _>(start.clone(), model(), &device())
}

/// The examples of a batch: every third batch is smaller.
fn examples(index: usize) -> usize {
    match index % 3 {
        2 => EXAMPLES / 2,
        _ => EXAMPLES,
    }
}

/// Trains with or without copies; `loss` may do more than compute the loss.
fn train<M, O>(
    model: M,
    optim: OptimizerAdaptor<O, M, Compiled>,
    dtype: DType,
    keeps: bool,
    loss: impl Fn(&M, Batch<Compiled>) -> Tensor<Compiled, 1>,
) -> Outcome
where
    M: AutodiffModule<Compiled> + Trainable<Compiled> + Clone,
    O: SimpleOptimizer<Kiln> + 'static,
{
    kiln_seed();
    let step = TrainStep::new(model, optim, loss).with_options(options(dtype));
    let mut step = step.with_kept_copies(keeps).build().unwrap();
    let mut losses = Vec::new();
    for index in 0..STEPS {
        // The program may hold a clone of the model for a while; the step writes to other tensors then.
        let _shown = (index % 4 == 2).then(|| step.model().unwrap().clone());
        losses.push(value(
            step.step(rate(index), batch(index, examples(index), &device()))
                .unwrap(),
        ));
    }
    let copies = step.state().unwrap().copy_bytes;
    assert_eq!(copies > 0, keeps, "{copies} bytes of copies");
    Outcome {
        losses,
        parameters: trained::<Compiled, M>(&step.into_model()),
    }
}

fn kiln_seed() {
    use burn::tensor::backend::Backend;
    Kiln::seed(&device(), 11);
}

fn compare_kept<M, O>(model: impl Fn() -> M, optim: impl Fn() -> OptimizerAdaptor<O, M, Compiled>)
where
    M: AutodiffModule<Compiled> + Trainable<Compiled> + Clone,
    O: SimpleOptimizer<Kiln> + 'static,
{
    let _turn = turn();
    let fresh = same(&model);
    for dtype in [DType::BF16, DType::F16] {
        let loss = |model: &M, batch: Batch<Compiled>| model.loss(batch);
        let [kept, cast] = [true, false].map(|keeps| train(fresh(), optim(), dtype, keeps, loss));
        assert_eq!(kept.losses, cast.losses, "{dtype:?}");
        assert_eq!(kept.parameters, cast.parameters, "{dtype:?}");
        let plain = train_plain(fresh(), optim(), 1, &device());
        assert_ne!(
            kept.losses[0], plain.losses[0],
            "rounding must show, or this test compares nothing"
        );
    }
}

#[test]
fn a_perceptron_with_copies_is_the_one_that_casts() {
    compare_kept(|| Mlp::new(&device()), || AdamWConfig::new().init());
}

#[test]
fn a_convolutional_network_with_copies_is_the_one_that_casts() {
    compare_kept(|| Cnn::new(0.2, &device()), || SgdConfig::new().init());
}

#[test]
fn an_encoder_with_copies_is_the_one_that_casts() {
    // Its embedding is read by no product, and not trained.
    let model = || Encoder::new(0.1, &device()).freeze_embedding();
    compare_kept(model, || AdamWConfig::new().init());
}

#[test]
fn products_read_copies_and_no_parameter_is_cast() {
    let _turn = turn();
    let model = initialised(Mlp::<Compiled>::new(&device()));
    let loss = |model: &Mlp<Compiled>, batch: Batch<Compiled>| model.loss(batch);
    let step = TrainStep::new(model, AdamWConfig::new().init(), loss).with_options(options(DType::BF16));
    let mut step = step.build().unwrap();
    for index in 0..4 {
        step.step(rate(index), batch(index, EXAMPLES, &device())).unwrap();
    }
    assert!(step.history().replayed > 0, "{:?}", step.history());
    let report = step.report();
    assert_eq!(report.steps.len(), 1, "{:?}", report.recompiles);
    let contract = report.steps[0].contract.as_ref().unwrap();
    let autocast = contract.autocast.as_ref().unwrap();
    assert!(autocast.copies.len() >= 2, "{autocast}");
    // The batch is cast, parameters are not: each cast argument is no copied one.
    for cast in &autocast.casts {
        let is_copied = |argument| autocast.copies.iter().any(|copy| copy.of == argument);
        assert!(!cast.argument.is_some_and(is_copied), "{autocast}");
    }
    let text = step.explain().to_string();
    assert!(text.contains("a copy of argument"), "{text}");
    assert!(text.contains("of copies in 16 bits"), "{text}");
}

#[test]
fn drawn_parameters_have_copies_from_the_second_call_on() {
    let _turn = turn();
    let train = |keeps: bool| {
        kiln_seed();
        let model = Mlp::<Compiled>::new(&device());
        let loss = |model: &Mlp<Compiled>, batch: Batch<Compiled>| model.loss(batch);
        let step = TrainStep::new(model, AdamWConfig::new().init(), loss).with_options(options(DType::BF16));
        let mut step = step.with_kept_copies(keeps).build().unwrap();
        let losses: Vec<f64> = (0..STEPS)
            .map(|index| value(step.step(rate(index), batch(index, EXAMPLES, &device())).unwrap()))
            .collect();
        assert!(step.history().replayed >= 3, "{:?}", step.history());
        assert_eq!(step.report().steps.len(), 1 + usize::from(keeps));
        (losses, parameters::<Compiled, _>(&step.into_model()))
    };
    assert_eq!(train(true), train(false));
}

#[test]
fn a_step_that_is_frozen_first_stays_without_copies() {
    let _turn = turn();
    for drawn in [false, true] {
        let model = Mlp::<Compiled>::new(&device());
        let model = if drawn { model } else { initialised(model) };
        let loss = |model: &Mlp<Compiled>, batch: Batch<Compiled>| model.loss(batch);
        let step = TrainStep::new(model, AdamWConfig::new().init(), loss).with_options(options(DType::BF16));
        let mut step = step.build().unwrap();
        step.step(0.1, batch(0, EXAMPLES, &device())).unwrap();
        step.freeze();
        for index in 1..6 {
            step.step(0.1, batch(index, EXAMPLES, &device())).unwrap();
        }
        assert_eq!(step.state().unwrap().copy_bytes > 0, !drawn);
        let refused = step.step(0.1, batch(6, EXAMPLES + 1, &device()));
        assert!(matches!(refused, Err(TrainError::Step(Error::Frozen { .. }))));
    }
}

#[test]
fn a_call_that_panics_leaves_copies_that_are_right() {
    let _turn = turn();
    let fresh = same(|| Mlp::<Compiled>::new(&device()));
    let train = |panics: bool, keeps: bool| {
        let loss = |model: &Mlp<Compiled>, (batch, fails): (Batch<Compiled>, bool)| {
            let loss = model.loss(batch);
            assert!(!fails, "asked for");
            loss
        };
        let step =
            TrainStep::new(fresh(), AdamWConfig::new().init(), loss).with_options(options(DType::BF16));
        let mut step = step.with_kept_copies(keeps).build().unwrap();
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
    let expected = train(false, false);
    for panics in [false, true] {
        assert_eq!(train(panics, true), expected, "panics: {panics}");
    }
}

#[test]
fn a_step_of_full_precision_reads_the_parameters() {
    let _turn = turn();
    let fresh = same(|| Mlp::<Compiled>::new(&device()));
    let loss = |model: &Mlp<Compiled>, batch: Batch<Compiled>| kiln::full_precision(|| model.loss(batch));
    let optim = || AdamWConfig::new().init();
    let [kept, cast] = [true, false].map(|keeps| train(fresh(), optim(), DType::BF16, keeps, loss));
    assert_eq!(kept.losses, cast.losses);
    assert_eq!(kept.parameters, cast.parameters);
}

#[test]
fn a_clone_of_the_model_stays_as_it_is() {
    let _turn = turn();
    let model = initialised(Mlp::<Compiled>::new(&device()));
    let loss = |model: &Mlp<Compiled>, batch: Batch<Compiled>| model.loss(batch);
    let step = TrainStep::new(model, AdamWConfig::new().init(), loss).with_options(options(DType::BF16));
    let mut step = step.build().unwrap();
    for index in 0..7 {
        let shown = step.model().unwrap().clone();
        let before = parameters::<Compiled, _>(&shown);
        step.step(rate(index), batch(index, EXAMPLES, &device())).unwrap();
        assert_eq!(parameters::<Compiled, _>(&shown), before, "call {index}");
        assert_ne!(
            parameters::<Compiled, _>(step.model().unwrap()),
            before,
            "call {index}"
        );
    }
}

#[test]
fn a_step_that_is_cut_goes_on_without_copies() {
    let _turn = turn();
    let fresh = same(|| Mlp::<Compiled>::new(&device()));
    let train = |keeps: bool| {
        let loss = |model: &Mlp<Compiled>, batch: Batch<Compiled>| {
            let loss = model.loss(batch);
            // A read on the host cuts the recording.
            assert!(value(loss.clone().detach()).is_finite());
            loss
        };
        let step = TrainStep::new(fresh(), SgdConfig::new().init(), loss).with_options(options(DType::BF16));
        let mut step = step.with_kept_copies(keeps).build().unwrap();
        let losses: Vec<f64> = (0..STEPS)
            .map(|index| value(step.step(rate(index), batch(index, EXAMPLES, &device())).unwrap()))
            .collect();
        assert_eq!(step.state().unwrap().copy_bytes, 0);
        losses
    };
    // What a cut step stores in 16 bits depends on where it is cut.
    for (kept, cast) in train(true).into_iter().zip(train(false)) {
        assert!((kept - cast).abs() < 1e-3 * cast.abs(), "{kept} and {cast}");
    }
}

#[test]
fn parameters_that_are_one_tensor_have_no_copies() {
    let _turn = turn();
    let train = |keeps: bool| {
        kiln_seed();
        let model = Tied::<Compiled>::new(&device());
        let loss = |model: &Tied<Compiled>, x: Tensor<Compiled, 2>| model.energy(x);
        let step = TrainStep::new(model, SgdConfig::new().init(), loss).with_options(options(DType::BF16));
        let mut step = step.with_kept_copies(keeps).build().unwrap();
        let x = Tensor::<Compiled, 2>::ones([4, 6], &device()) * 0.3;
        let losses: Vec<f64> = (0..6)
            .map(|_| value(step.step(0.1, x.clone()).unwrap()))
            .collect();
        (losses, parameters::<Compiled, _>(&step.into_model()))
    };
    assert_eq!(train(true), train(false));
}
