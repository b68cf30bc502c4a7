//! Which operands a nest may overwrite with its results.
//!
//! A nest may store into the memory of an operand it reads if every element is read for the last time before, or at, the point where
//! its place is written. That holds if all reads of the operand are at the position that is stored, and the store happens in the
//! last pass over a row: the body of a loop loads before it stores. What is read once for each row, such as the element that a loss picks
//! from a row of logits, may also be another element of the same row: it is read before the passes begin that need no later statistics.

use rustc_hash::FxHashMap;

use kiln_graph::{Graph, Op, Value};

use super::layout::position;
use super::nest::{Nest, Split, Store, vars};
use crate::index::{Atom, Index};

/// The values whose memory `store` may take over.
pub fn overwritable(graph: &Graph, nest: &Nest, store: &Store) -> Vec<Value> {
    let mut stages = FxHashMap::default();
    let rows = nest.split.map_or(0, |split| split.rows);
    let of_points = |index: &[Index]| vars(index) & !rows != 0;
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
    // Values that only rows depend on are stored after the last pass. The store may be one piece of its buffer; memory goes to the whole.
    let bytes = store.buffer.bytes(graph);
    nest.uses
        .iter()
        .filter(|(value, indices)| {
            let here = |index: &&Vec<Index>| position(graph, &nest.layouts, *value, index) == store.position;
            graph.ty(*value).bytes() == bytes
                && graph.dtype(*value).size() == graph.dtype(store.value).size()
                && indices.iter().find(here).is_some_and(|stored| {
                    indices.iter().all(|index| {
                        here(&index)
                            || nest.split.is_some_and(|split| in_row(split, index, stored))
                                && index.iter().all(|index| loaded_by(graph, nest, index, last))
                    })
                })
        })
        .map(|(value, _)| *value)
        .collect()
}

/// Whether `index` is read once for each row, at an element of the row that the elements at `whole` are.
fn in_row(split: Split, index: &[Index], whole: &[Index]) -> bool {
    vars(index) & !split.rows == 0
        && index.iter().zip(whole).all(|(own, whole)| {
            let of_rows = whole.vars() & !split.rows == 0;
            (of_rows && own == whole) || whole.vars() & split.rows == 0
        })
}

/// Whether the integers in `index` are there before pass number `pass`.
fn loaded_by(graph: &Graph, nest: &Nest, index: &Index, pass: usize) -> bool {
    index.terms().iter().all(|(atom, _)| match atom {
        Atom::Var { .. } => true,
        Atom::Div(inner, _) | Atom::Mod(inner, _) => loaded_by(graph, nest, inner, pass),
        Atom::Data { slot, .. } => {
            let (indices, at) = &nest.data[*slot as usize];
            stage(graph, nest, *indices, &mut FxHashMap::default()) <= pass
                && at.iter().all(|index| loaded_by(graph, nest, index, pass))
        }
    })
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
