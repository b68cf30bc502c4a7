//! Every batching rule against a loop over the elements of the batch, alone and together with derivatives.

mod common;

use common::{Case, cases, draws, float_outputs, float_parameters, floats, generic, run};
use kiln_func::{FuncError, Randomness, grad, jvp, vjp, vmap};
use kiln_graph::op::{BinaryOp, DotDims, ExternOp, Op, RandomKind, ReduceOp, UnaryOp};
use kiln_graph::testing::{Family, GraphConfig, Rng, difference, random_arguments, random_graph, seeds};
use kiln_graph::{DType, Graph, HostTensor, Provenance, Scalar, Shape, TensorType, philox};

/// The tensors joined along a new dimension `dim`.
fn stack(tensors: &[HostTensor], dim: usize) -> HostTensor {
    let mut graph = Graph::new("stack");
    let p = Provenance::default();
    let mut shape = tensors[0].ty().shape.to_vec();
    shape.insert(dim, 1);
    let parts: Vec<_> = tensors
        .iter()
        .map(|tensor| {
            let x = graph.parameter(tensor.ty().clone());
            graph
                .add(Op::Reshape(Shape::from(shape.clone())), &[x], &p)
                .expect("well typed")
        })
        .collect();
    let joined = graph
        .add(Op::Concat { axis: dim }, &parts, &p)
        .expect("well typed");
    graph.output(joined, None);
    kiln_graph::interpret(&graph, tensors, &[])
        .expect("runs")
        .remove(0)
}

/// Arguments of each element of a batch: its own where `varies`, the first one's elsewhere.
fn elements(arguments: &[Vec<HostTensor>], varies: &[bool]) -> Vec<Vec<HostTensor>> {
    let own = |element: &Vec<HostTensor>| {
        let pick = |at: usize| {
            if varies[at] {
                element[at].clone()
            } else {
                arguments[0][at].clone()
            }
        };
        (0..element.len()).map(pick).collect()
    };
    arguments.iter().map(own).collect()
}

/// The batched graph on stacked arguments agrees with the graph on each element's. `dims` are where the batch
/// of each parameter and of all outputs is, as far as their ranks allow.
fn check(
    graph: &Graph,
    arguments: &[Vec<HostTensor>],
    varies: &[bool],
    scalars: &[Scalar],
    (in_dim, out_dim): (usize, usize),
) {
    let size = arguments.len();
    let arguments = elements(arguments, varies);
    let in_dims: Vec<Option<usize>> = (0..varies.len())
        .map(|at| varies[at].then(|| in_dim.min(arguments[0][at].ty().shape.rank())))
        .collect();
    let out_dims: Vec<Option<usize>> = graph
        .outputs
        .iter()
        .map(|output| Some(out_dim.min(graph.shape(output.value).rank())))
        .collect();
    let batched = vmap(graph, &in_dims, size, &out_dims, Randomness::Same)
        .unwrap_or_else(|error| panic!("{error}\n{graph}"));
    let stacked: Vec<HostTensor> = in_dims
        .iter()
        .enumerate()
        .map(|(at, dim)| match dim {
            None => arguments[0][at].clone(),
            Some(dim) => {
                let all: Vec<HostTensor> = arguments.iter().map(|element| element[at].clone()).collect();
                stack(&all, *dim)
            }
        })
        .collect();
    let actual = run(&batched, &stacked, scalars);
    let each: Vec<Vec<HostTensor>> = arguments
        .iter()
        .map(|element| run(graph, element, scalars))
        .collect();
    for (output, dim) in out_dims.iter().enumerate() {
        let all: Vec<HostTensor> = each.iter().map(|results| results[output].clone()).collect();
        let expected = stack(&all, dim.expect("every output has one"));
        let largest = expected
            .to_f64s()
            .iter()
            .filter(|x| x.is_finite())
            .fold(1.0f64, |a, b| a.max(b.abs()));
        if let Some(difference) = difference(&actual[output], &expected, 1e-10 * largest) {
            panic!("output {output}: {difference}, batched {varies:?}\n{graph}\n{batched}");
        }
    }
}

/// Operands for further elements: other floats and bools, the same integers in another order of rows.
fn further(case: &Case, element: u64) -> Vec<HostTensor> {
    let operands = case.operands.iter().enumerate();
    let of = |(at, x): (usize, &HostTensor)| {
        let ty = x.ty().clone();
        if element == 0 {
            x.clone()
        } else if ty.dtype == DType::Bool {
            generic(&ty, element * 77 + at as u64)
        } else if ty.dtype.is_float() {
            // Inside the domain of the function: a little closer to the middle.
            let values = x.to_f64s();
            let middle = values.iter().sum::<f64>() / values.len().max(1) as f64;
            let values = values
                .into_iter()
                .rev()
                .map(|x| x + (middle - x) * 0.2 * element as f64);
            HostTensor::from_floats(ty.dtype, ty.shape, values.collect::<Vec<f64>>())
        } else if ty.shape.rank() == 0 {
            let value = x.to_i64s()[0] + element as i64;
            HostTensor::from_ints(ty.dtype, ty.shape, [value])
        } else {
            let mut values = x.to_i64s();
            let count = values.len().max(1);
            values.rotate_left(element as usize % count);
            HostTensor::from_ints(ty.dtype, ty.shape, values)
        }
    };
    operands.map(of).collect()
}

/// Every choice of the operands that differ between elements; of many operands, a few choices.
fn choices(count: usize) -> Vec<Vec<bool>> {
    let all = (1u32..1 << count).map(|bits| (0..count).map(|at| bits >> at & 1 == 1).collect());
    if count <= 4 {
        return all.collect();
    }
    let one = (0..count).map(|only| (0..count).map(|at| at == only).collect());
    let mut rng = Rng::new(count as u64);
    let some = (0..6).map(|_| (0..count).map(|_| rng.below(2) == 0).collect());
    one.chain([vec![true; count]])
        .chain(some.collect::<Vec<_>>())
        .collect()
}

#[test]
fn every_primitive() {
    for case in cases().iter().chain(&draws()) {
        let graph = case.graph();
        let arguments: Vec<Vec<HostTensor>> = (0..3).map(|element| further(case, element)).collect();
        for (at, varies) in choices(case.operands.len()).into_iter().enumerate() {
            check(&graph, &arguments, &varies, &[], (at % 3, (at + 1) % 3));
        }
    }
}

/// Per-sample gradients of every primitive: batching what differentiation makes.
#[test]
fn every_derivative() {
    for case in cases() {
        let graph = case.graph();
        let (wrt, outputs) = (float_parameters(&graph), float_outputs(&graph));
        if wrt.is_empty() || outputs.is_empty() {
            continue;
        }
        let cotangents = |element: u64| {
            let of = outputs
                .iter()
                .map(|&index| graph.shape(graph.outputs[index].value).clone());
            of.map(move |shape| floats(shape, (-1.0, 1.0), 9 + element))
                .collect::<Vec<_>>()
        };
        let reverse = vjp(&graph, &wrt, &outputs).unwrap_or_else(|error| panic!("{error}"));
        let arguments: Vec<Vec<HostTensor>> = (0..2)
            .map(|element| [further(&case, element), cotangents(element)].concat())
            .collect();
        let count = arguments[0].len();
        check(&reverse, &arguments, &vec![true; count], &[], (0, 0));
        let only_cotangents: Vec<bool> = (0..count).map(|at| at >= case.operands.len()).collect();
        check(&reverse, &arguments, &only_cotangents, &[], (0, 1));
        // The derivative of what batching makes.
        let in_dims = vec![Some(0); case.operands.len()];
        let out_dims = vec![Some(0); graph.outputs.len()];
        let batched = vmap(&graph, &in_dims, 2, &out_dims, Randomness::Same).expect("checked");
        let of_batch = vjp(&batched, &wrt, &outputs).unwrap_or_else(|error| panic!("{error}"));
        let stacked: Vec<HostTensor> = (0..count)
            .map(|at| stack(&[arguments[0][at].clone(), arguments[1][at].clone()], 0))
            .collect();
        let actual = run(&of_batch, &stacked, &[]);
        let each: Vec<_> = arguments
            .iter()
            .map(|element| run(&reverse, element, &[]))
            .collect();
        for (output, actual) in actual.iter().enumerate() {
            let expected = stack(&[each[0][output].clone(), each[1][output].clone()], 0);
            assert_eq!(difference(actual, &expected, 1e-9), None, "{}", case.op.name());
        }
    }
}

#[test]
fn random_graphs() {
    let config = GraphConfig {
        steps: 10,
        max_elements: 40,
        floats: vec![DType::F64],
        ints: vec![DType::I64, DType::I32, DType::U8],
        ..GraphConfig::default()
    };
    for seed in seeds(0..150) {
        let config = GraphConfig {
            together: seed % 2 == 1,
            ..config.clone()
        };
        let graph = random_graph(seed, &config).graph;
        let scalars = random_arguments(&graph, seed).1;
        let mut rng = Rng::new(seed);
        let arguments: Vec<Vec<HostTensor>> = (0..2)
            .map(|_| {
                graph
                    .parameters()
                    .iter()
                    .map(|&value| generic(graph.ty(value), rng.draw()))
                    .collect()
            })
            .collect();
        let varies: Vec<bool> = graph.parameters().iter().map(|_| rng.below(3) > 0).collect();
        let dims = (rng.below(3) as usize, rng.below(3) as usize);
        check(&graph, &arguments, &varies, &scalars, dims);
    }
}

/// Batching twice is batching over two dimensions, and gradients of random graphs batch.
#[test]
fn transforms_of_transforms() {
    let config = GraphConfig {
        steps: 5,
        max_elements: 20,
        floats: vec![DType::F64],
        ints: vec![DType::I64],
        zero_sized: false,
        together: false,
        families: Family::ALL
            .iter()
            .copied()
            .filter(|&family| family != Family::Random)
            .collect(),
    };
    for seed in seeds(0..40) {
        let config = GraphConfig {
            together: seed % 2 == 1,
            ..config.clone()
        };
        let graph = random_graph(seed, &config).graph;
        let scalars = random_arguments(&graph, seed).1;
        let mut rng = Rng::new(seed);
        let count = graph.parameters().len();
        let all = |graph: &Graph| vec![Some(0); graph.parameters().len()];
        let out_dims = vec![Some(0); graph.outputs.len()];
        let once = vmap(&graph, &all(&graph), 2, &out_dims, Randomness::Same).expect("has a batched form");
        let arguments: Vec<Vec<HostTensor>> = (0..3)
            .map(|_| {
                once.parameters()
                    .iter()
                    .map(|&value| generic(once.ty(value), rng.draw()))
                    .collect()
            })
            .collect();
        check(&once, &arguments, &vec![true; count], &scalars, (1, 2));
        let (wrt, outputs) = (float_parameters(&graph), float_outputs(&graph));
        for derived in [vjp(&graph, &wrt, &outputs), jvp(&graph, &wrt, &outputs)] {
            let derived = derived.unwrap_or_else(|error| panic!("{error}\n{graph}"));
            let arguments: Vec<Vec<HostTensor>> = (0..2)
                .map(|_| {
                    derived
                        .parameters()
                        .iter()
                        .map(|&value| generic(derived.ty(value), rng.draw()))
                        .collect()
                })
                .collect();
            let varies: Vec<bool> = derived.parameters().iter().map(|_| rng.below(3) > 0).collect();
            check(&derived, &arguments, &varies, &scalars, (0, 0));
        }
    }
}

/// A convolutional network's loss of one image: kernels and weights are parameters 0 to 2, the image 3.
fn network() -> Graph {
    let mut graph = Graph::new("network");
    let p = Provenance::default();
    let shapes: [&[usize]; 4] = [&[3, 2, 3, 3], &[3, 3], &[3], &[1, 2, 5, 5]];
    let x: Vec<_> = shapes
        .iter()
        .map(|&shape| graph.parameter(TensorType::new(DType::F64, shape)))
        .collect();
    let mut add = |op: Op, inputs: &[kiln_graph::Value]| graph.add(op, inputs, &p).expect("well typed");
    let ones = || kiln_graph::op::Dims::from_elem(1, 2);
    let conv = common::conv_dims(ones(), ones(), ones(), ones(), 1);
    let image = add(Op::Conv(conv), &[x[3], x[0]]);
    let image = add(Op::Unary(UnaryOp::Tanh), &[image]);
    let planes = add(
        Op::Reduce {
            op: ReduceOp::Max,
            axes: [2, 3][..].into(),
        },
        &[image],
    );
    let out = add(Op::DotGeneral(DotDims::matmul(0)), &[planes, x[1]]);
    let out = add(Op::Reshape(Shape::from([3])), &[out]);
    let out = add(Op::Binary(BinaryOp::Add), &[out, x[2]]);
    let out = add(Op::Binary(BinaryOp::Mul), &[out, out]);
    let loss = add(
        Op::Reduce {
            op: ReduceOp::Sum,
            axes: [0][..].into(),
        },
        &[out],
    );
    graph.output(loss, None);
    graph
}

/// Per-sample gradients: the weights are the same for all, the image is the element's own.
#[test]
fn gradients_of_each_sample() {
    let gradient = grad(&network(), &[0, 1, 2], 0).expect("has a derivative");
    let arguments: Vec<Vec<HostTensor>> = (0..4)
        .map(|element| {
            let of = gradient.parameters().iter().enumerate();
            of.map(|(at, &value)| generic(gradient.ty(value), 10 * element + at as u64))
                .collect()
        })
        .collect();
    check(&gradient, &arguments, &[false, false, false, true], &[], (0, 0));
}

/// Different draws are the rows of one draw of a larger tensor; the same draw is that of the function alone.
#[test]
fn draws_of_a_batch() {
    for case in draws() {
        let Op::Random { kind, dtype, shape } = case.op.clone() else {
            panic!("no draw")
        };
        let graph = case.graph();
        let none = vec![None; case.operands.len()];
        let different = vmap(&graph, &none, 4, &[Some(0)], Randomness::Different).expect("fits");
        let drawn = run(&different, &case.operands, &[]).remove(0);
        let word = |at: usize| case.operands[at].to_i64s()[0];
        let range = if kind == RandomKind::IntRange {
            (word(2), word(3))
        } else {
            (0, 0)
        };
        let wide: Shape = [4].into_iter().chain(shape.iter().copied()).collect();
        let expected = philox::fill(kind, dtype, &wide, word(0) as u64, word(1) as u64, range);
        assert_eq!(drawn.to_f64s(), expected.to_f64s());
        // With streams of their own, elements still take the rows of their own large draws.
        let mut own = none.clone();
        own[1] = Some(0);
        let streams = [11u64, 12, 13, 14];
        let mut operands = case.operands.clone();
        operands[1] = HostTensor::from_vec([4], streams);
        let different = vmap(&graph, &own, 4, &[Some(0)], Randomness::Different).expect("fits");
        let drawn = run(&different, &operands, &[]).remove(0).to_f64s();
        for (row, &stream) in streams.iter().enumerate() {
            let whole = philox::fill(kind, dtype, &wide, word(0) as u64, stream, range).to_f64s();
            assert_eq!(drawn[15 * row..15 * (row + 1)], whole[15 * row..15 * (row + 1)]);
        }
        let same = vmap(&graph, &none, 4, &[Some(0)], Randomness::Same).expect("fits");
        let drawn = run(&same, &case.operands, &[]).remove(0).to_f64s();
        let alone = run(&graph, &case.operands, &[]).remove(0).to_f64s();
        assert!(drawn.chunks(15).all(|row| row == alone));
        // What all draw alike does not differ; what each draws for itself does.
        assert!(vmap(&graph, &none, 4, &[None], Randomness::Same).is_ok());
        let error = vmap(&graph, &none, 4, &[None], Randomness::Different);
        assert_eq!(error, Err(FuncError::Differs { index: 0 }));
    }
}

/// Attention that drops differently for each element drops what one draw over the batch says, whole or
/// written out.
#[test]
fn dropout_of_a_batch() {
    for case in cases() {
        let (Op::Attention(dims) | Op::AttentionGrad(dims)) = case.op else {
            continue;
        };
        if !dims.dropout {
            continue;
        }
        let graph = case.graph();
        let arguments: Vec<Vec<HostTensor>> = (0..2).map(|element| further(&case, element)).collect();
        let count = case.operands.len();
        let out_dims = vec![Some(0); graph.outputs.len()];
        let of = |varies: &[bool]| {
            let in_dims: Vec<Option<usize>> = varies.iter().map(|&varies| varies.then_some(0)).collect();
            let batched = vmap(&graph, &in_dims, 2, &out_dims, Randomness::Different).expect("fits");
            let stacked: Vec<HostTensor> = (0..count)
                .map(|at| match varies[at] {
                    false => arguments[0][at].clone(),
                    true => stack(&[arguments[0][at].clone(), arguments[1][at].clone()], 0),
                })
                .collect();
            let whole = batched.nodes().any(|(_, node)| node.op.name() == case.op.name());
            (run(&batched, &stacked, &[]), whole)
        };
        // Queries and keys that differ leave the operation whole; so does nothing that differs.
        let mut varies = vec![false; count];
        varies[0] = true;
        varies[1] = true;
        let (kept, whole) = of(&varies);
        assert!(whole);
        // A number that differs, though equal in all elements, does not.
        let mut equal = arguments.clone();
        equal[1][3] = equal[0][3].clone();
        varies[3] = true;
        let in_dims: Vec<Option<usize>> = varies.iter().map(|&varies| varies.then_some(0)).collect();
        let batched = vmap(&graph, &in_dims, 2, &out_dims, Randomness::Different).expect("fits");
        assert!(batched.nodes().all(|(_, node)| node.op.name() != case.op.name()));
        let stacked: Vec<HostTensor> = (0..count)
            .map(|at| match varies[at] {
                false => equal[0][at].clone(),
                true => stack(&[equal[0][at].clone(), equal[1][at].clone()], 0),
            })
            .collect();
        for (kept, written) in kept.iter().zip(run(&batched, &stacked, &[])) {
            assert_eq!(difference(&written, kept, 1e-12), None);
        }
    }
}

#[test]
fn what_cannot_be_batched_says_so() {
    let mut graph = Graph::new("own");
    let p = Provenance::operation("MyOp");
    let x = graph.parameter(TensorType::new(DType::F32, [2]));
    let op = ExternOp {
        name: "my_filter".into(),
        attributes: String::new(),
        c_source: String::new(),
        outputs: [TensorType::new(DType::F32, [2])].into_iter().collect(),
    };
    let y = graph.add(Op::Extern(Box::new(op)), &[x], &p).expect("well typed");
    graph.output(y, None);
    let batch = |in_dims: &[Option<usize>], size, out_dims: &[Option<usize>]| {
        vmap(&graph, in_dims, size, out_dims, Randomness::Same)
    };
    let error = batch(&[Some(0)], 3, &[Some(0)]).expect_err("kept whole");
    assert!(
        error
            .to_string()
            .starts_with("`my_filter` (MyOp) cannot be batched: it is kept whole"),
        "{error}"
    );
    // On what is the same for all it is called once.
    assert!(batch(&[None], 3, &[Some(1)]).is_ok());
    assert_eq!(batch(&[None], 0, &[Some(0)]), Err(FuncError::EmptyBatch));
    assert!(matches!(
        batch(&[], 3, &[None]),
        Err(FuncError::DimCount {
            what: "parameters",
            ..
        })
    ));
    assert!(matches!(
        batch(&[None], 3, &[]),
        Err(FuncError::DimCount { what: "outputs", .. })
    ));
    assert!(matches!(
        batch(&[Some(2)], 3, &[None]),
        Err(FuncError::DimRange {
            what: "parameter",
            dim: 2,
            ..
        })
    ));
    assert!(matches!(
        batch(&[None], 3, &[Some(2)]),
        Err(FuncError::DimRange {
            what: "output",
            dim: 2,
            ..
        })
    ));
    assert!(matches!(
        batch(&[Some(0)], usize::MAX, &[None]),
        Err(FuncError::Type(_))
    ));
}
