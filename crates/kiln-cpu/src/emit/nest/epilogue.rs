//! C for a nest that consumes the result of a contraction ([`kiln_compiler::schedule::epilogue`]).
//!
//! The loops are the template's; this file writes the statements inside. They are the same statements that
//! a nest of its own would have, with one difference: the result of the contraction is not loaded but is in
//! a vector register called `sum`. Buffers and scalars are parameters `a0`, `a1`, ... of the kernel.

use kiln_compiler::index::Var;
use kiln_graph::{Graph, Value};

use super::space::Space;
use super::{Argument, Lanes, Nest, Register, Writer, c};
use crate::kernels::Param;

/// The template's loops.
pub struct Loops<'a> {
    /// The variables of the frame other than the vector's.
    pub rows: &'a [Var],
    /// The variable along which there are vectors.
    pub vector: Var,
    /// Lanes of a vector.
    pub lanes: i64,
}

/// The statements of an epilogue. They refer to the frame's variables as `i0`, `i1`, ... and to the result as
/// `sum`.
#[derive(Clone, Debug, Default)]
pub struct Statements {
    /// Once for each tile.
    pub tile: String,
    /// Once for each row of a tile.
    pub row: String,
    /// For a whole vector.
    pub vector: String,
    /// For the first `left` lanes of a vector.
    pub rest: String,
    /// Parameters that the statements refer to.
    pub params: Vec<Param>,
    /// The arguments for them.
    pub arguments: Vec<Argument>,
}

/// Writes the statements of `nest`, which is over the frame's variables, for the contraction result `value`.
pub fn generate(graph: &Graph, nest: &Nest, value: Value, loops: &Loops<'_>) -> Statements {
    let mut space = Space::new(nest);
    space.loops.rows = loops.rows.to_vec();
    space.loops.cols = vec![loops.vector];
    space.vector = Some(loops.vector);
    let mut writer = Writer::new(graph, &space, loops.lanes);
    writer.named = true;
    let sum = Register {
        name: "sum".into(),
        dtype: graph.dtype(value),
        vector: true,
        level: 2,
        stage: 0,
    };
    writer.given = Some((value, sum));
    writer.sections = vec![Vec::new()];
    let stores = nest.stores.clone();
    let mut bodies = Vec::new();
    for mode in [Lanes::All, Lanes::Left] {
        writer.point_body(mode, |writer| {
            for store in &stores {
                let register = writer.eval(store.value, &store.index);
                writer.store_point(store, &register);
            }
        });
        let mut body = String::new();
        writer.flush_body(&mut body);
        bodies.push(body);
    }
    let lines = |lines: &[String]| lines.iter().map(|line| format!("{line}\n")).collect::<String>();
    let rest = bodies.pop().unwrap_or_default();
    Statements {
        tile: lines(&writer.top),
        row: writer.sections.iter().map(|section| lines(section)).collect(),
        vector: bodies.pop().unwrap_or_default(),
        rest,
        params: params(&writer),
        arguments: writer.arguments.clone(),
    }
}

/// Parameters for the writer's arguments.
pub(super) fn params(writer: &Writer<'_>) -> Vec<Param> {
    let each = |(at, argument): (usize, &Argument)| {
        let ty = match argument {
            Argument::Buffer(buffer) => format!("{} *", c::memory_type(writer.buffer_dtype(*buffer))),
            Argument::Scalar(_) => "const void *".into(),
            Argument::Scratch(_) => "char *".into(),
        };
        Param::new(ty, format!("a{at}"))
    };
    writer.arguments.iter().enumerate().map(each).collect()
}
