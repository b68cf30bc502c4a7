//! The integers that take part in a nest's indices: what gathers and selections load before they read.

use kiln_graph::{Graph, Node, Op, Value};

use super::nest::vars;
use crate::index::{Atom, Index};

/// Loads of integers, each with a slot by which [`Atom::Data`] names it.
#[derive(Clone, Debug, Default)]
pub struct Integers(Vec<(Value, Vec<Index>)>);

impl Integers {
    /// Whether no integer is loaded.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The integers of a slot: `(indices, where)`.
    pub fn at(&self, slot: u32) -> (Value, &[Index]) {
        let (indices, at) = &self.0[slot as usize];
        (*indices, at)
    }

    /// Tensors of integers, one for each slot.
    pub fn tensors(&self) -> impl Iterator<Item = Value> {
        self.0.iter().map(|(indices, _)| *indices)
    }

    /// Where integers are loaded from.
    pub fn indices_mut(&mut self) -> impl Iterator<Item = &mut Index> {
        self.0.iter_mut().flat_map(|(_, at)| at)
    }

    /// Operands of a pointwise operation at `index`, as `(operand, index)`. A gather's integers get a slot
    /// unless they have one.
    pub fn operands(&mut self, graph: &Graph, node: Node, index: &[Index]) -> Vec<(Value, Vec<Index>)> {
        let data = graph.node(node);
        match data.op {
            Op::Gather { axis } => {
                let (x, indices) = (data.inputs[0], data.inputs[1]);
                let at = self.load(graph.shape(x)[axis], indices, index.to_vec());
                let mut moved = index.to_vec();
                moved[axis] = at;
                vec![(indices, index.to_vec()), (x, moved)]
            }
            Op::IndexSelect { axis } => {
                let (x, indices) = (data.inputs[0], data.inputs[1]);
                let at = self.load(graph.shape(x)[axis], indices, vec![index[axis].clone()]);
                let mut moved = index.to_vec();
                let list = vec![std::mem::replace(&mut moved[axis], at)];
                vec![(indices, list), (x, moved)]
            }
            Op::Random { .. } => data.inputs.iter().map(|&v| (v, Vec::new())).collect(),
            _ => data.inputs.iter().map(|&v| (v, index.to_vec())).collect(),
        }
    }

    /// `indices[at]`, which numbers elements of an axis of `extent` elements.
    fn load(&mut self, extent: usize, indices: Value, at: Vec<Index>) -> Index {
        let vars = vars(&at);
        let known = self.0.iter().position(|(v, i)| *v == indices && *i == at);
        let slot = known.unwrap_or_else(|| {
            self.0.push((indices, at));
            self.0.len() - 1
        });
        Index::atom(Atom::Data {
            slot: slot as u32,
            extent: extent as i64,
            vars,
        })
    }
}
