//! Transformed functions inside of training steps: private gradients, penalties on gradients, and what
//! changes from call to call.

use std::cell::{Cell, RefCell};

use burn::module::{Module, Param};
use burn::tensor::backend::Backend;
use burn::tensor::{Distribution, Tensor, TensorData};
use burn_optim::{AdamConfig, GradientsParams, Optimizer, SgdConfig};
use kiln::func::{Randomness, Same, grad, value_and_grad, vmap};
use kiln::{CompileBackend, CompileOptions, Kiln, KilnDevice, TrainStep};

use crate::harness::*;

type B = Compiled;
type Pair = (Tensor<B, 2>, Tensor<B, 2>);
type Weights = (Tensor<Kiln, 2>, Tensor<Kiln, 2>);

const INPUTS: usize = 3;
const HIDDEN: usize = 4;
const OUTPUTS: usize = 2;
const SAMPLES: usize = 6;
const BOUND: f64 = 3.0;

/// Two layers, `tanh(x W) V`.
#[derive(Module, Debug)]
struct Net<B: Backend> {
    w: Param<Tensor<B, 2>>,
    v: Param<Tensor<B, 2>>,
}

fn device() -> KilnDevice {
    KilnDevice::cpu()
}

/// Numbers that look random.
fn values(count: usize, seed: f64) -> Vec<f32> {
    (0..count)
        .map(|at| (seed + 1.7 * at as f64).sin() as f32)
        .collect()
}

fn matrix(shape: [usize; 2], seed: f64) -> Tensor<B, 2> {
    Tensor::from_data(
        TensorData::new(values(shape[0] * shape[1], seed), shape),
        &device(),
    )
}

fn net() -> Net<B> {
    Net {
        w: Param::from_tensor(matrix([INPUTS, HIDDEN], 0.1)),
        v: Param::from_tensor(matrix([HIDDEN, OUTPUTS], 0.2)),
    }
}

fn samples(call: usize) -> Pair {
    let call = call as f64;
    (
        matrix([SAMPLES, INPUTS], 0.3 + call),
        matrix([SAMPLES, OUTPUTS], 0.4 + call),
    )
}

fn weights(model: &Net<B>) -> Weights {
    (model.w.val().inner(), model.v.val().inner())
}

/// The squared error of one sample.
fn error((w, v): Weights, (x, y): (Tensor<Kiln, 1>, Tensor<Kiln, 1>)) -> Tensor<Kiln, 1> {
    let out = x.unsqueeze::<2>().matmul(w).tanh().matmul(v).squeeze_dim::<1>(0);
    (out - y).powf_scalar(2.0).sum()
}

/// A loss whose gradients with respect to the model are these.
fn with_gradients(model: &Net<B>, (w, v): Weights) -> Tensor<B, 1> {
    (model.w.val() * Tensor::from_inner(w)).sum() + (model.v.val() * Tensor::from_inner(v)).sum()
}

/// Gradients of each sample, clipped by their norm, averaged, with noise: DP-SGD.
fn private(model: &Net<B>, (x, y): Pair, bound: f64, noise: f64) -> (Tensor<B, 1>, Tensor<B, 1>) {
    let each = vmap(value_and_grad(error)).with_options(aot());
    let (errors, (w, v)) = each.call(Same(weights(model)), (x.inner(), y.inner())).unwrap();
    let squares = |g: Tensor<Kiln, 3>| g.powf_scalar(2.0).sum_dim(2).sum_dim(1);
    let norm = (squares(w.clone()) + squares(v.clone())).sqrt();
    let factor = norm.recip().mul_scalar(bound).clamp_max(1.0);
    let sum = |g: Tensor<Kiln, 3>| {
        let sum = (g * factor.clone()).sum_dim(0).squeeze_dim::<2>(0);
        let drawn = match noise > 0.0 {
            true => sum.random_like(Distribution::Normal(0.0, noise)),
            false => sum.zeros_like(),
        };
        (sum + drawn).div_scalar(SAMPLES as f64)
    };
    let loss = with_gradients(model, (sum(w), sum(v)));
    (loss, Tensor::from_inner(errors.mean()))
}

fn aot() -> CompileOptions {
    CompileOptions::default().with_backend(CompileBackend::AotEager)
}

type Loss = (Tensor<B, 1>, Tensor<B, 1>);

/// Trains eagerly in a plain loop.
fn plain(loss: impl Fn(&Net<B>, Pair) -> Loss, steps: usize) -> Outcome {
    let mut optim = AdamConfig::new().with_epsilon(1e-3).init();
    let mut model = net();
    let mut losses = Vec::new();
    for call in 0..steps {
        let (loss, metric) = loss(&model, samples(call));
        let gradients = GradientsParams::from_grads(loss.backward(), &model);
        model = optim.step(rate(call), model, gradients);
        losses.push(value(metric));
    }
    Outcome {
        losses,
        parameters: parameters::<B, _>(&model),
    }
}

/// Trains through `TrainStep`, whose steps are one graph each. Gives the number of recorded calls that are no
/// proofs, of steps, and what stands in the way of a replay.
fn stepped(
    loss: impl Fn(&Net<B>, Pair) -> Loss,
    steps: usize,
    backend: CompileBackend,
) -> (Outcome, (u64, usize, Option<String>)) {
    let optim = AdamConfig::new().with_epsilon(1e-3).init();
    let mut step = TrainStep::new(net(), optim, loss)
        .with_options(
            CompileOptions::default()
                .with_backend(backend)
                .with_fullgraph(true),
        )
        .build()
        .unwrap();
    let losses = (0..steps)
        .map(|call| value(step.step(rate(call), samples(call)).unwrap().1))
        .collect();
    let report = step.report();
    assert!(report.breaks.is_empty(), "{:?}", report.breaks);
    if backend != CompileBackend::Eager {
        let text = step.explain().to_string();
        assert!(text.contains("0 graph breaks"), "{text}");
    }
    let history = step.history();
    let seen = (
        history.recorded - history.proofs,
        report.steps.len(),
        history.obstacle.clone(),
    );
    let parameters = parameters::<B, _>(&step.into_model());
    (Outcome { losses, parameters }, seen)
}

/// Compares both, with equal streams of random numbers. The step is replayed from the third call on.
fn check(loss: impl Fn(&Net<B>, Pair) -> Loss) -> Outcome {
    let _turn = turn();
    let seed = || Kiln::seed(&device(), 5);
    seed();
    let expected = plain(&loss, 12);
    for backend in [
        CompileBackend::Eager,
        CompileBackend::AotEager,
        CompileBackend::Cpu,
    ] {
        seed();
        let (outcome, seen) = stepped(&loss, 12, backend);
        outcome.assert_close(&expected, &backend.to_string());
        if backend != CompileBackend::Eager {
            assert_eq!(seen, (2, 1, None), "{backend}");
        }
    }
    expected
}

#[test]
fn private_gradients_are_one_graph() {
    check(|model, batch| private(model, batch, BOUND, 0.1));
}

/// The same without noise, by hand and in f64, with plain gradient descent.
#[test]
fn private_gradients_are_those_of_the_formula() {
    let _turn = turn();
    let loss = |model: &Net<B>, batch: Pair| private(model, batch, BOUND, 0.0);
    let mut step = TrainStep::new(net(), SgdConfig::new().init(), loss)
        .build()
        .unwrap();
    let wide = |values: Vec<f32>| values.into_iter().map(f64::from).collect::<Vec<f64>>();
    let (mut w, mut v) = (
        wide(values(INPUTS * HIDDEN, 0.1)),
        wide(values(HIDDEN * OUTPUTS, 0.2)),
    );
    let mut clipped = 0;
    for call in 0..8 {
        let x = wide(values(SAMPLES * INPUTS, 0.3 + call as f64));
        let y = wide(values(SAMPLES * OUTPUTS, 0.4 + call as f64));
        let (mut dw, mut dv) = (vec![0.0; w.len()], vec![0.0; v.len()]);
        for (x, y) in x.chunks(INPUTS).zip(y.chunks(OUTPUTS)) {
            let (gw, gv) = gradients((&w, &v), x, y);
            let norm = gw.iter().chain(&gv).map(|g| g * g).sum::<f64>().sqrt();
            clipped += usize::from(norm > BOUND);
            let factor = (BOUND / norm).min(1.0) / SAMPLES as f64;
            dw.iter_mut().zip(gw).for_each(|(sum, g)| *sum += factor * g);
            dv.iter_mut().zip(gv).for_each(|(sum, g)| *sum += factor * g);
        }
        w.iter_mut().zip(dw).for_each(|(w, g)| *w -= 0.1 * g);
        v.iter_mut().zip(dv).for_each(|(v, g)| *v -= 0.1 * g);
        step.step(0.1, samples(call)).unwrap();
    }
    assert!(
        (1..8 * SAMPLES).contains(&clipped),
        "{clipped} gradients were clipped"
    );
    assert_eq!(step.history().replayed, 5, "{}", step.history());
    let found = parameters::<B, _>(&step.into_model());
    assert!(relative_error(&found[0], &w, 1e-3) < 1e-5 && relative_error(&found[1], &v, 1e-3) < 1e-5);
}

/// Gradients of the squared error of a sample.
fn gradients((w, v): (&[f64], &[f64]), x: &[f64], y: &[f64]) -> (Vec<f64>, Vec<f64>) {
    let hidden: Vec<f64> = (0..HIDDEN)
        .map(|j| (0..INPUTS).map(|i| x[i] * w[i * HIDDEN + j]).sum::<f64>().tanh())
        .collect();
    let slope: Vec<f64> = (0..OUTPUTS)
        .map(|k| 2.0 * ((0..HIDDEN).map(|j| hidden[j] * v[j * OUTPUTS + k]).sum::<f64>() - y[k]))
        .collect();
    let dv = (0..HIDDEN * OUTPUTS).map(|at| hidden[at / OUTPUTS] * slope[at % OUTPUTS]);
    let dw = (0..INPUTS * HIDDEN).map(|at| {
        let (i, j) = (at / HIDDEN, at % HIDDEN);
        let back: f64 = (0..OUTPUTS).map(|k| slope[k] * v[j * OUTPUTS + k]).sum();
        x[i] * back * (1.0 - hidden[j] * hidden[j])
    });
    (dw.collect(), dv.collect())
}

/// A penalty on the gradient with respect to the input, differentiated by the parameters.
#[test]
fn a_penalty_on_gradients() {
    check(|model, (x, y)| {
        let penalised = |(w, v): Weights, (x, y): (Tensor<Kiln, 2>, Tensor<Kiln, 2>)| {
            let out = |x: Tensor<Kiln, 2>| x.matmul(w.clone()).tanh().matmul(v.clone());
            let score = |x: Tensor<Kiln, 2>, (): ()| out(x).sum();
            let slopes = grad(score).call(x.clone(), ()).unwrap();
            let norms = slopes.powf_scalar(2.0).sum_dim(1).add_scalar(1e-6).sqrt();
            (out(x) - y).powf_scalar(2.0).mean() + (norms - 1.0).powf_scalar(2.0).mean().mul_scalar(0.3)
        };
        let both = value_and_grad(penalised).with_options(aot());
        let (value, gradients) = both.call(weights(model), (x.inner(), y.inner())).unwrap();
        (with_gradients(model, gradients), Tensor::from_inner(value))
    });
}

/// Dropout by hand in the gradients of each sample, beside other random operations of the step.
#[test]
fn draws_in_a_replayed_step() {
    for randomness in [Randomness::Same, Randomness::Different] {
        check(|model, (x, y)| {
            let noisy = |weights: Weights, (x, y): (Tensor<Kiln, 1>, Tensor<Kiln, 1>)| {
                let mask = x.random_like(Distribution::Bernoulli(0.7));
                error(weights, (x * mask.div_scalar(0.7), y))
            };
            let x = x.clone() + x.random_like(Distribution::Normal(0.0, 0.1));
            let each = vmap(value_and_grad(noisy))
                .with_randomness(randomness)
                .with_options(aot());
            let (errors, (w, v)) = each.call(Same(weights(model)), (x.inner(), y.inner())).unwrap();
            let mean = |g: Tensor<Kiln, 3>| g.mean_dim(0).squeeze_dim::<2>(0);
            (
                with_gradients(model, (mean(w), mean(v))),
                Tensor::<B, 1>::from_inner(errors.mean()),
            )
        });
    }
}

/// Burn's autograd goes through operations beside the function, whose result is constant to it.
#[test]
fn a_function_beside_the_autograd_of_the_step() {
    check(|model, (x, y)| {
        let out = |x: Tensor<B, 2>| x.matmul(model.w.val()).tanh().matmul(model.v.val());
        let importance = |x: Tensor<Kiln, 2>, w: Tensor<Kiln, 2>| x.matmul(w).tanh().sum();
        let slopes = grad(importance)
            .with_options(aot())
            .call(x.clone().inner(), model.w.val().inner());
        let weighted = x * Tensor::from_inner(slopes.unwrap());
        let loss = (out(weighted) - y).powf_scalar(2.0).mean();
        (loss.clone(), loss.detach())
    });
}

/// A number of the closure that changes from call to call: the step is recorded, not compiled, at every call.
#[test]
fn a_bound_that_changes() {
    let _turn = turn();
    let call = Cell::new(0);
    let loss = |model: &Net<B>, batch: Pair| {
        call.set(call.get() + 1);
        private(model, batch, BOUND / f64::from(call.get()), 0.0)
    };
    let expected = plain(loss, 8);
    call.set(0);
    let (outcome, (recorded, steps, obstacle)) = stepped(loss, 8, CompileBackend::Cpu);
    outcome.assert_close(&expected, "a bound that changes");
    assert_eq!((recorded, steps), (8, 1));
    let obstacle = obstacle.expect("it is recorded at every call");
    assert!(obstacle.contains("a number of the model or loss"), "{obstacle}");

    // A number inside of the closure of the function.
    let inside = |model: &Net<B>, (x, y): Pair| {
        call.set(call.get() + 1);
        let factor = 1.0 / f64::from(call.get());
        let scaled = |weights: Weights, (x, y): (Tensor<Kiln, 1>, Tensor<Kiln, 1>)| {
            error(weights, (x.mul_scalar(factor), y))
        };
        let each = vmap(value_and_grad(scaled)).with_options(aot());
        let (errors, (w, v)) = each.call(Same(weights(model)), (x.inner(), y.inner())).unwrap();
        let mean = |g: Tensor<Kiln, 3>| g.mean_dim(0).squeeze_dim::<2>(0);
        (
            with_gradients(model, (mean(w), mean(v))),
            Tensor::<B, 1>::from_inner(errors.mean()),
        )
    };
    call.set(0);
    let expected = plain(inside, 8);
    call.set(0);
    let (outcome, (recorded, steps, obstacle)) = stepped(inside, 8, CompileBackend::Cpu);
    outcome.assert_close(&expected, "a number inside that changes");
    assert_eq!((recorded, steps), (8, 1));
    let obstacle = obstacle.expect("it is recorded at every call");
    assert!(obstacle.contains("functions.rs"), "{obstacle}");
}

/// A closure that takes two ways in turn: two steps.
#[test]
fn a_closure_that_takes_two_ways() {
    let _turn = turn();
    let call = Cell::new(0);
    let loss = |model: &Net<B>, (x, y): Pair| {
        call.set(call.get() + 1);
        let turn = call.get() % 2 == 0;
        let two = |weights: Weights, sample: (Tensor<Kiln, 1>, Tensor<Kiln, 1>)| match turn {
            true => error(weights, sample),
            false => error(weights, sample).sqrt(),
        };
        let each = vmap(value_and_grad(two)).with_options(aot());
        let (errors, (w, v)) = each.call(Same(weights(model)), (x.inner(), y.inner())).unwrap();
        let mean = |g: Tensor<Kiln, 3>| g.mean_dim(0).squeeze_dim::<2>(0);
        (
            with_gradients(model, (mean(w), mean(v))),
            Tensor::<B, 1>::from_inner(errors.mean()),
        )
    };
    let expected = plain(loss, 10);
    call.set(0);
    let (outcome, (recorded, steps, _)) = stepped(loss, 10, CompileBackend::Cpu);
    outcome.assert_close(&expected, "two ways");
    assert_eq!((recorded, steps), (10, 2));
}

/// Data that the closure of a function makes: the same at each call, or another.
#[test]
fn data_made_inside() {
    let _turn = turn();
    let call = Cell::new(0);
    for varies in [false, true] {
        let loss = |model: &Net<B>, (x, y): Pair| {
            call.set(call.get() + 1);
            let shift = if varies { call.get() as f32 } else { 0.5 };
            let shifted = |weights: Weights, (x, y): (Tensor<Kiln, 1>, Tensor<Kiln, 1>)| {
                let data = Tensor::<Kiln, 1>::from_floats([shift, -0.25, 1.5], &device());
                error(weights, (x + data, y))
            };
            let each = vmap(value_and_grad(shifted)).with_options(aot());
            let (errors, (w, v)) = each.call(Same(weights(model)), (x.inner(), y.inner())).unwrap();
            let mean = |g: Tensor<Kiln, 3>| g.mean_dim(0).squeeze_dim::<2>(0);
            (
                with_gradients(model, (mean(w), mean(v))),
                Tensor::<B, 1>::from_inner(errors.mean()),
            )
        };
        call.set(0);
        let expected = plain(loss, 8);
        call.set(0);
        let (outcome, (recorded, steps, obstacle)) = stepped(loss, 8, CompileBackend::Cpu);
        outcome.assert_close(&expected, "data made inside");
        assert_eq!(
            (recorded, steps, obstacle.is_some()),
            (if varies { 8 } else { 2 }, 1, varies)
        );
    }
}

/// A captured tensor that the program replaces ends the replay, which goes on with the new one.
#[test]
fn a_captured_tensor_that_is_replaced() {
    let _turn = turn();
    let run = |compiled: bool| {
        let target = RefCell::new(matrix([1, OUTPUTS], 0.7).inner());
        let loss = |model: &Net<B>, (x, _): Pair| {
            let target = target.borrow().clone().squeeze_dim::<1>(0);
            let to_target = |weights: Weights, x: Tensor<Kiln, 1>| error(weights, (x, target.clone()));
            let each = vmap(value_and_grad(to_target)).with_options(aot());
            let (errors, (w, v)) = each.call(Same(weights(model)), x.inner()).unwrap();
            let mean = |g: Tensor<Kiln, 3>| g.mean_dim(0).squeeze_dim::<2>(0);
            (
                with_gradients(model, (mean(w), mean(v))),
                Tensor::<B, 1>::from_inner(errors.mean()),
            )
        };
        let mut losses = Vec::new();
        let replace = |call: usize| {
            if call == 6 {
                target.replace(matrix([1, OUTPUTS], 1.9).inner());
            }
        };
        let mut optim = Some(SgdConfig::new().init());
        if !compiled {
            let (mut model, mut optim) = (net(), optim.take().unwrap());
            for call in 0..12 {
                replace(call);
                let (loss, metric) = loss(&model, samples(call));
                let gradients = GradientsParams::from_grads(loss.backward(), &model);
                model = optim.step(0.1, model, gradients);
                losses.push(value(metric));
            }
            return losses;
        }
        let mut step = TrainStep::new(net(), optim.take().unwrap(), loss)
            .build()
            .unwrap();
        for call in 0..12 {
            replace(call);
            losses.push(value(step.step(0.1, samples(call)).unwrap().1));
        }
        assert!(step.history().replayed >= 4, "{}", step.history());
        assert_eq!(step.report().steps.len(), 1);
        losses
    };
    assert!(relative_error(&run(true), &run(false), 1e-3) < 1e-5);
}

/// Parameters that are drawn in the first call, in front of the function and of its own draws.
#[test]
fn parameters_that_the_first_call_draws() {
    let _turn = turn();
    let drawn = || {
        Kiln::seed(&device(), 4);
        burn::nn::LinearConfig::new(INPUTS, OUTPUTS)
            .with_bias(false)
            .init::<B>(&device())
    };
    let loss = |model: &burn::nn::Linear<B>, (x, y): Pair| {
        let noisy = |w: Tensor<Kiln, 2>, (x, y): (Tensor<Kiln, 1>, Tensor<Kiln, 1>)| {
            let noise = x.random_like(Distribution::Uniform(0.5, 1.5));
            let out = (x * noise).unsqueeze::<2>().matmul(w).squeeze_dim::<1>(0);
            (out - y).powf_scalar(2.0).sum()
        };
        let each = vmap(value_and_grad(noisy))
            .with_randomness(Randomness::Different)
            .with_options(aot());
        let w = model.weight.val();
        let (errors, slopes) = each
            .call(Same(w.clone().inner()), (x.inner(), y.inner()))
            .unwrap();
        let slopes = slopes.mean_dim(0).squeeze_dim::<2>(0);
        (
            (w * Tensor::from_inner(slopes)).sum(),
            Tensor::<B, 1>::from_inner(errors.mean()),
        )
    };
    let (mut model, mut optim) = (drawn(), SgdConfig::new().init());
    let mut expected = Vec::new();
    for call in 0..6 {
        let (loss, metric) = loss(&model, samples(call));
        let gradients = GradientsParams::from_grads(loss.backward(), &model);
        model = optim.step(0.1, model, gradients);
        expected.push(value(metric));
    }
    let mut step = TrainStep::new(drawn(), SgdConfig::new().init(), loss)
        .build()
        .unwrap();
    let found: Vec<f64> = (0..6)
        .map(|call| value(step.step(0.1, samples(call)).unwrap().1))
        .collect();
    assert!(
        relative_error(&found, &expected, 1e-3) < 1e-5,
        "{found:?} {expected:?}"
    );
    assert_eq!(
        (step.report().steps.len(), step.history().obstacle.clone()),
        (1, None)
    );
}
