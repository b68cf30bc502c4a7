//! Buckets: sums over ranks that are started early, several at once, and waited for late.
//!
//! A recorded step has one [`all_reduce`](CollectiveKind::AllReduce) for each gradient, in front of the
//! optimizer's first use of it. This pass runs after the partition. It joins the sums to *buckets*, in the
//! order in which the backward pass computes the gradients. A bucket starts right behind the last of its
//! gradients, and travels while the backward pass goes on:
//!
//! ```text
//!   g1 = ..                                          g1 = ..
//!   g2 = ..                                          g2 = ..
//!   g3 = ..                                          bucket = concat g1, g2 ; t = all_reduce bucket {started}
//!   a1 = all_reduce g1                       ──►     g3 = .. ; u = all_reduce g3 {started}
//!   a2 = all_reduce g2                               w = collective_wait t ; a1 = slice w ; a2 = slice w
//!   a3 = all_reduce g3                               a3 = collective_wait u
//!   updates                                          updates
//! ```
//!
//! Waits stand in the order of starts, in front of the first operation that reads a sum. An update follows
//! the wait of its own bucket ([`crate::schedule::order`]), so that updates run while later buckets travel.
//! A gradient that fills a bucket by itself is neither joined, copied nor moved: start and wait work in
//! place.
//!
//! Sums go in the order of ranks, element by element, so buckets change no bit of a result
//! (kiln-cpu's `tests/ranks.rs`, kiln-distributed's `buckets_change_no_bit`), and their sizes may follow from
//! a measurement ([`Buckets::of`]). Libraries that add up in an order of their own need fixed sizes.

use std::fmt;

use kiln_graph::op::{Dims, Op};
use kiln_graph::{
    Collective, CollectiveKind, DType, Graph, Node, Phase, Provenance, Rewriter, TypeError, Users, Value,
};
use rustc_hash::FxHashMap;

/// How large buckets are.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Buckets {
    /// The most bytes of the first bucket, which is small so that something travels early.
    pub first: usize,
    /// The most bytes of each other bucket.
    pub others: usize,
}

impl Default for Buckets {
    /// 1 MB and 25 MB: on any network, the bandwidth and not the latency decides how long a message of 25
    /// MB takes.
    fn default() -> Self {
        Self {
            first: 1 << 20,
            others: 25 << 20,
        }
    }
}

impl Buckets {
    /// Every sum by itself, as soon as its gradient is there.
    pub const NONE: Self = Self { first: 0, others: 0 };

    /// The sizes of [`Buckets::of`], and with them the factor between two: coarse, so that a measurement that
    /// differs a little gives the same sizes, and with them the same code.
    const STEPS: [usize; 4] = [25 << 16, 25 << 18, 25 << 20, 25 << 22];

    /// Sizes of which the first is what the first bucket of each step of 25 is to the others.
    pub const fn with_others(others: usize) -> Self {
        Self {
            first: others / 25,
            others,
        }
    }

    /// Sizes for a link on which a sum of `n` bytes takes `fixed + n * byte` seconds: the smallest of 1.6, 6.3,
    /// 25 and 100 MB for which `fixed` is at most a twentieth of that. What travels last, and is therefore
    /// waited for, is then as small as it can be without cost.
    pub fn of(fixed: f64, byte: f64) -> Self {
        let least = 20.0 * fixed / byte;
        let others = Self::STEPS.into_iter().find(|&size| size as f64 >= least);
        Self::with_others(others.unwrap_or(Self::STEPS[3]))
    }
}

impl fmt::Display for Buckets {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.first, self.others)
    }
}

/// A sum over ranks, in the old graph.
#[derive(Clone, Copy, Debug)]
struct Sum {
    node: Node,
    operand: Value,
    /// The node behind which it can be started.
    ready: usize,
    /// The node in front of which it must be complete; the number of nodes if none reads it.
    needed: usize,
}

/// Sums that travel together.
#[derive(Debug)]
struct Bucket {
    sums: Vec<Sum>,
    collective: Collective,
    dtype: DType,
    bytes: usize,
    /// The wait's operand, once it is started.
    started: Option<Value>,
}

/// `graph` with its sums over ranks in buckets; none if it has no such sum.
///
/// # Errors
/// If a node does not fit: a bug of the pass.
pub fn run(graph: &Graph, sizes: &Buckets) -> Result<Option<Graph>, TypeError> {
    let sums = sums(graph, &graph.users());
    if sums.is_empty() {
        return Ok(None);
    }
    let mut groups = groups(graph, sums, sizes);
    let mut new = Rewriter::new(graph);
    for (id, data) in graph.nodes() {
        let number = id.as_u32() as usize;
        for group in groups.iter_mut().filter(|group| group.needed == number) {
            group.wait(graph, &mut new)?;
        }
        let is_taken = |group: &Group| {
            let mut sums = group.buckets.iter().flat_map(|bucket| &bucket.sums);
            sums.any(|sum| sum.node == id)
        };
        if !(is_sum(&data.op) && groups.iter().any(is_taken)) {
            new.copy(id)?;
        }
        for group in &mut groups {
            group.start(graph, &mut new, number)?;
        }
    }
    for group in groups
        .iter_mut()
        .filter(|group| group.needed == graph.num_nodes())
    {
        group.wait(graph, &mut new)?;
    }
    Ok(Some(new.finish()))
}

/// Whether an operation is a sum over ranks that may travel with others.
fn is_sum(op: &Op) -> bool {
    matches!(op, Op::Collective(it) if it.kind == CollectiveKind::AllReduce && !it.started)
}

/// All sums over ranks, in the order in which they can be started.
fn sums(graph: &Graph, users: &Users) -> Vec<Sum> {
    let index = |node: Node| node.as_u32() as usize;
    let of = |(node, data): (Node, &kiln_graph::NodeData)| {
        let (operand, result) = (data.inputs[0], data.outputs[0]);
        let maker = graph.value(operand).node;
        // A sum of a sum follows its wait.
        let ready = if is_sum(&graph.node(maker).op) {
            node
        } else {
            maker
        };
        let needed = users.of(result).iter().map(|&user| index(user)).min();
        Sum {
            node,
            operand,
            ready: index(ready),
            needed: needed.unwrap_or(graph.num_nodes()),
        }
    };
    let nodes = graph.nodes().filter(|(_, data)| is_sum(&data.op));
    let mut sums: Vec<Sum> = nodes
        .filter(|(_, data)| graph.ty(data.outputs[0]).numel() > 0)
        .map(of)
        .collect();
    sums.sort_by_key(|sum| (sum.ready, sum.node));
    sums
}

/// Buckets that are all started before the first of their sums is needed.
#[derive(Debug)]
struct Group {
    buckets: Vec<Bucket>,
    /// The node in front of which their waits stand.
    needed: usize,
}

/// Divides sums into buckets.
fn groups(graph: &Graph, sums: Vec<Sum>, sizes: &Buckets) -> Vec<Group> {
    let mut groups: Vec<Group> = Vec::new();
    for sum in sums {
        let Op::Collective(collective) = graph.node(sum.node).op else {
            continue;
        };
        if groups.last().is_none_or(|group| group.needed <= sum.ready) {
            groups.push(Group {
                buckets: Vec::new(),
                needed: usize::MAX,
            });
        }
        let Some(group) = groups.last_mut() else { continue };
        group.needed = group.needed.min(sum.needed);
        let ty = graph.ty(sum.operand);
        let limit = match group.buckets.len() {
            0 | 1 => sizes.first,
            _ => sizes.others,
        };
        match group.buckets.last_mut() {
            Some(bucket)
                if bucket.bytes + ty.bytes() <= limit
                    && bucket.dtype == ty.dtype
                    && bucket.collective == collective =>
            {
                bucket.bytes += ty.bytes();
                bucket.sums.push(sum);
            }
            _ => group.buckets.push(Bucket {
                sums: vec![sum],
                collective,
                dtype: ty.dtype,
                bytes: ty.bytes(),
                started: None,
            }),
        }
    }
    groups
}

impl Group {
    /// Starts the buckets of which `number` is the last node that they wait for.
    fn start(&mut self, graph: &Graph, new: &mut Rewriter, number: usize) -> Result<(), TypeError> {
        for bucket in &mut self.buckets {
            if bucket.sums.last().is_some_and(|sum| sum.ready == number) {
                bucket.start(graph, new)?;
            }
        }
        Ok(())
    }

    /// Waits for all buckets; from now on their sums replace those of the old graph.
    fn wait(&mut self, graph: &Graph, new: &mut Rewriter) -> Result<(), TypeError> {
        self.buckets.iter().try_for_each(|bucket| bucket.wait(graph, new))
    }
}

impl Bucket {
    fn provenance(&self, graph: &Graph, phase: Phase) -> Provenance {
        Provenance {
            phase,
            ..graph.node(self.sums[0].node).provenance.clone()
        }
    }

    fn start(&mut self, graph: &Graph, new: &mut Rewriter) -> Result<(), TypeError> {
        let p = self.provenance(graph, Phase::Backward);
        let whole = match &self.sums[..] {
            [alone] => new.map(alone.operand),
            sums => {
                let mut flat = Vec::with_capacity(sums.len());
                for sum in sums {
                    let count = graph.ty(sum.operand).numel();
                    flat.push(
                        new.graph
                            .add(Op::Reshape([count].into()), &[new.map(sum.operand)], &p)?,
                    );
                }
                new.graph.add(Op::Concat { axis: 0 }, &flat, &p)?
            }
        };
        let started = Collective {
            started: true,
            ..self.collective
        };
        self.started = Some(new.graph.add(Op::Collective(started), &[whole], &p)?);
        Ok(())
    }

    fn wait(&self, graph: &Graph, new: &mut Rewriter) -> Result<(), TypeError> {
        let Some(started) = self.started else {
            return Ok(());
        };
        let p = self.provenance(graph, Phase::Optimizer);
        let whole = new.graph.add(Op::CollectiveWait, &[started], &p)?;
        if let [alone] = &self.sums[..] {
            new.replace(graph.node(alone.node).outputs[0], whole);
            return Ok(());
        }
        let mut at = 0;
        for sum in &self.sums {
            let result = graph.node(sum.node).outputs[0];
            let count = graph.ty(result).numel();
            let slice = Op::Slice {
                starts: Dims::from_slice(&[at]),
                limits: Dims::from_slice(&[at + count]),
                steps: Dims::from_slice(&[1]),
            };
            let flat = new.graph.add(slice, &[whole], &p)?;
            let shape = graph.shape(result).clone();
            let shaped = new.graph.add(Op::Reshape(shape), &[flat], &p)?;
            new.replace(result, shaped);
            at += count;
        }
        Ok(())
    }
}

/// The buckets of a graph behind the pass, in the order in which they are started: for each its bytes and the
/// number of sums in it.
pub fn described(graph: &Graph) -> Vec<(usize, usize)> {
    let started = graph.nodes().filter_map(|(_, data)| match data.op {
        Op::Collective(collective) if collective.started => Some(data.inputs[0]),
        _ => None,
    });
    let sums = |whole: Value| match graph.def(whole).op {
        Op::Concat { .. } => graph.def(whole).inputs.len(),
        _ => 1,
    };
    started
        .map(|whole| (graph.ty(whole).bytes(), sums(whole)))
        .collect()
}

/// The collectives of a graph, in order, as text: all ranks that run the graph must have the same text.
pub fn collectives_text(graph: &Graph) -> String {
    let mut counts: FxHashMap<String, usize> = FxHashMap::default();
    let mut order: Vec<String> = Vec::new();
    for (_, data) in graph.nodes() {
        if let Op::Collective(collective) = data.op {
            let text = format!("{} of {}", collective.kind, graph.ty(data.inputs[0]));
            *counts.entry(text.clone()).or_insert_with(|| {
                order.push(text);
                0
            }) += 1;
        }
    }
    let lines = order.iter().map(|text| format!("{} x {text}", counts[text]));
    lines.collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_follow_the_link_coarsely() {
        // Two exchanges of 20 microseconds at 1 GB/s: 0.8 MB are twenty times as long.
        assert_eq!(Buckets::of(40e-6, 1e-9).others, 25 << 16);
        // A measurement that is off by a half changes nothing there.
        assert_eq!(Buckets::of(60e-6, 1e-9), Buckets::of(40e-6, 1.5e-9));
        // 4096 ranks with a microsecond for each message, at 12.5 GB/s and more than anybody waits for.
        assert_eq!(Buckets::of(8e-3, 2.0 / 12.5e9).others, 25 << 22);
        assert_eq!(Buckets::of(25e-6, 2.0 / 12.5e9), Buckets::with_others(25 << 18));
        assert_eq!(Buckets::with_others(25 << 20), Buckets::default());
        assert_eq!(Buckets::of(0.0, 1e-9).others, 25 << 16);
    }
}
