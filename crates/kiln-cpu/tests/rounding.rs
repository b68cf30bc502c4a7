//! An f64 becomes 16 bits by one rounding, whether it is an element, a runtime scalar or a constant, and so
//! does an integer.

mod support;

use half::{bf16, f16};
use kiln_graph::{DType, Graph, HostTensor, Scalar, Shape, interpret};
use support::{build, run};

/// The middles between neighbours of both types, and the numbers beside them: f32 has the middles only.
fn numbers() -> Vec<f64> {
    let mut numbers = Vec::new();
    for bits in (0..0x7f80).step_by(13) {
        let halves = [bits, bits + 1].map(|bits| f16::from_bits(bits).to_f64());
        let brains = [bits, bits + 1].map(|bits| bf16::from_bits(bits).to_f64());
        for [low, high] in [halves, brains] {
            let middle = low / 2.0 + high / 2.0;
            let beside = [middle.next_down(), middle, middle.next_up(), -middle.next_up()];
            numbers.extend(beside.into_iter().filter(|number| number.is_finite()));
        }
    }
    numbers
}

#[test]
fn numbers_of_64_bits_round_once() {
    let numbers = numbers();
    let text = format!(
        "graph @casts {{
  %x = parameter 0 : f64[{n}]
  %s = scalar 0 : f16[]
  %t = scalar 1 : bf16[]
  %half = cast %x : f16[{n}]
  %brain = cast %x : bf16[{n}]
  %ss = broadcast %s {{dims=[]}} : f16[5]
  %tt = broadcast %t {{dims=[]}} : bf16[5]
  %c = constant 1.0004882812500002 : f16[]
  %cc = broadcast %c {{dims=[]}} : f16[5]
  %d = constant 1.0039062500000002 : bf16[]
  %dd = broadcast %d {{dims=[]}} : bf16[5]
  return %half, %brain, %ss, %tt, %cc, %dd
}}",
        n = numbers.len()
    );
    let graph = Graph::parse(&text).unwrap();
    let inputs = [HostTensor::from_vec(Shape::new([numbers.len()]), &numbers)];
    // Just above the middle between 1 and the next number.
    let above = [11, 8].map(|digit| Scalar::Float((1.0 + 2f64.powi(-digit)).next_up()));
    let expected = interpret(&graph, &inputs, &above).unwrap();
    let step = build(&graph, |_| ()).unwrap();
    let actual = run(&step, &graph, &inputs, &above, 1);
    assert_eq!(actual, expected);
    for (number, next) in [(2, 10), (3, 7), (4, 10), (5, 7)] {
        assert_eq!(actual[number].to_f64s(), [1.0 + 2f64.powi(-next); 5]);
    }
    let twice = numbers
        .iter()
        .map(|&number| f16::from_f32(number as f32).to_f64())
        .collect::<Vec<f64>>();
    assert_ne!(actual[0].to_f64s(), twice, "the numbers show no difference");
}

#[test]
fn integers_round_once() {
    // The middles between neighbours of bf16 and the integers beside them, of every size. f32 has few of
    // these, and f64 none of the largest.
    let mut integers = vec![0, 33_685_505, i64::MAX, i64::MIN];
    for size in 8..63 {
        for digits in (128..256).step_by(9) {
            let middle = ((2 * digits + 1) << (size - 8)) >> 1;
            integers.extend([middle - 1, middle, middle + 1, -middle - 1, -middle + 1]);
        }
    }
    let count = integers.len();
    for dtype in [DType::I32, DType::U32, DType::I64, DType::U64] {
        for half in [DType::BF16, DType::F16] {
            let text = format!(
                "graph @casts {{
  %x = parameter 0 : {dtype}[{count}]
  %s = scalar 0 : {dtype}[]
  %half = cast %x : {half}[{count}]
  %one = cast %s : {half}[]
  return %half, %one
}}"
            );
            let graph = Graph::parse(&text).unwrap();
            let inputs = [HostTensor::from_ints(
                dtype,
                Shape::new([count]),
                integers.iter().copied(),
            )];
            let scalars = [Scalar::Int(33_685_505)];
            let expected = interpret(&graph, &inputs, &scalars).unwrap();
            let step = build(&graph, |_| ()).unwrap();
            assert_eq!(
                run(&step, &graph, &inputs, &scalars, 1),
                expected,
                "{dtype} to {half}"
            );
            if half == DType::BF16 {
                assert_eq!(expected[0].to_f64s()[1], 33_816_576.0);
            }
        }
    }
}
