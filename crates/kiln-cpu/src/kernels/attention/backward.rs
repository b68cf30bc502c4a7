//! The gradient kernel.

use std::collections::BTreeSet;

use super::masks::MaskRows;
use super::memory::Memory;
use super::pack::{Rows, copy_rows, store_rows, turn_rows};
use super::pairs;
use super::plan::{AttentionPlan, PANEL, Product, product};
use super::rows::{self, Dropout, Words};
use super::visible_keys::{Strip, VisibleKeys};
use super::{AttentionSpec, View, section};
use crate::isa::Isa;
use crate::kernels::element::Factor;
use crate::kernels::tile::Access;
use crate::kernels::{Helper, KernelText, fields, finish_kernel, indent, round_up, run_part, unpack};

/// The operands that only the gradient reads, and its results.
pub struct Gradients {
    /// Gradient of the result.
    pub d_out: View,
    /// Gradient of the queries.
    pub d_query: View,
    /// Gradient of the keys.
    pub d_key: View,
    /// Gradient of the values.
    pub d_value: View,
}

/// A thread's working memory, and the parts of it that masks and the counts of visible keys take.
fn memory(spec: &AttentionSpec, plan: &AttentionPlan) -> (Memory, MaskRows, VisibleKeys) {
    let e = &spec.extents;
    let (real, factor) = (plan.element.ctype(), plan.factor.ctype());
    let mut memory = Memory::new();
    memory.part(factor, "turned_keys", plan.turned(e.keys, e.width));
    memory.part(factor, "turned_values", plan.turned(e.keys, e.value_width));
    memory.part(factor, "keys", plan.steps(e.keys) * plan.width);
    memory.part(factor, "queries", plan.block * plan.pitch(e.width, plan.width));
    memory.part(
        factor,
        "outs",
        plan.block * plan.pitch(e.value_width, plan.value_width),
    );
    if plan.pairs() {
        memory.part(factor, "zipped_queries", plan.steps(plan.block) * plan.width);
        memory.part(factor, "zipped_outs", plan.steps(plan.block) * plan.value_width);
        memory.part(factor, "d_pairs", plan.block * plan.pair_ld());
    }
    memory.part(real, "strip", plan.block * plan.ld);
    memory.part(real, "d_strip", plan.block * plan.ld);
    memory.part(real, "d_queries", plan.block * plan.width);
    memory.part(real, "d_keys", plan.key_rows * plan.width);
    memory.part(real, "d_values", plan.key_rows * plan.value_width);
    if plan.tiles() {
        let half = plan.steps(plan.block);
        for (name, sums, pitch) in [
            ("turned_queries", "turned_d_keys", plan.width),
            ("turned_outs", "turned_d_values", plan.value_width),
        ] {
            let rows = round_up(pitch, plan.tile);
            memory.part(factor, name, rows * half);
            memory.part(real, sums, rows * plan.ld);
        }
    }
    let mask_rows = MaskRows::new(spec, plan, &mut memory);
    let most = format!("({})[0]", spec.stats_of("row0 + r"));
    let visible = VisibleKeys::new(spec, plan, &spec.fill_counts(&most), &mut memory);
    if spec.dropout {
        memory.part(real, "kept", plan.ld + 3 * plan.lanes);
    }
    (memory, mask_rows, visible)
}

/// Bytes of working memory of the kernel that [`gradient`] would write.
pub fn gradient_workspace(spec: &AttentionSpec, isa: Isa) -> usize {
    memory(spec, &AttentionPlan::new(spec, isa)).0.bytes() * spec.threads
}

/// Gradients of queries, keys and values.
pub fn gradient(spec: &AttentionSpec, tensors: &Gradients, isa: Isa) -> KernelText {
    let plan = AttentionPlan::new(spec, isa);
    let (memory, mask_rows, visible) = memory(spec, &plan);
    let (declare, each) = memory.finish();
    let mut emitter = Emitter {
        spec,
        tensors,
        plan: &plan,
        mask_rows,
        visible,
        all_keys: spec.extents.keys.to_string(),
        helpers: BTreeSet::new(),
    };
    let source = emitter.source(&declare);
    let units = spec.extents.batch * spec.extents.key_heads;
    let calls = run_part(plan.serial)(&format!("{}_heads", spec.name), units);
    let mut kernel = finish_kernel(&spec.name, &spec.params, source, &calls, each * spec.threads);
    kernel.helpers = emitter.helpers.into_iter().collect();
    kernel
}

/// How long the rows of a tensor are, and how far apart their copies lie.
#[derive(Clone, Copy)]
struct RowSize {
    /// Elements.
    width: usize,
    /// From one row to the next, in factors (elements or pairs).
    pitch: usize,
}

/// Writes the stages of the gradient kernel.
struct Emitter<'a> {
    spec: &'a AttentionSpec,
    tensors: &'a Gradients,
    plan: &'a AttentionPlan,
    mask_rows: MaskRows,
    visible: VisibleKeys,
    /// The number of keys, as text.
    all_keys: String,
    /// The functions that the stages call.
    helpers: BTreeSet<Helper>,
}

impl<'a> Emitter<'a> {
    /// `name_heads(ctx, begin, end, thread)`: heads of keys, whose memory `declare` declares.
    fn source(&mut self, declare: &str) -> String {
        let (spec, plan) = (self.spec, self.plan);
        let (e, name, tile) = (&spec.extents, &spec.name, plan.tile);
        let pack = section(
            "Keys and values, as they are and transposed; their gradients start from zero.",
            &(self.pack_keys() + &self.zero_sums()),
        );
        let stages = [
            self.mask_rows.once("if (row0 == 0) {\n"),
            self.visible.by_head.clone(),
            self.visible.by_block.clone(),
            section(
                "Queries, and the gradient of their results.",
                &self.load_queries(),
            ),
            section(
                "Products with keys, and the gradient of the weights.",
                &self.strips(),
            ),
            section(
                "Products become weights, the gradient of weights that of scores.",
                &self.each_row(),
            ),
            section("Gradient of the queries.", &self.query_gradient()),
            section(
                "The share of these rows in the gradients of values and keys.",
                &self.collect_all(),
            ),
        ];
        let stages: String = stages.iter().map(|stage| indent(stage, 12)).collect();
        let stored = section("Gradients of keys and values.", &self.store_keys());
        let [before, after] = plan.around_tiles();
        format!(
            "/* Gradient of attention: {}; blocks of {block} rows, tiles of {tile}. */\nstruct {name}_args {{\n{}    char *workspace;\n}};\nstatic void \
             {name}_heads(void *ctx, int64_t begin, int64_t end, int thread) {{\n    const struct {name}_args *args = ctx;\n{}{}{declare}    int64_t looked = -1;\n    (void)looked;\n{before}    for (int64_t unit = \
             begin; unit < end; unit++) {{\n        const int64_t batch = unit / {groups}, group = unit % {groups};\n{}        for (int64_t part = 0; part < \
             {share} * {blocks}; part++) {{\n            const int64_t head = group * {share} + part / {blocks}, row0 = part % {blocks} * {block};\n            \
             const int64_t rows = {queries} - row0 < {block} ? {queries} - row0 : {block}, tiles = (rows + {tile} - 1) / {tile};\n{stages}        }}\n{}    }}\n{after}}}\n",
            spec.shape_text(),
            fields(&spec.params),
            unpack(&spec.params),
            spec.read_numbers(),
            indent(&pack, 8),
            indent(&stored, 8),
            groups = e.key_heads,
            share = e.heads / e.key_heads,
            blocks = plan.blocks,
            block = plan.block,
            queries = e.queries,
        )
    }

    /// Size of rows of keys and queries.
    fn key_size(&self) -> RowSize {
        RowSize {
            width: self.spec.extents.width,
            pitch: self.plan.width,
        }
    }

    /// Size of rows of values and results.
    fn value_size(&self) -> RowSize {
        RowSize {
            width: self.spec.extents.value_width,
            pitch: self.plan.value_width,
        }
    }

    /// The size of rows that products read as factors.
    fn factors(&self, size: RowSize) -> RowSize {
        RowSize {
            pitch: self.plan.pitch(size.width, size.pitch),
            ..size
        }
    }

    /// All rows of a head of `view`, keys or values.
    fn of_keys<'b>(&'b self, view: &'b View, size: RowSize) -> Rows<'b> {
        Rows {
            view,
            storage: self.spec.storage,
            head: "group",
            first: "0",
            rows: &self.all_keys,
            width: size.width,
            pitch: size.pitch,
        }
    }

    /// The rows of a block of `view`, queries or results.
    fn of_queries<'b>(&self, view: &'b View, size: RowSize) -> Rows<'b> {
        Rows {
            view,
            storage: self.spec.storage,
            head: "head",
            first: "row0",
            rows: "rows",
            width: size.width,
            pitch: size.pitch,
        }
    }

    /// Packs the keys and values of a head.
    fn pack_keys(&self) -> String {
        let (spec, plan, lanes) = (self.spec, self.plan, self.plan.lanes);
        let (count, wide) = (spec.extents.keys, PANEL * plan.lanes);
        let keys = self.of_keys(&spec.key, self.key_size());
        let values = self.of_keys(&spec.value, self.value_size());
        match plan.pairs() {
            true => {
                let [deep, value_deep] = [keys.width, values.width].map(|width| plan.steps(width));
                let steps = plan.steps(count).to_string();
                pairs::turn(&keys, count, deep, "turned_keys", wide, lanes)
                    + &pairs::turn(&values, count, value_deep, "turned_values", wide, lanes)
                    + &pairs::zip(&keys, "keys", &steps, lanes)
            }
            false => {
                turn_rows(&keys, count, "turned_keys", wide, lanes)
                    + &turn_rows(&values, count, "turned_values", wide, lanes)
                    + &copy_rows(&keys, "keys", &self.all_keys, "", lanes)
            }
        }
    }

    /// Sets the gradients of the keys and values of a head to zero.
    fn zero_sums(&self) -> String {
        let (plan, lanes) = (self.plan, self.plan.lanes);
        let vf = plan.element.vector();
        let sums = match plan.tiles() {
            true => [
                ("turned_d_keys", plan.width),
                ("turned_d_values", plan.value_width),
            ]
            .map(|(sums, pitch)| (sums, round_up(pitch, plan.tile) * plan.ld)),
            false => [("d_keys", plan.width), ("d_values", plan.value_width)]
                .map(|(sums, pitch)| (sums, plan.key_rows * pitch)),
        };
        sums.map(|(sums, count)| {
            format!("for (int64_t c = 0; c < {count}; c += {lanes}) {vf}_store({sums} + c, ({vf}){{0}});\n")
        })
        .concat()
    }

    /// Copies the queries of a block and the gradients of its results.
    fn load_queries(&self) -> String {
        let (plan, lanes) = (self.plan, self.plan.lanes);
        let all_rows = format!("tiles * {}", plan.tile);
        let (query, out) = (&self.spec.query, &self.tensors.d_out);
        let queries = self.of_queries(query, self.key_size());
        let outs = self.of_queries(out, self.value_size());
        match plan.pairs() {
            true => {
                let query_factors = self.of_queries(query, self.factors(self.key_size()));
                let out_factors = self.of_queries(out, self.factors(self.value_size()));
                let all_pairs = match plan.tiles() {
                    true => format!("tiles * {}", plan.tile / 2),
                    false => "0".to_owned(),
                };
                let mut text = pairs::zip(&queries, "zipped_queries", &all_pairs, lanes)
                    + &pairs::zip(&outs, "zipped_outs", &all_pairs, lanes)
                    + &pairs::copy(&query_factors, "queries", &all_rows)
                    + &pairs::copy(&out_factors, "outs", &all_rows);
                if plan.tiles() {
                    let half = plan.steps(plan.block);
                    for (name, pitch) in [("queries", plan.width), ("outs", plan.value_width)] {
                        let (zipped, turned) = (format!("zipped_{name}"), format!("turned_{name}"));
                        text += &pairs::turn_zipped(&zipped, &turned, pitch, half, &all_pairs, lanes);
                    }
                }
                text
            }
            false => {
                copy_rows(&queries, "queries", &all_rows, "", lanes)
                    + &copy_rows(&outs, "outs", &all_rows, "", lanes)
            }
        }
    }

    /// The products of queries with keys, and of the gradients of results with values.
    fn strips(&mut self) -> String {
        let (queries, outs) = (self.factors(self.key_size()), self.factors(self.value_size()));
        let mut strip = |rows, panels, size: RowSize, to| {
            let strip = Strip {
                rows,
                pitch: size.pitch,
                width: size.width,
                panels,
                to,
            };
            self.visible
                .product(self.spec, self.plan, &strip, &mut self.helpers)
        };
        strip("queries", "turned_keys", queries, "strip") + &strip("outs", "turned_values", outs, "d_strip")
    }

    /// Turns the strips into probabilities and gradients of scores, row by row.
    fn each_row(&mut self) -> String {
        let (spec, plan, helpers) = (self.spec, self.plan, &mut self.helpers);
        let (ld, masks) = (plan.ld, self.mask_rows.masks);
        let (real, words) = (plan.element.ctype(), Words::of(plan));
        let probabilities = rows::probabilities(masks, words, helpers);
        let score_gradients = rows::score_gradients(masks.hide, words, helpers);
        let dropout = Dropout::new(spec, plan, helpers);
        let (of_products, of_gradients) = (dropout.times("x", "factor"), dropout.times("d", "d_factor"));
        let (before, after) = if spec.drop_scores {
            (of_products, of_gradients)
        } else {
            (of_gradients, of_products)
        };
        let rounded = match plan.pairs() {
            true => pairs::round_strips(plan),
            false => String::new(),
        };
        format!(
            "for (int64_t r = 0; r < rows; r++) {{\n    const int64_t row = row0 + r, n = {};\n    {real} *x = strip + r * {ld}, *d = d_strip + r * {ld};\n{}{}{}    const {real} sum = {probabilities}(x, d, n, scale, \
             {}{});\n    {score_gradients}(x, d, n, end, {}inner * sum, d_scale);\n{}}}\n{rounded}",
            self.visible.row,
            indent(&self.mask_rows.by_row, 4),
            indent(&dropout.draw, 4),
            indent(&before, 4),
            masks.arguments(),
            spec.stats_of("row"),
            if masks.hide { "hide, " } else { "" },
            indent(&after, 4),
        )
    }

    /// The product of gradients of scores and keys, which is stored.
    fn query_gradient(&mut self) -> String {
        let (plan, tile) = (self.plan, self.plan.tile);
        let (d_scores, d_ld) = match plan.pairs() {
            true => ("d_pairs", plan.pair_ld()),
            false => ("d_strip", plan.ld),
        };
        let d_queries = product(
            plan,
            &Product {
                a: &format!("{d_scores} + i * {}", tile * d_ld),
                a_access: Access::Strided {
                    free: d_ld as i64,
                    depth: 1,
                },
                b_access: Access::Strided {
                    free: 1,
                    depth: plan.width as i64,
                },
                b: "keys + j",
                depth: &plan.steps_of(self.visible.tile),
                c: &format!("d_queries + i * {} + j", tile * plan.width),
                ldc: plan.width,
                accumulate: false,
                tiles: "tiles",
                before: "",
                columns: plan.width,
            },
            &mut self.helpers,
        );
        let rows = self.of_queries(&self.tensors.d_query, self.key_size());
        d_queries + &store_rows(&rows, "d_queries", "", plan.lanes)
    }

    /// Adds what the rows of a block contribute to the gradients of values and keys.
    fn collect_all(&mut self) -> String {
        self.collect("strip", "outs", self.plan.value_width, "d_values")
            + &self.collect("d_strip", "queries", self.plan.width, "d_keys")
    }

    /// Adds the product of a transposed strip and `rows`, `pitch` elements apart, to `to`.
    fn collect(&mut self, strip: &str, rows: &str, pitch: usize, to: &str) -> String {
        if self.plan.tiles() {
            return self.collect_turned(strip, rows, pitch, to);
        }
        let (plan, ld, tile) = (self.plan, self.plan.ld, self.plan.tile);
        let (cast, b) = match plan.pairs() {
            true => (
                "(const bf16_pair *)",
                format!("zipped_{rows} + start / 2 * {pitch} + j"),
            ),
            false => ("", format!("{rows} + start * {pitch} + j")),
        };
        product(
            plan,
            &Product {
                a: &format!("{cast}{strip} + start * {ld} + i * {tile}"),
                a_access: Access::Strided {
                    free: 1,
                    depth: (plan.factor.depth() * ld) as i64,
                },
                b_access: Access::Strided {
                    free: 1,
                    depth: pitch as i64,
                },
                b: &b,
                depth: &plan.steps_of("rows - start"),
                c: &format!("{to} + i * {} + j", tile * pitch),
                ldc: pitch,
                accumulate: true,
                tiles: &(plan.key_rows / tile).to_string(),
                before: &self.first_row(&format!("i * {tile}")),
                columns: pitch,
            },
            &mut self.helpers,
        )
    }

    /// The same in tiles, whose rows lie along the depth: the sums are transposed. Transposed rows times the
    /// strip, whose pairs of rows are a B as they are.
    fn collect_turned(&mut self, strip: &str, rows: &str, pitch: usize, to: &str) -> String {
        let (plan, ld, tile) = (self.plan, self.plan.ld, self.plan.tile);
        let half = plan.steps(plan.block);
        product(
            plan,
            &Product {
                a: &format!("turned_{rows} + i * {} + start / 2", tile * half),
                a_access: Access::Strided {
                    free: half as i64,
                    depth: 1,
                },
                b_access: Access::Strided {
                    free: 1,
                    depth: 2 * ld as i64,
                },
                b: &format!("(const bf16_pair *){strip} + start * {ld} + j"),
                depth: &plan.steps_of("rows - start"),
                c: &format!("turned_{to} + i * {} + j", tile * ld),
                ldc: ld,
                accumulate: true,
                tiles: &pitch.div_ceil(tile).to_string(),
                before: &self.first_row("j"),
                columns: round_up(self.spec.extents.keys, plan.lanes),
            },
            &mut self.helpers,
        )
    }

    /// Statements that find `start`, the first row of the block that sees `key` (a C expression) or one
    /// behind it.
    fn first_row(&self, key: &str) -> String {
        if !self.spec.varies() {
            return "const int64_t start = 0;".to_owned();
        }
        // Pairs of rows begin at even ones, and tiles of pairs where they do.
        let even = match self.plan.factor {
            Factor::Bf16Tile => "\n        start &= ~INT64_C(31);",
            Factor::Bf16Pair => "\n        start &= ~INT64_C(1);",
            _ => "",
        };
        format!(
            "int64_t start = 0;\n        while (start < rows && n_of[start] <= {key}) start++;\n        if (start == rows) continue;{even}"
        )
    }

    /// Stores the gradients of the keys and values of a head.
    fn store_keys(&self) -> String {
        let (tensors, lanes) = (self.tensors, self.plan.lanes);
        let keys = self.of_keys(&tensors.d_key, self.key_size());
        let values = self.of_keys(&tensors.d_value, self.value_size());
        self.turn_sums()
            + &store_rows(&keys, "d_keys", "", lanes)
            + &store_rows(&values, "d_values", "", lanes)
    }

    /// Transposes the gradients of keys and values that tiles added up.
    fn turn_sums(&self) -> String {
        let (plan, lanes) = (self.plan, self.plan.lanes);
        if !plan.tiles() {
            return String::new();
        }
        let (ld, keys) = (plan.ld, self.spec.extents.keys);
        let turn = |(to, pitch): (&str, usize)| {
            format!(
                "for (int64_t j = 0; j < {keys}; j += {lanes})\n    for (int64_t c = 0; c < {pitch}; c += {lanes}) {{\n        vf line[{lanes}];\n        \
                 KILN_UNROLL for (int l = 0; l < {lanes}; l++) line[l] = vf_load(turned_{to} + (c + l) * {ld} + j);\n        vf_transpose(line);\n        \
                 KILN_UNROLL for (int l = 0; l < {lanes}; l++) vf_store({to} + (j + l) * {pitch} + c, line[l]);\n    }}\n"
            )
        };
        [("d_keys", plan.width), ("d_values", plan.value_width)]
            .map(turn)
            .concat()
    }
}
