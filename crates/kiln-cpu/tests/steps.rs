//! Whole training steps: forward, backward and optimizer of small models, against the interpreter in f64.

mod support;

use kiln_compiler::{Options, compile};
use kiln_cpu::{CpuTarget, SourceFile, Toolchain};
use kiln_graph::alias::assign_aliases;
use kiln_graph::op::{BinaryOp, UnaryOp};
use kiln_graph::{DType, Graph, HostTensor, interpret, interpret_f64};
use kiln_partition::assign_phases;
use kiln_partition::testing::{Sizes, Tape, arguments, decoder, decoder_step};
use support::{Setup, build, run};

/// `||actual - expected|| / ||expected||`.
fn error(actual: &HostTensor, expected: &HostTensor) -> f64 {
    let (actual, expected) = (actual.to_f64s(), expected.to_f64s());
    let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|x| x * x).sum::<f64>().sqrt();
    let difference = norm(&mut actual.iter().zip(&expected).map(|(a, b)| a - b));
    difference / norm(&mut expected.iter().copied()).max(1e-12)
}

fn adam(sizes: Sizes) -> Graph {
    let mut graph = decoder_step(sizes).graph;
    // Every argument may be overwritten, as parameters and moments are.
    let dies = vec![true; graph.parameters().len()];
    assign_aliases(&mut graph, &dies);
    assign_phases(&mut graph);
    graph
}

fn check(graph: &Graph, limit: f64) {
    let (tensors, scalars) = arguments(graph, 3);
    let expected = interpret_f64(graph, &tensors, &scalars).unwrap();
    let step = build(graph, |_| ()).unwrap();
    assert!(step.contract().externs.is_empty());
    assert!(
        step.contract().aliases.iter().flatten().count() > 0,
        "no output takes over an argument"
    );
    let one = run(&step, graph, &tensors, &scalars, 1);
    for (number, (actual, expected)) in one.iter().zip(&expected).enumerate() {
        let error = error(actual, expected);
        assert!(
            error < limit,
            "output {number} of type {}: error {error:e}",
            actual.ty()
        );
    }
    for threads in [2, 3] {
        let several = run(&step, graph, &tensors, &scalars, threads);
        assert!(one == several, "{threads} threads give other bits than one");
    }
}

#[test]
fn a_decoder_step_of_odd_sizes() {
    let sizes = Sizes {
        layers: 2,
        batch: 3,
        length: 7,
        width: 30,
        heads: 3,
        hidden: 50,
        vocabulary: 37,
        keep: 0.8,
    };
    check(&adam(sizes), 2e-4);
}

#[test]
fn a_decoder_step_of_whole_vectors() {
    let sizes = Sizes {
        layers: 1,
        batch: 2,
        length: 32,
        width: 64,
        heads: 2,
        hidden: 96,
        vocabulary: 160,
        keep: 1.0,
    };
    check(&adam(sizes), 2e-4);
}

/// Autocast, compared with the graph of f32 in f64 and with the interpreter on the graph that autocast
/// made.
#[test]
fn a_decoder_step_in_16_bits() {
    let sizes = Sizes {
        layers: 2,
        batch: 2,
        length: 24,
        width: 48,
        heads: 3,
        hidden: 80,
        vocabulary: 64,
        keep: 0.8,
    };
    let graph = adam(sizes);
    let (tensors, scalars) = arguments(&graph, 3);
    let exact = interpret_f64(&graph, &tensors, &scalars).unwrap();
    for (dtype, limit) in [(DType::BF16, 3e-2), (DType::F16, 4e-3)] {
        let autocast = |setup: &mut Setup| setup.options.autocast = Some(dtype);
        let mut setup = Setup::detect(3);
        autocast(&mut setup);
        let cast = setup.compile(&graph).unwrap().graph;
        let same = interpret(&cast, &tensors, &scalars).unwrap();
        let step = build(&graph, autocast).unwrap();
        assert!(step.contract().autocast.is_some());
        let actual = run(&step, &graph, &tensors, &scalars, 2);
        for (number, actual) in actual.iter().enumerate() {
            let what = format!("{dtype}, output {number} of type {}", actual.ty());
            assert_eq!(actual.ty(), exact_type(&graph, number), "{what}");
            let (rounded, between) = (error(actual, &exact[number]), error(actual, &same[number]));
            assert!(rounded < limit, "{what}: {rounded:e}");
            assert!(between < limit / 4.0, "{what}: {between:e} from the interpreter");
        }
    }
}

fn exact_type(graph: &Graph, output: usize) -> &kiln_graph::TensorType {
    graph.ty(graph.outputs[output].value)
}

/// The first step of Adam, whose moments do not exist yet.
fn first_of_adam(sizes: Sizes) -> Graph {
    use BinaryOp::*;
    let mut tape = Tape::new("decoder");
    let loss = decoder(&mut tape, sizes);
    let parameters = tape.parameters.clone();
    let gradients = tape.backward(loss, &parameters);
    for (weight, gradient) in parameters.into_iter().zip(gradients) {
        let first = tape.scale(gradient, 0.1);
        let square = tape.binary(Mul, gradient, gradient);
        let second = tape.scale(square, 0.01);
        let epsilon = tape.like(1e-3, second);
        let safe = tape.binary(Add, second, epsilon);
        let inverse = tape.unary(UnaryOp::Rsqrt, safe);
        let step = tape.binary(Mul, first, inverse);
        let step = tape.scale(step, 0.1);
        let updated = tape.binary(Sub, weight, step);
        for output in [updated, first, second] {
            tape.graph.output(output, None);
        }
    }
    tape.graph.output(loss, None);
    let mut graph = tape.graph;
    let dies = vec![true; graph.parameters().len()];
    assign_aliases(&mut graph, &dies);
    assign_phases(&mut graph);
    graph
}

/// The C compiler should see only once the parts that an optimizer's first step shares with the others.
#[test]
fn the_first_step_and_the_following_ones_share_all_files_but_those_of_updates() {
    let sizes = Sizes {
        layers: 2,
        batch: 4,
        length: 24,
        width: 48,
        heads: 3,
        hidden: 80,
        vocabulary: 160,
        keep: 0.8,
    };
    let target = CpuTarget::new(&Toolchain::detect().unwrap(), 2);
    let lasting = Options::default();
    let once = Options {
        update_in_epilogue: false,
        ..lasting.clone()
    };
    let first = compile(&first_of_adam(sizes), &once, &target).unwrap().code;
    let second = compile(&adam(sizes), &lasting, &target).unwrap().code;
    let kernels = |sources: &[SourceFile]| -> Vec<SourceFile> {
        let own = |name: &str| name.starts_with("updates") || name == "step.c";
        sources.iter().filter(|file| !own(&file.name)).cloned().collect()
    };
    let (shared, others) = (kernels(&first), kernels(&second));
    assert!(shared.iter().any(|file| file.name == "backward_0.c"));
    for (a, b) in shared.iter().zip(&others) {
        assert!(a == b, "{} and {} differ", a.name, b.name);
    }
    assert_eq!(shared.len(), others.len());
}
