//! Rows: the one place that says how a nest may be split into rows.
//!
//! The variables of a nest are split into those that number rows and those that number the elements of a row
//! ([`Split`]). Every file that fuses something with rows asks the same four questions, which are answered
//! here: how the axes of a reduction divide the variables ([`parted`]), whether a nest may get a split
//! ([`may_split`]), whether there are enough rows to keep all threads busy ([`are_enough`]), and whether what
//! the nest stores so far fits the split ([`stores_points`]).

use kiln_graph::op::Dims;

use crate::index::{Index, Var, bit};
use crate::policy::Policy;
use crate::schedule::nest::{Nest, Split, vars};

/// Rows and columns into which `axes` of a value at `index` part the space of `nest`; none if a variable
/// numbers both or neither, or if there are no columns.
pub(super) fn parted(nest: &Nest, index: &[Index], axes: &Dims) -> Option<Split> {
    let part = |inside: bool| {
        (0..index.len())
            .filter(|axis| axes.contains(axis) == inside)
            .fold(0, |set, axis| set | index[axis].vars())
    };
    let (rows, cols) = (part(false), part(true));
    (rows & cols == 0 && rows | cols == nest.all() && cols != 0).then_some(Split { rows, cols })
}

/// Whether so many rows keep the machine's threads busy.
pub(super) fn are_enough(policy: &Policy, rows: i64) -> bool {
    rows >= policy.rows
}

/// Whether the elements of a row are neighbours in memory: each pass over a row then reads whole cache lines.
pub(super) fn are_contiguous(nest: &Nest, cols: u64) -> bool {
    let last = nest.extents.len().checked_sub(1);
    last.is_some_and(|last| cols & bit(last as Var) != 0)
}

/// Whether everything that `nest` stores so far is complete at each point.
pub(super) fn stores_points(nest: &Nest) -> bool {
    nest.stores.iter().all(|store| vars(&store.index) == nest.all())
}

/// Whether everything that `nest` stores so far is complete at each point, or once for each of these rows.
pub(super) fn stores_points_or_rows(nest: &Nest, rows: u64) -> bool {
    let used = nest.stores.iter().map(|store| vars(&store.index));
    used.into_iter().all(|used| used == nest.all() || used == rows)
}

/// Whether a nest that has no split may get this one.
pub(super) fn may_split(policy: &Policy, nest: &Nest, split: Split) -> bool {
    nest.split.is_none()
        && split.rows != 0
        && are_contiguous(nest, split.cols)
        && are_enough(policy, nest.points(split.rows))
        && stores_points(nest)
}
