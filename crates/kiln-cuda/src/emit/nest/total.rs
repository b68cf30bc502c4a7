//! Nests whose results are all late reductions to single numbers: each block has a chunk of the points.

use kiln_graph::Graph;

use super::late::{Late, Partials};
use super::space::{Seen, Space};
use super::writer::Writer;
use super::{Launch, Role, THREADS, c, ceil, coordinates, grid, unroll};
use crate::code::FunctionText;

/// Points of a block at least: enough for each thread to have some loads in flight.
const LEAST: i64 = 16 * THREADS;

/// Elements that a thread adds up at most, if there are so many blocks: the error of a sum grows with its
/// length.
const LONGEST: i64 = 128;

/// Blocks that fill the device: eight for each of 132 multiprocessors.
const BLOCKS: i64 = 1056;

/// The indices of the kernel.
pub(super) fn seen(graph: &Graph, space: &Space) -> Vec<Seen> {
    let mut writer = Writer::new(graph, space);
    let lates = all(&mut writer);
    body(&mut writer, &lates);
    writer.seen
}

fn all(writer: &mut Writer<'_>) -> Vec<Late> {
    writer.lates().into_iter().map(|(_, late)| late).collect()
}

fn body(writer: &mut Writer<'_>, lates: &[Late]) -> String {
    writer.begin_points();
    for late in lates {
        let x = writer.eval(late.x, &late.index);
        let next = c::combine(late.op, late.dtype, &late.name, &x.name);
        writer.body.push(format!("{} = {next};", late.name));
    }
    let stores = writer.space.loops.nest.stores.iter();
    for store in stores.filter(|store| !writer.space.loops.nest.late.contains(&store.value)) {
        let dtype = writer.buffer_dtype(store.buffer);
        writer.see(&store.position, 2, dtype);
        writer.store_point(store);
    }
    writer.end_points(None)
}

/// Writes the kernels.
pub(super) fn generate(graph: &Graph, space: &mut Space, seen: &[Seen]) -> (Vec<Launch>, usize) {
    space.choose_vector(seen, false);
    let ragged = space.loops.cols.len() == 1;
    space.choose_width(seen, ragged);
    let mut writer = Writer::new(graph, space);
    let lates = all(&mut writer);
    let text = body(&mut writer, &lates);
    let ty = writer.index_type();
    let (width, points) = (space.width, space.loops.row_length());
    let chunks = (points / LEAST).clamp(1, BLOCKS.max(ceil(points, THREADS * LONGEST)));
    let items = points / width;
    let each = ceil(ceil(items, chunks), THREADS) * THREADS;
    let chunks = ceil(items, each).max(1);
    let mut statements: String = writer.top.iter().map(|line| format!("{line}\n")).collect();
    for late in &lates {
        statements.push_str(&format!(
            "{} {} = {};\n",
            late.register(),
            late.name,
            late.neutral()
        ));
    }
    statements.push_str(&format!(
        "const {ty} first = ({ty})blockIdx.x * {each};\nconst {ty} last = first + {each} < {items} ? first + {each} : {items};\n\
         {}for ({ty} t = first + threadIdx.x; t < last; t += {THREADS}) {{\n{}{text}}}\n",
        unroll(&writer, &text),
        coordinates(space, &space.loops.cols, ty, "t")
    ));
    if points % width != 0 {
        let var = space.vector.unwrap_or(0);
        writer.width = 1;
        let single = body(&mut writer, &lates);
        statements.push_str(&format!(
            "if (blockIdx.x == 0 && threadIdx.x < {}) {{\nconst {ty} i{var} = {} + threadIdx.x;\n{single}}}\n",
            points % width,
            items * width
        ));
    }
    let mut parts: Vec<Partials> = Vec::new();
    for late in &lates {
        let partials = writer.partials(late, chunks, "blockIdx.x", true);
        statements.push_str(&writer.store_total(late, &partials, THREADS));
        parts.push(partials);
    }
    let pairs: Vec<(&Late, &Partials)> = lates.iter().zip(&parts).collect();
    let combinations = writer.combinations(&pairs);
    let launch = Launch {
        text: FunctionText {
            helpers: String::new(),
            parameters: writer.parameters(),
            body: statements,
            threads: THREADS as u32,
            device_only: false,
            blocks: 0,
        },
        grid: [grid(chunks), 1, 1],
        shared_bytes: 0,
        role: Role::Alone,
        arguments: writer.arguments,
    };
    (
        std::iter::once(launch).chain(combinations).collect(),
        writer.scratch,
    )
}
