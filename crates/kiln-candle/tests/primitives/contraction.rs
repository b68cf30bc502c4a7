//! Matrix products, convolutions, pooling and attention.

use crate::common::{
    FLOATS, INTS, Relative, check, check_by, check_sum, graph_of, random, random_indices, scalar, wild,
};
use kiln_graph::interpret::interpret;
use kiln_graph::op::{ConvDims, Dims, DotDims, Op, ScatterMode, Window};
use kiln_graph::testing::every_attention;
use kiln_graph::{DType, Graph, HostTensor, Provenance, Shape, TensorType};

fn dims<const N: usize>(list: [usize; N]) -> Dims {
    Dims::from_slice(&list)
}

#[test]
fn matrix_products() {
    let general = DotDims {
        a_batch: dims([3, 0]),
        b_batch: dims([1, 2]),
        a_contract: dims([1]),
        b_contract: dims([0]),
        result: None,
    };
    let outer = DotDims::default();
    let two = DotDims {
        a_contract: dims([0, 2]),
        b_contract: dims([2, 0]),
        ..DotDims::default()
    };
    let cases: [(DotDims, &[usize], &[usize]); 9] = [
        (DotDims::matmul(0), &[5, 7], &[7, 3]),
        (DotDims::matmul(0), &[1, 130], &[130, 1]),
        (DotDims::matmul(2), &[2, 3, 4, 5], &[2, 3, 5, 6]),
        (general, &[2, 5, 3, 4], &[5, 4, 2, 7]),
        (outer, &[2, 3], &[4]),
        (two, &[3, 2, 4], &[4, 2, 3]),
        (DotDims::matmul(0), &[3, 0], &[0, 2]),
        (DotDims::matmul(1), &[0, 3, 2], &[0, 2, 4]),
        (DotDims::matmul(0), &[0, 3], &[3, 2]),
    ];
    for dtype in FLOATS.into_iter().chain(INTS) {
        for (dims, a, b) in &cases {
            check_sum(
                Op::DotGeneral(dims.clone()),
                &[random(dtype, *a, 1), random(dtype, *b, 2)],
            );
            if dtype.is_int() {
                check(
                    Op::DotGeneral(dims.clone()),
                    &[wild(dtype, *a, 1), wild(dtype, *b, 2)],
                );
            }
        }
    }
    // NaN and infinities go where the formula sends them.
    for dtype in FLOATS {
        check_sum(
            Op::DotGeneral(DotDims::matmul(0)),
            &[wild(dtype, [9, 3], 1), wild(dtype, [3, 8], 2)],
        );
    }
}

struct Case {
    x: &'static [usize],
    w: &'static [usize],
    conv: ConvDims,
}

fn case<const N: usize>(
    x: &'static [usize],
    w: &'static [usize],
    [stride, pad_low, pad_high, dilation]: [[usize; N]; 4],
    groups: usize,
) -> Case {
    let conv = ConvDims {
        stride: dims(stride),
        pad_low: dims(pad_low),
        pad_high: dims(pad_high),
        dilation: dims(dilation),
        groups,
        result: None,
    };
    Case { x, w, conv }
}

fn convolutions() -> Vec<Case> {
    vec![
        case(&[2, 3, 8], &[4, 3, 3], [[1], [1], [1], [1]], 1),
        case(&[1, 4, 9], &[6, 2, 3], [[2], [0], [3], [2]], 2),
        case(&[2, 3, 7, 6], &[5, 3, 3, 2], [[1, 1], [1, 0], [1, 1], [1, 1]], 1),
        case(&[2, 4, 7, 9], &[4, 1, 3, 3], [[2, 3], [1, 2], [0, 1], [1, 2]], 4),
        case(&[1, 6, 5, 5], &[4, 3, 1, 1], [[1, 1], [0, 0], [0, 0], [1, 1]], 2),
        case(
            &[1, 2, 4, 5, 6],
            &[3, 2, 2, 3, 2],
            [[1, 2, 1], [1, 0, 1], [0, 1, 0], [2, 1, 1]],
            1,
        ),
        // The last rows of the input are read by no window.
        case(&[1, 2, 8, 8], &[2, 2, 2, 2], [[3, 3], [0, 0], [0, 0], [1, 1]], 1),
        // Nothing but padding, no channels, no samples.
        case(&[1, 2, 0], &[3, 2, 2], [[1], [1], [1], [1]], 1),
        case(&[2, 0, 4], &[3, 0, 2], [[1], [0], [0], [1]], 1),
        case(&[0, 2, 4], &[3, 2, 2], [[1], [0], [0], [1]], 1),
        case(&[2, 2, 4], &[0, 2, 2], [[1], [0], [0], [1]], 1),
    ]
}

#[test]
fn convolutions_and_their_gradients() {
    for dtype in FLOATS
        .into_iter()
        .chain([DType::I64, DType::I32, DType::U8, DType::U64])
    {
        for Case { x, w, conv } in convolutions() {
            let (x, w) = (random(dtype, x, 1), random(dtype, w, 2));
            let input = Dims::from_slice(&x.ty().shape[2..]);
            let kernel = Dims::from_slice(&w.ty().shape[2..]);
            let y = check_sum(Op::Conv(conv.clone()), &[x.clone(), w.clone()]);
            let dy = random(dtype, y[0].ty().shape.clone(), 3);
            let gradient = Op::ConvInputGrad {
                conv: conv.clone(),
                input,
            };
            check_sum(gradient, &[dy.clone(), w]);
            check_sum(Op::ConvWeightGrad { conv, kernel }, &[x, dy]);
        }
    }
}

/// Padding takes no part: an infinite weight or gradient over it does not make NaN of it.
#[test]
fn convolutions_of_infinities_and_nan() {
    for dtype in FLOATS {
        for Case { x, w, conv } in convolutions() {
            for (wild_x, wild_w) in [(true, false), (false, true), (true, true)] {
                let data = |is_wild: bool, shape: &[usize], seed| match is_wild {
                    true => wild(dtype, shape, seed),
                    false => random(dtype, shape, seed),
                };
                let (x, w) = (data(wild_x, x, 1), data(wild_w, w, 2));
                let input = Dims::from_slice(&x.ty().shape[2..]);
                let kernel = Dims::from_slice(&w.ty().shape[2..]);
                let y = check_sum(Op::Conv(conv.clone()), &[x.clone(), w.clone()]);
                let dy = data(wild_w, &y[0].ty().shape, 3);
                check_sum(
                    Op::ConvInputGrad {
                        conv: conv.clone(),
                        input,
                    },
                    &[dy.clone(), w],
                );
                check_sum(
                    Op::ConvWeightGrad {
                        conv: conv.clone(),
                        kernel,
                    },
                    &[x, dy],
                );
            }
        }
    }
}

#[test]
fn integer_convolutions_wrap() {
    for dtype in INTS {
        for Case { x, w, conv } in convolutions().into_iter().take(4) {
            let (x, w) = (wild(dtype, x, 1), wild(dtype, w, 2));
            let input = Dims::from_slice(&x.ty().shape[2..]);
            let kernel = Dims::from_slice(&w.ty().shape[2..]);
            let y = check(Op::Conv(conv.clone()), &[x.clone(), w.clone()]);
            let dy = wild(dtype, y[0].ty().shape.clone(), 3);
            check(
                Op::ConvInputGrad {
                    conv: conv.clone(),
                    input,
                },
                &[dy.clone(), w],
            );
            check(Op::ConvWeightGrad { conv, kernel }, &[x, dy]);
        }
    }
}

fn window<const N: usize>(
    [size, stride, pad_low, pad_high, dilation]: [[usize; N]; 5],
    ceil_mode: bool,
) -> Window {
    Window {
        size: dims(size),
        stride: dims(stride),
        pad_low: dims(pad_low),
        pad_high: dims(pad_high),
        dilation: dims(dilation),
        ceil_mode,
    }
}

fn pools() -> Vec<(Vec<usize>, Window)> {
    vec![
        (vec![2, 3, 9], window([[3], [2], [1], [1], [1]], false)),
        (vec![2, 3, 10], window([[3], [2], [0], [0], [1]], true)),
        (
            vec![2, 2, 7, 6],
            window([[2, 3], [2, 1], [1, 0], [0, 2], [1, 1]], false),
        ),
        (
            vec![1, 2, 7, 8],
            window([[3, 2], [3, 3], [1, 1], [1, 0], [1, 1]], true),
        ),
        (
            vec![1, 2, 4, 3, 5],
            window([[2, 2, 2], [1, 2, 2], [1, 0, 0], [0, 1, 1], [1, 1, 1]], true),
        ),
        // A window that sees padding only.
        (vec![1, 1, 2], window([[1], [1], [2], [1], [1]], false)),
        (vec![1, 2, 0], window([[2], [1], [1], [1], [1]], false)),
        (vec![0, 2, 4], window([[2], [1], [1], [1], [1]], false)),
    ]
}

#[test]
fn max_pooling() {
    for dtype in FLOATS.into_iter().chain(INTS) {
        let mut cases = pools();
        cases.push((
            vec![2, 1, 9, 8],
            window([[2, 3], [1, 2], [1, 1], [0, 1], [3, 2]], false),
        ));
        for (shape, window) in cases {
            let spatial = Dims::from_slice(&shape[2..]);
            let lowest = match dtype {
                _ if dtype.is_float() => HostTensor::from_floats(
                    dtype,
                    &shape[..],
                    vec![f64::NEG_INFINITY; shape.iter().product()],
                ),
                _ => HostTensor::from_floats(dtype, &shape[..], vec![-1e30; shape.iter().product()]),
            };
            for x in [random(dtype, &shape[..], 1), wild(dtype, &shape[..], 2), lowest] {
                check(Op::MaxPool(window.clone()), std::slice::from_ref(&x));
                let op = Op::MaxPoolWithIndices {
                    window: window.clone(),
                    dtype: DType::I64,
                };
                let pooled = check(op, &[x]);
                if spatial.iter().product::<usize>() > 0 {
                    let dy = random(dtype, pooled[0].ty().shape.clone(), 3);
                    let op = Op::MaxPoolGrad {
                        input: spatial.clone(),
                    };
                    check_by(op, &[dy, pooled[1].clone()], Relative::Tensor, 1.0);
                }
            }
        }
    }
}

#[test]
fn average_pooling() {
    for dtype in FLOATS.into_iter().chain(INTS) {
        for (shape, window) in pools() {
            for count_include_pad in [false, true] {
                let x = random(dtype, &shape[..], 1);
                let op = Op::AvgPool {
                    window: window.clone(),
                    count_include_pad,
                };
                let pooled = check_by(op, &[x], Relative::Tensor, 1.0);
                let dy = random(dtype, pooled[0].ty().shape.clone(), 3);
                let op = Op::AvgPoolGrad {
                    window: window.clone(),
                    count_include_pad,
                    input: Dims::from_slice(&shape[2..]),
                };
                check_by(op, &[dy], Relative::Tensor, 1.0);
            }
        }
    }
}

/// What a mean divides by is counted without a dilation, so the graph takes none.
#[test]
fn means_have_no_dilation() {
    for (dilation, extent) in [(1, 4), (2, 3)] {
        let window = window([[2], [1], [0], [0], [dilation]], false);
        let mean = Op::AvgPool {
            window: window.clone(),
            count_include_pad: true,
        };
        let gradient = Op::AvgPoolGrad {
            window,
            count_include_pad: true,
            input: Dims::from_slice(&[5]),
        };
        for (op, given) in [(mean, 5), (gradient, extent)] {
            let mut graph = Graph::new("mean");
            let x = graph.parameter(TensorType::new(DType::F32, [1, 1, given]));
            let added = graph.add_node(op, &[x], Provenance::default());
            match added {
                Ok(_) => assert_eq!(dilation, 1),
                Err(error) => assert!(dilation == 2 && error.to_string().contains("dilation"), "{error}"),
            }
        }
    }
}

#[test]
fn max_pool_gradients_check_their_indices() {
    let op = Op::MaxPoolGrad { input: dims([3]) };
    let inputs = [
        random(DType::F32, [1, 1, 2], 1),
        HostTensor::from_vec([1, 1, 2], [0i64, 3]),
    ];
    let graph = graph_of(&op, &inputs);
    assert!(interpret(&graph, &inputs, &[]).is_err());
    let executable = kiln_candle::CandleExecutable::new(graph.into()).unwrap();
    assert!(executable.run(&inputs, &[]).is_err());
}

#[test]
fn attention_and_its_gradient() {
    let shapes: [([usize; 4], [usize; 4], usize); 9] = [
        // No queries, no width, no value width, no heads.
        ([1, 2, 0, 3], [1, 2, 4, 3], 2),
        ([1, 2, 3, 0], [1, 2, 4, 0], 2),
        ([1, 2, 3, 2], [1, 2, 4, 2], 0),
        ([1, 0, 3, 2], [1, 2, 4, 2], 3),
        ([2, 4, 5, 3], [2, 2, 7, 3], 6),
        ([1, 2, 6, 4], [1, 2, 6, 4], 4),
        ([1, 3, 1, 8], [1, 1, 9, 8], 2),
        ([2, 2, 3, 4], [2, 2, 0, 4], 4),
        ([1, 1, 5, 2], [1, 1, 3, 2], 2),
    ];
    for dtype in FLOATS {
        for (q, k, width) in shapes {
            for dims in every_attention() {
                let v = Shape::from(k).with(3, width);
                let mut inputs = vec![
                    random(dtype, q, 1),
                    random(dtype, k, 2),
                    random(dtype, v, 3),
                    scalar(dtype, 0.5),
                ];
                if dims.mask {
                    inputs.push(random(dtype, [1, q[1], 1, k[2]], 4));
                }
                if dims.hidden {
                    // From the last query all keys are.
                    let hidden = |at: usize| at % k[2] % 3 == 1 || at / k[2] == q[2] - 1;
                    let hidden = (0..q[2] * k[2]).map(|at| i64::from(hidden(at)));
                    inputs.push(HostTensor::from_ints(
                        DType::Bool,
                        [1, 1, q[2], k[2]],
                        hidden.collect::<Vec<_>>(),
                    ));
                    inputs.push(scalar(dtype, if dims.safe { f64::NEG_INFINITY } else { -1.5 }));
                }
                if dims.dropout {
                    inputs.extend([
                        scalar(DType::U64, 5i64),
                        scalar(DType::U64, 6i64),
                        scalar(dtype, 0.75),
                        scalar(dtype, 1.25),
                    ]);
                }
                let out = check_by(Op::Attention(dims), &inputs, Relative::Tensor, 2.0);
                inputs.extend([
                    out[1].clone(),
                    random(dtype, out[0].ty().shape.clone(), 7),
                    scalar(dtype, 0.25),
                    scalar(dtype, -1.25),
                ]);
                if dims.dropout {
                    inputs.push(scalar(dtype, 1.5));
                }
                check_by(Op::AttentionGrad(dims), &inputs, Relative::Tensor, 4.0);
            }
        }
    }
}

#[test]
fn indices_beyond_the_extent_are_named() {
    for (op, inputs) in [
        (
            Op::Gather { axis: 1 },
            vec![
                random(DType::F32, [2, 3], 1),
                HostTensor::from_vec([2, 1], [0i64, 3]),
            ],
        ),
        (
            Op::IndexSelect { axis: 0 },
            vec![
                random(DType::F32, [2, 3], 1),
                HostTensor::from_vec([2], [-1i32, 0]),
            ],
        ),
        (
            Op::Scatter {
                axis: 0,
                mode: ScatterMode::Add,
            },
            vec![
                random(DType::F32, [0, 2], 1),
                HostTensor::from_vec([1, 2], [0i64, 0]),
                random(DType::F32, [1, 2], 1),
            ],
        ),
        (
            Op::IndexPut {
                axis: 1,
                mode: ScatterMode::Assign,
            },
            vec![
                random(DType::F32, [0, 2], 1),
                HostTensor::from_vec([1], [2i64]),
                random(DType::F32, [0, 1], 1),
            ],
        ),
    ] {
        let executable = kiln_candle::CandleExecutable::new(graph_of(&op, &inputs).into()).unwrap();
        let message = executable.run(&inputs, &[]).unwrap_err().to_string();
        assert!(
            message.contains(op.name()) && message.contains("out of range"),
            "{message}"
        );
    }
    let inputs = [random(DType::F32, [4], 1), random_indices(DType::U64, [3], 4, 1)];
    check(Op::IndexSelect { axis: 0 }, &inputs);
}
