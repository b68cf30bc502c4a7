//! Fusion: which operations share a kernel.
//!
//! The graph is walked from its end to its beginning, so that when an operation is placed all its users already are, and
//! each user has said at which index it wants the result. An operation goes, in this order,
//!
//! 1. into the nest of a user. If that nest is the only user the value never exists in memory; otherwise the nest also
//!    stores it, and the others read it;
//! 2. into a nest that reads the same operands over the same space (siblings: a bias gradient beside the gradient it sums up);
//! 3. into a nest of its own.
//!
//! At the end, nests over the same space that read the same values and do not depend on each other become one.
//!
//! Movements are never placed: walking through them turns the wanted index of the result into the wanted index of the operand
//! ([`super::access`]). A value that must exist in memory because a library kernel wants it there is *demanded*; a demanded
//! movement becomes a copying nest.
//!
//! What keeps fusion sound:
//!
//! - *No cycles.* Each group knows the groups reachable from it. An operation with other users may join a group only if that
//!   group is not reachable from any of them.
//! - *One store for each element.* A value that others need may only join where its index is a bijection of the loop
//!   variables in use (all of them, or the row's).
//! - *No hidden work.* An operation used at an index that skips variables would be computed again and again; that is allowed
//!   for operations as cheap as a load, or where the computation moves out of the innermost loop.
//! - *Phases apart.* A group holds operations of the forward pass, or of the backward pass and the optimizer.
//! - *Bounds.* A nest that touches too many buffers or holds too many operations stops growing.

use std::collections::BTreeSet;
use std::sync::Arc;

use rustc_hash::FxHashMap;

use kiln_graph::op::{Dims, Op};
use kiln_graph::{DType, Graph, Node, NodeData, Phase, Scalar, Value};

use super::access::{identity, identity_in, operand_index, side, strided};
use super::class::{Class, classify, is_cheap, node_index};
use super::epilogue;
use super::layout::{self, Layouts};
use super::nest::{Nest, Split, Store, bijective, vars};
use super::recompute::inline_images;
use super::{Buffer, Kernel, KernelKind, Schedule};
use crate::index::{Index, Var, bit, coordinates, linear};

/// Most buffers that one nest reads and writes.
const MAX_BUFFERS: usize = 24;
/// Most operations in one nest.
const MAX_MEMBERS: usize = 160;
/// Largest reduction over outer dimensions that runs inside a row instead of in chunks of rows.
const SMALL_REDUCTION: i64 = 64;
/// Elements from which a reduction to a single row is worth splitting over threads.
const BIG_REDUCTION: i64 = 32 * 1024;

/// Builds the schedule of `graph`. Without `fuse` every operation is a kernel of its own.
pub fn schedule(graph: &Graph, fuse: bool) -> Schedule {
    let mut fuser = Fuser::new(graph, fuse);
    fuser.place_outputs();
    let nodes: Vec<Node> = graph.nodes().map(|(node, _)| node).collect();
    for &node in nodes.iter().rev() {
        fuser.place(node);
    }
    if fuse {
        fuser.merge_siblings();
    }
    let layouts = Arc::clone(&fuser.layouts);
    Schedule {
        layouts,
        ..super::order::order(graph, fuser.finish())
    }
}

/// A kernel in the making.
struct Group {
    nest: Option<Nest>,
    library: Option<Node>,
    /// Groups that (transitively) read what this one writes.
    after: BTreeSet<usize>,
    reads: Vec<Value>,
    writes: Vec<Buffer>,
    /// What the library operation itself reads, from memory.
    operands: Vec<Value>,
    /// Whether it runs in the forward pass; none while it holds no operation.
    forward: Option<bool>,
}

struct Fuser<'a> {
    graph: &'a Graph,
    fuse: bool,
    classes: Vec<Class>,
    layouts: Arc<Layouts>,
    groups: Vec<Group>,
    /// Groups that read a value from memory.
    readers: FxHashMap<Value, Vec<usize>>,
    /// Movements whose result must exist in memory.
    demanded: FxHashMap<Value, ()>,
    /// Values that are outputs in place.
    outputs: FxHashMap<Value, ()>,
}

impl<'a> Fuser<'a> {
    fn new(graph: &'a Graph, fuse: bool) -> Self {
        let mut classes = classify(graph);
        let mut layouts = Layouts::default();
        if fuse {
            layouts = layout::choose(graph);
            inline_images(graph, &graph.users(), &layouts, &mut classes);
        }
        Self {
            graph,
            fuse,
            classes,
            layouts: Arc::new(layouts),
            groups: Vec::new(),
            readers: FxHashMap::default(),
            demanded: FxHashMap::default(),
            outputs: FxHashMap::default(),
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
        self.groups[group].forward = Some(self.is_forward(self.graph.value(value).node));
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
            after: BTreeSet::new(),
            reads: Vec::new(),
            writes: Vec::new(),
            operands: Vec::new(),
            forward: None,
        });
        self.groups.len() - 1
    }

    fn nest(&self, group: usize) -> Option<&Nest> {
        self.groups[group].nest.as_ref()
    }

    fn nest_mut(&mut self, group: usize) -> &mut Nest {
        self.groups[group].nest.get_or_insert_default()
    }

    /// Notes that `group` reads `value` at `index`, walking through inline operations. `through` looks behind `value`
    /// itself even where it is demanded (for the nest that makes it).
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

    /// `group` now makes `value`: whoever reads it comes after.
    fn define(&mut self, group: usize, value: Value) {
        let readers = self.readers.get(&value).cloned().unwrap_or_default();
        let mut after = BTreeSet::new();
        for reader in readers.into_iter().filter(|&reader| reader != group) {
            after.insert(reader);
            after.extend(self.groups[reader].after.iter().copied());
        }
        self.extend_after(group, after);
    }

    fn extend_after(&mut self, group: usize, after: BTreeSet<usize>) {
        if after.is_subset(&self.groups[group].after) {
            return;
        }
        self.groups[group].after.extend(after);
        let after = self.groups[group].after.clone();
        for other in 0..self.groups.len() {
            if self.groups[other].after.contains(&group) {
                self.groups[other].after.extend(after.iter().copied());
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

    fn place_library(&mut self, node: Node) {
        let data = self.graph.node(node);
        let group = match self.epilogue(node) {
            Some(group) => {
                self.join_epilogue(group, node);
                group
            }
            None => {
                let group = self.new_group(None, Some(node));
                for &value in &data.outputs {
                    self.groups[group].writes.push(Buffer::Value(value));
                    self.define(group, value);
                }
                group
            }
        };
        for (position, &operand) in data.inputs.iter().enumerate() {
            if position == 0 && starts_constant(self.graph, node).is_some() {
                continue;
            }
            let base = self.library_operand(data, position, operand);
            self.add_reader(group, base);
            self.groups[group].operands.push(base);
        }
    }

    /// The nest that may become the epilogue of the contraction `node`.
    fn epilogue(&self, node: Node) -> Option<usize> {
        let data = self.graph.node(node);
        if !self.fuse || !data.op.is_contraction() {
            return None;
        }
        let value = data.outputs[0];
        let stop = |v: Value| self.class(v) != Class::Inline || self.demanded.contains_key(&v);
        self.user_nests(value).into_iter().find(|&group| {
            let Some(nest) = self.nest(group) else {
                return false;
            };
            let [wanted] = nest.uses_of(value) else {
                return false;
            };
            self.groups[group].library.is_none()
                && self.has_room(group)
                && self.acyclic(value, group)
                && epilogue::has_template(self.graph, nest, node, &stop)
                && epilogue::fits(self.graph, nest, value, wanted, self.needed_outside(value, group))
        })
    }

    /// Makes `node` the contraction before the nest of `group`.
    fn join_epilogue(&mut self, group: usize, node: Node) {
        let value = self.graph.node(node).outputs[0];
        let store = self.needed_outside(value, group);
        self.groups[group].library = Some(node);
        if let Some(index) = self.take_uses(group, value).into_iter().next() {
            self.add_member(group, node, index, store);
        }
    }

    /// The stored value through which a library kernel reads `operand`: a strided window where the kernel takes one.
    fn library_operand(&mut self, node: &NodeData, position: usize, operand: Value) -> Value {
        let dtype = self.graph.dtype(operand);
        let usual = matches!(dtype, DType::F32 | DType::Bool);
        let takes_windows = match &node.op {
            Op::DotGeneral(_) => usual || dtype.is_float(),
            Op::ConvWeightGrad { .. } => usual,
            // Weights are packed from contiguous memory.
            Op::Conv(_) | Op::ConvInputGrad { .. } => usual && position == 0,
            Op::Attention(dims) => usual && dims.is_tensor(position),
            Op::AttentionGrad(dims) => {
                usual && (dims.is_tensor(position) || position == dims.operands().forward + 1)
            }
            _ => false,
        };
        if takes_windows {
            let stop = |v: Value| self.class(v) != Class::Inline || self.demanded.contains_key(&v);
            if let Some(window) = strided(self.graph, &self.layouts, operand, &stop)
                && (!matches!(node.op, Op::DotGeneral(_))
                    || side(self.graph, node, position, &window).is_some())
            {
                return window.base;
            }
        }
        if self.class(operand) == Class::Inline {
            self.demanded.insert(operand, ());
        }
        operand
    }

    /// Each operand of a concatenation is stored into its part of the result; operands of one shape share a nest.
    fn place_join(&mut self, node: Node) {
        let data = self.graph.node(node);
        let Op::Concat { axis } = data.op else { return };
        let result = data.outputs[0];
        let mut start = 0;
        let mut parts: Vec<(Vec<usize>, usize)> = Vec::new();
        for &operand in &data.inputs {
            let extents_of = self.graph.shape(operand).to_vec();
            let (index, extents) = identity_in(&extents_of, self.layouts.get(&result));
            let mut moved = index.clone();
            moved[axis] = moved[axis].shift(start);
            start += extents_of[axis] as i64;
            let position = layout::position(self.graph, &self.layouts, result, &moved);
            let store = Store {
                value: operand,
                index: index.clone(),
                buffer: Buffer::Value(result),
                position,
            };
            let known = parts.iter().find(|(shape, _)| self.fuse && *shape == extents_of);
            let group = match known {
                Some(&(_, group)) => group,
                None => {
                    let nest = Nest {
                        extents,
                        ..Nest::default()
                    };
                    let group = self.new_group(Some(nest), None);
                    self.groups[group].writes.push(Buffer::Value(result));
                    self.groups[group].forward = Some(self.is_forward(node));
                    self.define(group, result);
                    parts.push((extents_of, group));
                    group
                }
            };
            self.nest_mut(group).stores.push(store);
            self.visit(group, operand, &index, false);
        }
    }

    // ---- pointwise operations ----

    fn place_pointwise(&mut self, node: Node) {
        let value = self.graph.node(node).outputs[0];
        if self.fuse {
            for group in self.user_nests(value) {
                let needs_store = self.needed_outside(value, group);
                if let Some(primary) = self.pointwise_fits(group, node, needs_store) {
                    self.join(group, node, primary, needs_store);
                    return;
                }
            }
            if let Some((group, index)) = self.sibling(node) {
                self.nest_mut(group).add_use(value, index.clone());
                self.join(group, node, index, true);
                return;
            }
        }
        let (index, extents) = self.identity_of(value);
        let group = self.new_group(
            Some(Nest {
                extents,
                ..Nest::default()
            }),
            None,
        );
        self.nest_mut(group).add_use(value, index.clone());
        self.join(group, node, index, true);
    }

    /// Nests that use `value`: those over the largest space first (a statistic belongs into the loop that reads the data, not into the
    /// small one that updates its running mean), among equals the one that runs first, which was made last.
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

    /// Whether `value` may be made in `group` as far as order and phase go.
    fn acyclic(&self, value: Value, group: usize) -> bool {
        let forward = self.is_forward(self.graph.value(value).node);
        self.groups[group].forward.is_none_or(|own| own == forward)
            && self.readers.get(&value).is_none_or(|readers| {
                readers
                    .iter()
                    .all(|&reader| reader == group || !self.groups[reader].after.contains(&group))
            })
    }

    /// Whether a node runs in the forward pass. What the backward pass computes once more, and what it does at all, stays out of the
    /// kernels of the forward pass: otherwise what was recomputed to be dropped meanwhile would be kept.
    fn is_forward(&self, node: Node) -> bool {
        let phase = self.graph.node(node).provenance.phase;
        !matches!(phase, Phase::Backward | Phase::Optimizer)
    }

    /// Whether `group` is a nest by itself, which siblings and reductions may join.
    fn is_open(&self, group: usize) -> bool {
        self.groups[group].library.is_none() && self.has_room(group)
    }

    fn has_room(&self, group: usize) -> bool {
        self.nest(group).is_some_and(|nest| {
            nest.members.len() < MAX_MEMBERS && nest.uses.len() + nest.stores.len() < MAX_BUFFERS
        })
    }

    /// The index to compute `node` at, if it may become a member of the nest of a user.
    fn pointwise_fits(&self, group: usize, node: Node, needs_store: bool) -> Option<Vec<Index>> {
        let data = self.graph.node(node);
        let value = data.outputs[0];
        let nest = self.nest(group)?;
        let wanted = nest.uses_of(value);
        if wanted.is_empty() || !self.has_room(group) || !self.acyclic(value, group) {
            return None;
        }
        // What an epilogue stores was decided with its contraction.
        if needs_store && self.groups[group].library.is_some() {
            return None;
        }
        let proper = wanted.iter().find(|index| {
            nest.storable(self.graph, value, index) || self.row_split(nest, value, index).is_some()
        });
        let primary = match proper {
            Some(index) => index,
            None if needs_store => return None,
            None => &wanted[0],
        };
        let innermost = nest
            .extents
            .len()
            .checked_sub(1)
            .map_or(0, |last| bit(last as Var));
        let inner = nest.split.map_or(innermost, |split| split.cols);
        for index in wanted {
            let complete = index == primary && proper.is_some();
            let hoisted = vars(index) & inner == 0 && vars(index) != nest.all();
            if !(complete || hoisted || is_cheap(&data.op)) {
                return None;
            }
        }
        (wanted.len() <= 4).then(|| primary.clone())
    }

    /// The split that makes `value` a row's in a nest that has none: for values computed from a reduction of the nest's whole space,
    /// which is going to follow them into the nest.
    fn row_split(&self, nest: &Nest, value: Value, index: &[Index]) -> Option<Split> {
        let rows = vars(index);
        let cols = nest.all() & !rows;
        // Columns of contiguous elements are read once for each pass; others would be read with large strides.
        let contiguous = nest
            .extents
            .len()
            .checked_sub(1)
            .is_some_and(|last| cols & bit(last as Var) != 0);
        if nest.split.is_some() || rows == 0 || !contiguous || !bijective(index, self.graph.shape(value)) {
            return None;
        }
        if nest.points(rows) < 8 || nest.stores.iter().any(|store| vars(&store.index) != nest.all()) {
            return None;
        }
        let mut frontier = vec![value];
        let mut seen = 0;
        while let Some(&value) = frontier.get(seen)
            && seen < 12
        {
            seen += 1;
            let data = self.graph.def(value);
            match data.op {
                Op::Reduce { .. }
                    if self.graph.ty(data.inputs[0]).numel() as i64 == nest.points(nest.all()) =>
                {
                    return Some(Split { rows, cols });
                }
                Op::Reshape(_) => frontier.push(data.inputs[0]),
                ref op if op.is_pointwise() => frontier.extend(data.inputs.iter().copied()),
                _ => {}
            }
        }
        None
    }

    /// A nest that reads an operand of `node` over a space of the same shape.
    fn sibling(&self, node: Node) -> Option<(usize, Vec<Index>)> {
        let data = self.graph.node(node);
        let value = data.outputs[0];
        let shape = self.graph.shape(value);
        if shape.numel() < 256 {
            return None;
        }
        for &operand in &data.inputs {
            if self.graph.shape(operand) != shape || self.class(operand) == Class::Inline {
                continue;
            }
            for group in self.user_nests(operand) {
                if !self.is_open(group) || !self.acyclic(value, group) {
                    continue;
                }
                let Some(nest) = self.nest(group) else { continue };
                if !nest.uses_of(value).is_empty() {
                    continue;
                }
                let full = |index: &&Vec<Index>| vars(index) == nest.all() && bijective(index, shape);
                if let Some(index) = nest.uses_of(operand).iter().find(full) {
                    return Some((group, index.clone()));
                }
            }
        }
        None
    }

    /// Makes `node` a member of `group` at `primary`, which is among the uses of its result there.
    fn join(&mut self, group: usize, node: Node, primary: Vec<Index>, store: bool) {
        let graph = self.graph;
        let value = graph.node(node).outputs[0];
        if store
            && let Some(nest) = self.nest(group)
            && let Some(split) = self.row_split(nest, value, &primary)
        {
            self.nest_mut(group).split = Some(split);
        }
        let wanted = self.take_uses(group, value);
        for index in &wanted {
            let operands = self.nest_mut(group).operands(graph, node, index);
            for (operand, at) in operands {
                self.visit(group, operand, &at, false);
            }
        }
        self.add_member(group, node, primary, store);
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
        self.groups[group].forward = Some(self.is_forward(node));
        let nest = self.nest_mut(group);
        nest.members.push(node);
        nest.maps.insert(value, index.clone());
        if store {
            nest.add_store(graph, value, index);
            self.groups[group].writes.push(Buffer::Value(value));
        }
        self.define(group, value);
    }

    // ---- reductions ----

    fn place_reduce(&mut self, node: Node) {
        let data = self.graph.node(node);
        let Op::Reduce { axes, .. } = &data.op else { return };
        let (x, value) = (data.inputs[0], data.outputs[0]);
        if self.fuse {
            for group in self.user_nests(value) {
                if self.reduce_into_user(group, node, axes) {
                    return;
                }
            }
            if let Some((group, index)) = self.reduce_sibling(x, value)
                && let Some((split, late)) = self.reduce_role(group, &index, axes)
            {
                self.join_reduce(group, node, index, axes, split, late, true);
                return;
            }
        }
        // Variables number the dimensions of what is behind views: that is what others will compute and store. A view that mixes kept
        // and reduced dimensions does not allow that.
        let behind = if self.fuse { self.views(x) } else { vec![x] };
        for path in [behind, vec![x]] {
            let (base, extents) = self.identity_of(path[path.len() - 1]);
            let index = self.index_along(&path, &base);
            let nest = Nest {
                extents,
                ..Nest::default()
            };
            let trivial = path.len() == 1 && axes.iter().all(|&axis| self.graph.shape(x)[axis] == 1);
            let role = match role(&nest, &index, axes) {
                None if trivial => Some((
                    Split {
                        rows: nest.all(),
                        cols: 0,
                    },
                    false,
                )),
                role => role,
            };
            if let Some((split, late)) = role {
                let group = self.new_group(Some(nest), None);
                self.join_reduce(group, node, index, axes, split, late, true);
                return;
            }
        }
        unreachable!("kept and reduced dimensions of a value itself are apart");
    }

    /// Reduces inside the nest that uses the result, as passes over its rows.
    fn reduce_into_user(&mut self, group: usize, node: Node, axes: &Dims) -> bool {
        let data = self.graph.node(node);
        let (x, value) = (data.inputs[0], data.outputs[0]);
        let shape = self.graph.shape(x);
        let Some(nest) = self.nest(group) else {
            return false;
        };
        let [wanted] = nest.uses_of(value) else {
            return false;
        };
        let wanted = wanted.clone();
        if !self.is_open(group) || !self.acyclic(value, group) || wanted.iter().any(Index::has_data) {
            return false;
        }
        let needs_store = self.needed_outside(value, group);
        let rows = vars(&wanted);
        let reduced: Vec<usize> = axes.iter().map(|&axis| shape[axis]).collect();
        let count: i64 = reduced.iter().product::<usize>() as i64;
        let contiguous = self.reduces_contiguous(x, axes);
        let kept: i64 = (shape.numel() as i64) / count.max(1);
        // Few long rows would leave threads idle; long columns would be read with large strides.
        if (kept < 8 && count > BIG_REDUCTION) || (!contiguous && count > SMALL_REDUCTION) {
            return false;
        }
        let mut extra: Vec<i64> = Vec::new();
        let split = match nest.split {
            Some(split) if split.rows == rows && nest.points(split.cols) == count => split,
            Some(_) => return false,
            None => {
                let others = nest.all() & !rows;
                let cols = if others == 0 {
                    let first = nest.extents.len();
                    extra = reduced.iter().filter(|&&e| e > 1).map(|&e| e as i64).collect();
                    (0..extra.len()).fold(0, |set, at| set | bit((first + at) as Var))
                } else if nest.points(others) == count {
                    others
                } else {
                    return false;
                };
                // What is stored so far must be complete at each point or once for each row.
                let stored = nest.stores.iter().all(|store| {
                    let used = vars(&store.index);
                    used == rows || used == nest.all() | cols
                });
                if !stored || cols == 0 {
                    return false;
                }
                Split { rows, cols }
            }
        };
        // Anything else would reduce the same elements again and again.
        if !bijective(&wanted, self.graph.shape(value)) {
            return false;
        }
        let nest = self.nest_mut(group);
        nest.extents.extend(extra);
        let columns: Vec<(Var, i64)> = nest.list(split.cols);
        let reduced_index = columns_as(&columns, &reduced);
        nest.reduced.insert(value, reduced_index.clone());
        let mut kept_index = wanted.iter();
        let mut reduced_index = reduced_index.into_iter();
        let index: Vec<Index> = (0..shape.rank())
            .map(|axis| {
                let part = if axes.contains(&axis) {
                    reduced_index.next()
                } else {
                    kept_index.next().cloned()
                };
                part.unwrap_or_default()
            })
            .collect();
        self.take_uses(group, value);
        self.nest_mut(group).split = Some(split);
        self.visit(group, x, &index, false);
        self.add_member(group, node, wanted, needs_store);
        true
    }

    /// The index of a value over variables of its own, the last of which is contiguous.
    fn identity_of(&self, value: Value) -> (Vec<Index>, Vec<i64>) {
        identity_in(self.graph.shape(value), self.layouts.get(&value))
    }

    /// Whether neighbours in memory of what is behind `x` are combined by a reduction over `axes`.
    fn reduces_contiguous(&self, x: Value, axes: &Dims) -> bool {
        let path = self.views(x);
        let (base, extents) = self.identity_of(path[path.len() - 1]);
        let Some(last) = extents.len().checked_sub(1) else {
            return false;
        };
        let index = self.index_along(&path, &base);
        axes.iter()
            .any(|&axis| index[axis].vars() & bit(last as Var) != 0)
    }

    /// The index of `x` where a value behind it is read at `index`; `path` leads from `x` to that value through reshapes, transposes
    /// and pointwise operations.
    fn index_along(&self, path: &[Value], index: &[Index]) -> Vec<Index> {
        let mut index = index.to_vec();
        for pair in path.windows(2).rev() {
            let (view, operand) = (pair[0], pair[1]);
            match &self.graph.def(view).op {
                Op::Reshape(shape) => index = coordinates(&linear(&index, self.graph.shape(operand)), shape),
                Op::Transpose(perm) => index = perm.iter().map(|&axis| index[axis].clone()).collect(),
                _ => {}
            }
        }
        index
    }

    /// `x` and the values behind it through reshapes and transposes.
    fn views(&self, x: Value) -> Vec<Value> {
        let mut path = vec![x];
        loop {
            let last = path[path.len() - 1];
            let data = self.graph.def(last);
            if !matches!(data.op, Op::Reshape(_) | Op::Transpose(_)) || self.class(last) != Class::Inline {
                return path;
            }
            path.push(data.inputs[0]);
        }
    }

    /// A nest that reads `x`, or what `x` is computed from element by element, over all its variables.
    fn reduce_sibling(&self, x: Value, result: Value) -> Option<(usize, Vec<Index>)> {
        let count = self.graph.ty(x).numel();
        let mut frontier = vec![vec![x]];
        let mut seen = 0;
        while let Some(path) = frontier.get(seen).cloned() {
            seen += 1;
            if seen > 10 {
                break;
            }
            let value = path[path.len() - 1];
            for group in self.user_nests(value) {
                if !self.is_open(group) || !self.acyclic(result, group) {
                    continue;
                }
                let Some(nest) = self.nest(group) else { continue };
                // A nest that uses the result in a way that does not fit must get it from memory.
                if !nest.uses_of(result).is_empty() {
                    continue;
                }
                let own = self.graph.shape(value);
                let full = |index: &&Vec<Index>| vars(index) == nest.all() && bijective(index, own);
                if let Some(index) = nest.uses_of(value).iter().find(full) {
                    return Some((group, self.index_along(&path, index)));
                }
            }
            let data = self.graph.def(value);
            if data.op.is_pointwise() || matches!(data.op, Op::Reshape(_) | Op::Transpose(_)) {
                for &operand in &data.inputs {
                    let known = frontier.iter().any(|path| path.contains(&operand));
                    if self.graph.ty(operand).numel() == count && !known {
                        let mut longer = path.clone();
                        longer.push(operand);
                        frontier.push(longer);
                    }
                }
            }
        }
        None
    }

    /// How a reduction over `axes` of a value at `index` fits into a nest: its rows and columns, and whether it is late.
    fn reduce_role(&self, group: usize, index: &[Index], axes: &Dims) -> Option<(Split, bool)> {
        role(self.nest(group)?, index, axes)
    }
    #[allow(clippy::too_many_arguments)]
    fn join_reduce(
        &mut self,
        group: usize,
        node: Node,
        index: Vec<Index>,
        axes: &Dims,
        split: Split,
        late: bool,
        store: bool,
    ) {
        let data = self.graph.node(node);
        let (x, value) = (data.inputs[0], data.outputs[0]);
        let result: Vec<Index> = (0..index.len())
            .filter(|axis| !axes.contains(axis))
            .map(|axis| index[axis].clone())
            .collect();
        let reduced = axes.iter().map(|&axis| index[axis].clone()).collect();
        let nest = self.nest_mut(group);
        nest.split = Some(split);
        nest.reduced.insert(value, reduced);
        self.visit(group, x, &index, false);
        self.add_member(group, node, result, store);
        if late {
            self.nest_mut(group).late.push(value);
        }
    }

    // ---- nests side by side ----

    /// Joins nests over the same space that read the same values and do not depend on each other: sums of a gradient, and what passes
    /// the gradient on.
    fn merge_siblings(&mut self) {
        let mut shared: Vec<(Value, Vec<usize>)> = self
            .readers
            .iter()
            .map(|(value, readers)| (*value, readers.clone()))
            .collect();
        shared.sort_unstable_by_key(|(value, _)| *value);
        let mut gone: FxHashMap<usize, usize> = FxHashMap::default();
        for (value, readers) in shared {
            if self.graph.ty(value).numel() < 256 {
                continue;
            }
            for at in 0..readers.len() {
                for &other in &readers[at + 1..] {
                    let root = |mut group: usize| {
                        while let Some(&next) = gone.get(&group) {
                            group = next;
                        }
                        group
                    };
                    let (a, b) = (root(readers[at]), root(other));
                    if a != b && self.mergeable(value, a, b) {
                        self.merge(a, b);
                        gone.insert(b, a);
                    }
                }
            }
        }
    }

    fn mergeable(&self, value: Value, a: usize, b: usize) -> bool {
        let (Some(x), Some(y)) = (self.nest(a), self.nest(b)) else {
            return false;
        };
        let splits = match (x.split, y.split) {
            (Some(p), Some(q)) => p == q,
            // What has no split must be complete at each point.
            (None, Some(_)) => x.stores.iter().all(|store| vars(&store.index) == x.all()),
            (Some(_), None) => y.stores.iter().all(|store| vars(&store.index) == y.all()),
            (None, None) => true,
        };
        let own = self.graph.shape(value);
        let full = |nest: &Nest, index: &Vec<Index>| vars(index) == nest.all() && bijective(index, own);
        let aligned = x
            .uses_of(value)
            .iter()
            .any(|index| full(x, index) && y.uses_of(value).contains(index));
        let small = x.members.len() + y.members.len() <= MAX_MEMBERS
            && x.uses.len() + y.uses.len() + x.stores.len() + y.stores.len() <= MAX_BUFFERS;
        splits
            && aligned
            && small
            && self.groups[a].library.is_none()
            && self.groups[b].library.is_none()
            && self.groups[a].forward == self.groups[b].forward
            && x.extents == y.extents
            && y.data.is_empty()
            && !self.groups[a].after.contains(&b)
            && !self.groups[b].after.contains(&a)
            // Copies into outputs and parts of concatenations stay simple.
            && !x.members.is_empty()
            && !y.members.is_empty()
    }

    /// Moves everything of `b` into `a`.
    fn merge(&mut self, a: usize, b: usize) {
        let Some(other) = self.groups[b].nest.take() else {
            return;
        };
        let nest = self.nest_mut(a);
        nest.split = nest.split.or(other.split);
        nest.members.extend(other.members);
        nest.maps.extend(other.maps);
        nest.reduced.extend(other.reduced);
        nest.stores.extend(other.stores);
        nest.late.extend(other.late);
        for (value, indices) in other.uses {
            for index in indices {
                nest.add_use(value, index);
            }
        }
        let reads = std::mem::take(&mut self.groups[b].reads);
        for value in reads {
            if let Some(readers) = self.readers.get_mut(&value) {
                readers.retain(|&reader| reader != b);
            }
            self.add_reader(a, value);
        }
        let writes = std::mem::take(&mut self.groups[b].writes);
        self.groups[a].writes.extend(writes);
        let after = std::mem::take(&mut self.groups[b].after);
        for group in &mut self.groups {
            if group.after.remove(&b) {
                group.after.insert(a);
            }
        }
        self.extend_after(a, after);
        // Whoever came before `b` now also comes before what follows `a`.
        let after = self.groups[a].after.clone();
        for group in &mut self.groups {
            if group.after.contains(&a) {
                group.after.extend(after.iter().copied());
            }
        }
    }

    // ---- the result ----

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
                };
                Kernel {
                    kind,
                    reads: reads.into_iter().map(Buffer::Value).collect(),
                    writes: group.writes,
                    nodes,
                }
            })
            .collect()
    }
}

/// How a reduction over `axes` of a value at `index` fits into a nest: its rows and columns, and whether it is late.
fn role(nest: &Nest, index: &[Index], axes: &Dims) -> Option<(Split, bool)> {
    let part = |inside: bool| {
        (0..index.len())
            .filter(|axis| axes.contains(axis) == inside)
            .fold(0, |set, axis| set | index[axis].vars())
    };
    let (kept, reduced) = (part(false), part(true));
    if kept & reduced != 0 || kept | reduced != nest.all() || reduced == 0 {
        return None;
    }
    let Some(split) = nest.split else {
        let last = bit(nest.extents.len() as Var - 1);
        let row = Split {
            rows: kept,
            cols: reduced,
        };
        let count = nest.points(reduced);
        if kept == 0 && count > BIG_REDUCTION && nest.extents.len() > 1 {
            let split = Split {
                rows: reduced & !last,
                cols: last,
            };
            return Some((split, true));
        }
        if reduced & last != 0 || count <= SMALL_REDUCTION {
            let complete = nest.stores.iter().all(|store| {
                let used = vars(&store.index);
                used == nest.all() || used == kept
            });
            return complete.then_some((row, false));
        }
        let complete = nest.stores.iter().all(|store| vars(&store.index) == nest.all());
        let late = Split {
            rows: reduced,
            cols: kept,
        };
        return complete.then_some((late, true));
    };
    if reduced == split.cols && kept == split.rows {
        Some((split, false))
    } else if (reduced == split.rows && kept == split.cols) || reduced == nest.all() {
        Some((split, true))
    } else {
        None
    }
}

/// The constant that a scatter begins with in every element; its kernel writes it instead of reading a tensor of it.
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

/// The column variables as an index over the reduced extents: one to one where they agree, else by position.
fn columns_as(columns: &[(Var, i64)], reduced: &[usize]) -> Vec<Index> {
    let needed: Vec<i64> = reduced.iter().filter(|&&e| e > 1).map(|&e| e as i64).collect();
    let same = needed
        .iter()
        .copied()
        .eq(columns.iter().map(|&(_, extent)| extent));
    if same {
        let mut own = columns.iter();
        return reduced
            .iter()
            .map(|&extent| match extent {
                1 => Index::default(),
                _ => own
                    .next()
                    .map_or_else(Index::default, |&(var, e)| Index::var(var, e)),
            })
            .collect();
    }
    let index: Vec<Index> = columns
        .iter()
        .map(|&(var, extent)| Index::var(var, extent))
        .collect();
    let extents: Vec<usize> = columns.iter().map(|&(_, extent)| extent as usize).collect();
    coordinates(&linear(&index, &extents), reduced)
}
