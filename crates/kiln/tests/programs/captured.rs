//! What the closure has besides its input: tensors kept in cells, captured networks and numbers, values
//! read on the host.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use burn::module::AutodiffModule;
use burn::tensor::backend::Backend;
use burn::tensor::{Distribution, Tensor};
use kiln::Kiln;

use crate::models::*;
use crate::program::{B, CALLS, Program};
use crate::programs;

programs! {
    a_captured_constant => Replayed,
    a_captured_constant_that_the_program_reads => Replayed,
    a_centre_in_a_cell => Any,
    a_centre_in_a_cell_kept_outside => Any,
    a_centre_in_a_cell_that_is_replaced => Any,
    a_centre_that_only_the_program_replaces => Any,
    a_memory_of_the_last_logits => Any,
    a_list_of_losses_in_a_cell => Any,
    a_captured_teacher => Replayed,
    a_teacher_with_batch_norm => Replayed,
    an_exchanged_target_network => Any,
    a_target_network_exchanged_once => Noticed(7),
    a_number_in_a_cell_that_never_changes => Replayed,
    a_number_in_a_cell_that_changes => Noticed(6),
    a_number_in_a_cell_that_changes_at_every_call => Recorded,
    a_branch_on_a_counter => Noticed(6),
    a_scale_read_from_the_batch => Recorded,
    a_mask_from_lengths_read_on_the_host => Recorded,
    a_branch_on_a_value_of_the_batch => Recorded,
    a_weight_read_on_the_host => Recorded,
    the_loss_printed_in_the_closure => Recorded,
    data_made_from_a_counter => Recorded,
    noise_drawn_in_the_closure => Replayed,
    the_same_noise_twice => Recorded,
    a_log_of_shapes => Replayed,
    a_captured_tensor_that_is_dropped => Any,
}

fn a_captured_constant(p: &Program) {
    let centre = p.waves(7, [CLASSES]);
    let mut step = p.train(p.mlp(), sgd(), |model, x: T2| {
        energy(model.forward(x) - centre.clone().unsqueeze())
    });
    for call in 0..CALLS {
        step.step(LR, p.x(call));
    }
}

fn a_captured_constant_that_the_program_reads(p: &Program) {
    let centre = p.waves(7, [CLASSES]);
    let mut step = p.train(p.mlp(), sgd(), |model, x: T2| {
        energy(model.forward(x) - centre.clone().unsqueeze())
    });
    for call in 0..CALLS {
        step.step(LR, p.x(call));
        p.read("the centre", &centre);
    }
}

/// Follows the mean of the outputs in a cell.
fn centred(model: &Mlp<B>, x: T2, centre: &RefCell<T1>) -> T1 {
    let out = model.forward(x);
    let mean = out.clone().mean_dim(0).squeeze_dim::<1>(0).detach();
    let old = centre.borrow().clone();
    *centre.borrow_mut() = old.clone() * 0.9 + mean * 0.1;
    energy(out - old.unsqueeze())
}

fn a_centre_in_a_cell(p: &Program) {
    let centre = RefCell::new(T1::zeros([CLASSES], &p.device()));
    let mut step = p.train(p.mlp(), sgd(), |model, x: T2| centred(model, x, &centre));
    for call in 0..12 {
        step.step(LR, p.x(call));
        p.look("the centre", &*centre.borrow());
    }
}

fn a_centre_in_a_cell_kept_outside(p: &Program) {
    let centre = Rc::new(RefCell::new(T1::zeros([CLASSES], &p.device())));
    let shared = centre.clone();
    let mut step = p.train(p.mlp(), sgd(), move |model: &Mlp<B>, x: T2| {
        centred(model, x, &shared)
    });
    let mut kept = Vec::new();
    for call in 0..12 {
        step.step(LR, p.x(call));
        kept.push(centre.borrow().clone());
    }
    p.read("all centres", &kept);
}

fn a_centre_in_a_cell_that_is_replaced(p: &Program) {
    let centre = RefCell::new(T1::zeros([CLASSES], &p.device()));
    let mut step = p.train(p.mlp(), sgd(), |model, x: T2| centred(model, x, &centre));
    for call in 0..12 {
        if call == 6 {
            *centre.borrow_mut() = T1::ones([CLASSES], &p.device());
        }
        step.step(LR, p.x(call));
    }
    p.read("the centre", &*centre.borrow());
}

fn a_centre_that_only_the_program_replaces(p: &Program) {
    let centre = RefCell::new(p.waves(0, [CLASSES]));
    let mut step = p.train(p.mlp(), sgd(), |model: &Mlp<B>, x: T2| {
        energy(model.forward(x) - centre.borrow().clone().unsqueeze())
    });
    for call in 0..10 {
        *centre.borrow_mut() = p.waves(call, [CLASSES]);
        step.step(LR, p.x(call));
    }
}

fn a_memory_of_the_last_logits(p: &Program) {
    let memory = RefCell::new(T2::zeros([EXAMPLES, CLASSES], &p.device()));
    let mut step = p.train(p.mlp(), sgd(), |model: &Mlp<B>, x: T2| {
        let out = model.forward(x);
        let last = memory.replace(out.clone().detach());
        mse(out, last * 0.5)
    });
    for call in 0..10 {
        step.step(LR, p.x(call));
    }
    p.read("the memory", &*memory.borrow());
}

fn a_list_of_losses_in_a_cell(p: &Program) {
    let losses = RefCell::new(Vec::<T1>::new());
    let mut step = p.train(p.mlp(), sgd(), |model: &Mlp<B>, x: T2| {
        let loss = energy(model.forward(x));
        losses.borrow_mut().push(loss.clone().detach());
        loss
    });
    for call in 0..6 {
        step.step(LR, p.x(call));
    }
    // Nothing is replayed that would have had to push.
    p.read("the last loss in the list", losses.borrow().last().unwrap());
}

fn a_captured_teacher(p: &Program) {
    let teacher = p.mlp().valid();
    let mut step = p.train(p.mlp(), adamw(), |model: &Mlp<B>, x: T2| {
        let target = T2::from_inner(teacher.forward(x.clone().inner()));
        mse(model.forward(x), target)
    });
    for call in 0..CALLS {
        step.step(LR, p.x(call));
    }
}

fn a_teacher_with_batch_norm(p: &Program) {
    let teacher = p.normed().valid();
    let mut step = p.train(p.normed(), adamw(), |model: &Normed<B>, x: T2| {
        let target = T2::from_inner(teacher.forward(x.clone().inner()));
        mse(model.forward(x), target)
    });
    for call in 0..CALLS {
        step.step(LR, p.x(call));
    }
}

fn an_exchanged_target_network(p: &Program) {
    // As in Q-learning: the target becomes the model after every call.
    let target = RefCell::new(p.mlp().valid());
    let mut step = p.train(p.mlp(), sgd(), |model: &Mlp<B>, x: T2| {
        let target = T2::from_inner(target.borrow().forward(x.clone().inner()));
        mse(model.forward(x), target * 0.9 + 0.1)
    });
    for call in 0..10 {
        step.step(LR, p.x(call));
        let model: Mlp<Kiln> = step.model().valid();
        *target.borrow_mut() = model;
    }
}

fn a_target_network_exchanged_once(p: &Program) {
    let target = RefCell::new(p.mlp().valid());
    let mut step = p.train(p.mlp(), sgd(), |model: &Mlp<B>, x: T2| {
        let target = T2::from_inner(target.borrow().forward(x.clone().inner()));
        mse(model.forward(x), target * 0.9 + 0.1)
    });
    // Kept alive, so that nothing but a proof can see that the closure has another one.
    let first = target.borrow().clone();
    let other = p.mlp().valid();
    for call in 0..12 {
        if call == 6 {
            *target.borrow_mut() = other.clone();
        }
        step.step(LR, p.x(call));
    }
    drop(first);
}

fn a_number_in_a_cell_that_never_changes(p: &Program) {
    let factor = Cell::new(0.5);
    let mut step = p.train(p.mlp(), sgd(), |model, x: T2| {
        energy(model.forward(x)) * factor.get()
    });
    for call in 0..CALLS {
        step.step(LR, p.x(call));
    }
}

fn a_number_in_a_cell_that_changes(p: &Program) {
    let factor = Cell::new(0.5);
    let mut step = p.train(p.mlp(), sgd(), |model, x: T2| {
        energy(model.forward(x)) * factor.get()
    });
    for call in 0..12 {
        if call == 5 {
            factor.set(2.0);
        }
        step.step(LR, p.x(call));
    }
}

fn a_number_in_a_cell_that_changes_at_every_call(p: &Program) {
    let factor = Cell::new(0.5);
    let mut step = p.train(p.mlp(), sgd(), |model, x: T2| {
        energy(model.forward(x)) * factor.get()
    });
    for call in 0..CALLS {
        factor.set(factor.get() + 0.1);
        step.step(LR, p.x(call));
    }
}

fn a_branch_on_a_counter(p: &Program) {
    let calls = Cell::new(0);
    let mut step = p.train(p.mlp(), sgd(), |model, x: T2| {
        let out = model.forward(x);
        if calls.get() < 5 {
            energy(out)
        } else {
            out.abs().mean()
        }
    });
    for call in 0..12 {
        calls.set(call);
        step.step(LR, p.x(call));
    }
}

fn a_scale_read_from_the_batch(p: &Program) {
    let mut step = p.train(p.mlp(), sgd(), |model, x: T2| {
        let scale = x.clone().abs().max().into_scalar();
        energy(model.forward(x / scale))
    });
    for call in 0..CALLS {
        step.step(LR, p.x(call) * (1.0 + call as f32));
    }
}

fn a_mask_from_lengths_read_on_the_host(p: &Program) {
    let device = p.device();
    let mut step = p.train(p.mlp(), sgd(), |model, (x, lengths): (T2, I1)| {
        let longest = lengths.into_data().iter::<i64>().max().unwrap_or(0) as usize + 1;
        let mask = T2::ones([longest, CLASSES], &device).pad((0, 0, 0, EXAMPLES - longest), 0.0);
        energy(model.forward(x) * mask)
    });
    for call in 0..CALLS {
        step.step(LR, (p.x(call), p.indices(call, [2], EXAMPLES)));
    }
}

fn a_branch_on_a_value_of_the_batch(p: &Program) {
    let mut step = p.train(p.mlp(), sgd(), |model, x: T2| {
        let positive = x.clone().sum().into_scalar() > 0.0;
        let out = model.forward(x);
        if positive { energy(out) } else { out.abs().mean() }
    });
    for call in 0..CALLS {
        step.step(LR, p.x(call) + (call as f32 - 4.0) * 0.3);
    }
}

fn a_weight_read_on_the_host(p: &Program) {
    let mut step = p.train(p.mlp(), sgd(), |model: &Mlp<B>, x: T2| {
        let norm = model.first.weight.val().powf_scalar(2.0).sum().into_scalar();
        energy(model.forward(x)) / norm.max(1.0)
    });
    for call in 0..CALLS {
        step.step(LR, p.x(call));
    }
}

fn the_loss_printed_in_the_closure(p: &Program) {
    let seen = Cell::new(0.0);
    let mut step = p.train(p.mlp(), sgd(), |model, x: T2| {
        let loss = energy(model.forward(x));
        seen.set(loss.clone().into_scalar());
        loss
    });
    for call in 0..CALLS {
        step.step(LR, p.x(call));
        p.look("the printed loss", &seen.get());
    }
}

fn data_made_from_a_counter(p: &Program) {
    let (calls, device) = (Cell::new(0.0f32), p.device());
    let mut step = p.train(p.mlp(), sgd(), |model, x: T2| {
        calls.set(calls.get() + 1.0);
        energy(model.forward(x)) * T1::from_floats([calls.get()], &device)
    });
    for call in 0..CALLS {
        step.step(0.1 * LR, p.x(call));
    }
}

fn noise_drawn_in_the_closure(p: &Program) {
    let mut step = p.train(p.mlp(), sgd(), |model, x: T2| {
        let noise = Tensor::random(x.dims(), Distribution::Normal(0.0, 0.1), &x.device());
        energy(model.forward(x + noise))
    });
    for call in 0..CALLS {
        step.step(LR, p.x(call));
    }
}

fn the_same_noise_twice(p: &Program) {
    let mut step = p.train(p.mlp(), sgd(), |model: &Mlp<B>, x: T2| {
        let noisy = |scale: f64| {
            <B as Backend>::seed(&x.device(), 7);
            let noise = Tensor::random(x.dims(), Distribution::Normal(0.0, scale), &x.device());
            model.forward(x.clone() + noise)
        };
        mse(noisy(0.1), noisy(0.2))
    });
    for call in 0..CALLS {
        step.step(LR, p.x(call));
    }
}

fn a_log_of_shapes(p: &Program) {
    let shapes = RefCell::new(Vec::new());
    let mut step = p.train(p.mlp(), sgd(), |model, x: T2| {
        shapes.borrow_mut().push(x.dims());
        energy(model.forward(x))
    });
    for call in 0..CALLS {
        step.step(LR, p.x(call));
    }
}

fn a_captured_tensor_that_is_dropped(p: &Program) {
    let extra = RefCell::new(Some(p.waves(3, [CLASSES])));
    let mut step = p.train(p.mlp(), sgd(), |model, x: T2| {
        let out = model.forward(x);
        match &*extra.borrow() {
            Some(extra) => energy(out - extra.clone().unsqueeze()),
            None => energy(out),
        }
    });
    for call in 0..10 {
        if call == 6 {
            extra.borrow_mut().take();
        }
        step.step(LR, p.x(call));
    }
}
