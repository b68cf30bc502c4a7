//! CUDA C++ for a fused loop nest.
//!
//! Every nest is one of five kinds of kernel, and each kind says which thread computes what:
//!
//! | nest | kernel | a thread has |
//! | --- | --- | --- |
//! | nothing is reduced | `points` | some neighbouring points |
//! | nothing is reduced, something is transposed | `tiles` | some points of a tile that its block shares |
//! | rows are reduced | `rows` | a part of a row that it shares with its group: some threads of a warp, or the block |
//! | columns are reduced, late | `columns` | some neighbouring columns of a chunk of rows |
//! | everything is reduced, late | `total` | every so-many-th point of a chunk |
//!
//! Three ideas carry all of them.
//!
//! **Levels.** Every register belongs to the outermost place where its operands exist: the kernel (level 0),
//! the row (level 1) or the point (level 2). Expressions are written on demand, once for each value, index
//! and place (`expression`).
//!
//! **Neighbours.** A thread takes `width` neighbours along one variable at a time. What lies together in
//! memory is moved by one instruction of up to 16 bytes (`memory`): first all loads, then a loop over the
//! neighbours that computes, then all stores, so that a nest may overwrite what it reads.
//!
//! **Stages.** The result of a row reduction of stage `s` operands exists at stage `s + 1`. Pass `p` over a
//! row evaluates everything of stage `p` that is needed: operands of reductions, stores and late reductions.
//! What several passes need of a row stays in registers where the row is short enough.
//!
//! Late reductions write partial results for chunks whose number follows from the shape; a second kernel adds
//! the chunks up in order (`late`). Every order of additions follows from the shape alone.

mod columns;
pub mod epilogue;
mod expression;
mod late;
mod memory;
mod near;
mod points;
mod rows;
mod shape;
mod space;
mod table;
mod tiles;
mod total;
mod writer;

use kiln_compiler::index::{Index, Var};
use kiln_compiler::schedule::nest::{Nest, vars};
use kiln_graph::{Graph, Op};

use super::after::Role;
use super::expressions as c;
use super::{Argument, Call, EmitOptions, KernelCode, Launch};
use space::{Seen, Space};

pub use late::Columns;
pub use table::together;

/// Threads of a block where nothing else decides.
const THREADS: i64 = 256;

/// Multiprocessors of the reference machine.
pub const PROCESSORS: i64 = 132;

/// Writes the code of `nest`.
pub fn generate(graph: &Graph, nest: &Nest, options: &EmitOptions<'_>) -> KernelCode {
    let _ = options;
    let mut space = Space::new(nest);
    let reduces = |late: bool| {
        let outputs = nest.members.iter().map(|&node| graph.node(node));
        let mut reductions = outputs.filter(|data| matches!(data.op, Op::Reduce { .. }));
        reductions.any(|data| nest.late.contains(&data.outputs[0]) == late)
    };
    if space.loops.row_count() * space.loops.row_length() == 0 {
        return KernelCode::default();
    }
    let code = if nest.split.is_none() {
        let seen = prepare(&mut space, |space| points::seen(graph, space));
        points::shape(&mut space, &seen);
        match tiles::generate(graph, &space, &seen) {
            Some(launch) => (vec![launch], 0),
            None => points::generate(graph, &space),
        }
    } else if reduces(false) || nest.late.is_empty() {
        let seen = prepare(&mut space, |space| rows::seen(graph, space));
        rows::generate(graph, &mut space, &seen)
    } else if is_total(graph, nest) {
        space.flatten();
        let seen = prepare(&mut space, |space| total::seen(graph, space));
        total::generate(graph, &mut space, &seen)
    } else {
        let seen = prepare(&mut space, |space| columns::seen(graph, space));
        columns::generate(graph, &mut space, &seen)
    };
    KernelCode {
        calls: code.0.into_iter().map(Call::Launch).collect(),
        scratch: code.1,
    }
}

/// Whether each result of a nest is a single number, or complete at each point.
fn is_total(graph: &Graph, nest: &Nest) -> bool {
    let late = nest.late.iter().all(|&value| graph.ty(value).numel() == 1);
    let mut stores = nest
        .stores
        .iter()
        .filter(|store| !nest.late.contains(&store.value));
    late && stores.all(|store| vars(&store.index) == nest.all())
}

/// Joins two variables as long as every index treats them as one; returns the indices of the joined space,
/// which `seen` finds by a dry run of the kernel.
fn prepare(space: &mut Space, seen: impl Fn(&Space) -> Vec<Seen>) -> Vec<Seen> {
    loop {
        let found = seen(space);
        let indices: Vec<&Index> = found.iter().map(|seen| &seen.index).collect();
        if !space.loops.collapse(&indices) {
            space.renumber();
            let found = seen(space);
            // Coordinates that become numbers, which move nothing, have to fit as well.
            let most = found.iter().map(|seen| seen.index.most()).max().unwrap_or(0);
            let points = space.loops.row_count() * space.loops.row_length();
            space.wide = most.max(points) >= 1 << 31;
            return found;
        }
    }
}

/// The lines that give each of `list` its value from the number `from`, the last running fastest; the first
/// of them needs no remainder.
fn coordinates(space: &Space, list: &[Var], ty: &str, from: &str) -> String {
    let mut text = String::new();
    let mut rest = from.to_owned();
    for (at, &var) in list.iter().enumerate().rev() {
        let width = if space.vector == Some(var) { space.width } else { 1 };
        let extent = space.loops.extent(var) / width;
        let scale = if width > 1 {
            format!(" * {width}")
        } else {
            String::new()
        };
        let value = if at == 0 {
            format!("({rest})")
        } else {
            format!("({rest}) % {extent}")
        };
        text.push_str(&format!("const {ty} i{var} = {value}{scale};\n"));
        rest = format!("({rest}) / {extent}");
    }
    text
}

/// The pragma that lets a loop over `points` have several loads under way: the loop is unrolled if it
/// stores nothing, because loads cannot pass stores.
fn unroll(writer: &writer::Writer<'_>, points: &str) -> &'static str {
    let stores = writer.written.iter().any(|written| *written);
    if stores || points.len() > 4000 {
        ""
    } else {
        "#pragma unroll 4\n"
    }
}

/// A number of blocks.
fn grid(blocks: i64) -> u32 {
    u32::try_from(blocks).unwrap_or(u32::MAX)
}

/// The quotient, rounded up.
fn ceil(a: i64, b: i64) -> i64 {
    (a + b - 1) / b
}

/// The least power of two that is no less than `a`.
fn power_of_two(a: i64) -> i64 {
    a.unsigned_abs().next_power_of_two() as i64
}
