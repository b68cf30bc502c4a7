//! What a program does with model and optimizer between calls: validate, clone, save, load, look.

use burn::module::{AutodiffModule, Module};
use burn::record::{BinBytesRecorder, FullPrecisionSettings, Recorder};
use burn_optim::Optimizer;
use kiln::Kiln;

use crate::compare::Numbers;
use crate::models::*;
use crate::program::{B, CALLS, Program};
use crate::programs;
use crate::trainer::parameters;

programs! {
    validation_after_every_call => Replayed,
    validation_after_every_third_call => Replayed,
    validation_with_batch_norm_after_every_call => Replayed,
    validation_with_batch_norm_after_every_third_call => Replayed,
    validation_with_batch_norm_once => Replayed,
    validation_with_dropout => Replayed,
    validation_of_a_kept_copy => Replayed,
    merely_looking => Replayed,
    merely_looking_with_batch_norm => Replayed,
    merely_looking_once_with_batch_norm => Replayed,
    reading_the_running_mean => Replayed,
    reading_the_running_mean_synced => Replayed,
    a_clone_kept => Replayed,
    a_clone_kept_with_batch_norm => Replayed,
    clones_at_every_call => Replayed,
    a_clone_as_record => Replayed,
    a_clone_as_record_with_batch_norm => Replayed,
    a_record_at_every_second_call_with_batch_norm => Replayed,
    saved_as_bytes_with_batch_norm => Replayed,
    saved_and_loaded_into_another => Replayed,
    the_clone_is_trained_on_plainly => Replayed,
    the_optimizer_as_record => Replayed,
    the_optimizer_at_every_call => Any,
    a_checkpoint_every_fourth_call => Replayed,
    validation_and_checkpoint_with_batch_norm => Replayed,
    taken_apart_and_put_together => Replayed,
    taken_apart_with_batch_norm => Replayed,
    resumed_from_a_checkpoint => Replayed,
    resumed_from_a_checkpoint_with_batch_norm => Replayed,
    the_model_moves_to_the_inner_backend_and_back => Replayed,
    weights_read_at_every_call => Replayed,
    the_clone_runs_in_training_mode => Replayed,
    a_clone_from_before_runs_in_training_mode => Replayed,
    statistics_move_while_a_copy_has_the_old_ones => Replayed,
    statistics_move_between_batches_of_two_sizes => Replayed,
    statistics_are_put_back_while_a_record_has_later_ones => Replayed,
}

fn validation_after_every_call(p: &Program) {
    let mut step = p.train(p.mlp(), adamw(), |model, x: T2| energy(model.forward(x)));
    for call in 0..CALLS {
        step.step(LR, p.x(call));
        let out = step.model().valid().forward(p.x(100).inner());
        p.look("validation", &out);
    }
}

fn validation_after_every_third_call(p: &Program) {
    let mut step = p.train(p.mlp(), adamw(), |model, x: T2| energy(model.forward(x)));
    for call in 0..12 {
        step.step(LR, p.x(call));
        if call % 3 == 2 {
            let out = step.model().valid().forward(p.x(100).inner());
            p.look("validation", &out);
        }
    }
}

fn validation_with_batch_norm_after_every_call(p: &Program) {
    let mut step = p.train(p.normed(), adamw(), |model, x: T2| energy(model.forward(x)));
    for call in 0..12 {
        step.step(LR, p.x(call));
        let out = step.model().valid().forward(p.x(100).inner());
        p.look("validation", &out);
    }
}

fn validation_with_batch_norm_after_every_third_call(p: &Program) {
    let mut step = p.train(p.normed(), sgd(), |model, x: T2| energy(model.forward(x)));
    for call in 0..15 {
        step.step(LR, p.x(call));
        if call % 3 == 2 {
            let out = step.model().valid().forward(p.x(100).inner());
            p.look("validation", &out);
        }
    }
}

fn validation_with_batch_norm_once(p: &Program) {
    let mut step = p.train(p.normed(), sgd(), |model, x: T2| energy(model.forward(x)));
    for call in 0..12 {
        step.step(LR, p.x(call));
        if call == 5 {
            let out = step.model().valid().forward(p.x(100).inner());
            p.look("validation", &out);
        }
    }
}

fn validation_with_dropout(p: &Program) {
    let mut step = p.train(p.dropped(), sgd(), |model, x: T2| energy(model.forward(x)));
    for call in 0..CALLS {
        step.step(LR, p.x(call));
        let out = step.model().valid().forward(p.x(100).inner());
        p.look("validation", &out);
    }
}

fn validation_of_a_kept_copy(p: &Program) {
    let mut step = p.train(p.normed(), sgd(), |model, x: T2| energy(model.forward(x)));
    let mut kept = Vec::new();
    for call in 0..12 {
        step.step(LR, p.x(call));
        if call % 4 == 1 {
            kept.push(step.model().valid());
        }
        for model in &kept {
            p.look("a kept copy's output", &model.forward(p.x(100).inner()));
        }
    }
}

fn merely_looking(p: &Program) {
    let mut step = p.train(p.mlp(), sgd(), |model, x: T2| energy(model.forward(x)));
    for call in 0..CALLS {
        step.step(LR, p.x(call));
        let _ = step.model();
    }
}

fn merely_looking_with_batch_norm(p: &Program) {
    let mut step = p.train(p.normed(), sgd(), |model, x: T2| energy(model.forward(x)));
    for call in 0..12 {
        step.step(LR, p.x(call));
        let _ = step.model();
    }
}

fn merely_looking_once_with_batch_norm(p: &Program) {
    let mut step = p.train(p.normed(), sgd(), |model, x: T2| energy(model.forward(x)));
    for call in 0..12 {
        step.step(LR, p.x(call));
        if call == 4 {
            let _ = step.model();
        }
    }
    p.look("validation", &step.model().valid().forward(p.x(100).inner()));
}

fn reading_the_running_mean(p: &Program) {
    let mut step = p.train(p.normed(), sgd(), |model, x: T2| energy(model.forward(x)));
    for call in 0..12 {
        step.step(LR, p.x(call));
        p.look("running mean", &step.model().norm.running_mean.value_sync());
    }
}

fn reading_the_running_mean_synced(p: &Program) {
    let mut step = p.train(p.normed(), sgd(), |model, x: T2| energy(model.forward(x)));
    for call in 0..12 {
        step.step(LR, p.x(call));
        if call % 2 == 1 {
            p.look("running variance", &step.model().norm.running_var.value_sync());
        }
    }
}

fn a_clone_kept(p: &Program) {
    let mut step = p.train(p.mlp(), adamw(), |model, x: T2| energy(model.forward(x)));
    let mut kept = None;
    for call in 0..10 {
        step.step(LR, p.x(call));
        if call == 4 {
            kept = Some(step.model().clone());
        }
    }
    p.look(
        "the copy",
        &parameters::<B, _>(&kept.unwrap())
            .into_iter()
            .map(|(_, values)| Numbers(values))
            .collect::<Vec<_>>(),
    );
}

fn a_clone_kept_with_batch_norm(p: &Program) {
    let mut step = p.train(p.normed(), adamw(), |model, x: T2| energy(model.forward(x)));
    let mut kept = None;
    for call in 0..10 {
        step.step(LR, p.x(call));
        if call == 4 {
            kept = Some(step.model().clone());
        }
    }
    let kept = kept.unwrap();
    p.look("the copy's weight", &kept.first.weight.val());
    p.look("validation of the copy", &kept.valid().forward(p.x(100).inner()));
}

fn clones_at_every_call(p: &Program) {
    let mut step = p.train(p.mlp(), sgd(), |model, x: T2| energy(model.forward(x)));
    let mut kept = Vec::new();
    for call in 0..CALLS {
        step.step(LR, p.x(call));
        kept.push(step.model().clone());
    }
    for model in kept {
        p.look("a copy's bias", &model.first.bias.unwrap().val());
    }
}

fn a_clone_as_record(p: &Program) {
    let mut step = p.train(p.mlp(), adamw(), |model, x: T2| energy(model.forward(x)));
    for call in 0..10 {
        step.step(LR, p.x(call));
        if call % 3 == 2 {
            let record = step.model().clone().into_record();
            p.look("weight of the record", &record.first.weight.val());
        }
    }
}

fn a_clone_as_record_with_batch_norm(p: &Program) {
    let mut step = p.train(p.normed(), adamw(), |model, x: T2| energy(model.forward(x)));
    for call in 0..12 {
        step.step(LR, p.x(call));
        if call == 4 {
            let record = step.model().clone().into_record();
            p.look("running mean of the record", &record.norm.running_mean.val());
        }
    }
}

fn a_record_at_every_second_call_with_batch_norm(p: &Program) {
    let mut step = p.train(p.normed(), sgd(), |model, x: T2| energy(model.forward(x)));
    let mut records = Vec::new();
    for call in 0..12 {
        step.step(LR, p.x(call));
        if call % 2 == 1 {
            records.push(step.model().clone().into_record());
        }
    }
    for record in records {
        p.look("running mean of the record", &record.norm.running_mean.val());
        p.look("weight of the record", &record.second.weight.val());
    }
}

/// A model as bytes, as a recorder for files has them.
fn bytes<M: Module<B>>(model: M) -> Vec<u8> {
    BinBytesRecorder::<FullPrecisionSettings>::new()
        .record(model.into_record(), ())
        .unwrap()
}

fn from_bytes<M: Module<B>>(model: M, bytes: Vec<u8>, p: &Program) -> M {
    model.load_record(
        BinBytesRecorder::<FullPrecisionSettings>::new()
            .load(bytes, &p.device())
            .unwrap(),
    )
}

fn saved_as_bytes_with_batch_norm(p: &Program) {
    let mut step = p.train(p.normed(), sgd(), |model, x: T2| energy(model.forward(x)));
    let mut saved = Vec::new();
    for call in 0..12 {
        step.step(LR, p.x(call));
        if call % 5 == 3 {
            saved.push(bytes(step.model().clone()));
        }
    }
    for saved in saved {
        let model = from_bytes(p.normed(), saved, p);
        p.look(
            "validation of a saved model",
            &model.valid().forward(p.x(100).inner()),
        );
    }
}

fn saved_and_loaded_into_another(p: &Program) {
    let mut step = p.train(p.normed(), sgd(), |model, x: T2| energy(model.forward(x)));
    for call in 0..6 {
        step.step(LR, p.x(call));
    }
    let other = from_bytes(p.normed(), bytes(step.model().clone()), p);
    let mut other = p.train(other, sgd(), |model, x: T2| energy(model.forward(x)));
    for call in 6..12 {
        step.step(LR, p.x(call));
        other.step(2.0 * LR, p.x(call));
    }
}

fn the_clone_is_trained_on_plainly(p: &Program) {
    let mut step = p.train(p.mlp(), sgd(), |model, x: T2| energy(model.forward(x)));
    for call in 0..5 {
        step.step(LR, p.x(call));
    }
    let (mut copy, mut optim) = (step.model().clone(), sgd());
    for call in 5..10 {
        step.step(LR, p.x(call));
        let loss = energy(copy.forward(p.x(call + 50)));
        p.look("loss of the copy", &loss);
        let gradients = burn_optim::GradientsParams::from_grads(loss.backward(), &copy);
        copy = optim.step(LR, copy, gradients);
    }
    p.look("weight of the copy", &copy.first.weight.val());
}

fn the_optimizer_as_record(p: &Program) {
    let mut step = p.train(p.mlp(), adamw(), |model, x: T2| energy(model.forward(x)));
    for call in 0..12 {
        step.step(LR, p.x(call));
        if call == 5 {
            p.look("records of the optimizer", &step.optimizer().to_record().len());
        }
    }
}

fn the_optimizer_at_every_call(p: &Program) {
    let mut step = p.train(p.mlp(), adamw(), |model, x: T2| energy(model.forward(x)));
    for call in 0..CALLS {
        step.step(LR, p.x(call));
        p.look("records of the optimizer", &step.optimizer().to_record().len());
    }
}

fn a_checkpoint_every_fourth_call(p: &Program) {
    let mut step = p.train(p.mlp(), adamw(), |model, x: T2| energy(model.forward(x)));
    for call in 0..14 {
        step.step(LR, p.x(call));
        if call % 4 == 3 {
            let record = step.model().clone().into_record();
            let optimizer = step.optimizer().to_record();
            p.look("the checkpoint's weight", &record.first.weight.val());
            p.look("records of the optimizer", &optimizer.len());
        }
    }
}

fn validation_and_checkpoint_with_batch_norm(p: &Program) {
    let mut step = p.train(p.normed(), adamw(), |model, x: T2| energy(model.forward(x)));
    for call in 0..16 {
        step.step(LR, p.x(call));
        if call % 3 == 2 {
            p.look("validation", &step.model().valid().forward(p.x(100).inner()));
        }
        if call % 5 == 4 {
            p.look("size of a checkpoint", &bytes(step.model().clone()).len());
            p.look("records of the optimizer", &step.optimizer().to_record().len());
        }
    }
}

fn taken_apart_and_put_together(p: &Program) {
    let mut parts = (p.mlp(), adamw());
    for epoch in 0..3 {
        let mut step = p.train(parts.0, parts.1, |model, x: T2| energy(model.forward(x)));
        for call in 0..5 {
            step.step(LR, p.x(10 * epoch + call));
        }
        parts = step.into_parts();
        p.look("weight", &parts.0.first.weight.val());
    }
}

fn taken_apart_with_batch_norm(p: &Program) {
    let mut parts = (p.normed(), momentum());
    for epoch in 0..3 {
        let mut step = p.train(parts.0, parts.1, |model, x: T2| energy(model.forward(x)));
        for call in 0..5 {
            step.step(LR, p.x(10 * epoch + call));
        }
        parts = step.into_parts();
        p.look("validation", &parts.0.valid().forward(p.x(100).inner()));
    }
}

fn resumed_from_a_checkpoint(p: &Program) {
    let mut step = p.train(p.mlp(), adamw(), |model, x: T2| energy(model.forward(x)));
    for call in 0..6 {
        step.step(LR, p.x(call));
    }
    let record = step.model().clone().into_record();
    let optimizer = step.optimizer().to_record();
    for call in 6..10 {
        step.step(LR, p.x(call));
    }
    let (model, optim) = (p.mlp().load_record(record), adamw().load_record(optimizer));
    let mut again = p.train(model, optim, |model: &Mlp<B>, x: T2| energy(model.forward(x)));
    for call in 6..12 {
        again.step(LR, p.x(call));
    }
}

fn resumed_from_a_checkpoint_with_batch_norm(p: &Program) {
    let mut step = p.train(p.normed(), adamw(), |model, x: T2| energy(model.forward(x)));
    for call in 0..6 {
        step.step(LR, p.x(call));
    }
    let (saved, optimizer) = (bytes(step.model().clone()), step.optimizer().to_record());
    for call in 6..10 {
        step.step(LR, p.x(call));
    }
    let (model, optim) = (from_bytes(p.normed(), saved, p), adamw().load_record(optimizer));
    let mut again = p.train(model, optim, |model: &Normed<B>, x: T2| energy(model.forward(x)));
    for call in 6..12 {
        again.step(LR, p.x(call));
    }
}

fn the_model_moves_to_the_inner_backend_and_back(p: &Program) {
    let mut model = p.normed();
    for epoch in 0..3 {
        let mut step = p.train(model, sgd(), |model, x: T2| energy(model.forward(x)));
        for call in 0..5 {
            step.step(LR, p.x(10 * epoch + call));
        }
        let inner: Normed<Kiln> = step.into_parts().0.valid();
        p.look("validation", &inner.forward(p.x(100).inner()));
        model = Normed::from_inner(inner);
    }
}

fn weights_read_at_every_call(p: &Program) {
    let mut step = p.train(p.mlp(), adamw(), |model, x: T2| energy(model.forward(x)));
    for call in 0..CALLS {
        step.step(LR, p.x(call));
        p.read("first weight", &step.model().first.weight.val());
        p.read("second bias", &step.model().second.bias.as_ref().unwrap().val());
    }
}

fn the_clone_runs_in_training_mode(p: &Program) {
    // A copy shares its running statistics: its forward pass moves those of the model in training.
    let mut step = p.train(p.normed(), sgd(), |model, x: T2| energy(model.forward(x)));
    for call in 0..10 {
        step.step(LR, p.x(call));
        if call == 5 {
            let copy = step.model().clone();
            p.look("output of the copy", &copy.forward(p.x(200)));
        }
    }
    p.look("validation", &step.model().valid().forward(p.x(100).inner()));
}

fn a_clone_from_before_runs_in_training_mode(p: &Program) {
    let model = p.normed();
    let copy = model.clone();
    let mut step = p.train(model, sgd(), |model, x: T2| energy(model.forward(x)));
    for call in 0..14 {
        step.step(LR, p.x(call));
        if call == 6 {
            p.look("output of the copy", &copy.forward(p.x(200)));
        }
    }
    p.look("validation", &step.model().valid().forward(p.x(100).inner()));
}

/// The copy that was kept as the best so far has the statistics of its time. The program then moves those of
/// the model, by passes in training mode.
fn statistics_move_while_a_copy_has_the_old_ones(p: &Program) {
    let mut step = p.train(p.normed(), sgd(), |model, x: T2| energy(model.forward(x)));
    let mut kept = None;
    for call in 0..12 {
        step.step(LR, p.x(call));
        if call == 5 {
            kept = Some(step.model().valid());
            p.look("output in training mode", &step.model().forward(p.x(200) * 100.0));
        }
        if let Some(kept) = &kept {
            p.look("the mean that was kept", &kept.norm.running_mean.value_sync());
            p.look("the variance that was kept", &kept.norm.running_var.value_sync());
            p.look("the mean", &step.model().valid().norm.running_mean.value_sync());
        }
    }
    p.look("validation", &step.model().valid().forward(p.x(100).inner()));
}

fn statistics_move_between_batches_of_two_sizes(p: &Program) {
    let mut step = p.train(p.normed(), sgd(), |model, x: T2| energy(model.forward(x)));
    let mut kept = Vec::new();
    for call in 0..16 {
        let x = p.x(call);
        let x = if call % 2 == 0 {
            x
        } else {
            x.narrow(0, 0, EXAMPLES - 1)
        };
        step.step(LR, x);
        if call == 8 || call == 11 {
            kept.push(step.model().valid());
            p.look("output in training mode", &step.model().forward(p.x(200) * 100.0));
        }
        for kept in &kept {
            p.look("the mean that was kept", &kept.norm.running_mean.value_sync());
        }
    }
    p.look("validation", &step.model().valid().forward(p.x(100).inner()));
}

fn statistics_are_put_back_while_a_record_has_later_ones(p: &Program) {
    let mut step = p.train(p.normed(), sgd(), |model, x: T2| energy(model.forward(x)));
    let (mut early, mut late) = (None, None);
    for call in 0..16 {
        step.step(LR, p.x(call));
        match call {
            4 => early = Some(step.model().clone().into_record()),
            9 => {
                late = Some(step.model().valid());
                // The parameters are those of the clone, the statistics those of all clones.
                early
                    .take()
                    .into_iter()
                    .for_each(|record| drop(step.model().clone().load_record(record)));
            }
            _ => {}
        }
        if let Some(late) = &late {
            p.look("later statistics", &late.norm.running_mean.value_sync());
        }
    }
    p.look("validation", &step.model().valid().forward(p.x(100).inner()));
}
