//! Functions under eager autograd: what the passes see before a joint graph is cut in two.

use kiln_compiler::testing::{POLICY, Stub};
use kiln_compiler::transform::channels::channels;
use kiln_compiler::{Options, split};
use kiln_graph::op::Op;
use kiln_graph::{DType, Graph, HostTensor, interpret, interpret_f64};
use kiln_partition::OutputRole::{Forward, Gradient};

/// Numbers of a small range that differ.
fn filled(shape: &[usize], scale: f64) -> HostTensor {
    let count: usize = shape.iter().product();
    let values = (0..count).map(|k| scale * (1.0 + (k % 7) as f64 / 7.0));
    HostTensor::from_floats(DType::F32, shape, values)
}

#[test]
fn indices_wait_for_their_checks() {
    let text = "graph @hot {
  %idx = parameter 0 : i64[4,1]
  %w = parameter 1 : f32[10]
  %dy = parameter 2 : f32[4,10]
  %zero = constant 0.0 : f32[]
  %zeros = broadcast %zero {dims=[]} : f32[4,10]
  %one = constant 1.0 : f32[]
  %ones = broadcast %one {dims=[]} : f32[4,1]
  %hot = scatter add %zeros, %idx, %ones {axis=1} : f32[4,10]
  %ws = broadcast %w {dims=[1]} : f32[4,10]
  %y = mul %hot, %ws : f32[4,10]
  %p = mul %hot, %dy : f32[4,10]
  %dw = reduce sum %p {axes=[0]} : f32[10]
  return %y, %dw
}";
    let graph = Graph::parse(text).unwrap();
    let halves = split(
        &graph,
        &[2],
        &[Forward, Gradient],
        &Options::default(),
        &Stub::default(),
    )
    .unwrap();
    let scatters = |graph: &Graph| {
        let is_scatter = |op: &Op| matches!(op, Op::Scatter { .. });
        graph.nodes().filter(|(_, data)| is_scatter(&data.op)).count()
    };
    assert_eq!(scatters(&halves.forward), 1, "{}", halves.forward);
}

#[test]
fn autocast_knows_the_pass_of_a_node() {
    // The gradient of %v reads %z behind products. The forward pass reads it for a loss, as it is.
    let text = "graph @gated {
  %x = parameter 0 : f32[4,8]
  %wz = parameter 1 : f32[8,8]
  %wv = parameter 2 : f32[8,8]
  %w2 = parameter 3 : f32[8,8]
  %w3 = parameter 4 : f32[8,8]
  %dy = parameter 5 : f32[4,8]
  %one = constant 1.0 : f32[]
  %ones = broadcast %one {dims=[]} : f32[4,8]
  %h = dot_general %x, %wz {a_contract=[1], b_contract=[0]} : f32[4,8]
  %n = neg %h : f32[4,8]
  %e = exp %n : f32[4,8]
  %d = add %ones, %e : f32[4,8]
  %z = div %ones, %d : f32[4,8]
  %v = dot_general %x, %wv {a_contract=[1], b_contract=[0]} : f32[4,8]
  %u = mul %z, %v : f32[4,8]
  %g = dot_general %u, %w2 {a_contract=[1], b_contract=[0]} : f32[4,8]
  %t = tanh %g : f32[4,8]
  %y = dot_general %t, %w3 {a_contract=[1], b_contract=[0]} : f32[4,8]
  %rest = sub %ones, %z : f32[4,8]
  %l = log %rest : f32[4,8]
  %reg = reduce sum %l {axes=[0,1]} : f32[]
  %dt = dot_general %dy, %w3 {a_contract=[1], b_contract=[1]} : f32[4,8]
  %tt = mul %t, %t : f32[4,8]
  %slope = sub %ones, %tt : f32[4,8]
  %dg = mul %dt, %slope : f32[4,8]
  %du = dot_general %dg, %w2 {a_contract=[1], b_contract=[1]} : f32[4,8]
  %dv = mul %du, %z : f32[4,8]
  %dwv = dot_general %x, %dv {a_contract=[0], b_contract=[0]} : f32[8,8]
  return %y, %reg, %dwv
}";
    let graph = Graph::parse(text).unwrap();
    let options = Options {
        autocast: Some(DType::BF16),
        ..Options::default()
    };
    let roles = [Forward, Forward, Gradient];
    let halves = split(&graph, &[5], &roles, &options, &Stub::default()).unwrap();
    let x = HostTensor::from_floats(DType::F32, [4, 8], std::iter::repeat_n(1.0, 32));
    let wz = HostTensor::from_floats(DType::F32, [8, 8], std::iter::repeat_n(1.0, 64));
    let others = [0.01, 0.02, 0.03].map(|scale| filled(&[8, 8], scale));
    let [wv, w2, w3] = others;
    let forward = [x, wz, wv, w2, w3];
    let results = interpret(&halves.forward, &forward, &[]).unwrap();
    let all: Vec<HostTensor> = forward.iter().cloned().chain([filled(&[4, 8], 1.0)]).collect();
    let exact = interpret_f64(&graph, &all, &[]).unwrap();
    let [loss, expected] = [&results, &exact].map(|results| results[1].to_f64s()[0]);
    assert!((loss / expected - 1.0).abs() < 1e-2, "{loss} is not {expected}");
}

#[test]
fn sums_of_differences_stay_small() {
    // Pressures less their mean: the sum of the pressures is some 3e9, that of the differences some 1e5.
    let text = "graph @pressures {
  %x = parameter 0 : f32[8,3,64,64]
  %m = parameter 1 : f32[3]
  %ms = broadcast %m {dims=[1]} : f32[8,3,64,64]
  %d = sub %x, %ms : f32[8,3,64,64]
  %sum = reduce sum %d {axes=[0,2,3]} : f32[3]
  return %sum
}";
    let graph = Graph::parse(text).unwrap();
    let after = channels(&graph, &POLICY, None).unwrap();
    let elements = (0..8 * 3 * 64 * 64).map(|k| 101_325.0 + (k % 11) as f64);
    let x = HostTensor::from_floats(DType::F32, [8, 3, 64, 64], elements);
    let m = HostTensor::from_floats(DType::F32, [3], [101_325.0; 3]);
    let arguments = [x, m];
    let results = interpret(&after, &arguments, &[]).unwrap();
    let exact = interpret_f64(&graph, &arguments, &[]).unwrap();
    for (sum, expected) in results[0].to_f64s().iter().zip(exact[0].to_f64s()) {
        assert!(
            (sum / expected - 1.0).abs() < 1e-6,
            "{sum} is not {expected}: {after}"
        );
    }
}
