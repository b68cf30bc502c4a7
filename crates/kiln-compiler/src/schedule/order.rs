//! The order in which kernels run.
//!
//! Any topological order is correct. This one follows the program: among the kernels that are ready the one
//! whose last operation comes first in the graph runs first. Programs are written so that values are used
//! soon after they are made, which keeps few of them alive.
//!
//! Two kinds of kernels are not where the program has them. A contraction counts from its own place,
//! whatever follows in its epilogue. And a kernel that could write an output into the memory of an argument
//! (an optimizer's update) runs as soon as its operands are computed and the argument's other readers are
//! done: gradients then die one by one, while they are still in cache, instead of all being alive at the
//! end.
//!
//! Index checks ([`crate::checks`]) run as soon as their indices are computed, and before every kernel that
//! may overwrite an argument, unless they depend on that kernel.

use std::cmp::Reverse;
use std::collections::{BTreeSet, BinaryHeap};
use std::sync::Arc;

use rustc_hash::{FxHashMap, FxHashSet};

use kiln_graph::{Graph, Op};

use super::{Buffer, Kernel, KernelKind, Schedule};

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
    let writers_over = writers_over(graph, &writers);
    let overwrites = overwrites(&kernels, &writers_over);
    let updates: FxHashSet<usize> = overwrites.iter().map(|&(_, writer)| writer).collect();
    for (reader, writer) in overwrites {
        if !reaches(&next, writer, reader) {
            waiting[writer] += 1;
            next[reader].push(writer);
        }
    }
    let looking = looking(graph, &writers);
    let overwriting: BTreeSet<usize> = writers_over.values().copied().collect();
    for &look in &looking {
        let before = before(&next, look);
        for &writer in overwriting.iter().filter(|&&writer| !before[writer]) {
            waiting[writer] += 1;
            next[look].push(writer);
        }
    }
    // Ranks that compile other shapes run their collectives in the same order.
    let collectives = collectives(graph, &kernels);
    for pair in collectives.windows(2) {
        if !reaches(&next, pair[1], pair[0]) {
            waiting[pair[1]] += 1;
            next[pair[0]].push(pair[1]);
        }
    }
    let rank = |number: usize| {
        let kernel = &kernels[number];
        let last = match &kernel.kind {
            _ if looking.contains(&number) => 0,
            KernelKind::Contraction(node, _) => node.as_u32(),
            // As late as the graph has it, whatever it may write over.
            KernelKind::Library(node) if graph.node(*node).op == Op::CollectiveWait => node.as_u32(),
            _ if updates.contains(&number) => made_by(graph, kernel),
            _ => kernel.nodes.iter().map(|node| node.as_u32()).max().unwrap_or(0),
        };
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

/// The kernels that are collectives of all ranks, in the order of the graph.
fn collectives(graph: &Graph, kernels: &[Kernel]) -> Vec<usize> {
    let of = |(number, kernel): (usize, &Kernel)| match &kernel.kind {
        KernelKind::Library(node) if matches!(graph.node(*node).op, Op::Collective(_)) => {
            Some((*node, number))
        }
        _ => None,
    };
    let mut collectives: Vec<_> = kernels.iter().enumerate().filter_map(of).collect();
    collectives.sort_unstable_by_key(|&(node, _)| node);
    collectives.into_iter().map(|(_, number)| number).collect()
}

/// The last operation among those that make the operands of `kernel`.
fn made_by(graph: &Graph, kernel: &Kernel) -> u32 {
    let nodes = kernel
        .reads
        .iter()
        .map(|buffer| graph.value(buffer.value(graph)).node);
    nodes
        .filter(|&node| !matches!(graph.node(node).op, Op::Parameter { .. }))
        .map(|node| node.as_u32())
        .max()
        .unwrap_or(0)
}

/// For each argument whose memory an output may take over, the kernel that writes that output.
fn writers_over(graph: &Graph, writers: &FxHashMap<Buffer, Vec<usize>>) -> FxHashMap<Buffer, usize> {
    let mut writers_over: FxHashMap<Buffer, usize> = FxHashMap::default();
    for (number, output) in graph.outputs.iter().enumerate() {
        if let Some(argument) = output.alias
            && let Some([maker]) = makers(graph, writers, number)
        {
            let argument = graph.parameters()[argument as usize];
            writers_over.insert(Buffer::Value(argument), *maker);
        }
    }
    writers_over
}

/// The kernels that write output `number`.
fn makers<'a>(
    graph: &Graph,
    writers: &'a FxHashMap<Buffer, Vec<usize>>,
    number: usize,
) -> Option<&'a [usize]> {
    let own = writers.get(&Buffer::Output(number as u32));
    own.or_else(|| writers.get(&Buffer::Value(graph.outputs[number].value)))
        .map(Vec::as_slice)
}

/// The kernels that check indices.
fn looking(graph: &Graph, writers: &FxHashMap<Buffer, Vec<usize>>) -> BTreeSet<usize> {
    let checks = (0..graph.outputs.len()).filter(|&number| graph.outputs[number].check);
    checks
        .filter_map(|number| makers(graph, writers, number))
        .flatten()
        .copied()
        .collect()
}

/// Pairs of a kernel that reads an argument and the kernel (maybe the same) that writes the output which may
/// take over the argument's memory.
fn overwrites(kernels: &[Kernel], writers_over: &FxHashMap<Buffer, usize>) -> Vec<(usize, usize)> {
    let mut pairs = Vec::new();
    for (reader, kernel) in kernels.iter().enumerate() {
        for buffer in &kernel.reads {
            // A kernel that overwrites its own operand waits for no other reader; it is among the pairs as
            // an update.
            if let Some(&writer) = writers_over.get(buffer) {
                pairs.push((reader, writer));
            }
        }
    }
    pairs
}

/// For each kernel, whether `last` comes after it or is it.
fn before(next: &[Vec<usize>], last: usize) -> Vec<bool> {
    let mut previous = vec![Vec::new(); next.len()];
    for (kernel, after) in next.iter().enumerate() {
        after.iter().for_each(|&after| previous[after].push(kernel));
    }
    let mut reached = vec![false; next.len()];
    let mut stack = vec![last];
    while let Some(kernel) = stack.pop() {
        if !std::mem::replace(&mut reached[kernel], true) {
            stack.extend(previous[kernel].iter().copied());
        }
    }
    reached
}

/// Whether kernel `to` comes after `from`.
fn reaches(next: &[Vec<usize>], from: usize, to: usize) -> bool {
    let mut reached = vec![false; next.len()];
    let mut stack = vec![from];
    while let Some(kernel) = stack.pop() {
        if kernel == to {
            return true;
        }
        if !std::mem::replace(&mut reached[kernel], true) {
            stack.extend(next[kernel].iter().copied());
        }
    }
    false
}
