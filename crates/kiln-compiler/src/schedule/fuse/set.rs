//! Sets of groups: one bit each, because every placed operation asks which groups come after which.

/// A set of groups by number.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct GroupSet(Vec<u64>);

impl GroupSet {
    pub(super) fn contains(&self, group: usize) -> bool {
        self.0
            .get(group / 64)
            .is_some_and(|word| word >> (group % 64) & 1 == 1)
    }

    pub(super) fn insert(&mut self, group: usize) {
        if self.0.len() <= group / 64 {
            self.0.resize(group / 64 + 1, 0);
        }
        self.0[group / 64] |= 1 << (group % 64);
    }

    /// Removes `group`; returns whether the set had it.
    pub(super) fn remove(&mut self, group: usize) -> bool {
        let was = self.contains(group);
        if was {
            self.0[group / 64] &= !(1 << (group % 64));
        }
        was
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.iter().all(|&word| word == 0)
    }

    /// Adds the groups of `other`.
    pub(super) fn extend(&mut self, other: &Self) {
        if self.0.len() < other.0.len() {
            self.0.resize(other.0.len(), 0);
        }
        for (own, other) in self.0.iter_mut().zip(&other.0) {
            *own |= other;
        }
    }

    pub(super) fn is_subset(&self, of: &Self) -> bool {
        let theirs = of.0.iter().copied().chain(std::iter::repeat(0));
        self.0.iter().zip(theirs).all(|(own, theirs)| own & !theirs == 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sets_of_different_lengths() {
        let mut few = GroupSet::default();
        few.insert(3);
        let mut many = few.clone();
        many.insert(200);
        assert!(few.is_subset(&many) && !many.is_subset(&few));
        assert!(GroupSet::default().is_subset(&few) && !few.contains(200));
        few.extend(&many);
        assert!(few.contains(200) && many.is_subset(&few));
        assert!(!few.is_empty() && GroupSet::default().is_empty());
        assert!(few.remove(3) && !few.remove(3) && !few.remove(1000));
        assert!(few.is_subset(&many) && !few.contains(3));
    }
}
