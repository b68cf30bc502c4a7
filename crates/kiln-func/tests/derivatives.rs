//! Every rule against finite differences in f64, in both modes, and once more for second derivatives.

mod common;

use common::{Case, cases, draws, float_outputs, float_parameters, floats, generic, run};
use kiln_func::{FuncError, Mode, grad, hessian, jacobian, jvp, value_and_grad, vjp};
use kiln_graph::op::{BinaryOp, DotDims, ExternOp, Op, ReduceOp, UnaryOp};
use kiln_graph::testing::{Family, GraphConfig, random_arguments, random_graph, seeds};
use kiln_graph::{DType, Graph, HostTensor, Provenance, Scalar, Shape, TensorType, Value};

/// `x + step * direction` for the parameters in `wrt`.
fn moved(arguments: &[HostTensor], wrt: &[usize], directions: &[HostTensor], step: f64) -> Vec<HostTensor> {
    let mut moved = arguments.to_vec();
    for (&index, direction) in wrt.iter().zip(directions) {
        let values = arguments[index].to_f64s().into_iter().zip(direction.to_f64s());
        let values: Vec<f64> = values.map(|(x, t)| x + step * t).collect();
        moved[index] = HostTensor::from_floats(DType::F64, arguments[index].ty().shape.clone(), values);
    }
    moved
}

fn directions(graph: &Graph, of: &[Value], seed: u64) -> Vec<HostTensor> {
    let of = of.iter().enumerate();
    of.map(|(at, &value)| floats(graph.shape(value).clone(), (-1.0, 1.0), seed + at as u64))
        .collect()
}

fn inner(a: &[HostTensor], b: &[HostTensor]) -> (f64, f64) {
    let mut sum = (0.0, 0.0);
    for (a, b) in a.iter().zip(b) {
        for (a, b) in a.to_f64s().into_iter().zip(b.to_f64s()) {
            sum.0 += a * b;
            sum.1 += (a * b).abs();
        }
    }
    sum
}

/// Central differences of the outputs in `outputs`, by element; none where two steps disagree, since there
/// the function has no derivative or is no number.
fn differences(
    graph: &Graph,
    (arguments, scalars): (&[HostTensor], &[Scalar]),
    (wrt, outputs): (&[usize], &[usize]),
    tangents: &[HostTensor],
) -> Vec<Vec<Option<f64>>> {
    let slope = |step: f64| {
        let after = run(graph, &moved(arguments, wrt, tangents, step), scalars);
        let before = run(graph, &moved(arguments, wrt, tangents, -step), scalars);
        let of = |&output: &usize| {
            let pairs = after[output].to_f64s().into_iter().zip(before[output].to_f64s());
            pairs
                .map(|(after, before)| (after - before) / (2.0 * step))
                .collect::<Vec<f64>>()
        };
        outputs.iter().map(of).collect::<Vec<_>>()
    };
    let (coarse, fine) = (slope(2e-5), slope(1e-5));
    let agree = |(a, b): (f64, f64)| ((a - b).abs() <= 1e-5 * (1.0 + a.abs())).then_some(b);
    coarse
        .into_iter()
        .zip(fine)
        .map(|(a, b)| a.into_iter().zip(b).map(agree).collect())
        .collect()
}

/// Forward mode agrees with differences, reverse mode with forward mode. Says how many elements were
/// compared.
fn check(graph: &Graph, arguments: &[HostTensor], scalars: &[Scalar], seed: u64) -> usize {
    let (wrt, outputs) = (float_parameters(graph), float_outputs(graph));
    if wrt.is_empty() || outputs.is_empty() {
        return 0;
    }
    let parameters: Vec<Value> = wrt.iter().map(|&index| graph.parameters()[index]).collect();
    let results: Vec<Value> = outputs.iter().map(|&index| graph.outputs[index].value).collect();
    let tangents = directions(graph, &parameters, seed);
    let cotangents = directions(graph, &results, seed + 100);
    let forward = jvp(graph, &wrt, &outputs).unwrap_or_else(|error| panic!("{error}\n{graph}"));
    let with_tangents = [arguments, &tangents].concat();
    let moved = run(&forward, &with_tangents, scalars).split_off(graph.outputs.len());
    let expected = differences(graph, (arguments, scalars), (&wrt, &outputs), &tangents);
    let mut compared = 0;
    for (moved, expected) in moved.iter().zip(&expected) {
        for (actual, expected) in moved.to_f64s().into_iter().zip(expected) {
            let Some(expected) = *expected else { continue };
            assert!(
                (actual - expected).abs() <= 2e-6 * (1.0 + expected.abs()),
                "the tangent is {actual}, differences give {expected}\n{graph}\n{forward}"
            );
            compared += 1;
        }
    }
    let finite = |tensors: &[HostTensor]| tensors.iter().all(|x| x.to_f64s().iter().all(|x| x.is_finite()));
    let reverse = vjp(graph, &wrt, &outputs).unwrap_or_else(|error| panic!("{error}\n{graph}"));
    let with_cotangents = [arguments, &cotangents].concat();
    let gradients = run(&reverse, &with_cotangents, scalars).split_off(graph.outputs.len());
    if finite(&moved) && finite(&gradients) {
        let (by_forward, scale) = inner(&moved, &cotangents);
        let (by_reverse, other) = inner(&gradients, &tangents);
        assert!(
            (by_forward - by_reverse).abs() <= 1e-9 * (1.0 + scale + other),
            "forward {by_forward}, reverse {by_reverse}\n{graph}\n{reverse}"
        );
    }
    compared
}

/// [`check`] of a case and of its gradient.
fn check_twice(case: &Case) {
    let graph = case.graph();
    let compared = check(&graph, &case.operands, &[], 3);
    let (wrt, outputs) = (float_parameters(&graph), float_outputs(&graph));
    let elements: usize = outputs
        .iter()
        .map(|&index| graph.ty(graph.outputs[index].value).numel())
        .sum();
    if wrt.is_empty() || outputs.is_empty() {
        return;
    }
    assert!(
        2 * compared >= elements,
        "only {compared} of {elements} elements of {:?} have a derivative",
        case.op
    );
    let reverse = vjp(&graph, &wrt, &outputs).expect("checked before");
    let results: Vec<Value> = outputs.iter().map(|&index| graph.outputs[index].value).collect();
    let arguments = [&case.operands[..], &directions(&graph, &results, 50)].concat();
    check(&reverse, &arguments, &[], 5);
}

#[test]
fn every_primitive() {
    cases().iter().for_each(check_twice);
}

/// The cases together hold every variant that has operands.
#[test]
fn no_primitive_is_missing() {
    let mut names: Vec<&str> = cases()
        .iter()
        .chain(&draws())
        .map(|case| case.op.name())
        .collect();
    names.sort_unstable();
    names.dedup();
    for seed in 0..200 {
        let random = random_graph(seed, &GraphConfig::default());
        for (_, node) in random.graph.nodes() {
            let argument = node.inputs.is_empty() && !matches!(node.op, Op::Random { .. });
            assert!(
                argument || names.contains(&node.op.name()),
                "no case of `{}`",
                node.op.name()
            );
        }
    }
}

#[test]
fn random_graphs() {
    let config = GraphConfig {
        steps: 10,
        max_elements: 40,
        floats: vec![DType::F64],
        ints: vec![DType::I64, DType::I32],
        ..GraphConfig::default()
    };
    let mut compared = 0;
    for seed in seeds(0..150) {
        let config = GraphConfig {
            together: seed % 2 == 1,
            ..config.clone()
        };
        let graph = random_graph(seed, &config).graph;
        let scalars = random_arguments(&graph, seed).1;
        let arguments: Vec<HostTensor> = graph
            .parameters()
            .iter()
            .enumerate()
            .map(|(at, &value)| generic(graph.ty(value), seed * 1000 + at as u64))
            .collect();
        compared += check(&graph, &arguments, &scalars, seed);
    }
    assert!(compared > 10_000, "{compared}");
}

/// Derivatives of derivatives of graphs of some operations.
#[test]
fn random_graphs_twice() {
    let families = [
        Family::Pointwise,
        Family::Reduce,
        Family::Movement,
        Family::Index,
        Family::Dot,
        Family::Conv,
    ];
    let config = GraphConfig {
        steps: 5,
        max_elements: 20,
        floats: vec![DType::F64],
        ints: vec![DType::I64],
        families: families.to_vec(),
        zero_sized: false,
        together: false,
    };
    let mut compared = 0;
    for seed in seeds(0..60) {
        let config = GraphConfig {
            together: seed % 2 == 1,
            ..config.clone()
        };
        let graph = random_graph(seed, &config).graph;
        let scalars = random_arguments(&graph, seed).1;
        let (wrt, outputs) = (float_parameters(&graph), float_outputs(&graph));
        let reverse = vjp(&graph, &wrt, &outputs).unwrap_or_else(|error| panic!("{error}\n{graph}"));
        let arguments: Vec<HostTensor> = reverse
            .parameters()
            .iter()
            .enumerate()
            .map(|(at, &value)| generic(reverse.ty(value), seed * 1000 + at as u64))
            .collect();
        compared += check(&reverse, &arguments, &scalars, seed);
    }
    assert!(compared > 1_000, "{compared}");
}

/// A product of matrices of 16 bits, and casts between float types.
#[test]
fn other_float_types() {
    let mut graph = Graph::new("narrow");
    let p = Provenance::default();
    let x = graph.parameter(TensorType::new(DType::F32, [2, 3]));
    let w = graph.parameter(TensorType::new(DType::F64, [3, 2]));
    let narrow = graph.cast(w, DType::F32, &p).expect("well typed");
    let y = graph
        .add(Op::DotGeneral(DotDims::matmul(0)), &[x, narrow], &p)
        .expect("well typed");
    let y = graph.cast(y, DType::BF16, &p).expect("well typed");
    graph.output(y, None);
    let reverse = vjp(&graph, &[0, 1], &[0]).expect("has a derivative");
    let dtype = |output: usize| reverse.dtype(reverse.outputs[output].value);
    assert_eq!(
        [dtype(0), dtype(1), dtype(2)],
        [DType::BF16, DType::F32, DType::F64]
    );
    let of = |dtype, shape: [usize; 2], values: &[f64]| {
        HostTensor::from_floats(dtype, shape, values.iter().copied())
    };
    let arguments = [
        of(DType::F32, [2, 3], &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]),
        of(DType::F64, [3, 2], &[1.0, 0.0, 2.0, -1.0, 0.5, 4.0]),
        of(DType::BF16, [2, 2], &[1.0, 0.0, 0.0, 2.0]),
    ];
    let results = kiln_graph::interpret(&reverse, &arguments, &[]).expect("runs");
    assert_eq!(results[1].to_f64s(), [1.0, 2.0, 0.5, 0.0, -2.0, 8.0]);
    assert_eq!(results[2].to_f64s(), [1.0, 8.0, 2.0, 10.0, 3.0, 12.0]);
}

/// A product of 16 bits with a result of f32: the gradients have the operands' type.
#[test]
fn wide_results_of_narrow_operands() {
    let half =
        |shape: &[usize], values: &[f64]| HostTensor::from_floats(DType::BF16, shape, values.iter().copied());
    let (x, w) = (half(&[1, 2], &[1.5, -2.0]), half(&[2, 1], &[0.5, 3.0]));
    let image = |x: &HostTensor| half(&[1, 2, 1], &x.to_f64s());
    let one = || [1][..].into();
    let conv = common::conv_dims(one(), [0][..].into(), [0][..].into(), one(), 1);
    let dot = Op::DotGeneral(DotDims::matmul(0));
    let cases = [
        (dot, x.clone(), w.clone()),
        (Op::Conv(conv), image(&x), image(&w)),
    ];
    for (op, x, w) in cases {
        let op = op.with_result(Some(DType::F32)).expect("a product");
        let case = Case {
            op,
            operands: vec![x, w],
        };
        let graph = case.graph();
        let dtype = |graph: &Graph, output: usize| graph.dtype(graph.outputs[output].value);
        assert_eq!(dtype(&graph, 0), DType::F32);
        let reverse = vjp(&graph, &[0, 1], &[0]).expect("has a derivative");
        assert_eq!([dtype(&reverse, 1), dtype(&reverse, 2)], [DType::BF16; 2]);
        let shape = graph.shape(graph.outputs[0].value).clone();
        let two = HostTensor::from_floats(DType::F32, shape, [2.0]);
        let arguments = [&case.operands[..], &[two]].concat();
        let results = kiln_graph::interpret(&reverse, &arguments, &[]).expect("runs");
        assert_eq!(results[1].to_f64s(), [1.0, 6.0]);
        assert_eq!(results[2].to_f64s(), [3.0, -4.0]);
    }
}

/// Two hidden layers with tanh and sigmoid, a mean squared error: weights are parameters 0 to 2, the batch 3,
/// the target 4.
fn mlp() -> (Graph, Vec<HostTensor>) {
    let mut graph = Graph::new("mlp");
    let p = Provenance::default();
    let shapes = [[3, 4], [4, 2], [2, 1], [5, 3], [5, 1]];
    let x = shapes.map(|shape| graph.parameter(TensorType::new(DType::F64, shape)));
    let dot = |graph: &mut Graph, a, b| {
        graph
            .add(Op::DotGeneral(DotDims::matmul(0)), &[a, b], &p)
            .expect("well typed")
    };
    let hidden = dot(&mut graph, x[3], x[0]);
    let hidden = graph.unary(UnaryOp::Tanh, hidden, &p).expect("well typed");
    let hidden = dot(&mut graph, hidden, x[1]);
    let hidden = graph.unary(UnaryOp::Sigmoid, hidden, &p).expect("well typed");
    let out = dot(&mut graph, hidden, x[2]);
    let error = graph.binary(BinaryOp::Sub, out, x[4], &p).expect("well typed");
    let square = graph.binary(BinaryOp::Mul, error, error, &p).expect("well typed");
    let loss = graph
        .reduce(ReduceOp::Sum, square, &[0, 1], &p)
        .expect("well typed");
    graph.output(loss, None);
    graph.output(out, None);
    let arguments = shapes
        .iter()
        .enumerate()
        .map(|(at, &shape)| floats(shape, (-1.0, 1.0), at as u64));
    (graph, arguments.collect())
}

#[test]
fn gradients_of_one_number() {
    let (graph, arguments) = mlp();
    let both = value_and_grad(&graph, &[0, 2], 0).expect("has a derivative");
    let results = run(&both, &arguments, &[]);
    let plain = run(&graph, &arguments, &[]);
    assert_eq!(results[..2], plain[..]);
    let alone = run(
        &grad(&graph, &[0, 2], 0).expect("has a derivative"),
        &arguments,
        &[],
    );
    assert_eq!(results[2..], alone[..]);
    assert_eq!(alone[0].ty().shape, Shape::from([3, 4]));
    for element in 0..12 {
        let unit = HostTensor::from_floats(
            DType::F64,
            [3, 4],
            (0..12).map(|at| f64::from(u8::from(at == element))),
        );
        let slope = differences(&graph, (&arguments, &[]), (&[0], &[0]), &[unit]);
        let expected = slope[0][0].expect("smooth");
        assert!((alone[0].to_f64s()[element] - expected).abs() < 1e-8);
    }
}

/// Second derivatives of a network by every pair of its weights.
#[test]
fn hessian_of_a_network() {
    let (graph, arguments) = mlp();
    let wrt = [0, 1, 2];
    let gradient = grad(&graph, &wrt, 0).expect("has a derivative");
    let second = run(
        &hessian(&graph, &wrt, 0).expect("has a derivative"),
        &arguments,
        &[],
    );
    assert_eq!(second.len(), 9);
    for (j, &by) in wrt.iter().enumerate() {
        let shape = &arguments[by].ty().shape;
        let count = shape.numel();
        for element in 0..count {
            let unit = (0..count).map(|at| f64::from(u8::from(at == element)));
            let unit = HostTensor::from_floats(DType::F64, shape.clone(), unit);
            let slopes = differences(&gradient, (&arguments, &[]), (&[by], &[0, 1, 2]), &[unit]);
            for (i, slopes) in slopes.iter().enumerate() {
                let column = second[3 * i + j].to_f64s();
                for (row, expected) in slopes.iter().enumerate() {
                    let expected = expected.expect("smooth");
                    let actual = column[row * count + element];
                    assert!((actual - expected).abs() < 1e-7, "{actual} is not {expected}");
                }
            }
        }
    }
    let shape: Shape = [3, 4, 2, 1].into();
    assert_eq!(second[2].ty().shape, shape);
}

#[test]
fn jacobians_agree_in_both_modes() {
    let (graph, arguments) = mlp();
    let forward = run(
        &jacobian(&graph, &[3, 1], &[1, 0], Mode::Forward).expect("fits"),
        &arguments,
        &[],
    );
    let reverse = run(
        &jacobian(&graph, &[3, 1], &[1, 0], Mode::Reverse).expect("fits"),
        &arguments,
        &[],
    );
    let shapes: Vec<Shape> = forward.iter().map(|x| x.ty().shape.clone()).collect();
    let expected: [Shape; 4] = [
        [5, 1, 5, 3].into(),
        [5, 1, 4, 2].into(),
        [5, 3].into(),
        [4, 2].into(),
    ];
    assert_eq!(shapes, expected);
    for (forward, reverse) in forward.iter().zip(&reverse) {
        assert_eq!(kiln_graph::testing::difference(forward, reverse, 1e-12), None);
    }
    // Each result depends on its own row.
    let by_batch = forward[0].to_f64s();
    assert!(by_batch[3..15].iter().all(|&x| x == 0.0) && by_batch[0] != 0.0);
}

#[test]
fn derivatives_by_nothing_and_of_nothing() {
    let mut graph = Graph::new("empty");
    let p = Provenance::default();
    let x = graph.parameter(TensorType::new(DType::F64, [0, 2]));
    let y = graph.reduce(ReduceOp::Sum, x, &[0], &p).expect("well typed");
    graph.output(y, None);
    for mode in [Mode::Forward, Mode::Reverse] {
        let jacobian = jacobian(&graph, &[0], &[0], mode).expect("fits");
        let results = run(&jacobian, &[floats([0, 2], (0.0, 1.0), 1)], &[]);
        assert_eq!(results[0].ty().shape, Shape::from([2, 0, 2]));
    }
}

/// What no output depends on, and an output that depends on nothing, have zeros.
#[test]
fn what_does_not_matter_is_zero() {
    let mut graph = Graph::new("apart");
    let p = Provenance::default();
    let a = graph.parameter(TensorType::new(DType::F64, [2]));
    let b = graph.parameter(TensorType::new(DType::F64, [3]));
    let rounded = graph.unary(UnaryOp::Round, a, &p).expect("well typed");
    graph.output(rounded, None);
    graph.output(b, None);
    let arguments = [floats([2], (-2.0, 2.0), 1), floats([3], (-2.0, 2.0), 2)];
    let ones = |n: usize| HostTensor::from_floats(DType::F64, [n], vec![1.0; n]);
    let reverse = vjp(&graph, &[0, 1], &[0]).expect("fits");
    let results = run(&reverse, &[&arguments[..], &[ones(2)]].concat(), &[]);
    assert_eq!(results[2].to_f64s(), [0.0, 0.0]);
    assert_eq!(results[3].to_f64s(), [0.0, 0.0, 0.0]);
    let forward = jvp(&graph, &[1], &[0, 1]).expect("fits");
    let results = run(&forward, &[&arguments[..], &[ones(3)]].concat(), &[]);
    assert_eq!(results[2].to_f64s(), [0.0, 0.0]);
    assert_eq!(results[3].to_f64s(), [1.0, 1.0, 1.0]);
}

/// Where a function has a kink, the convention is PyTorch's.
#[test]
fn conventions_at_kinks() {
    let slopes = |build: &dyn Fn(&mut Graph, Value, Value) -> Value, a: &[f64], b: &[f64]| {
        let mut graph = Graph::new("kink");
        let x = [a, b].map(|values| graph.parameter(TensorType::new(DType::F64, [values.len()])));
        let y = build(&mut graph, x[0], x[1]);
        graph.output(y, None);
        let shape = graph.shape(y).clone();
        let ones = HostTensor::from_floats(DType::F64, shape.clone(), vec![1.0; shape.numel()]);
        let arguments = [a, b].map(|values| HostTensor::from_vec([values.len()], values));
        let reverse = vjp(&graph, &[0], &[0]).expect("fits");
        run(&reverse, &[&arguments[..], &[ones]].concat(), &[])[1].to_f64s()
    };
    let p = Provenance::default();
    let maximum = |g: &mut Graph, a, b| g.binary(BinaryOp::Max, a, b, &p).expect("well typed");
    assert_eq!(
        slopes(&maximum, &[1.0, 2.0, 3.0], &[2.0, 2.0, 2.0]),
        [0.0, 1.0, 1.0]
    );
    // A NaN is the result, whichever side it is on; of two NaN each is half of it.
    let nan = f64::NAN;
    for op in [BinaryOp::Max, BinaryOp::Min] {
        let of_halves = |g: &mut Graph, a, _| {
            let [first, second] = [0..4, 4..8].map(|range| {
                let half = Op::slice(&[8], 0, range);
                g.add(half, &[a], &p).expect("well typed")
            });
            g.binary(op, first, second, &p).expect("well typed")
        };
        let found = slopes(&of_halves, &[nan, 1.0, nan, 2.0, 1.0, nan, nan, 2.0], &[0.0]);
        assert_eq!(found, [1.0, 0.0, 0.5, 0.5, 0.0, 1.0, 0.5, 0.5]);
    }
    let bounded = |g: &mut Graph, a, b| {
        let bound = g
            .full(2.0, &TensorType::new(DType::F64, [4]), &p)
            .expect("well typed");
        let above = g.binary(BinaryOp::Max, a, bound, &p).expect("well typed");
        g.binary(BinaryOp::Min, b, above, &p).expect("well typed")
    };
    let found = slopes(&bounded, &[nan, 2.0, 3.0, 1.0], &[5.0, 5.0, nan, 5.0]);
    assert_eq!(found, [1.0, 1.0, 0.0, 0.0]);
    let abs = |g: &mut Graph, a, _| g.unary(UnaryOp::Abs, a, &p).expect("well typed");
    assert_eq!(slopes(&abs, &[-1.0, 0.0, 3.0], &[0.0]), [-1.0, 0.0, 1.0]);
    let largest = |g: &mut Graph, a, _| g.reduce(ReduceOp::Max, a, &[0], &p).expect("well typed");
    assert_eq!(slopes(&largest, &[5.0, 1.0, 5.0], &[0.0]), [0.5, 0.0, 0.5]);
    // A NaN is reached by every NaN.
    assert_eq!(slopes(&largest, &[5.0, nan, nan], &[0.0]), [0.0, 0.5, 0.5]);
    let power = |g: &mut Graph, a, b| g.binary(BinaryOp::Pow, a, b, &p).expect("well typed");
    assert_eq!(
        slopes(&power, &[0.0, 0.0, 0.0, 2.0], &[0.0, 1.0, 2.0, 3.0]),
        [0.0, 1.0, 0.0, 12.0]
    );
    let running = |g: &mut Graph, a, _| {
        let op = Op::Cumulative {
            op: ReduceOp::Max,
            axis: 0,
        };
        g.add(op, &[a], &p).expect("well typed")
    };
    assert_eq!(
        slopes(&running, &[1.0, 3.0, 3.0, 2.0], &[0.0]),
        [1.0, 1.0, 2.0, 0.0]
    );
    assert_eq!(
        slopes(&running, &[1.0, nan, 3.0, nan], &[0.0]),
        [1.0, 2.0, 0.0, 1.0]
    );
}

/// In f16 there is no number as large as the number of elements that reach an extreme here, and in bf16 it is
/// not a number of its own.
#[test]
fn many_elements_that_reach_an_extreme_are_counted() {
    for (dtype, count) in [(DType::F16, 70_000), (DType::BF16, 257)] {
        let mut graph = Graph::new("ties");
        let p = Provenance::default();
        let x = graph.parameter(TensorType::new(dtype, [count]));
        let y = graph.reduce(ReduceOp::Max, x, &[0], &p).expect("well typed");
        graph.output(y, None);
        let number = |value: f64| HostTensor::from_floats(dtype, Shape::scalar(), [value]);
        let arguments = [
            HostTensor::from_floats(dtype, [count], vec![3.0; count]),
            number(256.0),
        ];
        let slopes = run(&vjp(&graph, &[0], &[0]).expect("fits"), &arguments, &[])[1].to_f64s();
        let each = number(256.0 / count as f64).to_f64s()[0];
        assert_eq!(slopes, vec![each; count], "{dtype}");
    }
}

/// The floor of a quotient that is rounded up to an integer is the one below.
#[test]
fn a_remainder_moves_by_the_multiple_that_was_taken_away() {
    let mut graph = Graph::new("remainder");
    let p = Provenance::default();
    let [a, b] = [0, 1].map(|_| graph.parameter(TensorType::new(DType::F64, [4])));
    let y = graph.binary(BinaryOp::Rem, a, b, &p).expect("well typed");
    graph.output(y, None);
    let arguments = [
        HostTensor::from_vec([4], [1.0, 7.5, -1.0, -0.5]),
        HostTensor::from_vec([4], [0.1, 2.0, -0.1, 2.0]),
        HostTensor::from_vec([4], [1.0; 4]),
    ];
    let results = run(&vjp(&graph, &[1], &[0]).expect("fits"), &arguments, &[]);
    assert!(0.09 < results[0].to_f64s()[0], "{:?}", results[0].to_f64s());
    assert_eq!(results[1].to_f64s(), [-9.0, -3.0, -9.0, 1.0]);
}

/// A power is differentiated by its exponent too, also at a base of 0, and twice.
#[test]
fn powers_at_zero() {
    let mut graph = Graph::new("power");
    let p = Provenance::default();
    let a = graph.parameter(TensorType::new(DType::F64, [3]));
    let b = graph.parameter(TensorType::new(DType::F64, [3]));
    let y = graph.binary(BinaryOp::Pow, a, b, &p).expect("well typed");
    let y = graph.reduce(ReduceOp::Sum, y, &[0], &p).expect("well typed");
    graph.output(y, None);
    let arguments = [
        HostTensor::from_vec([3], [0.0, 0.0, 2.0]),
        HostTensor::from_vec([3], [2.0, 3.0, 2.0]),
    ];
    let first = run(&grad(&graph, &[0, 1], 0).expect("fits"), &arguments, &[]);
    assert_eq!(first[0].to_f64s(), [0.0, 0.0, 4.0]);
    assert_eq!(first[1].to_f64s()[..2], [0.0, 0.0]);
    let second = run(&hessian(&graph, &[0], 0).expect("fits"), &arguments, &[]);
    assert_eq!(second[0].to_f64s(), [2.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 2.0]);
}

#[test]
fn draws_are_constant() {
    let mut graph = Graph::new("noise");
    let p = Provenance::default();
    let x = graph.parameter(TensorType::new(DType::F64, [3, 5]));
    let words = [0, 1].map(|_| graph.scalar(DType::U64));
    let op = draws()[0].op.clone();
    let noise = graph.add(op, &words, &p).expect("well typed");
    let y = graph.binary(BinaryOp::Mul, x, noise, &p).expect("well typed");
    graph.output(y, None);
    let arguments = [floats([3, 5], (-1.0, 1.0), 1)];
    assert_eq!(
        check(&graph, &arguments, &[Scalar::UInt(3), Scalar::UInt(4)], 1),
        15
    );
}

#[test]
fn what_has_no_derivative_says_so() {
    let p = Provenance {
        operation: Some("MyOp".into()),
        location: Some("src/main.rs:3".into()),
        ..Provenance::default()
    };
    let mut graph = Graph::new("own");
    let x = graph.parameter(TensorType::new(DType::F32, [2]));
    let ids = graph.parameter(TensorType::new(DType::I64, [2]));
    let op = ExternOp {
        name: "my_filter".into(),
        attributes: String::new(),
        c_source: String::new(),
        outputs: [TensorType::new(DType::F32, [2])].into_iter().collect(),
    };
    let y = graph.add(Op::Extern(Box::new(op)), &[x], &p).expect("well typed");
    for value in [y, ids, x] {
        graph.output(value, None);
    }
    let error = vjp(&graph, &[0], &[0]).expect_err("kept whole");
    assert!(matches!(&error, FuncError::NoDerivative { operation, .. } if operation == "my_filter"));
    let text = error.to_string();
    assert!(
        text.contains("`my_filter` (MyOp at src/main.rs:3) has no derivative: it is kept whole"),
        "{text}"
    );
    // It is no obstacle where nothing differentiated runs through it.
    assert!(jvp(&graph, &[], &[0]).is_ok());
    // Nor for an output that does not depend on it. It is computed all the same.
    for derivative in [vjp(&graph, &[0], &[2]), jvp(&graph, &[0], &[2])] {
        let text = derivative.expect("the parameter itself has one").to_string();
        assert!(text.contains("my_filter"), "{text}");
    }
    assert!(vjp(&graph, &[0], &[2, 0]).is_err());
    assert!(matches!(
        vjp(&graph, &[1], &[2]),
        Err(FuncError::DiscreteParameter { index: 1, .. })
    ));
    assert!(matches!(
        vjp(&graph, &[0], &[1]),
        Err(FuncError::DiscreteOutput { index: 1, .. })
    ));
    assert!(matches!(
        vjp(&graph, &[2], &[2]),
        Err(FuncError::NoParameter {
            index: 2,
            count: 2,
            ..
        })
    ));
    assert!(matches!(
        jvp(&graph, &[0], &[3]),
        Err(FuncError::NoOutput {
            index: 3,
            count: 3,
            ..
        })
    ));
    assert!(matches!(
        grad(&graph, &[0], 2),
        Err(FuncError::NotOneNumber { index: 2, .. })
    ));
}

/// A gradient node says which operation it belongs to.
#[test]
fn gradients_have_an_origin() {
    let mut graph = Graph::new("origin");
    let p = Provenance {
        location: Some("src/model.rs:7".into()),
        ..Provenance::operation("Float.Exp")
    };
    let x = graph.parameter(TensorType::new(DType::F64, [2]));
    let y = graph.unary(UnaryOp::Exp, x, &p).expect("well typed");
    graph.output(y, None);
    let reverse = vjp(&graph, &[0], &[0]).expect("fits");
    let node = reverse.def(reverse.outputs[1].value);
    assert_eq!(node.provenance.gradient_of.as_deref(), Some("Float.Exp"));
    assert_eq!(node.provenance.location.as_deref(), Some("src/model.rs:7"));
}
