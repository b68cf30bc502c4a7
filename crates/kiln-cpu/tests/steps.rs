//! Whole training steps on the CPU.

mod support;
#[path = "../../kiln-compiler/tests/targets/steps.rs"]
mod target;

use kiln_compiler::{Options, compile};
use kiln_cpu::{CpuTarget, SourceFile, Toolchain};
use kiln_graph::alias::assign_aliases;
use kiln_graph::op::{BinaryOp, UnaryOp};
use kiln_graph::{DType, Graph, HostTensor, Scalar};
use kiln_partition::assign_phases;
use kiln_partition::testing::{Sizes, Tape, decoder};
use support::{Setup, build};
use target::{Ran, adam};

/// Every number of threads must give the same bits.
fn run(graph: &Graph, autocast: Option<DType>, tensors: &[HostTensor], scalars: &[Scalar]) -> Ran {
    let change = |setup: &mut Setup| setup.options.autocast = autocast;
    let step = build(graph, change).unwrap();
    assert!(step.contract().externs.is_empty());
    assert_eq!(step.contract().autocast.is_some(), autocast.is_some());
    let [results, two, three] =
        [1, 2, 3].map(|threads| support::run(&step, graph, tensors, scalars, threads));
    assert!(results == two && two == three, "threads give other bits");
    let mut setup = Setup::detect(3);
    change(&mut setup);
    Ran {
        results,
        taken: step.contract().aliases.iter().flatten().count(),
        cast: autocast.map(|_| setup.compile(graph).unwrap().graph),
    }
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
