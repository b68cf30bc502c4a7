//! Whole random graphs on candle against the interpreter in f64, within what rounding explains of each.

use std::sync::Arc;

use kiln_candle::CandleExecutable;
use kiln_graph::interpret::interpret_f64;
use kiln_graph::testing::{
    Family, GraphConfig, RandomGraph, difference, graphs, random_arguments, special_arguments,
};
use kiln_graph::{DType, Scalar};
use proptest::prelude::*;

/// Runs the graph on both and compares every output.
fn agree(random: &RandomGraph, seed: u64, special: bool) -> Result<(), TestCaseError> {
    let graph = &random.graph;
    let arguments = if special {
        special_arguments
    } else {
        random_arguments
    };
    let (inputs, scalars) = arguments(graph, seed);
    let expected =
        interpret_f64(graph, &inputs, &scalars).map_err(|error| TestCaseError::fail(error.to_string()))?;
    let dtypes = graph.scalars().iter().map(|&value| graph.dtype(value));
    let bits: Vec<u64> = scalars
        .iter()
        .zip(dtypes)
        .map(|(scalar, dtype)| Scalar::to_bits(*scalar, dtype))
        .collect();
    let got = CandleExecutable::new(Arc::new(graph.clone()))
        .and_then(|executable| executable.run(&inputs, &bits))
        .map_err(|error| TestCaseError::fail(format!("{error}\n{graph}")))?;
    prop_assert_eq!(got.len(), expected.len());
    for (index, (got, expected)) in got.iter().zip(&expected).enumerate() {
        prop_assert_eq!(got.ty(), graph.ty(graph.outputs[index].value));
        if let Some(difference) = difference(got, expected, random.tolerances[index]) {
            return Err(TestCaseError::fail(format!(
                "output {index}: {difference}\n{graph}"
            )));
        }
    }
    Ok(())
}

fn cases(count: u32) -> ProptestConfig {
    // No file of past failures: a failure prints the graph.
    ProptestConfig {
        cases: count,
        failure_persistence: None,
        ..ProptestConfig::default()
    }
}

proptest! {
    #![proptest_config(cases(300))]

    #[test]
    fn graphs_of_every_family(random in graphs(GraphConfig::default()), seed in any::<u64>()) {
        agree(&random, seed, false)?;
    }

    /// NaN and -0 among the arguments.
    #[test]
    fn graphs_with_nan(random in graphs(GraphConfig { steps: 6, ..GraphConfig::default() }), seed in any::<u64>()) {
        agree(&random, seed, true)?;
    }

    #[test]
    fn graphs_of_every_element_type(
        random in graphs(GraphConfig {
            steps: 8,
            floats: vec![DType::F64, DType::F32, DType::F16, DType::BF16],
            ints: DType::ALL.into_iter().filter(|dtype| dtype.is_int()).collect(),
            ..GraphConfig::default()
        }),
        seed in any::<u64>(),
    ) {
        agree(&random, seed, false)?;
    }

    #[test]
    fn larger_tensors(
        random in graphs(GraphConfig {
            steps: 6,
            max_elements: 4000,
            families: vec![Family::Dot, Family::Conv, Family::Pool, Family::Attention, Family::Reduce, Family::Index],
            zero_sized: false,
            ..GraphConfig::default()
        }),
        seed in any::<u64>(),
    ) {
        agree(&random, seed, false)?;
    }
}
