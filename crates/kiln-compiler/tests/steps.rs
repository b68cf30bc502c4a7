//! Whole training steps: forward, backward and optimizer of small models, against the interpreter in f64.

mod support;

use kiln_graph::alias::assign_aliases;
use kiln_graph::{Graph, HostTensor, interpret_f64};
use kiln_partition::testing::{Sizes, arguments, decoder_step};
use support::{build, run};

/// `||actual - expected|| / ||expected||`.
fn error(actual: &HostTensor, expected: &HostTensor) -> f64 {
    let (actual, expected) = (actual.to_f64s(), expected.to_f64s());
    let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|x| x * x).sum::<f64>().sqrt();
    let difference = norm(&mut actual.iter().zip(&expected).map(|(a, b)| a - b));
    difference / norm(&mut expected.iter().copied()).max(1e-12)
}

fn decoder(sizes: Sizes) -> Graph {
    let mut graph = decoder_step(sizes).graph;
    // Every argument may be overwritten, as parameters and moments are.
    let dies = vec![true; graph.parameters().len()];
    assign_aliases(&mut graph, &dies);
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
    check(&decoder(sizes), 2e-4);
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
    check(&decoder(sizes), 2e-4);
}
