//! Transform: from the recorded graph to one that schedules well.
//!
//! Passes in order, each from graph to graph and each with a text form (the graph's). Values keep their meaning; the number and order of
//! arguments, scalars and outputs never change.

pub mod attention;
mod attention_build;
pub mod channels;
pub mod log_softmax;
pub mod pattern;
pub mod simplify;
pub mod slices;
mod view;

use kiln_graph::{Graph, TypeError};

use crate::stages::Stages;
use crate::{CompileError, Options};

/// Graphs after each pass, by name, as text.
pub type Dumps = Vec<(String, String)>;

type Pass = (&'static str, fn(&Graph) -> Result<Graph, TypeError>);

/// The passes, in the order in which they run.
const PASSES: &[Pass] = &[
    ("simplify", simplify::simplify),
    ("channels", channels::channels),
    ("attention", attention::attention),
    ("slices", slices::slices),
    // What stands for several values by now is one again, and rewrites leave transposes behind.
    ("simplify again", simplify::simplify),
    // Last: common subexpressions would undo it.
    ("log_softmax", log_softmax::log_softmax),
];

/// Runs all passes, each timed as a stage; with `dump`, keeps the text of the graph after each.
///
/// # Errors
/// [`CompileError::Pass`] if a pass makes an ill-typed node.
pub fn run(
    graph: &Graph,
    options: &Options,
    dump: bool,
    stages: &mut Stages,
) -> Result<(Graph, Dumps), CompileError> {
    let mut dumps = Dumps::new();
    let mut graph = graph.without_dead_code();
    if dump {
        dumps.push(("recorded".into(), graph.to_string()));
    }
    if !options.transform {
        return Ok((graph, dumps));
    }
    for &(name, pass) in PASSES {
        graph = stages
            .time(name, || pass(&graph))
            .map_err(|source| CompileError::Pass { pass: name, source })?;
        if cfg!(debug_assertions) {
            kiln_graph::verify::verify(&graph)?;
        }
        if dump {
            dumps.push((name.into(), graph.to_string()));
        }
    }
    Ok((graph, dumps))
}
