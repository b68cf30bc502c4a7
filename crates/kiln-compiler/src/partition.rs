//! Partition: what the backward pass keeps of the forward pass and what it computes again.
//!
//! kiln-partition decides. This stage gives it two things that it does not know: how holding a byte
//! compares with moving it on the machine at hand, and, under a memory budget, a planner that knows the
//! size of the arena that a graph really gets ([`crate::planner`]). A budget is therefore exact: the step
//! allocates the bytes that the planner counted.
//!
//! Later stages keep the phases apart. Nothing merges equal nodes any more, and no kernel holds operations of
//! the forward pass together with operations of the backward pass ([`crate::schedule::fuse`]).

use kiln_graph::{Graph, Phase};
use kiln_partition::{Frontier, Machine, Options as Choices, Partition, Planner, Point, Report, Strategy};

use crate::checks;
use crate::error::CompileError;
use crate::options::{Keep, Options};
use crate::planner::ArenaPlanner;
use crate::policy::Policy;
use crate::stages::Stages;
use crate::target::Target;
use crate::transform;

/// Whether a node belongs to a backward pass or an optimizer.
pub fn is_training(graph: &Graph) -> bool {
    graph
        .nodes()
        .any(|(_, data)| data.provenance.phase == Phase::Backward)
}

/// The partitioned graph and what was decided, on a machine of these rates and thresholds; `planner` says what a
/// memory budget must hold. A graph without a backward pass has nothing to decide.
///
/// # Errors
/// [`CompileError::Partition`] if nothing fits the memory budget; those of the planner if a graph cannot be
/// planned.
pub fn run(
    graph: &Graph,
    keep: Keep,
    rates: Machine,
    policy: &Policy,
    planner: impl Planner,
) -> Result<(Graph, Option<Report>), CompileError> {
    let partition = match keep {
        Keep::Within(budget) => Frontier::new(graph, &choices(keep, rates, policy), planner)?.fit(budget)?,
        _ if !is_training(graph) => return Ok((graph.clone(), None)),
        _ => kiln_partition::partition(graph, &choices(keep, rates, policy))?,
    };
    let Partition { graph, report, .. } = partition;
    Ok((graph, Some(report)))
}

/// The plans that some memory budget gets for `graph`, as recorded, from the fastest to the smallest.
///
/// # Errors
/// Those of [`crate::compile()`].
pub fn memory_curve<T: Target>(
    graph: &Graph,
    options: &Options,
    target: &T,
) -> Result<Vec<Point>, CompileError> {
    let (graph, _) = checks::run(graph).map_err(CompileError::pass("checks"))?;
    let graph = transform::run(&graph, options, target.policy(), &mut Stages::default())?.graph;
    let planner = ArenaPlanner { options, target };
    Ok(Frontier::new(
        &graph,
        &choices(options.keep, target.rates(), target.policy()),
        planner,
    )?
    .curve()?)
}

/// What the kernels of a machine of these rates and thresholds can do, for the partitioner.
pub(crate) fn choices(keep: Keep, rates: Machine, policy: &Policy) -> Choices {
    Choices {
        strategy: match keep {
            Keep::Everything => Strategy::KeepEverything,
            Keep::Cheapest | Keep::Within(_) => Strategy::MinimumCut,
        },
        hold: f64::from(policy.hold_percent) / 100.0 * 1e12 / rates.bytes_per_second,
        machine: rates,
        ..Choices::default()
    }
}
