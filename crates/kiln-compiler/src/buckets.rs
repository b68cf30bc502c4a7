//! Buckets: collectives that are started early, several tensors at once, and waited for late.
//!
//! A recorded step has one [`all_reduce`](kiln_graph::CollectiveKind::AllReduce) for each gradient, in front
//! of the optimizer's first use of it. This pass runs after the partition. It joins the sums to *buckets*, in
//! the order in which the backward pass computes the gradients. A bucket starts right behind the last of its
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
//! Ranks that divide the optimizer's state have a
//! [`reduce_scatter`](kiln_graph::CollectiveKind::ReduceScatter) in place of each sum, and an
//! [`all_gather`](kiln_graph::CollectiveKind::AllGather) behind each update (`tail`). A bucket of those is a
//! matrix with a row for each rank (`bucket`).
//!
//! Sums go in the order of ranks, element by element, so buckets change no bit of a result
//! (kiln-cpu's `tests/ranks.rs`, kiln-distributed's `buckets_change_no_bit`), and their sizes may follow from
//! a measurement ([`Buckets::of`]). Libraries that add up in an order of their own need fixed sizes.
//!
//! All ranks must start the same buckets in the same order, also where their batches have other shapes, and the order in
//! which gradients are made may follow from the shape. So the order may be given ([`crate::Options::sums`]). A bucket
//! then starts behind the last of its own gradients and of those of the buckets before it.

mod bucket;
mod tail;

use std::fmt;

use kiln_graph::{Graph, Node, NodeData, Op, Rewriter, TypeError, Users, Value};
use rustc_hash::{FxHashMap, FxHashSet};

use bucket::{Bucket, Member};
use tail::Tail;
pub(crate) use tail::UNDER_WAY;
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

/// `graph` with its collectives in buckets; none if it has none that can be joined. Sums are started in the given
/// `order` ([`order()`]) if that is one of this graph.
///
/// # Errors
/// If a node does not fit: a bug of the pass.
pub fn run(graph: &Graph, sizes: &Buckets, order: Option<&[u32]>) -> Result<Option<Graph>, TypeError> {
    let sums = sums(graph, &graph.users());
    let sums = order.and_then(|order| in_order(&sums, order)).unwrap_or(sums);
    let mut joined: FxHashSet<Node> = sums.iter().map(|sum| sum.node).collect();
    let mut groups = groups(graph, sums, sizes);
    let gathers = tail::gathers(graph, &groups);
    joined.extend(&gathers);
    if joined.is_empty() {
        return Ok(None);
    }
    let from = tail::begin(&groups, &gathers, graph.num_nodes());
    let mut new = Rewriter::new(graph);
    for (id, data) in graph.nodes().take(from) {
        let number = index(id);
        for group in groups.iter_mut().filter(|group| group.needed == number) {
            group.wait(graph, &mut new)?;
        }
        if !(joined.contains(&id) || is_copied(&new, data)) {
            new.copy(id)?;
        }
        for group in &mut groups {
            group.start(graph, &mut new, number)?;
        }
    }
    let late = groups.into_iter().filter(|group| group.needed >= from);
    let sums: Vec<Bucket> = late.flat_map(|group| group.buckets).collect();
    Tail::new(graph, sums, gathers, from, sizes).emit(&mut new, &joined)?;
    Ok(Some(new.finish()))
}

/// The position of a node in its graph.
fn index(node: Node) -> usize {
    node.as_u32() as usize
}

/// Whether a node is in the new graph already.
fn is_copied(new: &Rewriter<'_>, data: &NodeData) -> bool {
    data.outputs.iter().any(|&value| new.get(value).is_some())
}

/// Whether an operation is a sum over ranks, or a share of one, that may travel with others.
fn is_sum(op: &Op) -> bool {
    matches!(op, Op::Collective(it) if it.kind.reduces() && !it.started)
}

/// All sums over ranks, in the order in which they can be started.
fn sums(graph: &Graph, users: &Users) -> Vec<Member> {
    let of = |(node, data): (Node, &NodeData)| Member::new(graph, users, node, data);
    let nodes = graph.nodes().filter(|(_, data)| is_sum(&data.op));
    let mut sums: Vec<Member> = nodes
        .filter(|(_, data)| graph.ty(data.outputs[0]).numel() > 0)
        .map(of)
        .collect();
    sums.sort_by_key(|sum| (sum.ready, sum.node));
    sums
}

/// The order in which the sums of a graph can be started, each by its position among them.
pub fn order(graph: &Graph) -> Vec<u32> {
    let sums = sums(graph, &graph.users());
    let mut nodes: Vec<Node> = sums.iter().map(|sum| sum.node).collect();
    nodes.sort_unstable();
    let position = |sum: &Member| nodes.binary_search(&sum.node).unwrap_or_default() as u32;
    sums.iter().map(position).collect()
}

/// `sums` in an order, as soon as they can be started in it; none if it is no order of so many, or a sum of them is
/// needed before all that come earlier can be started.
fn in_order(sums: &[Member], order: &[u32]) -> Option<Vec<Member>> {
    let mut nodes: Vec<&Member> = sums.iter().collect();
    nodes.sort_unstable_by_key(|sum| sum.node);
    let mut ordered = Vec::with_capacity(sums.len());
    let mut taken = vec![false; sums.len()];
    let mut behind = 0;
    for &position in order {
        let position = position as usize;
        let mut sum = (*nodes.get(position)?).clone();
        if std::mem::replace(&mut taken[position], true) {
            return None;
        }
        behind = sum.ready.max(behind);
        sum.ready = behind;
        if sum.needed <= sum.ready {
            return None;
        }
        ordered.push(sum);
    }
    (ordered.len() == sums.len()).then_some(ordered)
}

/// Buckets that are all started before the first of their sums is needed.
#[derive(Debug)]
struct Group {
    buckets: Vec<Bucket>,
    /// The node in front of which their waits stand.
    needed: usize,
}

/// Divides sums into buckets.
fn groups(graph: &Graph, sums: Vec<Member>, sizes: &Buckets) -> Vec<Group> {
    let mut groups: Vec<Group> = Vec::new();
    for sum in sums {
        if groups.last().is_none_or(|group| group.needed <= sum.ready) {
            groups.push(Group {
                buckets: Vec::new(),
                needed: usize::MAX,
            });
        }
        let Some(group) = groups.last_mut() else { continue };
        group.needed = group.needed.min(sum.needed);
        bucket::join(graph, &mut group.buckets, sum, sizes);
    }
    groups
}

impl Group {
    /// Starts the buckets of which `number` is the last node that they wait for.
    fn start(&mut self, graph: &Graph, new: &mut Rewriter<'_>, number: usize) -> Result<(), TypeError> {
        for bucket in &mut self.buckets {
            if bucket.members.last().is_some_and(|sum| sum.ready == number) {
                bucket.start(graph, new)?;
            }
        }
        Ok(())
    }

    /// Waits for all buckets; from now on their sums replace those of the old graph.
    fn wait(&mut self, graph: &Graph, new: &mut Rewriter<'_>) -> Result<(), TypeError> {
        self.buckets.iter().try_for_each(|bucket| bucket.wait(graph, new))
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
    use kiln_graph::op::UnaryOp;
    use kiln_graph::{Collective, DType, Provenance, TensorType};

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

    /// Sums of three gradients, made in their order; the last one's is needed before the others'.
    fn three_sums() -> Graph {
        let mut graph = Graph::new("step");
        let p = Provenance::default();
        let parameters: Vec<Value> = (0..3)
            .map(|_| graph.parameter(TensorType::new(DType::F32, [4])))
            .collect();
        let mut gradients = Vec::new();
        for &parameter in &parameters {
            gradients.push(graph.unary(UnaryOp::Exp, parameter, &p).unwrap());
        }
        for gradient in gradients.into_iter().rev() {
            let sum = Op::Collective(Collective::average(2));
            let sum = graph.add(sum, &[gradient], &p).unwrap();
            graph.output(sum, None);
        }
        graph
    }

    /// The parameters whose gradients are summed, in the order in which that is started.
    fn started(graph: &Graph) -> Vec<u32> {
        let starts = graph
            .nodes()
            .filter(|(_, data)| matches!(data.op, Op::Collective(it) if it.started));
        let parameter = |data: &NodeData| match graph.def(graph.def(data.inputs[0]).inputs[0]).op {
            Op::Parameter { index, .. } => index,
            _ => u32::MAX,
        };
        starts.map(|(_, data)| parameter(data)).collect()
    }

    /// Autocast leaves gradients of 16 bits, and casts them where they are summed.
    #[test]
    fn a_gradient_that_is_cast_travels_as_soon_as_it_is_made() {
        let mut graph = Graph::new("step");
        let p = Provenance::default();
        let parameters: Vec<Value> = (0..2)
            .map(|_| graph.parameter(TensorType::new(DType::BF16, [4])))
            .collect();
        let mut gradients = Vec::new();
        for &parameter in parameters.iter().rev() {
            gradients.push(graph.unary(UnaryOp::Exp, parameter, &p).unwrap());
        }
        for gradient in gradients.into_iter().rev() {
            let wide = graph.add(Op::Cast(DType::F32), &[gradient], &p).unwrap();
            let sum = graph
                .add(Op::Collective(Collective::average(2)), &[wide], &p)
                .unwrap();
            graph.output(sum, None);
        }
        let bucketed = run(&graph, &Buckets::NONE, None).unwrap().unwrap();
        kiln_graph::verify::verify(&bucketed).unwrap();
        let names: Vec<&str> = bucketed.nodes().map(|(_, data)| data.op.name()).collect();
        let sum = ["cast", "all_reduce"];
        let expected = [
            &["parameter", "parameter", "exp"][..],
            &sum,
            &["exp"],
            &sum,
            &["collective_wait"; 2],
        ];
        assert_eq!(names, expected.concat());
    }

    #[test]
    fn sums_are_started_in_a_given_order() {
        let graph = three_sums();
        // Positions among the sums, which the graph has backwards.
        assert_eq!(order(&graph), [2, 1, 0]);
        let run = |order: Option<&[u32]>| {
            let bucketed = run(&graph, &Buckets::NONE, order).unwrap().unwrap();
            kiln_graph::verify::verify(&bucketed).unwrap();
            started(&bucketed)
        };
        assert_eq!(run(None), [0, 1, 2]);
        assert_eq!(run(Some(&[0, 2, 1])), [2, 0, 1]);
        assert_eq!(run(Some(&[0, 1, 2])), [2, 1, 0]);
        // No order of three sums.
        assert_eq!(run(Some(&[0, 1])), [0, 1, 2]);
        assert_eq!(run(Some(&[0, 1, 1])), [0, 1, 2]);
    }
}
