//! Calls that fail half way: a panic in the closure leaves everything as before the call.

use std::cell::Cell;

use burn::module::AutodiffModule;

use crate::models::*;
use crate::program::{B, CALLS, Program};
use crate::programs;

programs! {
    a_panic_at_the_first_call => Replayed,
    a_panic_at_the_second_call => Replayed,
    a_panic_at_the_third_call => Replayed,
    a_panic_at_the_sixth_call => Any,
    a_panic_after_the_forward_pass_of_batch_norm => Replayed,
    a_panic_at_the_first_call_with_batch_norm => Replayed,
    a_panic_at_the_third_call_with_batch_norm => Replayed,
    a_panic_in_a_shape_that_occurs_once_with_batch_norm => Any,
    panics_twice_in_a_row_with_batch_norm => Replayed,
    a_panic_with_dropout => Replayed,
    a_panic_and_then_validation => Replayed,
    a_shape_that_does_not_fit => Any,
    a_panic_after_replay_with_momentum => Any,
}

/// Trains a model whose closure panics at some calls, before or after its forward pass.
macro_rules! panics {
    ($p:expr, $model:expr, $optim:expr, at: [$($at:expr),*], before: $before:expr) => {{
        let p: &Program = $p;
        p.compare_synced();
        let fails = Cell::new(false);
        let mut step = p.train($model, $optim, |model, x: T2| {
            assert!(!($before && fails.get()), "a bad batch");
            let loss = energy(model.forward(x));
            assert!(!fails.get(), "a bad batch");
            loss
        });
        let at: &[usize] = &[$($at),*];
        for call in 0..12 {
            // The closure runs in recorded calls only: another batch size has it run.
            let examples = if at.contains(&call) { 3 } else { EXAMPLES };
            fails.set(at.contains(&call));
            let result = step.try_step(LR, p.waves(call, [examples, WIDTH]));
            assert_eq!(result.is_err(), at.contains(&call), "call {call}: {result:?}");
        }
    }};
}

fn a_panic_at_the_first_call(p: &Program) {
    panics!(p, p.mlp(), adamw(), at: [0], before: false);
}

fn a_panic_at_the_second_call(p: &Program) {
    panics!(p, p.mlp(), adamw(), at: [1], before: true);
}

fn a_panic_at_the_third_call(p: &Program) {
    panics!(p, p.mlp(), momentum(), at: [2], before: false);
}

fn a_panic_at_the_sixth_call(p: &Program) {
    panics!(p, p.mlp(), adamw(), at: [5], before: false);
}

fn a_panic_after_the_forward_pass_of_batch_norm(p: &Program) {
    panics!(p, p.normed(), sgd(), at: [5], before: false);
}

fn a_panic_at_the_first_call_with_batch_norm(p: &Program) {
    panics!(p, p.normed(), adamw(), at: [0], before: false);
}

fn a_panic_at_the_third_call_with_batch_norm(p: &Program) {
    panics!(p, p.normed(), sgd(), at: [2], before: false);
}

fn a_panic_in_a_shape_that_occurs_once_with_batch_norm(p: &Program) {
    panics!(p, p.normed(), sgd(), at: [7], before: true);
}

fn panics_twice_in_a_row_with_batch_norm(p: &Program) {
    panics!(p, p.normed(), sgd(), at: [4, 5], before: false);
}

fn a_panic_with_dropout(p: &Program) {
    panics!(p, p.dropped(), sgd(), at: [1, 6], before: false);
}

fn a_panic_and_then_validation(p: &Program) {
    p.compare_synced();
    let fails = Cell::new(false);
    let mut step = p.train(p.normed(), sgd(), |model, x: T2| {
        let loss = energy(model.forward(x));
        assert!(!fails.get(), "a bad batch");
        loss
    });
    for call in 0..12 {
        fails.set(call == 5);
        let examples = if call == 5 { 3 } else { EXAMPLES };
        let _ = step.try_step(LR, p.waves(call, [examples, WIDTH]));
        if call >= 5 && call % 3 == 2 {
            p.look("validation", &step.model().valid().forward(p.x(100).inner()));
        }
    }
}

fn a_shape_that_does_not_fit(p: &Program) {
    p.compare_synced();
    let mut step = p.train(p.normed(), sgd(), |model: &Normed<B>, (x, y): (T2, T2)| {
        // Burn checks shapes on the host and panics.
        mse(model.forward(x), y).mean()
    });
    for call in 0..10 {
        let width = if call == 1 || call == 6 { WIDTH + 1 } else { WIDTH };
        let result = step.try_step(LR, (p.waves(call, [EXAMPLES, width]), p.y(call)));
        p.look("failed", &result.is_err());
    }
}

fn a_panic_after_replay_with_momentum(p: &Program) {
    p.compare_synced();
    let fails = Cell::new(false);
    let mut step = p.train(p.mlp(), momentum(), |model, x: T2| {
        assert!(!fails.get(), "a bad batch");
        energy(model.forward(x))
    });
    for call in 0..CALLS + 4 {
        fails.set(call == 7);
        let examples = if call == 7 { 3 } else { EXAMPLES };
        let _ = step.try_step(LR, p.waves(call, [examples, WIDTH]));
    }
}
