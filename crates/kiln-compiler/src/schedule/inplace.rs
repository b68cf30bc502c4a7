//! Which operands a nest may overwrite with its results.
//!
//! A nest may store into the memory of an operand if each element of the operand is read for the last time
//! before, or at, the point that overwrites it. Two conditions ensure that. All reads of the operand are at
//! the position that is stored. And the store happens in the last pass over a row, where the loop body
//! loads before it stores. An element that is read once for each row, such as the one that a loss picks
//! from a row of logits, may lie anywhere in that row if it is read before the last pass begins, and if
//! nobody else stores parts of the row: a target gives a row to one thread or group where the nest reduces
//! rows. Columns that are summed up, and what follows a product, lie in tiles, in which a row is several
//! groups'.

use kiln_graph::{Graph, Op, Value};

use super::layout::position;
use super::nest::{Nest, Split, Store, vars};
use super::row_stages::RowStages;
use crate::index::{Atom, Index};

/// The values whose memory `store` may take over. `in_tiles` says that the nest is computed in tiles of
/// something else's.
pub fn overwritable(graph: &Graph, nest: &Nest, store: &Store, in_tiles: bool) -> Vec<Value> {
    let mut stages = RowStages::default();
    let rows = nest.split.map_or(0, |split| split.rows);
    let of_points = |index: &[Index]| vars(index) & !rows != 0;
    if nest.late.contains(&store.value) || (nest.split.is_some() && !of_points(&store.index)) {
        return Vec::new();
    }
    let last = nest
        .members
        .iter()
        .filter(|&&node| matches!(graph.node(node).op, Op::Reduce { .. }))
        .map(|&node| stages.of(graph, nest, graph.node(node).inputs[0]))
        .chain(
            nest.stores
                .iter()
                .filter(|other| !nest.late.contains(&other.value) && of_points(&other.index))
                .map(|other| RowStages::default().of(graph, nest, other.value)),
        )
        .max()
        .unwrap_or(0);
    if stages.of(graph, nest, store.value) != last {
        return Vec::new();
    }
    let mut reduces_rows = nest
        .members
        .iter()
        .map(|&node| graph.node(node))
        .filter(|data| matches!(data.op, Op::Reduce { .. }))
        .map(|data| !nest.late.contains(&data.outputs[0]));
    let is_whole = !in_tiles && (nest.late.is_empty() || reduces_rows.any(|reduces| reduces));
    // Values that depend on rows alone are stored after the last pass. The store may write one piece of its
    // buffer; memory is handed on to the whole buffer.
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
                            || is_whole
                                && nest.split.is_some_and(|split| in_row(split, index, stored))
                                && index.iter().all(|index| loaded_by(graph, nest, index, last))
                    })
                })
        })
        .map(|(value, _)| *value)
        .collect()
}

/// Whether `index` is read once for each row, at an element of the row whose elements are at `whole`.
fn in_row(split: Split, index: &[Index], whole: &[Index]) -> bool {
    vars(index) & !split.rows == 0
        && index.iter().zip(whole).all(|(own, whole)| {
            let of_rows = whole.vars() & !split.rows == 0;
            (of_rows && own == whole) || whole.vars() & split.rows == 0
        })
}

/// Whether the integers in `index` are loaded before pass number `pass`.
fn loaded_by(graph: &Graph, nest: &Nest, index: &Index, pass: usize) -> bool {
    index.terms().iter().all(|(atom, _)| match atom {
        Atom::Var { .. } => true,
        Atom::Div(inner, _) | Atom::Mod(inner, _) => loaded_by(graph, nest, inner, pass),
        Atom::Data { slot, .. } => {
            let (indices, at) = nest.integers.at(*slot);
            RowStages::default().of(graph, nest, indices) <= pass
                && at.iter().all(|index| loaded_by(graph, nest, index, pass))
        }
    })
}
