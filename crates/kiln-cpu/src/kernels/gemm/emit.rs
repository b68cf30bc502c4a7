//! The source of a matrix product, after the plan is made.

use std::collections::BTreeSet;
use std::fmt::Write;

use super::plan::{Parallel, ProductPlan, Stream};
use super::{Epilogue, GemmSpec, Memory, Result, TileCode, pack};
use crate::isa::Isa;
use crate::kernels::element::{Element, Factor};
use crate::kernels::tile::{self, Access, Tile};
use crate::kernels::{Helper, KernelText, Width, fields, indent, pack_fields, round_up, signature, unpack};

/// Bytes between regions of the workspace.
const REGION: usize = 64;

/// Column panels after which the epilogue runs, where rows are streamed.
const WIDE: usize = 8;

/// What is packed where in the workspace, in bytes.
struct Workspace {
    /// The stationary operand, if packed.
    stationary: usize,
    /// Partial sums, if the depth is cut.
    partial: usize,
    /// First thread's streamed panels.
    streamed: usize,
    /// Distance between the streamed panels of two threads.
    streamed_each: usize,
    /// First thread's block of sums that wait for the epilogue.
    block: usize,
    /// Distance between the blocks of two threads.
    block_each: usize,
    /// Elements between neighbouring rows of a block.
    block_ld: usize,
    /// Distance between whole workspaces of two threads, when each has one of its own.
    each: usize,
    total: usize,
}

impl Workspace {
    fn new(spec: &GemmSpec<'_>, plan: &ProductPlan) -> Self {
        // A last vector store may run over by less than a vector.
        let bytes = spec.element().bytes();
        let floats = |count: usize| round_up((count + plan.lanes) * bytes, REGION);
        let (a, b) = (spec.m * plan.depth, plan.padded_columns() * plan.depth);
        let (stationary, streamed_each) = match plan.stream {
            Stream::Columns => (
                if plan.a_packed { floats(a) } else { 0 },
                if plan.b_packed {
                    floats(plan.group * plan.width() * plan.depth)
                } else {
                    0
                },
            ),
            Stream::Rows => (
                if plan.b_packed { floats(b) } else { 0 },
                if plan.a_packed {
                    floats(plan.group * plan.rows * plan.depth)
                } else {
                    0
                },
            ),
        };
        let partial = if plan.cuts > 1 && !plan.in_result {
            floats(spec.m * plan.padded_columns())
        } else {
            0
        };
        let shared = stationary + partial;
        let threads = if plan.parallel == Parallel::Panels {
            spec.threads
        } else {
            1
        };
        let (block_rows, block_panels) = match plan.stream {
            Stream::Columns => (plan.rows, plan.group.min(plan.column_panels)),
            Stream::Rows => (
                plan.rows * plan.group.min(plan.row_panels),
                WIDE.min(plan.column_panels),
            ),
        };
        // A vector more than the columns, so that rows do not fight for the same lines of L1.
        let block_ld = block_panels * plan.width() + plan.lanes;
        let block_each = if plan.in_result || plan.cuts > 1 {
            0
        } else {
            floats(block_rows * block_ld)
        };
        let block = shared + streamed_each * threads;
        let whole = block + block_each * threads;
        let (each, total) = match plan.parallel {
            Parallel::Batch => (whole, whole * spec.threads),
            _ => (0, whole),
        };
        Self {
            stationary: 0,
            partial: stationary,
            streamed: shared,
            streamed_each,
            block,
            block_each,
            block_ld,
            each,
            total,
        }
    }
}

/// Bytes of working memory.
pub(super) fn workspace(spec: &GemmSpec<'_>, isa: Isa) -> usize {
    match spec.batch * spec.m * spec.n {
        0 => 0,
        _ => Workspace::new(spec, &ProductPlan::new(spec, isa)).total,
    }
}

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

struct Emitter<'a> {
    spec: &'a GemmSpec<'a>,
    plan: &'a ProductPlan,
    workspace: &'a Workspace,
    tiles: BTreeSet<Helper>,
    isa: Isa,
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
            "/* {comment}\n * {products}[{m} x {k}] * [{k} x {n}]{}, tiles of {} x {}, A {}, B {}{}{}. */",
            match plan.factor {
                Factor::Bf16Pair => " of pairs of bf16",
                _ => "",
            },
            plan.rows,
            plan.width(),
            packed(plan.a_packed),
            packed(plan.b_packed),
            match plan.parallel {
                Parallel::Serial => ", one thread",
                Parallel::Batch => ", threads share the batch",
                Parallel::Panels if plan.stream == Stream::Rows => ", threads share the rows",
                Parallel::Panels => ", threads share the columns",
            },
            if plan.cuts > 1 {
                format!(", depth in {} cuts", plan.cuts)
            } else {
                String::new()
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
        out.push_str(&self.stationary());
        out.push_str(&self.panels());
        out.push_str(&self.entry(head));
        (out, self.tiles)
    }

    /// `name_pack_a(args, row panel, packed)`.
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
            let body = pack::panel(a, plan.factor, *k, rows, plan.lanes);
            format!("{{\n    int64_t valid = {rows};\n{}}}", indent(&body, 4))
        };
        let body = if plan.uneven_rows() {
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
            "/* Packs a row panel of A. */\nstatic void {name}_pack_a(const struct {name}_args *args, int64_t panel, {factor} \
             *packed) {{\n{}    const int64_t batch = args->batch, start = args->start, depth = args->depth, extent = \
             {m};\n    const int64_t free = {};\n{}}}\n",
            unpack(params),
            self.first_row("panel"),
            indent(&body, 4)
        )
    }

    /// `name_pack_b(args, column panel, packed)`.
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
                "{{\n    const int64_t valid = extent - free < {width} ? extent - free : {width};\n{}}}",
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
            "/* Packs a column panel of B. */\nstatic void {name}_pack_b(const struct {name}_args *args, int64_t panel, \
             {factor} *packed) {{\n{}    const int64_t batch = args->batch, start = args->start, depth = args->depth, extent = \
             {n};\n    const int64_t free = panel * {};\n{}}}\n",
            unpack(params),
            plan.width(),
            indent(&body, 4)
        )
    }

    /// First row of a row panel.
    fn first_row(&self, panel: &str) -> String {
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

    fn stationary_panels(&self) -> usize {
        match self.plan.stream {
            Stream::Columns => self.plan.row_panels,
            Stream::Rows => self.plan.column_panels,
        }
    }

    fn streamed_panels(&self) -> usize {
        match self.plan.stream {
            Stream::Columns => self.plan.column_panels,
            Stream::Rows => self.plan.row_panels,
        }
    }

    /// `name_stationary(ctx, begin, end, thread)`: packs panels of the stationary operand.
    fn stationary(&self) -> String {
        if !self.stationary_packed() {
            return String::new();
        }
        let (name, factor) = (&self.spec.name, self.plan.factor.ctype());
        let (letter, offset) = match self.plan.stream {
            Stream::Columns => ("a", self.first_row("panel")),
            Stream::Rows => ("b", format!("(panel * {})", self.plan.width())),
        };
        format!(
            "static void {name}_stationary(void *ctx, int64_t begin, int64_t end, int thread) {{\n    const struct \
             {name}_args *args = ctx;\n    for (int64_t panel = begin; panel < end; panel++)\n        \
             {name}_pack_{letter}(args, panel, ({factor} *)(args->workspace + {}) + {offset} * args->depth);\n}}\n",
            self.workspace.stationary
        )
    }

    /// Calls of the tile functions that differ in height and width, chosen at run time.
    fn tile_calls(&mut self) -> String {
        let (plan, factor) = (self.plan, self.plan.factor);
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
            access(plan.b_packed, &self.spec.b),
        );
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
            format!(
                "{}(tile_a, tile_b, args->depth, target, ldc, !args->from_zero);",
                tile.name()
            )
        };
        let mut heights = |vectors: usize| {
            let tall = call(plan.rows, vectors);
            if plan.uneven_rows() {
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
    fn panels(&mut self) -> String {
        let calls = self.tile_calls();
        let GemmSpec {
            name,
            n,
            a,
            b,
            params,
            ..
        } = self.spec;
        let (plan, workspace, real) = (self.plan, self.workspace, self.spec.element().ctype());
        let factor = plan.factor.ctype();
        let width = plan.width();
        let row = self.first_row("rp");
        let rows = if plan.uneven_rows() {
            format!("(rp < {} ? {} : {})", plan.tall_panels, plan.rows, plan.rows - 1)
        } else {
            plan.rows.to_string()
        };

        // Where tiles find their operands.
        let in_place = |operand: &super::Operand<'_>, free: &str| {
            let place = |memory: &Memory<'_>, step: i64| {
                format!(
                    "{} + {free} * {} + args->start * {step}",
                    (memory.base)("batch"),
                    memory.free_stride,
                )
            };
            match (&operand.memory, &operand.halves) {
                (Some(memory), _) => place(memory, memory.depth_stride),
                (_, Some(memory)) => format!("(const {factor} *)({})", place(memory, 2)),
                _ => String::new(),
            }
        };
        let (a_place, b_place) = match plan.stream {
            Stream::Columns => (
                "stationary + row * args->depth".to_owned(),
                format!("streamed + (cp - group) * {width} * args->depth"),
            ),
            Stream::Rows => (
                format!("streamed + (rp - group) * {} * args->depth", plan.rows),
                format!("stationary + cp * {width} * args->depth"),
            ),
        };
        let a_place = if plan.a_packed {
            a_place
        } else {
            in_place(a, "row")
        };
        let b_place = if plan.b_packed {
            b_place
        } else {
            in_place(b, "col")
        };

        let pack_streamed = match plan.stream {
            Stream::Columns if plan.b_packed => format!(
                "for (int64_t cp = group; cp < group_end; cp++)\n    {name}_pack_b(args, cp, streamed + (cp - group) * \
                 {width} * args->depth);\n"
            ),
            Stream::Rows if plan.a_packed => format!(
                "for (int64_t rp = group; rp < group_end; rp++)\n    {name}_pack_a(args, rp, streamed + (rp - group) * {} \
                 * args->depth);\n",
                plan.rows
            ),
            _ => String::new(),
        };
        let in_result = self.spec.epilogue.memory.as_ref().filter(|_| plan.in_result);
        // Where tiles put their sums: the result, the partial sums of a cut depth, or a block that is consumed soon after.
        let (block, ldc) = if let Some(memory) = in_result {
            ((memory.base)("batch"), memory.row_stride)
        } else if plan.cuts > 1 {
            let block = format!("({real} *)(args->workspace + {})", workspace.partial);
            (block, plan.padded_columns() as i64)
        } else {
            ("block".to_owned(), workspace.block_ld as i64)
        };
        let at = if block == "block" {
            match plan.stream {
                Stream::Columns => "(cp - group) * {width}".replace("{width}", &width.to_string()),
                Stream::Rows => format!(
                    "(rp - group) * {} + (cp - wide) * {width}",
                    plan.rows * workspace.block_ld
                ),
            }
        } else {
            "row * ldc + col".to_owned()
        };
        let tile = format!(
            "const int64_t row = {row}, col = cp * {width};\nconst \
             {factor} *tile_a = {a_place};\nconst {factor} *tile_b = {b_place};\n{real} *target = base + {at};\n{calls}"
        );
        // The epilogue runs over several column panels at once: over rows long enough for caches to run ahead of it.
        let finish = |from: &str, end: &str, at: &str| {
            if plan.in_result {
                return String::new();
            }
            let place = if block == "block" { at } else { "row * ldc + col" };
            let test = if plan.cuts > 1 { "if (args->to_end) " } else { "" };
            format!(
                "{test}{{\n    const int64_t row = {row}, rows = {rows}, col = {from} * {width}, ends = {end} * {width} < {n} ? {end} * \
                 {width} : {n};\n    {name}_finish(args, batch, base + {place}, ldc, row, rows, col, ends - col);\n}}\n"
            )
        };
        let work = match plan.stream {
            Stream::Columns => format!(
                "for (int64_t rp = 0; rp < {}; rp++) {{\n    for (int64_t cp = group; cp < group_end; cp++) {{\n{}    }}\n{}}}\n",
                plan.row_panels,
                indent(&tile, 8),
                indent(&finish("group", "group_end", "0"), 4)
            ),
            Stream::Rows => {
                let inner = format!(
                    "for (int64_t rp = group; rp < group_end; rp++) {{\n{}}}\n",
                    indent(&tile, 4)
                );
                let finish = finish(
                    "wide",
                    "wide_end",
                    &format!("(rp - group) * {}", plan.rows * workspace.block_ld),
                );
                if finish.is_empty() {
                    format!(
                        "for (int64_t cp = 0; cp < {}; cp++)\n{}",
                        plan.column_panels,
                        indent(&inner, 4)
                    )
                } else {
                    format!(
                        "for (int64_t wide = 0; wide < {panels}; wide += {WIDE}) {{\n    const int64_t wide_end = wide + {WIDE} < \
                         {panels} ? wide + {WIDE} : {panels};\n    for (int64_t cp = wide; cp < wide_end; cp++)\n{}    for (int64_t rp \
                         = group; rp < group_end; rp++)\n{}}}\n",
                        indent(&inner, 8),
                        indent(&finish, 8),
                        panels = plan.column_panels,
                    )
                }
            }
        };
        let own = |offset: usize, each: usize| match plan.parallel {
            Parallel::Panels => format!("args->workspace + {offset} + thread * {each}"),
            _ => format!("args->workspace + {offset}"),
        };
        let block_at = if block == "block" {
            format!(
                "    {real} *block = ({real} *)({});\n",
                own(workspace.block, workspace.block_each)
            )
        } else {
            String::new()
        };
        format!(
            "static void {name}_panels(void *ctx, int64_t begin, int64_t end, int thread) {{\n    const struct {name}_args \
             *args = ctx;\n{}    const int64_t batch = args->batch, ldc = {ldc};\n    const {factor} *stationary = (const {factor} \
             *)(args->workspace + {});\n    {factor} *streamed = ({factor} *)({});\n{block_at}    {real} *base = {block};\n    for (int64_t \
             group = begin; group < end; group += {group}) {{\n        const int64_t group_end = group + {group} < end ? group + \
             {group} : end;\n{}{}    }}\n}}\n",
            unpack(params),
            workspace.stationary,
            own(workspace.streamed, workspace.streamed_each),
            indent(&pack_streamed, 8),
            indent(&work, 8),
            group = plan.group,
        )
    }

    /// The loops over batch and depth cuts, and the kernel itself.
    fn entry(&self, head: &str) -> String {
        let GemmSpec {
            name, batch, params, ..
        } = self.spec;
        let (plan, workspace) = (self.plan, self.workspace);
        let run = |part: &str, panels: usize| match plan.parallel {
            Parallel::Panels => {
                format!("rt->parallel_for(rt->pool, {panels}, 1, {name}_{part}, &args);\n")
            }
            _ => format!("{name}_{part}(&args, 0, {panels}, 0);\n"),
        };
        let mut once = String::new();
        if self.stationary_packed() {
            once.push_str(&run("stationary", self.stationary_panels()));
        }
        once.push_str(&run("panels", self.streamed_panels()));
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
        let initial = format!(
            "{}.workspace = workspace, .start = 0, .depth = {}, .from_zero = 1, .to_end = 1",
            pack_fields(params),
            plan.depth
        );
        if plan.parallel == Parallel::Batch {
            return format!(
                "static void {name}_batch(void *ctx, int64_t begin, int64_t end, int thread) {{\n    struct {name}_args args \
                 = *(const struct {name}_args *)ctx;\n    args.workspace += thread * {};\n    for (int64_t batch = begin; \
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

/// `name_finish(args, batch, tile, ld, row, rows, col, cols)`: the epilogue of one tile; `rest` says whether some tiles end within
/// a vector.
pub(super) fn finish(spec: &GemmSpec<'_>, lanes: usize, rest: bool) -> String {
    let GemmSpec {
        name,
        epilogue,
        params,
        ..
    } = spec;
    let element = spec.element();
    let real = element.ctype();
    let body = match &epilogue.code {
        Some(code) => finish_tile(code, rest, lanes),
        None => finish_elements(epilogue, element, lanes),
    };
    format!(
        "/* Consumes a finished tile of the result. */\nstatic __attribute__((noinline)) void {name}_finish(const struct {name}_args \
         *args, int64_t batch,\n        const {real} *tile, int64_t ld, int64_t row, int64_t rows, int64_t col, \
         int64_t cols) {{\n{}{body}}}\n",
        unpack(params),
    )
}

/// The loops over a tile of f32 around the caller's statements for tiles.
fn finish_tile(code: &TileCode, partial: bool, lanes: usize) -> String {
    let TileCode {
        tile,
        row,
        vector,
        rest,
        ..
    } = code;
    let rest = if !partial {
        String::new()
    } else {
        format!(
            "    if (j < col + cols) {{\n        const int64_t left = col + cols - j;\n        const vf sum = vf_load(tile + (i - row) \
             * ld + (j - col));\n{}    }}\n",
            indent(rest, 8)
        )
    };
    let body = format!(
        "{tile}for (int64_t i = row; i < row + rows; i++) {{\n{}    int64_t j = col;\n    for (; j + {lanes} <= col + cols; j += \
         {lanes}) {{\n        const vf sum = vf_load(tile + (i - row) * ld + (j - col));\n{}    }}\n{rest}}}\n",
        indent(row, 4),
        indent(vector, 8)
    );
    indent(&body, 4)
}

/// The loops over a tile around the caller's statements for elements and vectors.
fn finish_elements(epilogue: &Epilogue<'_>, element: Element, lanes: usize) -> String {
    let (real, vf) = (element.ctype(), element.vector());
    let each = |width| {
        indent(
            &(epilogue.consume)(&Result {
                width,
                batch: "batch",
                row: "i",
                col: "j",
                value: "sum",
            }),
            12,
        )
    };
    let vectors = if epilogue.contiguous.is_some() {
        format!(
            "        for (; j + {lanes} <= col + cols; j += {lanes}) {{\n            {vf} sum = {vf}_load(tile + (i - row) * ld + (j - \
             col));\n{}        }}\n",
            each(Width::Vector)
        )
    } else {
        String::new()
    };
    format!(
        "    for (int64_t i = row; i < row + rows; i++) {{\n        int64_t j = col;\n{vectors}        for (; j < col + cols; j++) \
         {{\n            {real} sum = tile[(i - row) * ld + (j - col)];\n{}        }}\n    }}\n",
        each(Width::Scalar)
    )
}
