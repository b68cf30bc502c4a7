//! Functions under eager autograd: a joint graph as one graph for each of its passes.

use kiln_graph::Graph;
use kiln_partition::{OutputRole, Planner, Split};

use crate::error::CompileError;
use crate::options::Keep;
use crate::options::Options;
use crate::partition::{self, choices};
use crate::planner::ArenaPlanner;
use crate::stages::Stages;
use crate::target::Target;
use crate::{checks, transform};

/// Compiles a function's joint graph, as recorded, into a graph for its forward pass and one for its
/// backward pass. The two passes are compiled separately and take turns in one arena; a memory budget holds
/// for that arena and the values kept between the passes together. `tangents` and `roles` are those of
/// [`kiln_partition::split()`].
///
/// # Errors
/// Those of [`kiln_partition::split_within`] and of [`crate::compile()`].
pub fn split<T: Target>(
    graph: &Graph,
    tangents: &[u32],
    roles: &[OutputRole],
    options: &Options,
    target: &T,
) -> Result<Split, CompileError> {
    // Transforms run before the cut: after it no pass sees the forward and the backward pass of one
    // attention layer together. They ask which pass a node belongs to. Indices are checked in the halves.
    let mut graph = graph.clone();
    kiln_partition::assign_phases_of_split(&mut graph, tangents, roles)?;
    let graph = transform::run_before_checks(&graph, options, target.policy(), &mut Stages::default())?.graph;
    let choices = choices(options.keep, target.rates(), target.policy());
    Ok(match options.keep {
        Keep::Within(budget) => {
            let planner = FunctionPlanner { options, target };
            kiln_partition::split_within(&graph, tangents, roles, &choices, budget, planner)?
        }
        _ => kiln_partition::split(&graph, tangents, roles, &choices)?,
    })
}

/// Plans graphs that are compiled separately, without a budget of their own: the passes of a function under
/// eager autograd.
struct FunctionPlanner<'a, T> {
    options: &'a Options,
    target: &'a T,
}

impl<T: Target> FunctionPlanner<'_, T> {
    fn arena(&self, graph: &Graph) -> Result<u64, CompileError> {
        let Self { options, target } = *self;
        let planner = ArenaPlanner { options, target };
        let (graph, _) = checks::run(graph).map_err(CompileError::pass("checks"))?;
        let graph = transform::run(&graph, options, target.policy(), &mut Stages::default())?.graph;
        let (graph, _) = partition::run(&graph, Keep::default(), target.rates(), target.policy(), planner)?;
        planner.arena(&graph)
    }
}

impl<T: Target> Planner for FunctionPlanner<'_, T> {
    fn peak(&self, graph: &Graph) -> Result<u64, String> {
        self.arena(graph).map_err(|error| error.to_string())
    }
}
