//! Transform: from the recorded graph to one that schedules well.
//!
//! Passes in order, each from graph to graph and each with a text form (the graph's). Values keep their
//! meaning; the number and order of arguments, scalars and outputs never change.

pub mod attention;
pub mod channels;
pub mod log_softmax;
pub mod pattern;
pub mod simplify;
pub mod slices;
mod view;

use kiln_graph::{Graph, TypeError};

use crate::error::CompileError;
use crate::options::Options;
use crate::policy::Policy;
use crate::stages::Stages;

/// Graphs after each pass, by name, as text.
pub type Dumps = Vec<(String, String)>;

type Pass = (&'static str, fn(&Graph, &Policy) -> Result<Graph, TypeError>);

/// The passes, in the order in which they run.
const PASSES: &[Pass] = &[
    ("simplify", |graph, _| simplify::simplify(graph)),
    ("channels", |graph, _| channels::channels(graph)),
    ("attention", |graph, _| attention::attention(graph)),
    ("slices", |graph, _| slices::slices(graph)),
    // What stands for several values by now is one again, and rewrites leave transposes behind.
    ("simplify again", |graph, _| simplify::simplify(graph)),
    // Last: common subexpressions would undo it.
    ("log_softmax", |graph, policy| {
        log_softmax::log_softmax(graph, policy.cached_elements)
    }),
];

/// Runs all passes, each timed as a stage; keeps the text of the graph after each if the options ask for
/// it.
///
/// # Errors
/// [`CompileError::Pass`] if a pass makes an ill-typed node.
pub fn run(
    graph: &Graph,
    options: &Options,
    policy: &Policy,
    stages: &mut Stages,
) -> Result<(Graph, Dumps), CompileError> {
    let mut dumps = Dumps::new();
    let dump = options.wants_dumps();
    let mut graph = graph.without_dead_code();
    if dump {
        dumps.push(("recorded".into(), graph.to_string()));
    }
    if !options.transform {
        return Ok((graph, dumps));
    }
    for &(name, pass) in PASSES {
        graph = stages
            .time(name, || pass(&graph, policy))
            .map_err(CompileError::pass(name))?;
        if cfg!(debug_assertions) {
            kiln_graph::verify::verify(&graph)?;
        }
        if dump {
            dumps.push((name.into(), graph.to_string()));
        }
    }
    Ok((graph, dumps))
}
