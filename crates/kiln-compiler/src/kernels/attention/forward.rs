//! The forward kernel.

use std::collections::BTreeSet;

use kiln_cpu::Isa;

use super::pack::{Rows, copy_rows, store_rows, turn_rows};
use super::plan::{PANEL, Plan, Product, product};
use super::rows::{self, Masks, Words};
use super::{AttentionSpec, Skips, View, section};
use crate::kernels::tile::Access;
use crate::kernels::{Helper, Kernel, Width, fields, finish_kernel, indent, round_up, run_part, unpack};

/// Parts of a thread's memory, each at a multiple of a vector.
pub(super) struct Memory {
    declarations: String,
    bytes: usize,
}

impl Memory {
    pub fn new() -> Self {
        Self {
            declarations: String::new(),
            bytes: 0,
        }
    }

    /// `ctype *name` for `count` elements, and a vector more.
    pub fn part(&mut self, ctype: &str, name: &str, count: usize) {
        let size = match ctype {
            "double" | "int64_t" => 8,
            _ => 4,
        };
        self.declarations.push_str(&format!(
            "    {ctype} *{name} = ({ctype} *)(own + {});\n",
            self.bytes
        ));
        self.bytes += round_up(count * size, 64) + 64;
    }

    /// The declarations, and the bytes of one thread.
    pub fn finish(self) -> (String, usize) {
        let own = format!(
            "    char *own = args->workspace + thread * INT64_C({});\n",
            self.bytes
        );
        (own + &self.declarations, self.bytes)
    }
}

/// Memory for masks of a row, and the statements that fill it: once for a head where the row does not matter, else for each row `i`.
pub(super) struct MaskRows {
    pub masks: Masks,
    by_head: String,
    pub by_row: String,
}

impl MaskRows {
    pub fn new(spec: &AttentionSpec, plan: &Plan, memory: &mut Memory) -> Self {
        let (mut by_head, mut by_row) = (String::new(), String::new());
        let keys = spec.extents.keys;
        let mut add = |view: &View, ctype: &str, vector: &str, statement: &str| {
            let per_row = view.strides[2] != 0 && spec.extents.queries > 1;
            let whole = if view.strides[3] == 1 {
                keys / plan.lanes * plan.lanes
            } else {
                0
            };
            let mut text = format!(
                "{{\n    const {ctype} *from = {} + {} * {};\n",
                view.head("batch", "head"),
                if per_row { "row" } else { "0" },
                view.strides[2],
            );
            if whole > 0 {
                text.push_str(&format!(
                    "    for (int64_t j = 0; j < {whole}; j += {}) {vector};\n",
                    plan.lanes
                ));
            }
            if whole < keys {
                text.push_str(&format!(
                    "    for (int64_t j = {whole}; j < {keys}; j++) {};\n",
                    statement.replace('@', &format!("from + j * {}", view.strides[3])),
                ));
            }
            text.push_str("}\n");
            if per_row { &mut by_row } else { &mut by_head }.push_str(&text);
        };
        let element = plan.element;
        let (vf, vi) = (element.vector(), element.integers());
        if let Some((mask, storage)) = &spec.mask {
            memory.part(element.ctype(), "bias", plan.ld);
            add(
                mask,
                storage.ctype(),
                &format!(
                    "{vf}_store(bias + j, {})",
                    storage.load(Width::Vector, "from + j")
                ),
                &format!("bias[j] = {}", storage.load(Width::Scalar, "@")),
            );
        }
        if let Some(hidden) = &spec.hidden {
            memory.part(element.integer(), "hide", plan.ld);
            add(
                hidden,
                "uint8_t",
                &format!("{vi}_store(hide + j, {vi}_mask_u8(from + j))"),
                "hide[j] = *(@) ? -1 : 0",
            );
        }
        let masks = Masks {
            bias: spec.mask.is_some(),
            hide: spec.hidden.is_some(),
            bias_last: spec.mask_last,
        };
        Self {
            masks,
            by_head,
            by_row,
        }
    }
}

impl MaskRows {
    /// What is filled once for a head, in a block that `open` opens.
    pub fn once(&self, open: &str) -> String {
        if self.by_head.is_empty() {
            return String::new();
        }
        let block = format!("{open}{}}}\n", indent(&self.by_head, 4));
        section("Masks that all rows of a head share.", &block)
    }
}

/// How many keys each row sees, where that varies: `n_of` by row of a block, `limit_of` the most of each tile, `most` of all. Zeros of
/// strips reach to `end`.
pub(super) struct Seen {
    /// Statements when the plane of the mask may have changed.
    pub by_head: String,
    /// Statements at the start of a block.
    pub by_block: String,
    /// C expression for row `r` of a block.
    pub row: &'static str,
    /// C expression for tile `i` of a block.
    pub tile: &'static str,
}

impl Seen {
    /// `all` is a C condition for row `row0 + r` to take all keys where hidden ones are left out mostly.
    pub fn new(spec: &AttentionSpec, plan: &Plan, all: &str, memory: &mut Memory) -> Self {
        let e = &spec.extents;
        let (queries, keys, ld, tile) = (e.queries as i64, e.keys as i64, plan.ld, plan.tile);
        if !spec.varies() {
            return Self {
                by_head: String::new(),
                by_block: format!("const int64_t end = {ld}, most = {keys};\n"),
                row: "most",
                tile: "most",
            };
        }
        let mut by_head = String::new();
        let mut bounds = format!("int64_t n = {keys};\n");
        if let Some(hidden) = spec.hidden.as_ref().filter(|_| spec.skips != Skips::Never) {
            memory.part("int32_t", "last", e.queries);
            by_head = last_seen(spec, hidden);
            bounds = match spec.skips {
                Skips::Mostly => format!("int64_t n = {all} ? {keys} : last[row0 + r];\n"),
                _ => "int64_t n = last[row0 + r];\n".into(),
            };
        }
        if spec.causal {
            let ahead = keys - queries + 1;
            bounds.push_str(&format!(
                "if (row0 + r + {ahead} < n) n = row0 + r + {ahead};\nif (n < 0) n = 0;\n"
            ));
        }
        let by_block = format!(
            "/* How many keys each row sees, and each tile of rows. */\nint32_t n_of[{}], limit_of[{}] = {{0}};\nint64_t most = 0;\nfor (int64_t r = 0; r < rows; r++) {{\n{}    n_of[r] = (int32_t)n;\n    if \
             (limit_of[r / {tile}] < n) limit_of[r / {tile}] = (int32_t)n;\n    if (most < n) most = n;\n}}\nconst int64_t end = most + {tile} < {ld} ? \
             most + {tile} : {ld};\n",
            plan.block,
            plan.block / tile,
            indent(&bounds, 4),
        );
        Self {
            by_head,
            by_block,
            row: "n_of[r]",
            tile: "limit_of[i]",
        }
    }
}

/// Statements that find `last[row]`, one past the last key that is not hidden from the row, when the plane of the mask changes. A row of
/// which all keys are hidden sees them all, with equal weights.
fn last_seen(spec: &AttentionSpec, hidden: &View) -> String {
    let e = &spec.extents;
    let [of_batch, of_head, of_row, of_key] = hidden.strides;
    let plane = format!(
        "{} + {}",
        if of_batch == 0 {
            "0".into()
        } else {
            format!("batch * {}", e.heads)
        },
        if of_head == 0 { "0" } else { "head" }
    );
    let quick = if of_key == 1 {
        "        for (uint64_t some; n >= 8; n -= 8) {\n            __builtin_memcpy(&some, from + n - 8, 8);\n            if (some != \
         UINT64_C(0x0101010101010101)) break;\n        }\n"
    } else {
        ""
    };
    format!(
        "/* One past the last key that each row sees. */\nif (looked != {plane}) {{\n    looked = {plane};\n    for (int64_t row = 0; row < {queries}; row++) {{\n        const uint8_t *from = {} + row * \
         {of_row};\n        int64_t n = {keys};\n{quick}        while (n > 0 && from[(n - 1) * {of_key}]) n--;\n        last[row] = n > 0 ? (int32_t)n : \
         {keys};\n    }}\n}}\n",
        hidden.head("batch", "head"),
        queries = e.queries,
        keys = e.keys,
    )
}

/// Statements of dropout in the loop over rows.
pub(super) struct Dropout {
    /// Draws for a row.
    pub draw: String,
    exists: bool,
    lanes: usize,
    vf: &'static str,
}

impl Dropout {
    pub fn new(spec: &AttentionSpec, plan: &Plan, helpers: &mut BTreeSet<Helper>) -> Self {
        let e = &spec.extents;
        let draw = if spec.dropout {
            let draws = rows::draws(Words::of(plan), helpers);
            format!(
                "const int64_t draw = ((batch * {} + head) * {} + row) * {};\n{draws}(kept, n, *seed, *stream, draw, keep);\n",
                e.heads, e.queries, e.keys
            )
        } else {
            String::new()
        };
        Self {
            draw,
            exists: spec.dropout,
            lanes: plan.lanes,
            vf: plan.element.vector(),
        }
    }

    /// Drops out of the row `of`, and multiplies what stays by `factor`.
    pub fn times(&self, of: &str, factor: &str) -> String {
        if !self.exists {
            return String::new();
        }
        let Self { lanes, vf, .. } = self;
        format!(
            "for (int64_t j = 0; j < n; j += {lanes}) {vf}_store({of} + j, {vf}_load({of} + j) * {vf}_load(kept + draw % 4 + j) * {factor});\n"
        )
    }
}

/// `out = softmax(query key^T * scale, masked) value` and the statistics.
pub fn forward(spec: &AttentionSpec, out: &View, isa: Isa) -> Kernel {
    let plan = Plan::new(spec, isa);
    let e = &spec.extents;
    let (lanes, tile, ld, name) = (plan.lanes, plan.tile, plan.ld, &spec.name);
    let mut helpers = BTreeSet::new();
    let (real, _) = plan.element.ctypes();
    let words = Words::of(&plan);
    let mut memory = Memory::new();
    memory.part(real, "turned", plan.turned(e.keys, e.width));
    memory.part(real, "values", e.keys * plan.value_width);
    memory.part(real, "queries", plan.block * plan.width);
    memory.part(real, "strip", plan.block * ld);
    memory.part(real, "sums", plan.block * plan.value_width);
    let mask_rows = MaskRows::new(spec, &plan, &mut memory);
    let seen = Seen::new(spec, &plan, "full", &mut memory);
    if spec.dropout {
        memory.part(real, "kept", ld + 3 * lanes);
    }
    let (declare, each) = memory.finish();

    let all_keys = e.keys.to_string();
    let key_rows = Rows {
        view: &spec.key,
        storage: spec.storage,
        head: "group",
        first: "0",
        rows: &all_keys,
        width: e.width,
        pitch: plan.width,
    };
    let keys = turn_rows(&key_rows, e.keys, "turned", PANEL * lanes, lanes)
        + &copy_rows(
            &Rows {
                view: &spec.value,
                width: e.value_width,
                pitch: plan.value_width,
                ..key_rows
            },
            "values",
            &all_keys,
            "",
            lanes,
        );
    let block_rows = Rows {
        view: &spec.query,
        storage: spec.storage,
        head: "head",
        first: "row0",
        rows: "rows",
        width: e.width,
        pitch: plan.width,
    };
    let load = copy_rows(&block_rows, "queries", &format!("tiles * {tile}"), "scale", lanes);
    let scores = scores(
        spec,
        &plan,
        &seen,
        "queries",
        "turned",
        (plan.width, e.width),
        "strip",
        &mut helpers,
    );
    let weights = rows::weights(mask_rows.masks, spec.safe, words, &mut helpers);
    let dropout = Dropout::new(spec, &plan, &mut helpers);
    let dropped = dropout.times("x", "factor");
    let (of_scores, of_weights) = if spec.drop_scores {
        (dropped.as_str(), "")
    } else {
        ("", dropped.as_str())
    };
    // A block of which some row must take all keys is done again.
    let [look, open, again, close] = if spec.skips == Skips::Mostly {
        let most = format!("({})[0]", spec.stats_of("row"));
        [
            format!("low |= n < {} && {};\n", e.keys, spec.fill_counts(&most)),
            section(
                "Once more with all keys if some row scores nearly as low as what is hidden from it.",
                "for (int full = 0, low = 0; full < 2; full++) {\n",
            ),
            "if (low && !full) continue;\n".to_owned(),
            "break;\n}\n".to_owned(),
        ]
    } else {
        Default::default()
    };
    let each_row = format!(
        "for (int64_t r = 0; r < rows; r++) {{\n    const int64_t row = row0 + r, n = {};\n    {real} *x = strip + r * {ld};\n{}{}{}    {weights}(x, n, end, {}{});\n{}{}}}\n",
        seen.row,
        indent(&mask_rows.by_row, 4),
        indent(&dropout.draw, 4),
        indent(of_scores, 4),
        mask_rows.masks.arguments(),
        spec.stats_of("row"),
        indent(&look, 4),
        indent(of_weights, 4),
    );
    let combine = product(
        &plan,
        &Product {
            a: &format!("strip + i * {}", tile * ld),
            a_access: Access::Strided {
                free: ld as i64,
                depth: 1,
            },
            b_access: Access::Strided {
                free: 1,
                depth: plan.value_width as i64,
            },
            b: "values + j",
            depth: seen.tile,
            c: &format!("sums + i * {} + j", tile * plan.value_width),
            ldc: plan.value_width,
            accumulate: false,
            tiles: "tiles",
            before: "",
            columns: plan.value_width,
        },
        &mut helpers,
    );
    let store = store_rows(
        &Rows {
            view: out,
            width: e.value_width,
            pitch: plan.value_width,
            ..block_rows
        },
        "sums",
        &format!("1.0f / ({})[1]", spec.stats_of("row0 + r")),
        lanes,
    );
    let by_head = mask_rows.once("if (masked != plane) {\n    masked = plane;\n");
    let source = format!(
        "/* Attention: {}; blocks of {} rows, tiles of {tile}. */\nstruct {name}_args {{\n{}    char *workspace;\n}};\nstatic void {name}_blocks(void \
         *ctx, int64_t begin, int64_t end, int thread) {{\n    const struct {name}_args *args = ctx;\n{}{}{declare}    int64_t packed = -1, masked = -1, looked = -1;\n    (void)masked, (void)looked;\n    \
         for (int64_t unit = begin; unit < end; unit++) {{\n        const int64_t row0 = unit % {blocks} * {block}, plane = unit / {blocks};\n        const \
         int64_t batch = plane / {heads}, head = plane % {heads}, group = head / {share};\n        const int64_t rows = {queries} - row0 < {block} ? \
         {queries} - row0 : {block}, tiles = (rows + {tile} - 1) / {tile};\n        if (packed != batch * {groups} + group) {{\n            packed = batch * \
         {groups} + group;\n{}        }}\n{}{}{}{}{}{}{}{}{}{}{}    }}\n}}\n",
        spec.shape_text(),
        plan.block,
        fields(&spec.params),
        unpack(&spec.params),
        spec.read_numbers(),
        indent(
            &section("Keys, transposed, and values: once for a head.", &keys),
            12
        ),
        indent(&by_head, 8),
        indent(&seen.by_head, 8),
        indent(&open, 8),
        indent(&seen.by_block, 8),
        indent(&section("Queries, scaled.", &load), 8),
        indent(&section("Scores.", &scores), 8),
        indent(
            &section("Scores become weights; statistics of each row.", &each_row),
            8
        ),
        indent(&again, 8),
        indent(&section("Weighted sums of the values.", &combine), 8),
        indent(
            &section("Results: the sums divided by those of the weights.", &store),
            8
        ),
        indent(&close, 8),
        blocks = plan.blocks,
        block = plan.block,
        heads = e.heads,
        share = e.heads / e.key_heads,
        groups = e.key_heads,
        queries = e.queries,
    );
    let units = e.batch * e.heads * plan.blocks;
    let calls = run_part(plan.serial)(&format!("{name}_blocks"), units);
    let mut kernel = finish_kernel(name, &spec.params, source, &calls, each * spec.threads);
    kernel.helpers = helpers.into_iter().collect();
    kernel
}

/// The product of a block of rows (`pitch` apart, `depth` long) with transposed panels, into a strip; tiles that no row sees are left out.
#[allow(clippy::too_many_arguments)]
pub(super) fn scores(
    spec: &AttentionSpec,
    plan: &Plan,
    seen: &Seen,
    from: &str,
    turned: &str,
    (pitch, depth): (usize, usize),
    strip: &str,
    helpers: &mut BTreeSet<Helper>,
) -> String {
    let tile = plan.tile;
    let before = if spec.varies() {
        format!("if (j >= {}) continue;", seen.tile)
    } else {
        String::new()
    };
    product(
        plan,
        &Product {
            a: &format!("{from} + i * {}", tile * pitch),
            a_access: Access::Strided {
                free: pitch as i64,
                depth: 1,
            },
            b_access: Access::Packed,
            b: &format!("{turned} + j * {depth}"),
            depth: &depth.to_string(),
            c: &format!("{strip} + i * {} + j", tile * plan.ld),
            ldc: plan.ld,
            accumulate: false,
            tiles: "tiles",
            before: &before,
            columns: spec.extents.keys.div_ceil(plan.lanes) * plan.lanes,
        },
        helpers,
    )
}
