//! What a step's closure returns beside the loss: inputs, state, constants, repeats.

use burn::tensor::{Int, Tensor};

use crate::models::*;
use crate::program::{B, CALLS, Program};
use crate::programs;

programs! {
    the_loss_alone => Replayed,
    logits => Replayed,
    the_input => Replayed,
    an_input_among_several => Replayed,
    an_input_of_integers => Replayed,
    an_input_that_is_not_used => Replayed,
    a_view_of_the_input => Replayed,
    the_loss_twice => Replayed,
    logits_twice => Replayed,
    logits_twice_and_nested => Replayed,
    the_input_twice => Replayed,
    a_weight => Replayed,
    a_weight_twice => Replayed,
    a_bias_of_a_frozen_layer => Replayed,
    the_running_mean => Replayed,
    both_running_statistics_and_logits => Replayed,
    a_constant_of_the_closure => Any,
    a_captured_tensor => Replayed,
    zeros_made_in_the_closure => Any,
    predictions_as_integers => Replayed,
    hits_as_booleans => Replayed,
    an_option => Replayed,
    an_option_that_is_none => Replayed,
    a_vector_of_activations => Replayed,
    an_array_of_losses => Replayed,
    a_vector_of_inputs_and_results => Replayed,
    a_batch_size => Recorded,
    a_fixed_text => Recorded,
    a_count_from_the_batch => Any,
    a_loss_read_as_number => Recorded,
    the_detached_loss => Replayed,
    outputs_kept_over_calls => Replayed,
    outputs_dropped_at_once => Replayed,
    an_output_fed_back_as_input => Replayed,
}

fn the_loss_alone(p: &Program) {
    let mut step = p.train(p.mlp(), sgd(), |model, (x, y)| mse(model.forward(x), y));
    for call in 0..CALLS {
        step.step(LR, (p.x(call), p.y(call)));
    }
}

fn logits(p: &Program) {
    let mut step = p.train(p.mlp(), adamw(), |model, (x, labels)| {
        let logits = model.forward(x);
        (cross_entropy(logits.clone(), labels), logits)
    });
    for call in 0..CALLS {
        step.step(LR, p.batch(call));
    }
}

fn the_input(p: &Program) {
    let mut step = p.train(p.mlp(), sgd(), |model, x: T2| {
        (energy(model.forward(x.clone())), x)
    });
    for call in 0..CALLS {
        step.step(LR, p.x(call));
    }
}

fn an_input_among_several(p: &Program) {
    let mut step = p.train(p.mlp(), adamw(), |model, (x, y): (T2, T2)| {
        let out = model.forward(x);
        (mse(out.clone(), y.clone()), (out, y))
    });
    for call in 0..CALLS {
        step.step(LR, (p.x(call), p.y(call)));
    }
}

fn an_input_of_integers(p: &Program) {
    let mut step = p.train(p.mlp(), sgd(), |model, (x, labels): (T2, I1)| {
        (cross_entropy(model.forward(x), labels.clone()), labels)
    });
    for call in 0..CALLS {
        step.step(LR, p.batch(call));
    }
}

fn an_input_that_is_not_used(p: &Program) {
    let mut step = p.train(p.mlp(), sgd(), |model, (x, ids): (T2, I1)| {
        (energy(model.forward(x)), ids)
    });
    for call in 0..CALLS {
        step.step(LR, (p.x(call), p.indices(call, [3], 100)));
    }
}

fn a_view_of_the_input(p: &Program) {
    let mut step = p.train(p.mlp(), sgd(), |model, x: T2| {
        (
            energy(model.forward(x.clone())),
            (x.clone().transpose(), x.reshape([WIDTH, EXAMPLES])),
        )
    });
    for call in 0..CALLS {
        step.step(LR, p.x(call));
    }
}

fn the_loss_twice(p: &Program) {
    let mut step = p.train(p.mlp(), sgd(), |model, x: T2| {
        let loss = energy(model.forward(x));
        (loss.clone(), loss)
    });
    for call in 0..CALLS {
        step.step(LR, p.x(call));
    }
}

fn logits_twice(p: &Program) {
    let mut step = p.train(p.mlp(), adamw(), |model, x: T2| {
        let logits = model.forward(x);
        (energy(logits.clone()), (logits.clone(), logits))
    });
    for call in 0..CALLS {
        step.step(LR, p.x(call));
    }
}

fn logits_twice_and_nested(p: &Program) {
    let mut step = p.train(p.mlp(), sgd(), |model, x: T2| {
        let logits = model.forward(x);
        let loss = energy(logits.clone());
        (
            loss.clone(),
            (vec![logits.clone(), logits.clone()], (loss, Some(logits))),
        )
    });
    for call in 0..CALLS {
        step.step(LR, p.x(call));
    }
}

fn the_input_twice(p: &Program) {
    let mut step = p.train(p.mlp(), sgd(), |model, x: T2| {
        (energy(model.forward(x.clone())), (x.clone(), x))
    });
    for call in 0..CALLS {
        step.step(LR, p.x(call));
    }
}

fn a_weight(p: &Program) {
    let mut step = p.train(p.mlp(), sgd(), |model: &Mlp<B>, x: T2| {
        (energy(model.forward(x)), model.first.weight.val())
    });
    for call in 0..CALLS {
        step.step(LR, p.x(call));
    }
}

fn a_weight_twice(p: &Program) {
    let mut step = p.train(p.mlp(), adamw(), |model: &Mlp<B>, x: T2| {
        let weight = model.second.weight.val();
        (energy(model.forward(x)), (weight.clone(), weight))
    });
    for call in 0..CALLS {
        step.step(LR, p.x(call));
    }
}

fn a_bias_of_a_frozen_layer(p: &Program) {
    let mut model = p.mlp();
    model.first = burn::module::Module::no_grad(model.first);
    let mut step = p.train(model, sgd(), |model: &Mlp<B>, x: T2| {
        let bias = model.first.bias.as_ref().unwrap().val();
        (energy(model.forward(x)), bias)
    });
    for call in 0..CALLS {
        step.step(LR, p.x(call));
    }
}

fn the_running_mean(p: &Program) {
    let mut step = p.train(p.normed(), sgd(), |model: &Normed<B>, x: T2| {
        let loss = energy(model.forward(x));
        (loss, model.norm.running_mean.value())
    });
    for call in 0..CALLS {
        step.step(LR, p.x(call));
    }
}

fn both_running_statistics_and_logits(p: &Program) {
    let mut step = p.train(p.normed(), adamw(), |model: &Normed<B>, x: T2| {
        let logits = model.forward(x);
        let statistics = (
            model.norm.running_mean.value_sync(),
            model.norm.running_var.value_sync(),
        );
        (energy(logits.clone()), (statistics, logits))
    });
    for call in 0..CALLS {
        step.step(LR, p.x(call));
    }
}

fn a_constant_of_the_closure(p: &Program) {
    let device = p.device();
    let mut step = p.train(p.mlp(), sgd(), |model, x: T2| {
        let scale = T1::from_floats([0.5, 1.0, 2.0], &device);
        (energy(model.forward(x) * scale.clone().unsqueeze()), scale)
    });
    for call in 0..CALLS {
        step.step(LR, p.x(call));
    }
}

fn a_captured_tensor(p: &Program) {
    let centre = p.waves(7, [CLASSES]);
    let mut step = p.train(p.mlp(), sgd(), |model, x: T2| {
        (
            energy(model.forward(x) - centre.clone().unsqueeze()),
            centre.clone(),
        )
    });
    for call in 0..CALLS {
        step.step(LR, p.x(call));
    }
}

fn zeros_made_in_the_closure(p: &Program) {
    let device = p.device();
    let mut step = p.train(p.mlp(), sgd(), |model, x: T2| {
        (
            energy(model.forward(x)),
            (
                T2::zeros([2, 3], &device),
                Tensor::<B, 1, Int>::arange(0..4, &device),
            ),
        )
    });
    for call in 0..CALLS {
        step.step(LR, p.x(call));
    }
}

fn predictions_as_integers(p: &Program) {
    let mut step = p.train(p.mlp(), sgd(), |model, (x, labels)| {
        let logits = model.forward(x);
        (cross_entropy(logits.clone(), labels), logits.argmax(1))
    });
    for call in 0..CALLS {
        step.step(LR, p.batch(call));
    }
}

fn hits_as_booleans(p: &Program) {
    let mut step = p.train(p.mlp(), sgd(), |model, (x, labels): (T2, I1)| {
        let logits = model.forward(x);
        let hits = logits.clone().argmax(1).squeeze_dim::<1>(1).equal(labels.clone());
        (cross_entropy(logits, labels), (hits.clone(), hits.int().sum()))
    });
    for call in 0..CALLS {
        step.step(LR, p.batch(call));
    }
}

fn an_option(p: &Program) {
    let mut step = p.train(p.mlp(), sgd(), |model, x: T2| {
        let out = model.forward(x);
        (energy(out.clone()), Some(out.mean_dim(0)))
    });
    for call in 0..CALLS {
        step.step(LR, p.x(call));
    }
}

fn an_option_that_is_none(p: &Program) {
    let mut step = p.train(p.mlp(), sgd(), |model, x: T2| {
        (energy(model.forward(x)), None::<T2>)
    });
    for call in 0..CALLS {
        step.step(LR, p.x(call));
    }
}

fn a_vector_of_activations(p: &Program) {
    let mut step = p.train(p.mlp(), sgd(), |model: &Mlp<B>, x: T2| {
        let hidden = model.first.forward(x.clone());
        let out = model.forward(x);
        (energy(out.clone()), vec![hidden, out])
    });
    for call in 0..CALLS {
        step.step(LR, p.x(call));
    }
}

fn an_array_of_losses(p: &Program) {
    let mut step = p.train(p.mlp(), adamw(), |model: &Mlp<B>, (x, y): (T2, T2)| {
        let out = model.forward(x);
        let parts = [mse(out.clone(), y.clone()), (out - y).abs().mean()];
        (parts[0].clone() + parts[1].clone() * 0.3, parts)
    });
    for call in 0..CALLS {
        step.step(LR, (p.x(call), p.y(call)));
    }
}

fn a_vector_of_inputs_and_results(p: &Program) {
    let mut step = p.train(p.mlp(), sgd(), |model: &Mlp<B>, xs: Vec<T2>| {
        let losses: Vec<T1> = xs.iter().map(|x| energy(model.forward(x.clone()))).collect();
        (Tensor::cat(losses.clone(), 0).sum(), (losses, xs))
    });
    for call in 0..CALLS {
        step.step(LR, vec![p.x(call), p.x(call + 50)]);
    }
}

fn a_batch_size(p: &Program) {
    let mut step = p.train(p.mlp(), sgd(), |model, x: T2| {
        let examples = x.dims()[0];
        (energy(model.forward(x)), examples)
    });
    for call in 0..CALLS {
        step.step(LR, p.waves(call, [if call < 4 { 4 } else { 3 }, WIDTH]));
    }
}

fn a_fixed_text(p: &Program) {
    let mut step = p.train(p.mlp(), sgd(), |model, x: T2| {
        (energy(model.forward(x)), "train".to_owned())
    });
    for call in 0..CALLS {
        step.step(LR, p.x(call));
    }
}

fn a_count_from_the_batch(p: &Program) {
    let mut step = p.train(p.mlp(), sgd(), |model, (x, labels): (T2, I1)| {
        let ones: usize = labels.to_data().iter::<i64>().filter(|label| *label == 1).count();
        (cross_entropy(model.forward(x), labels), ones)
    });
    for call in 0..CALLS {
        step.step(LR, p.batch(call));
    }
}

fn a_loss_read_as_number(p: &Program) {
    let mut step = p.train(p.mlp(), sgd(), |model, x: T2| {
        let loss = energy(model.forward(x));
        let number = loss.clone().into_scalar();
        (loss, number)
    });
    for call in 0..CALLS {
        step.step(LR, p.x(call));
    }
}

fn the_detached_loss(p: &Program) {
    let mut step = p.train(p.mlp(), sgd(), |model, x: T2| {
        let loss = energy(model.forward(x));
        (loss.clone(), loss.detach().inner())
    });
    for call in 0..CALLS {
        step.step(LR, p.x(call));
    }
}

fn outputs_kept_over_calls(p: &Program) {
    let mut step = p.train(p.mlp(), adamw(), |model: &Mlp<B>, x: T2| {
        let out = model.forward(x.clone());
        (energy(out.clone()), (out, x, model.first.weight.val()))
    });
    let kept: Vec<_> = (0..CALLS).map(|call| step.step(LR, p.x(call))).collect();
    p.read("outputs of all calls", &kept);
}

fn outputs_dropped_at_once(p: &Program) {
    let mut step = p.train(p.mlp(), adamw(), |model: &Mlp<B>, x: T2| {
        let out = model.forward(x);
        (energy(out.clone()), out)
    });
    for call in 0..CALLS {
        drop(step.step(LR, p.x(call)));
    }
}

fn an_output_fed_back_as_input(p: &Program) {
    let mut step = p.train(p.mlp(), sgd(), |model, (x, last): (T2, T2)| {
        let out = model.forward(x);
        (mse(out.clone(), last), out)
    });
    let mut last = p.y(0);
    for call in 0..CALLS {
        (_, last) = step.step(LR, (p.x(call), last));
    }
    p.read("the last output", &last);
}
