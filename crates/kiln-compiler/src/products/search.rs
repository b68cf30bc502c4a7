//! Finds products that become one.

use kiln_graph::op::{BinaryOp, Op};
use kiln_graph::{DType, Graph, Node, Users, Value};
use rustc_hash::{FxHashMap, FxHashSet};

use super::{Biased, Cut, Group, free};
use crate::policy::Policy;
use crate::schedule::fuse::Section;

/// Other products that may stand between two that become one: more, and what they read and make would wait
/// too long.
const BETWEEN: usize = 4;

pub(super) struct Search<'a> {
    graph: &'a Graph,
    policy: &'a Policy,
    /// What rows and columns of a piece are multiples of.
    piece: usize,
    users: Users,
    /// Products that may be joined, in order.
    products: Vec<Node>,
    taken: FxHashSet<Node>,
}

/// A term of a sum: a product, and what is between it and the sum, from the product on.
struct Term {
    product: Node,
    between: Vec<Node>,
}

/// A product that may share an operand with others.
struct Candidate {
    node: Node,
    biased: Option<Biased>,
    is_kept: bool,
}

/// Candidates that share an operand, by their numbers.
struct List {
    cut: Cut,
    axis: usize,
    members: Vec<usize>,
}

impl<'a> Search<'a> {
    pub fn new(graph: &'a Graph, policy: &'a Policy, piece: usize) -> Self {
        let products = graph.nodes().filter(|(_, data)| match &data.op {
            Op::DotGeneral(dims) => {
                let takes = |&value: &Value| {
                    policy.epilogue_types.contains(&graph.dtype(value)) && graph.ty(value).numel() > 0
                };
                dims.a_batch.is_empty() && data.inputs.iter().all(takes)
            }
            _ => false,
        });
        Self {
            graph,
            policy,
            piece,
            users: graph.users(),
            products: products.map(|(node, _)| node).collect(),
            taken: FxHashSet::default(),
        }
    }

    fn result(&self, node: Node) -> Value {
        self.graph.node(node).outputs[0]
    }

    fn is_large(&self, elements: usize) -> bool {
        elements >= self.policy.epilogue_elements.max(1)
    }

    /// Whether nodes may share a kernel.
    fn same_section(&self, one: Node, other: Node) -> bool {
        Section::of(self.graph, one) == Section::of(self.graph, other)
    }

    /// Whether two products differ in nothing but operands and their extents.
    fn are_alike(&self, one: Node, other: Node) -> bool {
        let graph = self.graph;
        let [one, other] = [one, other].map(|node| graph.node(node));
        let is_alike = |a: Value, b: Value| {
            graph.shape(a).rank() == graph.shape(b).rank() && graph.dtype(a) == graph.dtype(b)
        };
        one.op == other.op
            && is_alike(one.outputs[0], other.outputs[0])
            && one
                .inputs
                .iter()
                .zip(&other.inputs)
                .all(|(&a, &b)| is_alike(a, b))
    }

    /// Sums with several products among their terms.
    pub fn sums(&mut self) -> Vec<Group> {
        let graph = self.graph;
        let mut groups = Vec::new();
        for (root, data) in graph.nodes() {
            let [value] = data.outputs[..] else { continue };
            let is_inner = || {
                let user = self.users.single(value);
                user.is_some_and(|user| self.is_sum(user) && self.same_section(user, root))
            };
            if !self.is_sum(root) || is_inner() {
                continue;
            }
            let mut leaves = Vec::new();
            self.leaves(root, &mut leaves);
            let (mut terms, mut rest): (Vec<Term>, Vec<Value>) = (Vec::new(), Vec::new());
            for leaf in leaves {
                let term = self
                    .term(root, leaf)
                    .filter(|_| terms.len() < Cut::Depth.most_pieces());
                match term.filter(|term| terms.first().is_none_or(|first| self.adds_to(first, term))) {
                    Some(term) => terms.push(term),
                    None => rest.push(leaf),
                }
            }
            if let [first, _, ..] = &terms[..]
                && let Op::DotGeneral(dims) = &graph.node(first.product).op
            {
                let products: Vec<Node> = terms.iter().map(|term| term.product).collect();
                self.taken.extend(&products);
                groups.push(Group::Sum {
                    root,
                    products,
                    axes: [dims.a_contract[0], dims.b_contract[0]],
                    between: first.between.clone(),
                    rest,
                });
            }
        }
        groups
    }

    fn is_sum(&self, node: Node) -> bool {
        matches!(self.graph.node(node).op, Op::Binary(BinaryOp::Add))
    }

    /// The terms of the sum `node`, in order, through sums that nothing else reads.
    fn leaves(&self, node: Node, leaves: &mut Vec<Value>) {
        for &operand in &self.graph.node(node).inputs {
            let maker = self.graph.value(operand).node;
            let is_inner =
                self.is_sum(maker) && self.users.single(operand).is_some() && self.same_section(maker, node);
            match is_inner {
                true => self.leaves(maker, leaves),
                false => leaves.push(operand),
            }
        }
    }

    /// The product that `leaf`, a term of the sum `root`, is, if nothing else reads it.
    fn term(&self, root: Node, leaf: Value) -> Option<Term> {
        let mut value = leaf;
        let mut between = Vec::new();
        loop {
            self.users.single(value)?;
            let node = self.graph.value(value).node;
            let data = self.graph.node(node);
            match &data.op {
                Op::DotGeneral(dims) => {
                    let extent = self.graph.shape(data.inputs[0])[*dims.a_contract.first()?];
                    // A sum of two numbers of f16 may be none, but is one of f32.
                    let dtypes = [value, leaf].map(|value| self.graph.dtype(value));
                    let fits = dims.a_contract.len() == 1
                        && (dtypes[0] != DType::F16 || dtypes[1] == DType::F16)
                        && self.products.binary_search(&node).is_ok()
                        && !self.taken.contains(&node)
                        && extent.is_multiple_of(self.policy.epilogue_unit)
                        && self.is_large(self.graph.ty(value).numel())
                        && self.same_section(node, root);
                    between.reverse();
                    return fits.then_some(Term {
                        product: node,
                        between,
                    });
                }
                Op::Cast(dtype) if dtype.is_float() => {}
                Op::Reshape(_) | Op::Transpose(_) => {}
                _ => return None,
            }
            between.push(node);
            value = data.inputs[0];
        }
    }

    /// Whether the products of two terms differ in nothing but operands and depth.
    fn adds_to(&self, first: &Term, term: &Term) -> bool {
        let op = |node: &Node| &self.graph.node(*node).op;
        let ty = |term: &Term| self.graph.ty(self.result(term.product));
        self.are_alike(first.product, term.product)
            && ty(first) == ty(term)
            && first.between.iter().map(op).eq(term.between.iter().map(op))
    }

    /// Products of one operand with several others.
    pub fn shared(&mut self) -> Vec<Group> {
        let graph = self.graph;
        // Parts of a bucket are made in their places, one by one.
        let travels = graph
            .nodes()
            .any(|(_, data)| matches!(data.op, Op::Collective(_)));
        let is_forward = |node: Node| !graph.node(node).provenance.phase.is_after_forward();
        let mut candidates: Vec<Candidate> = Vec::new();
        let mut lists: Vec<List> = Vec::new();
        let mut found: FxHashMap<(Value, bool), Vec<usize>> = FxHashMap::default();
        for &node in &self.products {
            let [left, right] = graph.node(node).inputs[..] else {
                continue;
            };
            if self.taken.contains(&node) || (travels && !is_forward(node)) {
                continue;
            }
            let candidate = self.candidate(node);
            let number = candidates.len();
            for (key, cut) in [((left, false), Cut::Columns), ((right, true), Cut::Rows)] {
                let Some(axis) = self.piece(&candidate, cut) else {
                    continue;
                };
                let own = found.entry(key).or_default();
                let goes = |list: &&usize| self.goes_with(&candidates, &lists[**list], &candidate);
                match own.iter().find(goes) {
                    Some(&list) => lists[list].members.push(number),
                    None => {
                        own.push(lists.len());
                        lists.push(List {
                            cut,
                            axis,
                            members: vec![number],
                        });
                    }
                }
            }
            candidates.push(candidate);
        }
        // The longest first: a product may be in two.
        lists.sort_by_key(|list| std::cmp::Reverse(list.members.len()));
        let mut groups = Vec::new();
        for List { cut, axis, members } in lists {
            let members = members.into_iter().map(|number| &candidates[number]);
            let free: Vec<&Candidate> = members.filter(|it| !self.taken.contains(&it.node)).collect();
            let products: Vec<Node> = free.iter().map(|it| it.node).collect();
            let elements = products.iter().map(|&node| graph.ty(self.result(node)).numel());
            if products.len() > 1 && self.is_large(elements.sum()) {
                self.taken.extend(&products);
                let biased = free.iter().filter(|_| cut == Cut::Columns);
                groups.push(Group::Shared {
                    products,
                    cut,
                    axis,
                    biased: biased.filter_map(|it| it.biased.clone()).collect(),
                });
            }
        }
        groups
    }

    fn candidate(&self, node: Node) -> Candidate {
        let biased = self.biased(node);
        let last = biased.as_ref().map(|biased| biased.result(self.graph));
        Candidate {
            node,
            is_kept: self.is_kept(last.unwrap_or(self.result(node))),
            biased,
        }
    }

    /// The dimension along which the operand that `cut` names can be a piece of a larger one; none where it
    /// cannot, or a nest would be computed behind the product.
    fn piece(&self, candidate: &Candidate, cut: Cut) -> Option<usize> {
        let (graph, data) = (self.graph, self.graph.node(candidate.node));
        let side = usize::from(cut == Cut::Columns);
        let Op::DotGeneral(dims) = &data.op else {
            return None;
        };
        let axis = free(graph, dims, data.inputs[side], side)?;
        let extent = graph.shape(data.inputs[side])[axis];
        let is_biased = || cut == Cut::Columns && candidate.biased.is_some();
        let fits =
            extent.is_multiple_of(self.piece) && (!self.may_be_followed(data.outputs[0]) || is_biased());
        fits.then_some(axis)
    }

    /// What adds a bias to the product `node`, if that is all that may follow it in its kernel.
    fn biased(&self, node: Node) -> Option<Biased> {
        let graph = self.graph;
        let mut value = self.result(node);
        let (mut nodes, mut bias) = (Vec::new(), None);
        while bias.is_none() || !self.policy.epilogue_types.contains(&graph.dtype(value)) {
            let user = self.users.single(value)?;
            let data = graph.node(user);
            match (&data.op, &data.inputs[..]) {
                (Op::Cast(dtype), _) if dtype.is_float() => {}
                (Op::Binary(BinaryOp::Add), &[a, b]) if bias.is_none() => {
                    let other = if a == value { b } else { a };
                    let Op::Broadcast { dims, .. } = &graph.def(other).op else {
                        return None;
                    };
                    let source = graph.def(other).inputs[0];
                    let last = graph.shape(other).rank() - 1;
                    let is_row = dims[..] == [last] && graph.shape(source)[0] == graph.shape(other)[last];
                    bias = Some(is_row.then_some(source)?);
                }
                _ => return None,
            }
            if !self.same_section(node, user) {
                return None;
            }
            nodes.push(user);
            value = data.outputs[0];
        }
        let bias = bias.filter(|_| !self.may_be_followed(value))?;
        Some(Biased { nodes, bias })
    }

    /// Whether every reader of a product of 16 bits may be a nest that follows it in its kernel: operations
    /// that read each element once, at its own place.
    fn may_be_followed(&self, value: Value) -> bool {
        if !self.policy.epilogue_types.contains(&self.graph.dtype(value)) {
            return false;
        }
        let mut left = vec![value];
        let mut pointwise = false;
        while let Some(value) = left.pop() {
            for &user in self.users.of(value) {
                let data = self.graph.node(user);
                match &data.op {
                    Op::Reshape(_) | Op::Transpose(_) | Op::Cast(_) => left.push(data.outputs[0]),
                    // Each element would be read at several places.
                    Op::Slice { .. } | Op::Flip(_) | Op::Broadcast { .. } => return false,
                    op => pointwise |= op.is_pointwise(),
                }
            }
        }
        pointwise
    }

    /// Whether the backward pass reads `value`. What it does not read would be kept beside what it reads:
    /// keys, which are rotated in the forward pass, beside values.
    fn is_kept(&self, value: Value) -> bool {
        let mut left = vec![value];
        while let Some(value) = left.pop() {
            for &user in self.users.of(value) {
                let data = self.graph.node(user);
                match data.op {
                    Op::Reshape(_) | Op::Transpose(_) | Op::Slice { .. } => left.push(data.outputs[0]),
                    _ if data.provenance.phase.is_after_forward() => return true,
                    _ => {}
                }
            }
        }
        false
    }

    /// Whether a candidate may join a list that has room for it, whose members are all before it.
    fn goes_with(&self, candidates: &[Candidate], list: &List, candidate: &Candidate) -> bool {
        let List { cut, members, .. } = list;
        if members.len() >= cut.most_pieces() {
            return false;
        }
        let nodes: Vec<Node> = members.iter().map(|&number| candidates[number].node).collect();
        let (first, last) = (&candidates[members[0]], nodes[nodes.len() - 1]);
        let place = |node: Node| self.products.partition_point(|&product| product < node);
        let behind = |candidate: &Candidate| {
            let nodes = candidate.biased.as_ref().map(|biased| biased.nodes.iter());
            nodes.map(|nodes| nodes.map(|&node| &self.graph.node(node).op).collect::<Vec<_>>())
        };
        self.are_alike(first.node, candidate.node)
            && place(candidate.node) - place(last) <= BETWEEN
            && self.same_section(first.node, candidate.node)
            && first.is_kept == candidate.is_kept
            && behind(first) == behind(candidate)
            && !self.depends(candidate.node, &nodes)
    }

    /// Whether `node` needs a result of `nodes`.
    fn depends(&self, node: Node, nodes: &[Node]) -> bool {
        let mut seen: FxHashSet<Node> = FxHashSet::default();
        let mut left = vec![node];
        while let Some(node) = left.pop() {
            for &operand in &self.graph.node(node).inputs {
                let maker = self.graph.value(operand).node;
                if nodes.contains(&maker) {
                    return true;
                }
                if maker > nodes[0] && seen.insert(maker) {
                    left.push(maker);
                }
            }
        }
        false
    }
}
