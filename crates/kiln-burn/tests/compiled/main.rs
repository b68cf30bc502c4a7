//! The programs of the `import` tests on compiled steps. A binary of its own: each program is one more run of
//! the C compiler.

#[path = "../import/check.rs"]
mod check;
#[path = "../import/gradients.rs"]
mod gradients;
#[path = "../import/indexing.rs"]
mod indexing;
#[path = "../import/modules.rs"]
mod modules;
#[path = "../import/movement.rs"]
mod movement;
#[path = "../import/numeric.rs"]
mod numeric;
#[path = "../import/random.rs"]
mod random;
#[path = "../import/record.rs"]
mod record;
#[path = "../import/reductions.rs"]
mod reductions;

use std::sync::Arc;

use kiln_burn::CompileOptions;
use kiln_burn::execute::cpu::Cpu;
use kiln_burn::execute::{Executable, Setting};
use kiln_graph::Graph;

/// The executor under test.
fn executors(graph: &Arc<Graph>) -> Vec<(&'static str, Box<dyn Executable>)> {
    let compiled = Cpu::new(graph.clone(), &CompileOptions::default(), Setting::default());
    vec![(
        "cpu",
        Box::new(
            compiled
                .unwrap_or_else(|error| panic!("{error}\n{graph}"))
                .expect("nothing has to be known"),
        ),
    )]
}
