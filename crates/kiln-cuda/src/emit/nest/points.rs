//! Nests without reductions: each thread has some neighbouring points.
//!
//! Where some of what is read is a column's (the statistics of a channel), a thread takes the same neighbours
//! of several *rows*: what the rows share is loaded once, and the loads of all rows are under way at the same
//! time. Without that, 8 elements of an image in bf16 come with 7 vectors of 32 bytes of their channels, and
//! the level-one cache is what the kernel waits for.

use kiln_compiler::index::{Var, bit};
use kiln_graph::Graph;

use super::space::{Seen, Space};
use super::writer::Writer;
use super::{Launch, Role, THREADS, ceil, coordinates, grid};
use crate::code::FunctionText;
use crate::emit::after::Along;

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

/// Bytes of tensors that a thread has under way at once where it takes several rows.
const UNDER_WAY: i64 = 128;

/// Most rows of a thread.
const ROWS: i64 = 4;

/// How often a thread takes as many rows again, one time after the other. What its columns share is then
/// loaded and computed half as often: resnet50's nests of points take 4,363 microseconds, and 4,620 without;
/// four times take 4,440 (H200).
const BATCHES: i64 = 2;

/// Fewest threads that rows are shared out to: a quarter of what all multiprocessors hold, whose loads fill
/// memory.
const THREADS_LEFT: i64 = 132 * 512;

/// The variable that numbers the rows of a thread, and how many there are; none if nothing is shared by rows.
fn rows(graph: &Graph, space: &Space) -> Option<(Var, i64)> {
    let [row, column] = space.loops.cols[..] else {
        return None;
    };
    if space.vector != Some(column) || space.width == 1 || space.loops.extent(column) % space.width != 0 {
        return None;
    }
    let seen = seen(graph, space);
    let loads = || seen.iter().filter(|seen| seen.weight == 1);
    let is_shared = |seen: &&Seen| seen.index.vars() & bit(row) == 0 && seen.index.vars() != 0;
    let bytes: i64 = loads()
        .filter(|seen| !is_shared(seen))
        .map(|seen| seen.bytes * space.width)
        .sum();
    let points = space.loops.row_length() / space.width;
    let extent = space.loops.extent(row);
    let fits = |rows: &i64| extent % rows == 0 && bytes * rows <= UNDER_WAY && points / rows >= THREADS_LEFT;
    let rows = [ROWS, ROWS / 2].into_iter().find(fits)?;
    (loads().any(|seen| is_shared(&seen)) && bytes > 0).then_some((row, rows))
}

/// Writes the kernel whose threads take so many rows each, which are far apart.
fn generate_rows(graph: &Graph, space: &Space, (row, rows): (Var, i64)) -> Launch {
    let mut writer = Writer::new(graph, space);
    writer.several = Some(bit(row));
    writer.turns = rows;
    let ty = writer.index_type();
    writer.begin_points();
    store_all(&mut writer);
    let (shared, fills) = (writer.take_shared(), writer.take_fills());
    let points = writer.end_points(None);
    let column = space.vector.unwrap_or_default();
    let (extent, width) = (space.loops.extent(row), space.width);
    let across = space.loops.extent(column) / width;
    let threads = |batches: i64| extent / (rows * batches) * across;
    let batches = match extent % (rows * BATCHES) == 0 && threads(BATCHES) >= THREADS_LEFT {
        true => BATCHES,
        false => 1,
    };
    let items = threads(batches);
    let apart = extent / (rows * batches);
    let (first, [begin, end]) = match batches {
        1 => ("k".into(), [String::new(), String::new()]),
        _ => (
            format!("(b * {rows} + k)"),
            [
                format!("#pragma unroll 1\nfor (int b = 0; b < {batches}; b++) {{\n"),
                "}\n".into(),
            ],
        ),
    };
    let number = format!("const {ty} i{row} = t / {across} + {first} * {apart};");
    let mut statements = format!("const {ty} t = ({ty})blockIdx.x * {THREADS} + threadIdx.x;\n");
    if items % THREADS != 0 {
        statements.push_str(&format!("if (t >= {items}) return;\n"));
    }
    statements.push_str(&format!(
        "const {ty} i{column} = t % {across} * {width};\n{shared}{begin}\
         #pragma unroll\nfor (int k = 0; k < {rows}; k++) {{\n{number}\n{fills}}}\n\
         #pragma unroll\nfor (int k = 0; k < {rows}; k++) {{\n{number}\n{points}}}\n{end}"
    ));
    let top: String = writer.top.iter().map(|line| format!("{line}\n")).collect();
    Launch {
        text: FunctionText {
            helpers: String::new(),
            parameters: writer.parameters(),
            body: top + &statements,
            threads: THREADS as u32,
            device_only: false,
            blocks: 0,
        },
        grid: [grid(ceil(items, THREADS)), 1, 1],
        shared_bytes: 0,
        arguments: writer.arguments,
        role: Role::Alone,
    }
}

/// What happens at `writer.width` points.
pub(super) fn body(writer: &mut Writer<'_>) -> String {
    writer.begin_points();
    store_all(writer);
    writer.end_points(None)
}

/// Evaluates and stores everything that the nest stores at its points: all but the results of late
/// reductions.
pub(super) fn store_all(writer: &mut Writer<'_>) {
    let nest = &writer.space.loops.nest;
    for store in nest
        .stores
        .iter()
        .filter(|store| !nest.late.contains(&store.value))
    {
        let dtype = writer.buffer_dtype(store.buffer);
        writer.see(&store.position, 2, dtype);
        writer.store_point(store);
    }
}

/// Writes the kernel.
pub(super) fn generate(graph: &Graph, space: &Space) -> (Vec<Launch>, usize) {
    if let Some(rows) = rows(graph, space) {
        return (vec![generate_rows(graph, space, rows)], 0);
    }
    let mut writer = Writer::new(graph, space);
    // Copies from and to parts of a bucket.
    writer.parts = space.loops.nest.members.is_empty();
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
    let role = along(&writer, &top, &text);
    let launch = Launch {
        text: FunctionText {
            helpers: String::new(),
            parameters: writer.parameters(),
            body: top + &statements,
            threads: THREADS as u32,
            device_only: false,
            blocks: 0,
        },
        grid: [grid(ceil(items, THREADS)), 1, 1],
        shared_bytes: 0,
        arguments: writer.arguments,
        role,
    };
    (vec![launch], 0)
}

/// The kernel at a place, if it has one axis, along which everything that it reads and writes lies.
fn along(writer: &Writer<'_>, top: &str, text: &str) -> Role {
    let space = writer.space;
    let (&[var], extent, width) = (&space.loops.cols[..], space.loops.row_length(), space.width) else {
        return Role::Alone;
    };
    let is_own = |seen: &Seen| {
        seen.index.stride(var) == Some(1) && seen.index.vars() == bit(var) && seen.index.offset() == 0
    };
    let mut moved = writer.seen.iter().filter(|seen| seen.weight > 0);
    if extent % width != 0 || !space.loops.rows.is_empty() || !moved.all(is_own) {
        return Role::Alone;
    }
    let index = writer.index_type();
    Role::Along(Along {
        statements: format!("{top}{}{text}", coordinates(space, &[var], index, "t")),
        index,
        width,
        extent,
    })
}
