//! Fusion: which operations share a kernel.
//!
//! The graph is walked from its end to its beginning. When an operation is placed, all its users already
//! are, and each user has asked for the result at an index. An operation goes, in this order,
//!
//! 1. into the nest of a user. If that nest is the only user, the value never exists in memory; otherwise
//!    the nest also stores it, and the other users read it;
//! 2. into a nest that reads the same operands over the same space (siblings: a bias gradient beside the
//!    gradient it sums up);
//! 3. into a nest of its own.
//!
//! At the end, nests over the same space that read the same values and do not depend on each other become
//! one, and nests that only compute an operand of a product or convolution move into its kernel
//! ([`super::prologue`]).
//!
//! Movements are never placed: walking through them turns the wanted index of the result into the wanted
//! index of the operand ([`super::access`]). A value that must exist in memory because a library kernel wants
//! it there is *demanded*; a demanded movement becomes a copying nest.
//!
//! What keeps fusion sound:
//!
//! - *No cycles.* Each group knows the groups reachable from it. An operation with other users may join a
//!   group only if that group is not reachable from any of them.
//! - *One store for each element.* A value that others need may only join where its index is a bijection of
//!   the loop variables in use (all of them, or the row's).
//! - *No hidden work.* An operation used at an index that skips variables would be computed again and again;
//!   that is allowed for operations as cheap as a load, or where the computation moves out of the innermost
//!   loop.
//! - *Rows whole.* Operations on a row stay together with the statistics of the row (`rows.rs`; `row.rs`
//!   says what a row is).
//! - *Sections apart.* A group holds operations of the forward pass, or of the backward pass and the
//!   optimizer; and of one chunk of rows, where the partition asked for chunks (`section.rs`).
//! - *Bounds.* A nest that touches too many buffers or holds too many operations stops growing.

mod absorb;
mod library;
mod pointwise;
mod reduce;
mod row;
mod rows;
mod section;
mod set;
mod siblings;

use std::sync::Arc;

use rustc_hash::FxHashMap;

use kiln_graph::op::Op;
use kiln_graph::{Graph, Node, Scalar, Users, Value};

use super::access::{identity, operand_index};
use super::class::{Class, classify, node_index};
use super::layout::{self, Layouts};
use super::nest::{Nest, Store};
use super::parts::place_in_parts;
use super::recompute::inline_images;
use super::together::{join_casts, join_pieces, join_updates};
use super::{Buffer, Kernel, KernelKind, Schedule};
use crate::index::{Index, linear};
use crate::options::Options;
use crate::policy::Policy;
use absorb::absorb;
pub(crate) use section::Section;
use set::GroupSet;

/// Builds the schedule of `graph`. Without [`Options::fuse`] every operation is a kernel of its own.
pub fn schedule(graph: &Graph, options: &Options, policy: &Policy) -> Schedule {
    let fuse = options.fuse;
    let mut fuser = Fuser::new(graph, options, policy);
    fuser.place_outputs();
    let nodes: Vec<Node> = graph.nodes().map(|(node, _)| node).collect();
    let mut picks: Vec<Node> = Vec::new();
    for &node in nodes.iter().rev() {
        // A pick is placed as late as possible: by now every other operation that passes over the rows is
        // placed.
        let (due, later) = picks.into_iter().partition(|&pick| reads(graph, pick, node));
        picks = later;
        let due: Vec<Node> = due;
        for pick in due {
            fuser.place(pick);
        }
        if fuse && fuser.is_pick(node) {
            picks.push(node);
        } else {
            fuser.place(node);
        }
    }
    if fuse {
        fuser.merge_siblings();
        fuser.merge_followers();
    }
    let layouts = Arc::clone(&fuser.layouts);
    let mut kernels = fuser.finish();
    if fuse {
        kernels = absorb(graph, policy, &layouts, kernels);
        kernels = place_in_parts(graph, policy, kernels);
        kernels = join_updates(graph, policy, kernels);
        kernels = join_casts(graph, kernels);
        kernels = join_pieces(graph, policy, kernels);
    }
    super::decided::mark(graph, &mut kernels);
    Schedule {
        layouts,
        ..super::order::order(graph, kernels)
    }
}

/// Whether `reader` has a result of `node` as operand.
fn reads(graph: &Graph, reader: Node, node: Node) -> bool {
    let mut operands = graph.node(reader).inputs.iter();
    operands.any(|&operand| graph.value(operand).node == node)
}

/// A kernel in the making.
struct Group {
    nest: Option<Nest>,
    library: Option<Node>,
    /// Groups that (transitively) read what this one writes.
    after: GroupSet,
    reads: Vec<Value>,
    writes: Vec<Buffer>,
    /// The operands that the library operation itself reads from memory.
    operands: Vec<Value>,
    /// The part of the step that it belongs to; none while it holds no operation.
    part: Option<Section>,
}

struct Fuser<'a> {
    graph: &'a Graph,
    policy: &'a Policy,
    fuse: bool,
    /// Whether updates may follow a contraction.
    update_in_epilogue: bool,
    classes: Vec<Class>,
    layouts: Arc<Layouts>,
    groups: Vec<Group>,
    /// Groups that read a value from memory.
    readers: FxHashMap<Value, Vec<usize>>,
    /// Movements whose result must exist in memory.
    demanded: FxHashMap<Value, ()>,
    /// Values that are outputs in place.
    outputs: FxHashMap<Value, ()>,
    users: Users,
}

impl<'a> Fuser<'a> {
    fn new(graph: &'a Graph, options: &Options, policy: &'a Policy) -> Self {
        let fuse = options.fuse;
        let mut classes = classify(graph, policy);
        let users = graph.users();
        let mut layouts = Layouts::default();
        if fuse {
            layouts = layout::choose(graph, policy);
            inline_images(graph, &users, &layouts, policy.image_operations, &mut classes);
        }
        Self {
            graph,
            policy,
            fuse,
            update_in_epilogue: options.update_in_epilogue,
            classes,
            layouts: Arc::new(layouts),
            groups: Vec::new(),
            readers: FxHashMap::default(),
            demanded: FxHashMap::default(),
            outputs: FxHashMap::default(),
            users,
        }
    }

    fn class(&self, value: Value) -> Class {
        self.classes[node_index(self.graph.value(value).node)]
    }

    fn is_parameter(&self, value: Value) -> bool {
        matches!(self.graph.def(value).op, Op::Parameter { .. })
    }

    /// Outputs that are arguments, movements or repeated need a copy of their own.
    fn place_outputs(&mut self) {
        for (number, output) in self.graph.outputs.iter().enumerate() {
            let value = output.value;
            let stored = self.class(value) != Class::Inline && !self.is_parameter(value);
            if stored && self.outputs.insert(value, ()).is_none() {
                continue;
            }
            if self.graph.ty(value).numel() == 0 {
                continue;
            }
            let (index, extents) = identity(self.graph.shape(value), 0);
            self.copy(value, index, extents, Buffer::Output(number as u32));
        }
    }

    /// A nest that evaluates `value` over its own shape and stores it.
    fn copy(&mut self, value: Value, index: Vec<Index>, extents: Vec<i64>, buffer: Buffer) -> usize {
        let position = linear(&index, self.graph.shape(value));
        let nest = Nest {
            extents,
            stores: vec![Store {
                value,
                index: index.clone(),
                buffer,
                position,
            }],
            ..Nest::default()
        };
        let group = self.new_group(Some(nest), None);
        self.groups[group].writes.push(buffer);
        self.groups[group].part = Some(Section::of(self.graph, self.graph.value(value).node));
        self.visit(group, value, &index, true);
        group
    }

    fn new_group(&mut self, mut nest: Option<Nest>, library: Option<Node>) -> usize {
        if let Some(nest) = &mut nest {
            nest.layouts = Arc::clone(&self.layouts);
        }
        self.groups.push(Group {
            nest,
            library,
            after: GroupSet::default(),
            reads: Vec::new(),
            writes: Vec::new(),
            operands: Vec::new(),
            part: None,
        });
        self.groups.len() - 1
    }

    fn nest(&self, group: usize) -> Option<&Nest> {
        self.groups[group].nest.as_ref()
    }

    fn nest_mut(&mut self, group: usize) -> &mut Nest {
        self.groups[group].nest.get_or_insert_default()
    }

    /// Notes that `group` reads `value` at `index`, walking through inline operations. `through` looks behind
    /// `value` itself even where it is demanded (for the nest that makes it).
    fn visit(&mut self, group: usize, value: Value, index: &[Index], through: bool) {
        if self.class(value) == Class::Inline && (through || !self.demanded.contains_key(&value)) {
            let inputs = self.graph.def(value).inputs.clone();
            match operand_index(self.graph, value, index) {
                Some(operand) => self.visit(group, inputs[0], &operand, false),
                None => inputs.iter().for_each(|&v| self.visit(group, v, index, false)),
            }
            return;
        }
        self.nest_mut(group).add_use(value, index.to_vec());
        self.add_reader(group, value);
    }

    fn add_reader(&mut self, group: usize, value: Value) {
        let readers = self.readers.entry(value).or_default();
        if !readers.contains(&group) {
            readers.push(group);
        }
        if !self.groups[group].reads.contains(&value) {
            self.groups[group].reads.push(value);
        }
    }

    /// Notes that `group` makes `value`, so that its readers run after `group`.
    fn define(&mut self, group: usize, value: Value) {
        let readers = self.readers.get(&value).cloned().unwrap_or_default();
        let mut after = GroupSet::default();
        for reader in readers.into_iter().filter(|&reader| reader != group) {
            after.insert(reader);
            after.extend(&self.groups[reader].after);
        }
        self.extend_after(group, &after);
    }

    fn extend_after(&mut self, group: usize, after: &GroupSet) {
        if after.is_subset(&self.groups[group].after) {
            return;
        }
        self.groups[group].after.extend(after);
        let after = self.groups[group].after.clone();
        for other in &mut self.groups {
            if other.after.contains(group) {
                other.after.extend(&after);
            }
        }
    }

    fn place(&mut self, node: Node) {
        let data = self.graph.node(node);
        match self.classes[node_index(node)] {
            Class::Inline => {
                let value = data.outputs[0];
                if self.demanded.contains_key(&value) {
                    let (index, extents) = identity(self.graph.shape(value), 0);
                    let group = self.copy(value, index, extents, Buffer::Value(value));
                    self.define(group, value);
                }
            }
            _ if data.outputs.iter().all(|v| !self.is_needed(*v)) => {}
            Class::Pointwise => self.place_pointwise(node),
            Class::Reduce => self.place_reduce(node),
            Class::Join => self.place_join(node),
            Class::Library if matches!(data.op, Op::Parameter { .. }) => {}
            Class::Library => self.place_library(node),
        }
    }

    fn is_needed(&self, value: Value) -> bool {
        self.outputs.contains_key(&value) || self.readers.get(&value).is_some_and(|r| !r.is_empty())
    }

    /// Nests that use `value`, those over the largest space first: a statistic belongs into the loop that
    /// reads the data, not into the small one that updates its running mean. Among equals the nest that
    /// runs first comes first; it was made last.
    fn user_nests(&self, value: Value) -> Vec<usize> {
        let mut users = self.readers.get(&value).cloned().unwrap_or_default();
        users.retain(|&group| self.groups[group].nest.is_some());
        let points = |group: usize| self.nest(group).map_or(0, |nest| nest.points(nest.all()));
        users.sort_by_key(|&group| std::cmp::Reverse((points(group), group)));
        users
    }

    fn needed_outside(&self, value: Value, group: usize) -> bool {
        self.outputs.contains_key(&value)
            || self.groups[group].operands.contains(&value)
            || self
                .readers
                .get(&value)
                .is_some_and(|readers| readers.iter().any(|&reader| reader != group))
    }

    /// Whether `value` may be made in `group` as far as order and parts go.
    fn acyclic(&self, value: Value, group: usize) -> bool {
        let part = Section::of(self.graph, self.graph.value(value).node);
        self.groups[group].part.is_none_or(|own| own == part)
            && self.readers.get(&value).is_none_or(|readers| {
                readers
                    .iter()
                    .all(|&reader| reader == group || !self.groups[reader].after.contains(group))
            })
    }

    /// Whether `group` is a nest by itself, which siblings and reductions may join.
    fn is_open(&self, group: usize) -> bool {
        self.groups[group].library.is_none() && self.has_room(group)
    }

    fn has_room(&self, group: usize) -> bool {
        self.nest(group).is_some_and(|nest| {
            nest.members.len() < self.policy.nest_operations
                && nest.uses.len() + nest.stores.len() < self.policy.nest_buffers
        })
    }

    fn take_uses(&mut self, group: usize, value: Value) -> Vec<Vec<Index>> {
        let nest = self.nest_mut(group);
        let wanted = match nest.uses.iter().position(|(own, _)| *own == value) {
            Some(at) => nest.uses.swap_remove(at).1,
            None => Vec::new(),
        };
        self.groups[group].reads.retain(|&v| v != value);
        if let Some(readers) = self.readers.get_mut(&value) {
            readers.retain(|&reader| reader != group);
        }
        wanted
    }

    fn add_member(&mut self, group: usize, node: Node, index: Vec<Index>, store: bool) {
        let graph = self.graph;
        let value = graph.node(node).outputs[0];
        self.groups[group].part = Some(Section::of(graph, node));
        let nest = self.nest_mut(group);
        nest.members.push(node);
        nest.maps.insert(value, index.clone());
        if store {
            nest.add_store(graph, value, index);
            self.groups[group].writes.push(Buffer::Value(value));
        }
        self.define(group, value);
    }

    fn finish(self) -> Vec<Kernel> {
        let graph = self.graph;
        self.groups
            .into_iter()
            .filter(|group| group.nest.is_some() || group.library.is_some())
            .map(|group| {
                let mut reads: Vec<Value> = group.reads;
                reads.sort_unstable();
                let kind = match (group.nest, group.library) {
                    (Some(mut nest), library) => {
                        nest.members.sort_unstable();
                        nest.uses.sort_unstable_by_key(|(value, _)| *value);
                        match library {
                            Some(node) => KernelKind::Contraction(node, Box::new(nest)),
                            None => KernelKind::Nest(Box::new(nest)),
                        }
                    }
                    (None, Some(node)) => KernelKind::Library(node),
                    (None, None) => unreachable!("a group is made as one or the other"),
                };
                let nodes = match &kind {
                    KernelKind::Nest(nest) if nest.members.is_empty() => nest
                        .stores
                        .iter()
                        .map(|store| graph.value(store.value).node)
                        .collect(),
                    KernelKind::Nest(nest) | KernelKind::Contraction(_, nest) => nest.members.clone(),
                    KernelKind::Library(node) => vec![*node],
                    KernelKind::Together(nests) => {
                        nests.iter().flat_map(|nest| nest.members.clone()).collect()
                    }
                };
                Kernel {
                    kind,
                    reads: reads.into_iter().map(Buffer::Value).collect(),
                    writes: group.writes,
                    nodes,
                    prologues: Vec::new(),
                    part: None,
                }
            })
            .collect()
    }
}

/// The constant that every element of a scatter's operand is; the scatter's kernel writes it instead of
/// reading such a tensor.
pub fn starts_constant(graph: &Graph, node: Node) -> Option<Scalar> {
    let data = graph.node(node);
    if !matches!(data.op, Op::Scatter { .. } | Op::IndexPut { .. }) {
        return None;
    }
    let mut value = data.inputs[0];
    loop {
        let data = graph.def(value);
        match &data.op {
            Op::Constant { value, .. } => return Some(*value),
            Op::Broadcast { .. } | Op::Reshape(_) => value = data.inputs[0],
            _ => return None,
        }
    }
}
