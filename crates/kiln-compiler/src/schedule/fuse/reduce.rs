//! Reductions: as passes over the rows of a nest that uses the result, beside a nest that reads the operand,
//! or alone.

use kiln_graph::op::{Dims, Op};
use kiln_graph::{Node, Value};

use super::{Fuser, row};
use crate::index::{Index, Var, bit, coordinates, linear};
use crate::policy::Policy;
use crate::schedule::access::identity_in;
use crate::schedule::class::Class;
use crate::schedule::nest::{Nest, Split, bijective, vars};

impl Fuser<'_> {
    pub(super) fn place_reduce(&mut self, node: Node) {
        let data = self.graph.node(node);
        let Op::Reduce { axes, .. } = &data.op else { return };
        let (x, value) = (data.inputs[0], data.outputs[0]);
        if self.fuse {
            if self.reduce_beside_rows(node, axes) {
                return;
            }
            for group in self.user_nests(value) {
                if self.reduce_into_user(group, node, axes) {
                    return;
                }
            }
            if let Some((group, index)) = self.reduce_sibling(x, value)
                && let Some(role) = self.reduce_role(group, &index, axes)
            {
                self.join_reduce(group, node, index, role);
                return;
            }
        }
        // Variables number the dimensions of the value behind views, because other operations will compute
        // and store that value. A view that mixes kept and reduced dimensions does not allow that.
        let behind = if self.fuse { self.views(x) } else { vec![x] };
        for path in [behind, vec![x]] {
            let (base, extents) = self.identity_of(path[path.len() - 1]);
            let index = self.index_along(&path, &base);
            let nest = Nest {
                extents,
                ..Nest::default()
            };
            let trivial = path.len() == 1 && axes.iter().all(|&axis| self.graph.shape(x)[axis] == 1);
            let role = match role(self.policy, &nest, &index, axes) {
                None if trivial => Some(ReduceRole::of_rows(Split {
                    rows: nest.all(),
                    cols: 0,
                })),
                role => role,
            };
            if let Some(role) = role {
                let group = self.new_group(Some(nest), None);
                self.join_reduce(group, node, index, role);
                return;
            }
        }
        unreachable!("kept and reduced dimensions of a value itself are apart");
    }

    /// Reduces inside the nest that uses the result, as passes over its rows.
    pub(super) fn reduce_into_user(&mut self, group: usize, node: Node, axes: &Dims) -> bool {
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
        if needs_store && self.parts_rows(value, group) {
            return false;
        }
        let rows = vars(&wanted);
        let reduced: Vec<usize> = axes.iter().map(|&axis| shape[axis]).collect();
        let count: i64 = reduced.iter().product::<usize>() as i64;
        let contiguous = self.reduces_contiguous(x, axes);
        let kept: i64 = (shape.numel() as i64) / count.max(1);
        // A few long rows would leave threads idle; long columns would be read with large strides.
        if (!row::are_enough(self.policy, kept) && count > self.policy.shared_reduction)
            || (!contiguous && count > self.policy.strided_reduction)
        {
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
                // Everything stored so far must be complete at each point or once for each row.
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
    pub(super) fn identity_of(&self, value: Value) -> (Vec<Index>, Vec<i64>) {
        identity_in(self.graph.shape(value), self.layouts.get(&value))
    }

    /// Whether a reduction over `axes` combines neighbours in memory of the value behind `x`.
    pub(super) fn reduces_contiguous(&self, x: Value, axes: &Dims) -> bool {
        let path = self.views(x);
        let (base, extents) = self.identity_of(path[path.len() - 1]);
        let Some(last) = extents.len().checked_sub(1) else {
            return false;
        };
        let index = self.index_along(&path, &base);
        axes.iter()
            .any(|&axis| index[axis].vars() & bit(last as Var) != 0)
    }

    /// The index of `x` where a value behind it is read at `index`; `path` leads from `x` to that value
    /// through reshapes, transposes and pointwise operations.
    pub(super) fn index_along(&self, path: &[Value], index: &[Index]) -> Vec<Index> {
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

    /// `x` and the values behind it through reshapes and transposes, and through operations of one tensor
    /// element by element (a cast, a scaling) whose result nothing else reads: the nest that reads `x`
    /// computes those, and memory has what is behind them.
    pub(super) fn views(&self, x: Value) -> Vec<Value> {
        let mut path = vec![x];
        loop {
            let last = path[path.len() - 1];
            let data = self.graph.def(last);
            let behind = match &data.op {
                Op::Reshape(_) | Op::Transpose(_) if self.class(last) == Class::Inline => data.inputs[0],
                op if op.is_pointwise()
                    && self.users.of(last).len() == 1
                    && self.users.outputs(last) == 0 =>
                {
                    let spread = |value: &Value| matches!(self.graph.def(*value).op, Op::Broadcast { .. });
                    let mut tensors = data.inputs.iter().filter(|value| !spread(value));
                    match (tensors.next(), tensors.next()) {
                        (Some(&tensor), None) => tensor,
                        _ => return path,
                    }
                }
                _ => return path,
            };
            path.push(behind);
        }
    }

    /// A nest that reads `x`, or a value that `x` is computed from element by element, over all its
    /// variables.
    pub(super) fn reduce_sibling(&self, x: Value, result: Value) -> Option<(usize, Vec<Index>)> {
        let count = self.graph.ty(x).numel();
        let mut frontier = vec![vec![x]];
        let mut next = 0;
        while let Some(path) = frontier.get(next).cloned() {
            next += 1;
            if next > 10 {
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

    /// How a reduction over `axes` of a value at `index` fits into the nest of `group`; none if it does not.
    pub(super) fn reduce_role(&self, group: usize, index: &[Index], axes: &Dims) -> Option<ReduceRole> {
        role(self.policy, self.nest(group)?, index, axes)
    }

    /// Makes the reduction `node`, whose operand is at `index`, a member of the nest of `group`, which stores
    /// its result.
    pub(super) fn join_reduce(&mut self, group: usize, node: Node, index: Vec<Index>, role: ReduceRole) {
        let data = self.graph.node(node);
        let Op::Reduce { axes, .. } = &data.op else { return };
        let (x, value) = (data.inputs[0], data.outputs[0]);
        let result: Vec<Index> = (0..index.len())
            .filter(|axis| !axes.contains(axis))
            .map(|axis| index[axis].clone())
            .collect();
        let reduced = axes.iter().map(|&axis| index[axis].clone()).collect();
        let nest = self.nest_mut(group);
        nest.split = Some(role.split);
        nest.reduced.insert(value, reduced);
        self.visit(group, x, &index, false);
        self.add_member(group, node, result, true);
        if role.late {
            self.nest_mut(group).late.push(value);
        }
    }
}

/// How a reduction takes part in a nest.
#[derive(Clone, Copy)]
pub(super) struct ReduceRole {
    /// The rows and columns that the nest has then.
    split: Split,
    /// Whether it combines rows, so that its result exists behind the nest only.
    late: bool,
}

impl ReduceRole {
    /// A reduction that combines the columns of each row.
    pub(super) fn of_rows(split: Split) -> Self {
        Self { split, late: false }
    }

    /// A reduction that combines rows.
    fn late(split: Split) -> Self {
        Self { split, late: true }
    }
}

/// How a reduction over `axes` of a value at `index` fits into a nest; none if it does not.
fn role(policy: &Policy, nest: &Nest, index: &[Index], axes: &Dims) -> Option<ReduceRole> {
    let wanted = row::parted(nest, index, axes)?;
    let (kept, reduced) = (wanted.rows, wanted.cols);
    let Some(split) = nest.split else {
        let last = bit(nest.extents.len() as Var - 1);
        let count = nest.points(reduced);
        if kept == 0 && count > policy.shared_reduction && nest.extents.len() > 1 {
            let split = Split {
                rows: reduced & !last,
                cols: last,
            };
            return Some(ReduceRole::late(split));
        }
        if reduced & last != 0 || count <= policy.strided_reduction {
            return row::stores_points_or_rows(nest, kept).then_some(ReduceRole::of_rows(wanted));
        }
        let late = Split {
            rows: reduced,
            cols: kept,
        };
        return row::stores_points(nest).then_some(ReduceRole::late(late));
    };
    if reduced == split.cols && kept == split.rows {
        Some(ReduceRole::of_rows(split))
    } else if (reduced == split.rows && kept == split.cols) || reduced == nest.all() {
        Some(ReduceRole::late(split))
    } else {
        None
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
