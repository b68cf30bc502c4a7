//! `TrainStep`: what is replayed, what is recorded again, and that the objects it owns stay current.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};

use burn::tensor::{Int, Tensor, TensorData};
use burn_optim::adaptor::OptimizerAdaptor;
use burn_optim::decay::WeightDecayConfig;
use burn_optim::grad_clipping::GradientClippingConfig;
use burn_optim::momentum::MomentumConfig;
use burn_optim::{AdamConfig, AdamWConfig, GradientsParams, Optimizer, SgdConfig, SimpleOptimizer};
use kiln::{CompileBackend, CompileOptions, Kiln, KilnDevice, TrainStep};
use kiln_models::llama::{Llama, LlamaConfig};

use crate::harness::*;
use crate::models::*;

const BACKEND: CompileBackend = CompileBackend::AotEager;

fn device() -> KilnDevice {
    KilnDevice::cpu()
}

#[test]
fn after_the_first_steps_no_model_code_runs() {
    let _turn = turn();
    let calls = Cell::new(0);
    let loss = |model: &Mlp<Compiled>, batch: Batch<Compiled>| {
        calls.set(calls.get() + 1);
        model.loss(batch)
    };
    let mut step = TrainStep::new(Mlp::new(&device()), AdamWConfig::new().init(), loss)
        .with_backend(BACKEND)
        .build()
        .unwrap();
    for index in 0..10 {
        step.step(rate(index), batch(index, EXAMPLES, &device())).unwrap();
    }
    // Calls 1 and 2 make the plan; 4 and 9 are proofs.
    assert_eq!(calls.get(), 4);
    assert_eq!((step.history().recorded, step.history().replayed), (4, 6));
    assert_eq!(step.history().proofs, 2);
}

#[test]
fn another_batch_size_is_recorded_and_training_goes_on() {
    let _turn = turn();
    // Fourteen steps, two of them with a smaller batch, against the plain loop.
    let sizes = |step: usize| if step == 6 || step == 11 { 2 } else { EXAMPLES };
    let start = initialised(Mlp::<Compiled>::new(&device()));
    let copy = || copy_weights::<Compiled, Compiled, _, _>(start.clone(), Mlp::new(&device()), &device());

    let mut expected = Outcome::default();
    let (mut model, mut optim) = (Some(copy()), AdamWConfig::new().init());
    for index in 0..14 {
        let loss = plain_step(
            &mut model,
            &mut optim,
            rate(index),
            batch(index, sizes(index), &device()),
        );
        expected.losses.push(value(loss));
    }
    expected.parameters = parameters::<Compiled, _>(&model.unwrap());

    let loss = |model: &Mlp<Compiled>, batch: Batch<Compiled>| model.loss(batch);
    let mut step = TrainStep::new(copy(), AdamWConfig::new().init(), loss)
        .with_backend(BACKEND)
        .build()
        .unwrap();
    let mut outcome = Outcome::default();
    for index in 0..14 {
        let loss = step
            .step(rate(index), batch(index, sizes(index), &device()))
            .unwrap();
        outcome.losses.push(value(loss));
    }
    assert!(step.history().replayed >= 4, "{:?}", step.history());
    outcome.parameters = parameters::<Compiled, _>(&step.into_model());
    outcome.assert_close(&expected, "batches of two sizes");
}

/// Trains beside a plain loop; the calls that were recorded, and the graphs they have.
fn recorded_and_graphs<O: SimpleOptimizer<Kiln> + 'static>(
    optimizer: OptimizerAdaptor<O, Mlp<Compiled>, Compiled>,
) -> (u64, usize) {
    const STEPS: usize = 7;
    let start = initialised(Mlp::<Compiled>::new(&device()));
    let copy = || copy_weights::<Compiled, Compiled, _, _>(start.clone(), Mlp::new(&device()), &device());
    let expected = train_plain(copy(), optimizer.clone(), STEPS, &device());
    let (outcome, recorded, report) = train_replayed(copy(), optimizer, STEPS, BACKEND);
    outcome.assert_close(&expected, "trained by steps");
    (recorded, report.steps.len())
}

#[test]
fn state_of_zeros_makes_the_first_step_like_all_others() {
    let _turn = turn();
    let clipping = Some(GradientClippingConfig::Norm(0.1));
    // Two calls make the plan, and call 4 is a proof.
    assert_eq!(recorded_and_graphs(AdamWConfig::new().init()), (3, 1));
    let clipped = AdamWConfig::new().with_grad_clipping(clipping);
    assert_eq!(recorded_and_graphs(clipped.init()), (3, 1));
    let decayed = AdamConfig::new().with_weight_decay(Some(WeightDecayConfig::new(0.1)));
    assert_eq!(recorded_and_graphs(decayed.init()), (3, 1));
    let largest = AdamWConfig::new().with_amsgrad(true);
    assert_eq!(recorded_and_graphs(largest.init()), (3, 1));
}

#[test]
fn other_state_is_made_by_the_first_step() {
    let _turn = turn();
    let momentum = SgdConfig::new().with_momentum(Some(MomentumConfig::new()));
    assert_eq!(recorded_and_graphs(momentum.init()), (4, 2));
}

#[test]
fn the_optimizer_catches_up() {
    let _turn = turn();
    // Bias correction depends on the optimizer's count of steps: a plain loop that goes on from its state
    // must agree.
    let start = initialised(Mlp::<Compiled>::new(&device()));
    let copy = || copy_weights::<Compiled, Compiled, _, _>(start.clone(), Mlp::new(&device()), &device());
    let (mut model, mut optim) = (Some(copy()), AdamWConfig::new().init());
    for index in 0..12 {
        plain_step(
            &mut model,
            &mut optim,
            rate(index),
            batch(index, EXAMPLES, &device()),
        );
    }
    let expected = Outcome {
        losses: vec![],
        parameters: parameters::<Compiled, _>(&model.unwrap()),
    };

    let loss = |model: &Mlp<Compiled>, batch: Batch<Compiled>| model.loss(batch);
    let mut step = TrainStep::new(copy(), AdamWConfig::new().init(), loss)
        .with_backend(BACKEND)
        .build()
        .unwrap();
    for index in 0..9 {
        step.step(rate(index), batch(index, EXAMPLES, &device())).unwrap();
    }
    let (model, mut optim) = step.into_parts().unwrap();
    let mut model = Some(model);
    for index in 9..12 {
        plain_step(
            &mut model,
            &mut optim,
            rate(index),
            batch(index, EXAMPLES, &device()),
        );
    }
    let outcome = Outcome {
        losses: vec![],
        parameters: parameters::<Compiled, _>(&model.unwrap()),
    };
    outcome.assert_close(&expected, "after replay");
}

#[test]
fn the_model_can_be_looked_at_between_steps() {
    let _turn = turn();
    let loss = |model: &Mlp<Compiled>, batch: Batch<Compiled>| model.loss(batch);
    let mut step = TrainStep::new(Mlp::new(&device()), SgdConfig::new().init(), loss)
        .with_backend(BACKEND)
        .build()
        .unwrap();
    let mut last = parameters::<Compiled, _>(step.model().unwrap());
    for index in 0..8 {
        step.step(0.1, batch(index, EXAMPLES, &device())).unwrap();
        let now = parameters::<Compiled, _>(step.model().unwrap());
        assert_ne!(now, last, "step {index} trained nothing");
        last = now;
    }
}

#[test]
fn a_copy_of_the_model_stays_as_it_was() {
    let _turn = turn();
    for backend in [BACKEND, CompileBackend::Cpu] {
        let loss = |model: &Mlp<Compiled>, batch: Batch<Compiled>| model.loss(batch);
        let mut step = TrainStep::new(Mlp::new(&device()), AdamWConfig::new().init(), loss)
            .with_backend(backend)
            .build()
            .unwrap();
        let weights = |model: &Mlp<Compiled>| parameters::<Compiled, _>(model);
        for index in 0..5 {
            step.step(rate(index), batch(index, EXAMPLES, &device())).unwrap();
        }
        let copy = step.model().unwrap().clone();
        let then = weights(&copy);
        // Call 9 is a proof.
        for index in 5..9 {
            step.step(rate(index), batch(index, EXAMPLES, &device())).unwrap();
        }
        assert_eq!(weights(&copy), then, "on {backend}");
        let later = weights(step.model().unwrap());
        assert_ne!(later, then, "training goes on");
        // A look alone, and a copy that is gone, cost no recording.
        drop(copy);
        let recorded = step.history().recorded;
        for index in 9..15 {
            step.step(rate(index), batch(index, EXAMPLES, &device())).unwrap();
            weights(step.model().unwrap());
        }
        assert_eq!(step.history().recorded, recorded, "{}", step.history());
    }
}

#[test]
fn outputs_beside_the_loss() {
    let _turn = turn();
    let loss = |model: &Mlp<Compiled>, batch: Batch<Compiled>| {
        let logits = model.logits(&batch);
        (model.loss(batch), logits.clone().argmax(1), logits)
    };
    type Output = (
        Tensor<Compiled, 1>,
        (Tensor<Compiled, 2, Int>, Tensor<Compiled, 2>),
    );
    let nested = move |model: &Mlp<Compiled>, batch: Batch<Compiled>| -> Output {
        let (loss, best, logits) = loss(model, batch);
        (loss, (best, logits))
    };
    let mut step = TrainStep::new(initialised(Mlp::new(&device())), SgdConfig::new().init(), nested)
        .with_backend(BACKEND)
        .build()
        .unwrap();
    let mut kept = Vec::new();
    for index in 0..7 {
        let before = step.model().unwrap().clone();
        let input = batch(index, EXAMPLES, &device());
        let expected: Vec<f32> = before.logits(&input).into_data().to_vec().unwrap();
        let (_, (best, logits)) = step.step(0.1, input).unwrap();
        assert_eq!(best.dims(), [EXAMPLES, 1]);
        kept.push((expected, logits));
    }
    // Outputs of earlier steps keep their values.
    for (expected, logits) in kept {
        let logits: Vec<f32> = logits.into_data().to_vec().unwrap();
        assert!(
            expected.iter().zip(&logits).all(|(a, b)| (a - b).abs() < 1e-5),
            "{expected:?} {logits:?}"
        );
    }
}

#[test]
fn a_panic_in_the_closure_leaves_the_model() {
    let _turn = turn();
    let fail = Cell::new(false);
    let loss = |model: &Mlp<Compiled>, batch: Batch<Compiled>| {
        let loss = model.loss(batch);
        assert!(!fail.get(), "a bad batch");
        loss
    };
    let mut step = TrainStep::new(Mlp::new(&device()), AdamWConfig::new().init(), loss)
        .with_backend(BACKEND)
        .build()
        .unwrap();
    step.step(0.1, batch(0, EXAMPLES, &device())).unwrap();
    let before = parameters::<Compiled, _>(step.model().unwrap());
    fail.set(true);
    let result = catch_unwind(AssertUnwindSafe(|| step.step(0.1, batch(1, EXAMPLES, &device()))));
    assert!(result.is_err());
    assert_eq!(parameters::<Compiled, _>(step.model().unwrap()), before);
    fail.set(false);
    for index in 1..8 {
        step.step(0.1, batch(index, EXAMPLES, &device())).unwrap();
    }
}

#[test]
fn frozen_parameters_stay() {
    let _turn = turn();
    let mut model = Encoder::<Compiled>::new(0.0, &device());
    model = model.freeze_embedding();
    let before = parameters::<Compiled, _>(&model);
    let loss = |model: &Encoder<Compiled>, batch: Batch<Compiled>| model.loss(batch);
    let mut step = TrainStep::new(model, AdamWConfig::new().init(), loss)
        .with_backend(BACKEND)
        .build()
        .unwrap();
    for index in 0..8 {
        step.step(0.01, batch(index, EXAMPLES, &device())).unwrap();
    }
    assert_eq!(step.history().obstacle, None);
    let after = parameters::<Compiled, _>(&step.into_model());
    assert_eq!(before[0], after[0], "the embedding is frozen");
    assert!(before[1..].iter().zip(&after[1..]).any(|(a, b)| a != b));
}

#[test]
fn a_learning_rate_of_zero_takes_the_optimizers_other_branch() {
    let _turn = turn();
    // AdamW skips the decay when rate times decay is zero: another program for that step.
    let loss = |model: &Mlp<Compiled>, batch: Batch<Compiled>| model.loss(batch);
    let optim = AdamWConfig::new().with_weight_decay(0.1).init();
    let mut step = TrainStep::new(Mlp::new(&device()), optim, loss)
        .with_backend(BACKEND)
        .build()
        .unwrap();
    for index in 0..6 {
        step.step(0.01, batch(index, EXAMPLES, &device())).unwrap();
    }
    let before = parameters::<Compiled, _>(step.model().unwrap());
    step.step(0.0, batch(6, EXAMPLES, &device())).unwrap();
    assert_eq!(
        parameters::<Compiled, _>(step.model().unwrap()),
        before,
        "a rate of zero changes nothing"
    );
    step.step(0.01, batch(7, EXAMPLES, &device())).unwrap();
    assert_ne!(parameters::<Compiled, _>(step.model().unwrap()), before);
}

#[test]
fn a_number_of_the_loss_that_is_nan_is_one_that_stays() {
    let _turn = turn();
    let loss = |model: &Mlp<Compiled>, batch: Batch<Compiled>| model.loss(batch).mul_scalar(f64::NAN);
    let mut step = TrainStep::new(Mlp::new(&device()), SgdConfig::new().init(), loss)
        .with_backend(BACKEND)
        .build()
        .unwrap();
    for index in 0..6 {
        step.step(0.1, batch(index, EXAMPLES, &device())).unwrap();
    }
    assert_eq!(step.history().obstacle, None);
    assert_eq!(step.history().replayed, 3, "{}", step.history());
}

#[test]
fn zero_is_not_minus_zero() {
    let _turn = turn();
    let factor = Cell::new(0.0);
    let loss = |model: &Mlp<Compiled>, batch: Batch<Compiled>| model.loss(batch).mul_scalar(factor.get());
    let mut step = TrainStep::new(Mlp::new(&device()), SgdConfig::new().init(), loss)
        .with_backend(BACKEND)
        .build()
        .unwrap();
    for index in 0..9 {
        factor.set(if index < 5 { 0.0 } else { -0.0 });
        step.step(0.1, batch(index, EXAMPLES, &device())).unwrap();
    }
    // Call 9 is a proof.
    let obstacle = step.history().obstacle.clone().unwrap_or_default();
    assert!(obstacle.contains("was 0 and is -0"), "{obstacle}");
}

#[test]
fn a_learning_rate_that_is_no_number_is_one_that_stays() {
    let _turn = turn();
    let loss = |model: &Mlp<Compiled>, batch: Batch<Compiled>| model.loss(batch);
    let mut step = TrainStep::new(Mlp::new(&device()), AdamWConfig::new().init(), loss)
        .with_backend(BACKEND)
        .build()
        .unwrap();
    for index in 0..6 {
        step.step(f64::NAN, batch(index, EXAMPLES, &device())).unwrap();
    }
    assert_eq!(step.history().obstacle, None);
    assert!(step.history().replayed >= 3, "{}", step.history());
    let after = parameters::<Compiled, _>(&step.into_model());
    assert!(after.iter().flatten().all(|value| value.is_nan()));
}

#[test]
fn data_that_the_closure_makes_the_same_each_time_is_no_obstacle() {
    let _turn = turn();
    let start = initialised(Mlp::<Compiled>::new(&device()));
    let copy = || copy_weights::<Compiled, Compiled, _, _>(start.clone(), Mlp::new(&device()), &device());
    // A short table and a long progression: the one stays data, the other becomes an operation.
    let loss = |model: &Mlp<Compiled>, batch: Batch<Compiled>| {
        let logits = model.logits(&batch);
        let table = Tensor::<Compiled, 1>::from_floats([0.5, 2.0, 1.0], &logits.device());
        let examples = batch.values.dims()[0];
        let weights = Tensor::<Compiled, 1, Int>::arange(3..3 + 4 * 16, &logits.device()).float();
        let weights = weights.reshape([examples, 16]).mean_dim(1);
        (logits * table.unsqueeze() * weights).powf_scalar(2.0).mean()
    };
    let mut expected = Outcome::default();
    let (mut model, mut optim) = (copy(), AdamWConfig::new().init());
    for index in 0..10 {
        let value_of = loss(&model, batch(index, EXAMPLES, &device()));
        let grads = GradientsParams::from_grads(value_of.backward(), &model);
        model = optim.step(rate(index), model, grads);
        expected.losses.push(value(value_of));
    }
    expected.parameters = parameters::<Compiled, _>(&model);

    let mut step = TrainStep::new(copy(), AdamWConfig::new().init(), loss)
        .with_backend(BACKEND)
        .build()
        .unwrap();
    let mut outcome = Outcome::default();
    for index in 0..10 {
        let loss = step.step(rate(index), batch(index, EXAMPLES, &device())).unwrap();
        outcome.losses.push(value(loss));
    }
    assert_eq!(step.history().obstacle, None);
    assert_eq!(step.history().replayed, 6, "{:?}", step.history());
    outcome.parameters = parameters::<Compiled, _>(&step.into_model());
    outcome.assert_close(&expected, "with data of the closure's own");
}

#[test]
fn data_that_changes_in_the_closure_is_an_obstacle() {
    let _turn = turn();
    let calls = Cell::new(0.0f32);
    let loss = |model: &Mlp<Compiled>, batch: Batch<Compiled>| {
        calls.set(calls.get() + 1.0);
        let count = Tensor::<Compiled, 1>::from_floats([calls.get()], &device());
        model.loss(batch) * count
    };
    let mut step = TrainStep::new(Mlp::new(&device()), SgdConfig::new().init(), loss)
        .with_backend(BACKEND)
        .build()
        .unwrap();
    for index in 0..6 {
        step.step(0.1, batch(index, EXAMPLES, &device())).unwrap();
    }
    let obstacle = step.history().obstacle.clone().unwrap_or_default();
    assert!(obstacle.contains("with other elements"), "{obstacle}");
    assert_eq!(step.history().replayed, 0);
}

#[test]
fn llama_is_replayed() {
    let _turn = turn();
    // Its causal mask is made of `arange` in each forward pass.
    const LENGTH: usize = 12;
    let model = LlamaConfig::new(32, 16, 24, 2, 2).init::<Compiled>(&device());
    let tokens = |step: usize| {
        let tokens: Vec<i32> = (0..2 * LENGTH).map(|i| ((i * i + step) % 32) as i32).collect();
        Tensor::<Compiled, 2, Int>::from_data(TensorData::new(tokens, [2, LENGTH]), &device())
    };
    let loss = |model: &Llama<Compiled>, tokens: Tensor<Compiled, 2, Int>| model.causal_loss(tokens);
    let mut step = TrainStep::new(model, AdamWConfig::new().init(), loss)
        .with_backend(BACKEND)
        .build()
        .unwrap();
    for index in 0..8 {
        step.step(1e-3, tokens(index)).unwrap();
    }
    assert_eq!(step.history().obstacle, None);
    assert_eq!((step.history().recorded, step.history().replayed), (3, 5));
}

#[test]
fn explain_says_what_each_tensor_is_bound_to() {
    let _turn = turn();
    let loss = |model: &Mlp<Compiled>, batch: Batch<Compiled>| {
        let labels = batch.values.clone();
        (model.loss(batch), labels)
    };
    let mut step = TrainStep::new(Mlp::new(&device()), AdamWConfig::new().init(), loss)
        .with_backend(BACKEND)
        .build()
        .unwrap();
    for index in 0..3 {
        step.step(0.1, batch(index, EXAMPLES, &device())).unwrap();
    }
    let replay = step.explain().into_report().replay.unwrap();
    let has = |lines: &[String], end: &str| lines.iter().any(|line| line.ends_with(end));
    assert!(has(&replay.inputs, "tensor 0 of the call's input"), "{replay:?}");
    assert!(
        replay.inputs.iter().any(|line| line.contains("state of `")),
        "{replay:?}"
    );
    assert!(
        replay
            .inputs
            .iter()
            .any(|line| line.contains("state of optimizer state 0 of `"))
    );
    assert!(
        has(&replay.results, "tensor 0 of the call's input, unchanged"),
        "{replay:?}"
    );
    assert_eq!((replay.recorded, replay.replayed), (2, 1));
    let text = step.explain().to_string();
    assert!(text.contains("recorded 1 times: the first call"), "{text}");
}

/// A step whose loss is scaled by a number in a `Cell`, which changes before call `change`, counted from 1.
fn counted(strict: bool, change: usize) -> (Vec<Result<f64, String>>, kiln::History) {
    let scale = Cell::new(1.0);
    let loss = |model: &Mlp<Compiled>, batch: Batch<Compiled>| model.loss(batch).mul_scalar(scale.get());
    let mut step = TrainStep::new(Mlp::new(&device()), SgdConfig::new().init(), loss)
        .with_options(
            CompileOptions::default()
                .with_backend(BACKEND)
                .with_strict(strict),
        )
        .build()
        .unwrap();
    let call = |index: usize| {
        if index + 1 == change {
            scale.set(3.0);
        }
        let result = step.step(0.0, batch(0, EXAMPLES, &device()));
        result.map(value).map_err(|error| error.to_string())
    };
    let losses = (0..12).map(call).collect();
    (losses, step.history().clone())
}

#[test]
fn a_number_that_changes_is_found_by_the_next_proof() {
    let _turn = turn();
    let (losses, history) = counted(false, 6);
    let losses: Vec<f64> = losses.into_iter().map(Result::unwrap).collect();
    let ratio = |call: usize| losses[call - 1] / losses[0];
    // A rate of zero trains nothing: every loss is the first, or three times that.
    assert!((ratio(5) - 1.0).abs() < 1e-6);
    assert!((ratio(9) - 3.0).abs() < 1e-6, "the proof itself runs the closure");
    assert!((ratio(10) - 3.0).abs() < 1e-6 && (ratio(12) - 3.0).abs() < 1e-6);
    let obstacle = history.obstacle.unwrap();
    assert!(
        obstacle.contains("was 1 and is 3") && obstacle.contains("after call 4"),
        "{obstacle}"
    );
    assert_eq!(
        history.recorded,
        2 + 1 + 4,
        "two calls, a proof, and all from the ninth on"
    );
}

#[test]
fn under_strict_a_number_that_changes_is_an_error() {
    let _turn = turn();
    let (losses, _) = counted(true, 6);
    let errors: Vec<usize> = (0..12)
        .filter(|&index| losses[index].is_err())
        .map(|index| index + 1)
        .collect();
    assert_eq!(errors, [9]);
    let error = losses[8].clone().unwrap_err();
    assert!(
        error.contains("was 1 and is 3") && error.contains("noticed at call 9"),
        "{error}"
    );
}
