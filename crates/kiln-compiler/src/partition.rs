//! Partition: what the backward pass keeps of the forward pass and what it computes again.
//!
//! kiln-partition decides; this stage gives it what it does not know: which kernels of this compiler take fused operands, and, under a
//! memory budget, the size of the arena that a graph really gets ([`crate::plan`] for the schedule of [`crate::schedule`] with the working memory of
//! [`crate::emit`]). A budget is thereby exact: what was promised is what is allocated.
//!
//! Later stages keep the phases apart. Nothing merges equal nodes any more, and no kernel holds operations of the forward pass together with
//! operations of the backward pass ([`crate::schedule::fuse`]).

use std::fmt;
use std::sync::Arc;

use kiln_graph::{Graph, Phase};
use kiln_partition::{
    Frontier, Options as Choices, Origin, OutputRole, Partition, Planner, Point, Report, Split, Strategy,
};
use serde::{Deserialize, Serialize};

use crate::checks::{self, Check};
use crate::stages::Stages;
use crate::{CompileError, Options, planned, transform};

/// What the backward pass keeps of the forward pass.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum Keep {
    /// Everything it reads, as an eager autograd engine does.
    Everything,
    /// What is cheaper to keep than to compute again.
    #[default]
    Cheapest,
    /// What lets the arena be no larger than so many bytes, in the least time.
    Within(u64),
}

impl fmt::Display for Keep {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Keep::Everything => f.write_str("everything"),
            Keep::Cheapest => f.write_str("cheapest"),
            Keep::Within(bytes) => write!(f, "within {bytes} bytes"),
        }
    }
}

/// What was decided: stored in the cache with the step.
#[derive(Clone, Debug, Serialize, Deserialize, PartialEq, Eq)]
pub struct Decision {
    /// Bytes kept from the forward to the backward pass, without outputs of the step.
    pub saved_bytes: u64,
    /// Bytes that keeping everything the backward pass reads would keep.
    pub everything_bytes: u64,
    /// The arena without a memory budget, if there is one.
    pub peak_without_budget: Option<u64>,
    /// Time of what is computed again, by the cost model, in picoseconds.
    pub recompute_picoseconds: u64,
    /// What runs in chunks of rows to fit the budget, in words.
    pub chunks: Option<String>,
    /// What is kept, largest first.
    pub saved: Vec<SavedReport>,
    /// What is computed again, the most bytes first.
    pub recomputed: Vec<RecomputedReport>,
}

/// A value that is kept from the forward to the backward pass.
#[derive(Clone, Debug, Serialize, Deserialize, PartialEq, Eq)]
pub struct SavedReport {
    /// Its name in the partitioned graph.
    pub name: String,
    /// Element type and shape.
    pub ty: String,
    /// Size in bytes.
    pub bytes: u64,
    /// Whether it leaves the step as an output as well.
    pub is_output: bool,
    /// What makes it.
    pub origin: OriginReport,
    /// What reads it in the backward pass.
    pub users: Vec<OriginReport>,
}

/// What a node is and where it comes from.
#[derive(Clone, Debug, Serialize, Deserialize, PartialEq, Eq)]
pub struct OriginReport {
    /// Mnemonic of the primitive.
    pub op: String,
    /// The recorded operation, if known.
    pub operation: Option<String>,
    /// The forward operation whose gradient it belongs to, by Burn's name, if it is one; the line is that operation's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gradient_of: Option<String>,
    /// `file:line` of the user's call, if known.
    pub location: Option<String>,
    /// The user's module, if known.
    pub module: Option<String>,
}

impl From<&Origin> for OriginReport {
    fn from(origin: &Origin) -> Self {
        let text = |text: &Option<Arc<str>>| text.as_deref().map(str::to_owned);
        Self {
            op: origin.op.clone(),
            operation: text(&origin.operation),
            gradient_of: text(&origin.gradient_of),
            location: text(&origin.location),
            module: text(&origin.module),
        }
    }
}

impl fmt::Display for OriginReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let shared = |text: &Option<String>| text.as_deref().map(Arc::from);
        let origin = Origin {
            op: self.op.clone(),
            operation: shared(&self.operation),
            gradient_of: shared(&self.gradient_of),
            location: shared(&self.location),
            module: shared(&self.module),
        };
        origin.fmt(f)
    }
}

/// Operations of one kind that run again in the backward pass.
#[derive(Clone, Debug, Serialize, Deserialize, PartialEq, Eq)]
pub struct RecomputedReport {
    /// Mnemonic of the primitive.
    pub op: String,
    /// How many.
    pub count: usize,
    /// Bytes of their results, which are not kept.
    pub bytes: u64,
}

impl From<&Report> for Decision {
    fn from(report: &Report) -> Self {
        let saved = report.saved.iter().map(|saved| SavedReport {
            name: saved.value.to_string(),
            ty: saved.ty.to_string(),
            bytes: saved.bytes,
            is_output: saved.is_output,
            origin: OriginReport::from(&saved.origin),
            users: saved.users.iter().map(OriginReport::from).collect(),
        });
        let recomputed = report.recomputed.iter().map(|again| RecomputedReport {
            op: again.op.clone(),
            count: again.count,
            bytes: again.bytes,
        });
        Self {
            saved_bytes: report.saved_bytes,
            everything_bytes: report.everything_bytes,
            peak_without_budget: report.peak_without_budget,
            recompute_picoseconds: report.recompute_picoseconds,
            chunks: report.chunks.as_ref().map(ToString::to_string),
            saved: saved.collect(),
            recomputed: recomputed.collect(),
        }
    }
}

/// Whether a node belongs to a backward pass or an optimizer.
fn is_training(graph: &Graph) -> bool {
    graph
        .nodes()
        .any(|(_, data)| data.provenance.phase == Phase::Backward)
}

/// The partitioned graph and what was decided. A graph without a backward pass has nothing to decide.
///
/// # Errors
/// [`CompileError::Partition`] if nothing fits the memory budget; those of scheduling if a graph cannot be planned.
fn run(graph: &Graph, options: &Options) -> Result<(Graph, Option<Report>), CompileError> {
    let partition = match options.keep {
        Keep::Within(budget) => Frontier::new(graph, &choices(options), Arena(options))?.fit(budget)?,
        _ if !is_training(graph) => return Ok((graph.clone(), None)),
        _ => kiln_partition::partition(graph, &choices(options))?,
    };
    let Partition { graph, report, .. } = partition;
    Ok((graph, Some(report)))
}

/// `graph` with its index checks.
fn checked(graph: &Graph) -> Result<(Graph, Vec<Check>), CompileError> {
    checks::add(graph).map_err(|source| CompileError::Pass {
        pass: "checks",
        source,
    })
}

/// The plans that some memory budget gets for `graph`, as recorded, from the fastest to the smallest.
///
/// # Errors
/// Those of [`crate::compile`].
pub fn memory_curve(graph: &Graph, options: &Options) -> Result<Vec<Point>, CompileError> {
    let (graph, _) = transform::run(&checked(graph)?.0, options, false, &mut Stages::default())?;
    Ok(Frontier::new(&graph, &choices(options), Arena(options))?.curve()?)
}

/// A function's joint graph, as recorded, as a graph for its forward and one for its backward pass. Both are compiled by themselves and take turns in
/// one arena; a memory budget holds for it and what is kept between the passes together. `tangents` and `roles` are those of [`kiln_partition::split()`].
///
/// # Errors
/// Those of [`kiln_partition::split_within`] and of [`crate::compile`].
pub fn split(
    graph: &Graph,
    tangents: &[u32],
    roles: &[OutputRole],
    options: &Options,
) -> Result<Split, CompileError> {
    // Before the cut: afterwards nobody sees the forward and the backward pass of one attention layer together.
    let (graph, _) = transform::run(graph, options, false, &mut Stages::default())?;
    let choices = choices(options);
    Ok(match options.keep {
        Keep::Within(budget) => {
            kiln_partition::split_within(&graph, tangents, roles, &choices, budget, Compiled(options))?
        }
        _ => kiln_partition::split(&graph, tangents, roles, &choices)?,
    })
}

/// What holding a byte costs, in times of moving it. A little more than one: of two choices that take the same time, the one that keeps less.
const HOLD: f64 = 1.01;

/// What this compiler's kernels can do, for the partitioner.
fn choices(options: &Options) -> Choices {
    Choices {
        strategy: match options.keep {
            Keep::Everything => Strategy::KeepEverything,
            Keep::Cheapest | Keep::Within(_) => Strategy::MinimumCut,
        },
        hold: HOLD * 1e12 / options.machine.bytes_per_second,
        machine: options.machine,
        ..Choices::default()
    }
}

/// The compiler's own memory planner.
struct Arena<'a>(&'a Options);

impl Planner for Arena<'_> {
    fn peak(&self, graph: &Graph) -> Result<u64, String> {
        let planned = planned(graph, self.0, &mut Stages::default()).map_err(|error| error.to_string())?;
        Ok(planned.plan.arena_bytes as u64)
    }
}

/// The memory planner for a graph that goes through all of the compiler, without a budget of its own.
struct Compiled<'a>(&'a Options);

impl Planner for Compiled<'_> {
    fn peak(&self, graph: &Graph) -> Result<u64, String> {
        let options = Options {
            keep: Keep::default(),
            ..self.0.clone()
        };
        let lowered = lower(graph, &options, false, &mut Stages::default());
        let lowered = lowered.map_err(|error| error.to_string())?;
        Arena(&options).peak(&lowered.graph)
    }
}

/// A graph that is ready to be scheduled.
pub(crate) struct Lowered {
    pub(crate) graph: Graph,
    pub(crate) checks: Vec<Check>,
    pub(crate) partition: Option<Report>,
    /// The graph after each pass, as text, if asked for.
    pub(crate) dumps: Vec<(String, String)>,
}

/// What comes before scheduling: index checks, the transforms and the partition.
pub(crate) fn lower(
    recorded: &Graph,
    options: &Options,
    dump: bool,
    stages: &mut Stages,
) -> Result<Lowered, CompileError> {
    let (graph, checks) = checked(recorded)?;
    let (graph, mut dumps) = transform::run(&graph, options, dump, stages)?;
    let (graph, partition) = stages.time("partition", || run(&graph, options))?;
    if dump && partition.is_some() {
        dumps.push(("partition".into(), graph.to_string()));
    }
    Ok(Lowered {
        graph,
        checks,
        partition,
        dumps,
    })
}
