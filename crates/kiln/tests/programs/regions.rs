//! `kiln::compile(..).run`, `compile_fn` and the lazy device.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};

use burn::module::AutodiffModule;
use burn::tensor::Tensor;
use burn_optim::{GradientsParams, Optimizer};

use crate::compiled::Region;
use crate::models::*;
use crate::program::{B, CALLS, Program};
use crate::programs;

programs! {
    a_loop_in_a_region => Any,
    a_loop_in_a_region_with_batch_norm_and_validation => Any,
    a_loop_in_a_region_that_reads_the_loss => Any,
    a_region_that_returns_its_input => Any,
    a_panic_in_a_region => Any,
    a_panic_in_a_region_with_batch_norm => Any,
    a_panic_in_a_region_that_has_updated => Any,
    a_panic_in_a_region_that_has_read => Any,
    regions_in_regions => Any,
    a_function_without_autograd => Any,
    a_function_under_autograd => Any,
    a_function_with_dropout => Any,
    a_tracked_function_that_reads => Any,
    a_tracked_function_that_reads_after_dropout => Any,
    a_tracked_function_that_reads_with_batch_norm => Any,
    a_tracked_function_with_batch_norm => Any,
    a_function_that_returns_its_argument => Any,
    a_function_that_returns_leaves_of_its_own => Any,
    a_function_that_reads_and_returns_a_leaf_of_its_own => Any,
    a_function_of_tensors_that_coincide => Any,
    a_function_with_two_outputs => Any,
    a_function_inside_a_step => Replayed,
    the_lazy_device => Any,
    the_lazy_device_with_batch_norm => Any,
}

/// The body of a plain loop; the loss without its history.
macro_rules! body {
    ($model:ident, $optim:ident, $loss:expr) => {{
        let loss = $loss;
        let gradients = GradientsParams::from_grads(loss.backward(), &$model);
        $model = $optim.step(LR, $model.clone(), gradients);
        loss.inner()
    }};
}

fn a_loop_in_a_region(p: &Program) {
    let (mut model, mut optim, mut region) = (p.mlp(), adamw(), p.region());
    for call in 0..CALLS {
        let x = p.x(call);
        let loss = region.run(|| body!(model, optim, energy(model.forward(x))));
        p.look("loss", &loss);
    }
    p.look("weight", &model.first.weight.val());
}

fn a_loop_in_a_region_with_batch_norm_and_validation(p: &Program) {
    let (mut model, mut optim, mut region) = (p.normed(), adamw(), p.region());
    for call in 0..CALLS {
        let x = p.x(call);
        let loss = region.run(|| body!(model, optim, energy(model.forward(x))));
        p.look("loss", &loss);
        if call % 2 == 1 {
            p.look("validation", &model.valid().forward(p.x(100).inner()));
        }
    }
    p.look("running mean", &model.norm.running_mean.value_sync());
}

fn a_loop_in_a_region_that_reads_the_loss(p: &Program) {
    let (mut model, mut optim, mut region) = (p.dropped(), momentum(), p.region());
    for call in 0..CALLS {
        let x = p.x(call);
        let number = region.run(|| body!(model, optim, energy(model.forward(x))).into_scalar());
        p.look("loss", &number);
    }
    p.look("weight", &model.first.weight.val());
}

fn a_region_that_returns_its_input(p: &Program) {
    let mut region = p.region();
    for call in 0..5 {
        let x = p.x(call);
        let results = region.run(|| {
            (
                x.clone().exp(),
                x.clone(),
                x.clone() * 1.0,
                x.clone().reshape([WIDTH, EXAMPLES]),
            )
        });
        p.look("results", &results);
    }
}

/// The result of a part of a loop, which panics where it `fails`.
#[track_caller]
fn caught<R>(region: &mut Region, fails: bool, part: impl FnOnce() -> R) -> Option<R> {
    let result = catch_unwind(AssertUnwindSafe(|| region.run(part)));
    assert_eq!(result.is_err(), fails);
    result.ok()
}

fn a_panic_in_a_region(p: &Program) {
    let (mut model, mut optim, mut region) = (p.mlp(), adamw(), p.region());
    for call in 0..CALLS {
        let x = p.x(call);
        let fails = call == 0 || call == 4;
        let loss = caught(&mut region, fails, || {
            let loss = energy(model.forward(x));
            assert!(!fails, "a bad batch");
            body!(model, optim, loss)
        });
        p.look("loss", &loss);
        p.look("weight", &model.first.weight.val());
    }
}

/// The running statistics have seen the batch that failed, as they have without Kiln.
fn a_panic_in_a_region_with_batch_norm(p: &Program) {
    let (mut model, mut optim, mut region) = (p.normed(), adamw(), p.region());
    for call in 0..CALLS {
        let fails = call == 0 || call == 4;
        let loss = caught(&mut region, fails, || {
            let loss = energy(model.forward(p.x(call)));
            assert!(!fails, "a bad batch");
            body!(model, optim, loss)
        });
        p.look("loss", &loss);
        p.look("prediction", &model.valid().forward(p.x(call).inner()));
    }
}

/// A step that fails behind its update has a new model, which the program goes on with.
fn a_panic_in_a_region_that_has_updated(p: &Program) {
    let (mut model, mut optim, mut region) = (p.dropped(), adamw(), p.region());
    for call in 0..CALLS {
        let x = p.x(call);
        let fails = call == 1 || call == 4;
        let loss = caught(&mut region, fails, || {
            let loss = body!(model, optim, energy(model.forward(x)));
            assert!(!fails, "a bad batch");
            loss
        });
        p.look("loss", &loss);
    }
    p.look("weight", &model.first.weight.val());
}

/// The first part of the step has run, the second one has not.
fn a_panic_in_a_region_that_has_read(p: &Program) {
    let (mut model, mut optim, mut region) = (p.normed(), momentum(), p.region());
    let mut mean = energy(p.x(100)).detach();
    for call in 0..CALLS {
        let x = p.x(call);
        let fails = call == 0 || call == 3 || call == 4;
        let loss = caught(&mut region, fails, || {
            let loss = energy(model.forward(x));
            let number = loss.clone().inner().into_scalar();
            mean = mean.clone() * 0.5 + loss.clone().detach();
            assert!(!fails, "a bad batch of loss {number}");
            body!(model, optim, loss)
        });
        p.look("loss", &loss);
        p.look("mean loss", &mean);
    }
    p.look("running mean", &model.norm.running_mean.value_sync());
}

fn regions_in_regions(p: &Program) {
    let (mut outer, mut inner) = (p.region(), p.region());
    for call in 0..5 {
        let x = p.x(call);
        let results = outer.run(|| {
            let y = inner.run(|| x.clone().tanh());
            (y.clone() * 2.0, y, x.sum())
        });
        p.look("results", &results);
    }
}

fn a_function_without_autograd(p: &Program) {
    let model = p.normed().valid();
    let forward = p.function(|x: Tensor<kiln::Kiln, 2>| model.forward(x));
    for call in 0..5 {
        p.look("output", &forward.call(p.x(call).inner()));
    }
}

fn a_function_under_autograd(p: &Program) {
    let (mut model, mut optim) = (p.mlp(), adamw());
    let forward = p.function_of(|model: &Mlp<B>, x: T2| model.forward(x));
    for call in 0..CALLS {
        let loss = body!(model, optim, energy(forward.call_with(&model, p.x(call))));
        p.look("loss", &loss);
    }
    p.look("weight", &model.first.weight.val());
}

fn a_function_with_dropout(p: &Program) {
    let (mut model, mut optim) = (p.dropped(), sgd());
    let forward = p.function_of(|model: &Dropped<B>, x: T2| model.forward(x));
    for call in 0..CALLS {
        let loss = body!(model, optim, energy(forward.call_with(&model, p.x(call))));
        p.look("loss", &loss);
    }
    p.look("weight", &model.first.weight.val());
}

fn a_tracked_function_that_reads(p: &Program) {
    let (mut model, mut optim) = (p.mlp(), sgd());
    let forward = p.function_of(|model: &Mlp<B>, x: T2| {
        let scale = x.clone().abs().max().into_scalar();
        model.forward(x / scale)
    });
    for call in 0..6 {
        let loss = body!(model, optim, energy(forward.call_with(&model, p.x(call))));
        p.look("loss", &loss);
    }
}

fn a_tracked_function_that_reads_after_dropout(p: &Program) {
    let (mut model, mut optim) = (p.dropped(), sgd());
    let forward = p.function_of(|model: &Dropped<B>, x: T2| {
        let out = model.forward(x);
        let scale = out.clone().abs().max().into_scalar();
        out / scale.max(0.1)
    });
    for call in 0..6 {
        let loss = body!(model, optim, energy(forward.call_with(&model, p.x(call))));
        p.look("loss", &loss);
    }
    p.look(
        "the next draw",
        &T1::random([3], burn::tensor::Distribution::Default, &p.device()),
    );
}

fn a_tracked_function_that_reads_with_batch_norm(p: &Program) {
    let (mut model, mut optim) = (p.normed(), sgd());
    let forward = p.function_of(|model: &Normed<B>, x: T2| {
        let out = model.forward(x);
        let scale = out.clone().abs().max().into_scalar();
        out / scale.max(0.1)
    });
    for call in 0..6 {
        let loss = body!(model, optim, energy(forward.call_with(&model, p.x(call))));
        p.look("loss", &loss);
    }
    p.look("validation", &model.valid().forward(p.x(100).inner()));
}

fn a_tracked_function_with_batch_norm(p: &Program) {
    let (mut model, mut optim) = (p.normed(), sgd());
    let forward = p.function_of(|model: &Normed<B>, x: T2| model.forward(x));
    for call in 0..CALLS {
        let loss = body!(model, optim, energy(forward.call_with(&model, p.x(call))));
        p.look("loss", &loss);
        if call % 3 == 2 {
            p.look("validation", &model.valid().forward(p.x(100).inner()));
        }
    }
}

fn a_function_that_returns_its_argument(p: &Program) {
    let function = p.function(|(x, w): (T2, T2)| (x.clone().matmul(w.clone()), x, w));
    for call in 0..5 {
        let w = p.waves(call + 9, [WIDTH, 2]).require_grad();
        let (y, x, same) = function.call((p.x(call), w.clone()));
        let gradients = (y.clone().sum() + (same.clone() * 3.0).sum()).backward();
        p.look("results", &(y, x, same));
        p.look("gradient", &w.grad(&gradients).unwrap());
    }
}

/// As a codebook that is compared with what was encoded: a detached parameter is a leaf again.
fn a_function_that_returns_leaves_of_its_own(p: &Program) {
    let mut model = p.mlp();
    let function = p.function_of(|model: &Mlp<B>, x: T2| {
        let weight = model.first.weight.val().detach();
        let used = model.second.weight.val().detach();
        let out = model.forward(x).matmul(used.clone().transpose());
        (out, weight, used)
    });
    for call in 0..5 {
        let (y, weight, used) = function.call_with(&model, p.x(call));
        let loss = y.clone().sum() + (weight.clone() * weight.clone()).sum() + (used.clone() * 3.0).sum();
        let gradients = loss.backward();
        p.look("results", &(y, weight.clone(), used.clone()));
        p.look(
            "gradient of the weight",
            &model.first.weight.val().grad(&gradients).unwrap(),
        );
        p.look("gradient of the leaf", &weight.grad(&gradients).unwrap());
        p.look(
            "gradient of the leaf that was used",
            &used.grad(&gradients).unwrap(),
        );
        model = p.mlp();
    }
}

fn a_function_that_reads_and_returns_a_leaf_of_its_own(p: &Program) {
    let model = p.mlp();
    let function = p.function_of(|model: &Mlp<B>, x: T2| {
        let scale = x.clone().abs().max().into_scalar();
        (model.forward(x / scale), model.first.weight.val().detach())
    });
    for call in 0..5 {
        let (y, weight) = function.call_with(&model, p.x(call));
        let gradients = (y.clone().sum() + (weight.clone() * weight.clone()).sum()).backward();
        p.look("results", &(y, weight.clone()));
        p.look(
            "gradient of the weight",
            &model.first.weight.val().grad(&gradients).unwrap(),
        );
        p.look("gradient of the leaf", &weight.grad(&gradients).unwrap());
    }
}

fn a_function_of_tensors_that_coincide(p: &Program) {
    let function = p.function(|(a, b): (T2, T2)| a * 2.0 + b.exp());
    for call in 0..8 {
        let a = p.x(call).require_grad();
        let b = if call < 4 {
            a.clone()
        } else {
            p.x(call + 20).require_grad()
        };
        let y = function.call((a.clone(), b.clone()));
        let gradients = y.clone().sum().backward();
        p.look("result", &y);
        p.look("gradient of the first", &a.grad(&gradients).unwrap());
        p.look("gradient of the second", &b.grad(&gradients).unwrap());
    }
}

fn a_function_with_two_outputs(p: &Program) {
    let (mut model, mut optim) = (p.mlp(), sgd());
    let forward = p.function_of(|model: &Mlp<B>, x: T2| {
        let hidden = model.first.forward(x.clone());
        (model.forward(x), hidden)
    });
    for call in 0..CALLS {
        let loss = body!(model, optim, {
            let (out, hidden) = forward.call_with(&model, p.x(call));
            if call % 2 == 0 {
                energy(out)
            } else {
                energy(out) + hidden.abs().mean()
            }
        });
        p.look("loss", &loss);
    }
    p.look("weight", &model.first.weight.val());
}

fn a_function_inside_a_step(p: &Program) {
    let forward = p.function_of(|model: &Mlp<B>, x: T2| model.forward(x));
    let mut step = p.train(p.mlp(), sgd(), |model: &Mlp<B>, x: T2| {
        energy(forward.call_with(model, x))
    });
    for call in 0..CALLS {
        step.step(LR, p.x(call));
    }
}

fn the_lazy_device(p: &Program) {
    let device = p.lazy_device();
    let (mut model, mut optim) = (drawn(Mlp::new(&device)), momentum());
    for call in 0..CALLS {
        let x = p.x(call).to_device(&device);
        let loss = body!(model, optim, energy(model.forward(x)));
        p.look("loss", &loss);
    }
    p.look("weight", &model.first.weight.val());
}

fn the_lazy_device_with_batch_norm(p: &Program) {
    let device = p.lazy_device();
    let (mut model, mut optim) = (drawn(Normed::new(&device)), sgd());
    let reads = Cell::new(0);
    for call in 0..CALLS {
        let x = p.x(call).to_device(&device);
        let loss = body!(model, optim, energy(model.forward(x)));
        if call % 3 == 0 {
            p.read("loss", &loss);
            reads.set(reads.get() + 1);
        }
    }
    p.look(
        "validation",
        &model.valid().forward(p.x(100).to_device(&device).inner()),
    );
    p.look("reads", &reads.get());
}
