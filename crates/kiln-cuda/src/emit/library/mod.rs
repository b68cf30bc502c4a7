//! Operations that are kernels of their own: scatters, sorts, cumulative operations, and everything on empty
//! tensors.
//!
//! The operands and results of these operations are stored row-major. A tensor is mostly seen as three
//! dimensions, those in front of an axis as one (`outer`), the axis, and those behind it as one (`inner`):
//! [`Lanes`].

mod copies;
mod empty;
mod extreme;
mod indexed;
mod order;
mod running;
mod sort;

use kiln_compiler::schedule::Kernel;
use kiln_graph::{Graph, Node, Op, Shape, Value};

use super::text::{THREADS, Text, blocks, index_type};
use super::{Argument, EmitOptions, KernelCode, Launch, expressions};
pub(super) use copies::copy;
pub use empty::empty;

/// The code of `node`; none if nothing here computes it.
pub fn generate(graph: &Graph, kernel: &Kernel, node: Node, options: &EmitOptions<'_>) -> Option<KernelCode> {
    // Operands come row-major: the scheduler has them copied where they are not.
    let _ = (kernel, options);
    let code = match &graph.node(node).op {
        Op::Pad { low, .. } => KernelCode::launches([copies::pad(graph, node, low)]),
        Op::UpdateSlice { starts, steps } => {
            KernelCode::launches([copies::update_slice(graph, node, starts, steps)])
        }
        Op::ArgReduce { op, axis, .. } => return extreme::arg_reduce(graph, node, *op, *axis),
        Op::Cumulative { op, axis } => running::cumulative(graph, node, *op, *axis),
        Op::Scatter { axis, mode } | Op::IndexPut { axis, mode } => {
            return indexed::scatter(graph, node, *axis, *mode);
        }
        Op::Sort { axis, descending, .. } => {
            let extent = graph.shape(graph.node(node).inputs[0])[*axis];
            return sort::sort(graph, node, *axis, *descending, extent);
        }
        Op::TopK { axis, k, .. } => return sort::sort(graph, node, *axis, true, *k),
        _ => return None,
    };
    Some(code)
}

/// A tensor as the lines along one dimension.
#[derive(Clone, Copy, Debug)]
struct Lanes {
    /// Elements of the dimensions in front.
    outer: usize,
    /// Elements of a line.
    extent: usize,
    /// Elements of the dimensions behind, which is also the distance between neighbours of a line.
    inner: usize,
}

impl Lanes {
    fn new(shape: &Shape, axis: usize) -> Self {
        Self {
            outer: shape[..axis].iter().product(),
            extent: shape[axis],
            inner: shape[axis + 1..].iter().product(),
        }
    }

    /// How many lines there are.
    fn lines(&self) -> usize {
        self.outer * self.inner
    }
}

/// A kernel that writes the register `element` to every place of `value`.
pub fn fill(graph: &Graph, value: Value, element: &str) -> Launch {
    let (dtype, count) = (graph.dtype(value), graph.ty(value).numel());
    let memory = expressions::memory_type(dtype);
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
        expressions::narrowed(dtype, element)
    );
    text.launch(&statements, blocks(count, THREADS as usize * width), THREADS)
}
