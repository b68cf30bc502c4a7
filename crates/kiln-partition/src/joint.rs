//! The joint graph as the partitioner sees it: who may be kept, who may be recomputed, and at what cost.
//!
//! Every node has a [`Side`]. The *forward* nodes are those that may run twice. A backward node is *primal*
//! if it depends only on forward values and arguments (but not on tangents, which come with the backward
//! pass: see [`mod@crate::split`]), and only through fusable operations (`1 - tanh(x)^2`, a comparison with
//! zero, probabilities minus one-hot labels). A primal node runs once, in either pass. Put into the forward
//! pass, its result can be kept: a mask of bytes in place of the floats that it compares. Every other
//! backward node is *fixed*: it stays where it is, and the backward pass demands the values that it reads.
//!
//! The costs are times of a [`crate::Machine`]:
//!
//! - Keeping a value costs reading it in the backward pass; writing it, if the forward pass would otherwise
//!   have it in registers only; and holding its bytes ([`crate::Options::hold`]), unless it leaves the step
//!   as an output, which has a buffer anyway. Arguments lie in memory anyway and cost nothing.
//! - Recomputing a node that fuses with its reader ([`crate::Recompute`]) costs its arithmetic alone: the
//!   traffic of its operands is counted where they are kept. Two kinds of readers spoil the fusion, and add
//!   a write and a read of the result: readers in different kernels (before and after a product, such as of
//!   a residual stream), and readers that find it in memory, as it is or moved (a kernel that computes no
//!   operands, or two products of which neither does the other's work).
//! - A primal node that computes an operand of such a reader (the gradient of logits) is written and read
//!   whether its result is kept or not. Keeping the forward values that it is computed from instead saves
//!   nothing.
//!
//! One choice is a rule and not a matter of cost. A random draw, and a value that follows element by
//! element from draws alone (a dropout mask), is not kept, however slowly the machine draws: the kernels
//! that read it draw it from the counter again. Only a draw that leaves the step as an output, and so lies
//! in memory anyway, may be read from there.

use cranelift_entity::{EntitySet, SecondaryMap};
use kiln_graph::op::Op;
use kiln_graph::{DType, Graph, Node, NodeData, Phase, Users, Value};

use crate::cost::bytes;
use crate::error::PartitionError;
use crate::phase::find_phases;
use crate::recompute::Recompute;
use crate::{Machine, Options};

/// What may happen to a node.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) enum Side {
    /// Arguments and constants, which every phase can read.
    #[default]
    Resident,
    /// Runs in the forward pass; may run again in the backward pass.
    Forward,
    /// Runs in the backward pass; may run in the forward pass instead.
    Primal,
    /// Backward or optimizer, and stays there.
    Fixed,
}

/// A joint graph without dead nodes, and what the partitioner knows of it.
#[derive(Debug)]
pub(crate) struct Joint<'a> {
    pub(crate) graph: &'a Graph,
    pub(crate) users: Users,
    pub(crate) options: &'a Options,
    pub(crate) side: SecondaryMap<Node, Side>,
    pub(crate) phase: SecondaryMap<Node, Phase>,
    /// Number of kernels that must have run before a forward node's kernel, and after it.
    before: SecondaryMap<Node, u32>,
    after: SecondaryMap<Node, u32>,
    /// Computed from scalars and coordinates alone: recomputing it reads no memory.
    generated: SecondaryMap<Node, bool>,
    /// Generated, element by element, from random numbers: dropout masks and noise.
    drawn: SecondaryMap<Node, bool>,
}

impl<'a> Joint<'a> {
    /// Analyses `graph`, whose nodes carry phases (written by [`crate::assign_phases`]; otherwise found as
    /// it does).
    pub(crate) fn new(graph: &'a Graph, options: &'a Options) -> Result<Self, PartitionError> {
        Self::with_tangents(graph, options, &[])
    }

    /// The same where the tensor arguments with indices in `tangents` exist only in the backward pass: a
    /// node that reads one cannot run in the forward pass.
    pub(crate) fn with_tangents(
        graph: &'a Graph,
        options: &'a Options,
        tangents: &[u32],
    ) -> Result<Self, PartitionError> {
        let phase = known_phases(graph);
        let mut joint = Self {
            graph,
            users: graph.users(),
            options,
            side: SecondaryMap::new(),
            phase,
            before: SecondaryMap::new(),
            after: SecondaryMap::new(),
            generated: SecondaryMap::new(),
            drawn: SecondaryMap::new(),
        };
        joint.sides(tangents);
        joint.depths();
        Ok(joint)
    }

    fn sides(&mut self, tangents: &[u32]) {
        for (node, data) in self.graph.nodes() {
            let arguments = matches!(
                data.op,
                Op::Parameter { .. } | Op::Scalar { .. } | Op::Constant { .. }
            );
            let fusable = matches!(Recompute::of(&data.op), Recompute::Free | Recompute::Fused);
            let fixed = |&value: &Value| match self.graph.def(value).op {
                Op::Parameter { index, .. } => tangents.contains(&index),
                _ => self.side[self.graph.value(value).node] == Side::Fixed,
            };
            self.side[node] = if arguments {
                Side::Resident
            } else if self.phase[node] == Phase::Forward {
                Side::Forward
            } else if self.phase[node] == Phase::Backward && fusable && !data.inputs.iter().any(fixed) {
                Side::Primal
            } else {
                Side::Fixed
            };
        }
        // A transform may have merged a backward node with an equal forward one: a node that forward needs
        // is forward.
        for (node, data) in self.graph.nodes().rev() {
            if self.side[node] == Side::Primal {
                let mut users = data.outputs.iter().flat_map(|&value| self.users.of(value));
                if users.any(|&user| self.side[user] == Side::Forward) {
                    self.side[node] = Side::Forward;
                }
            }
        }
    }

    fn depths(&mut self) {
        for (node, data) in self.graph.nodes() {
            let operands = || data.inputs.iter().map(|&value| self.graph.value(value).node);
            let class = Recompute::of(&data.op);
            let before = operands().map(|operand| self.after[operand]).max().unwrap_or(0);
            let generated = matches!(class, Recompute::Free | Recompute::Fused)
                && operands().all(|operand| {
                    let source = &self.graph.node(operand).op;
                    self.generated[operand] || matches!(source, Op::Scalar { .. } | Op::Constant { .. })
                });
            self.before[node] = before;
            let kernel = class.is_kernel() && self.side[node] != Side::Resident;
            self.after[node] = before + u32::from(kernel);
            self.generated[node] = generated;
            self.drawn[node] = generated
                && match data.op {
                    Op::Random { .. } => true,
                    // A sum or a look-up may be much smaller than the draws that it reads.
                    Op::Reduce { .. } | Op::Gather { .. } | Op::IndexSelect { .. } => false,
                    _ => operands().any(|operand| self.drawn[operand]),
                };
        }
        // A cast from 16 bits runs in the kernel that reads it, so a reader of the cast value is as far
        // away as a reader of the cast itself.
        for (node, data) in self.graph.nodes().rev() {
            let widens = matches!(data.op, Op::Cast(DType::F32))
                && matches!(self.graph.dtype(data.inputs[0]), DType::F16 | DType::BF16);
            if widens && let Some(&[reader]) = data.outputs.first().map(|&value| self.users.of(value)) {
                self.before[node] = self.before[reader];
            }
        }
    }

    pub(crate) fn machine(&self) -> &Machine {
        &self.options.machine
    }

    pub(crate) fn node_of(&self, value: Value) -> Node {
        self.graph.value(value).node
    }

    pub(crate) fn side_of(&self, value: Value) -> Side {
        self.side[self.node_of(value)]
    }

    /// Whether the backward pass reads `value` whatever is kept: values that candidates define and fixed
    /// nodes take as operands, and primal outputs of the graph.
    pub(crate) fn demanded(&self, value: Value) -> bool {
        match self.side_of(value) {
            Side::Resident | Side::Fixed => false,
            side => {
                let fixed = |&user: &Node| self.side[user] == Side::Fixed;
                self.users.of(value).iter().any(fixed)
                    || side == Side::Primal && self.users.outputs(value) > 0
            }
        }
    }

    /// Whether the kernels of `user` compute its operands while they read them. Operands of 16 bits are
    /// rounded where they are stored, and read from there.
    fn takes_fused_operands(&self, user: &NodeData) -> bool {
        let stored = |&value: &Value| matches!(self.graph.dtype(value), DType::F16 | DType::BF16);
        if user.op.is_contraction() && user.inputs.first().is_some_and(stored) {
            return false;
        }
        match user.op {
            Op::DotGeneral(_) => self.options.dot_prologue,
            Op::Conv(_) | Op::ConvInputGrad { .. } | Op::ConvWeightGrad { .. } => {
                self.options.conv_prologue && user.op.is_pixelwise(self.graph.shape(user.inputs[1]))
            }
            _ => !Recompute::of(&user.op).is_kernel(),
        }
    }

    /// Whether `user` has to find `value` in memory, because its kernel computes no operands, or another
    /// kernel does the same work.
    fn is_read_whole_by(&self, value: Value, user: Node) -> bool {
        let kernel = |node: Node| Recompute::of(&self.graph.node(node).op).is_kernel();
        let beside = |&&other: &&Node| self.side[other] == self.side[user] && kernel(other);
        !self.takes_fused_operands(self.graph.node(user))
            || kernel(user) && self.users.of(value).iter().filter(beside).count() > 1
    }

    /// Whether the forward pass writes `value` to memory even if nobody keeps it.
    fn is_written(&self, value: Value) -> bool {
        let node = self.node_of(value);
        let class = Recompute::of(&self.graph.node(node).op);
        if self.side[node] != Side::Forward || self.generated[node] {
            return self.side[node] == Side::Fixed;
        }
        if class.is_kernel() || self.users.outputs(value) > 0 {
            return true;
        }
        let far = |&user: &Node| self.side[user] == Side::Forward && self.before[user] > self.after[node];
        let whole = |&user: &Node| self.side[user] == Side::Forward && self.is_read_whole_by(value, user);
        self.users.of(value).iter().any(far) || self.is_made(node) && self.readers(value).iter().any(whole)
    }

    /// Whether a kernel that finds an operand in memory needs the result of `node` there: what was only moved
    /// it reads where that was before, but the pieces of a concatenation lie in no one place.
    fn is_made(&self, node: Node) -> bool {
        let op = &self.graph.node(node).op;
        Recompute::of(op) != Recompute::Free || matches!(op, Op::Concat { .. })
    }

    /// The nodes that read `value` as it is or moved: a kernel that finds an operand in memory finds what was
    /// moved there, too. Slices count where they are all of the value together (queries, keys and values that
    /// one product makes).
    fn readers(&self, value: Value) -> Vec<Node> {
        let users = || {
            let users = self.users.of(value).iter();
            users.map(|&user| (user, self.graph.node(user)))
        };
        let elements = |value: Value| self.graph.shape(value).numel();
        let slices = users().filter(|(_, data)| matches!(data.op, Op::Slice { .. }));
        let sliced: usize = slices.map(|(_, data)| elements(data.outputs[0])).sum();
        let mut readers = Vec::new();
        for (user, data) in users() {
            match data.op {
                Op::Reshape(_) | Op::Transpose(_) => readers.extend(self.readers(data.outputs[0])),
                Op::Slice { .. } if sliced >= elements(value) => {
                    readers.extend(self.readers(data.outputs[0]));
                }
                _ => readers.push(user),
            }
        }
        readers
    }

    /// Whether `value` is drawn from the counter again wherever it is read: by
    /// [`crate::Strategy::MinimumCut`] it is never kept.
    pub(crate) fn is_redrawn(&self, value: Value) -> bool {
        self.drawn[self.node_of(value)] && self.users.outputs(value) == 0
    }

    /// Cost of having `value` in the backward pass because it was kept, in picoseconds.
    pub(crate) fn keep(&self, value: Value) -> u64 {
        if self.side_of(value) == Side::Resident {
            return 0;
        }
        let size = bytes(self.graph, value);
        let moved = self.machine().moved(size);
        let write = if self.is_written(value) { 0 } else { moved };
        let hold = if self.users.outputs(value) > 0 {
            0
        } else {
            (size as f64 * self.options.hold).round() as u64
        };
        moved + write + hold
    }

    /// Whether a node can run in the backward pass at all; `expensive` ones only if asked for.
    pub(crate) fn may_recompute(&self, node: Node, expensive: bool) -> bool {
        match self.side[node] {
            Side::Primal => true,
            // The forward pass casts an argument once, into a copy that the backward pass reads; the cast
            // does not run twice.
            Side::Forward if self.is_cast_argument(node) => false,
            Side::Forward => match Recompute::of(&self.graph.node(node).op) {
                Recompute::Free | Recompute::Fused | Recompute::Kernel => true,
                Recompute::Expensive => expensive,
                Recompute::Never => false,
            },
            Side::Resident | Side::Fixed => false,
        }
    }

    /// Whether `node` casts an argument to 16 bits, for products to read.
    fn is_cast_argument(&self, node: Node) -> bool {
        let data = self.graph.node(node);
        let argument = |&value: &Value| matches!(self.graph.def(value).op, Op::Parameter { .. });
        matches!(data.op, Op::Cast(DType::F16 | DType::BF16)) && data.inputs.iter().all(argument)
    }

    /// Cost of running a node in the backward pass (again, for forward nodes) when its operands are there, in
    /// picoseconds.
    pub(crate) fn recompute(&self, node: Node) -> u64 {
        let data = self.graph.node(node);
        let class = Recompute::of(&data.op);
        // Beside a forward kernel a small value costs nothing more. What is made of scalars is in no kernel's
        // way.
        let launch = match class {
            Recompute::Fused if !self.generated[node] => self.machine().launch(data, self.made_bytes(data)),
            _ => 0,
        };
        if self.side[node] != Side::Forward {
            // Kept or not, an operand that a kernel reads from memory is written and read. (`keep` counts
            // that for kept ones.)
            let stored = class == Recompute::Fused && self.is_read_whole(data);
            return match self.side[node] {
                Side::Primal if stored => launch + self.machine().moved(2 * self.made_bytes(data)),
                Side::Primal => launch,
                _ => 0,
            };
        }
        let mut cost = launch + self.machine().again(self.graph, data);
        let fused = matches!(class, Recompute::Free | Recompute::Fused);
        let out = self.made_bytes(data);
        if class == Recompute::Fused && !matches!(data.op, Op::Gather { .. } | Op::IndexSelect { .. }) {
            // The cost of reading kept operands is counted where they are kept; arguments are read here.
            let argument = |&&value: &&Value| matches!(self.graph.def(value).op, Op::Parameter { .. });
            let read = data
                .inputs
                .iter()
                .filter(argument)
                .map(|&value| bytes(self.graph, value).min(out));
            cost += self.machine().moved(read.sum());
        }
        if fused && !self.generated[node] && self.is_shared(node) {
            cost += self.machine().moved(2 * out);
        }
        cost
    }

    /// Whether a fixed node reads the result of `data` from memory, as it is or moved.
    fn is_read_whole(&self, data: &NodeData) -> bool {
        data.outputs.iter().any(|&value| {
            self.users.of(value).iter().any(|&user| match self.side[user] {
                Side::Fixed => self.is_read_whole_by(value, user),
                Side::Primal => {
                    let data = self.graph.node(user);
                    Recompute::of(&data.op) == Recompute::Free && self.is_read_whole(data)
                }
                _ => false,
            })
        })
    }

    /// Size of a node's results.
    fn made_bytes(&self, data: &NodeData) -> u64 {
        data.outputs.iter().map(|&value| bytes(self.graph, value)).sum()
    }

    /// Whether readers in several kernels need the result of a fused node, or one reader that finds it in
    /// memory.
    fn is_shared(&self, node: Node) -> bool {
        let data = self.graph.node(node);
        let mut depth = None;
        for &value in &data.outputs {
            for &user in self.users.of(value) {
                if self.side[user] == Side::Forward {
                    if depth.is_some_and(|depth| depth != self.before[user]) {
                        return true;
                    }
                    depth = Some(self.before[user]);
                }
            }
            let whole = |&user: &Node| self.side[user] == Side::Fixed && self.is_read_whole_by(value, user);
            if self.is_made(node) && self.readers(value).iter().any(whole) {
                return true;
            }
        }
        false
    }

    /// The values and nodes that the backward pass needs of the forward pass when only `kept` is kept:
    /// values that it reads, and nodes that it runs. A needed value that can be neither found nor
    /// recomputed counts as kept.
    pub(crate) fn closure(&self, kept: &EntitySet<Value>, expensive: bool) -> Closure {
        let mut closure = Closure::default();
        let mut seen: EntitySet<Value> = EntitySet::new();
        let mut stack: Vec<Value> = Vec::new();
        stack.extend(
            self.graph
                .values()
                .map(|(value, _)| value)
                .filter(|&value| self.demanded(value)),
        );
        while let Some(value) = stack.pop() {
            if !seen.insert(value) || self.side_of(value) == Side::Resident {
                continue;
            }
            let node = self.node_of(value);
            if kept.contains(value) || !self.may_recompute(node, expensive) {
                closure.kept.insert(value);
            } else if closure.recomputed.insert(node) {
                stack.extend(self.graph.node(node).inputs.iter().copied());
            }
        }
        closure
    }

    /// Cost of a closure: keeping what it keeps, running what it runs.
    pub(crate) fn cost(&self, closure: &Closure) -> u64 {
        let kept: u64 = closure.kept.iter().map(|value| self.keep(value)).sum();
        kept + closure
            .recomputed
            .iter()
            .map(|node| self.recompute(node))
            .sum::<u64>()
    }

    /// The values that [`crate::Strategy::KeepEverything`] keeps: operands as an autograd engine holds
    /// them, seen through movement.
    pub(crate) fn everything(&self) -> EntitySet<Value> {
        let mut kept = EntitySet::new();
        for (value, data) in self.graph.values() {
            if self.side[data.node] == Side::Forward
                && Recompute::of(&self.graph.node(data.node).op) != Recompute::Free
            {
                kept.insert(value);
            }
        }
        kept
    }
}

/// The phases that nodes carry. A node that a transform made from nothing has none: it belongs to its first
/// user, or, if it leaves the graph unused, to its last operand. In a graph where no node has a phase, all
/// are found by their looks.
fn known_phases(graph: &Graph) -> SecondaryMap<Node, Phase> {
    let carried = |data: &NodeData| data.provenance.phase;
    if graph
        .nodes()
        .all(|(_, data)| carried(data) == Phase::Unknown || data.inputs.is_empty())
    {
        return find_phases(graph);
    }
    let mut phase: SecondaryMap<Node, Phase> = SecondaryMap::new();
    let mut first_user: SecondaryMap<Node, Option<Phase>> = SecondaryMap::new();
    for (node, data) in graph.nodes().rev() {
        phase[node] = match (carried(data), first_user[node]) {
            (Phase::Unknown, Some(user)) => user,
            (known, _) => known,
        };
        if phase[node] != Phase::Unknown {
            for &value in &data.inputs {
                let first = &mut first_user[graph.value(value).node];
                *first = Some(first.map_or(phase[node], |first| first.min(phase[node])));
            }
        }
    }
    for (node, data) in graph.nodes() {
        if phase[node] == Phase::Unknown {
            let operands = data.inputs.iter().map(|&value| phase[graph.value(value).node]);
            phase[node] = operands.max().unwrap_or(Phase::Forward);
        }
    }
    phase
}

/// See [`Joint::closure`].
#[derive(Clone, Default, Debug)]
pub(crate) struct Closure {
    /// Values that cross from the forward to the backward pass.
    pub(crate) kept: EntitySet<Value>,
    /// Candidates that run in the backward pass.
    pub(crate) recomputed: EntitySet<Node>,
}
