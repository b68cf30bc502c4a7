//! Steps with products of bf16, as mixed precision makes them: operands that are cast from f32 while they are
//! packed, results of bf16 and of f32, and what follows them in their kernels.

mod support;

use kiln_cpu::{Isa, Toolchain};
use kiln_graph::op::{BinaryOp, DotDims, Op, UnaryOp};
use kiln_graph::{DType, Graph, Provenance, TensorType, Value};

use support::{Setup, check_relative};

/// The error that rounding an operand or a result to 8 bits makes, with room for sums of such.
const TOLERANCE: f64 = 0.02;

fn add(graph: &mut Graph, op: Op, operands: &[Value]) -> Value {
    graph.add(op, operands, &Provenance::default()).unwrap()
}

fn cast(graph: &mut Graph, value: Value, to: DType) -> Value {
    add(graph, Op::Cast(to), &[value])
}

fn matrix(graph: &mut Graph, dtype: DType, shape: [usize; 2]) -> Value {
    graph.parameter(TensorType::new(dtype, shape))
}

/// A product of bf16 with a result of `result`.
fn product(graph: &mut Graph, operands: [Value; 2], transposed: [bool; 2], result: DType) -> Value {
    let [a, b] = transposed.map(usize::from);
    let dims = DotDims {
        a_contract: [1 - a].into_iter().collect(),
        b_contract: [b].into_iter().collect(),
        result: (result != DType::BF16).then_some(result),
        ..DotDims::matmul(0)
    };
    add(graph, Op::DotGeneral(dims), &operands)
}

/// Compares with the interpreter on every instruction set; `kernels` is how many the step may have at most.
fn check(graph: &Graph, what: &str, kernels: usize) {
    let mut isas = Toolchain::detect().unwrap().isa().contained().to_vec();
    if isas[0] == Isa::Avx512Bf16 {
        // Tiles are memory where the machine has none.
        isas.insert(0, Isa::AmxBf16);
    }
    for &isa in &isas {
        check_relative(graph, &format!("{what} on {isa}"), TOLERANCE, |setup| {
            setup.target.isa = isa;
        });
    }
    let mut setup = Setup::detect(2);
    setup.target.isa = isas[0];
    let step = setup.compile(graph).unwrap();
    assert!(
        step.contract().kernels.len() <= kernels,
        "{what}: {:?}",
        step.contract().kernels
    );
    let pairs = step
        .code
        .iter()
        .any(|file| file.text.contains("] of pairs of bf16"));
    assert_eq!(pairs, isas[0].has_bf16_pairs(), "{what}: which units are used");
}

/// Weights of f32 in any order, rounded as they are packed, odd sizes, and an activation behind.
#[test]
fn operands_are_rounded_while_they_are_packed() {
    let mut graph = Graph::new("casts");
    for transposed in [[false, false], [false, true], [true, false], [true, true]] {
        for (m, n, k) in [(37, 45, 51), (64, 48, 70)] {
            let turn = |flip: bool, [rows, columns]: [usize; 2]| {
                if flip { [columns, rows] } else { [rows, columns] }
            };
            let x = matrix(&mut graph, DType::F32, turn(transposed[0], [m, k]));
            let w = matrix(&mut graph, DType::F32, turn(transposed[1], [k, n]));
            let operands = [x, w].map(|value| cast(&mut graph, value, DType::BF16));
            let result = [DType::BF16, DType::F32][usize::from(m == 64)];
            let y = product(&mut graph, operands, transposed, result);
            let y = add(&mut graph, Op::Unary(UnaryOp::Tanh), &[y]);
            graph.output(y, None);
        }
    }
    check(&graph, "operands of f32 that are cast", 8);
}

/// A bias, a residual and an activation in f32 of a result of bf16, and a scale in bf16 before a product.
#[test]
fn pointwise_work_of_bf16_joins_products() {
    let mut graph = Graph::new("layers");
    let at = Provenance::default();
    let x = matrix(&mut graph, DType::BF16, [67, 96]);
    let w = matrix(&mut graph, DType::BF16, [96, 72]);
    let residual = matrix(&mut graph, DType::F32, [67, 72]);
    let half = graph
        .full(0.5, &TensorType::new(DType::BF16, [67, 96]), &at)
        .unwrap();
    let scaled = graph.binary(BinaryOp::Mul, x, half, &at).unwrap();
    let y = product(&mut graph, [scaled, w], [false, false], DType::BF16);
    let y = cast(&mut graph, y, DType::F32);
    let y = graph.binary(BinaryOp::Add, y, residual, &at).unwrap();
    let y = add(&mut graph, Op::Unary(UnaryOp::Sigmoid), &[y]);
    graph.output(y, None);
    check(&graph, "a scaled product with a residual", 1);
}

/// What neither pairs nor vectors divide: a depth of one, single rows and columns, three elements.
#[test]
fn small_products() {
    let mut graph = Graph::new("small");
    for (m, n, k) in [
        (1, 1, 1),
        (1, 40, 3),
        (40, 1, 2),
        (3, 5, 129),
        (8, 64, 131),
        (5, 70, 64),
    ] {
        for transposed in [[false, false], [true, true], [false, true]] {
            let turn = |flip: bool, [rows, columns]: [usize; 2]| {
                if flip { [columns, rows] } else { [rows, columns] }
            };
            let x = matrix(&mut graph, DType::BF16, turn(transposed[0], [m, k]));
            let w = matrix(&mut graph, DType::BF16, turn(transposed[1], [k, n]));
            let y = product(&mut graph, [x, w], transposed, DType::F32);
            graph.output(y, None);
        }
    }
    check(&graph, "small products", 18);
}
