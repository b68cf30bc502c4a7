//! How far sums over many elements are from their value: as far as one rounding of the result, whatever their
//! length.
//!
//! A sum that adds n positive numbers to one accumulator of f32 is off by some `sqrt(n) / 3` units of 2^-24
//! (some 11 units for a sixteenth of the 18432 pixels of a channel). In blocks of b numbers,
//! whose sums add up exactly, the error is some `b / (3 sqrt(n))` units: less than the half unit that
//! rounding the result takes. The bounds are twice what the arithmetic gives on average.

mod support;

use kiln_graph::{DType, Graph, HostTensor, TensorType, interpret_f64};
use support::{build, run};

/// The rounding of f32, relative.
const UNIT: f64 = 1.0 / (1u64 << 24) as f64;

/// Numbers between 0 and 1, all of the same sign: rounding errors of their sums do not cancel.
fn positive(ty: &TensorType, seed: u64) -> HostTensor {
    let mut state = seed;
    let mut next = || {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f64 / (1u64 << 24) as f64
    };
    let values: Vec<f64> = (0..ty.numel()).map(|_| next()).collect();
    HostTensor::from_floats(ty.dtype, ty.shape.clone(), values)
}

/// Error of each output by norms, in units. One and three threads must give the same bits.
fn errors(graph: &Graph, input: &HostTensor) -> Vec<f64> {
    let inputs = std::slice::from_ref(input);
    let expected = interpret_f64(graph, inputs, &[]).unwrap();
    let step = build(graph, |_| ()).unwrap();
    let (one, three) = (
        run(&step, graph, inputs, &[], 1),
        run(&step, graph, inputs, &[], 3),
    );
    let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|x| x * x).sum::<f64>().sqrt();
    let outputs = one.iter().zip(&three).zip(&expected);
    outputs
        .map(|((one, three), expected)| {
            assert_eq!(one.bytes(), three.bytes(), "with one and three threads");
            let (found, expected) = (one.to_f64s(), expected.to_f64s());
            let difference = found.iter().zip(&expected).map(|(a, b)| a - b);
            norm(&mut { difference }) / norm(&mut expected.into_iter()) / UNIT
        })
        .collect()
}

/// Rows, columns and everything, of long and short, even and odd extents.
#[test]
fn long_sums_round_once() {
    for (shape, axes, kept) in [
        ("5,100003", "1", "5"),
        ("3,64,1030", "1,2", "3"),
        ("40,7,7,129", "1,2,3", "40"),
        ("100003,5", "0", "5"),
        ("20000,70", "0", "70"),
        ("4,5001,33", "0,1", "33"),
        ("1000003", "0", ""),
        ("1201,1001", "0,1", ""),
        ("70000,3,5", "0,1,2", ""),
        ("9,100001", "0,1", ""),
    ] {
        let text = format!(
            "graph @sums {{
  %x = parameter 0 : f32[{shape}]
  %sum = reduce sum %x {{axes=[{axes}]}} : f32[{kept}]
  return %sum
}}"
        );
        let graph = Graph::parse(&text).unwrap_or_else(|error| panic!("{error}: {text}"));
        let ty = graph.ty(graph.parameters()[0]).clone();
        let error = errors(&graph, &positive(&ty, 1))[0];
        assert!(error <= 1.0, "sum over {axes} of [{shape}]: {error} units");
    }
}

/// Mean and variance of channels as batch norm takes them, with an outlier in the middle of the images: at
/// most three roundings each.
#[test]
fn statistics_of_channels_do_not_cancel() {
    let (n, c, side) = (8, 6, 47);
    let count = n * side * side;
    let part = format!("{c},{n},{side},{side}");
    let text = format!(
        "graph @statistics {{
  %x = parameter 0 : f32[{n},{c},{side},{side}]
  %weight = constant 1.0 : f32[]
  %weights = broadcast %weight {{dims=[]}} : f32[{c},1,1,1]
  %z = conv %x, %weights {{stride=[1,1], pad_low=[0,0], pad_high=[0,0], dilation=[1,1], groups={c}}} : f32[{n},{c},{side},{side}]
  %1 = transpose %z {{perm=[1,0,2,3]}} : f32[{part}]
  %2 = reshape %1 : f32[{c},{count}]
  %3 = reduce sum %2 {{axes=[1]}} : f32[{c}]
  %4 = constant {share:?} : f32[]
  %5 = broadcast %4 {{dims=[]}} : f32[{c}]
  %mean = mul %3, %5 : f32[{c}]
  %7 = broadcast %mean {{dims=[1]}} : f32[{n},{c},{side},{side}]
  %8 = sub %z, %7 : f32[{n},{c},{side},{side}]
  %9 = mul %8, %8 : f32[{n},{c},{side},{side}]
  %10 = transpose %9 {{perm=[1,0,2,3]}} : f32[{part}]
  %11 = reshape %10 : f32[{c},{count}]
  %12 = reduce sum %11 {{axes=[1]}} : f32[{c}]
  %var = mul %12, %5 : f32[{c}]
  return %mean, %var
}}",
        share = 1.0 / count as f32
    );
    let graph = Graph::parse(&text).unwrap_or_else(|error| panic!("{error}: {text}"));
    let ty = graph.ty(graph.parameters()[0]).clone();
    let mut values = positive(&ty, 2).to_f64s();
    for channel in 0..c {
        // Forty deviations from the mean.
        values[((n / 2 * c + channel) * side + side / 2) * side + side / 2] = 12.0;
    }
    let input = HostTensor::from_floats(DType::F32, ty.shape, values);
    for (what, error) in ["mean", "variance"].iter().zip(errors(&graph, &input)) {
        assert!(error <= 3.0, "{what}: {error} units");
    }
}
