//! Programs of several threads.

use std::sync::mpsc::channel;
use std::thread;

use burn::module::{AutodiffModule, Module, ModuleMapper, Param};
use burn::tensor::Tensor;
use kiln::Kiln;

use crate::compare::Numbers;
use crate::models::*;
use crate::program::{B, CALLS, Program};
use crate::programs;

programs! {
    outputs_read_by_another_thread => Replayed,
    outputs_read_by_another_thread_while_the_step_goes_on => Replayed,
    batches_made_by_another_thread => Replayed,
    a_model_validated_by_another_thread => Replayed,
    a_model_with_batch_norm_validated_by_another_thread => Replayed,
    a_tensor_from_inside_the_closure_read_elsewhere => Any,
    results_of_a_region_read_by_another_thread => Any,
    another_thread_computes_all_the_while => Replayed,
    threads_drop_what_they_share => Any,
    a_model_made_by_another_thread => Replayed,
    two_threads_average_weights => Replayed,
}

type Inner = Tensor<Kiln, 2>;

fn values(tensor: Inner) -> Numbers {
    Numbers(tensor.into_data().iter::<f64>().collect())
}

fn outputs_read_by_another_thread(p: &Program) {
    let mut step = p.train(p.mlp(), adamw(), |model, x: T2| {
        let out = model.forward(x);
        (energy(out.clone()), out)
    });
    for call in 0..CALLS {
        let (_, out) = step.step(LR, p.x(call));
        let out = out.inner();
        let read = thread::spawn(move || values(out)).join().unwrap();
        p.look("read by another thread", &read);
    }
}

fn outputs_read_by_another_thread_while_the_step_goes_on(p: &Program) {
    let mut step = p.train(p.mlp(), adamw(), |model: &Mlp<B>, x: T2| {
        let out = model.forward(x.clone());
        (energy(out.clone()), (out, model.second.weight.val(), x))
    });
    let (send, receive) = channel::<[Inner; 3]>();
    let reader = thread::spawn(move || {
        receive
            .iter()
            .flat_map(|tensors| tensors.map(values))
            .collect::<Vec<_>>()
    });
    for call in 0..12 {
        let (_, (out, weight, x)) = step.step(LR, p.x(call));
        send.send([out.inner(), weight.inner(), x.inner()]).unwrap();
    }
    drop(send);
    p.look("read by another thread", &reader.join().unwrap());
}

fn batches_made_by_another_thread(p: &Program) {
    let (send, receive) = channel::<Inner>();
    let base = p.x(0).inner();
    let maker = thread::spawn(move || {
        for call in 0..CALLS {
            send.send(base.clone() * (call as f32 * 0.2 - 0.7)).unwrap();
        }
    });
    let mut step = p.train(p.mlp(), momentum(), |model, x: T2| energy(model.forward(x)));
    for x in receive {
        step.step(LR, T2::from_inner(x));
    }
    maker.join().unwrap();
}

fn a_model_validated_by_another_thread(p: &Program) {
    let mut step = p.train(p.mlp(), adamw(), |model, x: T2| energy(model.forward(x)));
    let mut readers = Vec::new();
    for call in 0..10 {
        step.step(LR, p.x(call));
        if call % 2 == 1 {
            let (model, x) = (step.model().valid(), p.x(100).inner());
            readers.push(thread::spawn(move || values(model.forward(x))));
        }
    }
    for reader in readers {
        p.look("validation", &reader.join().unwrap());
    }
}

fn a_model_with_batch_norm_validated_by_another_thread(p: &Program) {
    let mut step = p.train(p.normed(), sgd(), |model, x: T2| energy(model.forward(x)));
    let mut readers = Vec::new();
    for call in 0..12 {
        step.step(LR, p.x(call));
        if call % 4 == 3 {
            let (model, x) = (step.model().valid(), p.x(100).inner());
            readers.push(thread::spawn(move || values(model.forward(x))));
        }
    }
    for reader in readers {
        p.look("validation", &reader.join().unwrap());
    }
}

fn a_tensor_from_inside_the_closure_read_elsewhere(p: &Program) {
    // A logger that is sent activations while the step is recorded, and reads them when it can. It keeps them:
    // a closure whose tensors are gone by the end of the call may be replayed, which sends nothing.
    let (send, receive) = channel::<Inner>();
    let logger = thread::spawn(move || {
        let read = receive.iter().map(|tensor| (values(tensor.clone()), tensor));
        let (read, kept): (Vec<_>, Vec<_>) = read.unzip();
        drop(kept);
        read
    });
    let mut step = p.train(p.mlp(), sgd(), move |model: &Mlp<B>, x: T2| {
        let out = model.forward(x);
        send.send(out.clone().inner()).unwrap();
        energy(out)
    });
    for call in 0..6 {
        step.step(LR, p.x(call));
    }
    drop(step);
    p.look("read by the logger", &logger.join().unwrap());
}

fn results_of_a_region_read_by_another_thread(p: &Program) {
    let (send, receive) = channel::<Inner>();
    let logger = thread::spawn(move || receive.iter().map(values).collect::<Vec<_>>());
    let mut region = p.region();
    let model = p.mlp().valid();
    for call in 0..6 {
        let x = p.x(call).inner();
        region.run(|| {
            let out = model.forward(x);
            send.send(out.clone()).unwrap();
            // The logger may come while this is recorded, compiled or run.
            send.send(out.exp()).unwrap();
        });
    }
    drop(send);
    p.look("read by the logger", &logger.join().unwrap());
}

fn another_thread_computes_all_the_while(p: &Program) {
    let base = p.x(50).inner();
    let other = thread::spawn(move || {
        let mut x = base;
        for _ in 0..200 {
            x = x.clone().matmul(x.clone().transpose()).matmul(x).tanh();
        }
        values(x)
    });
    let mut step = p.train(p.normed(), adamw(), |model, x: T2| energy(model.forward(x)));
    for call in 0..CALLS {
        step.step(LR, p.x(call));
    }
    p.look("the other thread's result", &other.join().unwrap());
}

fn threads_drop_what_they_share(p: &Program) {
    // Each thread lets go of a tensor as soon as it has used it, and so does the training.
    let shared: Vec<Inner> = (0..40).map(|number| p.x(number).inner()).collect();
    let other = |number: usize| {
        let shared = shared.clone();
        thread::spawn(move || {
            let made = shared.into_iter().map(|x| x.clone() * number as f32 + x.tanh());
            made.map(values).collect::<Vec<_>>()
        })
    };
    let others = [1, 2, 3].map(other);
    let mut step = p.train(p.mlp(), momentum(), |model, x: T2| energy(model.forward(x)));
    for x in shared {
        step.step(LR, T2::from_inner(x));
    }
    for other in others {
        p.look("made by another thread", &other.join().unwrap());
    }
}

fn a_model_made_by_another_thread(p: &Program) {
    // Parameters that one thread made and another updates.
    let record = p.mlp();
    let model = thread::spawn(move || record.map(&mut Doubled)).join().unwrap();
    let mut step = p.train(model, adamw(), |model, x: T2| energy(model.forward(x)));
    for call in 0..CALLS {
        step.step(LR, p.x(call));
    }
}

/// Twice the parameters.
struct Doubled;

impl ModuleMapper<B> for Doubled {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
        let (id, tensor, mapper) = param.consume();
        let tensor = Tensor::from_inner(tensor.inner() * 2.0).require_grad();
        Param::from_mapped_value(id, tensor, mapper)
    }
}

fn two_threads_average_weights(p: &Program) {
    // Another thread keeps an average of the weights, of which it is sent a copy after each call.
    let (send, receive) = channel::<Inner>();
    let average = thread::spawn(move || {
        let average = receive
            .iter()
            .reduce(|average, weight| average * 0.7 + weight * 0.3);
        values(average.unwrap())
    });
    let mut step = p.train(p.mlp(), adamw(), |model, x: T2| energy(model.forward(x)));
    for call in 0..CALLS {
        step.step(LR, p.x(call));
        send.send(step.model().second.weight.val().inner()).unwrap();
    }
    drop(send);
    p.look("the average", &average.join().unwrap());
}
