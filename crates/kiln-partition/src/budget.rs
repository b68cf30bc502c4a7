//! The memory budget: the fastest of the plans that fit or, if none fits, the smallest budget that would.
//!
//! The trade between time and memory is explored once, without looking at any budget. A [`Frontier`] holds
//! a fixed list of plans, fastest first, and asks the planner for a plan's exact peak when it first needs
//! that peak. A budget takes the first plan that fits. The promises follow from that alone. A plan that is
//! returned fits exactly, because the planner planned it. A larger budget admits at least the plans that a
//! smaller one does, so it never gives a slower plan. When no plan fits, every plan has been measured, so
//! the smallest budget that would fit is known.
//!
//! The list, for a forward pass of `n` units (blocks between narrow places, found by how much crosses them):
//!
//! - the minimum cut, fastest of all;
//! - for several prices of a kept byte, with and without recomputing expensive operations: the cut at that
//!   price inside the first `m` units, the fastest cut in the others. The values of the first units are
//!   kept longest, while those of the last units are needed at once. The boundaries of repriced units are
//!   kept, so that each unit can be recomputed by itself;
//! - the same with only every second, third, .. boundary kept and nothing between them: fewer kept values,
//!   longer pieces to recompute. Around the square root of `n` this is the classic way to train in
//!   sublinear memory (Chen, Xu, Zhang and Guestrin, 2016);
//! - every plan but the first with early optimizer updates, so that gradients do not pile up;
//! - each plan with the widest product, and the operations that follow from it, in chunks of rows
//!   (module `chunk`).
//!
//! Planning a graph exactly takes time, so `thin` shortens the list: it removes a plan that is slower
//! than another one and, by the estimate of [`Liveness`], no smaller, and keeps one of several plans that
//! are close to each other. A joint graph with few values to choose from is searched completely instead:
//! every subset of them is a plan, and the reported minimum is the minimum over all.

use std::collections::{HashMap, HashSet};

use cranelift_entity::EntitySet;
use kiln_graph::{Graph, Value};

use crate::cut::{Steering, choose};
use crate::error::PartitionError;
use crate::joint::{Joint, Side};
use crate::liveness::{Liveness, Planner};
use crate::split::Halves;
use crate::units::Units;
use crate::{Assembled, Options, Partition, assemble, build};

/// Up to this many values to keep or recompute, every choice is tried.
const EXHAUSTIVE: usize = 8;

/// Neighbours in the list are smaller by at least this factor.
const APART: f64 = 0.95;

/// How many of the plans with the least estimated memory stay in the list, however close they are: only the
/// planner can tell which of them is smallest.
const SMALLEST: usize = 3;

/// Prices of a kept byte, in picoseconds. A byte moved costs some 20; a matrix product over 1,000 terms some
/// 2,000 for each byte of its result. The last one drops whatever can be dropped.
const PRICES: [f64; 5] = [100.0, 400.0, 1_500.0, 6_000.0, 1e6];

/// One way to run the step.
#[derive(Clone, Debug)]
struct Plan {
    kept: EntitySet<Value>,
    expensive: bool,
    early_updates: bool,
    /// One of this many unit boundaries is kept.
    stride: usize,
    /// Whether the widest product runs in chunks of rows.
    chunks: bool,
    /// Modelled time of the choice, in picoseconds.
    cost: u64,
    peak: Option<u64>,
}

impl Plan {
    /// The graph that runs so.
    fn assemble(&self, joint: &Joint) -> Result<Assembled, PartitionError> {
        let closure = joint.closure(&self.kept, self.expensive);
        let assembled = assemble(joint, &closure, self.early_updates)?;
        if !self.chunks {
            return Ok(assembled);
        }
        let chunked = assembled.in_chunks(&joint.options.machine)?;
        Ok(chunked.map_or(assembled, |(chunked, _)| chunked))
    }
}

/// A point of the curve of peak memory against time.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Point {
    /// Bytes that the step allocates at its peak, by the planner: the smallest budget that gets this plan.
    pub peak: u64,
    /// Modelled time that the backward pass spends on kept and recomputed values, in picoseconds.
    pub cost: u64,
    /// Bytes kept from the forward to the backward pass.
    pub saved: u64,
}

/// Every plan considered for one joint graph, fastest first.
#[derive(Debug)]
pub struct Frontier<P> {
    graph: Graph,
    options: Options,
    planner: P,
    /// Where the graph is going to be cut in two, if it is.
    halves: Option<Halves>,
    plans: Vec<Plan>,
}

impl<P: Planner> Frontier<P> {
    /// Lists the plans for `graph`. None is planned yet.
    ///
    /// # Errors
    ///
    /// If `graph` is not valid.
    pub fn new(graph: &Graph, options: &Options, planner: P) -> Result<Self, PartitionError> {
        Self::of(graph.without_dead_code(), options, planner, None)
    }

    /// Lists the plans for a joint graph without dead nodes that runs as a whole or, given [`Halves`], as two
    /// graphs.
    pub(crate) fn of(
        graph: Graph,
        options: &Options,
        planner: P,
        halves: Option<Halves>,
    ) -> Result<Self, PartitionError> {
        let _span = tracing::debug_span!("frontier", graph = %graph.name).entered();
        let mut frontier = Self {
            graph,
            options: options.clone(),
            planner,
            halves,
            plans: Vec::new(),
        };
        let joint = frontier.joint()?;
        let mut plans = plans(&joint)?;
        // A graph that is cut in two has the product in one half and the operations that follow from it in
        // the other.
        if frontier.halves.is_none() {
            add_chunks(&joint, &mut plans)?;
        }
        frontier.plans = plans;
        Ok(frontier)
    }

    fn joint(&self) -> Result<Joint<'_>, PartitionError> {
        let tangents = self.halves.as_ref().map_or(&[][..], |halves| &halves.tangents);
        Joint::with_tangents(&self.graph, &self.options, tangents)
    }

    /// The fastest plan whose peak is at most `budget` bytes.
    ///
    /// # Errors
    ///
    /// [`PartitionError::BudgetTooSmall`] with the smallest budget that fits; or whatever the planner
    /// reports.
    pub fn fit(&mut self, budget: u64) -> Result<Partition, PartitionError> {
        let mut smallest = u64::MAX;
        for index in 0..self.plans.len() {
            let peak = self.peak(index)?;
            if peak <= budget {
                return self.partition(index, peak);
            }
            smallest = smallest.min(peak);
        }
        Err(PartitionError::BudgetTooSmall {
            graph: self.graph.name.clone(),
            budget,
            smallest,
        })
    }

    /// The smallest budget that fits, in bytes.
    ///
    /// # Errors
    ///
    /// Whatever the planner reports.
    pub fn smallest_budget(&mut self) -> Result<u64, PartitionError> {
        (0..self.plans.len()).try_fold(u64::MAX, |smallest, index| Ok(smallest.min(self.peak(index)?)))
    }

    /// The plans that some budget gets, from the fastest to the smallest: cost rises, peak falls.
    ///
    /// # Errors
    ///
    /// Whatever the planner reports.
    pub fn curve(&mut self) -> Result<Vec<Point>, PartitionError> {
        let mut curve: Vec<Point> = Vec::new();
        for index in 0..self.plans.len() {
            let peak = self.peak(index)?;
            if curve.last().is_none_or(|last| peak < last.peak) {
                let joint = self.joint()?;
                let plan = &self.plans[index];
                let kept = plan.assemble(&joint)?.kept;
                curve.push(Point {
                    peak,
                    cost: plan.cost,
                    saved: joint.held(kept.into_iter().map(|(old, _)| old)),
                });
            }
        }
        Ok(curve)
    }

    fn peak(&mut self, index: usize) -> Result<u64, PartitionError> {
        if let Some(peak) = self.plans[index].peak {
            return Ok(peak);
        }
        let joint = self.joint()?;
        let built = self.plans[index].assemble(&joint)?;
        let planned = |graph: &Graph| {
            let peak = self.planner.peak(graph);
            peak.map_err(|reason| PartitionError::Planner {
                graph: self.graph.name.clone(),
                reason,
            })
        };
        let peak = match &self.halves {
            None => planned(&built.graph)?,
            Some(halves) => {
                let cut = halves.cut(&built.graph, &built.backward)?;
                // The two halves never run at once.
                planned(&cut.forward)?.max(planned(&cut.backward)?) + cut.kept_bytes()
            }
        };
        tracing::debug!(plan = index, peak, cost = self.plans[index].cost, "planned");
        self.plans[index].peak = Some(peak);
        Ok(peak)
    }

    fn partition(&mut self, index: usize, peak: u64) -> Result<Partition, PartitionError> {
        let without = self.peak(0)?;
        let joint = self.joint()?;
        let mut partition = build(&joint, self.plans[index].assemble(&joint)?)?;
        partition.report.peak = Some(peak);
        partition.report.peak_without_budget = Some(without);
        Ok(partition)
    }
}

/// All plans, fastest first.
fn plans(joint: &Joint) -> Result<Vec<Plan>, PartitionError> {
    let (fastest, _) = choose(joint, &Steering::FASTEST);
    let mut list = PlanList {
        joint,
        plans: Vec::new(),
        seen: HashSet::new(),
    };
    list.push(fastest.clone(), false, 1);
    let choices = choices(joint);
    let every = choices.len() <= EXHAUSTIVE;
    if every {
        for subset in 0..1usize << choices.len() {
            let chosen = (0..choices.len()).filter(|&i| subset >> i & 1 == 1);
            let mut kept = EntitySet::new();
            kept.extend(chosen.map(|i| choices[i]));
            list.push(kept, true, 1);
        }
    } else {
        list.explore(&fastest);
    }
    let mut plans = list.plans;
    // Stable: at equal cost the fastest cut stays first, and recorded order comes before early updates.
    plans.sort_by_key(|plan| plan.cost);
    if every { Ok(plans) } else { thin(joint, plans) }
}

/// Adds, for each plan, the same with the widest product in chunks.
fn add_chunks(joint: &Joint, plans: &mut Vec<Plan>) -> Result<(), PartitionError> {
    for index in 0..plans.len() {
        let plan = &plans[index];
        if let Some((_, extra)) = plan.assemble(joint)?.in_chunks(&joint.options.machine)? {
            plans.push(Plan {
                chunks: true,
                cost: plan.cost + extra,
                ..plan.clone()
            });
        }
    }
    plans.sort_by_key(|plan| plan.cost);
    Ok(())
}

/// A few plans that span the trade between time and memory: the fastest in the recorded order, and others
/// with early updates.
fn thin(joint: &Joint, plans: Vec<Plan>) -> Result<Vec<Plan>, PartitionError> {
    let mut plans = plans.into_iter();
    let Some(fastest) = plans.next() else {
        return Ok(Vec::new());
    };
    // Among plans that keep something in every unit, or in every second, the one that keeps less is smaller.
    let mut least_saved: HashMap<usize, u64> = HashMap::new();
    let mut estimated: Vec<(u64, Plan)> = Vec::new();
    for plan in plans.filter(|plan| plan.early_updates) {
        let closure = joint.closure(&plan.kept, plan.expensive);
        let saved = joint.held(closure.kept.iter());
        let least = least_saved.entry(plan.stride).or_insert(u64::MAX);
        if is_apart(saved, *least) {
            *least = saved;
            let built = assemble(joint, &closure, true)?;
            let peak = Liveness.profile(&built.graph).into_iter().max().unwrap_or(0);
            estimated.push((peak, plan));
        }
    }
    let mut sizes: Vec<u64> = estimated.iter().map(|(peak, _)| *peak).collect();
    sizes.sort_unstable();
    let small = sizes.get(SMALLEST - 1).or(sizes.last()).copied().unwrap_or(0);
    let mut kept = vec![fastest];
    let mut last = u64::MAX;
    for (peak, plan) in estimated {
        if peak <= small || is_apart(peak, last) {
            last = last.min(peak);
            kept.push(plan);
        }
    }
    Ok(kept)
}

/// Whether a plan of `bytes` is so much smaller than one of `than` that the list should have both.
fn is_apart(bytes: u64, than: u64) -> bool {
    bytes as f64 <= APART * than as f64
}

/// The values that can be kept or recomputed: those that candidates define and the backward pass may need,
/// except values that cannot be recomputed and random draws, which are always drawn again.
fn choices(joint: &Joint) -> Vec<Value> {
    let needed = joint.closure(&EntitySet::new(), true);
    let values = joint
        .graph
        .values()
        .filter(|&(value, data)| needed.recomputed.contains(data.node) && !joint.is_redrawn(value));
    values.map(|(value, _)| value).collect()
}

struct PlanList<'a> {
    joint: &'a Joint<'a>,
    plans: Vec<Plan>,
    seen: HashSet<Vec<Value>>,
}

impl PlanList<'_> {
    fn push(&mut self, kept: EntitySet<Value>, expensive: bool, stride: usize) {
        let closure = self.joint.closure(&kept, expensive);
        if !self.seen.insert(closure.kept.iter().collect()) {
            return;
        }
        // The minimum cut does not consider computing products again. What does is not taken to be faster: a
        // budget that everything fits changes nothing.
        let fastest = self.plans.first().map_or(0, |fastest| fastest.cost);
        let cost = self.joint.cost(&closure).max(fastest);
        for early_updates in [false, true] {
            self.plans.push(Plan {
                kept: closure.kept.clone(),
                expensive,
                early_updates,
                stride,
                chunks: false,
                cost,
                peak: None,
            });
        }
    }

    fn explore(&mut self, fastest: &EntitySet<Value>) {
        let units = Units::new(self.joint);
        let count = units.count();
        let every: EntitySet<Value> = anchors(&units, 1);
        for expensive in [false, true] {
            for price in PRICES {
                let steering = Steering {
                    expensive,
                    price,
                    anchors: Some(&every),
                };
                let (priced, _) = choose(self.joint, &steering);
                self.mix(&units, fastest, &priced, 1, expensive);
            }
        }
        let none = EntitySet::new();
        let mut stride = 2;
        while stride < count {
            self.mix(&units, fastest, &none, stride, true);
            // 2, 3, 4, 6, 8, 12, ..: neighbours differ enough to matter.
            stride = (stride + stride / 2).max(stride + 1);
        }
        self.mix(&units, fastest, &none, count, true);
    }

    /// `priced` inside the first units, `fastest` in the rest, for several numbers of units.
    fn mix(
        &mut self,
        units: &Units,
        fastest: &EntitySet<Value>,
        priced: &EntitySet<Value>,
        stride: usize,
        expensive: bool,
    ) {
        let pieces = units.count().div_ceil(stride);
        let steps = pieces.min(8);
        for step in 1..=steps {
            let first_units = (pieces * step / steps * stride) as u32;
            let mut kept = EntitySet::new();
            let inside = |value: Value| units.of[self.joint.node_of(value)] < first_units;
            kept.extend(priced.iter().filter(|&value| inside(value)));
            kept.extend(fastest.iter().filter(|&value| !inside(value)));
            for boundary in (stride - 1..units.crossing.len()).step_by(stride) {
                if (boundary as u32) < first_units {
                    kept.extend(units.crossing[boundary].iter());
                }
            }
            // A unit that keeps its fastest choice must find the boundary values that the choice was made
            // for.
            self.push(kept, expensive, stride);
        }
    }
}

/// The values that cross every `stride`-th boundary.
fn anchors(units: &Units, stride: usize) -> EntitySet<Value> {
    let mut anchors = EntitySet::new();
    for crossing in units.crossing.iter().skip(stride - 1).step_by(stride) {
        anchors.extend(crossing.iter());
    }
    anchors
}

impl Joint<'_> {
    /// Bytes of values that are kept from the forward to the backward pass, without values that leave the
    /// step as outputs.
    pub(crate) fn held(&self, kept: impl Iterator<Item = Value>) -> u64 {
        let kept = kept.filter(|&value| self.users.outputs(value) == 0);
        let kept = kept.filter(|&value| self.side_of(value) != Side::Fixed);
        kept.map(|value| crate::cost::bytes(self.graph, value)).sum()
    }
}
