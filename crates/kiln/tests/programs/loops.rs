//! Whole training loops: several models, alternating steps, averages of weights, stopping early, freezing.

use std::cell::RefCell;
use std::rc::Rc;

use burn::module::{AutodiffModule, Module, ModuleMapper, ModuleVisitor, Param, ParamId};
use burn::tensor::Tensor;
use burn_optim::{GradientsAccumulator, GradientsParams, Optimizer};
use kiln::Kiln;

use crate::models::*;
use crate::program::{B, CALLS, Program};
use crate::programs;

programs! {
    two_models_side_by_side => Replayed,
    two_steps_of_one_architecture => Replayed,
    a_generator_and_a_discriminator => Any,
    an_average_of_weights => Replayed,
    an_average_of_weights_as_teacher => Any,
    accumulated_gradients_in_a_region => Any,
    accumulation_inside_the_closure => Replayed,
    stopping_early => Replayed,
    the_best_model_is_kept => Replayed,
    the_best_model_is_put_back => Replayed,
    frozen_from_the_start => Replayed,
    frozen_half_way => Replayed,
    thawed_half_way => Replayed,
    epochs_with_validation => Replayed,
    epochs_with_validation_by_a_function => Replayed,
    epochs_with_validation_in_a_region => Replayed,
    another_optimizer_half_way => Replayed,
    eager_steps_in_between => Any,
    distillation_from_a_model_in_training => Any,
    metrics_over_an_epoch => Replayed,
    a_step_for_each_of_many_models => Replayed,
    a_loss_with_weights_that_depend_on_the_call => Replayed,
    curriculum_by_sizes => Any,
    the_step_is_moved_and_boxed => Replayed,
    generated_data_from_the_model => Replayed,
}

fn two_models_side_by_side(p: &Program) {
    let mut first = p.train(p.mlp(), adamw(), |model, x: T2| energy(model.forward(x)));
    let mut second = p.train(p.normed(), sgd(), |model, (x, y)| mse(model.forward(x), y));
    for call in 0..CALLS {
        first.step(LR, p.x(call));
        second.step(LR, (p.x(call), p.y(call)));
    }
}

fn two_steps_of_one_architecture(p: &Program) {
    let mut first = p.train(p.dropped(), momentum(), |model: &Dropped<B>, x: T2| {
        energy(model.forward(x))
    });
    let mut second = p.train(p.dropped(), momentum(), |model: &Dropped<B>, x: T2| {
        energy(model.forward(x))
    });
    for call in 0..CALLS {
        first.step(LR, p.x(call));
        second.step(LR, p.x(call + 70));
    }
}

fn a_generator_and_a_discriminator(p: &Program) {
    // Each is trained against the other's last state, which is an input of the closure beside the batch.
    let mut discriminator = p.train(p.mlp(), sgd(), |model: &Mlp<B>, (real, fake): (T2, T2)| {
        energy(model.forward(real) - 1.0) + energy(model.forward(fake))
    });
    let judge = Rc::new(RefCell::new(p.mlp()));
    let critic = judge.clone();
    let mut generator = p.train(p.mlp(), sgd(), move |model: &Mlp<B>, noise: T2| {
        let fake = Tensor::cat(vec![model.forward(noise.clone()), model.forward(noise)], 1);
        let loss = energy(critic.borrow().forward(fake.clone()) - 1.0);
        (loss, fake)
    });
    for call in 0..10 {
        let (_, fake) = generator.step(LR, p.x(call + 60));
        discriminator.step(LR, (p.x(call), fake));
        *judge.borrow_mut() = discriminator.model().clone().no_grad();
    }
}

/// `average * 0.9 + weights * 0.1`.
fn follow(average: Mlp<Kiln>, model: &Mlp<B>) -> Mlp<Kiln> {
    struct Collect(Vec<(ParamId, Vec<f32>)>);
    impl ModuleVisitor<Kiln> for Collect {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<Kiln, D>>) {
            self.0.push((param.id, param.val().into_data().to_vec().unwrap()));
        }
    }
    struct Blend(std::vec::IntoIter<(ParamId, Vec<f32>)>);
    impl ModuleMapper<Kiln> for Blend {
        fn map_float<const D: usize>(&mut self, param: Param<Tensor<Kiln, D>>) -> Param<Tensor<Kiln, D>> {
            let (_, weights) = self.0.next().expect("models of one structure");
            param.map(|old| {
                let new =
                    Tensor::<Kiln, 1>::from_floats(weights.as_slice(), &old.device()).reshape(old.dims());
                old * 0.9 + new * 0.1
            })
        }
    }
    let mut weights = Collect(Vec::new());
    model.valid().visit(&mut weights);
    average.map(&mut Blend(weights.0.into_iter()))
}

fn an_average_of_weights(p: &Program) {
    let mut step = p.train(p.mlp(), adamw(), |model: &Mlp<B>, x: T2| energy(model.forward(x)));
    let mut average = step.model().valid();
    for call in 0..CALLS {
        step.step(LR, p.x(call));
        average = follow(average, step.model());
        p.look("output of the average", &average.forward(p.x(100).inner()));
    }
}

fn an_average_of_weights_as_teacher(p: &Program) {
    let average = RefCell::new(p.mlp().valid());
    let mut step = p.train(p.mlp(), sgd(), |model: &Mlp<B>, x: T2| {
        let target = T2::from_inner(average.borrow().forward(x.clone().inner()));
        mse(model.forward(x), target)
    });
    for call in 0..10 {
        step.step(LR, p.x(call));
        let next = follow(average.borrow().clone(), step.model());
        *average.borrow_mut() = next;
    }
}

fn accumulated_gradients_in_a_region(p: &Program) {
    let (mut model, mut optim, mut region) = (p.mlp(), adamw(), p.region());
    let mut sum = GradientsAccumulator::new();
    for call in 0..12 {
        let x = p.x(call);
        let loss = region.run(|| {
            let loss = energy(model.forward(x));
            sum.accumulate(&model, GradientsParams::from_grads(loss.backward(), &model));
            if call % 3 == 2 {
                model = optim.step(LR, model.clone(), sum.grads());
            }
            loss.inner()
        });
        p.look("loss", &loss);
    }
    p.look("weight", &model.first.weight.val());
}

fn accumulation_inside_the_closure(p: &Program) {
    let mut step = p.train(p.mlp(), adamw(), |model: &Mlp<B>, x: T2| {
        let losses = x.chunk(2, 0).into_iter().map(|part| energy(model.forward(part)));
        losses.reduce(|a, b| a + b).unwrap() / 2.0
    });
    for call in 0..CALLS {
        step.step(LR, p.x(call));
    }
}

fn stopping_early(p: &Program) {
    let mut step = p.train(p.mlp(), sgd(), |model, x: T2| energy(model.forward(x)));
    let (mut best, mut calls) = (f32::INFINITY, 0);
    for call in 0..30 {
        let loss = step.step(LR, p.x(call % 3)).into_scalar();
        calls = call;
        if call > 8 && loss > 0.98 * best {
            break;
        }
        best = best.min(loss);
    }
    p.look("the last call", &calls);
}

fn the_best_model_is_kept(p: &Program) {
    let mut step = p.train(p.normed(), sgd(), |model, (x, y)| mse(model.forward(x), y));
    let (mut least, mut best) = (f32::INFINITY, step.model().valid());
    for call in 0..12 {
        let loss = step.step(LR, (p.x(call), p.y(call))).into_scalar();
        if loss < least {
            (least, best) = (loss, step.model().valid());
        }
    }
    p.look("output of the best", &best.forward(p.x(100).inner()));
}

fn the_best_model_is_put_back(p: &Program) {
    let mut best = None;
    let mut parts = (p.mlp(), adamw());
    for round in 0..2 {
        let mut step = p.train(parts.0, parts.1, |model: &Mlp<B>, x: T2| energy(model.forward(x)));
        for call in 0..6 {
            step.step(LR, p.x(call));
            if call == 3 && round == 0 {
                best = Some(step.model().clone().into_record());
            }
        }
        parts = step.into_parts();
        if let Some(record) = best.take() {
            parts.0 = parts.0.load_record(record);
        }
    }
    p.look("weight", &parts.0.first.weight.val());
}

fn frozen_from_the_start(p: &Program) {
    let mut model = p.mlp();
    model.first = model.first.no_grad();
    let mut step = p.train(model, adamw(), |model: &Mlp<B>, x: T2| energy(model.forward(x)));
    for call in 0..CALLS {
        step.step(LR, p.x(call));
    }
}

fn frozen_half_way(p: &Program) {
    let mut parts = (p.normed(), adamw());
    for round in 0..2 {
        let mut step = p.train(parts.0, parts.1, |model: &Normed<B>, x: T2| {
            energy(model.forward(x))
        });
        for call in 0..6 {
            step.step(LR, p.x(10 * round + call));
        }
        parts = step.into_parts();
        parts.0.first = parts.0.first.no_grad();
    }
}

fn thawed_half_way(p: &Program) {
    let thaw = |linear: burn::nn::Linear<B>| burn::nn::Linear {
        weight: linear.weight.set_require_grad(true),
        bias: linear.bias.map(|bias| bias.set_require_grad(true)),
    };
    let mut parts = (p.mlp(), momentum());
    parts.0.first = parts.0.first.no_grad();
    for round in 0..2 {
        let mut step = p.train(parts.0, parts.1, |model: &Mlp<B>, x: T2| energy(model.forward(x)));
        for call in 0..6 {
            step.step(LR, p.x(10 * round + call));
        }
        parts = step.into_parts();
        parts.0.first = thaw(parts.0.first);
    }
}

fn epochs_with_validation(p: &Program) {
    let mut step = p.train(p.normed(), adamw(), |model, (x, labels)| {
        cross_entropy(model.forward(x), labels)
    });
    for epoch in 0..3 {
        for call in 0..5 {
            step.step(LR, p.batch(5 * epoch + call));
        }
        let model = step.model().valid();
        for batch in 0..2 {
            p.look("validation", &model.forward(p.x(100 + batch).inner()));
        }
    }
}

fn epochs_with_validation_by_a_function(p: &Program) {
    let mut step = p.train(p.normed(), sgd(), |model, (x, labels)| {
        cross_entropy(model.forward(x), labels)
    });
    for epoch in 0..3 {
        for call in 0..5 {
            step.step(LR, p.batch(5 * epoch + call));
        }
        let model = step.model().valid();
        let forward = p.function(|x: Tensor<Kiln, 2>| model.forward(x));
        for batch in 0..2 {
            p.look("validation", &forward.call(p.x(100 + batch).inner()));
        }
    }
}

fn epochs_with_validation_in_a_region(p: &Program) {
    let mut step = p.train(p.mlp(), sgd(), |model, (x, labels)| {
        cross_entropy(model.forward(x), labels)
    });
    let mut region = p.region();
    for epoch in 0..3 {
        for call in 0..5 {
            step.step(LR, p.batch(5 * epoch + call));
        }
        let model = step.model().valid();
        let out = region.run(|| model.forward(p.x(100).inner()));
        p.look("validation", &out);
    }
}

fn another_optimizer_half_way(p: &Program) {
    let mut first = p.train(p.mlp(), adamw(), |model: &Mlp<B>, x: T2| energy(model.forward(x)));
    for call in 0..6 {
        first.step(LR, p.x(call));
    }
    let (model, _) = first.into_parts();
    let mut second = p.train(model, momentum(), |model: &Mlp<B>, x: T2| {
        energy(model.forward(x))
    });
    for call in 6..12 {
        second.step(LR, p.x(call));
    }
}

fn eager_steps_in_between(p: &Program) {
    let mut parts = (p.normed(), momentum());
    for round in 0..3 {
        let mut step = p.train(parts.0, parts.1, |model: &Normed<B>, x: T2| {
            energy(model.forward(x))
        });
        for call in 0..4 {
            step.step(LR, p.x(10 * round + call));
        }
        let (model, mut optim) = step.into_parts();
        let loss = energy(model.forward(p.x(10 * round + 4)));
        p.look("loss of the eager step", &loss);
        let gradients = GradientsParams::from_grads(loss.backward(), &model);
        parts = (optim.step(LR, model, gradients), optim);
    }
}

fn distillation_from_a_model_in_training(p: &Program) {
    let mut teacher = p.train(p.mlp(), sgd(), |model: &Mlp<B>, x: T2| {
        let out = model.forward(x);
        (energy(out.clone()), out)
    });
    let mut student = p.train(p.dropped(), sgd(), |model: &Dropped<B>, (x, target): (T2, T2)| {
        mse(model.forward(x), target)
    });
    for call in 0..10 {
        let (_, target) = teacher.step(LR, p.x(call));
        student.step(LR, (p.x(call), target));
    }
}

fn metrics_over_an_epoch(p: &Program) {
    let mut step = p.train(p.mlp(), adamw(), |model, (x, labels): (T2, I1)| {
        let logits = model.forward(x);
        let hits = logits
            .clone()
            .argmax(1)
            .squeeze_dim::<1>(1)
            .equal(labels.clone())
            .int()
            .sum();
        (cross_entropy(logits, labels), hits)
    });
    let (mut losses, mut hits) = (T1::zeros([1], &p.device()), I1::zeros([1], &p.device()));
    for call in 0..CALLS {
        let (loss, hit) = step.step(LR, p.batch(call));
        losses = losses + loss;
        hits = hits + hit;
    }
    p.look("metrics", &(losses, hits));
}

fn a_step_for_each_of_many_models(p: &Program) {
    let loss = |model: &Mlp<B>, x: T2| energy(model.forward(x));
    let mut steps: Vec<_> = (0..4).map(|_| p.train(p.mlp(), momentum(), loss)).collect();
    for call in 0..6 {
        for (index, step) in steps.iter_mut().enumerate() {
            step.step(LR, p.x(call + 10 * index));
        }
    }
}

fn a_loss_with_weights_that_depend_on_the_call(p: &Program) {
    let mut step = p.train(p.mlp(), sgd(), |model, (x, y, weight): (T2, T2, T1)| {
        let out = model.forward(x);
        mse(out.clone(), y) * weight + energy(out)
    });
    for call in 0..CALLS {
        let weight = T1::from_floats([call as f32 * 0.1], &p.device());
        step.step(LR, (p.x(call), p.y(call), weight));
    }
}

fn curriculum_by_sizes(p: &Program) {
    let mut step = p.train(p.normed(), momentum(), |model, x: T2| energy(model.forward(x)));
    for call in 0..15 {
        step.step(LR, p.waves(call, [2 + call / 5, WIDTH]));
    }
}

fn the_step_is_moved_and_boxed(p: &Program) {
    let mut step = Box::new(p.train(p.mlp(), sgd(), |model: &Mlp<B>, x: T2| energy(model.forward(x))));
    for call in 0..4 {
        step.step(LR, p.x(call));
    }
    let mut moved = (0, *step);
    for call in 4..CALLS {
        moved.1.step(LR, p.x(call));
    }
}

fn generated_data_from_the_model(p: &Program) {
    // As in self-play: the model of now makes the next batch.
    let mut step = p.train(p.mlp(), sgd(), |model, (x, y)| mse(model.forward(x), y));
    for call in 0..CALLS {
        let target = T2::from_inner(step.model().valid().forward(p.x(call).inner())) * 0.9;
        step.step(LR, (p.x(call), target));
    }
}
