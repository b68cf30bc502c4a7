//! Compiled graphs against the interpreter: random graphs over every primitive, fused and not.

#[path = "../../kiln-compiler/tests/targets/numbers.rs"]
mod numbers;
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

/// Operations that loop nests compute, over all types.
#[test]
fn nests_compute_what_the_interpreter_does() {
    let mut config = GraphConfig::of(&[
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
    let mut config = GraphConfig::of(&[Family::Pointwise, Family::Reduce, Family::Movement]);
    config.max_elements = 60_000;
    config.steps = 20;
    let (graph, tolerances) = batch(500, 8, &config);
    check(&graph, &tolerances, true, "large");
}

/// Operations that share their operands, as a model's do: more of them end up in one kernel.
#[test]
fn operations_that_belong_together() {
    for (number, max_elements) in [120, 3_000, 20_000].into_iter().enumerate() {
        let config = GraphConfig::of_a_step(max_elements);
        let (graph, tolerances) = batch(5000 + 100 * number as u64, 8, &config);
        check(&graph, &tolerances, true, "together");
    }
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
        let mut config = GraphConfig::of(&[family, Family::Pointwise]);
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
        let mut config = GraphConfig::of(&[family, Family::Pointwise, Family::Reduce, Family::Movement]);
        config.floats = vec![DType::F32, DType::F32, DType::F64, DType::F16, DType::BF16];
        config.max_elements = 6_000;
        let (graph, tolerances) = batch(700 + 100 * number as u64, 6, &config);
        check(&graph, &tolerances, true, &format!("large {family:?}"));
    }
}

/// What the shared tests compare. One and three threads must give the same bits.
fn results_of(graph: &Graph, tensors: &[HostTensor], scalars: &[Scalar]) -> Vec<HostTensor> {
    let step = build(graph, |_| ()).unwrap();
    let [one, three] = [1, 3].map(|threads| run(&step, graph, tensors, scalars, threads));
    assert!(one == three, "the bits depend on the number of threads");
    one
}

#[test]
fn products_of_every_float() {
    // A depth that is cut.
    numbers::check_products_of_every_float((1, 30, 4200, 48));
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
    for level in [OptLevel::Quick, OptLevel::Generated, OptLevel::Full] {
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
