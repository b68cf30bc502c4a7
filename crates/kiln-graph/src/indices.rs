//! Indices: which operations take them, which indices can be out of range, and the error that names one.
//!
//! An index out of range is an error of the program. Executors find it before they overwrite anything:
//! [`checks`] lists the uses of indices that the graph alone does not prove to be in range
//! ([`crate::range`]), each with the value whose elements the executor has to look at.
//!
//! ```text
//!   %ids = parameter 1 : i64[4,8]
//!   %flat = reshape %ids : i64[32]
//!   %rows = index_select %table, %flat {axis=0} : f32[32,16]   a use of %ids, all of whose elements must be below %table's first extent
//! ```

use std::fmt;
use std::sync::Arc;

use crate::range::Ranges;
use crate::{Graph, Node, NodeData, Op, Value};

/// A use of indices that may be out of range.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct IndexCheck {
    /// The node that uses them.
    pub node: Node,
    /// The value whose elements are the indices: the operand itself, or the value that it is a reshaped or
    /// repeated view of.
    pub indices: Value,
    /// The dimension indexed.
    pub axis: usize,
    /// Its extent, which every index must be below; none may be negative.
    pub extent: usize,
}

/// An index that is out of range, and where the program used it.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error(
    "index {index} is out of range for dimension {axis} of extent {extent} in `{operation}`{}",
    Origin(self)
)]
pub struct IndexError {
    /// Mnemonic of the primitive.
    pub operation: String,
    /// The recorded operation, if known.
    pub recorded: Option<Arc<str>>,
    /// `file:line` of the user's call, if known.
    pub location: Option<Arc<str>>,
    /// The index.
    pub index: i128,
    /// The dimension indexed.
    pub axis: usize,
    /// Its extent.
    pub extent: usize,
}

/// The recorded operation and the line, in parentheses.
struct Origin<'a>(&'a IndexError);

impl fmt::Display for Origin<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (&self.0.recorded, &self.0.location) {
            (Some(recorded), Some(location)) => write!(f, " ({recorded} at {location})"),
            (Some(recorded), None) => write!(f, " ({recorded})"),
            (None, Some(location)) => write!(f, " (at {location})"),
            (None, None) => Ok(()),
        }
    }
}

impl IndexError {
    /// The error of `node`, which uses `index` along `axis` of `extent`.
    pub fn new(node: &NodeData, index: i128, axis: usize, extent: usize) -> Self {
        Self {
            operation: node.op.name().to_owned(),
            recorded: node.provenance.operation.clone(),
            location: node.provenance.location.clone(),
            index,
            axis,
            extent,
        }
    }
}

/// The operand that holds the indices of `node`, the dimension they index and its extent; none if it takes no
/// indices. Indices of [`Op::MaxPoolGrad`] count through all spatial dimensions, of which the first is named.
pub fn use_of(graph: &Graph, node: &NodeData) -> Option<(Value, usize, usize)> {
    let extent = |axis: usize| graph.shape(node.inputs[0])[axis];
    match &node.op {
        Op::Gather { axis }
        | Op::Scatter { axis, .. }
        | Op::IndexSelect { axis }
        | Op::IndexPut { axis, .. } => Some((node.inputs[1], *axis, extent(*axis))),
        Op::MaxPoolGrad { input } => Some((node.inputs[1], 2, input.iter().product())),
        _ => None,
    }
}

/// Every use of indices that the graph does not prove to be in range, in program order, including uses
/// whose results nobody needs.
pub fn checks(graph: &Graph) -> Vec<IndexCheck> {
    let mut ranges = None;
    let mut found = Vec::new();
    for (node, data) in graph.nodes() {
        let Some((indices, axis, extent)) = use_of(graph, data) else {
            continue;
        };
        let ranges = ranges.get_or_insert_with(|| Ranges::new(graph));
        let proven = ranges.get(indices).is_some_and(|range| range.is_below(extent));
        if !proven && graph.ty(indices).numel() > 0 {
            found.push(IndexCheck {
                node,
                indices: behind(graph, indices),
                axis,
                extent,
            });
        }
    }
    found
}

/// The value that `value` is a view of: it has the same elements, though each perhaps fewer times. Its rank
/// is at least 1.
fn behind(graph: &Graph, mut value: Value) -> Value {
    loop {
        let data = graph.def(value);
        let same = matches!(
            data.op,
            Op::Reshape(_) | Op::Transpose(_) | Op::Broadcast { .. } | Op::Flip(_)
        );
        if !same || graph.shape(data.inputs[0]).rank() == 0 {
            return value;
        }
        value = data.inputs[0];
    }
}
