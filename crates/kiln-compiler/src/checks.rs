//! Index checks of compiled code: before anything is overwritten, every index is known to be in range.
//!
//! Kernels clamp indices so that memory stays safe, and do no more: a test beside each load would cost what
//! a gather costs. Instead this pass adds the least and the largest element of each tensor of indices as
//! two more outputs of the step, before the partition and fusion see the graph. Token ids and labels are
//! arguments, so these are small kernels at the very start; an index that the step computes is checked
//! right after it is computed. An index that cannot be out of range ([`kiln_graph::range`]) is not checked.
//!
//! ```text
//!   %ids = parameter 1 : i64[32]                    %ids = parameter 1 : i64[32]
//!   %rows = index_select %table, %ids               %least = reduce min %ids    ; index check
//!   return %rows                            ──►     %most = reduce max %ids     ; index check
//!                                                   %rows = index_select %table, %ids
//!                                                   return %rows, %least (check), %most (check)
//! ```
//!
//! After the kernels that make such a pair the step compares the pair with the bounds, and returns if an
//! index is outside ([`crate::schedule::Schedule::checks_decided_after`]). Kernels that write an output
//! into an argument's memory run after all of these checks: [`crate::schedule::order`] puts them there
//! where it can, and [`crate::plan`] gives an output memory of its own where it cannot (the index depends
//! on that output). So a step that stops has overwritten nothing.

use std::sync::Arc;

use kiln_graph::op::{Dims, Op, ReduceOp};
use kiln_graph::{Graph, IndexCheck, IndexError, Phase, Provenance, Rewriter, TypeError, Value};
use rustc_hash::FxHashMap;
use serde::{Deserialize, Serialize};

/// The recorded operation of nodes that find the least and the largest index. They share no kernel with
/// other operations, because such a kernel might run late.
pub const OPERATION: &str = "index check";

/// A tensor of indices that the step checks: stored in the cache with the step.
#[derive(Clone, Debug, Serialize, Deserialize, PartialEq, Eq)]
pub struct Check {
    /// Their element type, by name.
    pub dtype: String,
    /// Where they are used, in program order.
    pub uses: Vec<IndexUse>,
}

/// One use of indices.
#[derive(Clone, Debug, Serialize, Deserialize, PartialEq, Eq)]
pub struct IndexUse {
    /// Mnemonic of the primitive.
    pub op: String,
    /// The recorded operation, if known.
    pub operation: Option<String>,
    /// The forward operation whose gradient it belongs to, if known.
    pub gradient_of: Option<String>,
    /// `file:line` of the user's call, if known.
    pub location: Option<String>,
    /// The dimension indexed.
    pub axis: usize,
    /// Its extent.
    pub extent: usize,
}

impl IndexUse {
    fn new(graph: &Graph, check: &IndexCheck) -> Self {
        let data = graph.node(check.node);
        let text = |text: &Option<Arc<str>>| text.as_deref().map(str::to_owned);
        Self {
            op: data.op.name().to_owned(),
            operation: text(&data.provenance.operation),
            gradient_of: text(&data.provenance.gradient_of),
            location: text(&data.provenance.location),
            axis: check.axis,
            extent: check.extent,
        }
    }
}

impl Check {
    /// The smallest of the extents that the indices must be below.
    pub fn extent(&self) -> usize {
        self.uses.iter().map(|it| it.extent).min().unwrap_or(usize::MAX)
    }

    /// The error of indices from `least` to `most`, at the first use that they do not fit; none if they fit
    /// all uses.
    pub fn error(&self, least: i128, most: i128) -> Option<IndexError> {
        let wrong = |extent: usize| match least < 0 {
            true => Some(least),
            false => (most >= extent as i128).then_some(most),
        };
        self.uses.iter().find_map(|it| {
            Some(IndexError {
                index: wrong(it.extent)?,
                operation: it.op.clone(),
                recorded: it.operation.as_deref().map(Arc::from),
                location: it.location.as_deref().map(Arc::from),
                axis: it.axis,
                extent: it.extent,
            })
        })
    }

    /// A number of the indices' type, from its bytes at the start of `bytes`.
    pub fn number(&self, bytes: [u8; 8]) -> i128 {
        let [a, b, c, d, ..] = bytes;
        match &*self.dtype {
            "i8" => i8::from_ne_bytes([a]).into(),
            "u8" => a.into(),
            "i16" => i16::from_ne_bytes([a, b]).into(),
            "u16" => u16::from_ne_bytes([a, b]).into(),
            "i32" => i32::from_ne_bytes([a, b, c, d]).into(),
            "u32" => u32::from_ne_bytes([a, b, c, d]).into(),
            "u64" => u64::from_ne_bytes(bytes).into(),
            _ => i64::from_ne_bytes(bytes).into(),
        }
    }
}

/// `graph` with the least and the largest index of each check as two more outputs, in the order of the
/// checks.
///
/// # Errors
/// Only if a node is ill typed, which would be a bug.
pub fn run(graph: &Graph) -> Result<(Graph, Vec<Check>), TypeError> {
    let mut checks: Vec<(Value, Check)> = Vec::new();
    for found in kiln_graph::indices::checks(graph) {
        let used = IndexUse::new(graph, &found);
        match checks.iter_mut().find(|(value, _)| *value == found.indices) {
            Some((_, check)) => check.uses.push(used),
            None => checks.push((
                found.indices,
                Check {
                    dtype: graph.dtype(found.indices).name().to_owned(),
                    uses: vec![used],
                },
            )),
        }
    }
    if checks.is_empty() {
        return Ok((graph.clone(), Vec::new()));
    }
    let mut pass = Rewriter::new(graph);
    let mut found: FxHashMap<Value, [Value; 2]> = FxHashMap::default();
    for (node, data) in graph.nodes() {
        pass.copy(node)?;
        for (value, check) in checks.iter().filter(|(value, _)| data.outputs.contains(value)) {
            let provenance = Provenance {
                operation: Some(OPERATION.into()),
                phase: match (&data.op, data.provenance.phase) {
                    // A check of an argument is part of the forward pass.
                    (Op::Parameter { .. }, phase) if phase != Phase::Unknown => Phase::Forward,
                    (_, phase) => phase,
                },
                location: check.uses[0].location.as_deref().map(Arc::from),
                ..Provenance::default()
            };
            let indices = pass.map(*value);
            let axes: Dims = (0..graph.shape(*value).rank()).collect();
            let mut extreme = |op| {
                let axes = axes.clone();
                pass.graph.add(Op::Reduce { op, axes }, &[indices], &provenance)
            };
            found.insert(*value, [extreme(ReduceOp::Min)?, extreme(ReduceOp::Max)?]);
        }
    }
    let mut checked = pass.finish();
    for (value, _) in &checks {
        found[value]
            .iter()
            .for_each(|&extreme| checked.check_output(extreme));
    }
    Ok((checked, checks.into_iter().map(|(_, check)| check).collect()))
}

/// Whether a node finds the least or the largest index of a check.
pub fn is_check(provenance: &Provenance) -> bool {
    provenance.operation.as_deref() == Some(OPERATION)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Graph {
        Graph::parse(text).unwrap()
    }

    #[test]
    fn uses_of_one_tensor_are_one_check() {
        let graph = parse(
            "graph @g {
               %table = parameter 0 : f32[10,4]
               %small = parameter 1 : f32[6,4]
               %ids = parameter 2 : i64[3]
               %again = reshape %ids : i64[3]
               %a = index_select %table, %ids {axis=0} : f32[3,4]   ; fwd Embedding at main.rs:1
               %b = index_select %small, %again {axis=0} : f32[3,4] ; fwd Embedding at main.rs:2
               %position = arg_reduce max %table {axis=0} : i64[4]
               %c = index_select %table, %position {axis=0} : f32[4,4]
               return %a, %b, %c
             }",
        );
        let (checked, checks) = run(&graph).unwrap();
        assert_eq!(
            checks.len(),
            1,
            "positions of a largest element are in range: {checked}"
        );
        assert_eq!((checks[0].uses.len(), checks[0].extent()), (2, 6));
        assert_eq!(checked.outputs.iter().filter(|output| output.check).count(), 2);

        assert_eq!(checks[0].error(0, 5), None);
        let error = checks[0].error(0, 7).unwrap();
        assert_eq!(
            (error.index, error.extent, error.location.as_deref()),
            (7, 6, Some("main.rs:2"))
        );
        let error = checks[0].error(-1, 70).unwrap();
        assert_eq!(
            (error.index, error.extent, error.location.as_deref()),
            (-1, 10, Some("main.rs:1"))
        );
    }

    #[test]
    fn numbers_are_read_in_their_own_type() {
        let check = |dtype: &str| Check {
            dtype: dtype.to_owned(),
            uses: Vec::new(),
        };
        let bytes = (-2i64).to_ne_bytes();
        assert_eq!(check("i64").number(bytes), -2);
        assert_eq!(check("u64").number(bytes), i128::from(u64::MAX) - 1);
        let mut low = [0; 8];
        low[..4].copy_from_slice(&(-3i32).to_ne_bytes());
        assert_eq!(check("i32").number(low), -3);
        assert_eq!(check("u32").number(low), i128::from(u32::MAX) - 2);
    }
}
