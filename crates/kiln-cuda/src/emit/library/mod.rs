//! Operations that are kernels of their own: scatters, sorts, cumulative operations, and everything on empty tensors.
//!
//! The operands and results of these operations are stored row-major. A tensor is mostly seen as three dimensions, those in front of an axis as one
//! (`outer`), the axis, and those behind it as one (`inner`): [`Lanes`].

mod copies;
mod empty;

use kiln_compiler::schedule::Kernel;
use kiln_graph::{Graph, Node, Op, Value};

use super::text::{THREADS, Text, blocks, index_type};
use super::{Argument, EmitOptions, KernelCode, Launch, elements};
pub use empty::empty;

/// The code of `node`; none if nothing here computes it.
pub fn generate(graph: &Graph, kernel: &Kernel, node: Node, options: &EmitOptions<'_>) -> Option<KernelCode> {
    let _ = (kernel, options);
    let code = match &graph.node(node).op {
        Op::Pad { low, .. } => KernelCode::launches([copies::pad(graph, node, low)]),
        Op::UpdateSlice { starts, steps } => {
            KernelCode::launches([copies::update_slice(graph, node, starts, steps)])
        }
        _ => return None,
    };
    Some(code)
}

/// A kernel that writes the register `element` to every place of `value`.
pub fn fill(graph: &Graph, value: Value, element: &str) -> Launch {
    let (dtype, count) = (graph.dtype(value), graph.ty(value).numel());
    let memory = elements::memory(dtype);
    let width = 16 / dtype.size();
    let text = Text::default()
        .writes(memory, "result", Argument::value(value))
        .ty("Element", memory)
        .ty("Index", index_type(count))
        .count("COUNT", count)
        .count("WIDTH", width)
        .count("THREADS", THREADS as usize);
    let statements = format!(
        "
const Element element = {};
const Index first = ((Index)blockIdx.x * THREADS + threadIdx.x) * WIDTH;
if (first + WIDTH <= COUNT) {{
    kiln_vector<Element, WIDTH> all;
    for (int j = 0; j < WIDTH; j++) all.at[j] = element;
    all.store(result + first);
}} else {{
    for (Index i = first; i < COUNT; i++) result[i] = element;
}}
",
        elements::narrow(dtype, element)
    );
    text.launch(&statements, blocks(count, THREADS as usize * width), THREADS)
}
