//! A fused loop nest: an iteration space and what happens at each point of it.
//!
//! The space is a box of loop variables. Every member operation has a *map*: the index of its result as a
//! function of the variables. A map that uses all variables makes the member a statement of the innermost
//! loop; one that uses fewer is computed once for each combination of those.
//!
//! Once a nest contains a reduction its variables are split into *rows* and *columns*. A **row reduction**
//! combines the columns of one row; its result is available to later statements on the same row, so that
//! softmax or a layer normalisation is one nest: several passes over a row that sits in cache. A **late
//! reduction** combines rows (a bias gradient) or everything (a mean loss); its result exists only after the
//! nest, so nothing inside may use it. Rows are dealt to a fixed number of chunks with partial results of
//! their own, which are combined in order: the bits of the result do not depend on the number of threads.

use std::sync::Arc;

use rustc_hash::{FxHashMap, FxHashSet};

use kiln_graph::{Graph, Node, Op, Value};

use super::buffer::Buffer;
use super::integers::Integers;
use super::layout::{Layouts, position};
use crate::index::{Index, Var, bit, linear};

/// Rows and columns of a nest with reductions, as bit sets of variables.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Split {
    /// Variables that number the rows.
    pub rows: u64,
    /// Variables that number the elements of a row.
    pub cols: u64,
}

/// A result that leaves the nest.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Store {
    /// What is stored.
    pub value: Value,
    /// Its index at each point.
    pub index: Vec<Index>,
    /// Where to.
    pub buffer: Buffer,
    /// Position in the buffer, in elements.
    pub position: Index,
}

/// A fused loop nest.
#[derive(Clone, Debug, Default)]
pub struct Nest {
    /// Extent of each variable.
    pub extents: Vec<i64>,
    /// Rows and columns, if there are reductions.
    pub split: Option<Split>,
    /// Operations computed here; in program order once the schedule is complete.
    pub members: Vec<Node>,
    /// Index of each member's result.
    pub maps: FxHashMap<Value, Vec<Index>>,
    /// Index of each reduction's operand along the reduced axes.
    pub reduced: FxHashMap<Value, Vec<Index>>,
    /// Loads of integers that take part in indices.
    pub integers: Integers,
    /// The results that leave the nest.
    pub stores: Vec<Store>,
    /// Results of late reductions among the stores.
    pub late: Vec<Value>,
    /// Values that are not stored row-major.
    pub layouts: Arc<Layouts>,
    /// The values of the step that decisions depend on ([`super::decided`]). Empty in a step without numbers
    /// of 16 bits.
    pub decided: Arc<FxHashSet<Value>>,
    /// Values stored by other kernels that this nest reads, and where.
    pub uses: Vec<(Value, Vec<Vec<Index>>)>,
}

impl Nest {
    /// Bit set of all variables.
    pub fn all(&self) -> u64 {
        (1u64 << self.extents.len()) - 1
    }

    /// The variables in a set, with extents.
    pub fn list(&self, set: u64) -> Vec<(Var, i64)> {
        (0..self.extents.len() as Var)
            .filter(|&var| set & bit(var) != 0)
            .map(|var| (var, self.extents[var as usize]))
            .collect()
    }

    /// Number of points of the variables in a set.
    pub fn points(&self, set: u64) -> i64 {
        self.list(set).iter().map(|&(_, extent)| extent).product()
    }

    /// Replaces every variable in every index.
    pub fn substitute(&mut self, with: &dyn Fn(Var, i64) -> Index) {
        let apply = |index: &mut Index| *index = index.substitute(with, &|slot| slot);
        self.maps.values_mut().flatten().for_each(apply);
        self.reduced.values_mut().flatten().for_each(apply);
        self.integers.indices_mut().for_each(apply);
        for (_, indices) in &mut self.uses {
            indices.iter_mut().flatten().for_each(apply);
        }
        for store in &mut self.stores {
            store.index.iter_mut().for_each(apply);
            apply(&mut store.position);
        }
    }

    /// The indices at which the nest reads a value that another kernel stores.
    pub fn uses_of(&self, value: Value) -> &[Vec<Index>] {
        self.uses
            .iter()
            .find(|(own, _)| *own == value)
            .map_or(&[], |(_, indices)| indices)
    }

    /// Notes that `value` is read at `index`.
    pub fn add_use(&mut self, value: Value, index: Vec<Index>) {
        match self.uses.iter_mut().find(|(own, _)| *own == value) {
            Some((_, indices)) if indices.contains(&index) => {}
            Some((_, indices)) => indices.push(index),
            None => self.uses.push((value, vec![index])),
        }
    }

    /// Where a store of `value` at its own buffer goes.
    pub fn add_store(&mut self, graph: &Graph, value: Value, index: Vec<Index>) {
        let position = position(graph, &self.layouts, value, &index);
        self.stores.push(Store {
            value,
            index,
            buffer: Buffer::Value(value),
            position,
        });
    }

    /// Forgets the store of `value` at its own buffer. It may be a piece of other buffers, which stay.
    pub fn drop_store(&mut self, value: Value) {
        self.stores.retain(|store| store.buffer != Buffer::Value(value));
    }

    /// Whether a value with this index is complete at each point or once for each row, so that it can be
    /// stored.
    pub fn storable(&self, graph: &Graph, value: Value, index: &[Index]) -> bool {
        let used = vars(index);
        let fits = used == self.all() || self.split.is_some_and(|split| used == split.rows);
        fits && bijective(index, graph.shape(value))
    }

    /// Whether a value at this index belongs to a row: no variables but those of rows occur.
    pub fn is_row(&self, index: &[Index]) -> bool {
        self.split.is_some_and(|split| vars(index) & !split.rows == 0)
    }

    /// The loops, for people: `rows i0=8 i1=128, columns i2=64`.
    pub fn loops_text(&self) -> String {
        let list = |set: u64| {
            let words: Vec<String> = self.list(set).iter().map(|(v, e)| format!("i{v}={e}")).collect();
            if words.is_empty() {
                "one".to_owned()
            } else {
                words.join(" ")
            }
        };
        match self.split {
            Some(split) => format!("rows {}, columns {}", list(split.rows), list(split.cols)),
            None => list(self.all()),
        }
    }

    /// The index of the operand of a reduction whose result is at `kept`: reduced axes are recorded, the
    /// others are those of the result.
    pub fn reduced_operand_index(&self, graph: &Graph, reduction: Node, kept: &[Index]) -> Vec<Index> {
        let data = graph.node(reduction);
        let axes = match &data.op {
            Op::Reduce { axes, .. } => axes.as_slice(),
            _ => &[],
        };
        let mut reduced = self.reduced.get(&data.outputs[0]).into_iter().flatten();
        let mut kept = kept.iter();
        let axes = (0..graph.shape(data.inputs[0]).rank()).map(|axis| {
            let next = if axes.contains(&axis) {
                reduced.next()
            } else {
                kept.next()
            };
            next.cloned().unwrap_or_default()
        });
        axes.collect()
    }

    /// All operations that are evaluated here, in program order: the members and, between these and what is
    /// loaded, those that no kernel owns, such as movements. A product before the nest is one of them; its
    /// operands are not the nest's.
    pub fn computed(&self, graph: &Graph) -> Vec<Node> {
        let loaded: FxHashSet<Value> = self.uses.iter().map(|(value, _)| *value).collect();
        let mut found: FxHashSet<Node> = self.members.iter().copied().collect();
        let mut next: Vec<Node> = self.members.clone();
        let stored = self.stores.iter().map(|store| store.value);
        let stored = stored.filter(|value| !loaded.contains(value));
        next.extend(
            stored
                .map(|value| graph.value(value).node)
                .filter(|&node| found.insert(node)),
        );
        while let Some(node) = next.pop() {
            let data = graph.node(node);
            if data.op.is_contraction() {
                continue;
            }
            let operands = data.inputs.iter().filter(|value| !loaded.contains(value));
            next.extend(
                operands
                    .map(|&value| graph.value(value).node)
                    .filter(|&node| found.insert(node)),
            );
        }
        let mut all: Vec<Node> = found.into_iter().collect();
        all.sort_unstable();
        all
    }

    /// The pointwise members that compute what an earlier member computes, each with that member's result.
    /// Rewrites that compute something again instead of reading it leave such members where both copies end
    /// up in one nest.
    pub fn equal_members(&self, graph: &Graph) -> FxHashMap<Value, Value> {
        let mut equal: FxHashMap<Value, Value> = FxHashMap::default();
        let mut firsts: FxHashMap<Vec<Value>, Vec<(&Op, Value)>> = FxHashMap::default();
        let members = self.members.iter().map(|&node| graph.node(node));
        for data in members.filter(|data| data.op.is_pointwise()) {
            let first_of = |value: &Value| *equal.get(value).unwrap_or(value);
            let operands: Vec<Value> = data.inputs.iter().map(first_of).collect();
            let firsts = firsts.entry(operands).or_default();
            match firsts.iter().find(|(op, _)| **op == data.op) {
                Some(&(_, first)) => {
                    equal.insert(data.outputs[0], first);
                }
                None => firsts.push((&data.op, data.outputs[0])),
            }
        }
        equal
    }
}

/// Bit set of the variables that an index depends on.
pub fn vars(index: &[Index]) -> u64 {
    index.iter().fold(0, |set, i| set | i.vars())
}

/// Whether the map from the variables of `index` to the elements of `shape` reaches each element exactly
/// once.
pub fn bijective(index: &[Index], shape: &[usize]) -> bool {
    let position = linear(index, shape);
    let mut terms: Vec<(i64, i64)> = Vec::new();
    for (atom, factor) in position.terms() {
        match atom {
            crate::index::Atom::Var { extent, .. } => terms.push((*factor, *extent)),
            _ => return false,
        }
    }
    terms.sort_unstable();
    let mut reach = 1;
    for (factor, extent) in terms {
        if factor != reach {
            return false;
        }
        reach *= extent;
    }
    position.offset() == 0 && reach == shape.iter().product::<usize>() as i64
}
