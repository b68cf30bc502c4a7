//! What the tests share: arguments in general position, every primitive in several shapes, and runs of
//! graphs.

#![allow(dead_code)]

use kiln_graph::op::{
    ArgReduceOp, AttentionDims, BinaryOp, CompareOp, ConvDims, Dims, DotDims, Op, RandomKind, ReduceOp,
    ScatterMode, SignedDims, UnaryOp, Window,
};
use kiln_graph::testing::Rng;
use kiln_graph::{
    DType, Graph, HostTensor, Provenance, Scalar, Shape, TensorType, Value, interpret_f64, verify,
};

/// A tensor of numbers without ties, away from whole numbers in all likelihood.
pub fn floats(shape: impl Into<Shape>, range: (f64, f64), seed: u64) -> HostTensor {
    let shape = shape.into();
    let mut rng = Rng::new(seed);
    let values: Vec<f64> = (0..shape.numel()).map(|_| rng.within(range.0, range.1)).collect();
    HostTensor::from_floats(DType::F64, shape, values)
}

/// Random numbers of any type, of the float types without ties; integers are 0 to 8.
pub fn generic(ty: &TensorType, seed: u64) -> HostTensor {
    let mut rng = Rng::new(seed);
    let shape = ty.shape.clone();
    if ty.dtype.is_float() {
        let values: Vec<f64> = (0..ty.numel()).map(|_| rng.within(-2.0, 2.0)).collect();
        HostTensor::from_floats(ty.dtype, shape, values)
    } else {
        let values: Vec<i64> = (0..ty.numel())
            .map(|_| rng.below(if ty.dtype == DType::Bool { 2 } else { 9 }) as i64)
            .collect();
        HostTensor::from_ints(ty.dtype, shape, values)
    }
}

pub fn ints(shape: impl Into<Shape>, values: &[i64]) -> HostTensor {
    HostTensor::from_ints(DType::I64, shape, values.iter().copied())
}

fn number(value: f64) -> HostTensor {
    HostTensor::from_vec(Shape::scalar(), [value])
}

fn word(value: u64) -> HostTensor {
    HostTensor::from_vec(Shape::scalar(), [value])
}

/// A primitive and operands for it.
#[derive(Clone, Debug)]
pub struct Case {
    pub op: Op,
    pub operands: Vec<HostTensor>,
}

impl Case {
    fn new(op: Op, operands: impl Into<Vec<HostTensor>>) -> Self {
        Self {
            op,
            operands: operands.into(),
        }
    }

    /// A graph of the one operation, whose parameters are its operands.
    pub fn graph(&self) -> Graph {
        let mut graph = Graph::new(self.op.name());
        let operands: Vec<Value> = self
            .operands
            .iter()
            .map(|x| graph.parameter(x.ty().clone()))
            .collect();
        let results = graph
            .add_node(self.op.clone(), &operands, Provenance::default())
            .unwrap_or_else(|error| panic!("{error}"));
        results.iter().for_each(|&result| graph.output(result, None));
        graph
    }
}

/// The float parameters.
pub fn float_parameters(graph: &Graph) -> Vec<usize> {
    let parameters = graph.parameters().iter().enumerate();
    parameters
        .filter(|(_, value)| graph.dtype(**value).is_float())
        .map(|(index, _)| index)
        .collect()
}

/// The float outputs.
pub fn float_outputs(graph: &Graph) -> Vec<usize> {
    let outputs = graph.outputs.iter().enumerate();
    outputs
        .filter(|(_, output)| graph.dtype(output.value).is_float())
        .map(|(index, _)| index)
        .collect()
}

/// The outputs of a valid graph.
pub fn run(graph: &Graph, arguments: &[HostTensor], scalars: &[Scalar]) -> Vec<HostTensor> {
    verify(graph).unwrap_or_else(|error| panic!("{error}\n{graph}"));
    interpret_f64(graph, arguments, scalars).unwrap_or_else(|error| panic!("{error}\n{graph}"))
}

fn dims<const N: usize>(values: [usize; N]) -> Dims {
    Dims::from_slice(&values)
}

fn signed<const N: usize>(values: [i64; N]) -> SignedDims {
    SignedDims::from_slice(&values)
}

const ANY: (f64, f64) = (-2.0, 2.0);

/// Every primitive but those without operands, the random ones and those kept whole.
pub fn cases() -> Vec<Case> {
    [
        pointwise(),
        reductions(),
        movements(),
        indexing(),
        products(),
        convolutions(),
        poolings(),
        attentions(),
    ]
    .concat()
}

fn pointwise() -> Vec<Case> {
    let mut cases = Vec::new();
    for &op in UnaryOp::ALL {
        use UnaryOp::*;
        let range = match op {
            Log | Sqrt | Rsqrt => (0.3, 3.0),
            Log1p => (-0.7, 3.0),
            Recip | Abs | Sign => (0.4, 2.0),
            Asin | Acos | Atanh => (-0.9, 0.9),
            Acosh => (1.2, 4.0),
            _ => (-1.4, 1.4),
        };
        let x = if op == Not {
            generic(&TensorType::new(DType::Bool, [2, 3]), 1)
        } else {
            floats([2, 3], range, 1 + op as u64)
        };
        cases.push(Case::new(Op::Unary(op), [x]));
    }
    for op in [UnaryOp::Abs, UnaryOp::Sign, UnaryOp::Recip] {
        cases.push(Case::new(Op::Unary(op), [floats([3], (-2.0, -0.4), 5)]));
    }
    for &op in BinaryOp::ALL {
        use BinaryOp::*;
        let operands = match op {
            And | Or | Xor => [1, 2].map(|seed| generic(&TensorType::new(DType::Bool, [2, 3]), seed)),
            Shl | Shr => [1, 2].map(|seed| generic(&TensorType::new(DType::I64, [2, 3]), seed)),
            Pow => [floats([2, 3], (0.3, 2.0), 3), floats([2, 3], ANY, 4)],
            Div | Rem => [floats([2, 3], ANY, 3), floats([2, 3], (0.5, 2.0), 4)],
            _ => [floats([2, 3], ANY, 3), floats([2, 3], ANY, 4)],
        };
        cases.push(Case::new(Op::Binary(op), operands));
    }
    for &op in CompareOp::ALL {
        cases.push(Case::new(
            Op::Compare(op),
            [floats([4], ANY, 1), floats([4], ANY, 2)],
        ));
    }
    let condition = generic(&TensorType::new(DType::Bool, [2, 3]), 7);
    cases.push(Case::new(
        Op::Select,
        [condition, floats([2, 3], ANY, 1), floats([2, 3], ANY, 2)],
    ));
    for dtype in [DType::F64, DType::I32, DType::Bool] {
        cases.push(Case::new(Op::Cast(dtype), [floats([4], ANY, 1)]));
    }
    cases.push(Case::new(Op::Cast(DType::F64), [ints([3], &[1, 0, 4])]));
    cases
}

fn reductions() -> Vec<Case> {
    let mut cases = Vec::new();
    for op in [ReduceOp::Sum, ReduceOp::Prod, ReduceOp::Max, ReduceOp::Min] {
        for axes in [dims([0]), dims([1, 2]), dims([0, 1, 2])] {
            cases.push(Case::new(Op::Reduce { op, axes }, [floats([2, 3, 2], ANY, 1)]));
        }
        // Zeros in a product.
        let zeros = HostTensor::from_vec([2, 3], [0.0, 1.5, -0.5, 0.0, 0.25, 0.0]);
        if op == ReduceOp::Prod {
            cases.push(Case::new(Op::Reduce { op, axes: dims([1]) }, [zeros.clone()]));
            cases.push(Case::new(Op::Cumulative { op, axis: 1 }, [zeros]));
        }
        for axis in 0..3 {
            cases.push(Case::new(
                Op::Cumulative { op, axis },
                [floats([2, 5, 2], ANY, 2)],
            ));
        }
    }
    for op in [ReduceOp::Any, ReduceOp::All] {
        let x = generic(&TensorType::new(DType::Bool, [2, 3]), 7);
        cases.push(Case::new(Op::Reduce { op, axes: dims([1]) }, [x]));
    }
    for (&op, axis) in ArgReduceOp::ALL.iter().zip(0..2) {
        let dtype = DType::I32;
        cases.push(Case::new(
            Op::ArgReduce { op, axis, dtype },
            [floats([3, 4], ANY, 2)],
        ));
    }
    for (axis, descending) in [(0, false), (1, true)] {
        let dtype = DType::I64;
        let sort = Op::Sort {
            axis,
            descending,
            dtype,
        };
        cases.push(Case::new(sort, [floats([3, 4], ANY, 2)]));
        cases.push(Case::new(
            Op::TopK { axis, k: 2, dtype },
            [floats([3, 4], ANY, 3)],
        ));
    }
    cases
}

fn movements() -> Vec<Case> {
    let x = || floats([2, 3, 4], ANY, 1);
    let mut cases = vec![
        Case::new(Op::Reshape(Shape::from([6, 2, 2])), [x()]),
        Case::new(Op::Transpose(dims([2, 0, 1])), [x()]),
        Case::new(Op::Flip(dims([0, 2])), [x()]),
        Case::new(
            Op::Concat { axis: 1 },
            [x(), floats([2, 1, 4], ANY, 2), floats([2, 2, 4], ANY, 3)],
        ),
    ];
    let broadcast = |shape: &[usize], dims: Dims| Op::Broadcast {
        shape: Shape::from(shape),
        dims,
    };
    cases.push(Case::new(
        broadcast(&[3, 2], dims([])),
        [floats(Shape::scalar(), ANY, 1)],
    ));
    cases.push(Case::new(
        broadcast(&[2, 5, 3, 4], dims([0, 2, 3])),
        [floats([2, 1, 4], ANY, 1)],
    ));
    cases.push(Case::new(
        broadcast(&[2, 1], dims([0, 1])),
        [floats([1, 1], ANY, 1)],
    ));
    let slice = |starts, limits, steps| Op::Slice {
        starts,
        limits,
        steps,
    };
    cases.push(Case::new(
        slice(dims([0, 1, 1]), dims([2, 3, 4]), dims([1, 1, 1])),
        [x()],
    ));
    cases.push(Case::new(
        slice(dims([1, 0, 0]), dims([2, 3, 4]), dims([1, 2, 3])),
        [x()],
    ));
    let value = || floats(Shape::scalar(), ANY, 9);
    for (low, high) in [
        ([1, 0, 2], [0, 3, 0]),
        ([-1, 0, 2], [1, -2, -1]),
        ([0, -3, 0], [0, 4, 0]),
    ] {
        let pad = Op::Pad {
            low: signed(low),
            high: signed(high),
        };
        cases.push(Case::new(pad, [x(), value()]));
    }
    for (update, steps) in [([2, 1, 2], [1, 1, 2]), ([1, 2, 1], [1, 2, 1])] {
        let op = Op::UpdateSlice {
            starts: dims([0, 0, 1]),
            steps: dims(steps),
        };
        cases.push(Case::new(op, [x(), floats(update, ANY, 2)]));
    }
    let nothing = Op::UpdateSlice {
        starts: dims([0, 0]),
        steps: dims([1, 1]),
    };
    cases.push(Case::new(
        nothing,
        [floats([2, 3], ANY, 1), floats([0, 3], ANY, 2)],
    ));
    cases
}

fn indexing() -> Vec<Case> {
    let mut cases = Vec::new();
    let x = || floats([3, 4], ANY, 1);
    let scattered = || ints([2, 3], &[1, 2, 0, 1, 0, 0]);
    let list = || ints([5], &[2, 0, 2, 2, 1]);
    cases.push(Case::new(Op::Gather { axis: 0 }, [x(), scattered()]));
    cases.push(Case::new(
        Op::Gather { axis: 1 },
        [x(), ints([3, 5], &[1, 2, 0, 3, 3, 0, 0, 1, 2, 3, 3, 1, 1, 1, 0])],
    ));
    cases.push(Case::new(Op::IndexSelect { axis: 0 }, [x(), list()]));
    cases.push(Case::new(Op::IndexSelect { axis: 1 }, [x(), list()]));
    for &mode in ScatterMode::ALL {
        cases.push(Case::new(
            Op::Scatter { axis: 0, mode },
            [x(), scattered(), floats([2, 3], ANY, 2)],
        ));
        let indices = ints([2, 5], &[1, 2, 0, 1, 3, 0, 0, 0, 1, 1]);
        cases.push(Case::new(
            Op::Scatter { axis: 1, mode },
            [x(), indices, floats([2, 5], ANY, 2)],
        ));
        cases.push(Case::new(
            Op::IndexPut { axis: 0, mode },
            [x(), list(), floats([5, 4], ANY, 2)],
        ));
        cases.push(Case::new(
            Op::IndexPut { axis: 1, mode },
            [x(), list(), floats([3, 5], ANY, 2)],
        ));
    }
    cases
}

fn products() -> Vec<Case> {
    let dot = |dims: DotDims, a: &[usize], b: &[usize]| {
        Case::new(Op::DotGeneral(dims), [floats(a, ANY, 1), floats(b, ANY, 2)])
    };
    let general = DotDims {
        a_batch: dims([2, 0]),
        b_batch: dims([1, 3]),
        a_contract: dims([4, 1]),
        b_contract: dims([0, 4]),
        ..DotDims::default()
    };
    vec![
        dot(DotDims::matmul(0), &[2, 3], &[3, 4]),
        dot(DotDims::matmul(1), &[2, 2, 3], &[2, 3, 4]),
        dot(DotDims::default(), &[2], &[3]),
        dot(general, &[2, 3, 4, 2, 2], &[2, 4, 3, 2, 3]),
    ]
}

fn convolutions() -> Vec<Case> {
    let mut cases = Vec::new();
    let settings = [
        (1, vec![[3, 1, 1, 1, 1, 5]], [2, 2, 3]),
        (2, vec![[2, 2, 0, 1, 1, 4], [3, 1, 2, 0, 2, 5]], [1, 2, 2]),
        (1, vec![[1, 1, 0, 0, 1, 3], [2, 2, 1, 0, 1, 3]], [2, 1, 2]),
    ];
    for (groups, axes, [n, c, o]) in settings {
        // Kernel, stride, padding before and after, dilation, input.
        let of = |f: fn(&[usize; 6]) -> usize| axes.iter().map(f).collect::<Dims>();
        let conv = conv_dims(of(|a| a[1]), of(|a| a[2]), of(|a| a[3]), of(|a| a[4]), groups);
        let (kernel, input) = (of(|a| a[0]), of(|a| a[5]));
        let out: Dims = (0..axes.len())
            .map(|axis| conv.output_extent(axis, input[axis], kernel[axis]).expect("fits"))
            .collect();
        let shape = |n: usize, c: usize, rest: &Dims| -> Shape {
            [n, c].into_iter().chain(rest.iter().copied()).collect()
        };
        let x = floats(shape(n, c * groups, &input), ANY, 1);
        let w = floats(shape(o * groups, c, &kernel), ANY, 2);
        let y = floats(shape(n, o * groups, &out), ANY, 3);
        cases.push(Case::new(Op::Conv(conv.clone()), [x.clone(), w.clone()]));
        cases.push(Case::new(
            Op::ConvInputGrad {
                conv: conv.clone(),
                input,
            },
            [y.clone(), w],
        ));
        cases.push(Case::new(Op::ConvWeightGrad { conv, kernel }, [x, y]));
    }
    cases
}

/// A convolution whose result has the operands' type.
pub fn conv_dims(stride: Dims, pad_low: Dims, pad_high: Dims, dilation: Dims, groups: usize) -> ConvDims {
    ConvDims {
        stride,
        pad_low,
        pad_high,
        dilation,
        groups,
        result: None,
    }
}

fn poolings() -> Vec<Case> {
    let mut cases = Vec::new();
    for (ceil_mode, dilation) in [(false, dims([1, 1])), (true, dims([1, 2]))] {
        let window = Window {
            size: dims([2, 3]),
            stride: dims([2, 1]),
            pad_low: dims([1, 0]),
            pad_high: dims([0, 1]),
            dilation,
            ceil_mode,
        };
        let input = dims([4, 6]);
        let extent = |window: &Window, axis: usize| window.output_extent(axis, input[axis]).expect("fits");
        let out = [2, 1, extent(&window, 0), extent(&window, 1)];
        let x = || floats([2, 1, 4, 6], ANY, 1);
        cases.push(Case::new(Op::MaxPool(window.clone()), [x()]));
        let dtype = DType::I64;
        cases.push(Case::new(
            Op::MaxPoolWithIndices {
                window: window.clone(),
                dtype,
            },
            [x()],
        ));
        let indices: Vec<i64> = (0..out.iter().product::<usize>() as i64)
            .map(|i| i * 7 % 24)
            .collect();
        let gradient = Op::MaxPoolGrad { input: input.clone() };
        cases.push(Case::new(gradient, [floats(out, ANY, 2), ints(out, &indices)]));
        let window = Window {
            dilation: dims([1, 1]),
            ..window
        };
        let out = [2, 1, extent(&window, 0), extent(&window, 1)];
        for count_include_pad in [false, true] {
            let window = window.clone();
            cases.push(Case::new(
                Op::AvgPool {
                    window: window.clone(),
                    count_include_pad,
                },
                [x()],
            ));
            let input = input.clone();
            let gradient = Op::AvgPoolGrad {
                window,
                count_include_pad,
                input,
            };
            cases.push(Case::new(gradient, [floats(out, ANY, 2)]));
        }
    }
    cases
}

fn attentions() -> Vec<Case> {
    let all = AttentionDims {
        causal: true,
        mask: true,
        hidden: true,
        mask_last: true,
        dropout: true,
        drop_scores: false,
        safe: true,
    };
    let plain = AttentionDims::default();
    let kinds = [
        plain,
        AttentionDims {
            causal: true,
            mask: true,
            ..plain
        },
        AttentionDims {
            dropout: true,
            drop_scores: true,
            ..plain
        },
        AttentionDims {
            drop_scores: true,
            mask_last: false,
            ..all
        },
        all,
    ];
    let mut cases = Vec::new();
    for dims in kinds {
        let narrow = (-1.0, 1.0);
        let mut operands = vec![
            floats([2, 2, 2, 2], narrow, 1),
            floats([2, 1, 3, 2], narrow, 2),
            floats([2, 1, 3, 3], narrow, 3),
            number(0.7),
        ];
        if dims.mask {
            operands.push(floats([1, 2, 1, 3], narrow, 4));
        }
        if dims.hidden {
            let hidden =
                HostTensor::from_ints(DType::Bool, [2, 1, 2, 3], [1, 0, 0, 0, 0, 1, 0, 1, 0, 0, 0, 0]);
            operands.extend([hidden, number(-1.5)]);
        }
        if dims.dropout {
            operands.extend([word(7), word(9), number(0.8), number(1.25)]);
        }
        let forward = Case::new(Op::Attention(dims), operands.clone());
        let results = run(&forward.graph(), &forward.operands, &[]);
        cases.push(forward);
        operands.extend([
            results[1].clone(),
            floats([2, 2, 2, 3], narrow, 5),
            number(0.6),
            number(-0.9),
        ]);
        if dims.dropout {
            operands.push(number(1.3));
        }
        cases.push(Case::new(Op::AttentionGrad(dims), operands));
    }
    cases
}

/// Random draws in each distribution.
pub fn draws() -> Vec<Case> {
    let draw = |kind, dtype, operands: Vec<HostTensor>| {
        let shape = Shape::from([3, 5]);
        Case::new(Op::Random { kind, dtype, shape }, operands)
    };
    let (low, high) = (ints(Shape::scalar(), &[-3]), ints(Shape::scalar(), &[40]));
    vec![
        draw(RandomKind::Uniform, DType::F64, vec![word(5), word(6)]),
        draw(RandomKind::Uniform, DType::F32, vec![word(5), word(6)]),
        draw(RandomKind::Normal, DType::F64, vec![word(5), word(7)]),
        draw(RandomKind::Normal, DType::F32, vec![word(5), word(7)]),
        draw(
            RandomKind::IntRange,
            DType::I64,
            vec![word(5), word(8), low, high],
        ),
    ]
}
