//! What the backward pass keeps and what it recomputes.
//!
//! The joint graph of a training step computes values in its forward pass that its backward pass reads,
//! much later. Each of them can be kept, which costs memory and traffic. Or it can be computed again from
//! others, which costs arithmetic, and often nothing at all, when the reader is a kernel that waits for
//! memory anyway. This crate makes that choice. In the order in which a graph goes through it:
//!
//! 1. [`phase`]: which nodes are forward, backward, optimizer.
//! 2. [`recompute`] and [`cost`]: which values may be computed twice, and what recomputing and keeping cost
//!    on a machine.
//! 3. A minimum cut over the forward values ([`partition`]): the cheapest choice, as a graph with duplicated
//!    nodes.
//! 4. [`budget`]: the fastest choice that fits a memory budget, by a memory planner ([`partition_within`],
//!    [`Frontier`]), with the widest product in chunks of rows where only that fits.
//! 5. [`mod@split`]: the same choice as two graphs, for a compiled forward pass inside an eager program, with
//!    or without a budget; the second also for a loss of some outputs only ([`without_tangents`]).
//!
//! The result is a graph again, with a [`Report`] of what was done. Whoever transforms it afterwards must not
//! merge nodes of different phases, and should run the nodes in their order, or in one that was chosen for
//! memory.
//!
//! What this crate does not know: Burn, kernels, buffers. What it needs of them comes in as numbers
//! ([`Machine`]) or through [`Planner`].
//!
//! ```
//! use kiln_graph::Graph;
//! use kiln_partition::{Options, partition};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let step = Graph::parse("graph @step {
//!   %x = parameter 0 : f32[64,64]
//!   %w = parameter 1 : f32[64,64]
//!   %dz = parameter 2 : f32[64,64]
//!   %h = dot_general %x, %w {a_contract=[1], b_contract=[0]} : f32[64,64]   ; fwd
//!   %z = exp %h : f32[64,64]                                                ; fwd
//!   %loss = reduce sum %z {axes=[0,1]} : f32[]                              ; fwd
//!   %dh = mul %dz, %z : f32[64,64]                                          ; bwd
//!   %dw = dot_general %x, %dh {a_contract=[0], b_contract=[0]} : f32[64,64] ; bwd
//!   return %loss, %dw
//! }")?;
//! let partitioned = partition(&step, &Options::default())?;
//! // The exponential runs again, on the kept product, inside the kernel that multiplies by it.
//! assert_eq!(partitioned.report.saved.len(), 1);
//! println!("{}", partitioned.report);
//! # Ok(())
//! # }
//! ```

mod absent;
pub mod budget;
mod chunk;
pub mod cost;
mod cut;
pub mod error;
mod flow;
mod joint;
pub mod liveness;
mod order;
pub mod phase;
pub mod recompute;
pub mod report;
mod rewrite;
pub mod split;
#[cfg(feature = "testing")]
pub mod testing;
mod units;

use std::collections::BTreeMap;

use cranelift_entity::EntitySet;
use kiln_graph::{Graph, Node, Phase, Value};

pub use absent::without_tangents;
pub use budget::{Frontier, Point};
pub use cost::Machine;
pub use error::PartitionError;
pub use liveness::{Liveness, Planner};
pub use phase::{OutputRole, assign_phases, find_phases, find_seeds};
pub use recompute::Recompute;
pub use report::{Chunks, Origin, RecomputedOperations, Report, SavedTensor};
pub use split::{SavedSource, Split, assign_phases_of_split, split, split_within};

use cut::Steering;
use joint::{Closure, Joint, Side};

/// The options of a partition: what the choice depends on besides the graph.
#[derive(Clone, PartialEq, Debug)]
pub struct Options {
    /// How to choose.
    pub strategy: Strategy,
    /// Rates of the machine that will run the step.
    pub machine: Machine,
    /// Cost of holding a byte through the backward pass, in picoseconds: kept bytes push others out of
    /// caches, and memory is worth something where there is no budget. The default is the cost of moving a
    /// byte once.
    pub hold: f64,
    /// Whether matrix products compute fused operands while they read them.
    pub dot_prologue: bool,
    /// Whether convolutions of single pixels compute fused operands while they read them.
    pub conv_prologue: bool,
    /// Whether optimizer updates run as soon as they can, for the least memory, rather than where they were
    /// recorded.
    pub early_updates: bool,
}

/// How [`partition`] chooses.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum Strategy {
    /// The cheapest choice of those that store no random draws: dropout masks are made from the counter
    /// again.
    #[default]
    MinimumCut,
    /// Everything that the backward pass reads is kept, as an eager autograd engine does: a baseline to
    /// compare with.
    KeepEverything,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            strategy: Strategy::default(),
            machine: Machine::default(),
            hold: 35.0,
            dot_prologue: true,
            conv_prologue: true,
            early_updates: false,
        }
    }
}

/// A joint graph that keeps and recomputes as chosen.
#[derive(Clone, PartialEq, Debug)]
pub struct Partition {
    /// The graph. It computes the same outputs from the same arguments, bit for bit; under a budget that asks
    /// for [`Report::chunks`], sums over rows are taken in another order.
    pub graph: Graph,
    /// What was decided.
    pub report: Report,
    /// The nodes of `graph` that need not run before the backward pass begins.
    pub backward: EntitySet<Node>,
}

/// Chooses what the backward pass keeps, for the least time, and returns the graph that does so.
///
/// `graph` is a joint graph after [`assign_phases`] and any transforms; where a node has no phase, all are
/// found by their looks.
///
/// # Errors
///
/// If `graph` is not valid.
pub fn partition(graph: &Graph, options: &Options) -> Result<Partition, PartitionError> {
    let _span = tracing::debug_span!("partition", graph = %graph.name).entered();
    let graph = graph.without_dead_code();
    let joint = Joint::new(&graph, options)?;
    let kept = match options.strategy {
        Strategy::MinimumCut => cut::choose(&joint, &Steering::FASTEST).0,
        Strategy::KeepEverything => joint.everything(),
    };
    let closure = joint.closure(&kept, false);
    build(&joint, assemble(&joint, &closure, options.early_updates)?)
}

/// [`partition`] under a memory budget of `budget` bytes for everything that the step allocates beyond its
/// arguments, by the account of `planner`. To ask for several budgets, make a [`Frontier`] once.
///
/// # Errors
///
/// [`PartitionError::BudgetTooSmall`], naming the smallest budget that fits, if none of the plans does.
pub fn partition_within(
    graph: &Graph,
    options: &Options,
    budget: u64,
    planner: impl Planner,
) -> Result<Partition, PartitionError> {
    Frontier::new(graph, options, planner)?.fit(budget)
}

/// A partitioned graph before anything is reported about it.
struct Assembled {
    graph: Graph,
    backward: EntitySet<Node>,
    /// Kept values, in the joint graph and in this one.
    kept: Vec<(Value, Value)>,
    /// Nodes of the joint graph that run again.
    recomputed: Vec<Node>,
    chunks: Option<Chunks>,
}

impl Assembled {
    /// This graph with its widest product in chunks, and the time that chunks cost; none if it cannot be
    /// cut or chunks are not worth it.
    fn in_chunks(&self, machine: &Machine) -> Result<Option<(Self, u64)>, PartitionError> {
        let Some(region) = chunk::Region::find(&self.graph) else {
            return Ok(None);
        };
        let cut = region.cut(&self.graph)?;
        // A value that no longer exists as a whole is not kept.
        let kept = self.kept.iter();
        let kept = kept.filter_map(|&(joint, value)| Some((joint, *cut.values.get(&value)?)));
        let chunked = Self {
            backward: cut.of(&self.backward),
            kept: kept.collect(),
            recomputed: self.recomputed.clone(),
            chunks: Some(region.report(&self.graph)),
            graph: cut.graph,
        };
        Ok(Some((chunked, region.cost(&self.graph, machine))))
    }
}

/// The graph for a choice.
fn assemble(joint: &Joint, closure: &Closure, early_updates: bool) -> Result<Assembled, PartitionError> {
    let rewritten = rewrite::rewrite(joint, closure)?;
    let mut early = rewritten.hoisted;
    if early_updates {
        let nodes = rewritten.graph.nodes();
        let updates =
            nodes.filter(|(_, data)| data.provenance.phase == Phase::Optimizer && !data.inputs.is_empty());
        early.extend(updates.map(|(node, _)| node));
    }
    let ordered = order::reorder(&rewritten.graph, &early)?;
    let mut backward = EntitySet::new();
    backward.extend(rewritten.backward.iter().map(|node| ordered.nodes[node]));
    let kept = rewritten
        .kept
        .into_iter()
        .map(|(old, new)| (old, ordered.values[new]));
    Ok(Assembled {
        backward,
        kept: kept.collect(),
        recomputed: rewritten.duplicates.into_iter().map(|(old, _)| old).collect(),
        chunks: None,
        graph: ordered.graph,
    })
}

/// The graph and the report for a choice.
fn build(joint: &Joint, assembled: Assembled) -> Result<Partition, PartitionError> {
    let Assembled {
        graph,
        backward,
        kept,
        recomputed,
        chunks,
    } = assembled;
    debug_assert_eq!(
        kiln_graph::verify(&graph),
        Ok(()),
        "the partitioner broke a graph"
    );

    let mut report = Report {
        graph: graph.name.clone(),
        chunks,
        saved_bytes: joint.held(kept.iter().map(|&(old, _)| old)),
        ..Report::default()
    };
    report.count(&graph);
    let users = graph.users();
    for (old, value) in kept {
        if joint.side_of(old) == Side::Fixed {
            continue;
        }
        let readers = users.of(value).iter().filter(|&&user| backward.contains(user));
        let mut readers: Vec<Origin> = readers.map(|&user| Origin::of(graph.node(user))).collect();
        readers.sort();
        readers.dedup();
        report.saved.push(SavedTensor {
            value,
            ty: graph.ty(value).clone(),
            bytes: cost::bytes(&graph, value),
            is_output: joint.users.outputs(old) > 0,
            origin: Origin::of(graph.def(value)),
            users: readers,
        });
    }
    report.saved.sort_by_key(|saved| std::cmp::Reverse(saved.bytes));
    let mut by_op = BTreeMap::new();
    for node in recomputed {
        let data = joint.graph.node(node);
        let bytes = data
            .outputs
            .iter()
            .map(|&value| cost::bytes(joint.graph, value))
            .sum();
        Report::add_recomputed(&mut by_op, data, bytes, joint.recompute(node));
    }
    report.recomputed = by_op.into_values().collect();
    report.recomputed.sort_by_key(|op| std::cmp::Reverse(op.bytes));
    report.recompute_picoseconds = report.recomputed.iter().map(|op| op.picoseconds).sum();
    report.everything_bytes = joint.held(joint.closure(&joint.everything(), false).kept.iter());
    Ok(Partition {
        graph,
        report,
        backward,
    })
}
