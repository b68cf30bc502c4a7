//! Steps whose batches have several sizes: each size is recorded and replayed by itself, and all have one
//! state.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use burn::module::{AutodiffModule, Module};
use burn::tensor::Tensor;
use burn_optim::grad_clipping::GradientClippingConfig;
use burn_optim::lr_scheduler::LrScheduler;
use burn_optim::lr_scheduler::cosine::CosineAnnealingLrSchedulerConfig;
use burn_optim::{AdamWConfig, Optimizer};

use crate::models::*;
use crate::program::{B, Program};
use crate::programs;

programs! {
    sizes_alternate => Replayed,
    three_sizes_take_turns => Replayed,
    sizes_alternate_with_dropout => Replayed,
    sizes_alternate_with_batch_norm => Replayed,
    sizes_alternate_with_clipping => Replayed,
    sizes_alternate_with_momentum => Replayed,
    epochs_whose_last_batch_is_smaller => Replayed,
    epochs_with_checkpoints_of_the_optimizer => Replayed,
    sizes_after_a_checkpoint_was_loaded => Replayed,
    a_head_alone_then_everything => Replayed,
    two_losses_by_a_plain_value => Replayed,
    a_weight_is_returned_for_one_size => Replayed,
    running_means_of_both_sizes_are_kept => Replayed,
    a_clone_is_trained_in_between => Any,
    a_captured_tensor_is_exchanged_between_sizes => Any,
    a_number_changes_while_sizes_alternate => Noticed(10),
    one_size_panics_now_and_then => Replayed,
    a_hidden_state_passes_between_sizes => Any,
    one_size_reads_a_value => Any,
    copies_are_kept_after_each_call => Replayed,
    a_rate_of_zero_for_one_size => Replayed,
}

const ALTERNATING: usize = 14;

/// Batches of four examples and of two, in turns.
fn turns(p: &Program, call: usize) -> T2 {
    p.waves(call, [if call.is_multiple_of(2) { 4 } else { 2 }, WIDTH])
}

fn sizes_alternate(p: &Program) {
    let mut step = p.train(p.mlp(), adamw(), |model: &Mlp<B>, x: T2| energy(model.forward(x)));
    for call in 0..ALTERNATING {
        step.step(LR / (call + 1) as f64, turns(p, call));
    }
}

fn three_sizes_take_turns(p: &Program) {
    let mut step = p.train(p.mlp(), adamw(), |model: &Mlp<B>, x: T2| {
        let y = model.forward(x.clone());
        (energy(y.clone()), (y, x))
    });
    for call in 0..18 {
        step.step(LR, p.waves(call, [[4, 2, 3][call % 3], WIDTH]));
    }
}

fn sizes_alternate_with_dropout(p: &Program) {
    let mut step = p.train(p.dropped(), adamw(), |model: &Dropped<B>, x: T2| {
        energy(model.forward(x))
    });
    for call in 0..ALTERNATING {
        step.step(LR, turns(p, call));
    }
}

fn sizes_alternate_with_batch_norm(p: &Program) {
    let mut step = p.train(p.normed(), adamw(), |model: &Normed<B>, x: T2| {
        energy(model.forward(x))
    });
    for call in 0..ALTERNATING {
        step.step(LR, turns(p, call));
        if call % 3 == 2 {
            p.look("validation", &step.model().valid().forward(p.x(100).inner()));
        }
    }
}

fn sizes_alternate_with_clipping(p: &Program) {
    let optim = AdamWConfig::new()
        .with_epsilon(1e-3)
        .with_grad_clipping(Some(GradientClippingConfig::Norm(0.05)))
        .init();
    let mut step = p.train(p.mlp(), optim, |model: &Mlp<B>, x: T2| energy(model.forward(x)));
    for call in 0..ALTERNATING {
        step.step(LR, turns(p, call));
    }
}

fn sizes_alternate_with_momentum(p: &Program) {
    // The state does not exist before the first step, whose graph is another one.
    let mut step = p.train(p.normed(), momentum(), |model: &Normed<B>, x: T2| {
        energy(model.forward(x))
    });
    for call in 0..ALTERNATING {
        step.step(LR, turns(p, call));
    }
}

/// Five batches, the last of two examples.
fn epoch(p: &Program, epoch: usize) -> Vec<(T2, I1)> {
    let batch = |index: usize| {
        let (call, size) = (epoch * 5 + index, if index == 4 { 2 } else { EXAMPLES });
        (p.waves(call, [size, WIDTH]), p.indices(call, [size], CLASSES))
    };
    (0..5).map(batch).collect()
}

fn epochs_whose_last_batch_is_smaller(p: &Program) {
    // The gradient of a bias before batch norm is rounding, of which AdamW makes steps.
    p.tolerate(1e-4);
    let mut step = p.train(p.normed(), adamw(), |model: &Normed<B>, (x, labels): (T2, I1)| {
        cross_entropy(model.forward(x), labels)
    });
    let mut schedule = CosineAnnealingLrSchedulerConfig::new(LR, 25)
        .init()
        .expect("a schedule");
    for number in 0..5 {
        for batch in epoch(p, number) {
            step.step(schedule.step(), batch);
        }
        p.look("validation", &step.model().valid().forward(p.x(100).inner()));
    }
}

fn epochs_with_checkpoints_of_the_optimizer(p: &Program) {
    let mut step = p.train(
        p.dropped(),
        adamw(),
        |model: &Dropped<B>, (x, labels): (T2, I1)| cross_entropy(model.forward(x), labels),
    );
    let records = RefCell::new(Vec::new());
    for number in 0..4 {
        for batch in epoch(p, number) {
            step.step(LR, batch);
        }
        // A copy of the state stays as it is.
        records.borrow_mut().push(step.optimizer().to_record());
        p.look("a kept weight", &step.model().first.weight.val());
    }
    p.look(
        "records",
        &records.borrow().iter().map(|record| record.len()).sum::<usize>(),
    );
}

fn sizes_after_a_checkpoint_was_loaded(p: &Program) {
    let loss = |model: &Normed<B>, x: T2| energy(model.forward(x));
    let mut step = p.train(p.normed(), adamw(), loss);
    for call in 0..7 {
        step.step(LR, turns(p, call));
    }
    let record = step.optimizer().to_record();
    let model = step.model().clone();
    for call in 7..10 {
        step.step(LR, turns(p, call));
    }
    // Back to the checkpoint, for another way from there.
    let optim: burn_optim::adaptor::OptimizerAdaptor<_, Normed<B>, B> = adamw().load_record(record);
    let statistics = model.into_record();
    let (trained, _) = step.into_parts();
    let model = trained.load_record(statistics);
    let mut step = p.train(model, optim, loss);
    for call in 20..30 {
        step.step(LR, turns(p, call));
    }
}

fn a_head_alone_then_everything(p: &Program) {
    // The optimizer counts the steps of each parameter: those of the head are more.
    let mut step = p.train(p.mlp(), adamw(), |model: &Mlp<B>, (x, all): (T2, bool)| {
        let features = model.first.forward(x);
        let features = if all { features } else { features.detach() };
        energy(model.second.forward(features))
    });
    for call in 0..ALTERNATING + 4 {
        step.step(LR, (p.x(call), call % 3 != 0));
    }
}

fn two_losses_by_a_plain_value(p: &Program) {
    let mut step = p.train(
        p.normed(),
        adamw(),
        |model: &Normed<B>, (x, which): (T2, usize)| {
            let y = model.forward(x);
            match which {
                0 => energy(y),
                _ => y.abs().mean(),
            }
        },
    );
    for call in 0..ALTERNATING {
        step.step(LR, (p.x(call), call % 2));
    }
}

fn a_weight_is_returned_for_one_size(p: &Program) {
    let mut step = p.train(p.mlp(), adamw(), |model: &Mlp<B>, x: T2| {
        let small = x.dims()[0] == 2;
        let other = if small {
            model.second.weight.val()
        } else {
            x.clone()
        };
        (energy(model.forward(x)), other)
    });
    let mut kept = Vec::new();
    for call in 0..ALTERNATING {
        kept.push(step.step(LR, turns(p, call)).1);
    }
    for other in kept {
        p.look("what was returned", &other);
    }
}

fn running_means_of_both_sizes_are_kept(p: &Program) {
    let mut step = p.train(p.normed(), sgd(), |model: &Normed<B>, x: T2| {
        let loss = energy(model.forward(x));
        (loss, model.norm.running_mean.value_sync())
    });
    let mut kept = Vec::new();
    for call in 0..ALTERNATING {
        kept.push(step.step(LR, turns(p, call)).1);
    }
    for mean in kept {
        p.look("a running mean", &mean);
    }
}

fn a_clone_is_trained_in_between(p: &Program) {
    // A clone shares the running statistics.
    p.compare_synced();
    let mut step = p.train(p.normed(), sgd(), |model: &Normed<B>, x: T2| {
        energy(model.forward(x))
    });
    for call in 0..ALTERNATING {
        step.step(LR, turns(p, call));
        if call % 4 == 3 {
            let clone = step.model().clone();
            p.look("a clone's output", &clone.forward(p.x(200 + call)).detach());
        }
    }
}

fn a_captured_tensor_is_exchanged_between_sizes(p: &Program) {
    let target = Rc::new(RefCell::new(p.waves(300, [1, CLASSES])));
    let captured = target.clone();
    let mut step = p.train(p.mlp(), adamw(), move |model: &Mlp<B>, x: T2| {
        let y = model.forward(x.clone());
        match x.dims()[0] {
            2 => energy(y - captured.borrow().clone()),
            _ => energy(y),
        }
    });
    for call in 0..ALTERNATING + 6 {
        if call % 7 == 5 {
            *target.borrow_mut() = p.waves(300 + call, [1, CLASSES]);
        }
        step.step(LR, turns(p, call));
    }
}

fn a_number_changes_while_sizes_alternate(p: &Program) {
    let factor = Rc::new(Cell::new(1.0));
    let seen = factor.clone();
    let mut step = p.train(p.mlp(), sgd(), move |model: &Mlp<B>, x: T2| {
        energy(model.forward(x)) * seen.get()
    });
    for call in 0..24 {
        if call + 1 == 10 {
            factor.set(3.0);
        }
        step.step(LR, turns(p, call));
    }
}

fn one_size_panics_now_and_then(p: &Program) {
    p.compare_synced();
    let mut step = p.train(p.normed(), adamw(), |model: &Normed<B>, x: T2| {
        let loss = energy(model.forward(x.clone()));
        assert!(x.dims()[0] != 3, "a bad batch");
        loss
    });
    for call in 0..ALTERNATING {
        step.step(LR, turns(p, call));
        if call % 5 == 4 {
            assert!(step.try_step(LR, p.waves(call, [3, WIDTH])).is_err());
        }
    }
}

fn a_hidden_state_passes_between_sizes(p: &Program) {
    // Written with the one size, read with the other.
    let hidden = Rc::new(RefCell::new(p.waves(400, [1, CLASSES])));
    let kept = hidden.clone();
    let mut step = p.train(p.mlp(), sgd(), move |model: &Mlp<B>, x: T2| {
        let y = model.forward(x.clone());
        if x.dims()[0] == 4 {
            *kept.borrow_mut() = y.clone().mean_dim(0).detach();
            return energy(y);
        }
        energy(y + kept.borrow().clone())
    });
    for call in 0..ALTERNATING {
        step.step(LR, turns(p, call));
    }
}

fn one_size_reads_a_value(p: &Program) {
    let mut step = p.train(p.mlp(), sgd(), |model: &Mlp<B>, x: T2| {
        let loss = energy(model.forward(x.clone()));
        if x.dims()[0] == 2 && loss.clone().into_scalar() > 0.01 {
            return loss * 0.5;
        }
        loss
    });
    for call in 0..ALTERNATING {
        step.step(LR, turns(p, call));
    }
}

fn copies_are_kept_after_each_call(p: &Program) {
    let mut step = p.train(p.mlp(), adamw(), |model: &Mlp<B>, x: T2| energy(model.forward(x)));
    let mut copies = Vec::new();
    for call in 0..ALTERNATING {
        step.step(LR, turns(p, call));
        copies.push(step.model().clone());
    }
    for copy in copies {
        p.look("a copy's weight", &copy.first.weight.val());
    }
}

fn a_rate_of_zero_for_one_size(p: &Program) {
    // AdamW leaves the decay out where rate times decay is zero: another branch of its host code.
    let optim = AdamWConfig::new()
        .with_epsilon(1e-3)
        .with_weight_decay(0.1)
        .init();
    let mut step = p.train(p.mlp(), optim, |model: &Mlp<B>, x: T2| energy(model.forward(x)));
    for call in 0..ALTERNATING + 4 {
        step.step(if call % 2 == 0 { LR } else { 0.0 }, turns(p, call));
    }
    let _: Tensor<B, 2> = step.model().first.weight.val();
}
