//! The parts of a step whose operations share no kernel.

use kiln_graph::{Graph, Node};

use crate::checks::is_check;

/// A part of the step whose operations share no kernel with those of other parts.
///
/// The forward pass is apart from the backward pass and the optimizer: a kernel of both would have to keep
/// the values that the partition drops after the forward pass and computes again. Chunks of rows are apart,
/// so that one chunk's memory is free when the next one runs. Index checks are apart because updates wait
/// for them: an update would also wait for all other work of such a kernel.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Section {
    forward: bool,
    chunk: Option<u16>,
    check: bool,
}

impl Section {
    pub(crate) fn of(graph: &Graph, node: Node) -> Self {
        let provenance = &graph.node(node).provenance;
        Self {
            forward: !provenance.phase.is_after_forward(),
            chunk: provenance.chunk,
            check: is_check(provenance),
        }
    }
}
