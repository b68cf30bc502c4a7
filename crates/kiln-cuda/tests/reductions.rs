//! Reductions of every shape, and arithmetic at the ends of the range, on the host against the interpreter.

mod support;

use kiln_compiler::Options;
use kiln_cuda::testing::host::{Differential, Outcome, differential};
use kiln_graph::op::{BinaryOp, Dims, ReduceOp};
use kiln_graph::{DType, Graph, Op, Provenance, Scalar, Shape, TensorType, Value};
use support::append;

/// Shapes and the axes that are reduced: one element, one row, few long rows, many short ones, columns, what
/// lies between, all of a tensor.
const SHAPES: [(&[usize], &[usize]); 21] = [
    (&[1], &[0]),
    (&[33], &[0]),
    (&[5000], &[0]),
    (&[70_001], &[0]),
    (&[3, 5], &[1]),
    (&[3, 5], &[0]),
    (&[200, 7], &[1]),
    (&[7, 200], &[0]),
    (&[7, 200], &[1]),
    (&[4, 3000], &[1]),
    (&[3000, 4], &[0]),
    (&[2, 20_000], &[1]),
    (&[300, 260], &[0]),
    (&[300, 260], &[1]),
    (&[300, 260], &[0, 1]),
    (&[5, 17, 31], &[0, 2]),
    (&[5, 17, 31], &[1]),
    (&[2, 300, 40], &[1]),
    (&[6, 64, 128], &[0, 1]),
    (&[64, 1, 9], &[1]),
    (&[4, 0, 3], &[1]),
];

fn add(graph: &mut Graph, op: Op, inputs: &[Value]) -> Value {
    graph.add(op, inputs, &Provenance::default()).unwrap()
}

/// `x` less what its reduction gives, for every element.
fn less_reduced(graph: &mut Graph, x: Value, reduced: Value, axes: &[usize]) -> Value {
    let shape = graph.shape(x).clone();
    let dims: Dims = (0..shape.rank()).filter(|axis| !axes.contains(axis)).collect();
    let wide = add(graph, Op::Broadcast { shape, dims }, &[reduced]);
    add(graph, Op::Binary(BinaryOp::Sub), &[x, wide])
}

fn reductions(dtype: DType, ops: &[ReduceOp], (shape, axes): (&[usize], &[usize])) -> Graph {
    let mut graph = Graph::new("reductions");
    let x = graph.parameter(TensorType::new(dtype, shape));
    for &op in ops {
        let count: usize = axes.iter().map(|&axis| shape[axis]).product();
        // Longer products leave the range; nothing has no largest element.
        let out_of_range = op == ReduceOp::Prod && count > 40;
        if out_of_range || (count == 0 && matches!(op, ReduceOp::Max | ReduceOp::Min)) {
            continue;
        }
        let reduced = add(
            &mut graph,
            Op::Reduce {
                op,
                axes: Dims::from_slice(axes),
            },
            &[x],
        );
        graph.output(reduced, None);
        if dtype.is_float() && op == ReduceOp::Max {
            let less = less_reduced(&mut graph, x, reduced, axes);
            graph.output(less, None);
        }
    }
    graph
}

#[test]
fn reductions_of_every_shape() {
    use ReduceOp::{All, Any, Max, Min, Prod, Sum};
    for dtype in [
        DType::F32,
        DType::F64,
        DType::BF16,
        DType::I64,
        DType::U8,
        DType::Bool,
    ] {
        let ops: &[ReduceOp] = if dtype == DType::Bool {
            &[Any, All]
        } else {
            &[Sum, Prod, Max, Min]
        };
        let alone = SHAPES.map(|case| reductions(dtype, ops, case));
        let mut whole = Graph::new("reductions");
        alone.iter().for_each(|graph| append(&mut whole, graph));
        let Err(error) = differential(&whole) else {
            continue;
        };
        for (graph, (shape, axes)) in alone.iter().zip(SHAPES) {
            if let Err(error) = differential(graph) {
                panic!("{dtype} {shape:?} over {axes:?}: {error}");
            }
        }
        panic!("{dtype}: {error}");
    }
}

/// Sums, products and largest values over rows of constants, of every length up to some warps.
#[test]
fn rows_of_constants() {
    let mut graph = Graph::new("constants");
    let constant = Op::Constant {
        value: Scalar::Float(0.9),
        dtype: DType::F32,
    };
    let each = add(&mut graph, constant, &[]);
    for length in (1..=40).chain([63, 64, 65, 100, 129]) {
        for op in [ReduceOp::Sum, ReduceOp::Prod, ReduceOp::Max] {
            // Zero times what has left the range is no number.
            if op == ReduceOp::Prod && length > 40 {
                continue;
            }
            let shape = Shape::from([2, length]);
            let row = add(
                &mut graph,
                Op::Broadcast {
                    shape: shape.clone(),
                    dims: Dims::new(),
                },
                &[each],
            );
            let count = add(
                &mut graph,
                Op::Iota {
                    shape,
                    dtype: DType::F32,
                    axis: 1,
                },
                &[],
            );
            for x in [row, count] {
                let axes = Dims::from_slice(&[1]);
                let reduced = add(&mut graph, Op::Reduce { op, axes }, &[x]);
                graph.output(reduced, None);
            }
        }
    }
    let mut comparison = Differential::new(&graph);
    // Nothing is left of it after simplification.
    comparison.options = Options {
        transform: false,
        ..Options::default()
    };
    assert_eq!(comparison.check(), Ok(Outcome::Same));
}

/// Burn's logistic function with minus one as a constant of the graph, which a kernel that takes pointers
/// reads from memory: the others have it in their text, where the power is a division.
#[test]
fn powers_by_a_constant() {
    let graph = Graph::parse(
        "graph @powers {
  %x = parameter 0 : f32[3,37]
  %q = parameter 1 : f32[1,1,3,8]
  %dy = parameter 2 : f32[1,1,3,8]
  %minus = constant -3.0 : f32[]
  %scale = constant 0.5 : f32[]
  %y, %stats = attention %q, %q, %q, %scale : f32[1,1,3,8], f32[1,1,3,2]
  %dq, %dk, %dv = attention_grad %q, %q, %q, %scale, %stats, %dy, %scale, %minus : f32[1,1,3,8], f32[1,1,3,8], f32[1,1,3,8]
  %wide = broadcast %minus {dims=[]} : f32[3,37]
  %negative = mul %x, %wide : f32[3,37]
  %e = exp %negative : f32[3,37]
  %c = constant 1.0 : f32[]
  %one = broadcast %c {dims=[]} : f32[3,37]
  %sum = add %e, %one : f32[3,37]
  %log = log %sum : f32[3,37]
  %scaled = mul %log, %wide : f32[3,37]
  %power = exp %scaled : f32[3,37]
  %silu = mul %x, %power : f32[3,37]
  return %silu, %dq, %dk, %dv
}",
    )
    .unwrap();
    let step = Differential::new(&graph).compile().unwrap();
    let mut bodies = step.code.functions.iter().map(|function| &function.text.body);
    assert!(bodies.any(|body| body.contains("kiln_power_of(") && body.contains("(-3.0f))")));
    differential(&graph).unwrap();
}
