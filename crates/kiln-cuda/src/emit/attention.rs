//! Attention, forward and backward.

use kiln_compiler::schedule::Kernel;
use kiln_graph::{Graph, Node};

use super::{EmitOptions, KernelCode};

/// The code of `node`; none if nothing here computes it.
pub fn generate(graph: &Graph, kernel: &Kernel, node: Node, options: &EmitOptions<'_>) -> Option<KernelCode> {
    let _ = (graph, kernel, node, options);
    None
}
