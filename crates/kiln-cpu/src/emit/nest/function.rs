//! The function: loops over rows, the passes of a row, the loops over its columns.

use std::fmt::Write as _;

use kiln_compiler::index::Var;
use kiln_compiler::schedule::nest::{Store, vars};
use kiln_graph::op::Op;
use kiln_graph::{DType, Node};

use super::blocks::{self, BLOCK};
use super::reduction::{Accumulator, LateSum};
use super::{Access, Argument, Lanes, Register, Writer, c};
use crate::policy::REDUCTION_CHUNKS;

/// The results of one pass over a row.
#[derive(Default)]
struct Pass {
    /// Reductions of the row.
    of_rows: Vec<Node>,
    /// Late reductions.
    late: Vec<Node>,
    /// Stores of points.
    stores: Vec<Store>,
}

/// Appends lines to a text.
fn push_lines<'a>(text: &mut String, lines: impl IntoIterator<Item = &'a String>) {
    for line in lines {
        text.push_str(line);
        text.push('\n');
    }
}

impl Writer<'_> {
    /// Writes the function of the nest.
    pub(super) fn run(&mut self) {
        for store in &self.space.loops.nest.stores {
            self.accesses.push(Access {
                index: store.position.clone(),
                weight: 2,
            });
        }
        let rows = self.row_bodies();
        let mut text = String::from(
            "void @(void *ctx, int64_t begin, int64_t end, int thread) {\nvoid *const *b = ctx;\n(void)thread;\n",
        );
        push_lines(&mut text, &self.top);
        if self.space.flat() {
            text.push_str(&rows);
        } else {
            self.row_loops(&rows, &mut text);
        }
        text.push_str("}\n");
        self.text = text;
    }

    /// The statements for each row: for vectors of rows and for the remaining rows, or for one row.
    fn row_bodies(&mut self) -> String {
        let mut rows = String::new();
        if self.space.flat() {
            self.flat_body(&mut rows);
            return rows;
        }
        let Some(vector) = self.space.vector.filter(|_| self.vector_rows()) else {
            self.row(Lanes::All, &mut rows);
            return rows;
        };
        let extent = self.space.loops.extent(vector);
        let whole = extent / self.lanes * self.lanes;
        if whole > 0 {
            let _ = writeln!(
                rows,
                "for (int64_t i{vector} = 0; i{vector} < {whole}; i{vector} += {}) {{",
                self.lanes
            );
            self.row(Lanes::All, &mut rows);
            rows.push_str("}\n");
        }
        if whole < extent {
            let _ = writeln!(rows, "{{\nconst int64_t i{vector} = {whole};");
            self.row(Lanes::First(extent - whole), &mut rows);
            rows.push_str("}\n");
        }
        rows
    }

    /// The loops around `rows`: over chunks and blocks of rows where late reductions need them, and over
    /// rows.
    fn row_loops(&self, rows: &str, out: &mut String) {
        let outer: Vec<Var> = self.outer_rows();
        let count = self.space.loops.product(&outer);
        let late = !self.space.loops.nest.late.is_empty();
        let in_blocks = !self.block_end.is_empty();
        let (mut from, mut to) = ("begin", "end");
        if late {
            let chunks = self.chunks();
            let _ = writeln!(out, "for (int64_t chunk = begin; chunk < end; chunk++) {{");
            let _ = writeln!(
                out,
                "const int64_t first = {count} * chunk / {chunks}, last = {count} * (chunk + 1) / {chunks};"
            );
            push_lines(out, &self.chunk_top);
            (from, to) = ("first", "last");
        }
        if in_blocks {
            let _ = writeln!(
                out,
                "for (int64_t block = first; block < last; block += {BLOCK}) {{\n\
                 const int64_t stop = block + {BLOCK} < last ? block + {BLOCK} : last;"
            );
            (from, to) = ("block", "stop");
        }
        let _ = writeln!(out, "for (int64_t row = {from}; row < {to}; row++) {{");
        let mut rest = "row".to_owned();
        for (at, &var) in outer.iter().enumerate() {
            let inner = self.space.loops.product(&outer[at + 1..]);
            let value = if inner == 1 {
                rest.clone()
            } else {
                format!("{rest} / {inner}")
            };
            let _ = writeln!(out, "const int64_t i{var} = {value};");
            if inner != 1 {
                rest = format!("{rest} % {inner}");
            }
        }
        out.push_str(rows);
        out.push_str("}\n");
        if in_blocks {
            push_lines(out, &self.block_end);
            out.push_str("}\n");
        }
        if late {
            push_lines(out, &self.chunk_end);
            out.push_str("}\n");
        }
    }

    pub(super) fn outer_rows(&self) -> Vec<Var> {
        self.space
            .loops
            .rows
            .iter()
            .copied()
            .filter(|&var| Some(var) != self.space.vector)
            .collect()
    }

    pub(super) fn chunks(&self) -> i64 {
        self.space.loops.row_count().clamp(1, REDUCTION_CHUNKS)
    }

    /// A nest of one variable without reductions: iterations are elements.
    pub(super) fn flat_body(&mut self, out: &mut String) {
        let stores = self.space.loops.nest.stores.clone();
        let Some(vector) = self.space.vector.or(self.space.loops.cols.first().copied()) else {
            // One element.
            self.sections.clear();
            for store in &stores {
                let register = self.eval(store.value, &store.index);
                self.store_point(store, &register);
            }
            let lines = std::mem::take(&mut self.body_stores);
            out.push_str("if (begin < end) {\n");
            for line in self.sections.iter().flatten().chain(&self.body).chain(&lines) {
                let _ = writeln!(out, "{line}");
            }
            out.push_str("}\n");
            return;
        };
        for (mode, head) in [
            (
                Lanes::All,
                format!(
                    "int64_t i{vector} = begin;\nfor (; i{vector} + {0} <= end; i{vector} += {0}) {{",
                    self.lanes
                ),
            ),
            (
                Lanes::Left,
                format!("if (i{vector} < end) {{\nconst int64_t left = end - i{vector};"),
            ),
        ] {
            self.point_body(mode, |writer| {
                for store in &stores {
                    let register = writer.eval(store.value, &store.index);
                    writer.store_point(store, &register);
                }
            });
            let _ = writeln!(out, "{head}");
            self.flush_body(out);
            out.push_str("}\n");
        }
    }

    pub(super) fn store_point(&mut self, store: &Store, register: &Register) {
        let dtype = self.buffer_dtype(store.buffer);
        let at = self.argument(Argument::Buffer(store.buffer));
        let text = self.store_text(dtype, &format!("a{at}"), &store.position, register);
        self.body_stores.push(text);
    }

    /// Starts a body with nothing of level 2 known and fills it.
    pub(super) fn point_body(&mut self, mode: Lanes, fill: impl FnOnce(&mut Self)) {
        self.mode = mode;
        self.known.retain(|_, register| register.level < 2);
        self.slots.retain(|_, register| register.level < 2);
        self.body.clear();
        self.body_stores.clear();
        fill(self);
    }

    pub(super) fn flush_body(&mut self, out: &mut String) {
        for line in self.body.drain(..).chain(self.body_stores.drain(..)) {
            out.push_str(&line);
            out.push('\n');
        }
    }

    /// The statements for one row (or, if the vector variable numbers rows, for a vector of rows).
    pub(super) fn row(&mut self, mode: Lanes, out: &mut String) {
        self.known.retain(|_, register| register.level < 1);
        self.slots.retain(|_, register| register.level < 1);
        self.reduced.clear();
        self.sections = vec![Vec::new()];
        self.mode = mode;
        let row_set = self.space.loops.row_set();
        let nest = &self.space.loops.nest;
        let stores = nest
            .stores
            .iter()
            .filter(|store| !nest.late.contains(&store.value));
        let (of_points, of_rows): (Vec<Store>, Vec<Store>) = stores
            .cloned()
            .partition(|store| vars(&store.index) & !row_set != 0);
        let passes = self.passes(of_points);
        let mut texts: Vec<String> = Vec::new();
        for (number, pass) in passes.iter().enumerate() {
            self.pass = number;
            texts.push(self.one_pass(mode, number, pass));
        }
        let mut row_stores = Vec::new();
        for store in &of_rows {
            let register = self.eval(store.value, &store.index);
            let dtype = self.buffer_dtype(store.buffer);
            let at = self.argument(Argument::Buffer(store.buffer));
            row_stores.push(self.store_text(dtype, &format!("a{at}"), &store.position, &register));
        }
        for stage in 0..self.sections.len().max(texts.len()) {
            push_lines(out, self.sections.get(stage).into_iter().flatten());
            if let Some(text) = texts.get(stage) {
                out.push_str(text);
            }
        }
        push_lines(out, &row_stores);
    }

    /// Distributes the results over the passes of a row: the reductions and stores of points whose operands
    /// are known by then.
    fn passes(&mut self, stores: Vec<Store>) -> Vec<Pass> {
        let graph = self.graph;
        let mut passes: Vec<Pass> = Vec::new();
        let at = |passes: &mut Vec<Pass>, stage: usize| {
            if passes.len() <= stage {
                passes.resize_with(stage + 1, Pass::default);
            }
        };
        for &node in &self.space.loops.nest.members {
            let data = graph.node(node);
            if matches!(data.op, Op::Reduce { .. }) {
                let stage = self.stage(data.inputs[0]);
                at(&mut passes, stage);
                match self.space.loops.nest.late.contains(&data.outputs[0]) {
                    true => passes[stage].late.push(node),
                    false => passes[stage].of_rows.push(node),
                }
            }
        }
        for store in stores {
            let stage = self.stage(store.value);
            at(&mut passes, stage);
            passes[stage].stores.push(store);
        }
        passes
    }

    /// The text of a pass: accumulators, the loops over the columns, results of the row.
    fn one_pass(&mut self, mode: Lanes, number: usize, pass: &Pass) -> String {
        let mut text = String::new();
        let sums: Vec<Accumulator> = pass.of_rows.iter().map(|&node| self.accumulator(node)).collect();
        for sum in &sums {
            let _ = writeln!(
                text,
                "{} {} = {};",
                c::register_type(sum.dtype, sum.vector),
                sum.name,
                sum.neutral()
            );
            if sum.blocks {
                text.push_str(&blocks::declare(&sum.name, sum.vector));
            }
        }
        let lates: Vec<LateSum> = pass.late.iter().map(|&node| self.late_sum(node)).collect();
        let (point_late, row_late): (Vec<LateSum>, Vec<LateSum>) =
            lates.into_iter().partition(|late| late.of_points);
        for late in &row_late {
            let x = self.eval(late.x, &late.index);
            let value = c::combine(late.op, late.dtype, false, &late.name, &x.name);
            self.line(1, x.stage, format!("{} = {value};", late.name));
        }
        if !sums.is_empty() || !pass.stores.is_empty() || !point_late.is_empty() {
            self.columns(mode, &sums, &pass.stores, &point_late, &mut text);
        }
        for sum in sums {
            let register = self.row_result(&sum, number, &mut text);
            self.reduced.insert(sum.value, register);
        }
        text
    }

    /// The register that has the result of a row reduction, written behind the loops of its pass.
    fn row_result(&mut self, sum: &Accumulator, pass: usize, text: &mut String) -> Register {
        let dtype = sum.dtype.compute();
        let fold = sum.vector && !self.vector_rows();
        let mut name = sum.name.clone();
        let mut expression = name.clone();
        if sum.blocks {
            expression = blocks::total(&name);
        }
        if fold {
            let from = if sum.blocks { DType::F64 } else { dtype };
            expression = format!("fold_{}_{from}({expression})", sum.op.name());
        } else if sum.blocks && sum.vector {
            expression = format!("__builtin_convertvector({expression}, v_f32)");
        }
        if expression != name {
            let ty = c::register_type(sum.dtype, sum.vector && !fold);
            name = self.fresh("r");
            let _ = writeln!(text, "const {ty} {name} = {expression};");
        }
        Register {
            name,
            dtype: sum.dtype,
            vector: sum.vector && !fold,
            level: 1,
            stage: pass + 1,
        }
    }

    pub(super) fn vector_rows(&self) -> bool {
        self.space
            .vector
            .is_some_and(|vector| self.space.loops.rows.contains(&vector))
    }

    /// The variables that number the elements of a row, one loop each, and the one of them whose loop goes by
    /// vectors.
    pub(super) fn column_loops(&self) -> (Vec<Var>, Option<Var>) {
        let vector = self
            .space
            .vector
            .filter(|vector| self.space.loops.cols.contains(vector));
        let loops = self.space.loops.cols.iter().copied();
        (loops.filter(|&var| Some(var) != vector).collect(), vector)
    }

    /// How often each of the loops over the columns runs, outermost first.
    pub(super) fn trips(&self) -> Vec<i64> {
        let (loops, vector) = self.column_loops();
        let whole = vector.map(|vector| self.space.loops.extent(vector) / self.lanes);
        let loops = loops.iter().map(|&var| self.space.loops.extent(var));
        loops.chain(whole.map(|trips| trips.max(1))).collect()
    }

    /// The loops over the columns of a row, with the body of one pass.
    pub(super) fn columns(
        &mut self,
        row_mode: Lanes,
        sums: &[Accumulator],
        stores: &[Store],
        lates: &[LateSum],
        out: &mut String,
    ) {
        let (loops, vector) = self.column_loops();
        // The places where vectors of sums begin another block.
        let own = sums.iter().filter(|sum| sum.blocks);
        let own = own.map(|sum| blocks::flush(&sum.name, sum.vector));
        let late = lates.iter().filter(|late| late.blocks && !late.per_element);
        let late = late.filter(|_| self.space.vector.is_some());
        let flush: String = own
            .chain(late.map(|late| blocks::flush(&late.name, true)))
            .collect();
        let cut = if flush.is_empty() {
            None
        } else {
            blocks::cut(&self.trips())
        };
        let block = |at: usize| cut.and_then(|(own, block)| (own == at).then_some(block));
        let mut ends = Vec::new();
        for (at, &var) in loops.iter().enumerate() {
            let extent = self.space.loops.extent(var);
            let (head, end) = blocks::counted(&format!("i{var}"), extent, 1, block(at), &flush);
            let _ = writeln!(out, "{head}");
            ends.push(end);
        }
        let parts: Vec<(Lanes, String, String)> = match vector {
            None => vec![(row_mode, "{".to_owned(), "}\n".to_owned())],
            Some(vector) => {
                let extent = self.space.loops.extent(vector);
                let whole = extent / self.lanes * self.lanes;
                let mut parts = Vec::new();
                if whole > 0 {
                    let variable = format!("i{vector}");
                    let (head, end) =
                        blocks::counted(&variable, whole, self.lanes, block(loops.len()), &flush);
                    parts.push((Lanes::All, head, end));
                }
                if whole < extent {
                    parts.push((
                        Lanes::First(extent - whole),
                        format!("{{\nconst int64_t i{vector} = {whole};"),
                        "}\n".to_owned(),
                    ));
                }
                parts
            }
        };
        for (mode, head, end) in parts {
            self.point_body(mode, |writer| {
                for sum in sums {
                    writer.accumulate(sum, vector.is_some());
                }
                for late in lates {
                    writer.accumulate_late(late, vector.is_some());
                }
                for store in stores {
                    let register = writer.eval(store.value, &store.index);
                    writer.store_point(store, &register);
                }
            });
            let _ = writeln!(out, "{head}");
            self.flush_body(out);
            out.push_str(&end);
        }
        ends.iter().rev().for_each(|end| out.push_str(end));
        out.push_str(&flush);
        self.mode = row_mode;
        self.known.retain(|_, register| register.level < 2);
        self.slots.retain(|_, register| register.level < 2);
    }
}
