//! Primitives against each other: a composition of others, an adjoint, a difference quotient. All in f64, on
//! random shapes, so that only the formulas are compared.

use kiln_graph::op::{
    AttentionDims, BinaryOp, CompareOp, ConvDims, Dims, DotDims, Op, ReduceOp, ScatterMode, SignedDims,
    UnaryOp, Window,
};
use kiln_graph::testing::{every_attention, random_tensor};
use kiln_graph::{DType, Graph, HostTensor, Provenance, Scalar, Shape, TensorType, Value, interpret_f64};
use proptest::prelude::*;

fn f64s(shape: impl Into<Shape>) -> TensorType {
    TensorType::new(DType::F64, shape)
}

/// A graph under construction on random arguments.
struct Program {
    graph: Graph,
    inputs: Vec<HostTensor>,
    seed: u64,
}

impl Program {
    fn new(seed: u64) -> Self {
        Self {
            graph: Graph::new("identity"),
            inputs: Vec::new(),
            seed,
        }
    }

    fn input(&mut self, shape: impl Into<Shape>) -> Value {
        let ty = f64s(shape);
        self.inputs
            .push(random_tensor(&ty, self.seed + self.inputs.len() as u64));
        self.graph.parameter(ty)
    }

    fn given(&mut self, tensor: HostTensor) -> Value {
        let ty = tensor.ty().clone();
        self.inputs.push(tensor);
        self.graph.parameter(ty)
    }

    fn add(&mut self, op: Op, inputs: &[Value]) -> Value {
        self.many(op, inputs)[0]
    }

    fn many(&mut self, op: Op, inputs: &[Value]) -> Vec<Value> {
        self.graph
            .add_node(op, inputs, Provenance::default())
            .unwrap_or_else(|error| panic!("{error}"))
            .to_vec()
    }

    fn constant(&mut self, value: f64) -> Value {
        self.add(
            Op::Constant {
                value: Scalar::Float(value),
                dtype: DType::F64,
            },
            &[],
        )
    }

    /// Sum of the products of all elements.
    fn inner(&mut self, a: Value, b: Value) -> Value {
        let axes: Dims = (0..self.graph.shape(a).rank()).collect();
        let dims = DotDims {
            a_contract: axes.clone(),
            b_contract: axes,
            ..DotDims::default()
        };
        self.add(Op::DotGeneral(dims), &[a, b])
    }

    fn run(mut self, outputs: &[Value]) -> Vec<Vec<f64>> {
        self.graph.outputs.clear();
        outputs.iter().for_each(|&value| self.graph.output(value, None));
        kiln_graph::verify(&self.graph).unwrap_or_else(|error| panic!("{error}"));
        let out = interpret_f64(&self.graph, &self.inputs, &[])
            .unwrap_or_else(|error| panic!("{error}\n{}", self.graph));
        out.iter().map(HostTensor::to_f64s).collect()
    }
}

fn close(a: &[f64], b: &[f64]) -> Result<(), TestCaseError> {
    prop_assert_eq!(a.len(), b.len());
    for (a, b) in a.iter().zip(b) {
        prop_assert!(
            (a - b).abs() <= 1e-9 * (1.0 + a.abs().max(b.abs())),
            "{} is not {}",
            a,
            b
        );
    }
    Ok(())
}

/// Kernel, stride, padding before and after, dilation, and how much longer than one kernel the input is.
type SlidingAxis = (usize, usize, usize, usize, usize, usize);

/// Window, stride, padding before and after, and how much longer than one window the input is.
type PoolAxis = (usize, usize, usize, usize, usize);

/// A convolution that fits, and the extents of input and kernel.
fn convolutions() -> impl Strategy<Value = (ConvDims, Vec<usize>, Vec<usize>)> {
    let axis = (1..4usize, 1..3usize, 0..3usize, 0..2usize, 1..3usize, 0..4usize);
    (
        prop::collection::vec(axis, 1..=3),
        1..3usize,
        1..3usize,
        1..3usize,
        1..3usize,
    )
        .prop_map(|(axes, groups, n, o, c)| {
            let of = |f: &dyn Fn(&SlidingAxis) -> usize| axes.iter().map(f).collect::<Dims>();
            let conv = ConvDims {
                stride: of(&|axis| axis.1),
                pad_low: of(&|axis| axis.2),
                pad_high: of(&|axis| axis.3),
                dilation: of(&|axis| axis.4),
                groups,
                result: None,
            };
            let x = [n, c * groups]
                .into_iter()
                .chain(axes.iter().map(|axis| (axis.0 - 1) * axis.4 + 1 + axis.5))
                .collect();
            let w = [o * groups, c]
                .into_iter()
                .chain(axes.iter().map(|axis| axis.0))
                .collect();
            (conv, x, w)
        })
}

/// A convolution written with slices and matrix products: one product for each group and kernel element.
fn conv_by_products(p: &mut Program, x: Value, w: Value, conv: &ConvDims, out: &Shape) -> Value {
    let (x_shape, w_shape) = (p.graph.shape(x).clone(), p.graph.shape(w).clone());
    let spatial = conv.stride.len();
    let signed = |amounts: &Dims| {
        [0, 0]
            .into_iter()
            .chain(amounts.iter().map(|&n| n as i64))
            .collect::<SignedDims>()
    };
    let zero = p.constant(0.0);
    let padded = p.add(
        Op::Pad {
            low: signed(&conv.pad_low),
            high: signed(&conv.pad_high),
        },
        &[x, zero],
    );
    let (o, c) = (w_shape[0] / conv.groups, w_shape[1]);
    let mut groups = Vec::new();
    for group in 0..conv.groups {
        let mut sum = p
            .graph
            .full(0.0, &f64s(out.with(1, o)), &Provenance::default())
            .expect("well typed");
        let kernel_size: usize = w_shape[2..].iter().product();
        for k in 0..kernel_size {
            // Coordinates of the kernel element.
            let (mut rest, mut at) = (k, vec![0; spatial]);
            for axis in (0..spatial).rev() {
                at[axis] = rest % w_shape[axis + 2];
                rest /= w_shape[axis + 2];
            }
            let start: Vec<usize> = (0..spatial).map(|axis| at[axis] * conv.dilation[axis]).collect();
            let starts: Dims = [0, group * c].into_iter().chain(start.iter().copied()).collect();
            let limits = [x_shape[0], (group + 1) * c]
                .into_iter()
                .chain((0..spatial).map(|axis| start[axis] + (out[axis + 2] - 1) * conv.stride[axis] + 1));
            let steps = [1, 1].into_iter().chain(conv.stride.iter().copied());
            let patch = p.add(
                Op::Slice {
                    starts,
                    limits: limits.collect(),
                    steps: steps.collect(),
                },
                &[padded],
            );
            let starts: Dims = [group * o, 0].into_iter().chain(at.iter().copied()).collect();
            let limits: Dims = [(group + 1) * o, c]
                .into_iter()
                .chain(at.iter().map(|&k| k + 1))
                .collect();
            let steps = Dims::from_elem(1, spatial + 2);
            let weight = p.add(
                Op::Slice {
                    starts,
                    limits,
                    steps,
                },
                &[w],
            );
            let weight = p.add(Op::Reshape(Shape::from([o, c])), &[weight]);
            // [o, c] x [n, c, out..] -> [o, n, out..], then the channels go second.
            let dims = DotDims {
                a_contract: Dims::from_slice(&[1]),
                b_contract: Dims::from_slice(&[1]),
                ..DotDims::default()
            };
            let product = p.add(Op::DotGeneral(dims), &[weight, patch]);
            let perm: Dims = [1, 0].into_iter().chain(2..spatial + 2).collect();
            let product = p.add(Op::Transpose(perm), &[product]);
            sum = p.add(Op::Binary(BinaryOp::Add), &[sum, product]);
        }
        groups.push(sum);
    }
    p.add(Op::Concat { axis: 1 }, &groups)
}

/// A pooling window that fits, and the shape of its input.
fn windows() -> impl Strategy<Value = (Window, Vec<usize>)> {
    let axis = (1..4usize, 1..4usize, 0..2usize, 0..2usize, 0..5usize);
    (
        prop::collection::vec(axis, 1..=2),
        any::<bool>(),
        1..3usize,
        1..3usize,
    )
        .prop_map(|(axes, ceil_mode, n, c)| {
            let of = |f: &dyn Fn(&PoolAxis) -> usize| axes.iter().map(f).collect::<Dims>();
            let window = Window {
                size: of(&|axis| axis.0),
                stride: of(&|axis| axis.1),
                pad_low: of(&|axis| axis.2.min(axis.0 / 2)),
                pad_high: of(&|axis| axis.3.min(axis.0 / 2)),
                dilation: of(&|_| 1),
                ceil_mode,
            };
            (
                window,
                [n, c]
                    .into_iter()
                    .chain(axes.iter().map(|axis| axis.0 + axis.4))
                    .collect(),
            )
        })
}

fn pooled(window: &Window, x: &[usize]) -> Shape {
    let extents = (0..window.size.len()).filter_map(|axis| window.output_extent(axis, x[axis + 2]));
    x[..2].iter().copied().chain(extents).collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn convolution_is_a_sum_of_matrix_products((conv, x, w) in convolutions(), seed in 0..1000u64) {
        let mut p = Program::new(seed);
        let (x, w) = (p.input(x), p.input(w));
        let direct = p.add(Op::Conv(conv.clone()), &[x, w]);
        let out = p.graph.shape(direct).clone();
        let composed = conv_by_products(&mut p, x, w, &conv, &out);
        let out = p.run(&[direct, composed]);
        close(&out[0], &out[1])?;
    }

    /// `<conv(x, w), dy> = <x, input_grad(dy, w)> = <w, weight_grad(x, dy)>`: the definition of both
    /// gradients, since the convolution is linear in either operand.
    #[test]
    fn convolution_gradients_are_adjoint((conv, x_shape, w_shape) in convolutions(), seed in 0..1000u64) {
        let mut p = Program::new(seed);
        let (x, w) = (p.input(x_shape.clone()), p.input(w_shape.clone()));
        let y = p.add(Op::Conv(conv.clone()), &[x, w]);
        let y_shape = p.graph.shape(y).clone();
        let dy = p.input(y_shape);
        let dx = p.add(Op::ConvInputGrad { conv: conv.clone(), input: x_shape[2..].into() }, &[dy, w]);
        let dw = p.add(Op::ConvWeightGrad { conv, kernel: w_shape[2..].into() }, &[x, dy]);
        let products = [p.inner(y, dy), p.inner(x, dx), p.inner(w, dw)];
        let out = p.run(&products);
        close(&out[0], &out[1])?;
        close(&out[0], &out[2])?;
    }

    #[test]
    fn average_pooling_and_its_gradient_are_adjoint((window, x) in windows(), include: bool, seed in 0..1000u64) {
        let mut p = Program::new(seed);
        let out = pooled(&window, &x);
        let input: Dims = x[2..].into();
        let (x, dy) = (p.input(x), p.input(out));
        let y = p.add(Op::AvgPool { window: window.clone(), count_include_pad: include }, &[x]);
        let dx = p.add(Op::AvgPoolGrad { window, count_include_pad: include, input }, &[dy]);
        let products = [p.inner(y, dy), p.inner(x, dx)];
        let out = p.run(&products);
        close(&out[0], &out[1])?;
    }

    /// The indices point at the maxima, and the gradient is adjoint to reading there.
    #[test]
    fn max_pooling_reads_what_its_indices_say((window, x) in windows(), seed in 0..1000u64) {
        let mut p = Program::new(seed);
        let out = pooled(&window, &x);
        let input: Dims = x[2..].into();
        let plane = [x[0], x[1], input.iter().product()];
        let flat = [x[0], x[1], out[2..].iter().product()];
        let (x, dy) = (p.input(x), p.input(out));
        let plain = p.add(Op::MaxPool(window.clone()), &[x]);
        let both = p.many(Op::MaxPoolWithIndices { window, dtype: DType::I64 }, &[x]);
        let planes = p.add(Op::Reshape(Shape::from(plane)), &[x]);
        let at = p.add(Op::Reshape(Shape::from(flat)), &[both[1]]);
        let read = p.add(Op::Gather { axis: 2 }, &[planes, at]);
        let dx = p.add(Op::MaxPoolGrad { input }, &[dy, both[1]]);
        let products = [p.inner(both[0], dy), p.inner(x, dx)];
        let out = p.run(&[plain, both[0], read, products[0], products[1]]);
        prop_assert_eq!(&out[0], &out[1]);
        prop_assert_eq!(&out[0], &out[2]);
        close(&out[3], &out[4])?;
    }

    /// `<gather(x, i), u> = <x, scatter_add(0, i, u)>`, and the same for whole slices.
    #[test]
    fn gather_and_scatter_are_adjoint(
        shape in prop::collection::vec(1..5usize, 1..4), axis: prop::sample::Index, count in 0..6usize, seed in 0..1000u64,
    ) {
        let axis = axis.index(shape.len());
        let mut p = Program::new(seed);
        let small: Shape = shape.iter().enumerate().map(|(d, &extent)| if d == axis { count } else { extent.div_ceil(2) }).collect();
        let extent = shape[axis] as i64;
        let indices = |seed: u64, shape: Shape| {
            let numbers = random_tensor(&TensorType::new(DType::I64, shape.clone()), seed).to_i64s();
            HostTensor::from_ints(DType::I64, shape, numbers.into_iter().map(|i| i.rem_euclid(extent)))
        };
        let x = p.input(shape.clone());
        let zero = p.graph.full(0.0, &f64s(shape.clone()), &Provenance::default()).expect("well typed");
        let (i, u) = (p.given(indices(seed + 50, small.clone())), p.input(small));
        let gathered = p.add(Op::Gather { axis }, &[x, i]);
        let scattered = p.add(Op::Scatter { axis, mode: ScatterMode::Add }, &[zero, i, u]);
        let (rows, r) = (p.given(indices(seed + 51, Shape::from([count]))), p.input(Shape::from(shape).with(axis, count)));
        let selected = p.add(Op::IndexSelect { axis }, &[x, rows]);
        let put = p.add(Op::IndexPut { axis, mode: ScatterMode::Add }, &[zero, rows, r]);
        let products = [p.inner(gathered, u), p.inner(x, scattered), p.inner(selected, r), p.inner(x, put)];
        let out = p.run(&products);
        close(&out[0], &out[1])?;
        close(&out[2], &out[3])?;
    }

    /// Movements are linear and each has the adjoint that autograd uses.
    #[test]
    fn movements_and_their_adjoints(shape in prop::collection::vec(1..5usize, 1..4), seed in 0..1000u64) {
        let mut p = Program::new(seed);
        let rank = shape.len();
        let x = p.input(shape.clone());
        let starts: Dims = shape.iter().map(|&extent| extent / 3).collect();
        let steps = Dims::from_elem(2, rank);
        let part = p.add(Op::Slice { starts: starts.clone(), limits: shape[..].into(), steps: steps.clone() }, &[x]);
        let part_shape = p.graph.shape(part).clone();
        let u = p.input(part_shape);
        let zero = p.graph.full(0.0, &f64s(shape.clone()), &Provenance::default()).expect("well typed");
        let back = p.add(Op::UpdateSlice { starts, steps }, &[zero, u]);
        let slices = (p.inner(part, u), p.inner(x, back));

        let none = p.constant(0.0);
        let (low, high) = (SignedDims::from_elem(1, rank), SignedDims::from_elem(-1, rank));
        let padded = p.add(Op::Pad { low: low.clone(), high: high.clone() }, &[x, none]);
        let u = p.input(shape.clone());
        let negated = |amounts: &SignedDims| amounts.iter().map(|n| -n).collect::<SignedDims>();
        let cropped = p.add(Op::Pad { low: negated(&low), high: negated(&high) }, &[u, none]);
        let pads = (p.inner(padded, u), p.inner(x, cropped));

        let wide: Shape = shape.iter().copied().chain([3]).collect();
        let spread = p.add(Op::Broadcast { shape: wide.clone(), dims: (0..rank).collect() }, &[x]);
        let u = p.input(wide);
        let summed = p.add(Op::Reduce { op: ReduceOp::Sum, axes: Dims::from_slice(&[rank]) }, &[u]);
        let spreads = (p.inner(spread, u), p.inner(x, summed));
        let out = p.run(&[slices.0, slices.1, pads.0, pads.1, spreads.0, spreads.1]);
        for pair in out.chunks(2) {
            close(&pair[0], &pair[1])?;
        }
    }
}

/// Attention as its definition in other primitives, with grouped heads.
fn composed_attention(p: &mut Program, x: &[Value], dims: AttentionDims) -> Value {
    let none = Provenance::default();
    let (q, k, v) = (x[0], x[1], x[2]);
    let [b, h, t, _] = [0, 1, 2, 3].map(|axis| p.graph.shape(q)[axis]);
    let repeat = h / p.graph.shape(k)[1];
    let s = p.graph.shape(k)[2];
    let grouped = |p: &mut Program, x: Value| {
        let shape = p.graph.shape(x).clone();
        let [b, g, s, d] = [0, 1, 2, 3].map(|axis| shape[axis]);
        let spread = Op::Broadcast {
            shape: Shape::from([b, g, repeat, s, d]),
            dims: Dims::from_slice(&[0, 1, 3, 4]),
        };
        let spread = p.add(spread, &[x]);
        p.add(Op::Reshape(Shape::from([b, g * repeat, s, d])), &[spread])
    };
    let (k, v) = (grouped(p, k), grouped(p, v));
    let keys = p.add(Op::Transpose(Dims::from_slice(&[0, 1, 3, 2])), &[k]);
    let scores = p.add(Op::DotGeneral(DotDims::matmul(2)), &[q, keys]);
    let full = p.graph.shape(scores).clone();
    let scale = p.graph.splat(x[3], &full, &none).expect("well typed");
    let mut scores = p.add(Op::Binary(BinaryOp::Mul), &[scores, scale]);
    let dropout = |p: &mut Program, of: Value| {
        let first = dims.operands().dropout.expect("there is dropout");
        let op = Op::Random {
            kind: kiln_graph::op::RandomKind::Uniform,
            dtype: DType::F64,
            shape: Shape::from([b, h, t, s]),
        };
        let draws = p.add(op, &[x[first], x[first + 1]]);
        let keep = p.graph.splat(x[first + 2], &full, &none).expect("well typed");
        let kept = p.add(Op::Compare(CompareOp::Lt), &[draws, keep]);
        let factor = p.graph.splat(x[first + 3], &full, &none).expect("well typed");
        let raised = p.add(Op::Binary(BinaryOp::Mul), &[of, factor]);
        let zero = p.graph.full(0.0, &f64s(full.clone()), &none).expect("well typed");
        p.add(Op::Select, &[kept, raised, zero])
    };
    if dims.drop_scores {
        scores = dropout(p, scores);
    }
    let masked = |p: &mut Program, scores: Value| {
        let mask = p.graph.broadcast_to(x[4], &full, &none).expect("well typed");
        p.add(Op::Binary(BinaryOp::Add), &[scores, mask])
    };
    if dims.mask && !dims.mask_last {
        scores = masked(p, scores);
    }
    if let Some(at) = dims.operands().hidden {
        let hidden = p.graph.broadcast_to(x[at], &full, &none).expect("well typed");
        let fill = p.graph.splat(x[at + 1], &full, &none).expect("well typed");
        scores = p.add(Op::Select, &[hidden, fill, scores]);
    }
    if dims.mask_last {
        scores = masked(p, scores);
    }
    if dims.causal {
        let iota = |p: &mut Program, axis| {
            p.add(
                Op::Iota {
                    dtype: DType::I64,
                    shape: full.clone(),
                    axis,
                },
                &[],
            )
        };
        let (i, j) = (iota(p, 2), iota(p, 3));
        let ahead = p
            .graph
            .full((s - t) as i64, &TensorType::new(DType::I64, full.clone()), &none)
            .expect("well typed");
        let last = p.add(Op::Binary(BinaryOp::Add), &[i, ahead]);
        let seen = p.add(Op::Compare(CompareOp::Le), &[j, last]);
        let never = p
            .graph
            .full(f64::NEG_INFINITY, &f64s(full.clone()), &none)
            .expect("well typed");
        scores = p.add(Op::Select, &[seen, scores, never]);
    }
    let spread = |p: &mut Program, x: Value| {
        p.add(
            Op::Broadcast {
                shape: full.clone(),
                dims: Dims::from_slice(&[0, 1, 2]),
            },
            &[x],
        )
    };
    let at_least = |p: &mut Program, x: Value, bound: f64| {
        let like = f64s(p.graph.shape(x).clone());
        let bound = p.graph.full(bound, &like, &none).expect("well typed");
        p.add(Op::Binary(BinaryOp::Max), &[x, bound])
    };
    let mut largest = p.add(
        Op::Reduce {
            op: ReduceOp::Max,
            axes: Dims::from_slice(&[3]),
        },
        &[scores],
    );
    if dims.safe {
        largest = at_least(p, largest, f64::MIN);
    }
    let largest = spread(p, largest);
    let shifted = p.add(Op::Binary(BinaryOp::Sub), &[scores, largest]);
    let exps = p.add(Op::Unary(UnaryOp::Exp), &[shifted]);
    let mut sums = p.add(
        Op::Reduce {
            op: ReduceOp::Sum,
            axes: Dims::from_slice(&[3]),
        },
        &[exps],
    );
    if dims.safe {
        sums = at_least(p, sums, f64::MIN_POSITIVE);
    }
    let sums = spread(p, sums);
    let mut weights = p.add(Op::Binary(BinaryOp::Div), &[exps, sums]);
    if dims.dropout && !dims.drop_scores {
        weights = dropout(p, weights);
    }
    p.add(Op::DotGeneral(DotDims::matmul(2)), &[weights, v])
}

fn attention_inputs(p: &mut Program, dims: AttentionDims) -> Vec<Value> {
    let mut x = vec![
        p.input([2, 4, 3, 2]),
        p.input([2, 2, 5, 2]),
        p.input([2, 2, 5, 3]),
    ];
    x.push(p.constant(0.7));
    if dims.mask {
        x.push(p.input([1, 4, 3, 1]));
    }
    if dims.hidden {
        // Some keys are hidden from some queries, and all from one.
        let none = Provenance::default();
        let ty = f64s(Shape::from([2, 1, 3, 5]));
        let compare = |p: &mut Program, op: CompareOp, x: Value, with: f64| {
            let with = p.graph.full(with, &ty, &none).expect("well typed");
            p.add(Op::Compare(op), &[x, with])
        };
        let signs = p.input([2, 1, 3, 5]);
        let some = compare(p, CompareOp::Gt, signs, 0.0);
        let rows = p.add(
            Op::Iota {
                dtype: DType::F64,
                shape: ty.shape.clone(),
                axis: 2,
            },
            &[],
        );
        let row = compare(p, CompareOp::Eq, rows, 1.0);
        x.push(p.add(Op::Binary(BinaryOp::Or), &[some, row]));
        x.push(p.constant(if dims.safe { f64::NEG_INFINITY } else { -2.5 }));
    }
    if dims.dropout {
        for word in [3, 1u64 << 40] {
            x.push(p.add(
                Op::Constant {
                    value: Scalar::UInt(word),
                    dtype: DType::U64,
                },
                &[],
            ));
        }
        x.extend([p.constant(0.6), p.constant(1.0 / 0.6)]);
    }
    x
}

#[test]
fn attention_is_softmax_of_scores() -> Result<(), TestCaseError> {
    for dims in every_attention() {
        let mut p = Program::new(7);
        let x = attention_inputs(&mut p, dims);
        let whole = p.add(Op::Attention(dims), &x);
        let composed = composed_attention(&mut p, &x, dims);
        let out = p.run(&[whole, composed]);
        close(&out[0], &out[1])?;
    }
    Ok(())
}

/// Each element of q, k and v moved by a small step both ways: the difference quotient of `<attention, g>` is
/// the gradient.
#[test]
fn attention_gradient_is_the_difference_quotient() {
    for dims in every_attention() {
        let mut p = Program::new(9);
        let mut x = attention_inputs(&mut p, dims);
        let g = p.input([2, 4, 3, 3]);
        let results = p.many(Op::Attention(dims), &x);
        let loss = p.inner(results[0], g);
        let inner = p.constant(-1.0);
        x.extend([results[1], g, x[3], inner]);
        if let Some(at) = dims.operands().dropout {
            x.push(x[at + 3]);
        }
        let gradients = p.many(Op::AttentionGrad(dims), &x);
        let mut graph = p.graph;
        std::iter::once(loss)
            .chain(gradients)
            .for_each(|value| graph.output(value, None));
        let run = |inputs: &[HostTensor]| interpret_f64(&graph, inputs, &[]).expect("runs");
        let out = run(&p.inputs);
        let step = 1e-5;
        for operand in 0..3 {
            let gradient = out[1 + operand].to_f64s();
            for (at, expected) in gradient.iter().enumerate() {
                let moved = |by: f64| {
                    let mut inputs = p.inputs.clone();
                    let mut values = inputs[operand].to_f64s();
                    values[at] += by;
                    inputs[operand] =
                        HostTensor::from_floats(DType::F64, inputs[operand].ty().shape.clone(), values);
                    run(&inputs)[0].to_f64s()[0]
                };
                let quotient = (moved(step) - moved(-step)) / (2.0 * step);
                assert!(
                    (quotient - expected).abs() < 1e-7,
                    "{dims:?}, operand {operand}, element {at}: {quotient} is not {expected}"
                );
            }
        }
    }
}

/// A quarter of a million elements through every kind of walk: the interpreter is slow, not quadratic.
#[test]
fn large_tensors_are_bearable() {
    let mut p = Program::new(1);
    let x = p.input([500, 500]);
    let t = p.add(Op::Transpose(Dims::from_slice(&[1, 0])), &[x]);
    let s = p.add(Op::Binary(BinaryOp::Add), &[x, t]);
    let r = p.add(
        Op::Reduce {
            op: ReduceOp::Sum,
            axes: Dims::from_slice(&[0]),
        },
        &[s],
    );
    let sorted = p.many(
        Op::Sort {
            axis: 0,
            descending: false,
            dtype: DType::I64,
        },
        &[s],
    );
    let c = p.add(
        Op::Cumulative {
            op: ReduceOp::Sum,
            axis: 1,
        },
        &[sorted[0]],
    );
    let last = p.add(
        Op::Slice {
            starts: Dims::from_slice(&[0, 499]),
            limits: Dims::from_slice(&[500, 500]),
            steps: Dims::from_slice(&[1, 1]),
        },
        &[c],
    );
    let total = p.add(
        Op::Reduce {
            op: ReduceOp::Sum,
            axes: Dims::from_slice(&[0, 1]),
        },
        &[last],
    );
    let total_too = p.add(
        Op::Reduce {
            op: ReduceOp::Sum,
            axes: Dims::from_slice(&[0]),
        },
        &[r],
    );
    let out = p.run(&[total, total_too]);
    assert!((out[0][0] - out[1][0]).abs() < 1e-6);
}
