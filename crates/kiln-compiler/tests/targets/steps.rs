//! Whole training steps: forward, backward and optimizer of small models, against the interpreter in f64. The
//! same for every target: each says in `super::run` what comes of a graph.

mod norms;

use kiln_graph::alias::assign_aliases;
use kiln_graph::{DType, Graph, HostTensor, interpret, interpret_f64};
use kiln_partition::assign_phases;
use kiln_partition::testing::{Sizes, arguments, decoder_step};
use norms::error;

/// What comes of a step.
pub struct Ran {
    pub results: Vec<HostTensor>,
    /// How many outputs take over an argument.
    pub taken: usize,
    /// What autocast made of the graph, if it was asked for.
    pub cast: Option<Graph>,
}

/// A step of Adam on a decoder.
pub fn adam(sizes: Sizes) -> Graph {
    let mut graph = decoder_step(sizes).graph;
    // Every argument may be overwritten, as parameters and moments are.
    let dies = vec![true; graph.parameters().len()];
    assign_aliases(&mut graph, &dies);
    assign_phases(&mut graph);
    graph
}

/// The results of `graph` are closer to those in f64 than `limit`.
pub fn check(graph: &Graph, limit: f64) {
    let (tensors, scalars) = arguments(graph, 3);
    let expected = interpret_f64(graph, &tensors, &scalars).unwrap();
    let ran = super::run(graph, None, &tensors, &scalars);
    assert!(ran.taken > 0, "no output takes over an argument");
    for (number, (actual, expected)) in ran.results.iter().zip(&expected).enumerate() {
        let error = error(actual, expected);
        assert!(
            error < limit,
            "output {number} of type {}: error {error:e}",
            actual.ty()
        );
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

/// Autocast, beside the graph of f32 in f64 and beside the interpreter of the very graph that it made.
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
        let ran = super::run(&graph, Some(dtype), &tensors, &scalars);
        let cast = ran.cast.expect("autocast was asked for");
        let same = interpret(&cast, &tensors, &scalars).unwrap();
        for (number, actual) in ran.results.iter().enumerate() {
            let what = format!("{dtype}, output {number} of type {}", actual.ty());
            assert_eq!(actual.ty(), graph.ty(graph.outputs[number].value), "{what}");
            let (rounded, between) = (error(actual, &exact[number]), error(actual, &same[number]));
            assert!(rounded < limit, "{what}: {rounded:e}");
            assert!(between < limit / 4.0, "{what}: {between:e} from the interpreter");
        }
    }
}
