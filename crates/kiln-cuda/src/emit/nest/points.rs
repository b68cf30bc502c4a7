//! Nests without reductions: each thread has some neighbouring points.

use kiln_graph::Graph;

use super::space::{Seen, Space};
use super::writer::Writer;
use super::{Launch, THREADS, ceil, coordinates, grid};
use crate::code::FunctionText;

/// The indices of the kernel.
pub(super) fn seen(graph: &Graph, space: &Space) -> Vec<Seen> {
    let mut writer = Writer::new(graph, space);
    body(&mut writer);
    writer.seen
}

/// Chooses neighbours.
pub(super) fn shape(space: &mut Space, seen: &[Seen]) {
    space.choose_vector(seen, false);
    let ragged = space.loops.cols.len() == 1;
    space.choose_width(seen, ragged);
}

/// What happens at `writer.width` points.
pub(super) fn body(writer: &mut Writer<'_>) -> String {
    writer.begin_points();
    for store in &writer.space.loops.nest.stores {
        let dtype = writer.buffer_dtype(store.buffer);
        writer.see(&store.position, 2, dtype);
        writer.store_point(store);
    }
    writer.end_points(None)
}

/// Writes the kernel.
pub(super) fn generate(graph: &Graph, space: &Space) -> (Vec<Launch>, usize) {
    let mut writer = Writer::new(graph, space);
    let ty = writer.index_type();
    let text = body(&mut writer);
    let width = space.width;
    let points = space.loops.row_length();
    let items = ceil(points, width);
    let number = format!("({ty})blockIdx.x * {THREADS} + threadIdx.x");
    let mut statements = format!("const {ty} t = {number};\n");
    if items % THREADS != 0 {
        statements.push_str(&format!("if (t >= {items}) return;\n"));
    }
    if points % width == 0 {
        statements.push_str(&coordinates(space, &space.loops.cols, ty, "t"));
        statements.push_str(&text);
    } else {
        // One variable, whose last points are fewer than a thread takes.
        let var = space.vector.unwrap_or(0);
        statements.push_str(&format!(
            "{ty} i{var} = t * {width};\nif (i{var} + {width} <= {points}) {{\n{text}return;\n}}\n"
        ));
        writer.width = 1;
        let single = body(&mut writer);
        statements.push_str(&format!("for (; i{var} < {points}; i{var}++) {{\n{single}}}\n"));
    }
    let top: String = writer.top.iter().map(|line| format!("{line}\n")).collect();
    let launch = Launch {
        text: FunctionText {
            helpers: String::new(),
            parameters: writer.parameters(),
            body: top + &statements,
            threads: THREADS as u32,
            device_only: false,
        },
        grid: [grid(ceil(items, THREADS)), 1, 1],
        shared_bytes: 0,
        arguments: writer.arguments,
    };
    (vec![launch], 0)
}
