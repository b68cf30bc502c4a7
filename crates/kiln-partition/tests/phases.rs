//! Phases are found in every shape of training step.
//!
//! The tape knows when it recorded what, so the expected phase of a node is the one it was recorded in.

mod support;

use kiln_graph::op::{BinaryOp, Op, UnaryOp};
use kiln_graph::{DType, Graph, Node, Phase, Value};
use kiln_partition::find_phases;
use support::{Sizes, Tape, apply, decoder, f32s, perceptron, squared};

/// A tape with notes of the phase in which each node was recorded.
struct Recording {
    tape: Tape,
    phases: Vec<Phase>,
}

impl Recording {
    fn new() -> Self {
        Self {
            tape: Tape::new("step"),
            phases: Vec::new(),
        }
    }

    fn record<T>(&mut self, phase: Phase, what: impl FnOnce(&mut Tape) -> T) -> T {
        let result = what(&mut self.tape);
        self.phases.resize(self.tape.graph.num_nodes(), phase);
        result
    }

    fn forward<T>(&mut self, what: impl FnOnce(&mut Tape) -> T) -> T {
        self.record(Phase::Forward, what)
    }

    fn backward(&mut self, loss: Value, weights: &[Value]) -> Vec<Value> {
        self.record(Phase::Backward, |tape| tape.backward(loss, weights))
    }

    fn update(&mut self, weights: &[Value], gradients: &[Value]) {
        self.record(Phase::Optimizer, |tape| {
            let rate = tape.graph.scalar(DType::F32);
            weights
                .iter()
                .zip(gradients)
                .for_each(|(&weight, &gradient)| tape.adam(weight, gradient, rate));
        });
    }

    /// Live nodes with operands whose phase is not the one they were recorded in.
    fn wrong(&self) -> Vec<String> {
        let graph = &self.tape.graph;
        let phases = find_phases(graph);
        let live = graph.live_nodes();
        let real = graph
            .nodes()
            .filter(|(node, data)| live[*node] && !data.inputs.is_empty());
        // A constant that is repeated belongs to whoever uses it.
        let real = real.filter(|(_, data)| {
            !matches!(data.op, Op::Broadcast { .. })
                || data.inputs.iter().any(|&v| !graph.def(v).inputs.is_empty())
        });
        real.filter(|(node, _)| phases[*node] != self.phases[node.as_u32() as usize])
            .map(|(node, data)| format!("{} is {}", graph.node_text(data), phases[node]))
            .collect()
    }

    fn check(&self) {
        assert_eq!(self.wrong(), Vec::<String>::new(), "{}", self.tape.graph);
    }
}

#[test]
fn one_loss_with_adam() {
    let mut r = Recording::new();
    let loss = r.forward(|tape| {
        decoder(
            tape,
            Sizes {
                layers: 1,
                ..Sizes::SMALL
            },
        )
    });
    let weights = r.tape.parameters.clone();
    let gradients = r.backward(loss, &weights);
    r.update(&weights, &gradients);
    r.tape.graph.output(loss, None);
    r.check();
}

#[test]
fn a_loss_that_nobody_returns() {
    let mut r = Recording::new();
    let x = r.forward(|tape| tape.input(f32s(&[3, 4])));
    let loss = r.forward(|tape| {
        let y = perceptron(tape, x);
        squared(tape, y)
    });
    let weights = r.tape.parameters.clone();
    let gradients = r.backward(loss, &weights);
    r.update(&weights, &gradients);
    r.check();
}

#[test]
fn two_losses_with_auxiliary_outputs_and_a_metric_computed_last() {
    let mut r = Recording::new();
    let x = r.forward(|tape| tape.input(f32s(&[3, 4])));
    let (features, first) = r.forward(|tape| {
        let y = perceptron(tape, x);
        (y, squared(tape, y))
    });
    let second = r.forward(|tape| {
        let y = tape.unary(UnaryOp::Sigmoid, features);
        let y = tape.linear(y, 4, 2);
        squared(tape, y)
    });
    let weights = r.tape.parameters.clone();
    let a = r.backward(first, &weights[..4]);
    let b = r.backward(second, &weights);
    let gradients: Vec<Value> = r.record(Phase::Backward, |tape| {
        let shared = a
            .iter()
            .zip(&b)
            .map(|(&a, &b)| tape.binary(BinaryOp::Add, a, b))
            .collect::<Vec<_>>();
        shared.into_iter().chain(b[4..].iter().copied()).collect()
    });
    r.update(&weights, &gradients);
    let metric = r.forward(|tape| {
        let y = tape.unary(UnaryOp::Abs, features);
        tape.mean(y)
    });
    for output in [features, first, second, metric] {
        r.tape.graph.output(output, None);
    }
    r.check();
}

#[test]
fn micro_batches_accumulate() {
    let mut r = Recording::new();
    let mut total: Vec<Value> = Vec::new();
    let mut weights = Vec::new();
    for micro in 0..3 {
        let loss = r.forward(|tape| {
            let x = tape.input(f32s(&[3, 4]));
            let y = if micro == 0 {
                perceptron(tape, x)
            } else {
                apply(tape, x, &weights)
            };
            squared(tape, y)
        });
        weights = r.tape.parameters.clone();
        let gradients = r.backward(loss, &weights);
        total = r.record(Phase::Backward, |tape| {
            if total.is_empty() {
                return gradients;
            }
            total
                .iter()
                .zip(gradients)
                .map(|(&a, b)| tape.binary(BinaryOp::Add, a, b))
                .collect()
        });
        r.tape.graph.output(loss, None);
    }
    r.update(&weights, &total);
    r.check();
}

#[test]
fn scaled_loss_and_clipping_by_global_norm() {
    let mut r = Recording::new();
    let x = r.forward(|tape| tape.input(f32s(&[3, 4])));
    let loss = r.forward(|tape| {
        let y = perceptron(tape, x);
        let loss = squared(tape, y);
        let scale = tape.graph.scalar(DType::F32);
        (loss, tape.binary(BinaryOp::Mul, loss, scale))
    });
    let weights = r.tape.parameters.clone();
    let gradients = r.backward(loss.1, &weights);
    let clipped: Vec<Value> = r.record(Phase::Optimizer, |tape| {
        let inverse = tape.graph.scalar(DType::F32);
        let gradients: Vec<Value> = gradients
            .iter()
            .map(|&gradient| {
                let shape = tape.shape(gradient);
                let inverse = tape.add(
                    Op::Broadcast {
                        shape,
                        dims: Default::default(),
                    },
                    &[inverse],
                );
                tape.binary(BinaryOp::Mul, gradient, inverse)
            })
            .collect();
        let norms: Vec<Value> = gradients
            .iter()
            .map(|&gradient| {
                let square = tape.binary(BinaryOp::Mul, gradient, gradient);
                let axes: Vec<usize> = (0..tape.shape(gradient).rank()).collect();
                tape.sum(square, &axes)
            })
            .collect();
        let norm = norms
            .into_iter()
            .reduce(|a, b| tape.binary(BinaryOp::Add, a, b))
            .expect("weights");
        let factor = tape.unary(UnaryOp::Rsqrt, norm);
        gradients
            .into_iter()
            .map(|gradient| {
                let shape = tape.shape(gradient);
                let factor = tape.add(
                    Op::Broadcast {
                        shape,
                        dims: Default::default(),
                    },
                    &[factor],
                );
                tape.binary(BinaryOp::Mul, gradient, factor)
            })
            .collect()
    });
    r.update(&weights, &clipped);
    r.tape.graph.output(loss.0, None);
    r.check();
}

#[test]
fn running_statistics_are_forward() {
    let mut r = Recording::new();
    let (x, running) = r.forward(|tape| (tape.input(f32s(&[3, 4])), tape.input(f32s(&[4]))));
    let (loss, statistic) = r.forward(|tape| {
        let y = tape.linear(x, 4, 4);
        let mean = tape.sum(y, &[0]);
        let mean = tape.scale(mean, 1.0 / 3.0);
        let old = tape.scale(running, 0.9);
        let new = tape.scale(mean, 0.1);
        let statistic = tape.binary(BinaryOp::Add, old, new);
        let mean = tape.rows(mean, y);
        let y = tape.binary(BinaryOp::Sub, y, mean);
        (squared(tape, y), statistic)
    });
    let weights = r.tape.parameters.clone();
    let gradients = r.backward(loss, &weights);
    r.update(&weights, &gradients);
    r.tape.state(running, statistic);
    r.tape.graph.output(loss, None);
    r.check();
    // Also from the outputs alone.
    strip(&mut r.tape.graph);
    let wrong = r.wrong();
    assert!(
        wrong
            .iter()
            .all(|text| !text.ends_with(" is fwd") && !text.contains("-")),
        "{wrong:#?}"
    );
    let phases = find_phases(&r.tape.graph);
    assert_eq!(phases[r.tape.graph.value(statistic).node], Phase::Forward);
}

/// Forgets what was recorded, so that only structure is left.
fn strip(graph: &mut Graph) {
    for index in 0..graph.num_nodes() {
        graph.provenance_mut(Node::from_u32(index as u32)).operation = None;
    }
}

/// Two models trained against each other: the critic is updated first, and the generator's loss goes through
/// the updated one.
#[test]
fn two_backward_passes_with_an_update_between() {
    let mut r = Recording::new();
    let (noise, real) = r.forward(|tape| (tape.input(f32s(&[3, 4])), tape.input(f32s(&[3, 4]))));
    let fake = r.forward(|tape| perceptron(tape, noise));
    let generator = r.tape.parameters.clone();
    let critic_loss = r.forward(|tape| {
        let on_real = perceptron(tape, real);
        let critic: Vec<Value> = tape.parameters[4..].to_vec();
        let on_fake = apply(tape, fake, &critic);
        let difference = tape.binary(BinaryOp::Sub, on_fake, on_real);
        squared(tape, difference)
    });
    let critic: Vec<Value> = r.tape.parameters[4..].to_vec();
    let gradients = r.backward(critic_loss, &critic);
    let before = r.tape.graph.outputs.len();
    r.update(&critic, &gradients);
    let updated: Vec<Value> = r.tape.graph.outputs[before..]
        .iter()
        .step_by(3)
        .map(|output| output.value)
        .collect();
    r.tape.detached.clone_from(&updated);
    let generator_loss = r.forward(|tape| {
        let score = apply(tape, fake, &updated);
        let score = tape.unary(UnaryOp::Sigmoid, score);
        tape.mean(score)
    });
    let gradients = r.backward(generator_loss, &generator);
    r.update(&generator, &gradients);
    r.tape.graph.output(critic_loss, None);
    r.tape.graph.output(generator_loss, None);
    r.check();
}

/// Programs that compile a loop of their own record several updates. What one made is the state of the next.
#[test]
fn several_updates_in_one_recording() {
    for adam in [false, true] {
        let mut r = Recording::new();
        let mut state: Vec<[Value; 3]> = Vec::new();
        let mut old = Vec::new();
        let rate = r.tape.graph.scalar(DType::F32);
        for batch in 0..3 {
            let x = r.forward(|tape| tape.input(f32s(&[3, 4])));
            let loss = r.forward(|tape| {
                let y = match batch {
                    0 => perceptron(tape, x),
                    _ => {
                        let weights: Vec<Value> = state.iter().map(|&[weight, ..]| weight).collect();
                        tape.detached.clone_from(&weights);
                        apply(tape, x, &weights)
                    }
                };
                squared(tape, y)
            });
            if batch == 0 {
                for weight in r.tape.parameters.clone() {
                    let ty = r.tape.graph.ty(weight).clone();
                    state.push(r.forward(|tape| [weight, tape.input(ty.clone()), tape.input(ty)]));
                }
                old.clone_from(&state);
            }
            let weights: Vec<Value> = state.iter().map(|&[weight, ..]| weight).collect();
            let gradients = r.backward(loss, &weights);
            state = r.record(Phase::Optimizer, |tape| {
                let updates = state.iter().zip(gradients);
                updates
                    .map(|(&[weight, first, second], gradient)| {
                        if adam {
                            return tape.adam_from([weight, first, second], gradient, rate);
                        }
                        let step = tape.scale(gradient, 0.1);
                        [tape.binary(BinaryOp::Sub, weight, step), first, second]
                    })
                    .collect()
            });
            r.tape.graph.output(loss, None);
        }
        for (old, new) in old.iter().zip(&state) {
            for at in 0..if adam { 3 } else { 1 } {
                r.tape.state(old[at], new[at]);
            }
        }
        r.check();
    }
}
