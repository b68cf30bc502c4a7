//! Training steps of small models, as joint graphs.

use kiln_graph::op::{BinaryOp, Dims, Op, UnaryOp};
use kiln_graph::{DType, Shape, TensorType, Value};

use super::{Tape, f32s};

/// A two-layer perceptron; returns its output.
pub fn perceptron(tape: &mut Tape, x: Value) -> Value {
    let h = tape.linear(x, 4, 6);
    let h = tape.unary(UnaryOp::Tanh, h);
    tape.linear(h, 6, 4)
}

/// Mean of squares.
pub fn squared(tape: &mut Tape, x: Value) -> Value {
    let square = tape.binary(BinaryOp::Mul, x, x);
    tape.mean(square)
}

/// The layers of [`perceptron`] with given weights.
pub fn apply(tape: &mut Tape, x: Value, weights: &[Value]) -> Value {
    let layer = |tape: &mut Tape, x: Value, w: Value, b: Value| {
        let y = tape.matmul(x, w);
        let b = tape.rows(b, y);
        tape.binary(BinaryOp::Add, y, b)
    };
    let h = layer(tape, x, weights[0], weights[1]);
    let h = tape.unary(UnaryOp::Tanh, h);
    layer(tape, h, weights[2], weights[3])
}

/// Adam on several weights.
fn adam_all(tape: &mut Tape, weights: &[Value], gradients: &[Value]) {
    let rate = tape.graph.scalar(DType::F32);
    weights
        .iter()
        .zip(gradients)
        .for_each(|(&weight, &gradient)| tape.adam(weight, gradient, rate));
}

/// A generator and a critic: the critic is updated, then the generator through the updated critic.
pub fn adversarial_step() -> Tape {
    let mut tape = Tape::new("adversarial");
    let (noise, real) = (tape.input(f32s(&[3, 4])), tape.input(f32s(&[3, 4])));
    let fake = perceptron(&mut tape, noise);
    let on_real = perceptron(&mut tape, real);
    let (generator, critic) = (tape.parameters[..4].to_vec(), tape.parameters[4..].to_vec());
    let on_fake = apply(&mut tape, fake, &critic);
    let difference = tape.binary(BinaryOp::Sub, on_fake, on_real);
    let critic_loss = squared(&mut tape, difference);
    let gradients = tape.backward(critic_loss, &critic);
    adam_all(&mut tape, &critic, &gradients);
    let updated: Vec<Value> = tape
        .graph
        .outputs
        .iter()
        .step_by(3)
        .map(|output| output.value)
        .collect();
    tape.detached.clone_from(&updated);
    let score = apply(&mut tape, fake, &updated);
    let score = tape.unary(UnaryOp::Sigmoid, score);
    let generator_loss = tape.mean(score);
    let gradients = tape.backward(generator_loss, &generator);
    adam_all(&mut tape, &generator, &gradients);
    tape.graph.output(critic_loss, None);
    tape.graph.output(generator_loss, None);
    tape
}

/// Three micro-batches, their gradients added up, one update.
pub fn accumulating_step() -> Tape {
    let mut tape = Tape::new("accumulating");
    let mut total: Vec<Value> = Vec::new();
    for _ in 0..3 {
        let x = tape.input(f32s(&[3, 4]));
        let weights = tape.parameters.clone();
        let y = if weights.is_empty() {
            perceptron(&mut tape, x)
        } else {
            apply(&mut tape, x, &weights)
        };
        let loss = squared(&mut tape, y);
        let weights = tape.parameters.clone();
        let gradients = tape.backward(loss, &weights);
        total = match total.is_empty() {
            true => gradients,
            false => total
                .iter()
                .zip(gradients)
                .map(|(&a, b)| tape.binary(BinaryOp::Add, a, b))
                .collect(),
        };
        tape.graph.output(loss, None);
    }
    let weights = tape.parameters.clone();
    adam_all(&mut tape, &weights, &total);
    tape
}

/// Three batches, and an update after each: what a program does that compiles a loop of its own.
pub fn repeated_step() -> Tape {
    let mut tape = Tape::new("repeated");
    let x = tape.input(f32s(&[3, 4]));
    let y = perceptron(&mut tape, x);
    let first = tape.parameters.clone();
    let moments = first.iter().map(|&weight| {
        let ty = tape.graph.ty(weight).clone();
        [tape.input(ty.clone()), tape.input(ty)]
    });
    let moments: Vec<[Value; 2]> = moments.collect();
    let rate = tape.graph.scalar(DType::F32);
    let mut state: Vec<[Value; 3]> = first
        .iter()
        .zip(&moments)
        .map(|(&w, &[m, v])| [w, m, v])
        .collect();
    let old = state.clone();
    let mut y = y;
    for batch in 0..3 {
        let weights: Vec<Value> = state.iter().map(|&[weight, ..]| weight).collect();
        if batch > 0 {
            tape.detached.clone_from(&weights);
            let x = tape.input(f32s(&[3, 4]));
            y = apply(&mut tape, x, &weights);
        }
        let loss = squared(&mut tape, y);
        let gradients = tape.backward(loss, &weights);
        let updates = state.iter().zip(gradients);
        state = updates
            .map(|(&state, gradient)| tape.adam_from(state, gradient, rate))
            .collect();
        tape.graph.output(loss, None);
    }
    for (old, new) in old.into_iter().flatten().zip(state.into_iter().flatten()) {
        tape.state(old, new);
    }
    tape
}

/// Sizes of a decoder.
#[derive(Clone, Copy, Debug)]
pub struct Sizes {
    /// Number of layers.
    pub layers: usize,
    /// Sequences.
    pub batch: usize,
    /// Tokens of a sequence.
    pub length: usize,
    /// Features of a token.
    pub width: usize,
    /// Attention heads; divides `width`.
    pub heads: usize,
    /// Features inside the feed-forward part.
    pub hidden: usize,
    /// Number of tokens.
    pub vocabulary: usize,
    /// One minus the dropout rate; 1 for no dropout.
    pub keep: f64,
}

impl Sizes {
    /// Small enough for the interpreter.
    pub const SMALL: Self = Self {
        layers: 4,
        batch: 2,
        length: 6,
        width: 8,
        heads: 2,
        hidden: 16,
        vocabulary: 12,
        keep: 0.9,
    };
}

/// The forward pass of a pre-norm decoder with dropout; returns the loss.
pub fn decoder(tape: &mut Tape, sizes: Sizes) -> Value {
    use BinaryOp::*;
    let Sizes {
        layers,
        batch,
        length,
        width,
        heads,
        hidden,
        vocabulary,
        keep,
    } = sizes;
    let tokens = tape.input(TensorType::new(DType::I64, [batch * length]));
    let targets = tape.input(f32s(&[batch, length, vocabulary]));
    let table = tape.weight(&[vocabulary, width]);
    let x = tape.add(Op::IndexSelect { axis: 0 }, &[table, tokens]);
    let mut x = tape.add(Op::Reshape(Shape::from([batch, length, width])), &[x]);
    for _ in 0..layers {
        let n = tape.layer_norm(x);
        let split = |tape: &mut Tape, y: Value| {
            let y = tape.add(
                Op::Reshape(Shape::from([batch, length, heads, width / heads])),
                &[y],
            );
            tape.add(Op::Transpose(Dims::from_slice(&[0, 2, 1, 3])), &[y])
        };
        let [q, k, v] = [(); 3].map(|()| {
            let y = tape.linear(n, width, width);
            split(tape, y)
        });
        let k = tape.add(Op::Transpose(Dims::from_slice(&[0, 1, 3, 2])), &[k]);
        let scores = tape.matmul(q, k);
        let scores = tape.scale(scores, 1.0 / ((width / heads) as f64).sqrt());
        let p = tape.softmax(scores);
        let p = if keep < 1.0 { tape.dropout(p, keep) } else { p };
        let o = tape.matmul(p, v);
        let o = tape.add(Op::Transpose(Dims::from_slice(&[0, 2, 1, 3])), &[o]);
        let o = tape.add(Op::Reshape(Shape::from([batch, length, width])), &[o]);
        let o = tape.linear(o, width, width);
        x = tape.binary(Add, x, o);
        let n = tape.layer_norm(x);
        let h = tape.linear(n, width, hidden);
        let h = tape.silu(h);
        let h = tape.linear(h, hidden, width);
        let h = if keep < 1.0 { tape.dropout(h, keep) } else { h };
        x = tape.binary(Add, x, h);
    }
    let n = tape.layer_norm(x);
    let logits = tape.linear(n, width, vocabulary);
    let p = tape.softmax(logits);
    let log = tape.unary(UnaryOp::Log, p);
    let chosen = tape.binary(Mul, log, targets);
    let mean = tape.mean(chosen);
    tape.unary(UnaryOp::Neg, mean)
}

/// A whole step of a decoder: loss, gradients, Adam.
pub fn decoder_step(sizes: Sizes) -> Tape {
    let mut tape = Tape::new("decoder");
    let loss = decoder(&mut tape, sizes);
    let parameters = tape.parameters.clone();
    let gradients = tape.backward(loss, &parameters);
    let rate = tape.graph.scalar(DType::F32);
    for (weight, gradient) in parameters.into_iter().zip(gradients) {
        tape.adam(weight, gradient, rate);
    }
    tape.graph.output(loss, None);
    tape
}
