//! Import and executors against burn-flex.
//!
//! Each test is a Burn program. It runs on burn-flex as it is, and on a backend that runs every operation
//! eagerly and logs it ([`record`]). The log is imported and the graph run on every executor. All must agree
//! ([`check`]): eager with burn-flex exactly, executors with eager exactly for integers and within rounding
//! for floats.

mod check;
mod errors;
mod gradients;
mod indexing;
mod modules;
mod movement;
mod numeric;
mod programs;
mod random;
mod record;
mod reductions;

use std::sync::Arc;

use kiln_burn::execute::Executable;
use kiln_burn::execute::aot_eager::AotEager;
use kiln_burn::execute::candle::Candle;
use kiln_burn::execute::host::Interpret;
use kiln_graph::Graph;

/// The executors under test.
fn executors(graph: &Arc<Graph>) -> Vec<(&'static str, Box<dyn Executable>)> {
    vec![
        ("aot_eager", Box::new(AotEager::new(graph.clone()))),
        ("interpret", Box::new(Interpret::new(graph.clone()))),
        (
            "candle",
            Box::new(Candle::new(graph.clone()).expect("candle takes it")),
        ),
    ]
}
