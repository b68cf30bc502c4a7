//! Loss scaling inside the step: what it computes on the interpreter, and what it is for.

use kiln_compiler::testing::Stub;
use kiln_compiler::transform::loss_scale::{LossScaleError, LossScaling, SkippedState, scale_loss};
use kiln_compiler::{Options, compile};
use kiln_graph::op::BinaryOp;
use kiln_graph::{DType, Graph, HostTensor, Node, Phase, Value, interpret, interpret_f64, verify};
use kiln_partition::assign_phases;
use kiln_partition::testing::{Tape, arguments, f32s, perceptron, squared};

const SCALING: LossScaling = LossScaling {
    growth: 2.0,
    backoff: 0.5,
    interval: 4,
};

/// A perceptron with a loss of this size, and gradient descent with the inverse of it as rate: the step,
/// what its backward pass begins with, and its states.
fn step(size: f64) -> (Graph, Vec<Value>, Vec<SkippedState>) {
    let mut tape = Tape::new("perceptron");
    let x = tape.input(f32s(&[3, 4]));
    let y = perceptron(&mut tape, x);
    let loss = squared(&mut tape, y);
    let loss = tape.scale(loss, size);
    let weights = tape.parameters.clone();
    let gradients = tape.backward(loss, &weights);
    let updates = tape.graph.num_nodes();
    for (&weight, gradient) in weights.iter().zip(gradients) {
        let change = tape.scale(gradient, 0.5 / size);
        let next = tape.binary(BinaryOp::Sub, weight, change);
        tape.graph.output(next, None);
    }
    tape.graph.output(loss, None);
    let mut graph = tape.graph;
    assign_phases(&mut graph);
    let nodes: Vec<Node> = graph.nodes().map(|(node, _)| node).skip(updates).collect();
    for node in nodes {
        graph.provenance_mut(node).phase = Phase::Optimizer;
    }
    let ones = graph
        .nodes()
        .filter(|(_, data)| data.provenance.operation.as_deref() == Some("NumericFloat.Ones"));
    let seeds = ones.map(|(_, data)| data.outputs[0]).collect();
    let position = |value: Value| {
        graph
            .parameters()
            .iter()
            .position(|&other| other == value)
            .unwrap()
    };
    let states = weights.iter().enumerate().map(|(output, &weight)| SkippedState {
        output,
        argument: position(weight),
    });
    let states = states.collect();
    (graph, seeds, states)
}

fn scaled(size: f64) -> Graph {
    let (graph, seeds, states) = step(size);
    let scaled =
        scale_loss(&graph, &SCALING, &seeds, &states).unwrap_or_else(|error| panic!("{error}\n{graph}"));
    verify(&scaled).unwrap();
    assert_eq!(scaled.parameters().len(), graph.parameters().len() + 3);
    assert_eq!(scaled.outputs.len(), graph.outputs.len() + 3);
    scaled
}

/// The arguments of the plain step, and behind them scale, counter and skipped steps.
fn with_state(tensors: &[HostTensor], scale: f64, counter: i64, skipped: i64) -> Vec<HostTensor> {
    let int = |x: i64| HostTensor::from_ints(DType::I32, [1], [x]);
    let mut all = tensors.to_vec();
    all.extend([
        HostTensor::from_floats(DType::F32, [1], [scale]),
        int(counter),
        int(skipped),
    ]);
    all
}

/// Scale, counter and skipped steps among the outputs.
fn state(outputs: &[HostTensor]) -> (f64, i64, i64) {
    let [scale, counter, skipped] = &outputs[outputs.len() - 3..] else {
        panic!("three states")
    };
    (scale.to_f64s()[0], counter.to_i64s()[0], skipped.to_i64s()[0])
}

fn error(actual: &HostTensor, expected: &HostTensor) -> f64 {
    let (actual, expected) = (actual.to_f64s(), expected.to_f64s());
    let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|x| x * x).sum::<f64>().sqrt();
    norm(&mut actual.iter().zip(&expected).map(|(a, b)| a - b))
        / norm(&mut expected.iter().copied()).max(1e-12)
}

#[test]
fn a_scaled_step_is_the_step() {
    let (graph, ..) = step(1.0);
    let (tensors, scalars) = arguments(&graph, 5);
    let expected = interpret(&graph, &tensors, &scalars).unwrap();
    let scaled = scaled(1.0);
    for (scale, counter, next) in [
        (1024.0, 1, (1024.0, 2, 7)),
        (1024.0, 3, (2048.0, 0, 7)),
        (16_777_216.0, 3, (16_777_216.0, 0, 7)),
    ] {
        let actual = interpret(&scaled, &with_state(&tensors, scale, counter, 7), &scalars).unwrap();
        assert_eq!(state(&actual), next);
        for (number, expected) in expected.iter().enumerate() {
            let error = error(&actual[number], expected);
            assert!(error < 1e-6, "output {number}: {error:e}");
        }
    }
}

#[test]
fn a_step_whose_gradients_are_not_finite_changes_nothing() {
    let scaled = scaled(1.0);
    let (graph, _, states) = step(1.0);
    let (mut tensors, scalars) = arguments(&graph, 5);
    // Finite losses, infinite gradients: 3e38 is near the largest f32.
    for (scale, next) in [(3e38, 1.5e38), (1.0, 1.0)] {
        if scale == 1.0 {
            tensors[0] = HostTensor::from_floats(DType::F32, [3, 4], (0..12).map(|_| f64::NAN));
        } else {
            let large = tensors[0].to_f64s().into_iter().map(|x| x * 100.0);
            tensors[0] = HostTensor::from_floats(DType::F32, [3, 4], large);
        }
        let given = with_state(&tensors, scale, 3, 7);
        let actual = interpret(&scaled, &given, &scalars).unwrap();
        let (moved, counter, skipped) = state(&actual);
        assert!((moved / next - 1.0).abs() < 1e-6, "{moved}");
        assert_eq!((counter, skipped), (0, 8));
        for state in &states {
            assert_eq!(actual[state.output].bytes(), tensors[state.argument].bytes());
        }
    }
}

/// Gradients below what f16 can hold vanish without scaling, and are as exact as others with it.
#[test]
fn small_gradients_survive_in_f16() {
    let size = 1e-8;
    let (graph, _, states) = step(size);
    let (tensors, scalars) = arguments(&graph, 5);
    let exact = interpret_f64(&graph, &tensors, &scalars).unwrap();
    let options = Options {
        autocast: Some(DType::F16),
        ..Options::default()
    };
    let changes = |graph: &Graph, mut given: Vec<HostTensor>| -> f64 {
        let step = compile(graph, &options, &Stub::default()).unwrap();
        assert!(
            step.graph
                .values()
                .any(|(value, _)| step.graph.dtype(value) == DType::F16)
        );
        let actual = step.code.run(&mut given, &scalars).unwrap();
        // Of how much the first weight moves.
        let SkippedState { output, argument } = states[0];
        let old = tensors[argument].to_f64s();
        let moved = |new: &HostTensor| {
            let moved = new.to_f64s().into_iter().zip(&old).map(|(new, old)| new - old);
            HostTensor::from_floats(DType::F64, new.ty().shape.clone(), moved.collect::<Vec<_>>())
        };
        error(&moved(&actual[output]), &moved(&exact[output]))
    };
    let plain = changes(&graph, tensors.clone());
    let kept = changes(&scaled(size), with_state(&tensors, 65536.0 * 64.0, 0, 0));
    assert!(plain > 0.5, "nothing vanishes: {plain:e}");
    assert!(kept < 1e-2, "{kept:e}");
}

#[test]
fn mistakes_are_named() {
    let (graph, seeds, _) = step(1.0);
    assert_eq!(
        scale_loss(&graph, &SCALING, &[], &[]),
        Err(LossScaleError::NoSeed)
    );
    let wrong = SkippedState {
        output: 0,
        argument: 99,
    };
    let error = scale_loss(&graph, &SCALING, &seeds, &[wrong]);
    assert_eq!(
        error,
        Err(LossScaleError::State {
            output: 0,
            argument: 99
        })
    );
    // An update that counts as part of the backward pass is not linear: it would be divided by the scale.
    let mut unphased = graph.clone();
    let nodes: Vec<Node> = graph.nodes().map(|(node, _)| node).collect();
    for node in nodes {
        unphased.provenance_mut(node).phase = Phase::Backward;
    }
    let error = scale_loss(&unphased, &SCALING, &seeds, &[]);
    assert!(
        matches!(error, Err(LossScaleError::NotLinear { .. })),
        "{error:?}"
    );
}
