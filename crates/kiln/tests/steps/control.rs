//! `TrainStep` under control: several signatures, frozen, with parts that are not recorded.

use std::cell::{Cell, RefCell};

use burn::tensor::Tensor;
use burn_optim::momentum::MomentumConfig;
use burn_optim::{AdamWConfig, SgdConfig};
use kiln::{BreakReason, Cause, CompileBackend, CompileOptions, Error, KilnDevice, TrainError, TrainStep};

use crate::harness::*;
use crate::models::*;

const BACKEND: CompileBackend = CompileBackend::AotEager;

fn device() -> KilnDevice {
    KilnDevice::cpu()
}

fn loss(model: &Mlp<Compiled>, batch: Batch<Compiled>) -> Tensor<Compiled, 1> {
    model.loss(batch)
}

/// The message of a frozen step.
fn guard<T: std::fmt::Debug>(result: Result<T, TrainError>) -> String {
    match result.unwrap_err() {
        TrainError::Step(Error::Frozen { guard, .. }) => guard,
        other => panic!("{other}"),
    }
}

#[test]
fn sizes_that_alternate_are_all_replayed() {
    let _turn = turn();
    let runs = Cell::new(0);
    let loss = |model: &Mlp<Compiled>, batch: Batch<Compiled>| {
        runs.set(runs.get() + 1);
        model.loss(batch)
    };
    let mut step = TrainStep::new(Mlp::new(&device()), AdamWConfig::new().init(), loss)
        .with_backend(BACKEND)
        .build()
        .unwrap();
    for index in 0..20 {
        let size = if index % 2 == 0 { EXAMPLES } else { 2 };
        step.step(rate(index), batch(index, size, &device())).unwrap();
    }
    // Of each size the first two calls, and the proofs at its calls 4 and 9.
    assert_eq!(runs.get(), 8);
    let history = step.history();
    assert_eq!(
        (history.recorded, history.replayed, history.proofs),
        (8, 12, 4),
        "{history}"
    );
    assert_eq!(
        history.causes,
        [
            (Cause::First, 1),
            (Cause::Input, 1),
            (Cause::Confirming, 2),
            (Cause::Proof, 4)
        ]
    );
    assert_eq!(step.replayed_signatures(), 2);
    assert_eq!(step.report().steps.len(), 2);
}

#[test]
fn the_last_batch_of_an_epoch_is_replayed() {
    let _turn = turn();
    let start = initialised(Mlp::<Compiled>::new(&device()));
    let copy = || copy_weights::<Compiled, Compiled, _, _>(start.clone(), Mlp::new(&device()), &device());
    let size = |index: usize| if index % 5 == 4 { 2 } else { EXAMPLES };
    let mut expected = Outcome::default();
    let (mut model, mut optim) = (Some(copy()), AdamWConfig::new().init());
    for index in 0..30 {
        let batch = batch(index, size(index), &device());
        expected
            .losses
            .push(value(plain_step(&mut model, &mut optim, rate(index), batch)));
    }
    expected.parameters = parameters::<Compiled, _>(&model.unwrap());

    for backend in [BACKEND, CompileBackend::Cpu] {
        let mut step = TrainStep::new(copy(), AdamWConfig::new().init(), loss)
            .with_backend(backend)
            .build()
            .unwrap();
        let mut outcome = Outcome::default();
        let mut recorded = Vec::new();
        for index in 0..30 {
            let before = step.history().recorded;
            let batch = batch(index, size(index), &device());
            outcome.losses.push(value(step.step(rate(index), batch).unwrap()));
            if step.history().recorded > before {
                recorded.push(index);
            }
        }
        // Twice each, and the proofs: call 4 of the smaller size is in the fourth epoch.
        assert_eq!(recorded, [0, 1, 3, 4, 9, 10, 19, 25], "{}", step.history());
        outcome.parameters = parameters::<Compiled, _>(&step.into_model());
        outcome.assert_close(&expected, "epochs with a smaller last batch");
    }
}

#[test]
fn a_frozen_step_refuses_what_it_has_not_compiled() {
    let _turn = turn();
    let runs = Cell::new(0);
    let loss = |model: &Mlp<Compiled>, batch: Batch<Compiled>| {
        runs.set(runs.get() + 1);
        model.loss(batch)
    };
    let mut step = TrainStep::new(Mlp::new(&device()), AdamWConfig::new().init(), loss)
        .with_backend(BACKEND)
        .build()
        .unwrap();
    step.step(0.1, batch(0, EXAMPLES, &device())).unwrap();
    step.freeze();
    for index in 1..12 {
        step.step(0.1, batch(index, EXAMPLES, &device())).unwrap();
        let (before, times) = (parameters::<Compiled, _>(step.model().unwrap()), runs.get());
        let guard = guard(step.step(0.1, batch(index, 2, &device())));
        assert!(guard.contains("tensor 0 of the input: f32 [4, "), "{guard}");
        assert!(guard.contains("became f32 [2, "), "{guard}");
        assert_eq!(
            parameters::<Compiled, _>(step.model().unwrap()),
            before,
            "nothing ran"
        );
        assert_eq!(runs.get(), times, "the closure did not run");
    }
    let history = step.history();
    assert_eq!((history.recorded, history.replayed), (4, 8), "{history}");
    assert_eq!(step.report().compiles.len(), 1);
    step.unfreeze();
    step.step(0.1, batch(12, 2, &device())).unwrap();
    assert_eq!(step.report().compiles.len(), 2);
}

#[test]
fn a_frozen_step_refuses_another_branch_and_keeps_its_model() {
    let _turn = turn();
    // The input is known; what the closure does with it is not.
    let other = Cell::new(false);
    let loss = |model: &Mlp<Compiled>, batch: Batch<Compiled>| {
        let loss = model.loss(batch);
        if other.get() { loss.exp() } else { loss }
    };
    let mut step = TrainStep::new(Mlp::new(&device()), AdamWConfig::new().init(), loss)
        .with_backend(BACKEND)
        .build()
        .unwrap();
    for index in 0..3 {
        step.step(0.1, batch(index, EXAMPLES, &device())).unwrap();
    }
    step.freeze();
    let before = parameters::<Compiled, _>(step.model().unwrap());
    other.set(true);
    let guard = guard(step.step(0.1, batch(3, EXAMPLES, &device())));
    assert!(guard.contains("operation ") && guard.contains("Exp"), "{guard}");
    assert_eq!(
        parameters::<Compiled, _>(step.model().unwrap()),
        before,
        "nothing is lost"
    );
    other.set(false);
    for index in 3..9 {
        step.step(0.1, batch(index, EXAMPLES, &device())).unwrap();
    }
    assert_ne!(parameters::<Compiled, _>(step.model().unwrap()), before);
    assert_eq!(step.report().compiles.len(), 1);
}

#[test]
fn frozen_from_the_start_nothing_is_compiled() {
    let _turn = turn();
    let options = CompileOptions::default().with_backend(BACKEND).with_frozen(true);
    let optim = SgdConfig::new().with_momentum(Some(MomentumConfig::new())).init();
    let mut step = TrainStep::new(Mlp::new(&device()), optim, loss)
        .with_options(options.with_name("cold"))
        .build()
        .unwrap();
    let guard = guard(step.step(0.1, batch(0, EXAMPLES, &device())));
    assert!(guard.contains("nothing was compiled"), "{guard}");
    step.unfreeze();
    step.step(0.1, batch(0, EXAMPLES, &device())).unwrap();
    // The optimizer's first step has a graph that does not come again.
    step.freeze();
    let before = parameters::<Compiled, _>(step.model().unwrap());
    assert!(step.step(0.1, batch(1, EXAMPLES, &device())).is_err());
    assert_eq!(parameters::<Compiled, _>(step.model().unwrap()), before);
    step.unfreeze();
    for index in 1..4 {
        step.step(0.1, batch(index, EXAMPLES, &device())).unwrap();
    }
    step.freeze();
    for index in 4..9 {
        step.step(0.1, batch(index, EXAMPLES, &device())).unwrap();
    }
}

#[test]
fn a_frozen_step_survives_checkpoints() {
    let _turn = turn();
    let mut step = TrainStep::new(Mlp::new(&device()), AdamWConfig::new().init(), loss)
        .with_backend(BACKEND)
        .build()
        .unwrap();
    for index in 0..3 {
        step.step(0.1, batch(index, EXAMPLES, &device())).unwrap();
    }
    step.freeze();
    for index in 3..20 {
        step.step(0.1, batch(index, EXAMPLES, &device())).unwrap();
        if index % 5 == 0 {
            let _ = step.optimizer().unwrap();
            let _ = step.model().unwrap().clone();
        }
    }
}

#[test]
fn a_step_with_a_disabled_part_is_recorded_and_says_so() {
    let _turn = turn();
    let start = initialised(Mlp::<Compiled>::new(&device()));
    let copy = || copy_weights::<Compiled, Compiled, _, _>(start.clone(), Mlp::new(&device()), &device());
    let seen = RefCell::new(Vec::new());
    let with_part = |model: &Mlp<Compiled>, batch: Batch<Compiled>| {
        let logits = model.logits(&batch);
        // A part in the middle, whose gradient is Burn's.
        let scaled = kiln::disable(|| {
            seen.borrow_mut().push(logits.clone().sum().into_scalar());
            logits * 0.5
        });
        scaled.powf_scalar(2.0).mean()
    };
    let mut expected = Outcome::default();
    let (mut model, mut optim) = (copy(), AdamWConfig::new().init());
    for index in 0..6 {
        let value_of = with_part(&model, batch(index, EXAMPLES, &device()));
        let grads = burn_optim::GradientsParams::from_grads(value_of.backward(), &model);
        model = burn_optim::Optimizer::step(&mut optim, rate(index), model, grads);
        expected.losses.push(value(value_of));
    }
    expected.parameters = parameters::<Compiled, _>(&model);

    let mut step = TrainStep::new(copy(), AdamWConfig::new().init(), with_part)
        .with_backend(BACKEND)
        .build()
        .unwrap();
    let mut outcome = Outcome::default();
    for index in 0..6 {
        let loss = step.step(rate(index), batch(index, EXAMPLES, &device())).unwrap();
        outcome.losses.push(value(loss));
    }
    let history = step.history();
    let obstacle = history.obstacle.clone().unwrap_or_default();
    assert!(obstacle.contains("kiln::disable"), "{obstacle}");
    assert!(obstacle.contains("control.rs"), "{obstacle}");
    assert_eq!((history.recorded, history.replayed), (6, 0), "{history}");
    let breaks = step.report().breaks;
    assert_eq!(breaks.len(), 1, "{breaks:?}");
    assert_eq!((&breaks[0].0.reason, breaks[0].1), (&BreakReason::Disabled, 6));
    assert!(step.explain().to_string().contains("kiln::disable"));
    outcome.parameters = parameters::<Compiled, _>(&step.into_model());
    outcome.assert_close(&expected, "with a part that is not recorded");
    assert_eq!(seen.borrow().len(), 12);
}

#[test]
fn a_step_inside_of_disable_trains_and_is_replayed_afterwards() {
    let _turn = turn();
    let mut step = TrainStep::new(Mlp::new(&device()), AdamWConfig::new().init(), loss)
        .with_backend(BACKEND)
        .build()
        .unwrap();
    for index in 0..3 {
        step.step(0.1, batch(index, EXAMPLES, &device())).unwrap();
    }
    let (before, calls) = (
        parameters::<Compiled, _>(step.model().unwrap()),
        step.report().calls,
    );
    kiln::disable(|| step.step(0.1, batch(3, EXAMPLES, &device())).unwrap());
    assert_ne!(parameters::<Compiled, _>(step.model().unwrap()), before);
    assert_eq!(step.report().calls, calls, "no region was entered");
    let replayed = step.history().replayed;
    for index in 4..8 {
        step.step(0.1, batch(index, EXAMPLES, &device())).unwrap();
    }
    assert!(step.history().replayed > replayed, "{}", step.history());
    assert!(step.history().causes.contains(&(Cause::Disabled, 1)));
}
