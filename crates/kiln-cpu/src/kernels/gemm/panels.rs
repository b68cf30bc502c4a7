//! The loops of a matrix product: streamed panels against the stationary operand.

use super::emit::Emitter;
use super::pack::Pairs;
use super::plan::{Parallel, Stream};
use super::workspace::WIDE;
use super::{Axis, GemmSpec, Memory, Operand, ResultMemory};
use crate::kernels::tile::{self, Access, Tile, amx};
use crate::kernels::{indent, unpack};

/// Steps of which neighbouring panels are packed one after the other.
const TOGETHER: usize = 16;

/// Where tiles put their sums.
enum Sums<'a> {
    /// Into the result itself.
    Result(&'a ResultMemory<'a>),
    /// Into partial sums in the workspace, because the depth is cut.
    Partial,
    /// Into a block of the thread's own, which the epilogue consumes soon after.
    Block,
}

impl<'a> Emitter<'a> {
    /// Calls of the tile functions that differ in height and width, chosen at run time.
    pub(super) fn tile_calls(&mut self) -> String {
        let (plan, factor, m) = (self.plan, self.plan.factor, self.spec.m);
        let access = |packed: bool, operand: &super::Operand<'_>| match (&operand.memory, &operand.halves) {
            (Some(memory), _) if !packed => Access::Strided {
                free: memory.free_stride,
                depth: memory.depth_stride,
            },
            (_, Some(memory)) if !packed => Access::Strided {
                free: memory.free_stride / 2,
                depth: 1,
            },
            _ => Access::Packed,
        };
        let (a, b) = (
            access(plan.a_packed, &self.spec.a),
            match plan.near {
                true => Access::Passing,
                false => access(plan.b_packed, &self.spec.b),
            },
        );
        let [first_rp, first_cp] = self.block().map(|[first, _]| first);
        let mut call = |rows: usize, vectors: usize| {
            let tile = Tile {
                rows,
                vectors,
                a,
                b,
                factor,
                nested: false,
                block: tile::BLOCK,
            };
            self.tiles.insert(tile.helper(self.isa));
            let name = tile.name();
            match plan.near {
                true => format!(
                    "{name}(tile_a, tile_b, steps, target, ldc, done > 0 || !args->from_zero, next_a + (cp - {first_cp}) * steps * {}, next_b + (rp - {first_rp}) * \
                     steps * {});",
                    amx::lines_ahead(rows / amx::EXTENT),
                    amx::lines_ahead(vectors),
                ),
                false if plan.parallel == Parallel::Depth => {
                    format!("{name}(tile_a, tile_b, depth, target, ldc, 0);")
                }
                false => format!("{name}(tile_a, tile_b, args->depth, target, ldc, !args->from_zero);"),
            }
        };
        let mut heights = |vectors: usize| {
            let tall = call(plan.rows, vectors);
            let last_rows = plan.last_rows(m);
            if plan.tiles() && last_rows < plan.rows {
                let (last, low) = (plan.row_panels - 1, call(last_rows, vectors));
                format!("if (rp < {last}) {tall}\nelse {low}\n")
            } else if plan.uneven_rows() {
                let short = call(plan.rows - 1, vectors);
                format!("if (rp < {}) {tall}\nelse {short}\n", plan.tall_panels)
            } else {
                tall + "\n"
            }
        };
        let full = if plan.column_panels == 1 {
            plan.last_vectors
        } else {
            plan.vectors
        };
        if plan.uneven_columns() {
            let last = plan.column_panels - 1;
            let (full, narrow) = (heights(full), heights(plan.last_vectors));
            format!(
                "if (cp < {last}) {{\n{}}} else {{\n{}}}\n",
                indent(&full, 4),
                indent(&narrow, 4)
            )
        } else {
            heights(full)
        }
    }

    /// `name_panels(ctx, begin, end, thread)`: streamed panels `begin..end` against the stationary operand.
    pub(super) fn panels(&mut self) -> String {
        let calls = self.tile_calls();
        let sums = self.sums();
        let (plan, workspace) = (self.plan, self.workspace);
        let GemmSpec { name, params, .. } = self.spec;
        let (real, factor) = (self.spec.element().ctype(), plan.factor.ctype());
        let (base, ldc) = match &sums {
            Sums::Result(memory) => ((memory.base)("batch"), memory.row_stride),
            Sums::Partial => (
                format!("({real} *)(args->workspace + {})", workspace.partial),
                plan.padded_columns() as i64,
            ),
            Sums::Block => ("block".to_owned(), workspace.block_ld as i64),
        };
        let block_at = match &sums {
            Sums::Block => format!(
                "    {real} *block = ({real} *)({});\n",
                self.own(workspace.block, workspace.block_each)
            ),
            _ => String::new(),
        };
        let [begin, end] = amx::around(plan.tiles());
        let tile = self.tile(&sums, &calls);
        let pack = self.pack_streamed();
        let [before, in_chunk] = match plan.by_chunk {
            true => ["", pack.as_str()],
            false => [pack.as_str(), ""],
        };
        let work = match (plan.tiles(), plan.stream) {
            (true, _) => self.block_loops(&sums, in_chunk, &tile),
            (false, Stream::Columns) => self.row_loops(&sums, &tile),
            (false, Stream::Rows) => self.column_loops(&sums, &tile),
        };
        let (streamed, stationary) = plan.panels();
        let (group, part) = (plan.group, plan.part);
        let to = format!("to = from + {part} < {stationary} ? from + {part} : {stationary}");
        let parts = stationary.div_ceil(part);
        let work = match (plan.shared, parts) {
            (false, 1) => format!("const int64_t from = 0, to = {stationary};\n{work}"),
            (false, _) => format!(
                "for (int64_t from = 0; from < {stationary}; from += {part}) {{\n    const int64_t {to};\n{}}}\n",
                indent(&work, 4)
            ),
            (true, _) => format!("const int64_t from = unit % {parts} * {part}, {to};\n{work}"),
        };
        let groups = match plan.shared {
            true => format!(
                "for (int64_t unit = begin; unit < end; unit++) {{\n        const int64_t group = unit / {parts} * {group}, group_end = group + {group} < {streamed} ? \
                 group + {group} : {streamed};\n"
            ),
            false => format!(
                "for (int64_t group = begin; group < end; group += {group}) {{\n        const int64_t group_end = group + {group} < end ? group + \
                 {group} : end;\n"
            ),
        };
        format!(
            "static void {name}_panels(void *ctx, int64_t begin, int64_t end, int thread) {{\n    const struct {name}_args \
             *args = ctx;\n{}    const int64_t batch = args->batch, ldc = {ldc};\n    const {factor} *stationary = (const {factor} \
             *)(args->workspace + {});\n    {factor} *streamed = ({factor} *)({});\n{block_at}    {real} *base = {base};\n{}    {groups}{}{}    }}\n{}}}\n",
            unpack(params),
            workspace.stationary,
            self.own(workspace.streamed, workspace.streamed_each),
            indent(begin, 4),
            indent(before, 8),
            indent(&work, 8),
            indent(end, 4),
        )
    }

    fn sums(&self) -> Sums<'a> {
        let in_result = self.spec.epilogue.memory.as_ref().filter(|_| self.plan.in_result);
        match in_result {
            Some(memory) => Sums::Result(memory),
            None if self.plan.cuts > 1 => Sums::Partial,
            None => Sums::Block,
        }
    }

    /// C expression of a region of the workspace: the thread's own, `each` bytes from the next thread's,
    /// where threads share panels.
    fn own(&self, offset: usize, each: usize) -> String {
        match self.plan.parallel {
            Parallel::Panels if each > 0 => format!("args->workspace + {offset} + thread * (int64_t){each}"),
            _ => format!("args->workspace + {offset}"),
        }
    }

    /// C expression of the address of an operand that tiles read in place, from row or column `free` on.
    pub(super) fn in_place(&self, operand: &Operand<'_>, free: &str) -> String {
        let place = |memory: &Memory<'_>, step: i64| {
            format!(
                "{} + {free} * {} + args->start * {step}",
                (memory.base)("batch"),
                memory.free_stride,
            )
        };
        match (&operand.memory, &operand.halves) {
            (Some(memory), _) => place(memory, memory.depth_stride),
            (_, Some(memory)) => {
                let factor = self.plan.factor.ctype();
                format!("(const {factor} *)({})", place(memory, 2))
            }
            _ => String::new(),
        }
    }

    /// C expressions of the addresses where a tile finds its rows of A and its columns of B, from the first
    /// step on.
    fn operands(&self) -> (String, String) {
        let (plan, width) = (self.plan, self.plan.width());
        // A thread's own panels begin with those of the group, and all have the room of the highest. Those
        // that threads share begin with the first, and each begins where the one before it ends.
        let shared = plan.shared;
        let distance = match plan.by_chunk {
            true => plan.chunk.to_string(),
            false => "args->depth".to_owned(),
        };
        let packed_a = match plan.stream {
            Stream::Rows if !shared => format!("streamed + (rp - group) * {} * {distance}", plan.rows),
            Stream::Rows => "streamed + row * args->depth".to_owned(),
            Stream::Columns => "stationary + row * args->depth".to_owned(),
        };
        let packed_b = match plan.stream {
            Stream::Columns if !shared => format!("streamed + (cp - group) * {width} * {distance}"),
            Stream::Columns => format!("streamed + cp * {width} * args->depth"),
            Stream::Rows => format!("stationary + cp * {width} * args->depth"),
        };
        let a = match plan.a_packed {
            true => packed_a,
            false => self.in_place(&self.spec.a, "row"),
        };
        let b = match plan.b_packed {
            true => packed_b,
            false => self.in_place(&self.spec.b, "col"),
        };
        (a, b)
    }

    fn contiguous(&self, operand: &Operand<'_>) -> Option<Axis> {
        Pairs::padded(operand, self.spec.k).contiguous()
    }

    /// Packs the streamed panels of a group, unless they are read in place.
    fn pack_streamed(&self) -> String {
        let (plan, name) = (self.plan, &self.spec.name);
        if plan.shared {
            return String::new();
        }
        let (letter, high, contiguous) = match plan.stream {
            Stream::Columns if plan.b_packed => ("b", plan.width(), self.contiguous(&self.spec.b)),
            Stream::Rows if plan.a_packed => ("a", plan.rows, self.contiguous(&self.spec.a)),
            _ => return String::new(),
        };
        let (first, end, distance) = match plan.by_chunk {
            true => ("done", "done + steps", plan.chunk.to_string()),
            false => ("0", "args->depth", "args->depth".to_owned()),
        };
        let pack = |from: &str, to: &str| {
            format!(
                "for (int64_t panel = group; panel < group_end; panel++)\n    {name}_pack_{letter}(args, panel, {from}, {to}, {first}, streamed + (panel - group) * {high} * {distance});\n"
            )
        };
        // Panels whose neighbours lie beside them in memory are packed together.
        match plan.tiles() && contiguous == Some(Axis::Free) {
            true => format!(
                "for (int64_t k = {first}; k < {end}; k += {TOGETHER}) {{\n    const int64_t to = k + {TOGETHER} < {end} ? k + {TOGETHER} : {end};\n{}}}\n",
                indent(&pack("k", "to"), 4)
            ),
            false => pack(first, end),
        }
    }

    /// Finds the operands and the sums of the tile of row panel `rp` and column panel `cp`, and computes it
    /// by `calls`.
    fn tile(&self, sums: &Sums<'_>, calls: &str) -> String {
        let (plan, width) = (self.plan, self.plan.width());
        let (real, factor) = (self.spec.element().ctype(), plan.factor.ctype());
        let block_row = plan.rows * self.workspace.block_ld;
        let at = match (sums, plan.stream) {
            (Sums::Block, _) if plan.tiles() => {
                let [[first_rp, _], [first_cp, _]] = self.block();
                format!("(rp - {first_rp}) * {block_row} + (cp - {first_cp}) * {width}")
            }
            (Sums::Block, Stream::Columns) => format!("(cp - group) * {width}"),
            (Sums::Block, Stream::Rows) => format!("(rp - group) * {block_row} + (cp - wide) * {width}"),
            _ => "row * ldc + col".to_owned(),
        };
        let (a, b) = self.operands();
        let place = match plan.near {
            true => self.chunks(&a, &b),
            false => format!("const {factor} *tile_a = {a};\nconst {factor} *tile_b = {b};\n"),
        };
        format!(
            "const int64_t row = {}, col = cp * {width};\n{place}{real} *target = base + {at};\n{calls}",
            self.first_row("rp")
        )
    }

    /// Declares where the chunks of the panels `a` and `b` begin that meet now, and where those that follow.
    fn chunks(&self, a: &str, b: &str) -> String {
        let plan = self.plan;
        let rows_stream = plan.stream == Stream::Rows;
        let step_of = |panel: &str, panels: usize, extent: usize, last: usize| match extent == last {
            true => extent.to_string(),
            false => format!("({panel} < {} ? {extent} : {last})", panels - 1),
        };
        // A panel has its steps one after the other, each as high or wide as the panel is.
        let [rows, columns] = [
            step_of("rp", plan.row_panels, plan.rows, plan.last_rows(self.spec.m)),
            step_of(
                "cp",
                plan.column_panels,
                plan.width(),
                plan.last_vectors * plan.lanes,
            ),
        ];
        let one = |letter: &str, panel: &str, step: &str, streamed: bool| {
            let [now, next] = match (streamed, plan.by_chunk) {
                (true, true) => [String::new(), String::new()],
                (true, false) => [format!(" + done * {step}"), format!(" + next * {step}")],
                (false, _) => [
                    format!(" + done * {step}"),
                    format!(" + (next + on * args->depth) * {step}"),
                ],
            };
            format!(
                "const {} *panel_{letter} = {panel}, *tile_{letter} = panel_{letter}{now}, *next_{letter} = panel_{letter}{next};\n",
                plan.factor.ctype()
            )
        };
        one("a", a, &rows, rows_stream) + &one("b", b, &columns, !rows_stream)
    }

    /// First panel of rows of a block and the end of its panels, and those of columns.
    fn block(&self) -> [[&'static str; 2]; 2] {
        let (streamed, stationary) = (["group", "group_end"], ["from", "to"]);
        match self.plan.stream {
            Stream::Rows => [streamed, stationary],
            Stream::Columns => [stationary, streamed],
        }
    }

    /// The tiles of a block of the result, then its epilogue. Panels of rows stay in L1 while those of
    /// columns pass: all of them, or chunk by chunk of the depth. `pack` packs the streamed panels of a
    /// chunk.
    fn block_loops(&self, sums: &Sums<'_>, pack: &str, tile: &str) -> String {
        let plan = self.plan;
        let [[first_rp, end_rp], [first_cp, end_cp]] = self.block();
        let (chunk, part, stationary) = (plan.chunk, plan.part, plan.panels().1);
        let rows = format!("for (int64_t rp = {first_rp}; rp < {end_rp}; rp++)");
        let tiles = format!(
            "{rows}\n    for (int64_t cp = {first_cp}; cp < {end_cp}; cp++) {{\n{}    }}\n",
            indent(tile, 8)
        );
        let tiles = match plan.near {
            true => format!(
                "for (int64_t done = 0; done < args->depth; done += {chunk}) {{\n    const int64_t steps = args->depth - done < {chunk} ? args->depth - done : {chunk};\n    \
                 /* What follows: the next steps of these panels, or the first of as many stationary ones further on. */\n    const int64_t next = done + steps < args->depth ? \
                 done + steps : 0, on = next ? 0 : to < {stationary} ? {part} : -from;\n{}{}}}\n",
                indent(pack, 4),
                indent(&tiles, 4)
            ),
            false => tiles,
        };
        let at = format!("(rp - {first_rp}) * {}", plan.rows * self.workspace.block_ld);
        match self.finish_columns(sums, first_cp, end_cp, &at) {
            finish if finish.is_empty() => tiles,
            finish => format!("{tiles}{rows}\n{}", indent(&finish, 4)),
        }
    }

    /// For each row panel, the tiles of the group's column panels.
    fn row_loops(&self, sums: &Sums<'_>, tile: &str) -> String {
        let finish = self.finish_columns(sums, "group", "group_end", "0");
        format!(
            "for (int64_t rp = from; rp < to; rp++) {{\n    for (int64_t cp = group; cp < group_end; cp++) {{\n{}    }}\n{}}}\n",
            indent(tile, 8),
            indent(&finish, 4)
        )
    }

    /// For each column panel, the tiles of the group's row panels. An epilogue follows after every [`WIDE`]
    /// column panels.
    fn column_loops(&self, sums: &Sums<'_>, tile: &str) -> String {
        let plan = self.plan;
        let at = format!("(rp - group) * {}", plan.rows * self.workspace.block_ld);
        let finish = self.finish_columns(sums, "wide", "wide_end", &at);
        let inner = format!(
            "for (int64_t rp = group; rp < group_end; rp++) {{\n{}}}\n",
            indent(tile, 4)
        );
        if finish.is_empty() {
            return format!("for (int64_t cp = from; cp < to; cp++)\n{}", indent(&inner, 4));
        }
        format!(
            "for (int64_t wide = from; wide < to; wide += {WIDE}) {{\n    const int64_t wide_end = wide + {WIDE} < \
             to ? wide + {WIDE} : to;\n    for (int64_t cp = wide; cp < wide_end; cp++)\n{}    for (int64_t rp \
             = group; rp < group_end; rp++)\n{}}}\n",
            indent(&inner, 8),
            indent(&finish, 8),
        )
    }

    /// Calls the epilogue for column panels `from..end` of row panel `rp`: several at once, because rows
    /// should be long enough for caches to run ahead of it. In a block, their sums lie `at` from its start.
    fn finish_columns(&self, sums: &Sums<'_>, from: &str, end: &str, at: &str) -> String {
        let (plan, width) = (self.plan, self.plan.width());
        let GemmSpec { name, m, n, .. } = self.spec;
        if plan.in_result {
            return String::new();
        }
        let rows = if plan.tiles() {
            format!("({m} - row < {0} ? {m} - row : {0})", plan.rows)
        } else if plan.uneven_rows() {
            format!("(rp < {} ? {} : {})", plan.tall_panels, plan.rows, plan.rows - 1)
        } else {
            plan.rows.to_string()
        };
        let place = match sums {
            Sums::Block => at,
            _ => "row * ldc + col",
        };
        let test = match plan.cuts > 1 {
            true => "if (args->to_end) ",
            false => "",
        };
        format!(
            "{test}{{\n    const int64_t row = {}, rows = {rows}, col = {from} * {width}, ends = {end} * {width} < {n} ? {end} * \
             {width} : {n};\n    {name}_finish(args, batch, base + {place}, ldc, row, rows, col, ends - col);\n}}\n",
            self.first_row("rp")
        )
    }
}
