//! The source of a matrix product, after the plan is made.

use std::collections::BTreeSet;
use std::fmt::Write;

use super::finish::finish;
use super::plan::{Parallel, ProductPlan, Stream};
use super::workspace::Workspace;
use super::{GemmSpec, pack, tiles};
use crate::isa::Isa;
use crate::kernels::element::Factor;
use crate::kernels::{Helper, KernelText, fields, indent, pack_fields, signature, unpack};

pub(super) fn emit(spec: &GemmSpec<'_>, isa: Isa) -> KernelText {
    let name = &spec.name;
    let head = signature(name, &spec.params);
    if spec.batch == 0 || spec.m == 0 || spec.n == 0 {
        return KernelText {
            name: name.clone(),
            params: spec.params.clone(),
            prototype: format!("{head};"),
            source: format!("/* {}: no elements */\n{head} {{\n}}\n", spec.comment),
            helpers: Vec::new(),
            workspace_bytes: 0,
        };
    }
    let plan = ProductPlan::new(spec, isa);
    let workspace = Workspace::new(spec, &plan);
    let emitter = Emitter {
        spec,
        plan: &plan,
        workspace: &workspace,
        tiles: BTreeSet::new(),
        isa,
    };
    let (source, tiles) = emitter.source(&head);
    KernelText {
        name: name.clone(),
        params: spec.params.clone(),
        prototype: format!("{head};"),
        source,
        helpers: tiles.into_iter().collect(),
        workspace_bytes: workspace.total,
    }
}

pub(super) struct Emitter<'a> {
    pub spec: &'a GemmSpec<'a>,
    pub plan: &'a ProductPlan,
    pub workspace: &'a Workspace,
    pub tiles: BTreeSet<Helper>,
    pub isa: Isa,
}

impl Emitter<'_> {
    fn source(mut self, head: &str) -> (String, BTreeSet<Helper>) {
        let GemmSpec {
            name,
            comment,
            batch,
            m,
            n,
            k,
            params,
            ..
        } = self.spec;
        let plan = self.plan;
        let mut out = String::new();
        let packed = |is: bool| if is { "packed" } else { "in place" };
        let products = if *batch == 1 {
            String::new()
        } else {
            format!("{batch} times ")
        };
        let _ = writeln!(
            out,
            "/* {comment}\n * {products}[{m} x {k}] * [{k} x {n}]{}, tiles of {} x {}, A {}, B {}{}{}{}. */",
            match plan.factor {
                Factor::Bf16Pair => " of pairs of bf16",
                Factor::Bf16Tile => " of pairs of bf16 in tiles of AMX",
                _ => "",
            },
            plan.rows,
            plan.width(),
            packed(plan.a_packed),
            packed(plan.b_packed),
            match plan.parallel {
                Parallel::Serial => ", one thread",
                Parallel::Batch => ", threads share the batch",
                Parallel::Panels if plan.shared => ", threads share blocks",
                Parallel::Panels if plan.stream == Stream::Rows => ", threads share the rows",
                Parallel::Panels => ", threads share the columns",
                Parallel::Depth => ", threads share the depth",
            },
            if plan.cuts > 1 {
                format!(", depth in {} cuts", plan.cuts)
            } else {
                String::new()
            },
            match plan.in_chunks() {
                true => format!(", {} steps at a time", plan.chunk),
                false => String::new(),
            },
        );
        let _ = writeln!(
            out,
            "struct {name}_args {{\n{}    char *workspace;\n    int64_t batch, start, depth;\n    int from_zero, to_end;\n}};",
            fields(params)
        );
        if plan.a_packed {
            out.push_str(&self.pack_rows());
        }
        if plan.b_packed {
            out.push_str(&self.pack_columns());
        }
        if !plan.in_result {
            out.push_str(&finish(
                self.spec,
                plan.lanes,
                !self.spec.n.is_multiple_of(plan.lanes),
            ));
        }
        match plan.parallel {
            Parallel::Depth => out.push_str(&self.slices()),
            _ => {
                out.push_str(&self.stationary());
                out.push_str(&self.panels());
            }
        }
        out.push_str(&self.entry(head));
        (out, self.tiles)
    }

    /// `name_pack_a(args, row panel, begin, end, packed_from, packed)`: `packed` is where step `packed_from`
    /// lies.
    fn pack_rows(&self) -> String {
        let GemmSpec {
            name,
            m,
            k,
            a,
            params,
            ..
        } = self.spec;
        let (plan, factor) = (self.plan, self.plan.factor.ctype());
        let copy = |rows: usize| {
            let (body, valid) = match plan.tiles() {
                true => (
                    tiles::rows(a, *k, rows, plan.lanes),
                    format!("extent - free < {rows} ? extent - free : {rows}"),
                ),
                false => (
                    pack::panel(a, plan.factor, *k, rows, plan.lanes),
                    rows.to_string(),
                ),
            };
            format!(
                "{{\n    int64_t valid = {valid};\n    packed += (begin - packed_from) * {rows};\n{}}}",
                indent(&body, 4)
            )
        };
        let last = plan.row_panels - 1;
        let body = if plan.tiles() && plan.last_rows(*m) < plan.rows {
            format!(
                "if (panel < {last}) {} else {}\n",
                copy(plan.rows),
                copy(plan.last_rows(*m))
            )
        } else if plan.uneven_rows() {
            format!(
                "if (panel < {}) {} else {}\n",
                plan.tall_panels,
                copy(plan.rows),
                copy(plan.rows - 1)
            )
        } else {
            copy(plan.rows) + "\n"
        };
        format!(
            "/* Packs steps of a row panel of A. */\nstatic void {name}_pack_a(const struct {name}_args *args, int64_t panel, int64_t begin, int64_t end, \
             int64_t packed_from, {factor} *packed) {{\n{}    const int64_t batch = args->batch, start = args->start + begin, depth = end - begin, extent = \
             {m};\n    const int64_t free = {};\n{}}}\n",
            unpack(params),
            self.first_row("panel"),
            indent(&body, 4)
        )
    }

    /// `name_pack_b(args, column panel, begin, end, packed_from, packed)`, as [`Self::pack_rows`].
    fn pack_columns(&self) -> String {
        let GemmSpec {
            name,
            n,
            k,
            b,
            params,
            ..
        } = self.spec;
        let (plan, factor) = (self.plan, self.plan.factor.ctype());
        let copy = |vectors: usize| {
            let width = vectors * plan.lanes;
            let body = pack::panel(b, plan.factor, *k, width, plan.lanes);
            format!(
                "{{\n    const int64_t valid = extent - free < {width} ? extent - free : {width};\n    packed += (begin - packed_from) * {width};\n{}}}",
                indent(&body, 4)
            )
        };
        let body = if plan.uneven_columns() {
            let last = plan.column_panels - 1;
            format!(
                "if (panel < {last}) {} else {}\n",
                copy(plan.vectors),
                copy(plan.last_vectors)
            )
        } else {
            copy(if plan.column_panels == 1 {
                plan.last_vectors
            } else {
                plan.vectors
            }) + "\n"
        };
        format!(
            "/* Packs steps of a column panel of B. */\nstatic void {name}_pack_b(const struct {name}_args *args, int64_t panel, int64_t begin, int64_t end, \
             int64_t packed_from, {factor} *packed) {{\n{}    const int64_t batch = args->batch, start = args->start + begin, depth = end - begin, extent = \
             {n};\n    const int64_t free = panel * {};\n{}}}\n",
            unpack(params),
            plan.width(),
            indent(&body, 4)
        )
    }

    /// First row of a row panel.
    pub(super) fn first_row(&self, panel: &str) -> String {
        let plan = self.plan;
        if plan.uneven_rows() {
            let (tall, short) = (plan.tall_panels, plan.rows - 1);
            format!("({panel} * {short} + ({panel} < {tall} ? {panel} : {tall}))")
        } else {
            format!("({panel} * {})", plan.rows)
        }
    }

    fn stationary_packed(&self) -> bool {
        match self.plan.stream {
            Stream::Columns => self.plan.a_packed,
            Stream::Rows => self.plan.b_packed,
        }
    }

    /// `name_stationary(ctx, begin, end, thread)`: packs units of the stationary operand, some steps of a
    /// panel each; where threads share blocks of the result, then those of the streamed operand.
    fn stationary(&self) -> String {
        if !self.stationary_packed() {
            return String::new();
        }
        let (plan, workspace) = (self.plan, self.workspace);
        let (name, factor) = (&self.spec.name, plan.factor.ctype());
        let pack = |letter: &str, at: usize, panel: &str| {
            let first = match letter {
                "a" => self.first_row(panel),
                _ => format!("({panel} * {})", plan.width()),
            };
            format!(
                "{name}_pack_{letter}(args, {panel}, from, to, 0, ({factor} *)(args->workspace + {at}) + {first} * args->depth);\n"
            )
        };
        let (mine, other) = match plan.stream {
            Stream::Columns => ("a", "b"),
            Stream::Rows => ("b", "a"),
        };
        let mut text = pack(mine, workspace.stationary, "panel");
        if plan.shared {
            let stationary = plan.panels().1;
            text = format!(
                "if (panel < {stationary}) {text}else {}",
                pack(other, workspace.streamed, &format!("(panel - {stationary})"))
            );
        }
        format!(
            "static void {name}_stationary(void *ctx, int64_t begin, int64_t end, int thread) {{\n    const struct {name}_args \
             *args = ctx;\n    const int64_t runs = (args->depth + {last}) / {steps};\n    for (int64_t unit = begin; unit < end; \
             unit++) {{\n        const int64_t panel = unit / runs, from = unit % runs * {steps}, to = from + {steps} < args->depth ? \
             from + {steps} : args->depth;\n{}    }}\n}}\n",
            indent(&text, 8),
            steps = plan.pack_steps(),
            last = plan.pack_steps() - 1,
        )
    }

    /// The loops over batch and depth cuts, and the kernel itself.
    fn entry(&self, head: &str) -> String {
        let GemmSpec {
            name, batch, params, ..
        } = self.spec;
        let (plan, workspace) = (self.plan, self.workspace);
        let run = |part: &str, panels: &str| match plan.parallel {
            Parallel::Panels => {
                format!("rt->parallel_for(rt->pool, {panels}, 1, {name}_{part}, &args);\n")
            }
            _ => format!("{name}_{part}(&args, 0, {panels}, 0);\n"),
        };
        let initial = format!(
            "{}.workspace = workspace, .start = 0, .depth = {}, .from_zero = 1, .to_end = 1",
            pack_fields(params),
            plan.depth
        );
        if plan.parallel == Parallel::Depth {
            return format!(
                "{head} {{\n    struct {name}_args args = {{{initial}}};\n    rt->parallel_for(rt->pool, {}, 1, {name}_slices, &args);\n    \
                 rt->parallel_for(rt->pool, {}, 1, {name}_sums, &args);\n}}\n",
                plan.slices().1,
                self.spec.m,
            );
        }
        let (streamed, stationary) = plan.panels();
        let mut once = String::new();
        if self.stationary_packed() {
            let panels = stationary + if plan.shared { streamed } else { 0 };
            let steps = plan.pack_steps();
            once.push_str(&run(
                "stationary",
                &format!("{panels} * ((args.depth + {}) / {steps})", steps - 1),
            ));
        }
        let units = match plan.shared {
            true => streamed.div_ceil(plan.group) * stationary.div_ceil(plan.part),
            false => streamed,
        };
        once.push_str(&run("panels", &units.to_string()));
        if plan.cuts > 1 {
            once = format!(
                "for (int64_t start = 0; start < {all}; start += {depth}) {{\n    args.start = start;\n    args.depth = {all} - \
                 start < {depth} ? {all} - start : {depth};\n    args.from_zero = start == 0;\n    args.to_end = start + args.depth == \
                 {all};\n{}}}\n",
                indent(&once, 4),
                all = plan.all,
                depth = plan.depth
            );
        }
        if plan.parallel == Parallel::Batch {
            return format!(
                "static void {name}_batch(void *ctx, int64_t begin, int64_t end, int thread) {{\n    struct {name}_args args \
                 = *(const struct {name}_args *)ctx;\n    args.workspace += thread * (int64_t){};\n    for (int64_t batch = begin; \
                 batch < end; batch++) {{\n        args.batch = batch;\n{}    }}\n}}\n{head} {{\n    struct {name}_args args = \
                 {{{initial}}};\n    rt->parallel_for(rt->pool, {batch}, 1, {name}_batch, &args);\n}}\n",
                workspace.each,
                indent(&once, 8)
            );
        }
        let body = if *batch == 1 {
            once
        } else {
            format!(
                "for (args.batch = 0; args.batch < {batch}; args.batch++) {{\n{}}}\n",
                indent(&once, 4)
            )
        };
        format!(
            "{head} {{\n    struct {name}_args args = {{{initial}}};\n{}}}\n",
            indent(&body, 4)
        )
    }
}
