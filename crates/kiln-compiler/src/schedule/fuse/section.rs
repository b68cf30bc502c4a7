//! The parts of a step whose operations share no kernel.

use kiln_graph::{Graph, Node};

use crate::checks::is_check;

/// A part of the step whose operations share no kernel with those of other parts.
///
/// What the backward pass computes once more, and what it does at all, stays out of the kernels of the
/// forward pass: otherwise what was recomputed to be dropped meanwhile would be kept. So do chunks of rows
/// stay out of each other's. A look at indices waits for nothing else: updates wait for it.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct Section {
    forward: bool,
    chunk: Option<u16>,
    check: bool,
}

impl Section {
    pub(super) fn of(graph: &Graph, node: Node) -> Self {
        let provenance = &graph.node(node).provenance;
        Self {
            forward: !provenance.phase.is_after_forward(),
            chunk: provenance.chunk,
            check: is_check(provenance),
        }
    }
}
