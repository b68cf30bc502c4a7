//! Joint graphs of real models: a small reverse-mode engine over `kiln_graph`, layers, and Adam.
//!
//! The tape records forward operations straight into a graph. [`Tape::backward`] adds the gradient of each of them in
//! reverse order, starting from a tensor of ones, which is what an autograd engine under a tracer leaves behind.

#![allow(dead_code, reason = "each test uses a part of it")]

use std::collections::HashMap;

use kiln_graph::op::{BinaryOp, CompareOp, Dims, DotDims, Op, RandomKind, ReduceOp, ScatterMode, UnaryOp};
use kiln_graph::{DType, Graph, HostTensor, Node, Provenance, Scalar, Shape, TensorType, Value};
use kiln_partition::PhaseHints;

pub fn f32s(shape: &[usize]) -> TensorType {
    TensorType::new(DType::F32, shape)
}

pub struct Tape {
    pub graph: Graph,
    pub parameters: Vec<Value>,
    /// Values behind which no gradient goes.
    pub detached: Vec<Value>,
    pub hints: PhaseHints,
}

impl Tape {
    pub fn new(name: &str) -> Self {
        Self {
            graph: Graph::new(name),
            parameters: Vec::new(),
            detached: Vec::new(),
            hints: PhaseHints::default(),
        }
    }

    pub fn add(&mut self, op: Op, inputs: &[Value]) -> Value {
        self.named("", op, inputs)
    }

    pub fn named(&mut self, name: &str, op: Op, inputs: &[Value]) -> Value {
        let provenance = if name.is_empty() {
            Provenance::default()
        } else {
            Provenance::operation(name)
        };
        self.graph
            .add(op, inputs, &provenance)
            .expect("the test's graph is well typed")
    }

    pub fn input(&mut self, ty: TensorType) -> Value {
        self.graph.parameter(ty)
    }

    /// A parameter that is trained.
    pub fn weight(&mut self, shape: &[usize]) -> Value {
        let value = self.graph.parameter(f32s(shape));
        self.parameters.push(value);
        value
    }

    pub fn unary(&mut self, op: UnaryOp, x: Value) -> Value {
        self.add(Op::Unary(op), &[x])
    }

    pub fn binary(&mut self, op: BinaryOp, a: Value, b: Value) -> Value {
        self.add(Op::Binary(op), &[a, b])
    }

    pub fn shape(&self, x: Value) -> Shape {
        self.graph.shape(x).clone()
    }

    pub fn like(&mut self, value: f64, x: Value) -> Value {
        let ty = self.graph.ty(x).clone();
        self.graph
            .full(value, &ty, &Provenance::default())
            .expect("well typed")
    }

    pub fn scale(&mut self, x: Value, by: f64) -> Value {
        let by = self.like(by, x);
        self.binary(BinaryOp::Mul, x, by)
    }

    pub fn sum(&mut self, x: Value, axes: &[usize]) -> Value {
        self.add(
            Op::Reduce {
                op: ReduceOp::Sum,
                axes: axes.into(),
            },
            &[x],
        )
    }

    /// `x`, without `axis`, repeated along it as in `like`.
    pub fn spread(&mut self, x: Value, axis: usize, like: Value) -> Value {
        let shape = self.shape(like);
        let dims: Dims = (0..shape.rank()).filter(|&d| d != axis).collect();
        self.add(Op::Broadcast { shape, dims }, &[x])
    }

    /// A vector along the last dimension, repeated over the others.
    pub fn rows(&mut self, x: Value, like: Value) -> Value {
        let shape = self.shape(like);
        let dims = Dims::from_slice(&[shape.rank() - 1]);
        self.add(Op::Broadcast { shape, dims }, &[x])
    }

    pub fn matmul(&mut self, a: Value, b: Value) -> Value {
        let batch = self.shape(a).rank() - 2;
        self.add(Op::DotGeneral(DotDims::matmul(batch)), &[a, b])
    }

    /// `[.., i] x [i, o]` and a bias.
    pub fn linear(&mut self, x: Value, inputs: usize, outputs: usize) -> Value {
        let w = self.weight(&[inputs, outputs]);
        let b = self.weight(&[outputs]);
        let shape = self.shape(x);
        let rows = shape.numel() / inputs;
        let flat = self.add(Op::Reshape(Shape::from([rows, inputs])), &[x]);
        let y = self.matmul(flat, w);
        let b = self.rows(b, y);
        let y = self.binary(BinaryOp::Add, y, b);
        self.add(Op::Reshape(shape.with(shape.rank() - 1, outputs)), &[y])
    }

    pub fn layer_norm(&mut self, x: Value) -> Value {
        let shape = self.shape(x);
        let last = shape.rank() - 1;
        let n = shape[last] as f64;
        let gamma = self.weight(&[shape[last]]);
        let mean = self.sum(x, &[last]);
        let mean = self.scale(mean, 1.0 / n);
        let mean = self.spread(mean, last, x);
        let centred = self.binary(BinaryOp::Sub, x, mean);
        let square = self.binary(BinaryOp::Mul, centred, centred);
        let variance = self.sum(square, &[last]);
        let variance = self.scale(variance, 1.0 / n);
        let epsilon = self.like(1e-5, variance);
        let variance = self.binary(BinaryOp::Add, variance, epsilon);
        let inverse = self.unary(UnaryOp::Rsqrt, variance);
        let inverse = self.spread(inverse, last, x);
        let normal = self.binary(BinaryOp::Mul, centred, inverse);
        let gamma = self.rows(gamma, x);
        self.binary(BinaryOp::Mul, normal, gamma)
    }

    pub fn softmax(&mut self, x: Value) -> Value {
        let last = self.shape(x).rank() - 1;
        let e = self.unary(UnaryOp::Exp, x);
        let total = self.sum(e, &[last]);
        let total = self.spread(total, last, x);
        self.binary(BinaryOp::Div, e, total)
    }

    /// `x * sigmoid(x)`.
    pub fn silu(&mut self, x: Value) -> Value {
        let s = self.unary(UnaryOp::Sigmoid, x);
        self.binary(BinaryOp::Mul, x, s)
    }

    /// Zeroes elements with probability `1 - keep`, with a mask from the counter-based generator.
    pub fn dropout(&mut self, x: Value, keep: f64) -> Value {
        let seed = self.graph.scalar(DType::U64);
        let stream = self.graph.scalar(DType::U64);
        let shape = self.shape(x);
        let op = Op::Random {
            kind: RandomKind::Uniform,
            dtype: DType::F32,
            shape,
        };
        let noise = self.add(op, &[seed, stream]);
        let threshold = self.like(keep, noise);
        let mask = self.add(Op::Compare(CompareOp::Lt), &[noise, threshold]);
        let zero = self.like(0.0, x);
        let x = self.scale(x, 1.0 / keep);
        self.add(Op::Select, &[mask, x, zero])
    }

    pub fn mean(&mut self, x: Value) -> Value {
        let shape = self.shape(x);
        let axes: Vec<usize> = (0..shape.rank()).collect();
        let total = self.sum(x, &axes);
        self.scale(total, 1.0 / shape.numel() as f64)
    }

    /// Adds the gradient of `loss` (rank 0) with respect to every value of the graph so far, and returns the gradients of
    /// `wanted`.
    pub fn backward(&mut self, loss: Value, wanted: &[Value]) -> Vec<Value> {
        let ty = self.graph.ty(loss).clone();
        let one = self.named(
            "NumericFloat.Ones",
            Op::Constant {
                value: Scalar::Float(1.0),
                dtype: ty.dtype,
            },
            &[],
        );
        self.hints.backward_starts.push(self.graph.value(one).node);
        self.backward_from(&[(loss, one)], wanted)
    }

    /// [`Tape::backward`] from given tangents.
    pub fn backward_from(&mut self, tangents: &[(Value, Value)], wanted: &[Value]) -> Vec<Value> {
        let mut gradients: HashMap<Value, Value> = tangents.iter().copied().collect();
        // Only what lies between the wanted values and the loss.
        let mut useful = vec![false; self.graph.num_values()];
        wanted
            .iter()
            .for_each(|&value| useful[value.as_u32() as usize] = true);
        for (_, data) in self.graph.nodes() {
            let any = data.inputs.iter().any(|value| useful[value.as_u32() as usize]);
            data.outputs
                .iter()
                .filter(|value| !self.detached.contains(value))
                .for_each(|value| useful[value.as_u32() as usize] |= any);
        }
        let last = tangents
            .iter()
            .map(|(value, _)| self.graph.value(*value).node)
            .max()
            .expect("a tangent");
        let nodes: Vec<Node> = self
            .graph
            .nodes()
            .map(|(node, _)| node)
            .filter(|&node| node <= last)
            .collect();
        for node in nodes.into_iter().rev() {
            let data = self.graph.node(node).clone();
            if data.inputs.is_empty() {
                continue;
            }
            let y = data.outputs[0];
            let Some(&dy) = gradients.get(&y) else { continue };
            if !useful[y.as_u32() as usize] {
                continue;
            }
            for (x, dx) in self.pull_back(&data.op, &data.inputs, y, dy, &useful) {
                let total = match gradients.get(&x) {
                    Some(&other) => self.binary(BinaryOp::Add, other, dx),
                    None => dx,
                };
                gradients.insert(x, total);
            }
        }
        wanted
            .iter()
            .map(|value| *gradients.get(value).expect("the loss depends on it"))
            .collect()
    }

    fn pull_back(
        &mut self,
        op: &Op,
        inputs: &[Value],
        y: Value,
        dy: Value,
        useful: &[bool],
    ) -> Vec<(Value, Value)> {
        use BinaryOp::*;
        let needs = |value: Value| useful[value.as_u32() as usize];
        let x = inputs.first().copied().unwrap_or(y);
        let mut out = Vec::new();
        match op {
            Op::Binary(Add) => out.extend([(inputs[0], dy), (inputs[1], dy)]),
            Op::Binary(Sub) => {
                out.push((inputs[0], dy));
                if needs(inputs[1]) {
                    out.push((inputs[1], self.unary(UnaryOp::Neg, dy)));
                }
            }
            Op::Binary(Mul) => {
                for (x, other) in [(inputs[0], inputs[1]), (inputs[1], inputs[0])] {
                    if needs(x) {
                        out.push((x, self.binary(Mul, dy, other)));
                    }
                }
            }
            Op::Binary(Div) => {
                out.push((inputs[0], self.binary(Div, dy, inputs[1])));
                if needs(inputs[1]) {
                    let quotient = self.binary(Div, y, inputs[1]);
                    let product = self.binary(Mul, dy, quotient);
                    out.push((inputs[1], self.unary(UnaryOp::Neg, product)));
                }
            }
            Op::Unary(UnaryOp::Exp) => out.push((x, self.binary(Mul, dy, y))),
            Op::Unary(UnaryOp::Log) => out.push((x, self.binary(Div, dy, x))),
            Op::Unary(UnaryOp::Neg) => out.push((x, self.unary(UnaryOp::Neg, dy))),
            Op::Unary(UnaryOp::Tanh) => {
                let square = self.binary(Mul, y, y);
                let one = self.like(1.0, y);
                let slope = self.binary(Sub, one, square);
                out.push((x, self.binary(Mul, dy, slope)));
            }
            Op::Unary(UnaryOp::Sigmoid) => {
                let one = self.like(1.0, y);
                let rest = self.binary(Sub, one, y);
                let slope = self.binary(Mul, y, rest);
                out.push((x, self.binary(Mul, dy, slope)));
            }
            Op::Unary(UnaryOp::Rsqrt) => {
                let square = self.binary(Mul, y, y);
                let cube = self.binary(Mul, square, y);
                let slope = self.scale(cube, -0.5);
                out.push((x, self.binary(Mul, dy, slope)));
            }
            Op::Select => {
                let zero = self.like(0.0, dy);
                for (x, yes) in [(inputs[1], true), (inputs[2], false)] {
                    if needs(x) {
                        let (a, b) = if yes { (dy, zero) } else { (zero, dy) };
                        out.push((x, self.add(Op::Select, &[inputs[0], a, b])));
                    }
                }
            }
            Op::Reduce {
                op: ReduceOp::Sum,
                axes,
            } => {
                let shape = self.shape(x);
                let dims = (0..shape.rank()).filter(|axis| !axes.contains(axis)).collect();
                out.push((x, self.add(Op::Broadcast { shape, dims }, &[dy])));
            }
            Op::Broadcast { dims, shape } => {
                let from = self.shape(x);
                let repeated: Vec<usize> = (0..shape.rank())
                    .filter(|axis| {
                        dims.iter()
                            .position(|d| d == axis)
                            .is_none_or(|i| from[i] != shape[*axis])
                    })
                    .collect();
                let mut dx = if repeated.is_empty() {
                    dy
                } else {
                    self.sum(dy, &repeated)
                };
                if self.shape(dx) != from {
                    dx = self.add(Op::Reshape(from), &[dx]);
                }
                out.push((x, dx));
            }
            Op::Reshape(_) => {
                let shape = self.shape(x);
                out.push((x, self.add(Op::Reshape(shape), &[dy])));
            }
            Op::Transpose(perm) => {
                let mut inverse = perm.clone();
                perm.iter().enumerate().for_each(|(to, &from)| inverse[from] = to);
                out.push((x, self.add(Op::Transpose(inverse), &[dy])));
            }
            Op::IndexSelect { axis: 0 } => {
                let zero = self.like(0.0, x);
                let put = Op::IndexPut {
                    axis: 0,
                    mode: ScatterMode::Add,
                };
                out.push((x, self.add(put, &[zero, inputs[1], dy])));
            }
            Op::DotGeneral(dims) => {
                let batch = dims.a_batch.len();
                let (m, k, n) = (batch, batch + 1, batch + 1);
                let all = |a: usize, b: usize| DotDims {
                    a_batch: (0..batch).collect(),
                    b_batch: (0..batch).collect(),
                    a_contract: Dims::from_slice(&[a]),
                    b_contract: Dims::from_slice(&[b]),
                };
                if needs(inputs[0]) {
                    out.push((inputs[0], self.add(Op::DotGeneral(all(n, k)), &[dy, inputs[1]])));
                }
                if needs(inputs[1]) {
                    out.push((inputs[1], self.add(Op::DotGeneral(all(m, m)), &[inputs[0], dy])));
                }
            }
            other => panic!("no gradient for `{}` here", other.name()),
        }
        out.retain(|&(x, _)| needs(x));
        out
    }

    /// Adam's update of `weight`, which becomes three outputs that take over their arguments' buffers.
    pub fn adam(&mut self, weight: Value, gradient: Value, rate: Value) {
        use BinaryOp::*;
        let ty = self.graph.ty(weight).clone();
        let first = self.input(ty.clone());
        let second = self.input(ty.clone());
        let kept = self.scale(first, 0.9);
        let new = self.scale(gradient, 0.1);
        let first_new = self.binary(Add, kept, new);
        let square = self.binary(Mul, gradient, gradient);
        let kept = self.scale(second, 0.99);
        let new = self.scale(square, 0.01);
        let second_new = self.binary(Add, kept, new);
        let epsilon = self.like(1e-3, second_new);
        let safe = self.binary(Add, second_new, epsilon);
        let inverse = self.unary(UnaryOp::Rsqrt, safe);
        let step = self.binary(Mul, first_new, inverse);
        let rate = self.add(
            Op::Broadcast {
                shape: ty.shape.clone(),
                dims: Dims::new(),
            },
            &[rate],
        );
        let step = self.binary(Mul, step, rate);
        let updated = self.binary(Sub, weight, step);
        for (old, new) in [(weight, updated), (first, first_new), (second, second_new)] {
            self.state(old, new);
        }
    }

    /// `new` leaves the graph in the buffer of the argument `old`.
    pub fn state(&mut self, old: Value, new: Value) {
        let Op::Parameter { index, .. } = self.graph.def(old).op else {
            panic!("state is an argument")
        };
        self.graph.output(new, Some(index));
    }
}

/// A two-layer perceptron; returns its output.
pub fn perceptron(tape: &mut Tape, x: Value) -> Value {
    let h = tape.linear(x, 4, 6);
    let h = tape.unary(UnaryOp::Tanh, h);
    tape.linear(h, 6, 4)
}

pub fn squared(tape: &mut Tape, x: Value) -> Value {
    let square = tape.binary(BinaryOp::Mul, x, x);
    tape.mean(square)
}

/// The same layers on another input: weights are those of the tape from `first` on.
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

/// Sizes of a decoder.
#[derive(Clone, Copy)]
pub struct Sizes {
    pub layers: usize,
    pub batch: usize,
    pub length: usize,
    pub width: usize,
    pub heads: usize,
    pub hidden: usize,
    pub vocabulary: usize,
    pub keep: f64,
}

impl Sizes {
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

/// Arguments for a graph: small floats, small indices, scalars of their type.
pub fn arguments(graph: &Graph, seed: u64) -> (Vec<HostTensor>, Vec<Scalar>) {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut next = move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 11) as f64 / (1u64 << 53) as f64
    };
    let tensors = graph.parameters().iter().map(|&value| {
        let ty = graph.ty(value);
        if ty.dtype.is_float() {
            let values: Vec<f64> = (0..ty.numel()).map(|_| 0.05 + 0.5 * next()).collect();
            HostTensor::from_floats(ty.dtype, ty.shape.clone(), values)
        } else {
            let values: Vec<i64> = (0..ty.numel()).map(|_| (next() * 3.0) as i64).collect();
            HostTensor::from_ints(ty.dtype, ty.shape.clone(), values)
        }
    });
    let tensors = tensors.collect();
    let scalars = graph
        .scalars()
        .iter()
        .enumerate()
        .map(|(i, &value)| match graph.dtype(value) {
            DType::U64 => Scalar::UInt(7 + i as u64),
            _ => Scalar::Float(0.01),
        });
    (tensors, scalars.collect())
}
