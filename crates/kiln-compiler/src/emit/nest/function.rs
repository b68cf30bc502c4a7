//! The function: loops over rows, the passes of a row, the loops over its columns.

use std::fmt::Write as _;

use kiln_graph::Node;
use kiln_graph::op::Op;

use super::reduction::{Accumulator, LateSum};
use super::{Argument, Lanes, MAX_CHUNKS, Register, Seen, Writer, c};
use crate::index::Var;
use crate::schedule::nest::{Store, vars};

impl Writer<'_> {
    pub(super) fn run(&mut self) {
        for store in self.space.nest.stores.clone() {
            self.seen.push(Seen {
                index: store.position.clone(),
                weight: 2,
            });
        }
        let vector_rows = self
            .space
            .vector
            .is_some_and(|vector| self.space.rows.contains(&vector));
        let late = !self.space.nest.late.is_empty();
        let mut rows = String::new();
        if self.space.flat() {
            self.flat_body(&mut rows);
        } else if vector_rows {
            let vector = self.space.vector.unwrap_or(0);
            let extent = self.space.extent(vector);
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
        } else {
            self.row(Lanes::All, &mut rows);
        }
        let mut text = String::new();
        text.push_str("void @(void *ctx, int64_t begin, int64_t end, int thread) {\nvoid *const *b = ctx;\n(void)thread;\n");
        for line in &self.top {
            text.push_str(line);
            text.push('\n');
        }
        if self.space.flat() {
            text.push_str(&rows);
        } else {
            let outer: Vec<Var> = self.outer_rows();
            let count = self.space.product(&outer);
            let mut loops = String::new();
            let (from, to) = if late {
                let chunks = self.chunks();
                let _ = writeln!(loops, "for (int64_t chunk = begin; chunk < end; chunk++) {{");
                let _ = writeln!(
                    loops,
                    "const int64_t first = {count} * chunk / {chunks}, last = {count} * (chunk + 1) / {chunks};"
                );
                self.chunk_top
                    .iter()
                    .for_each(|line| loops.push_str(&format!("{line}\n")));
                ("first", "last")
            } else {
                ("begin", "end")
            };
            let _ = writeln!(loops, "for (int64_t row = {from}; row < {to}; row++) {{");
            let mut rest = "row".to_owned();
            for (at, &var) in outer.iter().enumerate() {
                let inner = self.space.product(&outer[at + 1..]);
                let value = if inner == 1 {
                    rest.clone()
                } else {
                    format!("{rest} / {inner}")
                };
                let _ = writeln!(loops, "const int64_t i{var} = {value};");
                if inner != 1 {
                    rest = format!("{rest} % {inner}");
                }
            }
            loops.push_str(&rows);
            loops.push_str("}\n");
            if late {
                self.chunk_end
                    .iter()
                    .for_each(|line| loops.push_str(&format!("{line}\n")));
                loops.push_str("}\n");
            }
            text.push_str(&loops);
        }
        text.push_str("}\n");
        self.text = text;
    }

    pub(super) fn outer_rows(&self) -> Vec<Var> {
        self.space
            .rows
            .iter()
            .copied()
            .filter(|&var| Some(var) != self.space.vector)
            .collect()
    }

    pub(super) fn chunks(&self) -> i64 {
        self.space.product(&self.space.rows).clamp(1, MAX_CHUNKS)
    }

    /// A nest of one variable without reductions: iterations are elements.
    pub(super) fn flat_body(&mut self, out: &mut String) {
        let stores = self.space.nest.stores.clone();
        let Some(vector) = self.space.vector.or(self.space.cols.first().copied()) else {
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

    /// Everything that happens on one row (or, if the vector variable numbers rows, on a vector of rows).
    pub(super) fn row(&mut self, mode: Lanes, out: &mut String) {
        let graph = self.graph;
        self.known.retain(|_, register| register.level < 1);
        self.slots.retain(|_, register| register.level < 1);
        self.reduced.clear();
        self.sections = vec![Vec::new()];
        self.mode = mode;
        let nest = &self.space.nest;
        let reduces: Vec<Node> = nest
            .members
            .iter()
            .copied()
            .filter(|&node| matches!(graph.node(node).op, Op::Reduce { .. }))
            .collect();
        let late = nest.late.clone();
        let stores: Vec<Store> = nest
            .stores
            .iter()
            .filter(|store| !late.contains(&store.value))
            .cloned()
            .collect();
        let row_set = self.row_set();
        let mut passes = 0;
        for &node in &reduces {
            passes = passes.max(self.stage(graph.node(node).inputs[0]) + 1);
        }
        for store in &stores {
            let stage = self.stage(store.value);
            if vars(&store.index) & !row_set != 0 {
                passes = passes.max(stage + 1);
            }
        }
        let mut pass_texts: Vec<String> = Vec::new();
        for pass in 0..passes {
            self.pass = pass;
            let mut text = String::new();
            let due: Vec<Node> = reduces
                .iter()
                .copied()
                .filter(|&node| self.stage(graph.node(node).inputs[0]) == pass)
                .collect();
            let (due_late, due_row): (Vec<Node>, Vec<Node>) = due
                .into_iter()
                .partition(|&node| late.contains(&graph.node(node).outputs[0]));
            let due_stores: Vec<Store> = stores
                .iter()
                .filter(|store| vars(&store.index) & !row_set != 0)
                .cloned()
                .collect::<Vec<_>>()
                .into_iter()
                .filter(|store| self.stage(store.value) == pass)
                .collect();
            let sums: Vec<Accumulator> = due_row.iter().map(|&node| self.accumulator(node)).collect();
            for sum in &sums {
                let _ = writeln!(
                    text,
                    "{} {} = {};",
                    c::register_type(sum.dtype, sum.vector),
                    sum.name,
                    sum.neutral()
                );
            }
            let lates: Vec<LateSum> = due_late.iter().map(|&node| self.late_sum(node)).collect();
            let (point_late, row_late): (Vec<LateSum>, Vec<LateSum>) =
                lates.into_iter().partition(|late| late.of_points);
            for late in &row_late {
                let x = self.eval(late.x, &late.index);
                let value = c::combine(late.op, late.dtype, false, &late.name, &x.name);
                self.line(1, x.stage, format!("{} = {value};", late.name));
            }
            if !sums.is_empty() || !due_stores.is_empty() || !point_late.is_empty() {
                self.columns(mode, &sums, &due_stores, &point_late, &mut text);
            }
            for sum in sums {
                let register = if sum.vector && !self.vector_rows() {
                    let name = self.fresh("r");
                    let ty = c::register_type(sum.dtype, false);
                    let _ = writeln!(
                        text,
                        "const {ty} {name} = fold_{}_{}({});",
                        sum.op.name(),
                        sum.dtype.compute(),
                        sum.name
                    );
                    Register {
                        name,
                        dtype: sum.dtype,
                        vector: false,
                        level: 1,
                        stage: pass + 1,
                    }
                } else {
                    Register {
                        name: sum.name.clone(),
                        dtype: sum.dtype,
                        vector: sum.vector,
                        level: 1,
                        stage: pass + 1,
                    }
                };
                self.reduced.insert(sum.value, register);
            }
            pass_texts.push(text);
        }
        let mut row_stores = Vec::new();
        for store in stores.iter().filter(|store| vars(&store.index) & !row_set == 0) {
            let register = self.eval(store.value, &store.index);
            let dtype = self.buffer_dtype(store.buffer);
            let at = self.argument(Argument::Buffer(store.buffer));
            row_stores.push(self.store_text(dtype, &format!("a{at}"), &store.position, &register));
        }
        for stage in 0..self.sections.len().max(pass_texts.len()) {
            for line in self.sections.get(stage).into_iter().flatten() {
                out.push_str(line);
                out.push('\n');
            }
            if let Some(text) = pass_texts.get(stage) {
                out.push_str(text);
            }
        }
        for line in row_stores {
            out.push_str(&line);
            out.push('\n');
        }
    }

    pub(super) fn vector_rows(&self) -> bool {
        self.space
            .vector
            .is_some_and(|vector| self.space.rows.contains(&vector))
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
        let vector_rows = self.vector_rows();
        let loops: Vec<Var> = self
            .space
            .cols
            .iter()
            .copied()
            .filter(|&var| vector_rows || Some(var) != self.space.vector)
            .collect();
        for &var in &loops {
            let _ = writeln!(
                out,
                "for (int64_t i{var} = 0; i{var} < {}; i{var}++) {{",
                self.space.extent(var)
            );
        }
        let vector = self
            .space
            .vector
            .filter(|_| !vector_rows && self.space.cols.contains(&self.space.vector.unwrap_or(0)));
        let parts: Vec<(Lanes, String)> = match vector {
            None => vec![(row_mode, "{".to_owned())],
            Some(vector) => {
                let extent = self.space.extent(vector);
                let whole = extent / self.lanes * self.lanes;
                let mut parts = Vec::new();
                if whole > 0 {
                    let head = format!(
                        "for (int64_t i{vector} = 0; i{vector} < {whole}; i{vector} += {}) {{",
                        self.lanes
                    );
                    parts.push((Lanes::All, head));
                }
                if whole < extent {
                    parts.push((
                        Lanes::First(extent - whole),
                        format!("{{\nconst int64_t i{vector} = {whole};"),
                    ));
                }
                parts
            }
        };
        for (mode, head) in parts {
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
            out.push_str("}\n");
        }
        for _ in &loops {
            out.push_str("}\n");
        }
        self.mode = row_mode;
        self.known.retain(|_, register| register.level < 2);
        self.slots.retain(|_, register| register.level < 2);
    }
}
