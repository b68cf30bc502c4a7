//! The partitioned graph computes what the joint graph computes, bit for bit, whatever was chosen.

mod support;

use kiln_graph::{Graph, interpret, verify};
use kiln_partition::{Frontier, Liveness, Options, Strategy, assign_phases, partition};
use support::{Sizes, arguments, decoder_step};

fn same(a: &Graph, b: &Graph) {
    assert_eq!(verify(b), Ok(()));
    assert_eq!(a.outputs.len(), b.outputs.len());
    let (tensors, scalars) = arguments(a, 3);
    let expected = interpret(a, &tensors, &scalars).expect("the joint graph runs");
    let found = interpret(b, &tensors, &scalars).expect("the partitioned graph runs");
    assert!(
        expected.iter().flat_map(|t| t.to_f64s()).all(f64::is_finite),
        "the test's step is finite"
    );
    assert_eq!(expected, found, "{}", b);
    for (old, new) in a.outputs.iter().zip(&b.outputs) {
        assert_eq!(old.alias, new.alias);
    }
}

#[test]
fn a_decoder_with_dropout_is_unchanged() {
    let mut step = decoder_step(Sizes::SMALL);
    assign_phases(&mut step.graph, &step.hints).expect("hints fit");
    for strategy in [Strategy::MinimumCut, Strategy::KeepEverything] {
        for early_updates in [false, true] {
            let options = Options {
                strategy,
                early_updates,
                ..Options::default()
            };
            let partitioned = partition(&step.graph, &options).expect("partitions");
            same(&step.graph, &partitioned.graph);
        }
    }
    let partitioned = partition(&step.graph, &Options::default()).expect("partitions");
    assert!(partitioned.report.saved_bytes * 10 <= partitioned.report.everything_bytes * 6);
    assert!(
        partitioned.report.recomputed.iter().any(|op| op.op == "random"),
        "dropout masks are recomputed"
    );
    let mut frontier = Frontier::new(&step.graph, &Options::default(), Liveness).expect("valid");
    for point in frontier.curve().expect("planned") {
        let partitioned = frontier.fit(point.peak).expect("it fits");
        same(&step.graph, &partitioned.graph);
    }
}
