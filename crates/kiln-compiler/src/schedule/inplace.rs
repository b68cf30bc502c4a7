//! Which operands a nest may overwrite with its results.
//!
//! A nest may store into the memory of an operand it reads if every element is read for the last time before, or at, the point where
//! its place is written. That holds if all reads of the operand are at the position that is stored, and the store happens in the
//! last pass over a row: the body of a loop loads before it stores.

use rustc_hash::FxHashMap;

use kiln_graph::{Graph, Op, Value};

use super::layout::position;
use super::nest::{Nest, Store, vars};

/// The values whose memory `store` may take over.
pub fn overwritable(graph: &Graph, nest: &Nest, store: &Store) -> Vec<Value> {
    let mut stages = FxHashMap::default();
    let rows = nest.split.map_or(0, |split| split.rows);
    let of_points = |index: &[crate::index::Index]| vars(index) & !rows != 0;
    if nest.late.contains(&store.value) || (nest.split.is_some() && !of_points(&store.index)) {
        return Vec::new();
    }
    let last = nest
        .members
        .iter()
        .filter(|&&node| matches!(graph.node(node).op, Op::Reduce { .. }))
        .map(|&node| stage(graph, nest, graph.node(node).inputs[0], &mut stages))
        .chain(
            nest.stores
                .iter()
                .filter(|other| !nest.late.contains(&other.value) && of_points(&other.index))
                .map(|other| stage(graph, nest, other.value, &mut FxHashMap::default())),
        )
        .max()
        .unwrap_or(0);
    if stage(graph, nest, store.value, &mut stages) != last {
        return Vec::new();
    }
    // Values that only rows depend on are stored after the last pass.
    let bytes = graph.ty(store.value).bytes();
    nest.uses
        .iter()
        .filter(|(value, indices)| {
            graph.ty(*value).bytes() == bytes
                && graph.dtype(*value).size() == graph.dtype(store.value).size()
                && indices
                    .iter()
                    .all(|index| position(graph, &nest.layouts, *value, index) == store.position)
        })
        .map(|(value, _)| *value)
        .collect()
}

fn stage(graph: &Graph, nest: &Nest, value: Value, known: &mut FxHashMap<Value, usize>) -> usize {
    if let Some(&stage) = known.get(&value) {
        return stage;
    }
    // A contraction's result is there before the nest begins.
    let stage = if graph.def(value).op.is_contraction() || !nest.uses_of(value).is_empty() {
        0
    } else {
        let data = graph.def(value);
        let operands = data
            .inputs
            .iter()
            .map(|&v| stage(graph, nest, v, known))
            .max()
            .unwrap_or(0);
        operands + usize::from(matches!(data.op, Op::Reduce { .. }))
    };
    known.insert(value, stage);
    stage
}
