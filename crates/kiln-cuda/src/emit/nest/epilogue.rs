//! A nest that consumes the result of a product ([`kiln_compiler::schedule::epilogue`]).
//!
//! The loops are the template's, `kiln_product_finish` of `kernels/product/warpgroups.cuh`; this file writes
//! the statements inside. They are those of a nest of its own, with one difference: the result of the product
//! is not loaded, but is in the lanes of `product`.
//!
//! Sums of columns ([`super::late`]) are kept from tile to tile: a thread that finishes has the same columns
//! in all tiles of its block. What each leaves at its end is added up by a second kernel.

use kiln_compiler::index::{Var, bit};
use kiln_compiler::schedule::nest::Nest;
use kiln_graph::{Graph, Value};

use super::late::Late;
use super::points::store_all;
use super::space::{Seen, Space};
use super::writer::Writer;
use super::{Argument, Launch, c, ceil};

/// The template's loops.
#[derive(Clone, Copy, Debug)]
pub struct Loops {
    /// The variable of which a thread has several values: so many.
    pub row: (Var, i64),
    /// The variable of which a thread has so many neighbours at a time.
    pub column: (Var, i64),
    /// Whether what rows need is copied to shared memory, from where they read it turns later.
    pub ahead: bool,
    /// Whether a block stays in its columns, and what all of its rows share of these waits in shared memory.
    pub keeps_pieces: bool,
    /// How sums of columns are kept.
    pub keep: Keep,
}

/// How sums of columns are kept.
#[derive(Clone, Copy, Debug, Default)]
pub struct Keep {
    /// Blocks below each other, each of which leaves a sum of every column.
    pub blocks: i64,
    /// Blocks side by side, which come first.
    pub across: i64,
    /// Rows that a thread adds up at most.
    pub longest: i64,
}

/// Rows that are added up in a row of their own before they are added to those of other tiles, if there are
/// more: the error of a sum grows with its length.
const LONGEST: i64 = 256;

/// The statements of an epilogue. They refer to the frame's variables as `i0`, `i1`, .. and to the row of a
/// thread as `k`, those behind the last tile to the template as `@_case`, `size` and `shared`.
#[derive(Clone, Debug, Default)]
pub struct Statements {
    /// Once for each thread.
    pub top: String,
    /// Declarations, and names, of what is loaded for several rows.
    pub loaded: Vec<(String, String)>,
    /// Bytes of it, at most.
    pub loaded_bytes: i64,
    /// Pieces of sixteen bytes that each thread side by side keeps of its columns in shared memory.
    pub pieces_kept: i64,
    /// Loads it for a row.
    pub load: String,
    /// Loads what the rows of a thread share.
    pub shared: String,
    /// Computes and stores the neighbours of a row.
    pub points: String,
    /// Behind the rows of a tile.
    pub tile: String,
    /// Behind the last tile.
    pub end: String,
    /// The kernels that add up what threads leave.
    pub sums: Vec<Launch>,
    /// Bytes of working memory in which they leave it.
    pub scratch: usize,
    /// Parameters that the statements refer to.
    pub parameters: Vec<String>,
    /// The arguments for them.
    pub arguments: Vec<Argument>,
    /// The type of indices.
    pub index: &'static str,
}

/// Writes the statements of `nest`, which is over the frame's variables, for the product `value`.
pub fn generate(graph: &Graph, nest: &Nest, value: Value, loops: Loops) -> Statements {
    let mut space = Space::new(nest);
    (space.vector, space.width) = (Some(loops.column.0), loops.column.1);
    let seen = write(graph, &space, value, loops).1;
    space.wide = seen >= 1 << 31;
    write(graph, &space, value, loops).0
}

/// The statements, and the largest number among their positions.
fn write(graph: &Graph, space: &Space, value: Value, loops: Loops) -> (Statements, i64) {
    let mut writer = Writer::new(graph, space);
    writer.given = Some(value);
    writer.several = Some(bit(loops.row.0));
    writer.turns = loops.row.1;
    writer.ahead = loops.ahead;
    writer.begin_points();
    let lates: Vec<Late> = writer.lates().into_iter().map(|(_, late)| late).collect();
    writer.keeps_pieces = loops.keeps_pieces;
    for late in &lates {
        let x = writer.eval(late.x, &late.index);
        let own = format!("{}[l]", late.name);
        let next = c::combine(late.op, late.dtype, &own, &x.name);
        writer.body.push(format!("{own} = {next};"));
    }
    store_all(&mut writer);
    let lines = |lines: &[String]| lines.iter().map(|line| format!("{line}\n")).collect::<String>();
    let name = |declaration: &String| {
        let declared = declaration.split('[').next().unwrap_or_default();
        let name = declared.rsplit(' ').next().unwrap_or_default().to_owned();
        (declaration.clone(), name)
    };
    let loaded = writer.row_arrays.iter().map(name).collect();
    let shared = lines(&writer.shared);
    let load = writer.take_fills();
    let points = writer.end_points(None);
    let most = writer
        .seen
        .iter()
        .map(|seen| seen.index.most())
        .max()
        .unwrap_or(0);
    let of_rows = writer
        .seen
        .iter()
        .filter(|seen| seen.weight == 1 && seen.index.vars() & bit(loops.row.0) != 0);
    let bytes = |seen: &Seen| ceil(seen.bytes * loops.column.1 * loops.row.1, 16) * 16;
    let loaded_bytes = of_rows.map(bytes).sum();
    let kept = keep(&mut writer, &lates, loops);
    let all_kept = match writer.pieces_kept {
        0 => "",
        _ => "kiln_product_all_kept<@_case>();\n",
    };
    let statements = Statements {
        top: lines(&writer.top) + all_kept + &kept.top,
        pieces_kept: writer.pieces_kept,
        loaded,
        loaded_bytes,
        load,
        shared,
        points,
        tile: kept.tile,
        end: kept.end,
        sums: kept.sums,
        scratch: writer.scratch,
        parameters: writer.parameters(),
        index: writer.index_type(),
        arguments: writer.arguments,
    };
    (statements, most)
}

/// The accumulators of `lates`, and where they go.
fn keep(writer: &mut Writer<'_>, lates: &[Late], loops: Loops) -> Statements {
    let (
        Keep {
            blocks,
            across,
            longest,
        },
        (column, width),
    ) = (loops.keep, loops.column);
    let each = format!("#pragma unroll\nfor (int l = 0; l < {width}; l++)");
    let mut kept = Statements::default();
    let mut parts = Vec::new();
    for late in lates {
        let (register, name, neutral) = (late.register(), &late.name, late.neutral());
        let accumulator =
            |name: &str| format!("{register} {name}[{width}];\n{each} {name}[l] = {neutral};\n");
        kept.top.push_str(&accumulator(name));
        let mut total = name.clone();
        // Rows of a tile are added up by themselves where there are many tiles.
        if longest > LONGEST {
            total.push_str("_total");
            let (own, sum) = (format!("{name}[l]"), format!("{total}[l]"));
            let next = c::combine(late.op, late.dtype, &sum, &own);
            kept.top.push_str(&accumulator(&total));
            kept.tile
                .push_str(&format!("{each} {{\n{sum} = {next};\n{own} = {neutral};\n}}\n"));
        }
        let partials = writer.partials(late, blocks, &format!("blockIdx.x / {across}"), true);
        let (joined, stored) = (
            c::combine(late.op, late.dtype, "x", "y"),
            c::narrowed(partials.dtype, "x"),
        );
        let (ty, position) = (writer.index_type(), writer.index_text(&late.position, false));
        kept.end.push_str(&format!(
            "kiln_product_columns<@_case>(size, shared, {total}, [](const {register} x, const {register} y) {{ return {joined}; }}, \
             [&](const {ty} i{column}, const {register} x) {{ {}[{position}] = {stored}; }});\n",
            partials.address
        ));
        parts.push(partials);
    }
    debug_assert!(lates.iter().all(|late| late.position.vars() == bit(column)));
    let pairs: Vec<_> = lates.iter().zip(&parts).collect();
    kept.sums = writer.combinations(&pairs);
    kept
}
