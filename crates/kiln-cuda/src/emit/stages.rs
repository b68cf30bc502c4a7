//! Which calls of a step must come after which.
//!
//! A *stage* is what the step launches as one: the calls of a kernel, or of kernels side by side. A stage comes after the
//! stages in front of it that touch the same bytes, one of the two writing; the finished plan knows these bytes, so
//! that memory which serves several values in turn orders all of them. Only the latest of such stages are noted: what those
//! come after is before this one, too. Working memory of products is no reason for an order: a graph has memory of its own
//! for it, because the plan gives one product after the other the same.
//! Stages that touch more than L2 holds keep their order: each fills the device, and side by side they take
//! turns in the cache. Collectives of all ranks keep the order among themselves, which must be that of the
//! other ranks, and run beside anything else: a few multiprocessors are enough for them.
//!
//! ```text
//! dy ─► gradient of x ─► ..        after dy alone: a graph runs both at the same time
//!  └──► gradient of w ─► update
//! ```

use super::beside::{Entry, Range};

/// Bytes from which on a stage is large. resnet50 (batch 128) is 1 % slower if such stages run side by side.
const LARGE: usize = 64 << 20;

/// The stages of a step, in the order in which they are launched.
#[derive(Default)]
pub(super) struct Stages {
    /// For each stage those that it comes after.
    pub(super) orders: Vec<Vec<u32>>,
    /// Of each stage, what it touches.
    touched: Vec<Touched>,
    /// Of each stage, a bit for each stage that it comes after, at once or in turn.
    before: Vec<Vec<u64>>,
    /// The latest stage that everything behind it comes after.
    floor: Option<usize>,
}

/// Bytes that a stage reads and writes.
#[derive(Default)]
struct Touched {
    reads: Vec<Range>,
    writes: Vec<Range>,
    /// Whether it is a collective.
    across: bool,
}

impl Touched {
    fn is_large(&self) -> bool {
        let all = self.reads.iter().chain(&self.writes);
        all.map(|range| range.end - range.start).sum::<usize>() >= LARGE
    }

    /// Whether the order of the two counts.
    fn meets(&self, other: &Self) -> bool {
        let meet = |some: &[Range], others: &[Range]| {
            some.iter()
                .any(|one| others.iter().any(|other| one.overlaps(other)))
        };
        meet(&self.writes, &other.writes)
            || meet(&self.writes, &other.reads)
            || meet(&self.reads, &other.writes)
            || self.across && other.across
            || !self.across && !other.across && self.is_large() && other.is_large()
    }
}

impl Stages {
    /// The number of the stage that was begun last.
    pub(super) fn number(&self) -> u32 {
        u32::try_from(self.orders.len().saturating_sub(1)).unwrap_or(u32::MAX)
    }

    /// Begins the stage of these kernels.
    pub(super) fn begin<'a>(&mut self, entries: impl Iterator<Item = &'a Entry<'a>>) {
        let (mut touched, mut barrier) = (Touched::default(), false);
        for entry in entries {
            touched.reads.extend(&entry.reads);
            let writes = entry
                .writes
                .iter()
                .filter(|range| Some(**range) != entry.workspace);
            touched.writes.extend(writes);
            barrier |= entry.barrier;
            touched.across |= entry.across;
        }
        self.add(touched, barrier);
    }

    /// Begins a stage that comes after all before it, and before all behind it.
    pub(super) fn begin_barrier(&mut self) {
        self.add(Touched::default(), true);
    }

    fn add(&mut self, touched: Touched, barrier: bool) {
        let number = self.orders.len();
        let first = self.floor.unwrap_or(0);
        let mut before = vec![0; number / 64 + 1];
        let mut after = Vec::new();
        // Latest first: whatever a stage comes after is known when the stages in front of it are looked at.
        for earlier in (first..number).rev() {
            let known = before[earlier / 64] >> (earlier % 64) & 1 == 1;
            let must = || barrier || Some(earlier) == self.floor || touched.meets(&self.touched[earlier]);
            if !known && must() {
                after.push(earlier as u32);
                before[earlier / 64] |= 1 << (earlier % 64);
                for (own, theirs) in before.iter_mut().zip(&self.before[earlier]) {
                    *own |= theirs;
                }
            }
        }
        self.orders.push(after);
        self.touched.push(touched);
        self.before.push(before);
        if barrier {
            self.floor = Some(number);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::beside::Space;
    use super::*;

    fn bytes(start: usize, end: usize) -> Range {
        let space = Space::Arena;
        Range { space, start, end }
    }

    fn orders(stages: &[(&[Range], &[Range])]) -> Vec<Vec<u32>> {
        let mut found = Stages::default();
        for (reads, writes) in stages {
            let touched = Touched {
                reads: reads.to_vec(),
                writes: writes.to_vec(),
                across: false,
            };
            found.add(touched, false);
        }
        found.orders
    }

    #[test]
    fn readers_of_one_value_are_beside_each_other() {
        let found = orders(&[
            (&[], &[bytes(0, 8)]),
            (&[bytes(0, 8)], &[bytes(8, 16)]),
            (&[bytes(0, 4)], &[bytes(16, 24)]),
            (&[bytes(8, 24)], &[bytes(24, 32)]),
        ]);
        assert_eq!(found, [vec![], vec![0], vec![0], vec![2, 1]]);
    }

    #[test]
    fn memory_that_is_used_again_orders_its_uses() {
        let found = orders(&[
            (&[], &[bytes(0, 8)]),
            (&[bytes(0, 8)], &[bytes(8, 16)]),
            // Another value in the memory of the first: its reader comes first.
            (&[], &[bytes(0, 8)]),
            (&[bytes(0, 8), bytes(8, 16)], &[bytes(16, 24)]),
        ]);
        assert_eq!(found, [vec![], vec![0], vec![1], vec![2]]);
    }

    #[test]
    fn large_stages_keep_their_order() {
        let found = orders(&[
            (&[], &[bytes(0, LARGE)]),
            (&[], &[bytes(LARGE, LARGE + 8)]),
            (&[], &[bytes(2 * LARGE, 3 * LARGE)]),
        ]);
        assert_eq!(found, [vec![], vec![], vec![0]]);
    }

    #[test]
    fn collectives_keep_their_order_and_nobody_elses() {
        let mut stages = Stages::default();
        for (start, across) in [
            (0, false),
            (0, true),
            (LARGE, false),
            (LARGE, true),
            (2 * LARGE, false),
        ] {
            let writes = vec![bytes(start, start + LARGE)];
            let touched = Touched {
                reads: Vec::new(),
                writes,
                across,
            };
            stages.add(touched, false);
        }
        assert_eq!(stages.orders, [vec![], vec![0], vec![0], vec![2, 1], vec![2]]);
    }

    #[test]
    fn a_barrier_comes_after_all_and_before_all() {
        let mut stages = Stages::default();
        for at in [0, 8] {
            stages.add(
                Touched {
                    reads: Vec::new(),
                    writes: vec![bytes(at, at + 8)],
                    across: false,
                },
                false,
            );
        }
        stages.begin_barrier();
        stages.add(
            Touched {
                reads: Vec::new(),
                writes: vec![bytes(16, 24)],
                across: false,
            },
            false,
        );
        assert_eq!(stages.orders, [vec![], vec![], vec![1, 0], vec![2]]);
        assert_eq!(stages.number(), 3);
    }
}
