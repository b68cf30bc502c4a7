//! Attention and its gradient over odd extents, masks, types and instruction sets, against the interpreter;
//! the bits do not depend on threads.

mod support;

use kiln_cpu::{Isa, Toolchain};
use kiln_graph::op::{AttentionDims, Op};
use kiln_graph::testing::{every_attention, random_arguments};
use kiln_graph::{DType, Graph, HostTensor, Provenance, Scalar, TensorType, Value, interpret_f64};
use support::{build, run};

/// Extents: batch, heads, key heads, queries, keys, width, width of values.
type Extents = [usize; 7];

/// Types of tensors, and of numbers and additive masks.
#[derive(Clone, Copy, Debug)]
struct Types {
    tensors: DType,
    numbers: DType,
}

const F32: Types = Types {
    tensors: DType::F32,
    numbers: DType::F32,
};

impl Types {
    /// How far results may be from those of f64, relative to the norm: what is stored in 16 bits is rounded
    /// once.
    fn tolerance(self) -> f64 {
        match self.tensors {
            DType::F64 => 1e-14,
            DType::F16 => 4e-4,
            DType::BF16 => 3e-3,
            _ => 1e-5,
        }
    }

    /// The fill that programs hide with.
    fn lowest(self) -> f64 {
        match self.numbers {
            DType::F16 => -65504.0,
            DType::BF16 => -3.3895313892515355e38,
            _ => f64::from(f32::MIN),
        }
    }
}

/// A step of one attention and its gradient; masks are arguments.
fn step(extents: Extents, dims: AttentionDims, fill: f64, types: Types) -> Graph {
    let [b, h, g, t, s, d, e] = extents;
    let mut graph = Graph::new("attention");
    let p = Provenance::default();
    let floats = |shape: &[usize]| TensorType::new(types.tensors, shape);
    let number = |graph: &mut Graph, value: Scalar, dtype: DType| {
        graph.add(Op::Constant { value, dtype }, &[], &p).unwrap()
    };
    let mut operands: Vec<Value> = vec![
        graph.parameter(floats(&[b, h, t, d])),
        graph.parameter(floats(&[b, g, s, d])),
        graph.parameter(floats(&[b, g, s, e])),
    ];
    let scale = number(&mut graph, Scalar::Float(0.625), types.numbers);
    operands.push(scale);
    if dims.mask {
        operands.push(graph.parameter(TensorType::new(types.numbers, [1, h, 1, s])));
    }
    if dims.hidden {
        operands.push(graph.parameter(TensorType::new(DType::Bool, [b, 1, t, s])));
        operands.push(number(&mut graph, Scalar::Float(fill), types.numbers));
    }
    if dims.dropout {
        for word in [5u64, 9] {
            operands.push(number(&mut graph, Scalar::UInt(word), DType::U64));
        }
        operands.push(number(&mut graph, Scalar::Float(0.75), types.numbers));
        operands.push(number(&mut graph, Scalar::Float(1.25), types.numbers));
    }
    let forward = graph.add_node(Op::Attention(dims), &operands, p.clone()).unwrap();
    let d_out = graph.parameter(floats(&[b, h, t, e]));
    operands.extend([forward[1], d_out]);
    for value in [0.5, -1.0] {
        operands.push(number(&mut graph, Scalar::Float(value), types.numbers));
    }
    if dims.dropout {
        operands.push(number(&mut graph, Scalar::Float(1.5), types.numbers));
    }
    let gradients = graph
        .add_node(Op::AttentionGrad(dims), &operands, p.clone())
        .unwrap();
    graph.output(forward[0], None);
    for value in gradients {
        graph.output(value, None);
    }
    graph
}

/// Hides keys: some rows see a prefix, some have holes, one sees nothing.
fn hide(tensors: &mut [HostTensor], [b, _, _, t, s, ..]: Extents) {
    for tensor in tensors {
        if tensor.ty().dtype == DType::Bool {
            let hidden = (0..b * t * s).map(|at| {
                let (row, key) = (at / s % t, at % s);
                i64::from(key > row + s / 3 || (row % 4 == 1 && key % 3 == 0) || row == 2)
            });
            *tensor = HostTensor::from_ints(DType::Bool, [b, 1, t, s], hidden.collect::<Vec<_>>());
        }
    }
}

fn check(extents: Extents, dims: AttentionDims, fill: f64, isa: Isa, types: Types) {
    check_on(extents, dims, fill, isa, types, types.tolerance(), |_| ());
}

/// With changed arguments, to within `tolerance`.
fn check_on(
    extents: Extents,
    dims: AttentionDims,
    fill: f64,
    isa: Isa,
    types: Types,
    tolerance: f64,
    change: impl Fn(&mut [HostTensor]),
) {
    let graph = step(extents, dims, fill, types);
    let (mut tensors, scalars) = random_arguments(&graph, 11);
    hide(&mut tensors, extents);
    change(&mut tensors);
    let expected = interpret_f64(&graph, &tensors, &scalars).unwrap();
    let step = build(&graph, |setup| setup.target.isa = isa).unwrap();
    let actual = run(&step, &graph, &tensors, &scalars, 1);
    for (number, (actual, expected)) in actual.iter().zip(&expected).enumerate() {
        let (actual, expected) = (actual.to_f64s(), expected.to_f64s());
        let norm = expected.iter().map(|x| x * x).sum::<f64>().sqrt();
        let distance = actual
            .iter()
            .zip(&expected)
            .map(|(a, e)| (a - e) * (a - e))
            .sum::<f64>()
            .sqrt();
        assert!(
            distance <= tolerance * norm,
            "{extents:?} {dims:?} {types:?} {isa}: output {number} is off by {:e}",
            distance / norm
        );
    }
    for threads in [2, 3] {
        let several = run(&step, &graph, &tensors, &scalars, threads);
        assert!(
            actual == several,
            "{extents:?} {dims:?} {types:?}: {threads} threads give other bits"
        );
    }
}

const PLAIN: AttentionDims = AttentionDims {
    causal: false,
    mask: false,
    hidden: false,
    mask_last: false,
    dropout: false,
    drop_scores: false,
    safe: false,
};

#[test]
fn extents_and_masks() {
    let isa = Toolchain::detect().unwrap().isa();
    let low = F32.lowest();
    let causal = AttentionDims {
        causal: true,
        ..PLAIN
    };
    let hidden = AttentionDims {
        hidden: true,
        ..PLAIN
    };
    let all = AttentionDims {
        causal: true,
        mask: true,
        hidden: true,
        dropout: true,
        ..PLAIN
    };
    // Whole vectors and blocks; primes; one query; more blocks than one; fewer keys than a vector; more
    // queries than keys.
    check([2, 2, 2, 64, 64, 32, 32], PLAIN, low, isa, F32);
    check([1, 6, 2, 197, 197, 19, 33], PLAIN, low, isa, F32);
    check([2, 4, 4, 1, 300, 48, 48], causal, low, isa, F32);
    check([1, 3, 1, 131, 131, 48, 48], causal, low, isa, F32);
    check([2, 2, 1, 37, 90, 5, 7], hidden, low, isa, F32);
    check([2, 2, 1, 90, 37, 16, 16], hidden, -2.0, isa, F32);
    check([1, 4, 2, 41, 53, 64, 24], all, low, isa, F32);
    check([1, 4, 2, 41, 53, 64, 24], all, -1.0, isa, F32);
}

/// Odd rows, keys and widths of bf16, where a pair may end a row, a tile, a block or what a row sees.
#[test]
fn extents_of_bf16() {
    let types = Types {
        tensors: DType::BF16,
        numbers: DType::F32,
    };
    let isa = Toolchain::detect().unwrap().isa();
    let causal = AttentionDims {
        causal: true,
        ..PLAIN
    };
    let hidden = AttentionDims {
        hidden: true,
        ..PLAIN
    };
    let all = AttentionDims {
        mask: true,
        dropout: true,
        causal: true,
        hidden: true,
        ..PLAIN
    };
    let low = types.lowest();
    check([1, 6, 2, 197, 197, 19, 33], PLAIN, low, isa, types);
    check([1, 2, 2, 67, 131, 31, 64], causal, low, isa, types);
    check([1, 3, 1, 131, 131, 48, 47], causal, low, isa, types);
    check([2, 2, 1, 37, 90, 5, 7], hidden, -2.0, isa, types);
    check([1, 4, 2, 41, 53, 64, 24], all, low, isa, types);
}

#[test]
fn narrower_vectors() {
    let all = AttentionDims {
        mask: true,
        hidden: true,
        dropout: true,
        ..PLAIN
    };
    let narrower = |isa: &&Isa| !isa.is_avx512();
    for &isa in Toolchain::detect()
        .unwrap()
        .isa()
        .contained()
        .iter()
        .filter(narrower)
    {
        check([1, 2, 1, 45, 61, 20, 12], all, F32.lowest(), isa, F32);
        check([1, 2, 2, 33, 33, 16, 16], PLAIN, 0.0, isa, F32);
    }
}

/// A fill that hides from most rows, but not from those that score as low themselves.
#[test]
fn fills_that_count_in_some_rows() {
    let isa = Toolchain::detect().unwrap().isa();
    let hidden = AttentionDims {
        hidden: true,
        ..PLAIN
    };
    let extents = [2, 2, 2, 70, 70, 32, 16];
    check(extents, hidden, -1e4, isa, F32);
    let all = AttentionDims {
        mask: true,
        dropout: true,
        drop_scores: true,
        ..hidden
    };
    check([2, 4, 2, 37, 90, 5, 7], all, -1e3, isa, F32);
    // The first head's queries and keys point in opposite directions: its scores are around -1000.
    let oppose = |tensors: &mut [HostTensor]| {
        for (tensor, factor) in tensors.iter_mut().zip([1.0, -50.0]) {
            let shape = tensor.ty().shape.clone();
            let head = shape[2] * shape[3];
            let elements = tensor.to_f64s().into_iter().enumerate();
            let first = |at: usize| (at / head).is_multiple_of(shape[1]);
            let opposed = elements.map(|(at, x)| if first(at) { x.abs() * factor } else { x });
            let opposed: Vec<f64> = opposed.collect();
            *tensor = HostTensor::from_floats(tensor.ty().dtype, shape, opposed);
        }
    };
    // Scores of that size are exact to about 1e-4.
    check_on(extents, hidden, -1e3, isa, F32, 1e-3, oppose);
}

/// Rows that see nothing but padding, which a mask has brought down as far as `fill`, take all keys.
#[test]
fn padding_as_low_as_what_is_hidden() {
    let isa = Toolchain::detect().unwrap().isa();
    let padded = AttentionDims {
        mask: true,
        hidden: true,
        ..PLAIN
    };
    let extents @ [_, heads, _, _, keys, ..] = [2, 4, 2, 41, 53, 20, 12];
    let low = F32.lowest();
    for (padding, fill, safe) in [
        (low, low, false),
        (-1e10, -1e10, false),
        (f64::NEG_INFINITY, low, false),
        (f64::NEG_INFINITY, low, true),
        (-1e30, -1e30, true),
    ] {
        let pad = |tensors: &mut [HostTensor]| {
            for tensor in tensors.iter_mut() {
                let shape = tensor.ty().shape.clone();
                if shape.dims() == [1, heads, 1, keys] && tensor.ty().dtype.is_float() {
                    let elements = tensor.to_f64s().into_iter().enumerate();
                    let lowered = elements.map(|(at, x)| if at % keys < keys / 3 + 9 { padding } else { x });
                    *tensor = HostTensor::from_floats(DType::F32, shape, lowered.collect::<Vec<_>>());
                }
            }
            // Beside such numbers f64 has digits of scores that f32 has not.
            let query = &tensors[0];
            let (ty, row) = (query.ty().clone(), extents[5]);
            let elements = query.to_f64s().into_iter().enumerate();
            let plain = elements.map(|(at, x)| if at / row % extents[3] < 9 { 0.0 } else { x });
            tensors[0] = HostTensor::from_floats(ty.dtype, ty.shape, plain.collect::<Vec<_>>());
        };
        let dims = AttentionDims { safe, ..padded };
        check_on(extents, dims, fill, isa, F32, F32.tolerance(), pad);
    }
}

/// Masks and dropout in other orders, and rows that see nothing.
#[test]
fn orders_of_masks_and_dropout() {
    let isa = Toolchain::detect().unwrap().isa();
    for dims in every_attention().filter(|dims| !dims.causal) {
        let fill = if dims.safe { f64::NEG_INFINITY } else { -2.0 };
        check([2, 4, 2, 21, 37, 19, 9], dims, fill, isa, F32);
    }
    let all = AttentionDims {
        mask: true,
        hidden: true,
        mask_last: true,
        dropout: true,
        drop_scores: true,
        safe: true,
        ..PLAIN
    };
    for tensors in [DType::F64, DType::F16, DType::BF16] {
        let types = Types {
            tensors,
            numbers: tensors.compute(),
        };
        check([1, 2, 1, 67, 67, 16, 16], all, f64::NEG_INFINITY, isa, types);
    }
}

/// Every type, on every instruction set that the machine has; numbers and masks of either type.
#[test]
fn types() {
    let isas = Toolchain::detect().unwrap().isa().contained();
    let hidden = AttentionDims {
        hidden: true,
        ..PLAIN
    };
    let dropout = AttentionDims {
        causal: true,
        dropout: true,
        ..PLAIN
    };
    let all = AttentionDims {
        mask: true,
        hidden: true,
        ..dropout
    };
    let types = [
        (DType::BF16, DType::BF16),
        (DType::BF16, DType::F32),
        (DType::F16, DType::F16),
        (DType::F16, DType::F32),
        (DType::F64, DType::F64),
    ];
    for (at, (tensors, numbers)) in types.into_iter().enumerate() {
        let types = Types { tensors, numbers };
        let isa = isas[at % isas.len()];
        check([1, 6, 2, 67, 67, 19, 33], PLAIN, 0.0, isas[0], types);
        check([1, 3, 1, 131, 131, 48, 48], dropout, 0.0, isas[0], types);
        check([2, 2, 1, 37, 90, 5, 7], hidden, types.lowest(), isa, types);
        check([1, 4, 2, 41, 53, 40, 24], all, -1.0, isas[0], types);
    }
}
