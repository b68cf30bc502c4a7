//! Nests side by side, or one behind the other, that become one.

use rustc_hash::FxHashMap;

use kiln_graph::Value;

use super::Fuser;
use crate::index::Index;
use crate::schedule::Buffer;
use crate::schedule::nest::{Nest, bijective, vars};

impl Fuser<'_> {
    /// Joins nests over the same space that read the same values and do not depend on each other: sums of a
    /// gradient, and the operation that passes the gradient on. Joins them too where one reads point by point
    /// the values that the other makes: the two gradients of a gated activation share the gate's exponential.
    pub(super) fn merge_siblings(&mut self) {
        let mut shared: Vec<(Value, Vec<usize>)> = self
            .readers
            .iter()
            .map(|(value, readers)| (*value, readers.clone()))
            .collect();
        shared.sort_unstable_by_key(|(value, _)| *value);
        let mut gone: FxHashMap<usize, usize> = FxHashMap::default();
        for (value, readers) in shared {
            if self.graph.ty(value).numel() < self.policy.sibling_elements {
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
                    if a != b && !self.holds_up(value, a, b) && self.mergeable(value, a, b) {
                        self.merge(a, b);
                        gone.insert(b, a);
                    }
                }
            }
        }
    }

    /// Joins a nest over few elements, such as the channels of a picture, with one that reads point by point
    /// what it makes: the second is not worth a kernel of its own that somebody waits for.
    pub(super) fn merge_followers(&mut self) {
        let pair = |fuser: &Self, a: usize| {
            let made = fuser.nest(a)?.stores.iter().map(|store| store.value);
            let mut small = made.filter(|&value| fuser.graph.ty(value).bytes() <= fuser.policy.kept_buffer);
            small.find_map(|value| {
                let mut readers = fuser.readers.get(&value)?.iter().copied();
                readers.find(|&b| {
                    let awaited = !fuser.groups[b].after.is_empty();
                    let apart = fuser.holds_up(value, a, b) || !fuser.is_ready(a, b);
                    b != a && awaited && !apart && fuser.follows(a, b)
                })
            })
        };
        for a in 0..self.groups.len() {
            while let Some(b) = pair(self, a) {
                self.merge(a, b);
            }
        }
    }

    /// Whether nest `b` can run where nest `a` does, which it reads: its other operands are there by then. And
    /// whether both take over arguments, or none does: what reads an argument comes before that.
    fn is_ready(&self, a: usize, b: usize) -> bool {
        let before = |value: &Value| {
            let buffer = Buffer::Value(*value);
            let maker = self
                .groups
                .iter()
                .position(|group| group.writes.contains(&buffer));
            maker.is_none_or(|maker| maker == a || self.groups[maker].after.contains(a))
        };
        let takes_over = |group: usize| {
            let stores = self.nest(group).into_iter().flat_map(|nest| &nest.stores);
            let values: Vec<Value> = stores.map(|store| store.value).collect();
            let mut outputs = self.graph.outputs.iter().filter(|output| output.alias.is_some());
            outputs.any(|output| values.contains(&output.value))
        };
        let is_there = |value: &Value| self.groups[a].reads.contains(value) || before(value);
        self.groups[b].reads.iter().all(is_there) && takes_over(a) == takes_over(b)
    }

    /// Whether what waits for one of two nests would wait for an optimizer's update, too. Small updates are
    /// one kernel anyway ([`join_updates`](crate::schedule::together::join_updates)): behind the sums that a
    /// batch norm's gradient needs, 256 threads take 7.2 us with the update of the scale and 3.3 without
    /// (H200).
    fn holds_up(&self, value: Value, a: usize, b: usize) -> bool {
        let is_update = |group: usize| self.nest(group).is_some_and(|nest| self.updates(nest));
        self.graph.ty(value).bytes() <= self.policy.kept_buffer && is_update(a) != is_update(b)
    }

    /// Whether the nests `a` and `b`, which read `value`, may become one.
    pub(super) fn mergeable(&self, value: Value, a: usize, b: usize) -> bool {
        let (Some(x), Some(y)) = (self.nest(a), self.nest(b)) else {
            return false;
        };
        let own = self.graph.shape(value);
        let full = |nest: &Nest, index: &Vec<Index>| vars(index) == nest.all() && bijective(index, own);
        let aligned = x
            .uses_of(value)
            .iter()
            .any(|index| full(x, index) && y.uses_of(value).contains(index));
        aligned && self.joinable(a, b)
    }

    /// Whether nest `b` reads, point by point, values that nest `a` makes, and they may become one.
    pub(super) fn follows(&self, a: usize, b: usize) -> bool {
        self.feeds(a, b) && self.joinable(a, b)
    }

    /// Whether two nests may become one if their points are each other's.
    fn joinable(&self, a: usize, b: usize) -> bool {
        let (Some(x), Some(y)) = (self.nest(a), self.nest(b)) else {
            return false;
        };
        let splits = match (x.split, y.split) {
            (Some(p), Some(q)) => p == q,
            // The stores of a nest without a split must be complete at each point.
            (None, Some(_)) => x.stores.iter().all(|store| vars(&store.index) == x.all()),
            (Some(_), None) => y.stores.iter().all(|store| vars(&store.index) == y.all()),
            (None, None) => true,
        };
        let small = x.members.len() + y.members.len() <= self.policy.nest_operations
            && x.uses.len() + y.uses.len() + x.stores.len() + y.stores.len() <= self.policy.nest_buffers;
        splits
            && small
            && self.groups[a].library.is_none()
            && self.groups[b].library.is_none()
            && self.groups[a].part == self.groups[b].part
            && x.extents == y.extents
            && y.integers.is_empty()
            && (self.feeds(a, b) || self.feeds(b, a) || self.are_independent(a, b))
            // Copies into outputs and parts of concatenations stay simple.
            && !x.members.is_empty()
            && !y.members.is_empty()
    }

    fn are_independent(&self, a: usize, b: usize) -> bool {
        !self.groups[a].after.contains(b) && !self.groups[b].after.contains(a)
    }

    /// Whether nest `b` depends on nest `a` by values alone that `a` makes point by point and `b` reads at the same
    /// points: one nest of both has them in registers.
    fn feeds(&self, a: usize, b: usize) -> bool {
        let (Some(x), Some(y)) = (self.nest(a), self.nest(b)) else {
            return false;
        };
        let between =
            |group: &super::Group, at: usize| self.groups[a].after.contains(at) && group.after.contains(b);
        let mut others = self.groups.iter().enumerate();
        // Pieces of a concatenation, too, which are stored under their own names.
        let writes = |value: &Value| {
            let buffer = Buffer::Value(*value);
            x.stores.iter().any(|store| store.buffer == buffer)
        };
        let at_own_points = |value: &Value| match x.stores.iter().find(|store| store.value == *value) {
            Some(store) => {
                let indices = y.uses_of(*value);
                vars(&store.index) == x.all() && indices.iter().all(|index| *index == store.index)
            }
            // What `a` does not make.
            None => !x.maps.contains_key(value) && !writes(value),
        };
        x.split.is_none()
            && y.split.is_none()
            && x.late.is_empty()
            && y.late.is_empty()
            && x.integers.is_empty()
            && self.groups[a].after.contains(b)
            && !self.groups[b].after.contains(a)
            && !others.any(|(at, group)| between(group, at))
            && self.groups[b].reads.iter().all(at_own_points)
    }

    /// Forgets that `group` reads what it makes itself, be it the result of an operation or another shape of
    /// one, and stores of that which nobody else reads.
    fn keep_own_values(&mut self, group: usize) {
        let Some(nest) = self.nest(group) else { return };
        let own: Vec<Value> = nest.uses.iter().map(|(value, _)| *value).collect();
        let made = |value: &Value| {
            let stored = || {
                nest.stores
                    .iter()
                    .any(|store| store.buffer == Buffer::Value(*value))
            };
            nest.maps.contains_key(value) || stored()
        };
        let own = own.into_iter().filter(made);
        for value in own.collect::<Vec<_>>() {
            self.take_uses(group, value);
            if !self.needed_outside(value, group) {
                self.nest_mut(group).drop_store(value);
                self.groups[group]
                    .writes
                    .retain(|buffer| *buffer != Buffer::Value(value));
            }
        }
    }

    /// Moves everything of `b` into `a`.
    pub(super) fn merge(&mut self, a: usize, b: usize) {
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
        self.keep_own_values(a);
        let mut after = std::mem::take(&mut self.groups[b].after);
        after.remove(a);
        self.groups[a].after.remove(b);
        for group in &mut self.groups {
            if group.after.remove(b) {
                group.after.insert(a);
            }
        }
        self.extend_after(a, &after);
        // Groups that came before `b` now also come before those that follow `a`.
        let after = self.groups[a].after.clone();
        for group in &mut self.groups {
            if group.after.contains(a) {
                group.after.extend(&after);
            }
        }
    }
}
