//! The end of a step whose ranks divide the optimizer's state: behind each update the shares are joined.
//!
//! A program updates all parameters and joins all of them then, one after the other. Here the operations of
//! the end go by the buckets of gradients that they need, and a gather starts right behind the last update of
//! its bucket, while later gradients travel and later updates run:
//!
//! ```text
//!   wait for gradients 1 ; updates 1 ; start parameters 1
//!   wait for gradients 2 ; updates 2 ; start parameters 2
//!   wait for gradients 3 ; updates 3 ; start parameters 3 ; wait for parameters 1, copy them to their places
//!   ..
//!   wait for parameters 2, 3
//! ```
//!
//! What is joined lies in memory of the step until it was waited for, so only [`UNDER_WAY`] gathers travel
//! while others start. It is copied to where the parameters are: a step that stops at an index has
//! overwritten none of them, although the ranks may already have exchanged some.

use kiln_graph::{CollectiveKind, Graph, Node, NodeData, Op, Rewriter, TypeError};
use rustc_hash::{FxHashMap, FxHashSet};

use super::bucket::{self, Bucket, Member};
use super::{Buckets, Group, index, is_copied};

/// How many buckets of parameters travel while another one starts.
pub(crate) const UNDER_WAY: usize = 2;

/// The gathers of a graph that can be put off to its end: all, or none if an operation whose place matters
/// follows one of them, or stands at the end among them.
pub(super) fn gathers(graph: &Graph, groups: &[Group]) -> Vec<Node> {
    let is_gather = |data: &NodeData| {
        let kind = CollectiveKind::AllGather;
        matches!(data.op, Op::Collective(it) if it.kind == kind && !it.started)
            && graph.ty(data.outputs[0]).numel() > 0
    };
    let mut follows = vec![false; graph.num_nodes()];
    let mut gathers = Vec::new();
    for (node, data) in graph.nodes() {
        let behind = behind(graph, &follows, data);
        if behind && data.op.is_impure() {
            return Vec::new();
        }
        if is_gather(data) {
            gathers.push(node);
        }
        follows[index(node)] = behind || is_gather(data);
    }
    let from = begin(groups, &gathers, graph.num_nodes());
    let sums = groups.iter().flat_map(|group| &group.buckets);
    let sums: FxHashSet<Node> = sums
        .flat_map(|bucket| bucket.members.iter().map(|member| member.node))
        .collect();
    let keeps_its_place = |(node, data): (Node, &NodeData)| match data.op {
        Op::Parameter { .. } | Op::Scalar { .. } => false,
        _ => data.op.is_impure() && !sums.contains(&node) && !is_gather(data),
    };
    match graph.nodes().skip(from).any(keeps_its_place) {
        true => Vec::new(),
        false => gathers,
    }
}

/// Whether an operand was made by a node of which `of` says so.
fn behind(graph: &Graph, of: &[bool], data: &NodeData) -> bool {
    let mut operands = data.inputs.iter();
    operands.any(|&operand| of[index(graph.value(operand).node)])
}

/// The first node of the end; the number of nodes if it has none.
pub(super) fn begin(groups: &[Group], gathers: &[Node], nodes: usize) -> usize {
    let Some(first) = gathers.first() else {
        return nodes;
    };
    let shares = groups
        .iter()
        .filter(|group| group.buckets.iter().any(Bucket::is_of_shares));
    shares.map(|group| group.needed).fold(index(*first), usize::min)
}

/// The nodes of the end.
pub(super) struct Tail<'a> {
    graph: &'a Graph,
    from: usize,
    /// Buckets of gradients that are waited for here.
    sums: Vec<Bucket>,
    gathers: Vec<Bucket>,
    /// How many of them were started, and waited for.
    started: usize,
    waited: usize,
    /// For each node the number of buckets of `sums` up to the last that it needs.
    needs: Vec<usize>,
    /// Whether a node comes behind a gather.
    follows: Vec<bool>,
}

impl<'a> Tail<'a> {
    pub(super) fn new(
        graph: &'a Graph,
        sums: Vec<Bucket>,
        gathers: Vec<Node>,
        from: usize,
        sizes: &Buckets,
    ) -> Self {
        let mut number: FxHashMap<Node, usize> = FxHashMap::default();
        for (bucket, at) in sums.iter().zip(1..) {
            number.extend(bucket.members.iter().map(|member| (member.node, at)));
        }
        let mut needs = vec![0; graph.num_nodes()];
        number.iter().for_each(|(&node, &at)| needs[index(node)] = at);
        let mut follows = vec![false; graph.num_nodes()];
        for (node, data) in graph.nodes().skip(from) {
            let operands = data.inputs.iter().map(|&it| needs[index(graph.value(it).node)]);
            needs[index(node)] = operands.fold(needs[index(node)], usize::max);
            follows[index(node)] = gathers.contains(&node) || behind(graph, &follows, data);
        }
        let users = graph.users();
        let mut members: Vec<Member> = gathers
            .iter()
            .map(|&node| Member::new(graph, &users, node, graph.node(node)))
            .collect();
        members.sort_by_key(|member| (needs[index(member.node)], member.node));
        let mut buckets = Vec::new();
        for member in members {
            bucket::join(graph, &mut buckets, member, sizes);
        }
        Self {
            graph,
            from,
            sums,
            gathers: buckets,
            started: 0,
            waited: 0,
            needs,
            follows,
        }
    }

    /// Adds all nodes from the first one on, but for those `joined` to buckets.
    pub(super) fn emit(mut self, new: &mut Rewriter<'_>, joined: &FxHashSet<Node>) -> Result<(), TypeError> {
        let mut levels: Vec<Vec<Node>> = vec![Vec::new(); self.sums.len() + 1];
        for (node, _) in self.graph.nodes().skip(self.from) {
            if !(joined.contains(&node) || self.follows[index(node)]) {
                levels[self.needs[index(node)]].push(node);
            }
        }
        for (level, nodes) in levels.into_iter().enumerate() {
            if let Some(before) = level.checked_sub(1) {
                self.sums[before].wait(self.graph, new)?;
            }
            for node in nodes {
                if !is_copied(new, self.graph.node(node)) {
                    new.copy(node)?;
                }
            }
            // In their order: a bucket whose operands are there waits for those before it.
            for bucket in self.sums.iter_mut().filter(|bucket| !bucket.is_begun()) {
                let is_made = |member: &Member| new.get(member.operand).is_some();
                if !bucket.members.iter().all(is_made) {
                    break;
                }
                bucket.start(self.graph, new)?;
            }
            self.gather(new, joined)?;
        }
        while self.waited < self.gathers.len() {
            self.wait(new, joined)?;
        }
        self.rest(new, joined)
    }

    /// Starts the gathers whose shares are there.
    fn gather(&mut self, new: &mut Rewriter<'_>, joined: &FxHashSet<Node>) -> Result<(), TypeError> {
        while let Some(bucket) = self.gathers.get_mut(self.started)
            && bucket
                .members
                .iter()
                .all(|member| new.get(member.operand).is_some())
        {
            bucket.start(self.graph, new)?;
            self.started += 1;
            if self.started > self.waited + UNDER_WAY {
                self.wait(new, joined)?;
            }
        }
        Ok(())
    }

    /// Waits for the first gather that is under way, and goes on with what it gives.
    fn wait(&mut self, new: &mut Rewriter<'_>, joined: &FxHashSet<Node>) -> Result<(), TypeError> {
        self.gathers[self.waited].wait(self.graph, new)?;
        self.waited += 1;
        self.rest(new, joined)
    }

    /// Copies what comes behind gathers and has its operands.
    fn rest(&self, new: &mut Rewriter<'_>, joined: &FxHashSet<Node>) -> Result<(), TypeError> {
        for (node, data) in self.graph.nodes().skip(self.from) {
            let is_ready = || data.inputs.iter().all(|&operand| new.get(operand).is_some());
            if self.follows[index(node)] && !joined.contains(&node) && !is_copied(new, data) && is_ready() {
                new.copy(node)?;
            }
        }
        Ok(())
    }
}
