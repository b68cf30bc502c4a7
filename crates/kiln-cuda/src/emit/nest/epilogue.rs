//! A nest that consumes the result of a product ([`kiln_compiler::schedule::epilogue`]).
//!
//! The loops are the template's, `kiln_product_finish` of `kernels/product/warpgroups.cuh`; this file writes
//! the statements inside. They are those of a nest of its own, with one difference: the result of the product
//! is not loaded, but is in the lanes of `product`.

use kiln_compiler::index::{Var, bit};
use kiln_compiler::schedule::nest::Nest;
use kiln_graph::{Graph, Value};

use super::Argument;
use super::points::store_all;
use super::space::Space;
use super::writer::Writer;

/// The template's loops.
#[derive(Clone, Copy, Debug)]
pub struct Loops {
    /// The variable of which a thread has several values: so many.
    pub row: (Var, i64),
    /// The variable of which a thread has so many neighbours at a time.
    pub column: (Var, i64),
}

/// The statements of an epilogue. They refer to the frame's variables as `i0`, `i1`, .. and to the row of a
/// thread as `k`.
#[derive(Clone, Debug, Default)]
pub struct Statements {
    /// Once for each thread.
    pub top: String,
    /// Declarations, and names, of what is loaded for several rows.
    pub loaded: Vec<(String, String)>,
    /// Loads it for a row.
    pub load: String,
    /// Loads what the rows of a thread share.
    pub shared: String,
    /// Computes and stores the neighbours of a row.
    pub points: String,
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

/// The statements, and the largest position in them.
fn write(graph: &Graph, space: &Space, value: Value, loops: Loops) -> (Statements, i64) {
    let mut writer = Writer::new(graph, space);
    writer.given = Some(value);
    writer.several = Some(bit(loops.row.0));
    writer.turns = loops.row.1;
    writer.begin_points();
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
    let positions = writer.seen.iter().filter(|seen| seen.weight > 0);
    let most = positions.map(|seen| seen.index.range().1).max().unwrap_or(0);
    let statements = Statements {
        top: lines(&writer.top),
        loaded,
        load,
        shared,
        points,
        parameters: writer.parameters(),
        index: writer.index_type(),
        arguments: writer.arguments,
    };
    (statements, most)
}
