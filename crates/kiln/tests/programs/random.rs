//! Training steps drawn at random: what the closure returns, which inputs coincide, what is captured, what
//! the program does between calls, and which calls panic. Each is a program like the others, run plainly and
//! compiled.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use burn::module::{AutodiffModule, Module};
use burn_optim::Optimizer;
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};

use crate::models::*;
use crate::program::{AOT_EAGER_1, AOT_EAGER_2, B, CPU_1, Expectation, Program, Way, compare_runs};

/// What the closure returns beside the loss.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Output {
    Loss,
    Logits,
    FirstInput,
    SecondInput,
    Weight,
    Bias,
    RunningMean,
    Captured,
    Made,
    ViewOfInput,
    DetachedLogits,
}

/// What the two inputs of a call are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Inputs {
    Fresh,
    SameTwice,
    FirstIsCaptured,
    SecondIsKept,
    SmallerBatch,
}

/// What the program does after a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Between {
    Nothing,
    Look,
    Read,
    Clone,
    CloneAndKeep,
    Valid,
    Record,
    Optimizer,
    Draw,
}

#[derive(Clone, Debug)]
struct Spec {
    dropout: bool,
    decayed: bool,
    outputs: Vec<Output>,
    /// One entry for each call.
    calls: Vec<(Inputs, Between, bool)>,
}

fn spec() -> impl Strategy<Value = Spec> {
    use Output::*;
    let output = prop::sample::select(vec![
        Loss,
        Logits,
        FirstInput,
        SecondInput,
        Weight,
        Bias,
        RunningMean,
        Captured,
        Made,
        ViewOfInput,
        DetachedLogits,
    ]);
    let inputs = prop_oneof![
        6 => Just(Inputs::Fresh),
        1 => Just(Inputs::SameTwice),
        1 => Just(Inputs::FirstIsCaptured),
        1 => Just(Inputs::SecondIsKept),
        1 => Just(Inputs::SmallerBatch),
    ];
    let between = prop_oneof![
        6 => Just(Between::Nothing),
        1 => Just(Between::Look),
        1 => Just(Between::Read),
        1 => Just(Between::Clone),
        1 => Just(Between::CloneAndKeep),
        1 => Just(Between::Valid),
        1 => Just(Between::Record),
        1 => Just(Between::Optimizer),
        1 => Just(Between::Draw),
    ];
    // Runs of equal calls, so that there is something to replay.
    let stretch = (inputs, 1usize..6, between, prop::bool::weighted(0.1));
    let calls = prop::collection::vec(stretch, 3..6).prop_map(|stretches| {
        let calls = stretches
            .into_iter()
            .flat_map(|(inputs, length, between, panics)| {
                let last = length - 1;
                (0..length).map(move |call| match call == last {
                    true => (inputs, between, panics),
                    false => (inputs, Between::Nothing, false),
                })
            });
        calls.collect()
    });
    let outputs = prop::collection::vec(output, 0..5);
    (any::<bool>(), any::<bool>(), outputs, calls).prop_map(|(dropout, decayed, outputs, calls)| Spec {
        dropout,
        decayed,
        outputs,
        calls,
    })
}

/// The program that a specification describes.
fn program(spec: &Spec, p: &Program) {
    p.compare_synced();
    let (captured, device) = (p.x(500), p.device());
    let (fails, closure_captured) = (Rc::new(Cell::new(false)), captured.clone());
    let (may_fail, outputs, dropout) = (fails.clone(), spec.outputs.clone(), spec.dropout);
    let drop = burn::nn::DropoutConfig::new(0.3).init();
    let loss = move |model: &Normed<B>, (a, b): (T2, T2)| {
        let a_dropped = if dropout {
            drop.forward(a.clone())
        } else {
            a.clone()
        };
        let logits = model.forward(a_dropped + b.clone() * 0.5);
        let pull = model.forward(closure_captured.clone()).mean();
        let loss = energy(logits.clone()) + pull * 0.1;
        assert!(!may_fail.get(), "a bad batch");
        let output = |output: &Output| -> T2 {
            match output {
                Output::Loss => loss.clone().unsqueeze(),
                Output::Logits => logits.clone(),
                Output::FirstInput => a.clone(),
                Output::SecondInput => b.clone(),
                Output::Weight => model.first.weight.val(),
                Output::Bias => model.second.bias.as_ref().expect("a bias").val().unsqueeze(),
                Output::RunningMean => model.norm.running_mean.value_sync().unsqueeze(),
                Output::Captured => closure_captured.clone(),
                Output::Made => T2::from_floats([[0.5, 0.25]], &device),
                Output::ViewOfInput => a.clone().transpose(),
                Output::DetachedLogits => logits.clone().detach(),
            }
        };
        let outputs: Vec<T2> = outputs.iter().map(output).collect();
        (loss.clone(), outputs)
    };
    match spec.decayed {
        true => calls(spec, p, p.train(p.normed(), adamw(), loss), &fails, &captured),
        false => calls(spec, p, p.train(p.normed(), momentum(), loss), &fails, &captured),
    }
}

/// The step of a specification.
type Step<'a, O> = crate::trainer::Trainer<'a, Normed<B>, O, (T2, T2), (T1, Vec<T2>)>;

/// Makes the calls of a specification.
fn calls<O>(spec: &Spec, p: &Program, mut step: Step<'_, O>, fails: &Cell<bool>, captured: &T2)
where
    O: burn_optim::SimpleOptimizer<kiln::Kiln> + 'static,
{
    let kept = p.x(600);
    let copies = RefCell::new(Vec::new());
    for (call, (inputs, between, panics)) in spec.calls.iter().enumerate() {
        let x = p.x(call);
        // The closure of a replayed call does not run: a batch of its own size has it run, and panic.
        let input = match inputs {
            _ if *panics => (p.waves(call, [3, WIDTH]), p.waves(call + 40, [3, WIDTH])),
            Inputs::Fresh => (x, p.x(call + 40)),
            Inputs::SameTwice => (x.clone(), x),
            Inputs::FirstIsCaptured => (captured.clone(), x),
            Inputs::SecondIsKept => (x, kept.clone()),
            Inputs::SmallerBatch => (p.waves(call, [2, WIDTH]), p.waves(call + 40, [2, WIDTH])),
        };
        fails.set(*panics);
        let result = step.try_step(LR, input);
        assert_eq!(result.is_err(), *panics, "call {call}: {:?}", result.err());
        match between {
            Between::Nothing => {}
            Between::Look => std::mem::drop(step.model()),
            Between::Read => std::mem::drop(p.read("a weight", &step.model().first.weight.val())),
            Between::Clone => std::mem::drop(step.model().clone()),
            Between::CloneAndKeep => copies.borrow_mut().push(step.model().clone()),
            Between::Valid => p.look("validation", &step.model().valid().forward(p.x(700).inner())),
            Between::Record => {
                let record = step.model().clone().into_record();
                p.look("running variance of a record", &record.norm.running_var.val());
            }
            Between::Optimizer => p.look("records of the optimizer", &step.optimizer().to_record().len()),
            Between::Draw => {
                let draw = T1::random([3], burn::tensor::Distribution::Default, &p.device());
                p.look("a draw of the program's own", &draw);
            }
        }
    }
    for copy in copies.into_inner() {
        p.look("a kept copy's weight", &copy.first.weight.val());
    }
}

/// Runs random specifications in one way.
fn run(way: Way, cases: u32) {
    if crate::known("random::specifications") {
        return;
    }
    let mut runner = TestRunner::new(Config {
        cases,
        failure_persistence: None,
        ..Config::default()
    });
    let result = runner.run(&spec(), |spec| {
        match compare_runs(&|p| program(&spec, p), Expectation::Any, way) {
            Ok(()) => Ok(()),
            Err(message) => Err(TestCaseError::fail(message)),
        }
    });
    if let Err(error) = result {
        panic!("{error}");
    }
}

#[test]
fn specifications_on_aot_eager() {
    run(AOT_EAGER_1, 48);
}

#[test]
fn specifications_on_aot_eager_read_at_once() {
    run(AOT_EAGER_2, 48);
}

#[test]
fn specifications_on_cpu() {
    run(CPU_1, 4);
}
