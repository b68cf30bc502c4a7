//! Forward, backward and optimizer: which phase of the step each node belongs to.
//!
//! The joint graph is a recording: the forward pass, then the operations of the autograd engine, then the
//! optimizer, with nothing that marks where one ends. [`assign_phases`] finds the phases right after
//! import, while the order of the nodes is still the order of the recording, and writes them into each
//! node's provenance, where later transforms keep them.
//!
//! **Rounds.** A backward pass starts from a tensor of ones of the shape of its loss, the *seed*. A
//! recorder below the autograd engine sees the seed as any other tensor, so seeds are found by their form:
//! a node whose recorded operation is `Ones`, of one element. (A program's own tensor of that form is taken
//! for a seed, too, and the values that follow from it in the forward pass for tangents: the tail of a
//! loss, most often.) The seeds divide the recording into windows: window 0 is the first forward pass;
//! window `r` holds backward pass `r`, perhaps an optimizer update, and the forward pass of the next round,
//! if there is one. Several rounds are gradient accumulation (backward, forward, backward, one update), or
//! several models trained against each other (backward and update of one, then forward through it, backward
//! and update of the other).
//!
//! A node is a *tangent* if it depends on a seed. Then:
//!
//! - Window 0 is forward.
//! - A node of a later window that is no tangent is forward if a forward output needs it or a later round
//!   does (not by way of this window's tangents); otherwise its users decide (primal arithmetic of a gradient
//!   formula, `1 - tanh^2`). So a running mean, which needs no gradient, is part of the forward pass, and so
//!   is a metric computed after it.
//! - A tangent is forward if it belongs to a later round's forward pass *through updated state*: it comes
//!   after the first operation that does not look like an update (a product, a look-up, a reduction to more
//!   than one element) and depends on one.
//! - A tangent is *an update* if it combines with state: it depends on an argument that an output aliases
//!   and the forward pass never reads (a moment), or combines an aliased argument, or what an update of an
//!   earlier window made of one, with a tensor of its own type elementwise (`p - delta`). What depends on an
//!   update is optimizer, what is recorded after the first
//!   update is optimizer (optimizers run after the whole backward pass), and pointwise preparation whose only
//!   users are updates (`(1 - beta) * g`, `g * g`, the sum of squares of clipping by norm) is, too.
//! - The remaining tangents are backward.
//!
//! A graph without any seed, such as one from a text file or one that a transform has already folded, is
//! classified by its outputs alone: forward is what the forward outputs need, state updates that share no
//! work with the update of an argument that forward reads are forward, too, and the rest is divided into
//! backward and optimizer as above.
//!
//! A wrong guess never makes a wrong program: the partitioner duplicates pure operations and orders nodes,
//! nothing else. It can only make a worse plan or a misleading report. (Autocast asks for phases, too: what
//! is taken for a gradient may multiply by a rounded factor.) A node whose provenance already has a phase
//! keeps it.

use cranelift_entity::{EntityRef, SecondaryMap};
use kiln_graph::op::Op;
use kiln_graph::{Graph, Node, NodeData, Phase, Value};

/// The role of an output of the step.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum OutputRole {
    /// To be found out: state if it aliases an argument or depends on a gradient, forward otherwise.
    #[default]
    Auto,
    /// A result of the forward pass: loss, logits, a metric.
    Forward,
    /// The next value of a parameter, a moment, a running statistic.
    State,
    /// A gradient that leaves the step.
    Gradient,
}

/// Assigns a phase to every node of `graph` that has none, and writes it into the node's provenance.
pub fn assign_phases(graph: &mut Graph) {
    let phases = find_phases(graph);
    for index in 0..graph.num_nodes() {
        let node = Node::new(index);
        graph.provenance_mut(node).phase = phases[node];
    }
}

/// The phase of every node, as [`assign_phases`] would write it.
pub fn find_phases(graph: &Graph) -> SecondaryMap<Node, Phase> {
    let mut finder = Finder::new(graph);
    if finder.starts.is_empty() {
        finder.without_seeds();
    } else {
        finder.with_seeds();
    }
    finder.updates();
    finder.leaves();
    for (node, data) in graph.nodes() {
        if data.provenance.phase != Phase::Unknown {
            finder.phase[node] = data.provenance.phase;
        }
    }
    finder.phase
}

struct Finder<'a> {
    graph: &'a Graph,
    users: kiln_graph::Users,
    roles: Vec<OutputRole>,
    /// The first node of each backward pass, in order.
    starts: Vec<Node>,
    /// For each tensor argument, whether a state output takes its buffer.
    replaced: Vec<bool>,
    /// Depends on a seed, other than by way of a resumed forward pass.
    tangent: SecondaryMap<Node, bool>,
    /// Belongs to a forward pass that runs through state updated in the same recording.
    resumed: SecondaryMap<Node, bool>,
    phase: SecondaryMap<Node, Phase>,
}

impl<'a> Finder<'a> {
    fn new(graph: &'a Graph) -> Self {
        let users = graph.users();
        let mut starts = find_seeds(graph);
        starts.sort();
        starts.dedup();

        let mut replaced = vec![false; graph.parameters().len()];
        for index in graph.outputs.iter().filter_map(|output| output.alias) {
            replaced[index as usize] = true;
        }

        let mut finder = Self {
            graph,
            replaced,
            users,
            roles: Vec::with_capacity(graph.outputs.len()),
            starts,
            tangent: SecondaryMap::new(),
            resumed: SecondaryMap::new(),
            phase: SecondaryMap::new(),
        };
        finder.tangents();
        for output in &graph.outputs {
            let node = graph.value(output.value).node;
            let state = output.alias.is_some() || finder.tangent[node] && !finder.resumed[node];
            finder.roles.push(match state {
                true => OutputRole::State,
                false => OutputRole::Forward,
            });
        }
        finder
    }

    /// The window of a node: how many backward passes have begun.
    fn window(&self, node: Node) -> usize {
        self.starts.partition_point(|&start| start <= node)
    }

    fn operands(&self, data: &'a NodeData) -> impl Iterator<Item = Node> + 'a {
        let graph = self.graph;
        data.inputs.iter().map(move |&value| graph.value(value).node)
    }

    fn user_nodes<'b>(&'b self, data: &'b NodeData) -> impl Iterator<Item = Node> + 'b {
        data.outputs
            .iter()
            .flat_map(|&value| self.users.of(value).iter().copied())
    }

    /// Finds the tangents, and the forward passes of later rounds that updated state leads into.
    fn tangents(&mut self) {
        let leads = self.leads_forward();
        let mut updated: SecondaryMap<Node, bool> = SecondaryMap::new();
        // Whether a window has updated anything: its backward pass, which comes before, may read what earlier
        // windows updated. And whether the forward pass that follows its update has begun.
        let mut has_updated = vec![false; self.starts.len() + 1];
        let mut begun = vec![false; self.starts.len() + 1];
        for (node, data) in self.graph.nodes() {
            let window = self.window(node);
            if window == 0 {
                continue;
            }
            let seed = self.starts.binary_search(&node).is_ok();
            let tangent = |operand: Node| self.tangent[operand] && !self.resumed[operand];
            // A node of a resumed forward pass is no tangent, but the nodes that follow from it within its
            // window belong to that pass.
            let goes_on = self.operands(data).any(|operand| self.resumed[operand]) && leads[node];
            let goes_on = goes_on && self.operands(data).all(|operand| self.window(operand) <= window);
            let is_tangent = seed || self.operands(data).any(tangent);
            let after = self
                .operands(data)
                .any(|operand| tangent(operand) && updated[operand]);
            let combines = is_tangent && self.combines_with_state(node, data, &updated);
            self.tangent[node] = is_tangent;
            updated[node] = is_tangent && (after || combines);
            has_updated[window] |= combines;
            begun[window] |=
                has_updated[window] && after && leads[node] && !looks_like_update(self.graph, data);
            self.resumed[node] = begun[window] && leads[node] && (after || goes_on);
        }
        // Movement of updated state on its way into that pass belongs to it.
        for (node, data) in self.graph.nodes().rev() {
            if !self.tangent[node] || !data.op.is_movement() {
                continue;
            }
            let value = data.outputs[0];
            let users = self.users.of(value);
            if self.users.outputs(value) == 0
                && !users.is_empty()
                && users.iter().all(|&user| self.resumed[user])
            {
                self.resumed[node] = true;
            }
        }
    }

    /// Nodes that lead to an output that may be a forward one, or to a tangent of a later round.
    fn leads_forward(&self) -> SecondaryMap<Node, bool> {
        // The last seed that each node depends on, as its window; 0 for none.
        let mut last: SecondaryMap<Node, usize> = SecondaryMap::new();
        for (node, data) in self.graph.nodes() {
            let seed = self.starts.binary_search(&node).is_ok();
            let from = self
                .operands(data)
                .map(|operand| last[operand])
                .max()
                .unwrap_or(0);
            last[node] = if seed { self.window(node) } else { from };
        }
        let mut leads: SecondaryMap<Node, bool> = SecondaryMap::new();
        for output in &self.graph.outputs {
            let scalar = self.graph.shape(output.value).numel() == 1 && output.alias.is_none();
            if scalar {
                leads[self.graph.value(output.value).node] = true;
            }
        }
        for (node, data) in self.graph.nodes().rev() {
            let window = self.window(node);
            let later =
                |user: Node| leads[user] || self.window(user) > window && last[user] == self.window(user);
            if self.user_nodes(data).any(later) {
                leads[node] = true;
            }
        }
        leads
    }

    /// Nodes that lead to one of `roots`, the roots' own included, not going on beyond nodes for which `stop`
    /// holds.
    fn ancestors(
        &self,
        roots: impl IntoIterator<Item = Value>,
        stop: impl Fn(Node) -> bool,
    ) -> SecondaryMap<Node, bool> {
        let mut found: SecondaryMap<Node, bool> = SecondaryMap::new();
        for root in roots {
            let node = self.graph.value(root).node;
            found[node] = !stop(node);
        }
        for (node, data) in self.graph.nodes().rev() {
            if found[node] {
                for operand in self.operands(data) {
                    found[operand] |= !stop(operand);
                }
            }
        }
        found
    }

    fn outputs_with(&self, role: OutputRole) -> impl Iterator<Item = Value> + '_ {
        let outputs = self.graph.outputs.iter().zip(&self.roles);
        outputs
            .filter(move |&(_, &r)| r == role)
            .map(|(output, _)| output.value)
    }

    fn with_seeds(&mut self) {
        let forward_state: Vec<Value> = self
            .outputs_with(OutputRole::State)
            .filter(|&value| !self.tangent[self.graph.value(value).node])
            .collect();
        let forward_outputs: Vec<Value> = self.outputs_with(OutputRole::Forward).collect();

        let blocked = |node: Node| self.tangent[node] && !self.resumed[node];
        let roots = forward_outputs.iter().chain(&forward_state).copied();
        let wanted = self.ancestors(roots, blocked);

        // The last round that uses a node other than by way of its own window's tangents.
        let mut serves: SecondaryMap<Node, usize> = SecondaryMap::new();
        for (node, data) in self.graph.nodes().rev() {
            let window = self.window(node);
            for user in self.user_nodes(data) {
                let round = self.window(user);
                let stop = blocked(user);
                let via = if stop && round == window { 0 } else { serves[user] };
                let direct = if stop { round } else { 0 };
                serves[node] = serves[node].max(via).max(direct);
            }
        }
        for (node, _) in self.graph.nodes() {
            let window = self.window(node);
            let forward = if self.resumed[node] || wanted[node] {
                true
            } else if self.tangent[node] {
                false
            } else {
                window == 0 || serves[node] > window
            };
            if forward {
                self.phase[node] = Phase::Forward;
            }
        }
    }

    /// Whether a node is where an update meets the state it updates: an argument, or what an earlier window
    /// `updated`.
    fn combines_with_state(&self, node: Node, data: &NodeData, updated: &SecondaryMap<Node, bool>) -> bool {
        let is_state = |value: Value| match self.graph.def(value).op {
            Op::Parameter { index, .. } => self.replaced[index as usize],
            _ => {
                let made = self.graph.value(value).node;
                updated[made] && self.window(made) < self.window(node)
            }
        };
        let shape = |value: Value| self.graph.shape(value);
        data.op.is_pointwise()
            && data
                .inputs
                .iter()
                .any(|&value| is_state(value) && data.outputs.iter().any(|&out| shape(out) == shape(value)))
    }

    fn without_seeds(&mut self) {
        let graph = self.graph;
        let forward: Vec<Value> = self.outputs_with(OutputRole::Forward).collect();
        let wanted = self.ancestors(forward, |_| false);
        let reads = |index: u32, nodes: &SecondaryMap<Node, bool>| {
            self.users
                .of(graph.parameters()[index as usize])
                .iter()
                .any(|&user| nodes[user])
        };
        // Work shared with the update of an argument that forward reads is training; other state updates
        // (running statistics) are forward.
        let states = || {
            graph
                .outputs
                .iter()
                .zip(&self.roles)
                .filter(|&(_, &role)| role == OutputRole::State)
        };
        let trained = states().filter(|(output, _)| output.alias.is_some_and(|index| reads(index, &wanted)));
        let trained = trained.map(|(output, _)| output.value);
        let training = self.ancestors(trained, |node| wanted[node]);
        let mut roots: Vec<Value> = self.outputs_with(OutputRole::Forward).collect();
        for (output, _) in states() {
            if training[graph.value(output.value).node] {
                continue;
            }
            let cone = self.ancestors([output.value], |node| wanted[node]);
            let shared =
                |(node, data): (Node, &NodeData)| cone[node] && training[node] && !data.inputs.is_empty();
            if !graph.nodes().any(shared) {
                roots.push(output.value);
            }
        }
        let forward = self.ancestors(roots, |_| false);
        for (node, data) in graph.nodes() {
            if forward[node] {
                self.phase[node] = Phase::Forward;
            } else {
                self.tangent[node] = !data.inputs.is_empty();
            }
        }
    }

    /// Divides what is not forward into backward and optimizer.
    fn updates(&mut self) {
        let graph = self.graph;
        // Arguments that outputs alias and forward never reads: moments.
        let mut moment: SecondaryMap<Node, bool> = SecondaryMap::new();
        for (output, &role) in graph.outputs.iter().zip(&self.roles) {
            let Some(index) = output.alias else { continue };
            let value = graph.parameters()[index as usize];
            let read = |&user: &Node| self.phase[user] == Phase::Forward;
            if role == OutputRole::State && !self.users.of(value).iter().any(read) {
                moment[graph.value(value).node] = true;
            }
        }
        // The first update of each window, and what follows from updates.
        let mut first: Vec<Option<Node>> = vec![None; self.starts.len() + 1];
        let mut update: SecondaryMap<Node, bool> = SecondaryMap::new();
        for (node, data) in graph.nodes() {
            if self.phase[node] != Phase::Unknown {
                continue;
            }
            let follows = self.operands(data).any(|operand| {
                moment[operand] || update[operand] && self.window(operand) == self.window(node)
            });
            update[node] = follows || self.combines_with_state(node, data, &update);
            if update[node] && self.tangent[node] {
                first[self.window(node)].get_or_insert(node);
            }
        }
        for (node, _) in graph.nodes() {
            let late = first[self.window(node)].is_some_and(|first| node >= first);
            update[node] |= self.tangent[node] && late && self.phase[node] == Phase::Unknown;
        }
        // Preparation that only updates use.
        for (node, data) in graph.nodes().rev() {
            if update[node] || self.phase[node] != Phase::Unknown || !self.tangent[node] {
                continue;
            }
            let used = data.outputs.iter().any(|&value| self.users.count(value) > 0);
            let only_updates = used && self.user_nodes(data).all(|user| update[user]);
            if only_updates && self.is_preparation(data) {
                update[node] = true;
            }
        }
        for (node, data) in graph.nodes() {
            if self.phase[node] == Phase::Unknown
                && (update[node] || self.tangent[node])
                && !data.inputs.is_empty()
            {
                self.phase[node] = if update[node] {
                    Phase::Optimizer
                } else {
                    Phase::Backward
                };
            }
        }
    }

    /// Whether a node whose users are updates prepares one: it scales by one number, squares, or reduces to
    /// one element, and does not itself finish a gradient.
    fn is_preparation(&self, data: &NodeData) -> bool {
        let graph = self.graph;
        // One element repeated: a learning rate, a loss scale, a clipping factor.
        let uniform = |value: Value| match graph.def(value).op {
            Op::Broadcast { .. } => graph.shape(graph.def(value).inputs[0]).numel() == 1,
            _ => graph.shape(value).rank() == 0,
        };
        match &data.op {
            Op::Unary(_) | Op::Compare(_) | Op::Select | Op::Cast(_) => true,
            Op::Binary(_) => {
                data.inputs[0] == data.inputs[1] || data.inputs.iter().any(|&value| uniform(value))
            }
            Op::Reduce { .. } => graph.shape(data.outputs[0]).numel() == 1,
            Op::Reshape(_) | Op::Broadcast { .. } => graph.shape(data.inputs[0]).numel() == 1,
            _ => false,
        }
    }

    /// What is left (arguments, constants, primal arithmetic of gradient formulas, dead nodes) goes where its
    /// first user is: the forward pass if any user is there, else backward, else optimizer.
    fn leaves(&mut self) {
        for (node, data) in self.graph.nodes().rev() {
            if self.phase[node] != Phase::Unknown && !data.inputs.is_empty() {
                continue;
            }
            let first = self.user_nodes(data).map(|user| self.phase[user]).min();
            let output = data.outputs.iter().any(|&value| self.users.outputs(value) > 0);
            self.phase[node] = match first {
                Some(phase) if phase != Phase::Unknown => phase,
                _ if self.phase[node] != Phase::Unknown => self.phase[node],
                _ if output || self.window(node) == 0 => Phase::Forward,
                _ => Phase::Backward,
            };
        }
    }
}

/// The seeds of a recording's backward passes, found by their form: recorded as `Ones`, one floating point
/// element. What follows from a gradient follows from one of them.
pub fn find_seeds(graph: &Graph) -> Vec<Node> {
    let is_seed = |data: &NodeData| {
        let recorded = data
            .provenance
            .operation
            .as_deref()
            .is_some_and(|name| name.ends_with("Ones"));
        let generated = match data.op {
            Op::Constant { .. } => true,
            Op::Broadcast { .. } => matches!(graph.def(data.inputs[0]).op, Op::Constant { .. }),
            _ => false,
        };
        let one = data
            .outputs
            .iter()
            .all(|&value| graph.shape(value).numel() == 1 && graph.dtype(value).is_float());
        recorded && generated && one
    };
    let seeds: Vec<Node> = graph
        .nodes()
        .filter(|(_, data)| is_seed(data))
        .map(|(node, _)| node)
        .collect();
    // A seed imported as a constant and its broadcast is one seed, and begins with the constant.
    let repeats = |node: Node| {
        let data = graph.node(node);
        data.inputs
            .first()
            .is_some_and(|&value| seeds.contains(&graph.value(value).node))
    };
    seeds.iter().copied().filter(|&node| !repeats(node)).collect()
}

/// Whether an operation on updated state may still be part of the update: elementwise, movement, or a norm.
fn looks_like_update(graph: &Graph, data: &NodeData) -> bool {
    match &data.op {
        Op::Reduce { .. } => graph.shape(data.outputs[0]).numel() == 1,
        op => op.is_pointwise() || op.is_movement(),
    }
}
