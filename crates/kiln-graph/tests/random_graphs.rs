//! Properties of random graphs: they are sound, survive the text form, and mean the same after rewriting and
//! in either precision.

use kiln_graph::testing::{
    Family, GraphConfig, difference, graphs, random_arguments, random_graph, special_arguments,
};
use kiln_graph::{Graph, Op, Rewriter, interpret, interpret_f64, verify};
use proptest::prelude::*;

fn every_family() -> GraphConfig {
    let mut config = GraphConfig {
        steps: 30,
        ..GraphConfig::default()
    };
    config.families.extend([Family::Extern, Family::Collective]);
    config
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_graph_survives_its_text(random in graphs(every_family())) {
        prop_assert_eq!(verify(&random.graph), Ok(()));
        let text = random.graph.to_string();
        let parsed = Graph::parse(&text).map_err(|error| TestCaseError::fail(format!("{error}\n{text}")))?;
        prop_assert_eq!(&parsed, &random.graph);
        prop_assert_eq!(parsed.fingerprint(), random.graph.fingerprint());
    }

    /// Whatever is done to a text, the parser answers, and what it accepts is sound.
    #[test]
    fn the_parser_survives_damaged_text(
        random in graphs(every_family()),
        damage in prop::collection::vec((any::<prop::sample::Index>(), 0..6u8, any::<char>(), any::<u64>()), 1..4),
    ) {
        let mut text: Vec<char> = random.graph.to_string().chars().collect();
        for (at, kind, c, number) in damage {
            // Earlier damage may have left nothing.
            let at = at.index(text.len().max(1));
            let piece: Vec<char> = match kind {
                0 => { text.drain(at..(at + 1).min(text.len())); continue }
                1 => { text.truncate(at.max(1)); continue }
                2 => vec![c],
                3 => number.to_string().chars().collect(),
                4 => vec![['"', '[', '{', '%', ';', ',', '\n', '-'][number as usize % 8]],
                // A digit becomes another: extents, attributes and operands that no longer fit.
                _ => match text.iter().skip(at).position(|c| c.is_ascii_digit()) {
                    Some(digit) => { text[at + digit] = char::from(b'0' + (number % 10) as u8); continue }
                    None => vec![],
                },
            };
            text.splice(at..at, piece);
        }
        let text: String = text.into_iter().collect();
        if let Ok(graph) = Graph::parse(&text) {
            if let Err(error) = verify(&graph) {
                // Only outputs and aliases are the verifier's business alone.
                prop_assert!(error.place.starts_with("output"), "{}", error);
            }
            let again = Graph::parse(&graph.to_string());
            prop_assert_eq!(again, Ok(graph));
        }
    }

    #[test]
    fn rounding_stays_within_the_tolerances(
        random in graphs(GraphConfig { steps: 25, ..GraphConfig::default() }),
        seed: u64,
        special: bool,
    ) {
        let arguments = if special { special_arguments } else { random_arguments };
        let (tensors, scalars) = arguments(&random.graph, seed);
        let exact = interpret_f64(&random.graph, &tensors, &scalars);
        let exact = exact.map_err(|error| TestCaseError::fail(format!("{error}\n{}", random.graph)))?;
        let rounded = interpret(&random.graph, &tensors, &scalars).expect("the same graph ran before");
        for (position, (reference, actual)) in exact.iter().zip(&rounded).enumerate() {
            let found = difference(actual, reference, random.tolerances[position]);
            prop_assert_eq!(found, None, "output {} of\n{}", position, random.graph);
        }
    }

    #[test]
    fn copying_and_dead_code_keep_the_meaning(random in graphs(GraphConfig::default()), keep in any::<prop::sample::Index>()) {
        let graph = &random.graph;
        let mut copy = Rewriter::new(graph);
        for (id, _) in graph.nodes() {
            copy.copy(id).expect("a copy is well typed");
        }
        prop_assert_eq!(&copy.finish(), graph);

        let mut one = graph.clone();
        let kept = graph.outputs[keep.index(graph.outputs.len())];
        one.outputs = vec![kept];
        let small = one.without_dead_code();
        prop_assert_eq!(verify(&small), Ok(()));
        prop_assert!(small.num_nodes() <= graph.num_nodes());
        let (tensors, scalars) = random_arguments(graph, 5);
        prop_assert_eq!(interpret(&small, &tensors, &scalars), interpret(&one, &tensors, &scalars));
    }
}

/// Half floats keep to the same rules, with wider tolerances.
#[test]
fn half_types_stay_within_the_tolerances() {
    use kiln_graph::DType;
    let config = GraphConfig {
        floats: vec![DType::F16, DType::BF16, DType::F32],
        ..GraphConfig::default()
    };
    for seed in 0..100 {
        let random = random_graph(seed, &config);
        let (tensors, scalars) = random_arguments(&random.graph, seed);
        let exact = interpret_f64(&random.graph, &tensors, &scalars).expect("runs");
        let rounded = interpret(&random.graph, &tensors, &scalars).expect("runs");
        for (position, (reference, actual)) in exact.iter().zip(&rounded).enumerate() {
            let found = difference(actual, reference, random.tolerances[position]);
            assert_eq!(found, None, "seed {seed}, output {position} of\n{}", random.graph);
        }
    }
}

/// A generator that stopped making an operation would make every test above weaker without a sign.
#[test]
fn every_primitive_occurs() {
    let mut seen = std::collections::BTreeSet::new();
    for seed in 0..400 {
        let random = random_graph(seed, &every_family());
        seen.extend(random.graph.nodes().map(|(_, node)| match &node.op {
            Op::Reduce { op, .. } => format!("reduce {op}"),
            Op::Scatter { mode, .. } => format!("scatter {mode}"),
            op => op.name().to_owned(),
        }));
    }
    let unary = kiln_graph::op::UnaryOp::ALL.iter().map(|op| op.name());
    let binary = kiln_graph::op::BinaryOp::ALL.iter().map(|op| op.name());
    let others = "parameter scalar constant iota random compare select cast arg_reduce cumulative reshape transpose broadcast \
        slice pad concat flip update_slice gather index_select index_put dot_general conv conv_input_grad \
        conv_weight_grad max_pool max_pool_with_indices max_pool_grad avg_pool avg_pool_grad attention attention_grad \
        sort top_k extern";
    let mut expected: Vec<String> = unary
        .chain(binary)
        .chain(others.split_whitespace())
        .map(str::to_owned)
        .collect();
    expected.extend(
        kiln_graph::op::ReduceOp::ALL
            .iter()
            .map(|op| format!("reduce {op}")),
    );
    expected.extend(
        kiln_graph::op::ScatterMode::ALL
            .iter()
            .map(|mode| format!("scatter {mode}")),
    );
    let missing: Vec<&String> = expected.iter().filter(|name| !seen.contains(*name)).collect();
    assert!(missing.is_empty(), "never made: {missing:?}");
}
