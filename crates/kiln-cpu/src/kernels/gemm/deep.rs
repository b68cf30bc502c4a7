//! Deep products: threads share slices of the depth, whose sums are added up in their order.
//!
//! A weight's gradient has few elements and a depth of all tokens. Whichever part of the result a thread
//! takes, it reads panels of the whole depth, most of which other cores packed. Here it takes a slice of the
//! depth instead: it packs what the slice has of both operands, which stays in its own L2, and multiplies all
//! of it. Then threads share the rows of the result and add up the sums of all slices, first to last. Slices
//! follow from the shape, so the bits do not depend on the number of threads.

use super::emit::Emitter;
use crate::kernels::tile::amx;
use crate::kernels::{indent, unpack};

impl Emitter<'_> {
    /// `name_slices(ctx, begin, end, thread)`: the sums of slices of the depth. `name_sums(ctx, begin, end,
    /// thread)`: rows of the result, added up and finished.
    pub(super) fn slices(&mut self) -> String {
        let calls = self.tile_calls();
        let (plan, workspace, spec) = (self.plan, self.workspace, self.spec);
        let (name, n) = (&spec.name, spec.n);
        let (real, vf) = spec.element().ctypes();
        let factor = plan.factor.ctype();
        let (ldc, width, lanes) = (plan.padded_columns(), plan.width(), plan.lanes);
        let (per_cut, slices) = plan.slices();
        let each = plan.padded_rows(spec.m) * ldc;
        let [before, after] = amx::around(plan.tiles()).map(|statement| indent(statement, 4));
        let own = format!(
            "args->workspace + {} + thread * (int64_t){}",
            workspace.streamed, workspace.streamed_each
        );
        let partial = format!("({real} *)(args->workspace + {})", workspace.partial);
        let pack = |letter: &str, panels: usize, to: &str, first: &str| {
            format!(
                "for (int64_t panel = 0; panel < {panels}; panel++) {name}_pack_{letter}(args, panel, 0, depth, 0, {to} + {first} * depth);\n"
            )
        };
        let (pack_a, a) = match plan.a_packed {
            true => (
                pack("a", plan.row_panels, "rows_of", &self.first_row("panel")),
                "rows_of + row * depth".to_owned(),
            ),
            false => (String::new(), self.in_place(&spec.a, "row")),
        };
        let (pack_b, b) = match plan.b_packed {
            true => (
                pack("b", plan.column_panels, "columns_of", &format!("panel * {width}")),
                "columns_of + col * depth".to_owned(),
            ),
            false => (String::new(), self.in_place(&spec.b, "col")),
        };
        let slice = format!(
            "const int64_t start = unit / {per_cut} * {depth} + unit % {per_cut} * {chunk}, stop = (unit / {per_cut} + 1) * {depth};\n\
             const int64_t last = stop < {all} ? stop : {all}, depth = last - start < {chunk} ? last - start : {chunk};\n\
             struct {name}_args slice = *(const struct {name}_args *)ctx;\n\
             slice.start = start, slice.depth = depth;\n\
             const struct {name}_args *args = &slice;\n\
             {}const int64_t batch = args->batch;\n\
             {factor} *rows_of = ({factor} *)({own}), *columns_of = ({factor} *)({own} + {columns});\n\
             {real} *base = {partial} + unit * {each};\n\
             {pack_a}{pack_b}\
             for (int64_t cp = 0; cp < {column_panels}; cp++)\n\
             for (int64_t rp = 0; rp < {row_panels}; rp++) {{\n    \
             const int64_t row = {row}, col = cp * {width};\n    \
             const {factor} *tile_a = {a}, *tile_b = {b};\n    \
             {real} *target = base + row * ldc + col;\n{calls}}}\n",
            unpack(&spec.params),
            depth = plan.depth,
            chunk = plan.chunk,
            all = plan.all,
            columns = workspace.columns,
            row_panels = plan.row_panels,
            column_panels = plan.column_panels,
            row = self.first_row("rp"),
            calls = indent(&calls, 4),
        );
        let add = format!(
            "for (int64_t row = begin; row < end; row++)\n\
             for (int64_t j = 0; j < {ldc}; j += {lanes}) {{\n    \
             {real} *at = base + row * {ldc} + j;\n    \
             {vf} sum = {vf}_load(at);\n    \
             for (int64_t slice = 1; slice < {slices}; slice++) sum = sum + {vf}_load(at + slice * {each});\n    \
             {vf}_store(at, sum);\n}}\n\
             {name}_finish(args, args->batch, base + begin * {ldc}, {ldc}, begin, end - begin, 0, {n});\n",
        );
        format!(
            "/* Slices of the depth. */\nstatic void {name}_slices(void *ctx, int64_t begin, int64_t end, int thread) {{\n    const int64_t ldc = {ldc};\n{before}    \
             for (int64_t unit = begin; unit < end; unit++) {{\n{}    }}\n{after}}}\n\
             /* Their sums. */\nstatic void {name}_sums(void *ctx, int64_t begin, int64_t end, int thread) {{\n    const struct {name}_args *args = ctx;\n    \
             {real} *base = {partial};\n{}}}\n",
            indent(&slice, 8),
            indent(&add, 4),
        )
    }
}
