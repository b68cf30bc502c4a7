//! How many passes over a row come before a value is known.
//!
//! Softmax of a row needs the maximum, then the sum of exponentials, then the quotients. Each row reduction
//! needs a pass over the row, and the next pass may use its result:
//!
//! ```text
//! m = max x            x has stage 0, m has stage 1
//! e = exp(x - m)       e has stage 1
//! s = sum e            s has stage 2
//! y = e / s            y has stage 2: pass 2 stores it
//! ```
//!
//! The stage of a value is the number of row reductions, one behind the other, that it depends on inside
//! its nest. Pass `p` over a row evaluates the values of stage `p`. Values that a nest reads from memory
//! have stage 0, and so has the result of the contraction that the nest follows.

use rustc_hash::FxHashMap;

use kiln_graph::{Graph, Op, Value};

use super::nest::Nest;

/// The stages of a nest's values, found when they are first asked for.
#[derive(Clone, Debug, Default)]
pub struct RowStages {
    known: FxHashMap<Value, usize>,
}

impl RowStages {
    /// The stage of `value` in `nest`. One `RowStages` serves one nest.
    pub fn of(&mut self, graph: &Graph, nest: &Nest, value: Value) -> usize {
        if let Some(&stage) = self.known.get(&value) {
            return stage;
        }
        let data = graph.def(value);
        let stage = if data.op.is_contraction() || !nest.uses_of(value).is_empty() {
            0
        } else {
            let operands = data.inputs.iter().map(|&operand| self.of(graph, nest, operand));
            operands.max().unwrap_or(0) + usize::from(matches!(data.op, Op::Reduce { .. }))
        };
        self.known.insert(value, stage);
        stage
    }
}
