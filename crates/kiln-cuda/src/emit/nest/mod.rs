//! CUDA C++ for a fused loop nest.

use kiln_compiler::schedule::nest::Nest;
use kiln_graph::Graph;

use super::{EmitOptions, KernelCode};

/// Writes the code of `nest`.
pub fn generate(graph: &Graph, nest: &Nest, options: &EmitOptions<'_>) -> KernelCode {
    let _ = (graph, nest, options);
    todo!()
}

/// Nests side by side: those of equal text become one launch over a table.
pub fn together(graph: &Graph, nests: &[Nest], options: &EmitOptions<'_>) -> KernelCode {
    let _ = (graph, nests, options);
    todo!()
}
