//! The executable as a whole: arguments, scalars, operations kept whole, values used more than once, errors.

use std::sync::Arc;

use kiln_candle::{CandleError, CandleExecutable, Failure};
use kiln_graph::op::{BinaryOp, ExternOp, Op, UnaryOp};
use kiln_graph::{DType, Graph, HostTensor, Provenance, Scalar, TensorType};

use crate::common::{random, ty};

fn executable(graph: Graph) -> CandleExecutable {
    CandleExecutable::new(Arc::new(graph)).unwrap()
}

#[test]
fn values_used_twice_and_parameters_returned() {
    let p = Provenance::default();
    let mut graph = Graph::new("shared");
    let x = graph.parameter(ty(DType::F32, [3]));
    let unused = graph.parameter(ty(DType::F32, [1]));
    let square = graph.binary(BinaryOp::Mul, x, x, &p).unwrap();
    let sum = graph.binary(BinaryOp::Add, square, x, &p).unwrap();
    graph.unary(UnaryOp::Exp, sum, &p).unwrap();
    for value in [sum, square, x, sum, unused] {
        graph.output(value, None);
    }
    let inputs = [
        HostTensor::from_vec([3], [1.0f32, 2.0, 3.0]),
        random(DType::F32, [1], 1),
    ];
    let out = executable(graph).run(&inputs, &[]).unwrap();
    assert_eq!(out[0].to_f64s(), [2.0, 6.0, 12.0]);
    assert_eq!(out[1].to_f64s(), [1.0, 4.0, 9.0]);
    assert_eq!((&out[2], &out[3], &out[4]), (&inputs[0], &out[0], &inputs[1]));
}

#[test]
fn runtime_scalars_arrive_as_bits_of_their_type() {
    for dtype in DType::ALL {
        for value in [
            Scalar::Float(2.5),
            Scalar::Int(-7),
            Scalar::UInt(u64::MAX),
            Scalar::Bool(true),
        ] {
            let mut graph = Graph::new("scalar");
            let scalar = graph.scalar(dtype);
            graph.output(scalar, None);
            let out = executable(graph).run(&[], &[value.to_bits(dtype)]).unwrap();
            assert_eq!(out[0], HostTensor::scalar(dtype, value));
        }
    }
}

#[test]
fn wrong_arguments_are_named() {
    let mut graph = Graph::new("arguments");
    let x = graph.parameter(ty(DType::F32, [2]));
    graph.scalar(DType::F32);
    graph.output(x, None);
    let executable = executable(graph);
    let x = random(DType::F32, [2], 1);
    let run = |inputs: &[HostTensor], scalars: &[u64]| executable.run(inputs, scalars).unwrap_err();
    assert!(matches!(
        run(&[], &[0]),
        CandleError::ArgumentCount {
            expected: 1,
            given: 0
        }
    ));
    assert!(matches!(
        run(std::slice::from_ref(&x), &[]),
        CandleError::ScalarCount {
            expected: 1,
            given: 0
        }
    ));
    let error = run(&[random(DType::F32, [3], 1)], &[0]);
    assert!(matches!(&error, CandleError::ArgumentType { index: 0, .. }));
    let message = error.to_string();
    assert!(
        message.contains("f32[2]") && message.contains("f32[3]"),
        "{message}"
    );
    assert!(executable.run(&[x], &[0]).is_ok());
}

#[test]
fn tensors_beyond_32_bit_indices_are_refused_before_anything_runs() {
    let mut graph = Graph::new("huge");
    let one = graph.full(
        1.0,
        &TensorType::new(DType::U8, [1 << 20, 1 << 12]),
        &Provenance::default(),
    );
    graph.output(one.unwrap(), None);
    assert!(matches!(
        CandleExecutable::new(Arc::new(graph)),
        Err(CandleError::TooLarge { .. })
    ));
}

fn whole() -> CandleExecutable {
    let mut graph = Graph::new("kept whole");
    let x = graph.parameter(ty(DType::I32, [2]));
    let op = ExternOp {
        name: "swap".into(),
        attributes: "twice=no".into(),
        c_source: String::new(),
        outputs: [ty(DType::I32, [2]), ty(DType::F32, [])].into_iter().collect(),
    };
    let operation = Provenance::operation("Custom.Swap");
    for value in graph.add_node(Op::Extern(Box::new(op)), &[x], operation).unwrap() {
        graph.output(value, None);
    }
    executable(graph)
}

#[test]
fn operations_kept_whole_go_to_the_handler() {
    let input = [HostTensor::from_vec([2], [4i32, 9])];
    let out = whole()
        .run_with(&input, &[], &|op, operands| {
            assert_eq!((op.name.as_str(), op.attributes.as_str()), ("swap", "twice=no"));
            let values: Vec<i32> = operands[0].to_vec().ok_or("expected i32")?;
            let swapped = HostTensor::from_vec([2], [values[1], values[0]]);
            Ok(vec![swapped, HostTensor::scalar(DType::F32, Scalar::Float(0.5))])
        })
        .unwrap();
    assert_eq!(out[0].to_i64s(), [9, 4]);
    assert_eq!(out[1].to_f64s(), [0.5]);
}

#[test]
fn operations_kept_whole_that_fail_say_which_and_why() {
    let input = [HostTensor::from_vec([2], [4i32, 9])];
    let failure = |error: CandleError| match error {
        CandleError::Node { failure, origin, .. } => {
            assert_eq!(origin, " (Custom.Swap)");
            *failure
        }
        other => panic!("{other}"),
    };
    let none = failure(whole().run(&input, &[]).unwrap_err());
    assert!(matches!(none, Failure::NoHandler { name } if name == "swap"));
    let fails = whole().run_with(&input, &[], &|_, _| Err("no swapping today".into()));
    assert!(
        matches!(failure(fails.unwrap_err()), Failure::Handler { reason, .. } if reason == "no swapping today")
    );
    let wrong = whole().run_with(&input, &[], &|_, operands| Ok(operands));
    assert!(matches!(failure(wrong.unwrap_err()), Failure::HandlerResult { given, .. } if given.len() == 1));
}
