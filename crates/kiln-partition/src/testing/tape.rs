//! A reverse-mode engine over [`kiln_graph`], small enough to read.
//!
//! The tape records forward operations straight into a graph. [`Tape::backward`] adds the gradient of each of
//! them in reverse order, starting from a tensor of ones, which is what an autograd engine under a tracer
//! leaves behind.

use std::collections::HashMap;

use kiln_graph::op::{BinaryOp, CompareOp, Dims, DotDims, Op, RandomKind, ReduceOp, ScatterMode, UnaryOp};
use kiln_graph::{DType, Graph, Node, Provenance, Scalar, Shape, TensorType, Value};

use super::f32s;

/// Records operations, adds gradients and updates.
#[derive(Debug)]
pub struct Tape {
    /// What was recorded.
    pub graph: Graph,
    /// The weights, in the order in which layers made them.
    pub parameters: Vec<Value>,
    /// Values behind which no gradient goes.
    pub detached: Vec<Value>,
}

impl Tape {
    /// An empty tape for a graph of this name.
    pub fn new(name: &str) -> Self {
        Self {
            graph: Graph::new(name),
            parameters: Vec::new(),
            detached: Vec::new(),
        }
    }

    /// Records an operation with one result.
    pub fn add(&mut self, op: Op, inputs: &[Value]) -> Value {
        self.named("", op, inputs)
    }

    /// [`Tape::add`] with the name of a recorded operation.
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

    /// A tensor argument that is not trained.
    pub fn input(&mut self, ty: TensorType) -> Value {
        self.graph.parameter(ty)
    }

    /// A weight: an f32 argument that is trained.
    pub fn weight(&mut self, shape: &[usize]) -> Value {
        let value = self.graph.parameter(f32s(shape));
        self.parameters.push(value);
        value
    }

    /// Elementwise.
    pub fn unary(&mut self, op: UnaryOp, x: Value) -> Value {
        self.add(Op::Unary(op), &[x])
    }

    /// Elementwise.
    pub fn binary(&mut self, op: BinaryOp, a: Value, b: Value) -> Value {
        self.add(Op::Binary(op), &[a, b])
    }

    /// Shape of a value.
    pub fn shape(&self, x: Value) -> Shape {
        self.graph.shape(x).clone()
    }

    /// `value` in the shape of `x`.
    pub fn like(&mut self, value: f64, x: Value) -> Value {
        let ty = self.graph.ty(x).clone();
        self.graph
            .full(value, &ty, &Provenance::default())
            .expect("well typed")
    }

    /// `x * by`.
    pub fn scale(&mut self, x: Value, by: f64) -> Value {
        let by = self.like(by, x);
        self.binary(BinaryOp::Mul, x, by)
    }

    /// Sums `axes` away.
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

    /// `[.., m, k] x [.., k, n]`.
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

    /// Normalises the last dimension and scales it by a new weight.
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

    /// Over the last dimension, without subtracting the maximum.
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

    /// Mean of all elements, rank 0.
    pub fn mean(&mut self, x: Value) -> Value {
        let shape = self.shape(x);
        let axes: Vec<usize> = (0..shape.rank()).collect();
        let total = self.sum(x, &axes);
        self.scale(total, 1.0 / shape.numel() as f64)
    }

    /// Adds the gradient of `loss` (rank 0) with respect to every value of the graph so far, and returns the
    /// gradients of `wanted`.
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

    /// The gradients of those of the operands `inputs` of `op` that are `useful`, from the gradient `dy` of its
    /// result `y`.
    fn pull_back(
        &mut self,
        op: &Op,
        inputs: &[Value],
        y: Value,
        dy: Value,
        useful: &[bool],
    ) -> Vec<(Value, Value)> {
        let needs = |value: Value| useful[value.as_u32() as usize];
        let x = inputs.first().copied().unwrap_or(y);
        let mut out = match op {
            Op::Binary(op) => self.pull_back_binary(*op, [inputs[0], inputs[1]], y, dy, needs),
            Op::Unary(op) => vec![(x, self.pull_back_unary(*op, x, y, dy))],
            Op::Select => self.pull_back_select(inputs, dy, needs),
            Op::Reduce {
                op: ReduceOp::Sum,
                axes,
            } => {
                let shape = self.shape(x);
                let dims = (0..shape.rank()).filter(|axis| !axes.contains(axis)).collect();
                vec![(x, self.add(Op::Broadcast { shape, dims }, &[dy]))]
            }
            Op::Broadcast { dims, shape } => vec![(x, self.pull_back_broadcast(dims, shape, x, dy))],
            Op::Reshape(_) => {
                let shape = self.shape(x);
                vec![(x, self.add(Op::Reshape(shape), &[dy]))]
            }
            Op::Transpose(perm) => {
                let mut inverse = perm.clone();
                perm.iter().enumerate().for_each(|(to, &from)| inverse[from] = to);
                vec![(x, self.add(Op::Transpose(inverse), &[dy]))]
            }
            Op::IndexSelect { axis: 0 } => {
                let zero = self.like(0.0, x);
                let put = Op::IndexPut {
                    axis: 0,
                    mode: ScatterMode::Add,
                };
                vec![(x, self.add(put, &[zero, inputs[1], dy]))]
            }
            Op::DotGeneral(dims) => self.pull_back_product(dims.a_batch.len(), inputs, dy, needs),
            other => panic!("no gradient for `{}` here", other.name()),
        };
        out.retain(|&(x, _)| needs(x));
        out
    }

    fn pull_back_binary(
        &mut self,
        op: BinaryOp,
        [a, b]: [Value; 2],
        y: Value,
        dy: Value,
        needs: impl Fn(Value) -> bool,
    ) -> Vec<(Value, Value)> {
        use BinaryOp::*;
        let mut out = Vec::new();
        match op {
            Add => out.extend([(a, dy), (b, dy)]),
            Sub => {
                out.push((a, dy));
                if needs(b) {
                    out.push((b, self.unary(UnaryOp::Neg, dy)));
                }
            }
            Mul => {
                for (x, other) in [(a, b), (b, a)] {
                    if needs(x) {
                        out.push((x, self.binary(Mul, dy, other)));
                    }
                }
            }
            Div => {
                out.push((a, self.binary(Div, dy, b)));
                if needs(b) {
                    let quotient = self.binary(Div, y, b);
                    let product = self.binary(Mul, dy, quotient);
                    out.push((b, self.unary(UnaryOp::Neg, product)));
                }
            }
            other => panic!("no gradient for `{}` here", Op::Binary(other).name()),
        }
        out
    }

    fn pull_back_unary(&mut self, op: UnaryOp, x: Value, y: Value, dy: Value) -> Value {
        use BinaryOp::*;
        match op {
            UnaryOp::Exp => self.binary(Mul, dy, y),
            UnaryOp::Log => self.binary(Div, dy, x),
            UnaryOp::Neg => self.unary(UnaryOp::Neg, dy),
            UnaryOp::Tanh => {
                let square = self.binary(Mul, y, y);
                let one = self.like(1.0, y);
                let slope = self.binary(Sub, one, square);
                self.binary(Mul, dy, slope)
            }
            UnaryOp::Sigmoid => {
                let one = self.like(1.0, y);
                let rest = self.binary(Sub, one, y);
                let slope = self.binary(Mul, y, rest);
                self.binary(Mul, dy, slope)
            }
            UnaryOp::Rsqrt => {
                let square = self.binary(Mul, y, y);
                let cube = self.binary(Mul, square, y);
                let slope = self.scale(cube, -0.5);
                self.binary(Mul, dy, slope)
            }
            other => panic!("no gradient for `{}` here", Op::Unary(other).name()),
        }
    }

    fn pull_back_select(
        &mut self,
        inputs: &[Value],
        dy: Value,
        needs: impl Fn(Value) -> bool,
    ) -> Vec<(Value, Value)> {
        let zero = self.like(0.0, dy);
        let mut out = Vec::new();
        for (x, yes) in [(inputs[1], true), (inputs[2], false)] {
            if needs(x) {
                let (a, b) = if yes { (dy, zero) } else { (zero, dy) };
                out.push((x, self.add(Op::Select, &[inputs[0], a, b])));
            }
        }
        out
    }

    fn pull_back_broadcast(&mut self, dims: &Dims, shape: &Shape, x: Value, dy: Value) -> Value {
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
        dx
    }

    /// Of a product of row-major matrices with `batch` dimensions in front.
    fn pull_back_product(
        &mut self,
        batch: usize,
        inputs: &[Value],
        dy: Value,
        needs: impl Fn(Value) -> bool,
    ) -> Vec<(Value, Value)> {
        let (m, k, n) = (batch, batch + 1, batch + 1);
        let all = |a: usize, b: usize| DotDims {
            a_batch: (0..batch).collect(),
            b_batch: (0..batch).collect(),
            a_contract: Dims::from_slice(&[a]),
            b_contract: Dims::from_slice(&[b]),
            result: None,
        };
        let mut out = Vec::new();
        if needs(inputs[0]) {
            out.push((inputs[0], self.add(Op::DotGeneral(all(n, k)), &[dy, inputs[1]])));
        }
        if needs(inputs[1]) {
            out.push((inputs[1], self.add(Op::DotGeneral(all(m, m)), &[inputs[0], dy])));
        }
        out
    }

    /// Adam's update of `weight`, which becomes three outputs that take over their arguments' buffers.
    pub fn adam(&mut self, weight: Value, gradient: Value, rate: Value) {
        for (old, new) in self.adam_update(weight, gradient, rate) {
            self.state(old, new);
        }
    }

    /// Weight, first and second moment, each with its next value.
    pub(super) fn adam_update(&mut self, weight: Value, gradient: Value, rate: Value) -> [(Value, Value); 3] {
        let ty = self.graph.ty(weight).clone();
        let old = [weight, self.input(ty.clone()), self.input(ty)];
        let new = self.adam_from(old, gradient, rate);
        [0, 1, 2].map(|at| (old[at], new[at]))
    }

    /// The next values of weight, first and second moment.
    pub fn adam_from(
        &mut self,
        [weight, first, second]: [Value; 3],
        gradient: Value,
        rate: Value,
    ) -> [Value; 3] {
        use BinaryOp::*;
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
                shape: self.shape(weight),
                dims: Dims::new(),
            },
            &[rate],
        );
        let step = self.binary(Mul, step, rate);
        [self.binary(Sub, weight, step), first_new, second_new]
    }

    /// `new` leaves the graph in the buffer of the argument `old`.
    pub fn state(&mut self, old: Value, new: Value) {
        let Op::Parameter { index, .. } = self.graph.def(old).op else {
            panic!("state is an argument")
        };
        self.graph.output(new, Some(index));
    }
}
