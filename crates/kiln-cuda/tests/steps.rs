//! Whole training steps in a GPU's kernels, on the host.

#[path = "../../kiln-compiler/tests/targets/steps.rs"]
mod target;

use kiln_cuda::testing::host::{Differential, HostStep};
use kiln_graph::{DType, Graph, HostTensor, Scalar};
use kiln_partition::testing::Sizes;
use target::{Ran, adam, check};

/// Any order of threads must give the same bits.
fn run(graph: &Graph, autocast: Option<DType>, tensors: &[HostTensor], scalars: &[Scalar]) -> Ran {
    let mut comparison = Differential::new(graph).arguments(tensors.to_vec(), scalars.to_vec());
    comparison.options.autocast = autocast;
    let step = comparison.compile().unwrap();
    assert_eq!(step.autocast.is_some(), autocast.is_some());
    let host = HostStep::of(&step).unwrap();
    let results = comparison.run(&host).unwrap();
    let backward = comparison.run(&host.backward(true)).unwrap();
    assert!(results == backward, "the bits depend on the order of threads");
    Ran {
        results,
        taken: step.plan.aliases.iter().flatten().count(),
        cast: autocast.map(|_| step.graph),
    }
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
