//! Whole training steps: forward, backward and optimizer of small models, against the interpreter in f64.

use kiln_cuda::testing::host::{Differential, HostStep};
use kiln_graph::alias::assign_aliases;
use kiln_graph::{DType, Graph, HostTensor, interpret, interpret_f64};
use kiln_partition::assign_phases;
use kiln_partition::testing::{Sizes, arguments, decoder_step};

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
    let comparison = Differential::new(graph).arguments(tensors, scalars);
    let step = comparison.compile().unwrap();
    assert!(
        step.plan.aliases.iter().flatten().count() > 0,
        "no output takes over an argument"
    );
    let host = HostStep::of(&step).unwrap();
    let actual = comparison.run(&host).unwrap();
    for (number, (actual, expected)) in actual.iter().zip(&expected).enumerate() {
        let error = error(actual, expected);
        assert!(
            error < limit,
            "output {number} of type {}: error {error:e}",
            actual.ty()
        );
    }
    let backward = comparison.run(&host.backward(true)).unwrap();
    assert!(actual == backward, "the bits depend on the order of threads");
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

/// The same step with all floats of another type; what lies between is rounded to it as well.
#[test]
fn decoder_steps_of_every_float() {
    let sizes = Sizes {
        layers: 1,
        batch: 2,
        length: 9,
        width: 32,
        heads: 2,
        hidden: 48,
        vocabulary: 40,
        keep: 0.8,
    };
    let text = adam(sizes).to_string();
    for (dtype, limit) in [(DType::F64, 1e-13), (DType::F16, 1e-3), (DType::BF16, 8e-3)] {
        let graph = Graph::parse(&text.replace("f32", dtype.name())).unwrap();
        check(&graph, limit);
    }
}

/// Autocast, beside the graph of f32 in f64 and beside the interpreter of the very graph that it made.
#[test]
fn a_decoder_step_in_16_bits() {
    let sizes = Sizes {
        layers: 1,
        batch: 2,
        length: 16,
        width: 32,
        heads: 2,
        hidden: 48,
        vocabulary: 40,
        keep: 0.8,
    };
    let graph = adam(sizes);
    let (tensors, scalars) = arguments(&graph, 3);
    let exact = interpret_f64(&graph, &tensors, &scalars).unwrap();
    for (dtype, limit) in [(DType::BF16, 3e-2), (DType::F16, 4e-3)] {
        let mut comparison = Differential::new(&graph).arguments(tensors.clone(), scalars.clone());
        comparison.options.autocast = Some(dtype);
        let step = comparison.compile().unwrap();
        assert!(step.autocast.is_some());
        let same = interpret(&step.graph, &tensors, &scalars).unwrap();
        let actual = comparison.run(&HostStep::of(&step).unwrap()).unwrap();
        for (number, actual) in actual.iter().enumerate() {
            let what = format!("{dtype}, output {number} of type {}", actual.ty());
            let (rounded, between) = (error(actual, &exact[number]), error(actual, &same[number]));
            assert!(rounded < limit, "{what}: {rounded:e}");
            assert!(between < limit / 4.0, "{what}: {between:e} from the interpreter");
        }
    }
}
