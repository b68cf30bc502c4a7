//! The order in which kernels run.
//!
//! Any topological order is correct. This one follows the program: among the kernels that are ready the one whose last
//! operation comes first in the graph runs first. Programs are written so that values are used soon after they are
//! made, which keeps few of them alive; and an update that overwrites an argument comes after the argument's last reader.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::sync::Arc;

use rustc_hash::FxHashMap;

use kiln_graph::Graph;

use super::{Buffer, Kernel, Schedule};

/// Sorts kernels so that each runs after those whose results it reads.
pub fn order(graph: &Graph, kernels: Vec<Kernel>) -> Schedule {
    let mut writers: FxHashMap<Buffer, Vec<usize>> = FxHashMap::default();
    for (number, kernel) in kernels.iter().enumerate() {
        for &buffer in &kernel.writes {
            writers.entry(buffer).or_default().push(number);
        }
    }
    let mut waiting = vec![0usize; kernels.len()];
    let mut next: Vec<Vec<usize>> = vec![Vec::new(); kernels.len()];
    for (number, kernel) in kernels.iter().enumerate() {
        let mut before: Vec<usize> = kernel
            .reads
            .iter()
            .filter_map(|b| writers.get(b))
            .flatten()
            .copied()
            .collect();
        before.sort_unstable();
        before.dedup();
        for writer in before.into_iter().filter(|&writer| writer != number) {
            waiting[number] += 1;
            next[writer].push(number);
        }
    }
    let rank = |number: usize| {
        let last = kernels[number]
            .nodes
            .iter()
            .map(|node| node.as_u32())
            .max()
            .unwrap_or(0);
        Reverse((last, number))
    };
    let mut ready: BinaryHeap<_> = (0..kernels.len())
        .filter(|&k| waiting[k] == 0)
        .map(rank)
        .collect();
    let mut sequence = Vec::with_capacity(kernels.len());
    while let Some(Reverse((_, number))) = ready.pop() {
        sequence.push(number);
        for &after in &next[number] {
            waiting[after] -= 1;
            if waiting[after] == 0 {
                ready.push(rank(after));
            }
        }
    }
    debug_assert_eq!(
        sequence.len(),
        kernels.len(),
        "fusion made a cycle in `{}`",
        graph.name
    );
    let mut slots: Vec<Option<Kernel>> = kernels.into_iter().map(Some).collect();
    Schedule {
        layouts: Arc::default(),
        kernels: sequence
            .into_iter()
            .filter_map(|number| slots[number].take())
            .collect(),
    }
}
