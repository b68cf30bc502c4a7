//! The partitioned graph computes what the joint graph computes, bit for bit, whatever was chosen.

mod support;

use kiln_graph::{Graph, Node, Phase, interpret, verify};
use kiln_partition::{Frontier, Liveness, Options, Strategy, assign_phases, partition};
use support::{Sizes, Tape, accumulating_step, adversarial_step, arguments, decoder_step};

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
    assign_phases(&mut step.graph);
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

/// Every strategy, both orders, and everything on the memory curve.
fn every_plan(mut step: Tape, assigned: bool) {
    if assigned {
        assign_phases(&mut step.graph);
    }
    for strategy in [Strategy::MinimumCut, Strategy::KeepEverything] {
        for early_updates in [false, true] {
            let options = Options {
                strategy,
                early_updates,
                ..Options::default()
            };
            same(
                &step.graph,
                &partition(&step.graph, &options).expect("partitions").graph,
            );
        }
    }
    let mut frontier = Frontier::new(&step.graph, &Options::default(), Liveness).expect("valid");
    for point in frontier.curve().expect("planned") {
        same(&step.graph, &frontier.fit(point.peak).expect("it fits").graph);
    }
}

#[test]
fn two_models_and_micro_batches_are_unchanged() {
    for assigned in [false, true] {
        every_plan(adversarial_step(), assigned);
        every_plan(accumulating_step(), assigned);
    }
}

/// Whatever phases a graph's nodes claim to have, partitioning keeps its meaning.
#[test]
fn wrong_phases_make_no_wrong_program() {
    let mut step = accumulating_step();
    for round in 0..40u32 {
        for index in 0..step.graph.num_nodes() as u32 {
            let draw = (index.wrapping_mul(0x9E37_79B9) ^ round.wrapping_mul(0x85EB_CA6B))
                .wrapping_mul(0xC2B2_AE35)
                >> 29;
            let phases = [Phase::Unknown, Phase::Forward, Phase::Backward, Phase::Optimizer];
            step.graph.provenance_mut(Node::from_u32(index)).phase = phases[draw as usize % 4];
        }
        for early_updates in [false, true] {
            let options = Options {
                early_updates,
                ..Options::default()
            };
            same(
                &step.graph,
                &partition(&step.graph, &options).expect("partitions").graph,
            );
        }
    }
}

/// Nodes that a transform made carry no phase; they take their neighbours', and the choice is the same.
#[test]
fn nodes_without_a_phase_take_their_neighbours() {
    let mut step = decoder_step(Sizes::SMALL);
    assign_phases(&mut step.graph);
    let expected = partition(&step.graph, &Options::default()).expect("partitions");
    for index in (0..step.graph.num_nodes() as u32).step_by(7) {
        let node = Node::from_u32(index);
        // The first node of a phase has nobody before it who could tell; a forward node that only the
        // backward pass reads neither.
        let data = step.graph.node(node);
        let users = step.graph.users();
        let alike = data
            .outputs
            .iter()
            .flat_map(|&value| users.of(value))
            .any(|&user| step.graph.node(user).provenance.phase == data.provenance.phase);
        if alike {
            step.graph.provenance_mut(node).phase = Phase::Unknown;
        }
    }
    let found = partition(&step.graph, &Options::default()).expect("partitions");
    assert_eq!(found.report.saved_bytes, expected.report.saved_bytes);
    same(&step.graph, &found.graph);
}

/// Sums over rows are taken chunk by chunk: equal to rounding, and the logits are never whole.
#[test]
fn a_wide_vocabulary_in_chunks() {
    let sizes = Sizes {
        batch: 4,
        length: 64,
        width: 64,
        vocabulary: 600,
        layers: 1,
        ..Sizes::SMALL
    };
    let mut step = decoder_step(sizes);
    assign_phases(&mut step.graph);
    let logits = 4 * (sizes.batch * sizes.length * sizes.vocabulary) as u64;
    let mut frontier = Frontier::new(&step.graph, &Options::default(), Liveness).expect("valid");
    let smallest = frontier.smallest_budget().expect("planned");
    let whole = frontier
        .fit(u64::MAX)
        .expect("anything fits")
        .report
        .peak
        .expect("planned");
    assert!(smallest * 2 < whole, "{smallest} of {whole}");
    let (tensors, scalars) = arguments(&step.graph, 3);
    let expected = interpret(&step.graph, &tensors, &scalars).expect("the joint graph runs");
    let mut chunked = 0;
    for point in frontier.curve().expect("planned") {
        let partitioned = frontier.fit(point.peak).expect("it fits");
        assert_eq!(verify(&partitioned.graph), Ok(()));
        let Some(chunks) = &partitioned.report.chunks else {
            same(&step.graph, &partitioned.graph);
            continue;
        };
        chunked += 1;
        assert_eq!(chunks.count as u64 * chunks.bytes, logits);
        assert!(
            partitioned.report.to_string().contains("in 4 chunks of rows"),
            "{}",
            partitioned.report
        );
        let found = interpret(&partitioned.graph, &tensors, &scalars).expect("it runs");
        for (expected, found) in expected.iter().zip(&found) {
            for (expected, found) in expected.to_f64s().into_iter().zip(found.to_f64s()) {
                assert!(
                    (expected - found).abs() <= 1e-5 * expected.abs().max(1e-2),
                    "{expected} {found}"
                );
            }
        }
    }
    assert!(chunked > 0);
}
