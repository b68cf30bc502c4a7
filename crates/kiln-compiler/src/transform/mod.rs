//! Transform: from the recorded graph to one that schedules well. Passes in order, each from graph to graph.

use kiln_graph::Graph;

use crate::{CompileError, Options};

/// Graphs after each pass, by name, as text.
pub type Dumps = Vec<(String, String)>;

/// Runs all passes.
///
/// # Errors
/// [`CompileError::Pass`] if a pass makes an ill-typed node.
pub fn run(graph: &Graph, options: &Options) -> Result<(Graph, Dumps), CompileError> {
    let mut dumps = Dumps::new();
    let graph = graph.without_dead_code();
    if options.dump {
        dumps.push(("recorded".into(), graph.to_string()));
    }
    Ok((graph, dumps))
}
