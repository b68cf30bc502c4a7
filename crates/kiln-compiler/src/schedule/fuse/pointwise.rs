//! Pointwise operations: into the nest of a user, beside a nest that reads the same, or alone.

use kiln_graph::op::Op;
use kiln_graph::{Node, Value};

use super::{Fuser, row};
use crate::index::{Index, Var, bit};
use crate::schedule::class::{Class, is_cheap};
use crate::schedule::nest::{Nest, Split, bijective, vars};

impl Fuser<'_> {
    pub(super) fn place_pointwise(&mut self, node: Node) {
        let value = self.graph.node(node).outputs[0];
        if self.fuse {
            if self.pick_beside_rows(node) {
                return;
            }
            for group in self.user_nests(value) {
                let needs_store = self.needed_outside(value, group);
                if let Some(primary) = self.pointwise_fits(group, node, needs_store)
                    && !(needs_store && self.parts_rows(value, group))
                {
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

    /// The index to compute `node` at, if it may become a member of the nest of a user.
    pub(super) fn pointwise_fits(&self, group: usize, node: Node, needs_store: bool) -> Option<Vec<Index>> {
        let data = self.graph.node(node);
        let value = data.outputs[0];
        let nest = self.nest(group)?;
        let wanted = nest.uses_of(value);
        if wanted.is_empty() || !self.has_room(group) || !self.acyclic(value, group) {
            return None;
        }
        // The stores of an epilogue were decided with its contraction.
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

    /// The split in which `value` belongs to a row, for a nest that has no split. It is needed where
    /// `value` is computed from a reduction of the nest's whole space, which then follows into the nest.
    pub(super) fn row_split(&self, nest: &Nest, value: Value, index: &[Index]) -> Option<Split> {
        let rows = vars(index);
        let cols = nest.all() & !rows;
        let split = Split { rows, cols };
        if !row::may_split(self.policy, nest, split) || !bijective(index, self.graph.shape(value)) {
            return None;
        }
        let mut frontier = vec![value];
        let mut next = 0;
        while let Some(&value) = frontier.get(next)
            && next < 12
        {
            next += 1;
            let data = self.graph.def(value);
            match data.op {
                Op::Reduce { .. }
                    if self.graph.ty(data.inputs[0]).numel() as i64 == nest.points(nest.all()) =>
                {
                    return Some(split);
                }
                Op::Reshape(_) => frontier.push(data.inputs[0]),
                ref op if op.is_pointwise() => frontier.extend(data.inputs.iter().copied()),
                _ => {}
            }
        }
        None
    }

    /// A nest that reads an operand of `node` over a space of the same shape.
    pub(super) fn sibling(&self, node: Node) -> Option<(usize, Vec<Index>)> {
        let data = self.graph.node(node);
        let value = data.outputs[0];
        let shape = self.graph.shape(value);
        if shape.numel() < self.policy.sibling_elements {
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
    pub(super) fn join(&mut self, group: usize, node: Node, primary: Vec<Index>, store: bool) {
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
            let operands = self.nest_mut(group).integers.operands(graph, node, index);
            for (operand, at) in operands {
                self.visit(group, operand, &at, false);
            }
        }
        self.add_member(group, node, primary, store);
    }
}
