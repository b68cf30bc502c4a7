//! What goes into a step: inputs that coincide with each other, with state, with what the closure captured,
//! and inputs that change.

use burn::tensor::Tensor;

use crate::models::*;
use crate::program::{B, CALLS, Program};
use crate::programs;

programs! {
    the_same_tensor_twice_then_two => Replayed,
    two_tensors_then_the_same_twice => Replayed,
    coincidence_that_alternates => Any,
    three_inputs_of_which_others_coincide => Replayed,
    equal_data_in_tensors_of_their_own => Replayed,
    a_view_beside_its_tensor => Replayed,
    the_batch_is_captured_too => Any,
    a_hidden_state_of_shared_zeros => Replayed,
    one_zeros_tensor_for_every_call => Replayed,
    the_weight_as_input => Any,
    the_weight_as_input_after_others => Any,
    the_last_output_twice => Replayed,
    the_same_batch_at_every_call => Replayed,
    one_of_a_few_batches => Replayed,
    a_batch_the_program_keeps => Replayed,
    a_batch_made_by_operations => Replayed,
    a_batch_drawn_at_random => Replayed,
    a_smaller_last_batch => Replayed,
    sizes_that_alternate => Any,
    lengths_that_grow => Any,
    an_option_that_comes_and_goes => Any,
    a_number_beside_the_batch => Replayed,
    a_number_that_changes => Any,
    a_vector_of_other_lengths => Any,
    a_tracked_input => Replayed,
    integers_of_another_width => Any,
    a_sliced_data_set => Replayed,
    no_input_at_all => Replayed,
}

fn the_same_tensor_twice_then_two(p: &Program) {
    let mut step = p.train(p.mlp(), sgd(), |model: &Mlp<B>, (a, b): (T2, T2)| {
        mse(model.forward(a), model.forward(b * 0.5) + 0.1)
    });
    for call in 0..5 {
        let x = p.x(call);
        step.step(LR, (x.clone(), x));
    }
    for call in 5..12 {
        step.step(LR, (p.x(call), p.x(call + 30)));
    }
}

fn two_tensors_then_the_same_twice(p: &Program) {
    let mut step = p.train(p.mlp(), sgd(), |model: &Mlp<B>, (a, b): (T2, T2)| {
        mse(model.forward(a), model.forward(b * 0.5) + 0.1)
    });
    for call in 0..5 {
        step.step(LR, (p.x(call), p.x(call + 30)));
    }
    for call in 5..12 {
        let x = p.x(call);
        step.step(LR, (x.clone(), x));
    }
}

fn coincidence_that_alternates(p: &Program) {
    let mut step = p.train(p.mlp(), sgd(), |model: &Mlp<B>, (a, b): (T2, T2)| {
        mse(model.forward(a), model.forward(b * 0.5) + 0.1)
    });
    for call in 0..12 {
        let x = p.x(call);
        let other = if call % 2 == 0 { x.clone() } else { p.x(call + 30) };
        step.step(LR, (x, other));
    }
}

fn three_inputs_of_which_others_coincide(p: &Program) {
    let mut step = p.train(p.mlp(), sgd(), |model: &Mlp<B>, (a, b, c): (T2, T2, T2)| {
        energy(model.forward(a - b * 0.5) + model.forward(c))
    });
    for call in 0..15 {
        let (x, y) = (p.x(call), p.x(call + 30));
        step.step(
            LR,
            match call / 5 {
                0 => (x.clone(), x, y),
                1 => (x.clone(), y, x),
                _ => (y, x.clone(), x),
            },
        );
    }
}

fn equal_data_in_tensors_of_their_own(p: &Program) {
    let mut step = p.train(p.mlp(), sgd(), |model: &Mlp<B>, (a, b): (T2, T2)| {
        energy(model.forward(a - b * 0.5))
    });
    for call in 0..5 {
        step.step(LR, (p.x(call), p.x(call)));
    }
    for call in 5..10 {
        step.step(LR, (p.x(call), p.x(call + 30)));
    }
}

fn a_view_beside_its_tensor(p: &Program) {
    let mut step = p.train(p.mlp(), sgd(), |model: &Mlp<B>, (a, b): (T2, T2)| {
        energy(model.forward(a) * b.sum().unsqueeze())
    });
    for call in 0..CALLS {
        let x = p.x(call);
        step.step(LR, (x.clone(), x.transpose()));
    }
}

fn the_batch_is_captured_too(p: &Program) {
    let x = p.x(0);
    let captured = x.clone();
    let mut step = p.train(p.mlp(), sgd(), |model: &Mlp<B>, x: T2| {
        mse(model.forward(x), model.forward(captured.clone()) * 0.5)
    });
    for call in 0..12 {
        step.step(LR, if call < 5 { x.clone() } else { p.x(call) });
    }
}

fn a_hidden_state_of_shared_zeros(p: &Program) {
    let zeros = T2::zeros([EXAMPLES, WIDTH], &p.device());
    let mut step = p.train(p.mlp(), sgd(), |model: &Mlp<B>, (x, h, c): (T2, T2, T2)| {
        let cell = c * 0.5 + x.clone().tanh();
        let hidden = h * 0.9 + cell.clone();
        (energy(model.forward(hidden.clone())), (hidden, cell))
    });
    let (mut h, mut c) = (zeros.clone(), zeros);
    for call in 0..10 {
        (_, (h, c)) = step.step(LR, (p.x(call), h, c));
    }
}

fn one_zeros_tensor_for_every_call(p: &Program) {
    let zeros = T2::zeros([EXAMPLES, WIDTH], &p.device());
    let mut step = p.train(p.mlp(), sgd(), |model: &Mlp<B>, (x, h, c): (T2, T2, T2)| {
        (energy(model.forward(x + h.clone())), h + c)
    });
    for call in 0..10 {
        step.step(LR, (p.x(call), zeros.clone(), zeros.clone()));
    }
}

fn the_weight_as_input(p: &Program) {
    let mut step = p.train(p.mlp(), sgd(), |model: &Mlp<B>, (x, w): (T2, T2)| {
        energy(model.forward(x)) + (model.first.weight.val() - w * 0.5).abs().mean()
    });
    for call in 0..10 {
        let weight = step.model().first.weight.val().detach();
        step.step(LR, (p.x(call), weight));
    }
}

fn the_weight_as_input_after_others(p: &Program) {
    let mut step = p.train(p.mlp(), sgd(), |model: &Mlp<B>, (x, w): (T2, T2)| {
        energy(model.forward(x)) + (model.first.weight.val() - w * 0.5).abs().mean()
    });
    for call in 0..12 {
        let weight = match call % 6 {
            5 => step.model().first.weight.val().detach(),
            _ => p.waves(call, [WIDTH, HIDDEN]),
        };
        step.step(LR, (p.x(call), weight));
    }
}

fn the_last_output_twice(p: &Program) {
    let mut step = p.train(p.mlp(), sgd(), |model: &Mlp<B>, (x, a, b): (T2, T2, T2)| {
        let out = model.forward(x);
        (mse(out.clone() + a * 0.1, b), out)
    });
    let mut last = p.y(0);
    for call in 0..10 {
        (_, last) = step.step(LR, (p.x(call), last.clone(), last));
    }
}

fn the_same_batch_at_every_call(p: &Program) {
    let (x, labels) = p.batch(0);
    let mut step = p.train(p.mlp(), adamw(), |model, (x, labels)| {
        cross_entropy(model.forward(x), labels)
    });
    for _ in 0..CALLS {
        step.step(LR, (x.clone(), labels.clone()));
    }
    p.read("the batch", &x);
}

fn one_of_a_few_batches(p: &Program) {
    let batches: Vec<_> = (0..3).map(|call| p.batch(call)).collect();
    let mut step = p.train(p.mlp(), adamw(), |model, (x, labels)| {
        cross_entropy(model.forward(x), labels)
    });
    for call in 0..10 {
        step.step(LR, batches[call % 3].clone());
    }
    p.read("the batches", &batches);
}

fn a_batch_the_program_keeps(p: &Program) {
    let mut step = p.train(p.mlp(), sgd(), |model, x: T2| energy(model.forward(x)));
    let mut kept = Vec::new();
    for call in 0..CALLS {
        let x = p.x(call);
        kept.push(x.clone());
        step.step(LR, x);
    }
    p.read("the inputs", &kept);
}

fn a_batch_made_by_operations(p: &Program) {
    let mut step = p.train(p.mlp(), sgd(), |model, x: T2| energy(model.forward(x)));
    let base = p.x(0);
    for call in 0..CALLS {
        step.step(LR, base.clone() * (call as f32 + 0.5) + p.x(call));
    }
}

fn a_batch_drawn_at_random(p: &Program) {
    let mut step = p.train(p.mlp(), sgd(), |model, x: T2| energy(model.forward(x)));
    for _ in 0..CALLS {
        step.step(
            LR,
            T2::random(
                [EXAMPLES, WIDTH],
                burn::tensor::Distribution::Default,
                &p.device(),
            ),
        );
    }
}

fn a_smaller_last_batch(p: &Program) {
    let mut step = p.train(p.mlp(), adamw(), |model, x: T2| energy(model.forward(x)));
    for call in 0..15 {
        let examples = if call % 5 == 4 { 2 } else { 4 };
        step.step(LR, p.waves(call, [examples, WIDTH]));
    }
}

fn sizes_that_alternate(p: &Program) {
    let mut step = p.train(p.mlp(), momentum(), |model, x: T2| energy(model.forward(x)));
    for call in 0..10 {
        step.step(LR, p.waves(call, [3 + call % 2, WIDTH]));
    }
}

fn lengths_that_grow(p: &Program) {
    let mut step = p.train(p.mlp(), sgd(), |model, x: T2| energy(model.forward(x)));
    for call in 0..6 {
        step.step(LR, p.waves(call, [1 + call, WIDTH]));
    }
}

fn an_option_that_comes_and_goes(p: &Program) {
    let mut step = p.train(p.mlp(), sgd(), |model, (x, mask): (T2, Option<T2>)| {
        let out = model.forward(x);
        energy(mask.map_or(out.clone(), |mask| out * mask))
    });
    for call in 0..14 {
        let mask = (call / 4 % 2 == 1).then(|| p.y(call));
        step.step(LR, (p.x(call), mask));
    }
}

fn a_number_beside_the_batch(p: &Program) {
    let mut step = p.train(p.mlp(), sgd(), |model, (x, factor): (T2, f64)| {
        energy(model.forward(x)) * factor
    });
    for call in 0..CALLS {
        step.step(LR, (p.x(call), 0.7));
    }
}

fn a_number_that_changes(p: &Program) {
    let mut step = p.train(p.mlp(), sgd(), |model, (x, factor): (T2, f64)| {
        energy(model.forward(x)) * factor
    });
    for call in 0..12 {
        step.step(LR, (p.x(call), 0.5 + (call / 4) as f64));
    }
}

fn a_vector_of_other_lengths(p: &Program) {
    let mut step = p.train(p.mlp(), sgd(), |model: &Mlp<B>, xs: Vec<T2>| {
        let losses = xs.into_iter().map(|x| energy(model.forward(x))).collect();
        Tensor::cat(losses, 0).mean()
    });
    for call in 0..9 {
        step.step(LR, (0..1 + call / 4).map(|i| p.x(call + 10 * i)).collect());
    }
}

fn a_tracked_input(p: &Program) {
    let mut step = p.train(p.mlp(), sgd(), |model, x: T2| {
        (energy(model.forward(x.clone())), x)
    });
    for call in 0..CALLS {
        step.step(LR, p.x(call).require_grad());
    }
}

fn integers_of_another_width(p: &Program) {
    use burn::tensor::IntDType;
    let mut step = p.train(p.mlp(), sgd(), |model, (x, labels)| {
        cross_entropy(model.forward(x), labels)
    });
    for call in 0..12 {
        let dtype = if call < 5 { IntDType::I64 } else { IntDType::I32 };
        step.step(LR, (p.x(call), p.labels(call).cast(dtype)));
    }
}

fn a_sliced_data_set(p: &Program) {
    let data = p.waves(3, [8 * EXAMPLES, WIDTH]);
    let mut step = p.train(p.mlp(), sgd(), |model, x: T2| energy(model.forward(x)));
    for call in 0..CALLS {
        step.step(LR, data.clone().narrow(0, call * EXAMPLES, EXAMPLES));
    }
    p.read("the data set", &data);
}

fn no_input_at_all(p: &Program) {
    let x = p.x(0);
    let mut step = p.train(p.mlp(), adamw(), |model: &Mlp<B>, ()| {
        energy(model.forward(x.clone()))
    });
    for _ in 0..CALLS {
        step.step(LR, ());
    }
}
