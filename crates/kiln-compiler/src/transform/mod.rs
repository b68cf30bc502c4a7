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
pub mod updates;
mod view;

use kiln_graph::{DType, Graph, TypeError};

use crate::error::CompileError;
use crate::options::Options;
use crate::policy::Policy;
use crate::stages::Stages;
use autocast::AutocastReport;

/// Graphs after each pass, by name, as text.
pub type Dumps = Vec<(String, String)>;

/// What passes may ask for.
struct Context<'a> {
    policy: &'a Policy,
    /// The type that autocast is going to use.
    autocast: Option<DType>,
    /// Whether indices have their checks.
    has_checks: bool,
}

type Pass = (&'static str, fn(&Graph, &Context<'_>) -> Result<Graph, TypeError>);

/// The passes, in the order in which they run.
const PASSES: &[Pass] = &[
    ("simplify", simplified),
    ("channels", |graph, context| {
        channels::channels(graph, context.policy, context.autocast)
    }),
    ("attention", |graph, _| attention::attention(graph)),
    ("updates", |graph, _| updates::updates(graph)),
    ("slices", |graph, _| slices::slices(graph)),
    ("pools", |graph, _| pools::pools(graph)),
    ("indices", |graph, _| indices::indices(graph)),
    ("patches", |graph, _| patches::patches(graph)),
    // Several values may be one by now, and rewrites leave transposes behind.
    ("simplify again", simplified),
    // Last: common subexpressions would undo it.
    ("log_softmax", |graph, context| {
        log_softmax::log_softmax(graph, context.policy.cached_elements)
    }),
];

fn simplified(graph: &Graph, context: &Context<'_>) -> Result<Graph, TypeError> {
    match context.has_checks {
        true => simplify::simplify(graph),
        false => simplify::simplify_before_checks(graph),
    }
}

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
    run_in(graph, options, policy, stages, true)
}

/// [`run`] for a graph whose parts get their index checks later: no pass takes an index away.
///
/// # Errors
/// Those of [`run`].
pub fn run_before_checks(
    graph: &Graph,
    options: &Options,
    policy: &Policy,
    stages: &mut Stages,
) -> Result<Transformed, CompileError> {
    run_in(graph, options, policy, stages, false)
}

fn run_in(
    graph: &Graph,
    options: &Options,
    policy: &Policy,
    stages: &mut Stages,
    has_checks: bool,
) -> Result<Transformed, CompileError> {
    let context = Context {
        policy,
        autocast: options.autocast,
        has_checks,
    };
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
            .time(name, || pass(&graph, &context))
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
