//! Products as one: those that share an operand, and those that are added up.
//!
//! The projections to queries, keys and values read the same rows, and so do the gradients of their weights.
//! The gradient of those rows is a sum of three products. Each alone is small for a large device: it ends
//! before all of it is at work, and the terms of a sum pass through memory. As one product they do not:
//!
//! ```text
//!   q = dot_general x, wq                  w = concat wq, wk, wv
//!   k = dot_general x, wk            ──►   y = dot_general x, w
//!   v = dot_general x, wv                  q = slice y ; k = slice y ; v = slice y
//!
//!   a = dot_general p, u                   l = concat p, q ; r = concat u, v
//!   b = dot_general q, v             ──►   s = dot_general l, r
//!   s = add a, b
//! ```
//!
//! These concatenations are never made: a target that asks for this ([`Policy::product_piece`]) has products
//! that read an operand in pieces ([`Cut`]). The pass runs after the partition, which knows each product by
//! itself, and a scheduler that cannot read the pieces where they are stored makes the concatenation after
//! all. Either way the graph says what is computed.
//!
//! Biases that are added to such products are one, too: a nest behind the product adds it.
//!
//! A sum of products of bf16 is rounded once, and not once for each term.

use kiln_graph::op::{BinaryOp, Dims, DotDims, Op};
use kiln_graph::{DType, Graph, Node, Provenance, Rewriter, Shape, TypeError, Users, Value};
use rustc_hash::{FxHashMap, FxHashSet};

use crate::options::Options;
use crate::policy::Policy;
use crate::schedule::fuse::Section;

/// Other products that may stand between two that become one: more, and what they read and make would wait
/// too long.
const BETWEEN: usize = 4;

/// Along which dimension a product's operands come in pieces.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Cut {
    /// The left operand, along its rows.
    Rows,
    /// The right operand, along its columns.
    Columns,
    /// Both, along what is summed.
    Depth,
}

/// The dimension along which the operands of `node` are concatenations, and no others, as this pass makes
/// them.
pub fn cut(graph: &Graph, node: Node) -> Option<Cut> {
    let data = graph.node(node);
    let Op::DotGeneral(dims) = &data.op else {
        return None;
    };
    let [left, right] = data.inputs[..] else {
        return None;
    };
    let axis = |value: Value| match graph.def(value).op {
        Op::Concat { axis } => Some(axis),
        _ => None,
    };
    let extents = |value: Value, axis: usize| -> Vec<usize> {
        let pieces = graph.def(value).inputs.iter();
        pieces.map(|&piece| graph.shape(piece)[axis]).collect()
    };
    match (axis(left), axis(right)) {
        (Some(a), Some(b)) => {
            let is_depth = dims.a_contract[..] == [a] && dims.b_contract[..] == [b];
            (is_depth && extents(left, a) == extents(right, b)).then_some(Cut::Depth)
        }
        (Some(axis), None) => (free(graph, dims, left, 0)? == axis).then_some(Cut::Rows),
        (None, Some(axis)) => (free(graph, dims, right, 1)? == axis).then_some(Cut::Columns),
        (None, None) => None,
    }
}

/// [`cut`], if the product reads the pieces where they are stored: of types, sizes and extents that a target
/// with such products takes.
pub fn read_in_pieces(graph: &Graph, policy: &Policy, node: Node) -> Option<Cut> {
    let unit = policy.product_piece?;
    let cut = cut(graph, node)?;
    let data = graph.node(node);
    let Op::DotGeneral(dims) = &data.op else {
        return None;
    };
    let (side, unit) = match cut {
        Cut::Rows => (0, unit),
        Cut::Columns => (1, unit),
        Cut::Depth => (0, policy.epilogue_unit),
    };
    let whole = data.inputs[side];
    let axis = match cut {
        Cut::Depth => dims.a_contract[0],
        _ => free(graph, dims, whole, side)?,
    };
    let mut pieces = graph.def(whole).inputs.iter();
    let fits = dims.a_batch.is_empty()
        && data
            .inputs
            .iter()
            .all(|&value| policy.epilogue_types.contains(&graph.dtype(value)))
        && graph.ty(data.outputs[0]).numel() >= policy.epilogue_elements.max(1)
        && pieces.all(|&piece| graph.shape(piece)[axis] > 0 && graph.shape(piece)[axis].is_multiple_of(unit));
    fits.then_some(cut)
}

/// The stored values, and windows on such, that operand `operand` of a product consists of.
pub fn pieces(graph: &Graph, node: Node, cut: Option<Cut>, operand: usize) -> &[Value] {
    let inputs = &graph.node(node).inputs;
    let is_cut = match cut {
        Some(Cut::Depth) => operand < 2,
        Some(Cut::Rows) => operand == 0,
        Some(Cut::Columns) => operand == 1,
        None => false,
    };
    match is_cut {
        true => &graph.def(inputs[operand]).inputs,
        false => std::slice::from_ref(&inputs[operand]),
    }
}

/// The dimension of an operand that is neither batch nor summed, if there is exactly one.
fn free(graph: &Graph, dims: &DotDims, operand: Value, side: usize) -> Option<usize> {
    let (batch, contract) = match side {
        0 => (&dims.a_batch, &dims.a_contract),
        _ => (&dims.b_batch, &dims.b_contract),
    };
    match DotDims::free(graph.shape(operand).rank(), batch, contract)[..] {
        [axis] => Some(axis),
        _ => None,
    }
}

/// Joins the products of `graph` where `policy` asks for it, and `options` allow it; none if there is nothing
/// to join.
///
/// # Errors
/// Only if it makes an ill-typed node, which would be a bug.
pub fn join(graph: &Graph, options: &Options, policy: &Policy) -> Result<Option<Graph>, TypeError> {
    let Some(piece) = policy.product_piece.filter(|_| options.transform && options.fuse) else {
        return Ok(None);
    };
    let mut search = Search::new(graph, policy, piece);
    let mut groups = search.sums();
    groups.extend(search.shared());
    if groups.is_empty() {
        return Ok(None);
    }
    // Products that do not need each other may do so through others that become one. Then one stays as it is.
    loop {
        match Writer::new(graph, &groups).write()? {
            Ok(joined) => return Ok(Some(joined)),
            Err(group) => drop(groups.remove(group)),
        }
    }
}

/// Products that become one.
enum Group {
    /// Terms of the sum `root`.
    Sum {
        root: Node,
        /// The products, by what is added.
        terms: Vec<Term>,
        /// What is added besides.
        rest: Vec<Value>,
    },
    /// Products that share an operand: `cut` says which one they do not share.
    Shared {
        nodes: Vec<Node>,
        /// What adds a bias to each, if something does.
        biased: Vec<Biased>,
        cut: Cut,
    },
}

/// A term of a sum: a product, and what is between it and the sum, from the product on.
struct Term {
    product: Node,
    between: Vec<Node>,
}

/// What adds a bias to a product: operations that nothing else reads the operands of.
#[derive(Clone)]
struct Biased {
    /// From the product on: casts, and one addition.
    nodes: Vec<Node>,
    /// The bias, a number for each column.
    bias: Value,
}

struct Search<'a> {
    graph: &'a Graph,
    policy: &'a Policy,
    /// What rows and columns of a piece are multiples of.
    piece: usize,
    users: Users,
    /// Products that may be joined, in order.
    products: Vec<Node>,
    taken: FxHashSet<Node>,
}

impl<'a> Search<'a> {
    fn new(graph: &'a Graph, policy: &'a Policy, piece: usize) -> Self {
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

    fn dims(&self, node: Node) -> Option<&'a DotDims> {
        match &self.graph.node(node).op {
            Op::DotGeneral(dims) => Some(dims),
            _ => None,
        }
    }

    fn result(&self, node: Node) -> Value {
        self.graph.node(node).outputs[0]
    }

    fn is_large(&self, elements: usize) -> bool {
        elements >= self.policy.epilogue_elements.max(1)
    }

    /// Sums with several products among their terms.
    fn sums(&mut self) -> Vec<Group> {
        let mut groups = Vec::new();
        for (root, data) in self.graph.nodes() {
            let [value] = data.outputs[..] else { continue };
            let is_inner = || {
                let user = self.users.single(value);
                user.is_some_and(|user| self.is_sum(user) && same_section(self.graph, &[user, root]))
            };
            if !self.is_sum(root) || is_inner() {
                continue;
            }
            let mut leaves = Vec::new();
            self.leaves(root, &mut leaves);
            let (mut terms, mut rest): (Vec<Term>, Vec<Value>) = (Vec::new(), Vec::new());
            for leaf in leaves {
                match self
                    .term(root, leaf)
                    .filter(|term| terms.iter().all(|first| self.adds_to(first, term)))
                {
                    Some(term) => terms.push(term),
                    None => rest.push(leaf),
                }
            }
            if terms.len() > 1 {
                self.taken.extend(terms.iter().map(|term| term.product));
                groups.push(Group::Sum { root, terms, rest });
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
            let is_inner = self.is_sum(maker)
                && self.users.single(operand).is_some()
                && same_section(self.graph, &[maker, node]);
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
                        && same_section(self.graph, &[node, root]);
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
        let graph = self.graph;
        let op = |node: &Node| &graph.node(*node).op;
        let [a, b] = [first, term].map(|term| graph.node(term.product));
        let rank = |value: Value| graph.shape(value).rank();
        op(&first.product) == op(&term.product)
            && graph.ty(a.outputs[0]) == graph.ty(b.outputs[0])
            && a.inputs
                .iter()
                .zip(&b.inputs)
                .all(|(&a, &b)| rank(a) == rank(b) && graph.dtype(a) == graph.dtype(b))
            && first.between.iter().map(op).eq(term.between.iter().map(op))
            && graph.node(first.product).outputs != graph.node(term.product).outputs
    }

    /// Products of one operand with several others.
    fn shared(&mut self) -> Vec<Group> {
        let graph = self.graph;
        // Parts of a bucket are made in their places, one by one.
        let travels = graph
            .nodes()
            .any(|(_, data)| matches!(data.op, Op::Collective(_)));
        let mut lists: Vec<(Cut, Vec<Node>)> = Vec::new();
        let mut found: FxHashMap<(Value, bool), Vec<usize>> = FxHashMap::default();
        for at in 0..self.products.len() {
            let node = self.products[at];
            if self.taken.contains(&node) || (travels && !self.is_forward(node)) {
                continue;
            }
            let [left, right] = graph.node(node).inputs[..] else {
                continue;
            };
            let candidates = [((left, false), Cut::Columns), ((right, true), Cut::Rows)];
            let candidates = candidates.into_iter().filter(|&(_, cut)| self.is_cut(node, cut));
            for (key, cut) in candidates {
                let own = found.entry(key).or_default();
                let open = own
                    .iter()
                    .copied()
                    .find(|&list| self.goes_with(&lists[list].1, node));
                match open {
                    Some(list) => lists[list].1.push(node),
                    None => {
                        own.push(lists.len());
                        lists.push((cut, vec![node]));
                    }
                }
            }
        }
        // The longest first: a product may be in two.
        lists.sort_by_key(|(_, nodes)| std::cmp::Reverse(nodes.len()));
        let mut groups = Vec::new();
        for (cut, mut nodes) in lists {
            nodes.retain(|node| !self.taken.contains(node));
            let elements = nodes
                .iter()
                .map(|&node| graph.ty(self.result(node)).numel())
                .sum();
            if nodes.len() > 1 && self.is_large(elements) {
                self.taken.extend(&nodes);
                let each = nodes.iter().filter(|_| cut == Cut::Columns);
                let biased = each.filter_map(|&node| self.biased(node)).collect();
                groups.push(Group::Shared { nodes, biased, cut });
            }
        }
        groups
    }

    fn is_forward(&self, node: Node) -> bool {
        !self.graph.node(node).provenance.phase.is_after_forward()
    }

    /// Whether the operand of `node` that `cut` names can be a piece of a larger one, and no nest would be
    /// computed behind the product.
    fn is_cut(&self, node: Node, cut: Cut) -> bool {
        let (graph, data) = (self.graph, self.graph.node(node));
        let side = usize::from(cut == Cut::Columns);
        let Some(dims) = self.dims(node) else {
            return false;
        };
        let Some(axis) = free(graph, dims, data.inputs[side], side) else {
            return false;
        };
        let extent = graph.shape(data.inputs[side])[axis];
        let stays =
            || !self.may_be_followed(data.outputs[0]) || (cut == Cut::Columns && self.biased(node).is_some());
        extent.is_multiple_of(self.piece) && stays()
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
            nodes.push(user);
            value = data.outputs[0];
        }
        let found = Biased { nodes, bias: bias? };
        (same_section(graph, &[&[node], &found.nodes[..]].concat()) && !self.may_be_followed(value))
            .then_some(found)
    }

    /// The operations that add a bias to a product.
    fn behind(&self, node: Node) -> Option<Vec<&'a Op>> {
        let biased = self.biased(node)?;
        Some(
            biased
                .nodes
                .iter()
                .map(|&node| &self.graph.node(node).op)
                .collect(),
        )
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

    /// Whether `node` may join the products `nodes`, all before it.
    fn goes_with(&self, nodes: &[Node], node: Node) -> bool {
        let (first, last) = (nodes[0], nodes[nodes.len() - 1]);
        let [one, other] = [first, node].map(|node| self.graph.node(node));
        let place = |node: Node| self.products.partition_point(|&product| product < node);
        let other_shape = |data: &kiln_graph::NodeData| {
            data.inputs
                .iter()
                .map(|&value| (self.graph.shape(value).rank(), self.graph.dtype(value)))
                .collect::<Vec<_>>()
        };
        one.op == other.op
            && other_shape(one) == other_shape(other)
            && self.graph.dtype(one.outputs[0]) == self.graph.dtype(other.outputs[0])
            && place(node) - place(last) <= BETWEEN
            && same_section(self.graph, &[first, node])
            && self.is_kept(first) == self.is_kept(node)
            && self.behind(first) == self.behind(node)
            && !self.depends(node, nodes)
    }

    /// Whether the backward pass reads the result of `node`. One that it does not read would be kept beside one
    /// that it reads: keys, which are rotated in the forward pass, beside values.
    fn is_kept(&self, node: Node) -> bool {
        let last = |biased: Biased| self.result(biased.nodes[biased.nodes.len() - 1]);
        let mut left = vec![self.biased(node).map_or(self.result(node), last)];
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

/// Whether nodes may share a kernel.
fn same_section(graph: &Graph, nodes: &[Node]) -> bool {
    nodes
        .windows(2)
        .all(|two| Section::of(graph, two[0]) == Section::of(graph, two[1]))
}

/// Writes the graph anew. A product that stands for several is made where the first of them was, with what
/// the others need before it.
struct Writer<'a> {
    graph: &'a Graph,
    groups: &'a [Group],
    /// The group that each product belongs to, and each sum that is replaced.
    of: FxHashMap<Node, usize>,
    /// Whether a group waits for its operands.
    waits: Vec<bool>,
    rewriter: Rewriter<'a>,
}

impl<'a> Writer<'a> {
    fn new(graph: &'a Graph, groups: &'a [Group]) -> Self {
        let mut of = FxHashMap::default();
        for (number, group) in groups.iter().enumerate() {
            match group {
                Group::Sum { root, .. } => {
                    of.insert(*root, number);
                }
                Group::Shared { nodes, .. } => of.extend(nodes.iter().map(|&node| (node, number))),
            }
        }
        Self {
            graph,
            groups,
            of,
            waits: vec![false; groups.len()],
            rewriter: Rewriter::new(graph),
        }
    }

    /// The new graph, or the number of a group that needs its own result.
    fn write(mut self) -> Result<Result<Graph, usize>, TypeError> {
        for (node, data) in self.graph.nodes() {
            // Arguments keep their numbers.
            if matches!(data.op, Op::Parameter { .. } | Op::Scalar { .. }) {
                self.rewriter.copy(node)?;
            }
        }
        for (node, _) in self.graph.nodes() {
            if let Some(group) = self.make(node)? {
                return Ok(Err(group));
            }
        }
        Ok(Ok(self.rewriter.finish().without_dead_code()))
    }

    fn is_made(&self, node: Node) -> bool {
        let mut outputs = self.graph.node(node).outputs.iter();
        outputs.all(|&value| self.rewriter.get(value).is_some())
    }

    /// Makes the results of `node` in the new graph, and what they need; returns a group that needs its own.
    fn make(&mut self, node: Node) -> Result<Option<usize>, TypeError> {
        // Nodes to make, the next one last.
        let mut left = vec![node];
        while let Some(&node) = left.last() {
            if self.is_made(node) && !self.graph.node(node).outputs.is_empty() {
                left.pop();
                continue;
            }
            let group = self.of.get(&node).map(|&number| &self.groups[number]);
            let needs: Vec<Value> = match group {
                Some(Group::Sum { terms, rest, .. }) => {
                    let products = terms
                        .iter()
                        .flat_map(|term| &self.graph.node(term.product).inputs);
                    products.chain(rest).copied().collect()
                }
                Some(Group::Shared { nodes, biased, .. }) => {
                    let inputs = nodes.iter().flat_map(|&node| &self.graph.node(node).inputs);
                    let biases = biased.iter().map(|biased| &biased.bias);
                    inputs.chain(biases).copied().collect()
                }
                None => self.graph.node(node).inputs.to_vec(),
            };
            let missing = needs.iter().filter(|&&value| self.rewriter.get(value).is_none());
            let before = left.len();
            let number = self.of.get(&node).copied();
            left.extend(missing.map(|&value| self.graph.value(value).node));
            if left.len() > before {
                match number.filter(|&number| std::mem::replace(&mut self.waits[number], true)) {
                    Some(number) => return Ok(Some(number)),
                    None => continue,
                }
            }
            left.pop();
            match group {
                Some(Group::Sum { root, terms, rest }) => self.sum(*root, terms, rest)?,
                Some(Group::Shared { nodes, biased, cut }) => self.shared(nodes, biased, *cut)?,
                None => {
                    self.rewriter.copy(node)?;
                }
            }
        }
        Ok(None)
    }

    /// One operand of several products, as one.
    fn whole(
        &mut self,
        nodes: &[Node],
        side: usize,
        axis: usize,
        p: &Provenance,
    ) -> Result<Value, TypeError> {
        let operands = nodes.iter().map(|&node| self.graph.node(node).inputs[side]);
        let operands: Vec<Value> = operands.map(|value| self.rewriter.map(value)).collect();
        self.rewriter.graph.add(Op::Concat { axis }, &operands, p)
    }

    fn sum(&mut self, root: Node, terms: &[Term], rest: &[Value]) -> Result<(), TypeError> {
        let graph = self.graph;
        let data = graph.node(terms[0].product);
        let Op::DotGeneral(dims) = &data.op else {
            return Ok(());
        };
        let p = &data.provenance;
        let nodes: Vec<Node> = terms.iter().map(|term| term.product).collect();
        let left = self.whole(&nodes, 0, dims.a_contract[0], p)?;
        let right = self.whole(&nodes, 1, dims.b_contract[0], p)?;
        let mut sum = self.rewriter.graph.add(data.op.clone(), &[left, right], p)?;
        for &node in &terms[0].between {
            let data = graph.node(node);
            sum = self
                .rewriter
                .graph
                .add(data.op.clone(), &[sum], &data.provenance)?;
        }
        let p = &graph.node(root).provenance;
        for &value in rest {
            let value = self.rewriter.map(value);
            sum = self
                .rewriter
                .graph
                .add(Op::Binary(BinaryOp::Add), &[value, sum], p)?;
        }
        self.rewriter.replace(graph.node(root).outputs[0], sum);
        Ok(())
    }

    fn shared(&mut self, nodes: &[Node], biased: &[Biased], cut: Cut) -> Result<(), TypeError> {
        let graph = self.graph;
        let data = graph.node(nodes[0]);
        let Op::DotGeneral(dims) = &data.op else {
            return Ok(());
        };
        let p = &data.provenance;
        let side = usize::from(cut == Cut::Columns);
        let Some(axis) = free(graph, dims, data.inputs[side], side) else {
            return Ok(());
        };
        let pieces = self.whole(nodes, side, axis, p)?;
        let common = self.rewriter.map(data.inputs[1 - side]);
        let operands = if side == 0 {
            [pieces, common]
        } else {
            [common, pieces]
        };
        let mut whole = self.rewriter.graph.add(data.op.clone(), &operands, p)?;
        // The rows of the result come first, its columns last.
        let shape = self.rewriter.graph.shape(whole).clone();
        let along = if side == 0 { 0 } else { shape.rank() - 1 };
        self.cut(
            nodes.iter().map(|&node| graph.node(node).outputs[0]),
            whole,
            along,
        )?;
        let Some(first) = biased.first() else {
            return Ok(());
        };
        for &node in &first.nodes {
            let data = graph.node(node);
            let p = &data.provenance;
            let operands = match data.op {
                Op::Binary(_) => vec![whole, self.biases(biased, &shape, p)?],
                _ => vec![whole],
            };
            whole = self.rewriter.graph.add(data.op.clone(), &operands, p)?;
        }
        let last = |biased: &Biased| graph.node(biased.nodes[biased.nodes.len() - 1]).outputs[0];
        self.cut(biased.iter().map(last), whole, along)
    }

    /// The biases of products that become one, for each row.
    fn biases(&mut self, biased: &[Biased], shape: &Shape, p: &Provenance) -> Result<Value, TypeError> {
        let each: Vec<Value> = biased.iter().map(|it| self.rewriter.map(it.bias)).collect();
        let all = self.rewriter.graph.add(Op::Concat { axis: 0 }, &each, p)?;
        let broadcast = Op::Broadcast {
            shape: shape.clone(),
            dims: [shape.rank() - 1].into_iter().collect(),
        };
        self.rewriter.graph.add(broadcast, &[all], p)
    }

    /// Replaces values by their parts of `whole`, one after the other along an axis.
    fn cut(
        &mut self,
        values: impl Iterator<Item = Value>,
        whole: Value,
        along: usize,
    ) -> Result<(), TypeError> {
        let graph = self.graph;
        let shape = self.rewriter.graph.shape(whole).clone();
        let mut start = 0;
        for value in values {
            let p = &graph.def(value).provenance;
            let extent = graph.shape(value)[along];
            let ones: Dims = (0..shape.rank()).map(|_| 1).collect();
            let starts: Dims = (0..shape.rank())
                .map(|axis| if axis == along { start } else { 0 })
                .collect();
            let limits: Dims = (0..shape.rank())
                .map(|axis| {
                    if axis == along {
                        start + extent
                    } else {
                        shape[axis]
                    }
                })
                .collect();
            let slice = Op::Slice {
                starts,
                limits,
                steps: ones,
            };
            let slice = self.rewriter.graph.add(slice, &[whole], p)?;
            self.rewriter.replace(value, slice);
            start += extent;
        }
        Ok(())
    }
}
