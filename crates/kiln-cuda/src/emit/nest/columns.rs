//! Nests that reduce columns, late, and no rows: the gradient of a bias beside the gradient it sums up.
//!
//! A block is a tile of columns by lanes: each thread has some neighbouring columns and takes every
//! so-many-th row of a chunk. Neighbouring threads read neighbours in memory. At the end the lanes are
//! combined in pairs. `blockIdx.x` numbers tiles of columns, `blockIdx.y` chunks of rows.

use kiln_compiler::schedule::nest::{Store, vars};
use kiln_graph::Graph;

use super::late::{Late, Partials};
use super::space::{Lanes, Seen, Space};
use super::writer::Writer;
use super::{Launch, THREADS, c, ceil, coordinates, grid, power_of_two, unroll};
use crate::code::FunctionText;

/// Rows that a lane adds up at most, if there are so many chunks: the error of a sum grows with its length.
const LONGEST: i64 = 128;

/// Rows of a lane at least, so that the second kernel has little to do.
const LEAST: i64 = 8;

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

/// What happens at the points of a thread in one row: the row's own lines, then those of the points.
fn body(writer: &mut Writer<'_>, lates: &[Late]) -> String {
    writer.begin_row();
    writer.begin_points();
    let rows = writer.space.loops.row_set();
    let mut of_rows = String::new();
    for late in lates {
        let x = writer.eval(late.x, &late.index);
        if late.by_column() {
            writer.see(&late.position, 1, late.dtype);
            let own = element(writer, late);
            let next = c::combine(late.op, late.dtype, &own, &x.name);
            writer.body.push(format!("{own} = {next};"));
        } else if late.of_points {
            let next = c::combine(late.op, late.dtype, &late.name, &x.name);
            writer.body.push(format!("{} = {next};", late.name));
        } else {
            let next = c::combine(late.op, late.dtype, &late.name, &x.name);
            of_rows.push_str(&format!("if (column == 0) {} = {next};\n", late.name));
        }
    }
    let stores = writer.space.loops.nest.stores.iter();
    let stores: Vec<&Store> = stores
        .filter(|store| !writer.space.loops.nest.late.contains(&store.value))
        .collect();
    for store in stores {
        let dtype = writer.buffer_dtype(store.buffer);
        writer.see(&store.position, 2, dtype);
        if vars(&store.index) & !rows != 0 {
            writer.store_point(store);
            continue;
        }
        let register = writer.eval(store.value, &store.index);
        let at = writer.target(super::Argument::Buffer(store.buffer));
        let (position, x) = (
            writer.index_text(&store.position, false),
            c::narrowed(dtype, &register.name),
        );
        of_rows.push_str(&format!("if (column == 0) a{at}[{position}] = {x};\n"));
    }
    let points = writer.end_points(None);
    let rows = writer.sections.iter().flatten().map(|line| format!("{line}\n"));
    rows.collect::<String>() + &of_rows + &points
}

/// The accumulator of a column.
fn element(writer: &Writer<'_>, late: &Late) -> String {
    match writer.width {
        1 => late.name.clone(),
        _ => format!("{}[l]", late.name),
    }
}

/// Writes the kernels.
pub(super) fn generate(graph: &Graph, space: &mut Space, seen: &[Seen]) -> (Vec<Launch>, usize) {
    space.choose_vector(seen, false);
    space.choose_width(seen, false);
    let mut writer = Writer::new(graph, space);
    let lates = all(&mut writer);
    let text = body(&mut writer, &lates);
    let ty = writer.index_type();
    let width = space.width;
    let (rows, items) = (space.loops.row_count(), space.loops.row_length() / width);
    let across = power_of_two(items).min(32);
    let lanes = THREADS / across;
    let tiles = ceil(items, across);
    let fill = (BLOCKS / tiles).max(1).min(rows / (lanes * LEAST));
    let chunks = fill.max(rows / (lanes * LONGEST)).clamp(1, 65535);
    let each = ceil(rows, chunks);
    let chunks = ceil(rows, each);
    let mut statements: String = writer.top.iter().map(|line| format!("{line}\n")).collect();
    for late in &lates {
        let (register, name, neutral) = (late.register(), &late.name, late.neutral());
        statements.push_str(&match late.by_column() && width > 1 {
            true => format!(
                "{register} {name}[{width}];\n#pragma unroll\nfor (int l = 0; l < {width}; l++) {name}[l] = {neutral};\n"
            ),
            false => format!("{register} {name} = {neutral};\n"),
        });
    }
    statements.push_str(&format!(
        "const {ty} column = ({ty})blockIdx.x * {across} + threadIdx.x % {across};\nconst int y = threadIdx.x / {across};\n\
         const {ty} first = ({ty})blockIdx.y * {each};\nconst {ty} last = first + {each} < {rows} ? first + {each} : {rows};\n{}\
         if (column < {items})\n{}for ({ty} row = first + y; row < last; row += {lanes}) {{\n{}{text}}}\n",
        coordinates(space, &space.loops.cols, ty, "column"),
        unroll(&writer, &text),
        coordinates(space, &space.loops.rows, ty, "row"),
    ));
    let mut parts: Vec<Partials> = Vec::new();
    let mut shared = 0;
    for late in &lates {
        if late.by_column() {
            let partials = writer.partials(late, chunks, "blockIdx.y", true);
            statements.push_str(&store_columns(&writer, late, &partials, across, lanes, items));
            shared = shared.max(THREADS * width * late.dtype.size() as i64);
            parts.push(partials);
        } else {
            let partials = writer.partials(late, tiles * chunks, "blockIdx.y * gridDim.x + blockIdx.x", true);
            statements.push_str(&writer.store_total(late, &partials, THREADS));
            parts.push(partials);
        }
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
        },
        grid: [grid(tiles), grid(chunks), 1],
        shared_bytes: shared as u32,
        arguments: writer.arguments,
    };
    (
        std::iter::once(launch).chain(combinations).collect(),
        writer.scratch,
    )
}

/// Combines the lanes of each column in pairs and stores what is left.
fn store_columns(
    writer: &Writer<'_>,
    late: &Late,
    partials: &Partials,
    across: i64,
    lanes: i64,
    items: i64,
) -> String {
    let (register, width) = (late.register(), writer.width);
    let own = element(writer, late);
    let each = match width {
        1 => String::new(),
        _ => format!("#pragma unroll\nfor (int l = 0; l < {width}; l++) "),
    };
    let lane = if width == 1 { "" } else { " + l" };
    let other = format!("lanes[(threadIdx.x + apart * {across}) * {width}{lane}]");
    let next = c::combine(late.op, late.dtype, &own, &other);
    let position = writer.index_text(&late.position, true);
    let stored = c::narrowed(partials.dtype, &own);
    let ty = c::memory_type(partials.dtype);
    let address = &partials.address;
    let store = match writer.lanes(&late.position) {
        Lanes::Together if width > 1 && late.count % width == 0 => format!(
            "kiln_lanes<{ty}, {width}> part;\n{each}part.at[l] = {stored};\n*(kiln_lanes<{ty}, {width}>*)({address} + ({})) = part;",
            writer.index_text(&late.position, false)
        ),
        _ => format!("{each}{address}[{position}] = {stored};"),
    };
    format!(
        "{{\n{register}* lanes = ({register}*)kiln_dynamic_shared();\n#pragma unroll\n\
         for (int apart = {lanes} / 2; apart > 0; apart /= 2) {{\n__syncthreads();\n\
         {each}lanes[threadIdx.x * {width}{lane}] = {own};\n__syncthreads();\nif (y < apart) {{\n{each}{own} = {next};\n}}\n}}\n\
         __syncthreads();\nif (y == 0 && column < {items}) {{\n{store}\n}}\n}}\n"
    )
}
