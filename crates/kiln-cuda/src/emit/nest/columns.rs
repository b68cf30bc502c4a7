//! Nests that reduce columns, late, and no rows: the gradient of a bias beside the gradient it sums up.
//!
//! A block is a tile of columns by lanes: each thread has some neighbouring columns and takes every
//! so-many-th row of a chunk, some at once. What is a column's alone is loaded once. Neighbouring threads read
//! neighbours in memory. At the end every thread leaves its
//! sums in shared memory, and some threads add up the lanes of a column each, in their order. `blockIdx.x` numbers
//! tiles of columns, `blockIdx.y` chunks of rows.

use kiln_compiler::schedule::nest::{Store, vars};
use kiln_graph::Graph;

use super::late::{Late, Partials};
use super::space::{Seen, Space};
use super::writer::Writer;
use super::{Launch, PROCESSORS, Role, THREADS, c, ceil, coordinates, grid, power_of_two};
use crate::code::FunctionText;

/// Rows that a lane adds up at most, if there are so many chunks: the error of a sum grows with its length.
const LONGEST: i64 = 128;

/// Rows of a lane at least, so that the second kernel has little to do.
const LEAST: i64 = 8;

/// Bytes of tensors that a thread has under way at once, where there are so many rows. Twice as many take the
/// registers of a multiprocessor's fourth block.
const UNDER_WAY: i64 = 64;

/// Registers for accumulators, for what is a column's alone and for what is under way, with which a thread is
/// one of four blocks of a multiprocessor, which have 64 each. Measured on batch norm: 48 compile to 63 or
/// 64, 60 and 64 to 80, which are three blocks.
const OF_FOUR: i64 = 52;

/// Bytes of shared memory in which the lanes of a block meet.
const SHARED: i64 = 40 << 10;

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

/// How many rows a thread takes at once: as many as have their loads under way together, of `most`.
fn together(graph: &Graph, space: &Space, most: i64) -> i64 {
    let seen = seen(graph, space);
    let rows = space.loops.row_set();
    let of_points = |seen: &&Seen| seen.weight == 1 && seen.index.vars() & rows != 0;
    let loads = seen.iter().filter(of_points);
    let bytes: i64 = loads.map(|seen| seen.bytes * space.width).sum();
    [4, 2]
        .into_iter()
        .find(|&rows| rows <= most && bytes * rows <= UNDER_WAY)
        .unwrap_or(1)
}

/// How many blocks a multiprocessor has registers for. As many as all of them hold at a time, a wave, fill
/// the device; more would leave more partial results to the second kernel.
fn resident(graph: &Graph, space: &Space) -> i64 {
    // Accumulators, and what is loaded for a column.
    let of_columns = |seen: &&Seen| {
        let vars = seen.index.vars();
        seen.weight == 1 && vars != 0 && vars & space.loops.row_set() == 0
    };
    let of_columns = seen(graph, space).iter().filter(of_columns).count() as i64;
    match space.width * of_columns + UNDER_WAY / 4 {
        ..=OF_FOUR => 4,
        _ => 3,
    }
}

/// Writes the kernels.
pub(super) fn generate(graph: &Graph, space: &mut Space, seen: &[Seen]) -> (Vec<Launch>, usize) {
    space.choose_vector(seen, false);
    space.choose_width(seen, false);
    let width = space.width;
    let (rows, items) = (space.loops.row_count(), space.loops.row_length() / width);
    let across = power_of_two(items).min(32);
    let lanes = THREADS / across;
    let tiles = ceil(items, across);
    let resident = resident(graph, space);
    let wave = (PROCESSORS * resident / tiles).max(1);
    let fill = wave.min(rows / (lanes * LEAST));
    let chunks = match rows / (lanes * LONGEST) {
        longest if longest > wave => ceil(longest, wave) * wave,
        longest => fill.max(longest),
    };
    let chunks = chunks.clamp(1, 65535);
    let each = ceil(rows, chunks);
    let chunks = ceil(rows, each);
    let together = together(graph, space, ceil(each, lanes));
    let mut writer = Writer::new(graph, space);
    writer.several = Some(space.loops.row_set());
    writer.turns = together;
    let lates = all(&mut writer);
    let text = body(&mut writer, &lates);
    let (shared_loads, fills) = (writer.take_shared(), writer.take_fills());
    let ty = writer.index_type();
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
         if (column < {items}) {{\n{shared_loads}for ({ty} begin = first + y; begin < last; begin += {}) {{\n",
        coordinates(space, &space.loops.cols, ty, "column"),
        lanes * together,
    ));
    // The loads of all rows, and then what is done with them.
    for lines in [&fills, &text] {
        statements.push_str(&format!(
            "#pragma unroll\nfor (int k = 0; k < {together}; k++) {{\nconst {ty} row = begin + k * {lanes};\n\
             if (row < last) {{\n{}{lines}}}\n}}\n",
            coordinates(space, &space.loops.rows, ty, "row"),
        ));
    }
    statements.push_str("}\n}\n");
    let mut parts: Vec<Partials> = Vec::new();
    for late in &lates {
        if late.by_column() {
            parts.push(writer.partials(late, chunks, "blockIdx.y", true));
        } else {
            let partials = writer.partials(late, tiles * chunks, "blockIdx.y * gridDim.x + blockIdx.x", true);
            statements.push_str(&writer.store_total(late, &partials, THREADS));
            parts.push(partials);
        }
    }
    let by_column: Vec<(&Late, &Partials)> = lates
        .iter()
        .zip(&parts)
        .filter(|(late, _)| late.by_column())
        .collect();
    // As many as meet in shared memory at a time.
    let bytes = |late: &Late| THREADS * width * late.dtype.size() as i64;
    let widest = by_column.iter().map(|(late, _)| bytes(late)).max().unwrap_or(1);
    let meeting = usize::try_from((SHARED / widest).max(1)).unwrap_or(1);
    let mut shared = 0;
    for (number, some) in by_column.chunks(meeting).enumerate() {
        if number > 0 {
            statements.push_str("__syncthreads();\n");
        }
        statements.push_str(&store_columns(&writer, some, across, lanes, items));
        shared = shared.max(some.iter().map(|(late, _)| bytes(late)).sum());
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
            blocks: resident as u32,
        },
        grid: [grid(tiles), grid(chunks), 1],
        shared_bytes: shared as u32,
        role: Role::Alone,
        arguments: writer.arguments,
    };
    (
        std::iter::once(launch).chain(combinations).collect(),
        writer.scratch,
    )
}

/// Leaves the sums of all threads in shared memory, adds up the lanes of each column, and stores what that makes: of
/// several reductions one after the other in memory, each as `[lane][column]`.
fn store_columns(
    writer: &Writer<'_>,
    lates: &[(&Late, &Partials)],
    across: i64,
    lanes: i64,
    items: i64,
) -> String {
    let (width, ty) = (writer.width, writer.index_type());
    let columns = across * width;
    let coordinates = coordinates(writer.space, &writer.space.loops.cols, ty, "column");
    let (each, lane) = match width {
        1 => (String::new(), ""),
        _ => (
            format!("#pragma unroll\nfor (int l = 0; l < {width}; l++) "),
            " + l",
        ),
    };
    let (mut meet, mut store, mut offset) = (String::new(), String::new(), 0);
    for (late, partials) in lates {
        let register = late.register();
        let own = element(writer, late);
        meet.push_str(&format!(
            "{each}(({register}*)(kiln_dynamic_shared() + {offset}))[threadIdx.x * {width}{lane}] = {own};\n"
        ));
        let next = c::combine(
            late.op,
            late.dtype,
            "x",
            &format!("lanes[lane * {columns} + place]"),
        );
        let stored = c::narrowed(partials.dtype, "x");
        let (address, position) = (&partials.address, writer.index_text(&late.position, true));
        store.push_str(&format!(
            "for (int place = threadIdx.x; place < {columns}; place += {THREADS}) {{
const {register}* lanes = (const {register}*)(kiln_dynamic_shared() + {offset});
{register} x = lanes[place];
#pragma unroll
for (int lane = 1; lane < {lanes}; lane++) x = {next};
const {ty} column = ({ty})blockIdx.x * {across} + place / {width};
const int l = place % {width};
if (column < {items}) {{
{coordinates}{address}[{position}] = {stored};
}}
}}
"
        ));
        offset += THREADS * width * late.dtype.size() as i64;
    }
    format!("{meet}__syncthreads();\n{store}")
}
