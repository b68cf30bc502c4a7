//! Transform: from the recorded graph to one that schedules well.
//!
//! Passes in order, each from graph to graph and each with a text form (the graph's). Values keep their
//! meaning; the number and order of arguments, scalars and outputs never change.

pub mod attention;
pub mod autocast;
pub mod channels;
pub mod indices;
pub mod log_softmax;
pub mod patches;
pub mod pattern;
pub mod pools;
mod relu;
pub mod simplify;
pub mod slices;
mod view;

use kiln_graph::{DType, Graph, TypeError};

use crate::error::CompileError;
use crate::options::Options;
use crate::policy::Policy;
use crate::stages::Stages;
use autocast::AutocastReport;

/// Graphs after each pass, by name, as text.
pub type Dumps = Vec<(String, String)>;

type Pass = (
    &'static str,
    fn(&Graph, &Policy, Option<DType>) -> Result<Graph, TypeError>,
);

/// The passes, in the order in which they run. Each may ask which type autocast is going to use.
const PASSES: &[Pass] = &[
    ("simplify", |graph, _, _| simplify::simplify(graph)),
    ("channels", channels::channels),
    ("attention", |graph, _, _| attention::attention(graph)),
    ("slices", |graph, _, _| slices::slices(graph)),
    ("pools", |graph, _, _| pools::pools(graph)),
    ("indices", |graph, _, _| indices::indices(graph)),
    ("patches", |graph, _, _| patches::patches(graph)),
    // Several values may be one by now, and rewrites leave transposes behind.
    ("simplify again", |graph, _, _| simplify::simplify(graph)),
    // Last: common subexpressions would undo it.
    ("log_softmax", |graph, policy, _| {
        log_softmax::log_softmax(graph, policy.cached_elements)
    }),
];

/// The result of the passes.
#[derive(Clone, Debug)]
pub struct Transformed {
    /// The graph.
    pub graph: Graph,
    /// The graph after each pass, if the options ask for it.
    pub dumps: Dumps,
    /// What autocast did; none if it was not asked for, or had nothing to do.
    pub autocast: Option<AutocastReport>,
}

/// Runs all passes, each timed as a stage: those of the list, then [`autocast`] if the options ask for it.
/// Autocast comes after the patterns, which match compositions of f32, and after the passes that merge
/// equal nodes, which would merge the casts of different readers.
///
/// # Errors
/// [`CompileError::Pass`] if a pass makes an ill-typed node; [`CompileError::Autocast`] if the options ask
/// for a type that is not one of 16 bits.
pub fn run(
    graph: &Graph,
    options: &Options,
    policy: &Policy,
    stages: &mut Stages,
) -> Result<Transformed, CompileError> {
    let mut dumps = Dumps::new();
    let dump = options.wants_dumps();
    let mut graph = graph.without_dead_code();
    if dump {
        dumps.push(("recorded".into(), graph.to_string()));
    }
    if !options.transform {
        return Ok(Transformed {
            graph,
            dumps,
            autocast: None,
        });
    }
    for &(name, pass) in PASSES {
        graph = stages
            .time(name, || pass(&graph, policy, options.autocast))
            .map_err(CompileError::pass(name))?;
        if cfg!(debug_assertions) {
            kiln_graph::verify::verify(&graph)?;
        }
        if dump {
            dumps.push((name.into(), graph.to_string()));
        }
    }
    let mut report = None;
    if let Some(dtype) = options.autocast {
        if !matches!(dtype, DType::F16 | DType::BF16) {
            return Err(CompileError::Autocast(dtype));
        }
        (graph, report) = stages
            .time("autocast", || autocast::autocast(&graph, dtype, policy))
            .map_err(CompileError::pass("autocast"))?;
        if cfg!(debug_assertions) {
            kiln_graph::verify::verify(&graph)?;
        }
        if dump {
            dumps.push(("autocast".into(), graph.to_string()));
        }
    }
    Ok(Transformed {
        graph,
        dumps,
        autocast: report,
    })
}
