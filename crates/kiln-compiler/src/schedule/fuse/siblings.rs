//! Nests side by side that become one.

use rustc_hash::FxHashMap;

use kiln_graph::Value;

use super::Fuser;
use crate::index::Index;
use crate::schedule::nest::{Nest, bijective, vars};

impl Fuser<'_> {
    /// Joins nests over the same space that read the same values and do not depend on each other: sums of a
    /// gradient, and the operation that passes the gradient on.
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
                    if a != b && self.mergeable(value, a, b) {
                        self.merge(a, b);
                        gone.insert(b, a);
                    }
                }
            }
        }
    }

    pub(super) fn mergeable(&self, value: Value, a: usize, b: usize) -> bool {
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
        let own = self.graph.shape(value);
        let full = |nest: &Nest, index: &Vec<Index>| vars(index) == nest.all() && bijective(index, own);
        let aligned = x
            .uses_of(value)
            .iter()
            .any(|index| full(x, index) && y.uses_of(value).contains(index));
        let small = x.members.len() + y.members.len() <= self.policy.nest_operations
            && x.uses.len() + y.uses.len() + x.stores.len() + y.stores.len() <= self.policy.nest_buffers;
        splits
            && aligned
            && small
            && self.groups[a].library.is_none()
            && self.groups[b].library.is_none()
            && self.groups[a].part == self.groups[b].part
            && x.extents == y.extents
            && y.data.is_empty()
            && !self.groups[a].after.contains(b)
            && !self.groups[b].after.contains(a)
            // Copies into outputs and parts of concatenations stay simple.
            && !x.members.is_empty()
            && !y.members.is_empty()
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
        let after = std::mem::take(&mut self.groups[b].after);
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
