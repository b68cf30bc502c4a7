//! Attention and its gradient: kernels that run on the host over extents, masks, types and windows, against
//! the interpreter.

mod common;

use std::sync::Arc;

use kiln_compiler::{Options, compile};
use kiln_cuda::CudaTarget;
use kiln_cuda::build::{Compiler, Store};
use kiln_cuda::code::FunctionText;
use kiln_cuda::execute::{CudaExecutable, Gpu, NothingOutside};
use kiln_cuda::runtime::Storage;
use kiln_cuda::testing::host::HostStep;
use kiln_graph::op::{AttentionDims, BinaryOp, CompareOp, Dims, Op};
use kiln_graph::testing::{every_attention, random_arguments};
use kiln_graph::{DType, Graph, HostTensor, Provenance, Scalar, TensorType, Value, interpret_f64};

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

    /// The same for output number `output`. The gradients of queries and keys depend on the result, which is
    /// read as it is stored.
    fn tolerance_of(self, output: usize, tolerance: f64) -> f64 {
        match (self.tensors, output) {
            (DType::F16 | DType::BF16, 2 | 3) => 2.0 * tolerance,
            _ => tolerance,
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

/// How queries, keys and values are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stored {
    /// Each by itself, head after head.
    Apart,
    /// As what a projection gives: positions of `[heads, width]`.
    Positions,
    /// Keys transposed: `[heads, width, positions]`.
    Transposed,
}

#[derive(Clone, Copy, Debug)]
struct Case {
    extents: Extents,
    dims: AttentionDims,
    fill: f64,
    types: Types,
    stored: Stored,
    /// Which dimensions of the additive mask and of the hiding one have their full extents.
    masks: [[bool; 4]; 2],
    /// The mask that hides is computed from coordinates: keys are hidden that are so many positions ahead of
    /// the query, and one more.
    ahead: Option<i64>,
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

fn case(extents: Extents, dims: AttentionDims) -> Case {
    Case {
        extents,
        dims,
        fill: F32.lowest(),
        types: F32,
        stored: Stored::Apart,
        masks: [[false, true, false, true], [true, false, true, true]],
        ahead: None,
    }
}

/// Keys further ahead of a query than `ahead`, as programs compute it: coordinates that are compared.
fn causal_mask(graph: &mut Graph, [queries, keys]: [usize; 2], ahead: i64) -> Value {
    let mut add = |op: Op, inputs: &[Value]| graph.add(op, inputs, &Provenance::default()).unwrap();
    let [query, key] = [0, 1].map(|axis| Op::Iota {
        dtype: DType::I64,
        shape: [queries, keys].into(),
        axis,
    });
    let [query, key] = [add(query, &[]), add(key, &[])];
    let number = Op::Constant {
        value: Scalar::Int(ahead),
        dtype: DType::I64,
    };
    let number = add(number, &[]);
    let shape = [queries, keys].into();
    let dims = Dims::new();
    let wide = add(Op::Broadcast { shape, dims }, &[number]);
    let distance = add(Op::Binary(BinaryOp::Sub), &[key, query]);
    let hidden = add(Op::Compare(CompareOp::Gt), &[distance, wide]);
    add(Op::Reshape([1, 1, queries, keys].into()), &[hidden])
}

/// What numbers are given for, in the order of the operands.
struct Numbers {
    of: Vec<(Value, f64)>,
}

impl Case {
    /// A tensor of four dimensions, as it is stored: the parameter and the window on it.
    fn tensor(&self, graph: &mut Graph, shape: [usize; 4], stored: Stored) -> Value {
        let order = match stored {
            Stored::Apart => [0, 1, 2, 3],
            Stored::Positions => [0, 2, 1, 3],
            Stored::Transposed => [0, 1, 3, 2],
        };
        let kept = order.map(|axis: usize| shape[axis]);
        let x = graph.parameter(TensorType::new(self.types.tensors, kept));
        if stored == Stored::Apart {
            return x;
        }
        // Both orders are their own inverses.
        graph
            .add(
                Op::Transpose(Dims::from_slice(&order)),
                &[x],
                &Provenance::default(),
            )
            .unwrap()
    }

    fn number(&self, graph: &mut Graph, numbers: &mut Numbers, value: f64, dtype: DType) -> Value {
        let x = graph.parameter(TensorType::new(dtype, []));
        numbers.of.push((x, value));
        x
    }

    /// A step of one attention and its gradient, and what its numbers are.
    fn step(&self) -> (Graph, Numbers) {
        let [b, h, g, t, s, d, e] = self.extents;
        let Types { tensors: _, numbers } = self.types;
        let dims = self.dims;
        let mut graph = Graph::new("attention");
        let mut given = Numbers { of: Vec::new() };
        let p = Provenance::default();
        let positions = match self.stored {
            Stored::Transposed => Stored::Positions,
            other => other,
        };
        let mut operands = vec![
            self.tensor(&mut graph, [b, h, t, d], positions),
            self.tensor(&mut graph, [b, g, s, d], self.stored),
            self.tensor(&mut graph, [b, g, s, e], positions),
        ];
        operands.push(self.number(&mut graph, &mut given, 0.625, numbers));
        let mask = |which: usize| {
            let full = [b, h, t, s];
            [0, 1, 2, 3].map(|axis| if self.masks[which][axis] { full[axis] } else { 1 })
        };
        if dims.mask {
            operands.push(graph.parameter(TensorType::new(numbers, mask(0))));
        }
        if dims.hidden {
            operands.push(match self.ahead {
                Some(ahead) => causal_mask(&mut graph, [t, s], ahead),
                None => graph.parameter(TensorType::new(DType::Bool, mask(1))),
            });
            operands.push(self.number(&mut graph, &mut given, self.fill, numbers));
        }
        if dims.dropout {
            for word in [5.0, 9.0] {
                operands.push(self.number(&mut graph, &mut given, word, DType::U64));
            }
            operands.push(self.number(&mut graph, &mut given, 0.75, numbers));
            operands.push(self.number(&mut graph, &mut given, 1.25, numbers));
        }
        let forward = graph.add_node(Op::Attention(dims), &operands, p.clone()).unwrap();
        operands.push(forward[1]);
        operands.push(self.tensor(&mut graph, [b, h, t, e], positions));
        for value in [0.5, -1.0] {
            operands.push(self.number(&mut graph, &mut given, value, numbers));
        }
        if dims.dropout {
            operands.push(self.number(&mut graph, &mut given, 1.5, numbers));
        }
        let gradients = graph
            .add_node(Op::AttentionGrad(dims), &operands, p.clone())
            .unwrap();
        graph.output(forward[0], None);
        graph.output(forward[1], None);
        for value in gradients {
            graph.output(value, None);
        }
        (graph, given)
    }

    /// Arguments of the step. Of the mask that hides, some rows see a prefix, some have holes, one sees
    /// nothing.
    fn arguments(&self, graph: &Graph, given: &Numbers) -> Vec<HostTensor> {
        let (mut tensors, _) = random_arguments(graph, 11);
        let s = self.extents[4];
        for (tensor, &value) in tensors.iter_mut().zip(graph.parameters()) {
            let ty = tensor.ty().clone();
            if let Some(&(_, number)) = given.of.iter().find(|(of, _)| *of == value) {
                *tensor = match ty.dtype {
                    DType::U64 => HostTensor::from_ints(DType::U64, ty.shape, [number as i64]),
                    dtype => HostTensor::from_floats(dtype, ty.shape, [number]),
                };
            } else if ty.dtype == DType::Bool {
                let [rows, keys] = [ty.shape[2], ty.shape[3]];
                let hidden = (0..ty.numel()).map(|at| {
                    let (row, key) = (at / keys % rows, at % keys);
                    i64::from(key > row + s / 3 || (row % 4 == 1 && key % 3 == 0) || row == 2)
                });
                *tensor = HostTensor::from_ints(DType::Bool, ty.shape, hidden.collect::<Vec<_>>());
            }
        }
        tensors
    }

    /// The bytes of outputs must be what is expected, to within `tolerance` of the norm.
    fn compare(&self, graph: &Graph, expected: &[HostTensor], actual: &[Vec<u8>], tolerance: f64) {
        for (number, (bytes, expected)) in actual.iter().zip(expected).enumerate() {
            let ty = graph.ty(graph.outputs[number].value).clone();
            let actual = HostTensor::from_bytes(ty, bytes.clone()).unwrap().to_f64s();
            let expected = expected.to_f64s();
            let norm = expected.iter().map(|x| x * x).sum::<f64>().sqrt();
            let distances = actual.iter().zip(&expected).map(|(a, e)| (a - e) * (a - e));
            let distance = distances.sum::<f64>().sqrt();
            assert!(
                distance <= self.types.tolerance_of(number, tolerance) * norm,
                "{self:?}: output {number} is off by {:e}",
                distance / norm
            );
        }
    }

    /// On a GPU; with `tf32`, products of f32 may round their operands.
    fn check_on_gpu(&self, gpu: &Arc<Gpu>, tf32: bool, tolerance: f64) {
        let (graph, given) = self.step();
        let tensors = self.arguments(&graph, &given);
        let expected = interpret_f64(&graph, &tensors, &[]).unwrap();
        let target = CudaTarget { tf32, ..gpu.target() };
        let executable = CudaExecutable::new(&graph, &Options::default(), &target, gpu).unwrap();
        let inputs: Vec<_> = tensors
            .iter()
            .map(|tensor| gpu.upload(tensor.bytes()).unwrap())
            .collect();
        let bytes = graph.outputs.iter().map(|output| graph.ty(output.value).bytes());
        let outputs: Vec<_> = bytes.clone().map(|bytes| gpu.allocate(bytes).unwrap()).collect();
        executable
            .run(&inputs, &outputs, &[], &NothingOutside, false)
            .unwrap();
        let read = |(bytes, output): (usize, &Arc<Storage>)| {
            let mut found = vec![0; bytes];
            gpu.download(output, &mut found).unwrap();
            found
        };
        let actual: Vec<Vec<u8>> = bytes.zip(&outputs).map(read).collect();
        self.compare(&graph, &expected, &actual, tolerance);
    }

    /// Of which of the three kernels this holds.
    fn kernels(&self, target: &CudaTarget, holds: impl Fn(&FunctionText) -> bool) -> [bool; 3] {
        let (graph, _) = self.step();
        let step = compile(&graph, &Options::default(), target).unwrap();
        let texts = step.code.functions.iter().map(|function| &function.text);
        let found: Vec<bool> = texts
            .filter(|text| !text.body.contains("_map<"))
            .map(holds)
            .collect();
        found.try_into().unwrap()
    }

    /// Which of the three kernels are for tensor cores.
    fn on_tensor_cores(&self, target: &CudaTarget) -> [bool; 3] {
        self.kernels(target, |text| text.body.contains("_tensor_"))
    }

    /// In which of them groups of warps multiply.
    fn by_groups(&self, target: &CudaTarget) -> [bool; 3] {
        self.kernels(target, |text| text.helpers.contains("bool WARPGROUPS = true"))
    }

    fn check(&self) {
        self.check_on(self.types.tolerance(), |_| ());
    }

    /// With changed arguments, to within `tolerance`.
    fn check_on(&self, tolerance: f64, change: impl Fn(&mut [HostTensor])) {
        self.check_for(&CudaTarget::default(), tolerance, change);
    }

    /// For a target of its own.
    fn check_for(&self, target: &CudaTarget, tolerance: f64, change: impl Fn(&mut [HostTensor])) {
        let (graph, given) = self.step();
        let mut tensors = self.arguments(&graph, &given);
        change(&mut tensors);
        let expected = interpret_f64(&graph, &tensors, &[]).unwrap();
        let step = compile(&graph, &Options::default(), target).unwrap();
        let host = HostStep::of(&step).unwrap();
        let inputs: Vec<Vec<u8>> = tensors.iter().map(|tensor| tensor.bytes().to_vec()).collect();
        let actual = host.run(&mut inputs.clone(), &[]).unwrap();
        self.compare(&graph, &expected, &actual, tolerance);
        let backward = host.backward(true).run(&mut inputs.clone(), &[]).unwrap();
        assert!(actual == backward, "{self:?}: the order of threads shows");
    }
}

const CAUSAL: AttentionDims = AttentionDims {
    causal: true,
    ..PLAIN
};
const HIDDEN: AttentionDims = AttentionDims {
    hidden: true,
    ..PLAIN
};
/// Two masks, and dropout of scores.
const DROPPED_SCORES: AttentionDims = AttentionDims {
    mask: true,
    hidden: true,
    dropout: true,
    drop_scores: true,
    ..PLAIN
};
const ALL: AttentionDims = AttentionDims {
    causal: true,
    mask: true,
    hidden: true,
    dropout: true,
    ..PLAIN
};

/// Whole tiles; primes; one query; fewer keys than a tile; more tiles than one; widths of one and of several
/// columns of blocks.
#[test]
fn extents() {
    case([1, 2, 2, 64, 64, 64, 64], PLAIN).check();
    case([1, 4, 2, 67, 131, 19, 33], PLAIN).check();
    case([2, 4, 4, 1, 200, 48, 48], CAUSAL).check();
    case([1, 3, 1, 131, 131, 8, 8], CAUSAL).check();
    case([2, 2, 1, 7, 65, 32, 128], CAUSAL).check();
    case([1, 1, 1, 65, 1, 1, 1], PLAIN).check();
    case([1, 2, 1, 17, 33, 200, 80], PLAIN).check();
    case([1, 1, 1, 9, 70, 20, 300], CAUSAL).check();
}

#[test]
fn masks() {
    case([2, 2, 1, 37, 90, 5, 7], HIDDEN).check();
    let seen = Case {
        fill: -2.0,
        ..case([1, 2, 1, 150, 70, 16, 16], HIDDEN)
    };
    seen.check();
    case([1, 4, 2, 41, 53, 64, 24], ALL).check();
    let repeated = Case {
        masks: [[true, false, true, false], [false, true, false, true]],
        fill: -1.0,
        ..case([2, 4, 2, 68, 70, 12, 24], ALL)
    };
    repeated.check();
    // Tiles that are hidden altogether, from all heads alike and word by word.
    let shared = Case {
        masks: [[false; 4], [false, false, true, true]],
        ..case([1, 2, 2, 132, 260, 16, 16], HIDDEN)
    };
    shared.check();
}

/// Causal order that a program computes as a mask: nothing looks at the mask, on tensor cores and on others,
/// whatever the fill.
#[test]
fn causal_masks_from_coordinates() {
    for one in ordered_cases() {
        let (graph, _) = one.step();
        let step = compile(&graph, &Options::default(), &CudaTarget::default()).unwrap();
        let mut bodies = step.code.functions.iter().map(|function| &function.text.body);
        assert!(bodies.all(|body| !body.contains("_map<")), "{one:?}");
        one.check();
    }
}

fn ordered_cases() -> [Case; 7] {
    let half = Types {
        tensors: DType::BF16,
        numbers: DType::F32,
    };
    let dropout = AttentionDims {
        dropout: true,
        ..HIDDEN
    };
    let with = |ahead: i64, fill: f64, types: Types, one: Case| Case {
        ahead: Some(ahead),
        fill,
        types,
        ..one
    };
    let lowest = F32.lowest();
    [
        with(0, lowest, F32, case([1, 2, 1, 70, 70, 12, 20], HIDDEN)),
        with(0, lowest, half, case([1, 2, 1, 200, 200, 16, 16], HIDDEN)),
        with(0, -2.0, half, case([1, 2, 2, 70, 70, 16, 24], HIDDEN)),
        // The first queries see nothing.
        with(-3, lowest, half, case([1, 1, 1, 90, 133, 16, 16], HIDDEN)),
        with(63, lowest, half, case([1, 2, 1, 70, 133, 16, 16], HIDDEN)),
        with(0, lowest, half, case([1, 2, 2, 132, 132, 16, 16], dropout)),
        // As many blocks as fill a device: two blocks of rows for each warp, and groups of heads.
        with(2, lowest, half, case([2, 264, 264, 20, 36, 16, 16], HIDDEN)),
    ]
}

/// A fill that hides from most rows, but not from those that score as low themselves.
#[test]
fn fills_that_count_in_some_rows() {
    let low = Case {
        fill: -1e3,
        ..case([1, 2, 2, 70, 200, 32, 16], HIDDEN)
    };
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
    low.check_on(1e-3, oppose);
}

/// Masks and dropout in other orders, and rows that see nothing. Neighbours of the list differ in one or two
/// members; every fourth has each order of masks.
#[test]
fn orders_of_masks_and_dropout() {
    let mut seen = 0;
    for dims in every_attention().filter(|dims| !dims.causal).step_by(4) {
        let fill = if dims.safe { f64::NEG_INFINITY } else { -2.0 };
        let one = Case {
            fill,
            ..case([2, 4, 2, 21, 37, 19, 9], dims)
        };
        one.check();
        seen += 1;
    }
    assert!(seen >= 7);
}

#[test]
fn types() {
    let all = AttentionDims {
        mask: true,
        hidden: true,
        mask_last: true,
        dropout: true,
        drop_scores: true,
        safe: true,
        ..PLAIN
    };
    let dropout = AttentionDims {
        dropout: true,
        ..CAUSAL
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
        let hidden = Case {
            types,
            fill: types.lowest(),
            ..case([2, 2, 1, 37, 90, 5, 7], HIDDEN)
        };
        let extents = [1, 3, 1, 67 + at, 67 + at, 48, 33];
        let dropped = Case {
            types,
            ..case(extents, dropout)
        };
        let last = Case {
            types,
            fill: f64::NEG_INFINITY,
            ..case([1, 2, 1, 67, 67, 16, 16], all)
        };
        match at % 3 {
            0 => hidden.check(),
            1 => dropped.check(),
            _ => last.check(),
        }
        if tensors == DType::F64 {
            dropped.check();
            last.check();
        }
    }
}

/// Heads that are windows on a projection, and keys that are stored transposed.
#[test]
fn windows() {
    for stored in [Stored::Positions, Stored::Transposed] {
        let one = Case {
            stored,
            ..case([2, 4, 2, 65, 70, 32, 36], CAUSAL)
        };
        one.check();
        let (graph, _) = one.step();
        let step = compile(&graph, &Options::default(), &CudaTarget::default()).unwrap();
        // The forward, and the two kernels of the gradient: nothing is copied.
        assert_eq!(step.code.calls.len(), 3, "{stored:?}");
    }
}

/// Widths and types that tensor cores take, whose instructions the host follows lane by lane: rows and tiles
/// of both sizes, masks, dropout with and without whole blocks of draws, heads that share keys.
#[test]
fn tensor_cores() {
    let of = |tensors, numbers| Types { tensors, numbers };
    let types = [of(DType::BF16, DType::F32), of(DType::F16, DType::F16)];
    let dropout = AttentionDims {
        dropout: true,
        ..PLAIN
    };
    let cases = [
        case([1, 2, 2, 64, 64, 64, 64], PLAIN),
        Case {
            fill: -60000.0,
            ..case(
                [1, 2, 1, 70, 131, 32, 48],
                AttentionDims {
                    hidden: true,
                    ..CAUSAL
                },
            )
        },
        case([1, 1, 1, 65, 68, 128, 16], dropout),
        case([1, 2, 1, 20, 36, 24, 8], PLAIN),
        case([1, 1, 1, 20, 36, 8, 40], PLAIN),
        case([1, 1, 1, 33, 37, 16, 128], dropout),
        Case {
            masks: [[false; 4], [false, false, true, true]],
            ..case([1, 2, 1, 40, 200, 16, 16], HIDDEN)
        },
        Case {
            fill: -2.0,
            stored: Stored::Positions,
            ..case([2, 2, 1, 20, 68, 32, 32], DROPPED_SCORES)
        },
        // As many blocks as fill a device: two blocks of rows for each warp.
        case([528, 1, 1, 5, 36, 16, 16], dropout),
    ];
    for (at, one) in cases.into_iter().enumerate() {
        let one = Case {
            types: types[at % 2],
            ..one
        };
        assert_eq!(one.on_tensor_cores(&CudaTarget::default()), [true; 3]);
        one.check();
    }
}

/// What groups of four warps multiply on Hopper: widths of 64 and 128, whole tiles and not, every mask, dropout
/// with and without whole blocks of draws, heads that share keys. On other devices each warp multiplies.
fn group_cases() -> [Case; 7] {
    let cases = [
        case([1, 2, 2, 64, 64, 64, 64], PLAIN),
        Case {
            fill: -60000.0,
            ..case(
                [1, 2, 1, 70, 131, 64, 64],
                AttentionDims {
                    hidden: true,
                    ..CAUSAL
                },
            )
        },
        case(
            [1, 1, 1, 65, 68, 128, 64],
            AttentionDims {
                dropout: true,
                ..CAUSAL
            },
        ),
        case([1, 2, 1, 64, 192, 64, 128], CAUSAL),
        case([1, 1, 1, 130, 67, 128, 128], PLAIN),
        Case {
            fill: -2.0,
            stored: Stored::Positions,
            ..case([2, 2, 1, 20, 68, 64, 64], DROPPED_SCORES)
        },
        Case {
            masks: [[false; 4], [false, false, true, true]],
            ..case([1, 2, 1, 40, 200, 64, 64], HIDDEN)
        },
    ];
    let half = |dtype| Types {
        tensors: dtype,
        numbers: DType::F32,
    };
    let mut at = 0;
    cases.map(|one| {
        at += 1;
        let types = half(if at % 2 == 0 { DType::F16 } else { DType::BF16 });
        Case { types, ..one }
    })
}

#[test]
fn groups_of_warps() {
    let other = CudaTarget {
        capability: (8, 0),
        ..CudaTarget::default()
    };
    for one in group_cases() {
        assert_eq!(one.by_groups(&CudaTarget::default()), [true; 3], "{one:?}");
        assert_eq!(one.by_groups(&other), [false; 3]);
        assert_eq!(one.on_tensor_cores(&other), [true; 3]);
        one.check();
    }
}

/// Short heads, and many, whose gradient is one kernel: blocks of four and of eight warps, whole tiles and
/// not, every mask, dropout with and without whole blocks of draws.
fn short_cases() -> [Case; 7] {
    let dropout = AttentionDims {
        dropout: true,
        ..PLAIN
    };
    let cases = [
        case([128, 1, 1, 64, 64, 64, 16], PLAIN),
        case([64, 2, 2, 33, 37, 64, 16], dropout),
        Case {
            stored: Stored::Positions,
            ..case([64, 2, 2, 20, 68, 64, 32], dropout)
        },
        Case {
            fill: -60000.0,
            ..case([64, 2, 2, 5, 70, 64, 48], ALL)
        },
        Case {
            fill: -2.0,
            stored: Stored::Positions,
            ..case([64, 2, 2, 5, 128, 64, 32], DROPPED_SCORES)
        },
        Case {
            masks: [[false; 4], [false, false, true, true]],
            ..case([128, 1, 1, 12, 100, 64, 16], HIDDEN)
        },
        Case {
            ahead: Some(0),
            ..case([128, 1, 1, 33, 36, 64, 64], HIDDEN)
        },
    ];
    let mut at = 0;
    cases.map(|one| {
        at += 1;
        let tensors = if at % 2 == 0 { DType::F16 } else { DType::BF16 };
        let types = Types {
            tensors,
            numbers: DType::F32,
        };
        Case { types, ..one }
    })
}

#[test]
fn gradients_at_once() {
    let is_at_once = |one: &Case| {
        let (graph, _) = one.step();
        let step = compile(&graph, &Options::default(), &CudaTarget::default()).unwrap();
        let mut texts = step.code.functions.iter().map(|function| &function.text.body);
        texts.any(|body| body.contains("kiln_attention_tensor_gradient<"))
    };
    for one in short_cases() {
        assert!(is_at_once(&one), "{one:?}");
        one.check();
    }
    // Long heads, few of them, heads that share keys, other widths and f32 have two kernels.
    let bf16 = short_cases()[0].types;
    let others = [
        [128, 1, 1, 64, 129, 64, 64],
        [128, 1, 1, 513, 64, 64, 64],
        [127, 1, 1, 64, 64, 64, 64],
        [128, 2, 1, 64, 64, 64, 64],
        [128, 1, 1, 64, 64, 32, 64],
        [128, 1, 1, 64, 64, 64, 72],
    ];
    for extents in others {
        let one = Case {
            types: bf16,
            ..case(extents, PLAIN)
        };
        assert!(!is_at_once(&one), "{extents:?}");
    }
    assert!(!is_at_once(&case([128, 1, 1, 64, 64, 64, 64], PLAIN)));
}

const TF32: fn() -> CudaTarget = || CudaTarget {
    tf32: true,
    ..CudaTarget::default()
};

fn tf32_cases() -> [Case; 10] {
    let dropout = AttentionDims {
        dropout: true,
        ..PLAIN
    };
    [
        case([1, 2, 2, 64, 64, 64, 64], PLAIN),
        case(
            [1, 2, 1, 70, 131, 32, 48],
            AttentionDims {
                hidden: true,
                ..CAUSAL
            },
        ),
        case([1, 1, 1, 65, 68, 128, 16], dropout),
        case([1, 2, 1, 20, 36, 24, 8], PLAIN),
        case([1, 1, 1, 20, 36, 8, 40], ALL),
        case([1, 1, 1, 33, 37, 16, 128], dropout),
        case([1, 2, 1, 40, 70, 128, 128], CAUSAL),
        Case {
            masks: [[false; 4], [false, false, true, true]],
            ..case([1, 2, 1, 40, 200, 16, 16], HIDDEN)
        },
        Case {
            fill: -2.0,
            stored: Stored::Positions,
            ..case([2, 4, 2, 20, 68, 32, 32], DROPPED_SCORES)
        },
        // As many blocks as fill a device: two blocks of rows for each warp.
        case([528, 1, 1, 5, 36, 16, 16], dropout),
    ]
}

/// How far results may be off where operands have 11 bits.
const TF32_TOLERANCE: f64 = 5e-4;

/// The same of f32 where it may be rounded to TF32.
#[test]
fn tensor_cores_for_f32() {
    for one in tf32_cases() {
        assert_eq!(one.on_tensor_cores(&TF32()), [true; 3], "{one:?}");
        assert_eq!(one.on_tensor_cores(&CudaTarget::default()), [false; 3]);
        one.check_for(&TF32(), TF32_TOLERANCE, |_| ());
    }
}

/// What the tensor cores do not take stays as it is: other widths, keys that are stored transposed, and tiles
/// that a GPU has no room for.
#[test]
fn f32_beside_tensor_cores() {
    let odd = case([1, 2, 2, 20, 36, 20, 16], PLAIN);
    assert_eq!(odd.on_tensor_cores(&TF32()), [false; 3]);
    odd.check_for(&TF32(), 1e-5, |_| ());
    let transposed = Case {
        stored: Stored::Transposed,
        ..case([1, 2, 2, 20, 36, 16, 16], PLAIN)
    };
    assert_eq!(transposed.on_tensor_cores(&TF32()), [false; 3]);
    let small = CudaTarget {
        capability: (8, 6),
        ..TF32()
    };
    let wide = case([1, 2, 2, 40, 70, 128, 128], HIDDEN);
    assert_eq!(wide.on_tensor_cores(&small), [true, false, false]);
    wide.check_for(&small, TF32_TOLERANCE, |_| ());
}

/// Operands are rounded, not cut: cutting makes all products of positive numbers smaller by half of the last
/// place of each.
#[test]
fn tf32_is_rounded_to() {
    let (graph, given) = case([1, 1, 1, 64, 64, 64, 64], PLAIN).step();
    let mut tensors = case([1, 1, 1, 64, 64, 64, 64], PLAIN).arguments(&graph, &given);
    for tensor in tensors.iter_mut().filter(|tensor| tensor.ty().shape.rank() == 4) {
        let found: Vec<f64> = tensor.to_f64s().into_iter().map(f64::abs).collect();
        *tensor = HostTensor::from_floats(DType::F32, tensor.ty().shape.clone(), found);
    }
    let expected = interpret_f64(&graph, &tensors, &[]).unwrap();
    let step = compile(&graph, &Options::default(), &TF32()).unwrap();
    let mut inputs: Vec<Vec<u8>> = tensors.iter().map(|tensor| tensor.bytes().to_vec()).collect();
    let actual = HostStep::of(&step).unwrap().run(&mut inputs, &[]).unwrap();
    let ty = graph.ty(graph.outputs[0].value).clone();
    let actual = HostTensor::from_bytes(ty, actual[0].clone()).unwrap();
    let sum = |tensor: &HostTensor| tensor.to_f64s().iter().sum::<f64>();
    let relative = sum(&actual) / sum(&expected[0]) - 1.0;
    assert!(relative.abs() < 5e-5, "the result is off by {relative:e}");
}

/// The instructions of a GPU do what the host's versions of them do. Skipped with a message where there is no
/// GPU.
#[test]
fn on_a_gpu() {
    if common::gpu().is_none() {
        return;
    }
    let gpu = Gpu::get(0).unwrap();
    let large = case([1, 2, 2, 700, 700, 64, 64], CAUSAL);
    let cases = ordered_cases().into_iter().chain(group_cases());
    for one in cases.chain(short_cases()) {
        one.check_on_gpu(&gpu, false, one.types.tolerance());
    }
    for one in tf32_cases().into_iter().chain([large]) {
        one.check_on_gpu(&gpu, true, TF32_TOLERANCE);
        one.check_on_gpu(&gpu, false, F32.tolerance());
        let half = Case {
            types: Types {
                tensors: DType::BF16,
                ..F32
            },
            ..one
        };
        half.check_on_gpu(&gpu, false, half.types.tolerance());
    }
}

/// Values with much in common: the gradient of each weight is then large beside what distinguishes them,
/// which is all that reaches the queries. A result of five has a rounding of a hundredth, and each of its
/// columns brings one into the queries' gradient.
#[test]
fn values_with_a_common_part() {
    let one = Case {
        types: Types {
            tensors: DType::BF16,
            numbers: DType::F32,
        },
        ..case([1, 1, 1, 40, 100, 64, 16], PLAIN)
    };
    let raise = |tensors: &mut [HostTensor]| {
        let raised: Vec<f64> = tensors[2].to_f64s().into_iter().map(|x| x + 4.0).collect();
        tensors[2] = HostTensor::from_floats(DType::BF16, tensors[2].ty().shape.clone(), raised);
    };
    one.check_on(6.0 * one.types.tolerance(), raise);
}

/// NVRTC takes every kind of kernel.
#[test]
fn machine_code() {
    let Some(nvrtc) = common::nvrtc() else { return };
    let mut sources = [Vec::new(), Vec::new()];
    let capabilities = [(8, 0), (9, 0)];
    let half = Types {
        tensors: DType::BF16,
        numbers: DType::F32,
    };
    let double = Types {
        tensors: DType::F64,
        numbers: DType::F64,
    };
    for one in [
        case([2, 4, 2, 128, 128, 64, 64], ALL),
        case([2, 4, 4, 256, 256, 128, 128], CAUSAL),
        Case {
            types: half,
            ..case([2, 4, 2, 65, 70, 33, 256], PLAIN)
        },
        Case {
            types: half,
            ..case([32, 12, 12, 128, 128, 64, 64], ALL)
        },
        Case {
            types: half,
            ..case([32, 12, 12, 512, 512, 128, 128], CAUSAL)
        },
        Case {
            types: double,
            ..case([2, 4, 2, 65, 70, 80, 80], HIDDEN)
        },
        Case {
            types: half,
            ahead: Some(0),
            ..case([8, 12, 12, 1024, 1024, 64, 64], HIDDEN)
        },
    ] {
        let (graph, _) = one.step();
        for (sources, capability) in sources.iter_mut().zip(capabilities) {
            let rounds = [false, one.types.tensors == DType::F32];
            for tf32 in &rounds[..1 + usize::from(rounds[1])] {
                let target = CudaTarget {
                    capability,
                    tf32: *tf32,
                    ..CudaTarget::default()
                };
                let step = compile(&graph, &Options::default(), &target).unwrap();
                sources.extend(step.code.sources().0);
            }
        }
    }
    for (sources, capability) in sources.into_iter().zip(capabilities) {
        let compiler = Compiler::new(nvrtc.clone(), capability, Store::disabled()).unwrap();
        let cubins = compiler.compile(&sources).unwrap();
        assert!(cubins.iter().all(|cubin| !cubin.image.is_empty()));
    }
}
