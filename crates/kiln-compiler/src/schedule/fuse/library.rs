//! Operations of the library, contractions with their epilogues, and concatenations.

use kiln_graph::op::Op;
use kiln_graph::{DType, Node, NodeData, Phase, Value};

use super::{Fuser, Section, starts_constant};
use crate::products::{self, Cut};
use crate::schedule::access::{identity_in, side_of, strided};
use crate::schedule::attention::result_of_forward;
use crate::schedule::class::Class;
use crate::schedule::nest::{Nest, Store};
use crate::schedule::together::is_bucket;
use crate::schedule::{Buffer, epilogue, layout};

impl Fuser<'_> {
    pub(super) fn place_library(&mut self, node: Node) {
        let data = self.graph.node(node);
        self.join_users(node);
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
        let cut = self.pieces(node);
        for position in 0..data.inputs.len() {
            if position == 0 && starts_constant(self.graph, node).is_some() {
                continue;
            }
            for &operand in products::pieces(self.graph, node, cut, position) {
                let base = self.library_operand(data, position, operand);
                self.add_reader(group, base);
                self.groups[group].operands.push(base);
            }
        }
        if self.policy.attention_result
            && let Some(result) = result_of_forward(self.graph, node)
        {
            self.add_reader(group, result);
            self.groups[group].operands.push(result);
        }
    }

    /// How the product `node` reads operands in pieces, if it does.
    fn pieces(&self, node: Node) -> Option<Cut> {
        match self.fuse {
            true => products::read_in_pieces(self.graph, self.policy, node),
            false => None,
        }
    }

    /// The nest that may become the epilogue of the contraction `node`.
    pub(super) fn epilogue(&self, node: Node) -> Option<usize> {
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
                && (self.update_in_epilogue || !self.updates(nest))
                && self.acyclic(value, group)
                && epilogue::has_template(self.graph, self.policy, nest, node, &stop)
                && epilogue::fits(
                    self.graph,
                    self.policy,
                    nest,
                    value,
                    wanted,
                    self.needed_outside(value, group),
                )
        })
    }

    /// Joins the nests that read the contraction `node`, where they may be joined at all: one of them can follow
    /// it.
    fn join_users(&mut self, node: Node) {
        let data = self.graph.node(node);
        let value = data.outputs[0];
        let takes = self.policy.epilogue_types.contains(&self.graph.dtype(value));
        if !self.fuse || !self.policy.epilogue_joined || !data.op.is_contraction() || !takes {
            return;
        }
        let pair = |fuser: &Self| {
            let users = fuser.user_nests(value);
            let pairs = (0..users.len()).flat_map(|at| (at + 1..users.len()).map(move |other| (at, other)));
            let mut pairs = pairs.map(|(at, other)| (users[at], users[other]));
            let both = pairs.find(|&(a, b)| fuser.mergeable(value, a, b));
            // And those that read what a user makes of it, such as the value in f32.
            let behind = |&a: &usize| {
                let made = fuser.nest(a).into_iter().flat_map(|nest| &nest.stores);
                let mut readers = made.filter_map(|store| fuser.readers.get(&store.value)).flatten();
                let found = readers.find(|&&b| b != a && fuser.follows(a, b));
                found.map(|&b| (a, b))
            };
            both.or_else(|| users.iter().find_map(behind))
        };
        while let Some((a, b)) = pair(self) {
            self.merge(a, b);
        }
    }

    /// Whether an optimizer's operations are among those of `nest`.
    pub(super) fn updates(&self, nest: &Nest) -> bool {
        let phase = |&node: &Node| self.graph.node(node).provenance.phase;
        nest.members.iter().any(|node| phase(node) == Phase::Optimizer)
    }

    /// Makes `node` the contraction before the nest of `group`.
    pub(super) fn join_epilogue(&mut self, group: usize, node: Node) {
        let value = self.graph.node(node).outputs[0];
        let store = self.needed_outside(value, group);
        self.groups[group].library = Some(node);
        if let Some(index) = self.take_uses(group, value).into_iter().next() {
            self.add_member(group, node, index, store);
        }
    }

    /// The stored value through which a library kernel reads `operand`: a strided window where the kernel
    /// takes one.
    pub(super) fn library_operand(&mut self, node: &NodeData, position: usize, operand: Value) -> Value {
        let dtype = self.graph.dtype(operand);
        let usual = dtype.is_float() || dtype == DType::Bool;
        let takes_windows = match &node.op {
            Op::DotGeneral(_) | Op::ConvWeightGrad { .. } => usual,
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
                    || side_of(self.graph, node, position, operand, &window).is_some())
            {
                return window.base;
            }
        }
        if self.class(operand) == Class::Inline {
            self.demanded.insert(operand, ());
        }
        operand
    }

    /// Each operand of a concatenation is stored into its part of the result; operands of one shape share a
    /// nest. Those of a bucket do not: each is made by an update of its own, or in the bucket at once.
    pub(super) fn place_join(&mut self, node: Node) {
        let data = self.graph.node(node);
        let Op::Concat { axis } = data.op else { return };
        let result = data.outputs[0];
        let shares = self.fuse && !is_bucket(self.graph, &self.users, result);
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
            let known = parts.iter().find(|(shape, _)| shares && *shape == extents_of);
            let group = match known {
                Some(&(_, group)) => group,
                None => {
                    let nest = Nest {
                        extents,
                        ..Nest::default()
                    };
                    let group = self.new_group(Some(nest), None);
                    self.groups[group].writes.push(Buffer::Value(result));
                    self.groups[group].part = Some(Section::of(self.graph, node));
                    self.define(group, result);
                    parts.push((extents_of, group));
                    group
                }
            };
            self.nest_mut(group).stores.push(store);
            self.visit(group, operand, &index, false);
        }
    }
}
