//! Under a memory budget: it fits, or the error says what would; more memory is never slower.

mod support;

use kiln_graph::op::{BinaryOp, UnaryOp};
use kiln_graph::{Graph, interpret, verify};
use kiln_partition::{
    Frontier, Liveness, Options, PartitionError, Planner, assign_phases, partition, partition_within,
};
use proptest::prelude::*;
use support::{Sizes, Tape, arguments, decoder_step, f32s};

/// A residual perceptron with layers of the given kinds, its gradients, and Adam.
fn perceptron_step(width: usize, layers: &[u8], adam: bool) -> Graph {
    let mut tape = Tape::new("perceptron");
    let mut x = tape.input(f32s(&[4, width]));
    for layer in layers {
        let y = tape.linear(x, width, width);
        let y = match layer % 4 {
            0 => tape.unary(UnaryOp::Tanh, y),
            1 => tape.silu(y),
            2 => tape.layer_norm(y),
            _ => tape.dropout(y, 0.8),
        };
        x = if layer % 3 == 0 {
            y
        } else {
            tape.binary(BinaryOp::Add, x, y)
        };
    }
    let square = tape.binary(BinaryOp::Mul, x, x);
    let loss = tape.mean(square);
    let weights = tape.parameters.clone();
    let gradients = tape.backward(loss, &weights);
    if adam {
        let rate = tape.graph.scalar(kiln_graph::DType::F32);
        for (weight, gradient) in weights.into_iter().zip(gradients) {
            tape.adam(weight, gradient, rate);
        }
    } else {
        gradients
            .into_iter()
            .for_each(|gradient| tape.graph.output(gradient, None));
    }
    tape.graph.output(loss, None);
    assign_phases(&mut tape.graph);
    tape.graph
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn any_budget_fits_or_names_the_smallest(
        width in prop::sample::select(vec![4usize, 8, 32]),
        layers in prop::collection::vec(any::<u8>(), 1..7),
        adam: bool,
        shares in prop::collection::vec(0.0f64..1.2, 6),
    ) {
        let graph = perceptron_step(width, &layers, adam);
        let options = Options::default();
        let mut frontier = Frontier::new(&graph, &options, Liveness).expect("valid");
        let unlimited = frontier.fit(u64::MAX).expect("anything fits");
        let peak = Liveness.peak(&unlimited.graph).expect("planned");
        prop_assert_eq!(unlimited.report.peak, Some(peak));
        let smallest = frontier.smallest_budget().expect("planned");

        let mut budgets: Vec<u64> = shares.iter().map(|share| (peak as f64 * share) as u64).collect();
        budgets.extend([0, smallest - 1, smallest, peak]);
        budgets.sort();
        let (tensors, scalars) = arguments(&graph, 5);
        let expected = interpret(&graph, &tensors, &scalars).expect("runs");
        let curve = frontier.curve().expect("planned");
        let mut last_cost = u64::MAX;
        for budget in budgets {
            match frontier.fit(budget) {
                Ok(fitted) => {
                    prop_assert!(budget >= smallest);
                    prop_assert_eq!(verify(&fitted.graph), Ok(()));
                    let planned = Liveness.peak(&fitted.graph).expect("planned");
                    prop_assert!(planned <= budget);
                    prop_assert_eq!(fitted.report.peak, Some(planned));
                    let found = interpret(&fitted.graph, &tensors, &scalars).expect("runs");
                    prop_assert_eq!(&found, &expected);
                    // The point of the curve that this budget buys: never slower than what a smaller one
                    // bought.
                    let point = curve.iter().find(|point| point.peak <= budget).expect("on the curve");
                    prop_assert_eq!(point.peak, planned);
                    prop_assert!(point.cost <= last_cost);
                    last_cost = point.cost;
                }
                Err(PartitionError::BudgetTooSmall { smallest: named, .. }) => {
                    prop_assert!(budget < smallest);
                    prop_assert_eq!(named, smallest);
                }
                Err(other) => prop_assert!(false, "{}", other),
            }
        }
        for pair in curve.windows(2) {
            prop_assert!(pair[0].peak > pair[1].peak && pair[0].cost <= pair[1].cost);
        }
    }
}

/// Where the values to choose from can be counted on the fingers, the minimum is the minimum over all
/// choices: here known by hand.
#[test]
fn the_smallest_budget_of_a_chain_is_exact() {
    // h0 .. h3 of 64 KiB each. Forward needs two at a time. The backward pass reads h2, then h1, then h0,
    // each beside a tangent or two; whatever is kept or brought back, three buffers are alive when h2 or h1
    // meets its tangents.
    let text = include_str!("cases/budget.kg");
    let graph = Graph::parse(text).expect("well formed");
    let mut frontier = Frontier::new(&graph, &Options::default(), Liveness).expect("valid");
    let smallest = frontier.smallest_budget().expect("planned");
    assert!(smallest >= 3 << 16, "{smallest}");
    let unlimited = frontier.fit(u64::MAX).expect("anything fits");
    assert!(smallest < unlimited.report.peak.expect("planned"));
    let error = partition_within(&graph, &Options::default(), smallest - 1, Liveness).unwrap_err();
    assert!(error.to_string().contains(&smallest.to_string()), "{error}");
}

#[test]
fn a_deep_model_needs_half_the_memory() {
    let sizes = Sizes {
        layers: 8,
        length: 16,
        width: 32,
        hidden: 96,
        vocabulary: 16,
        ..Sizes::SMALL
    };
    let mut step = decoder_step(sizes);
    assign_phases(&mut step.graph);
    let options = Options::default();
    let unlimited = Liveness
        .peak(&partition(&step.graph, &options).expect("valid").graph)
        .expect("planned");
    let mut frontier = Frontier::new(&step.graph, &options, Liveness).expect("valid");
    let smallest = frontier.smallest_budget().expect("planned");
    assert!(2 * smallest <= unlimited, "{smallest} of {unlimited}");
    let (tensors, scalars) = arguments(&step.graph, 11);
    let fitted = frontier.fit(smallest).expect("it fits");
    let expected = interpret(&step.graph, &tensors, &scalars).expect("runs");
    assert_eq!(
        interpret(&fitted.graph, &tensors, &scalars).expect("runs"),
        expected
    );
}

#[test]
fn a_planner_that_fails_is_heard() {
    let graph = Graph::parse(include_str!("cases/budget.kg")).expect("well formed");
    let failing = |_: &Graph| -> Result<u64, String> { Err("out of pencils".to_owned()) };
    let error = partition_within(&graph, &Options::default(), 1, failing).unwrap_err();
    assert!(error.to_string().contains("out of pencils"), "{error}");
}

/// A second optimizer, or a second forward pass behind an update, reads the parameter's new value in another
/// shape. Neither the new value nor its views take memory of the arena.
#[test]
fn a_view_of_an_updated_parameter_takes_no_memory() {
    let text = "graph @updated {
  %w = parameter 0 : f32[64,32]
  %x = parameter 1 : f32[64,32]
  %new = sub %w, %x : f32[64,32]         ; opt
  %flat = reshape %new : f32[2048]       ; opt
  %square = mul %flat, %flat : f32[2048] ; opt
  %again = add %square, %square : f32[2048] ; opt
  %sum = reduce sum %again {axes=[0]} : f32[] ; opt
  return %new (alias 0), %sum
}";
    let graph = Graph::parse(text).expect("well formed");
    let profile = Liveness.profile(&graph);
    // The square, whose buffer the next takes over, and the sum.
    assert_eq!(profile.iter().max(), Some(&(4 * 2048 + 4)), "{profile:?}");
}
