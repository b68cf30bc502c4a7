//! Compiled graphs against the interpreter: random graphs over every primitive, fused and not.

mod support;

use kiln_compiler::Options;
use kiln_compiler::schedule::KernelKind;
use kiln_cpu::{BuildOptions, Cache, CpuExecutable, CpuTarget, OptLevel, Toolchain};
use kiln_graph::op::{BinaryOp, Dims, DotDims, ReduceOp, UnaryOp};
use kiln_graph::testing::{Family, GraphConfig, difference, random_arguments};
use kiln_graph::{DType, Graph, HostTensor, Op, Provenance, Scalar, Shape, TensorType, Value, interpret_f64};
use support::{Setup, batch, build, run};

fn check(graph: &Graph, tolerances: &[f64], fuse: bool, what: &str) {
    let (tensors, scalars) = random_arguments(graph, 7);
    let expected = interpret_f64(graph, &tensors, &scalars).unwrap();
    let step = build(graph, |setup| setup.options.fuse = fuse).unwrap();
    let actual = run(&step, graph, &tensors, &scalars, 2);
    for (number, (actual, expected)) in actual.iter().zip(&expected).enumerate() {
        if let Some(found) = difference(actual, expected, tolerances[number]) {
            let value = graph.outputs[number].value;
            panic!(
                "{what}: output {number} ({value}): {found}\n{}",
                history(graph, value)
            );
        }
    }
}

/// The operations that lead to `value`, as lines of the graph's text.
fn history(graph: &Graph, value: Value) -> String {
    let mut needed = vec![value];
    let mut at = 0;
    while at < needed.len() && needed.len() < 30 {
        for &operand in &graph.def(needed[at]).inputs {
            if !needed.contains(&operand) {
                needed.push(operand);
            }
        }
        at += 1;
    }
    let names: Vec<String> = needed.iter().map(Value::to_string).collect();
    let text = graph.to_string();
    let of = |line: &&str| {
        let results = line.split(" = ").next().unwrap_or("");
        results
            .split(',')
            .any(|result| names.contains(&result.trim().to_owned()))
    };
    text.lines().filter(of).collect::<Vec<_>>().join("\n")
}

fn families(families: &[Family]) -> GraphConfig {
    GraphConfig {
        families: families.to_vec(),
        ..GraphConfig::default()
    }
}

/// Operations that loop nests compute, over all types.
#[test]
fn nests_compute_what_the_interpreter_does() {
    let mut config = families(&[
        Family::Pointwise,
        Family::Reduce,
        Family::Movement,
        Family::Index,
        Family::Random,
    ]);
    config.floats = vec![DType::F32, DType::F32, DType::F64, DType::F16, DType::BF16];
    config.ints = vec![
        DType::I64,
        DType::I32,
        DType::I16,
        DType::I8,
        DType::U64,
        DType::U32,
        DType::U16,
        DType::U8,
    ];
    config.steps = 25;
    for seed in 0..6 {
        let (graph, tolerances) = batch(1000 * seed, 12, &config);
        check(&graph, &tolerances, true, &format!("seed {seed}, fused"));
        if seed < 2 {
            check(&graph, &tolerances, false, &format!("seed {seed}, not fused"));
        }
    }
}

/// Larger tensors: whole vectors, several threads, collapsed loops.
#[test]
fn large_nests() {
    let mut config = families(&[Family::Pointwise, Family::Reduce, Family::Movement]);
    config.max_elements = 60_000;
    config.steps = 20;
    let (graph, tolerances) = batch(500, 8, &config);
    check(&graph, &tolerances, true, "large");
}

#[test]
fn contractions_pools_and_sorts() {
    let kernels = [
        Family::Dot,
        Family::Conv,
        Family::Pool,
        Family::Sort,
        Family::Attention,
    ];
    for (seed, family) in kernels.into_iter().enumerate() {
        let mut config = families(&[family, Family::Pointwise]);
        if family == Family::Attention {
            config.floats = vec![DType::F32, DType::F64, DType::F16, DType::BF16];
        }
        let (graph, tolerances) = batch(100 * seed as u64, 16, &config);
        check(&graph, &tolerances, true, &format!("{family:?}"));
    }
}

/// The same with larger tensors: panels of several tiles, threads that share panels, and fused neighbours.
#[test]
fn large_contractions_and_pools() {
    for (number, family) in [Family::Dot, Family::Conv, Family::Pool, Family::Attention]
        .into_iter()
        .enumerate()
    {
        let mut config = families(&[family, Family::Pointwise, Family::Reduce, Family::Movement]);
        config.floats = vec![DType::F32, DType::F32, DType::F64, DType::F16, DType::BF16];
        config.max_elements = 6_000;
        let (graph, tolerances) = batch(700 + 100 * number as u64, 6, &config);
        check(&graph, &tolerances, true, &format!("large {family:?}"));
    }
}

/// Products of every float type, at shapes with tails on every side: either order of the second operand in
/// memory, several products of a batch, few rows, a depth that is cut.
#[test]
fn products_of_every_float() {
    for (dtype, result, limit) in [
        (DType::F32, None, 1e-6),
        (DType::F64, None, 1e-14),
        (DType::F16, None, 6e-4),
        (DType::BF16, None, 5e-3),
        (DType::F16, Some(DType::F32), 1e-6),
        (DType::BF16, Some(DType::F32), 1e-6),
    ] {
        let mut graph = Graph::new("products");
        let p = Provenance::default();
        for (batch, m, k, n) in [
            (1, 61, 33, 75),
            (1, 5, 130, 37),
            (3, 29, 17, 64),
            (1, 30, 4200, 48),
            (2, 1, 1, 19),
        ] {
            for (shape, axis) in [([batch, n, k], 2), ([batch, k, n], 1)] {
                let a = graph.parameter(TensorType::new(dtype, &[batch, m, k][..]));
                let b = graph.parameter(TensorType::new(dtype, &shape[..]));
                let dims = DotDims {
                    a_batch: [0].into_iter().collect(),
                    b_batch: [0].into_iter().collect(),
                    a_contract: [2].into_iter().collect(),
                    b_contract: [axis].into_iter().collect(),
                    result,
                };
                let dot = graph.add(Op::DotGeneral(dims), &[a, b], &p).unwrap();
                graph.output(dot, None);
            }
        }
        let (tensors, scalars) = random_arguments(&graph, 11);
        let expected = interpret_f64(&graph, &tensors, &scalars).unwrap();
        let step = build(&graph, |_| ()).unwrap();
        let actual = run(&step, &graph, &tensors, &scalars, 1);
        for (actual, expected) in actual.iter().zip(&expected) {
            let (actual, expected) = (actual.to_f64s(), expected.to_f64s());
            let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|x| x * x).sum::<f64>().sqrt();
            let error = norm(&mut actual.iter().zip(&expected).map(|(a, e)| a - e))
                / norm(&mut expected.iter().copied()).max(1e-12);
            assert!(error < limit, "{dtype}: error {error:e}");
        }
        let three = run(&step, &graph, &tensors, &scalars, 3);
        assert!(
            actual == three,
            "{dtype}: the bits depend on the number of threads"
        );
    }
}

/// Products followed by pointwise operations, at shapes with tails on every side: the epilogue's vectors, its
/// last lanes, results stored transposed, several products of a batch, few rows, and a depth that is cut.
#[test]
fn epilogues() {
    let f32s = |shape: &[usize]| TensorType::new(DType::F32, shape);
    let mut graph = Graph::new("epilogues");
    let p = Provenance::default();
    let add = |graph: &mut Graph, op: Op, inputs: &[Value]| graph.add(op, inputs, &p).unwrap();
    for (batch, m, k, n) in [
        (1, 61, 33, 75),
        (1, 5, 130, 37),
        (3, 29, 17, 64),
        (1, 30, 4200, 48),
        (2, 7, 96, 19),
    ] {
        for transposed in [false, true] {
            let a = graph.parameter(f32s(&[batch, m, k]));
            let b = graph.parameter(f32s(&[batch, n, k]));
            let dims = DotDims {
                a_batch: [0].into_iter().collect(),
                b_batch: [0].into_iter().collect(),
                a_contract: [2].into_iter().collect(),
                b_contract: [2].into_iter().collect(),
                result: None,
            };
            let dot = add(&mut graph, Op::DotGeneral(dims), &[a, b]);
            let (x, shape) = if transposed {
                let perm = Op::Transpose([0, 2, 1].into_iter().collect());
                (add(&mut graph, perm, &[dot]), [batch, n, m])
            } else {
                (dot, [batch, m, n])
            };
            let bias = graph.parameter(f32s(&shape[2..]));
            let residual = graph.parameter(f32s(&shape));
            let dims = [2].into_iter().collect();
            let wide = Op::Broadcast {
                shape: shape.as_slice().into(),
                dims,
            };
            let bias = add(&mut graph, wide, &[bias]);
            let sum = add(&mut graph, Op::Binary(BinaryOp::Add), &[x, bias]);
            let active = add(&mut graph, Op::Unary(UnaryOp::Tanh), &[sum]);
            let out = add(&mut graph, Op::Binary(BinaryOp::Mul), &[active, residual]);
            graph.output(sum, None);
            graph.output(out, None);
        }
    }
    let compiled = Setup::detect(2).compile(&graph).unwrap();
    assert!(
        compiled
            .schedule
            .kernels
            .iter()
            .all(|kernel| matches!(kernel.kind, KernelKind::Contraction(..)))
    );
    check(&graph, &vec![1e-4; graph.outputs.len()], true, "epilogues");
    let (tensors, scalars) = random_arguments(&graph, 3);
    let step = build(&graph, |_| ()).unwrap();
    assert_eq!(
        run(&step, &graph, &tensors, &scalars, 1),
        run(&step, &graph, &tensors, &scalars, 3),
        "the bits depend on the number of threads"
    );
}

/// Burn's logistic function, `exp(-log(1 + exp(-x)))`, with numbers that are arguments of the step. An
/// exponent of minus one is computed in another way than other exponents; both must agree with the meaning,
/// also at the ends of the range, at NaN and where the logarithm has no value.
#[test]
fn powers_by_a_number_known_at_run_time() {
    let graph = Graph::parse(
        "graph @powers {
  %x = parameter 0 : f32[3,37]
  %s0 = scalar 0 : f32[]
  %minus = broadcast %s0 {dims=[]} : f32[3,37]
  %negative = mul %x, %minus : f32[3,37]
  %e = exp %negative : f32[3,37]
  %s1 = scalar 1 : f32[]
  %one = broadcast %s1 {dims=[]} : f32[3,37]
  %sum = add %e, %one : f32[3,37]
  %log = log %sum : f32[3,37]
  %s2 = scalar 2 : f32[]
  %power = broadcast %s2 {dims=[]} : f32[3,37]
  %scaled = mul %log, %power : f32[3,37]
  %y = exp %scaled : f32[3,37]
  %silu = mul %x, %y : f32[3,37]
  return %y, %silu
}",
    )
    .unwrap();
    let ends = [
        0.0,
        -0.0,
        80.0,
        -80.0,
        f64::INFINITY,
        f64::NEG_INFINITY,
        f64::NAN,
        1e-3,
        30.0,
    ];
    let values = (0..111).map(|i| ends.get(i).copied().unwrap_or(f64::from(i as u32) * 0.37 - 20.0));
    let x = HostTensor::from_floats(DType::F32, [3, 37], values.collect::<Vec<_>>());
    let step = build(&graph, |_| ()).unwrap();
    // The second makes the logarithm's operand negative or zero.
    for scalars in [
        [-1.0, 1.0, -1.0],
        [-1.0, -1.0, -1.0],
        [-1.0, 1.0, -0.5],
        [1.0, 1.0, 1.0],
    ] {
        let scalars = scalars.map(Scalar::Float);
        let expected = interpret_f64(&graph, std::slice::from_ref(&x), &scalars).unwrap();
        let actual = run(&step, &graph, std::slice::from_ref(&x), &scalars, 2);
        for (actual, expected) in actual.iter().zip(&expected) {
            for (at, (a, e)) in actual.to_f64s().iter().zip(expected.to_f64s()).enumerate() {
                let same = a == &e || (a.is_nan() && e.is_nan());
                let close = (a - e).abs() <= 1e-5 * e.abs().max(1e-30);
                assert!(same || close, "{scalars:?}, element {at}: {a} for {e}");
            }
        }
    }
}

/// Sums, products and largest values over rows of constants, of every length up to some vectors. With known
/// operands the C compiler itself computes the last lanes of a row, and compilers have done that wrongly.
#[test]
fn rows_of_constants() {
    let mut graph = Graph::new("constants");
    let p = Provenance::default();
    let add = |graph: &mut Graph, op: Op, inputs: &[Value]| graph.add(op, inputs, &p).unwrap();
    let value = Scalar::Float(0.9);
    let constant = Op::Constant {
        value,
        dtype: DType::F32,
    };
    let each = add(&mut graph, constant, &[]);
    for length in 1..=40 {
        for op in [ReduceOp::Sum, ReduceOp::Prod, ReduceOp::Max] {
            let shape = Shape::from([2, length]);
            // Operands with one reader each, which become part of its loop.
            let row = Op::Broadcast {
                shape: shape.clone(),
                dims: Dims::new(),
            };
            let row = add(&mut graph, row, &[each]);
            let count = Op::Iota {
                shape,
                dtype: DType::F32,
                axis: 1,
            };
            let count = add(&mut graph, count, &[]);
            for x in [row, count] {
                let axes = Dims::from_slice(&[1]);
                let reduced = add(&mut graph, Op::Reduce { op, axes }, &[x]);
                graph.output(reduced, None);
            }
        }
    }
    let toolchain = Toolchain::detect().unwrap();
    let expected = interpret_f64(&graph, &[], &[]).unwrap();
    for level in [OptLevel::Quick, OptLevel::Full] {
        let build = BuildOptions {
            level,
            ..BuildOptions::default()
        };
        let options = Options {
            // Nothing is left of it after simplification.
            transform: false,
            ..Options::default()
        };
        let target = CpuTarget::new(&toolchain, 2);
        let step =
            CpuExecutable::new(&graph, &options, &target, &toolchain, &Cache::disabled(), &build).unwrap();
        for (number, (actual, expected)) in run(&step, &graph, &[], &[], 2).iter().zip(&expected).enumerate()
        {
            let found = difference(actual, expected, 2e-4);
            assert!(
                found.is_none(),
                "{level:?}, {}: {found:?}",
                history(&graph, graph.outputs[number].value)
            );
        }
    }
}

/// An output that simplification finds to be an argument is returned although the argument's buffer was
/// given away.
#[test]
fn an_argument_that_gives_its_buffer_away_and_leaves() {
    let graph = Graph::parse(
        "graph @leaves {
  %x = parameter 0 : f32[3,5]
  %y = parameter 1 : f32[3,5]
  %product = mul %x, %y : f32[3,5]
  %c = constant 1.0 : f32[]
  %one = broadcast %c {dims=[]} : f32[3,5]
  %same = mul %one, %y : f32[3,5]
  %again = mul %one, %x : f32[3,5]
  return %product (alias 1), %same, %again, %again
}",
    )
    .unwrap();
    check(&graph, &[1e-6; 4], true, "an argument leaves");
}
