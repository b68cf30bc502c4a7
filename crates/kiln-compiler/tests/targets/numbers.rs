//! Graphs in which numbers of every type come about in ways of their own, against the interpreter. The same
//! for every target: each says in `super::results_of` what comes of a graph.

mod norms;

use kiln_graph::op::DotDims;
use kiln_graph::testing::{difference, random_arguments};
use kiln_graph::{DType, Graph, HostTensor, Op, Provenance, Scalar, TensorType, interpret_f64};

/// Products of every float type, at shapes with tails on every side: either order of the second operand in
/// memory, several products of a batch, few rows, and one that is `deep`: batch, rows, depth, columns.
pub fn check_products_of_every_float(deep: (usize, usize, usize, usize)) {
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
            deep,
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
        let actual = super::results_of(&graph, &tensors, &scalars);
        assert_eq!(actual.len(), expected.len());
        for (actual, expected) in actual.iter().zip(&expected) {
            let error = norms::error(actual, expected);
            assert!(error < limit, "{dtype}: error {error:e}");
        }
    }
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
    // The second makes the logarithm's operand negative or zero.
    for scalars in [
        [-1.0, 1.0, -1.0],
        [-1.0, -1.0, -1.0],
        [-1.0, 1.0, -0.5],
        [1.0, 1.0, 1.0],
    ] {
        let scalars = scalars.map(Scalar::Float);
        let given = std::slice::from_ref(&x);
        let expected = interpret_f64(&graph, given, &scalars).unwrap();
        let actual = super::results_of(&graph, given, &scalars);
        assert_eq!(actual.len(), expected.len());
        for (actual, expected) in actual.iter().zip(&expected) {
            for (at, (a, e)) in actual.to_f64s().iter().zip(expected.to_f64s()).enumerate() {
                let same = a == &e || (a.is_nan() && e.is_nan());
                let close = (a - e).abs() <= 1e-5 * e.abs().max(1e-30);
                assert!(same || close, "{scalars:?}, element {at}: {a} for {e}");
            }
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
    let (tensors, scalars) = random_arguments(&graph, 7);
    let expected = interpret_f64(&graph, &tensors, &scalars).unwrap();
    let actual = super::results_of(&graph, &tensors, &scalars);
    for (number, expected) in expected.iter().enumerate() {
        let found = difference(&actual[number], expected, 1e-6);
        assert!(found.is_none(), "output {number}: {found:?}");
    }
}
