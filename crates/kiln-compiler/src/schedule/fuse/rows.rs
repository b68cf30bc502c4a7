//! Rows that are read once: the nest that passes over a row also computes whatever else needs that row.
//!
//! A loss and its gradient are the example. The gradient's nest passes over each row of logits for its
//! statistics (the largest element, the sum of exponentials) and once more for the gradient. The loss needs
//! the statistics and one element of the row. As a nest of its own the loss would read the logits a third
//! time, and the gradient could not overwrite them. Two rules keep loss and gradient together:
//!
//! - An operation that picks or sums up elements of rows joins the nest that passes over these rows, whoever
//!   uses the result, if both need the same statistics.
//! - A number that such a nest reads (a count of targets, a sum of weights) is not computed in another nest
//!   that waits for the same statistics: then the first nest could not compute the statistics itself.
//!
//! Fusion walks the graph backwards. Where a program computes the loss after the gradient, the gradient's
//! nest does not exist yet when the walk meets the pick, so picks are placed as late as their operands
//! allow.

use rustc_hash::FxHashMap;

use kiln_graph::op::{Dims, Op};
use kiln_graph::{Node, Value};

use super::reduce::ReduceRole;
use super::{Fuser, row};
use crate::index::Index;
use crate::policy::Policy;
use crate::schedule::access::operand_index;
use crate::schedule::nest::{Nest, Split, bijective, vars};

/// Most values that are looked at on the way to a statistic.
const MAX_LOOK: usize = 96;
/// Most values that are looked at on the way to the values that a nest reads.
const MAX_PATH: usize = 16;

impl Fuser<'_> {
    /// Whether `node` picks one element of each row of its operand.
    pub(super) fn is_pick(&self, node: Node) -> bool {
        let data = self.graph.node(node);
        let Op::Gather { axis } = data.op else {
            return false;
        };
        self.graph.shape(data.inputs[1])[axis] == 1 && self.graph.shape(data.inputs[0])[axis] != 1
    }

    /// Makes `node`, if it [picks](Fuser::is_pick), a member of the nest that passes over the rows it picks
    /// from.
    pub(super) fn pick_beside_rows(&mut self, node: Node) -> bool {
        let data = self.graph.node(node);
        let (Op::Gather { axis }, true) = (&data.op, self.is_pick(node)) else {
            return false;
        };
        let (axis, x, value) = (*axis, data.inputs[0], data.outputs[0]);
        let Some((group, mut index, split)) = self.nest_over_rows(x, value, &Dims::from_slice(&[axis]))
        else {
            return false;
        };
        // The picked elements are numbered by the rows alone.
        index[axis] = Index::default();
        if !bijective(&index, self.graph.shape(value)) {
            return false;
        }
        let nest = self.nest_mut(group);
        nest.split = Some(split);
        nest.add_use(value, index.clone());
        self.join(group, node, index, true);
        true
    }

    /// Makes `node`, which reduces each row of its operand, a pass of the nest that passes over these rows.
    pub(super) fn reduce_beside_rows(&mut self, node: Node, axes: &Dims) -> bool {
        let data = self.graph.node(node);
        let (x, value) = (data.inputs[0], data.outputs[0]);
        let Some((group, index, split)) = self.nest_over_rows(x, value, axes) else {
            return false;
        };
        self.join_reduce(group, node, index, ReduceRole::of_rows(split));
        true
    }

    /// A nest over the elements of `x` that needs statistics of its rows, along `axes`, which `x` needs
    /// too; the index of `x` there, and the split into rows. None if a nest over as many elements uses
    /// `value`, which is computed from `x`: that nest comes first.
    fn nest_over_rows(&self, x: Value, value: Value, axes: &Dims) -> Option<(usize, Vec<Index>, Split)> {
        let count = self.graph.ty(x).numel() as i64;
        let over = |group: usize| {
            self.nest(group)
                .is_some_and(|nest| nest.points(nest.all()) == count)
        };
        let readers = self.readers.get(&value)?;
        if self.outputs.contains_key(&value) || readers.iter().any(|&group| over(group)) {
            return None;
        }
        let candidates: Vec<usize> = (0..self.groups.len())
            .filter(|&group| over(group) && self.is_open(group) && self.acyclic(value, group))
            .collect();
        if candidates.is_empty() {
            return None;
        }
        let statistics = self.statistics(&[x], count);
        candidates.into_iter().find_map(|group| {
            let nest = self.nest(group)?;
            let index = self.index_in(nest, x)?;
            let split = rows_of(self.policy, nest, &index, axes)?;
            let shared = self
                .needs_of(nest, count)
                .iter()
                .any(|own| statistics.contains(own));
            shared.then_some((group, index, split))
        })
    }

    /// The index of `x` where `nest` reads it, or reads a value that `x` is computed from element by
    /// element, over all variables.
    fn index_in(&self, nest: &Nest, x: Value) -> Option<Vec<Index>> {
        let read = self.streams(nest);
        let mut paths = vec![vec![x]];
        let mut next = 0;
        while let Some(path) = paths.get(next).cloned()
            && next < MAX_PATH
        {
            next += 1;
            let last = path[path.len() - 1];
            if let Some(index) = read.get(&last) {
                return Some(self.index_along(&path, index));
            }
            for operand in self.elementwise(last) {
                if !paths.iter().any(|path| path.contains(&operand)) {
                    paths.push([path.as_slice(), &[operand]].concat());
                }
            }
        }
        None
    }

    /// The values that `nest` reads over all its variables, and the values behind them element by element,
    /// which it may come to read.
    fn streams(&self, nest: &Nest) -> FxHashMap<Value, Vec<Index>> {
        let full = |value: Value, index: &Vec<Index>| {
            vars(index) == nest.all() && bijective(index, self.graph.shape(value))
        };
        let mut known: FxHashMap<Value, Vec<Index>> = FxHashMap::default();
        let mut stack: Vec<(Value, Vec<Index>)> = Vec::new();
        for (value, indices) in &nest.uses {
            stack.extend(
                indices
                    .iter()
                    .filter(|index| full(*value, index))
                    .map(|index| (*value, index.clone())),
            );
        }
        while let Some((value, index)) = stack.pop()
            && known.len() < MAX_PATH
        {
            if known.contains_key(&value) {
                continue;
            }
            for operand in self.elementwise(value) {
                let at = operand_index(self.graph, value, &index).unwrap_or_else(|| index.clone());
                stack.push((operand, at));
            }
            known.insert(value, index);
        }
        known
    }

    /// The operands whose elements are those of `value`, one for one.
    fn elementwise(&self, value: Value) -> Vec<Value> {
        let data = self.graph.def(value);
        if !data.op.is_pointwise() && !matches!(data.op, Op::Reshape(_) | Op::Transpose(_)) {
            return Vec::new();
        }
        let count = self.graph.ty(value).numel();
        let same = |operand: &&Value| self.graph.ty(**operand).numel() == count;
        data.inputs.iter().filter(same).copied().collect()
    }

    /// The reductions of values of `count` elements among `values` and the values that those are computed
    /// from, nearest first.
    fn statistics(&self, values: &[Value], count: i64) -> Vec<Value> {
        let mut reached = values.to_vec();
        let mut found = Vec::new();
        let mut at = 0;
        while let Some(&value) = reached.get(at)
            && at < MAX_LOOK
        {
            at += 1;
            let data = self.graph.def(value);
            if matches!(data.op, Op::Reduce { .. }) && self.graph.ty(data.inputs[0]).numel() as i64 == count {
                found.push(value);
            }
            for &operand in &data.inputs {
                if !reached.contains(&operand) {
                    reached.push(operand);
                }
            }
        }
        found
    }

    /// [`Fuser::statistics`] of the values that `nest` reads.
    fn needs_of(&self, nest: &Nest, count: i64) -> Vec<Value> {
        let used: Vec<Value> = nest.uses.iter().map(|(value, _)| *value).collect();
        self.statistics(&used, count)
    }

    /// Whether `value`, if `group` made it, would make a larger nest wait for statistics of its own rows.
    pub(super) fn parts_rows(&self, value: Value, group: usize) -> bool {
        let Some(own) = self.nest(group) else { return false };
        let readers = self.readers.get(&value).map_or(&[][..], Vec::as_slice);
        readers.iter().filter(|&&reader| reader != group).any(|&reader| {
            let Some(nest) = self.nest(reader) else {
                return false;
            };
            let count = nest.points(nest.all());
            if count <= own.points(own.all())
                || self.graph.ty(value).numel() as i64 >= count
                || !self.is_open(reader)
                || self.groups[reader].part != self.groups[group].part
            {
                return false;
            }
            let waits = self.needs_of(own, count);
            if waits.is_empty() {
                return false;
            }
            // The larger nest waits for the statistics of `value` itself in any case.
            let anyway = self.statistics(&[value], count);
            self.needs_of(nest, count)
                .iter()
                .any(|needed| waits.contains(needed) && !anyway.contains(needed))
        })
    }
}

/// The split of `nest` in which `axes` of a value at `index`, and nothing else, number the elements of a row.
fn rows_of(policy: &Policy, nest: &Nest, index: &[Index], axes: &Dims) -> Option<Split> {
    let wanted = row::parted(nest, index, axes)?;
    let fits = match nest.split {
        Some(split) => split == wanted && wanted.rows != 0,
        None => row::may_split(policy, nest, wanted),
    };
    fits.then_some(wanted)
}
