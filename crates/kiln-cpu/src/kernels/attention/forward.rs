//! The forward kernel.

use std::collections::BTreeSet;

use super::masks::MaskRows;
use super::memory::Memory;
use super::pack::{Rows, copy_rows, store_rows, turn_rows};
use super::pairs;
use super::plan::{AttentionPlan, PANEL, Product, product};
use super::rows::{self, Dropout, Words};
use super::visible_keys::{Strip, VisibleKeys};
use super::{AttentionSpec, Skips, View, section};
use crate::isa::Isa;
use crate::kernels::tile::Access;
use crate::kernels::{Helper, KernelText, fields, finish_kernel, indent, run_part, unpack};

/// A thread's working memory, and the parts of it that masks and the counts of visible keys take.
fn memory(spec: &AttentionSpec, plan: &AttentionPlan) -> (Memory, MaskRows, VisibleKeys) {
    let e = &spec.extents;
    let (real, factor) = (plan.element.ctype(), plan.factor.ctype());
    let mut memory = Memory::new();
    memory.part(factor, "turned", plan.turned(e.keys, e.width));
    memory.part(factor, "values", plan.steps(e.keys) * plan.value_width);
    memory.part(factor, "queries", plan.block * plan.pitch(e.width, plan.width));
    memory.part(real, "strip", plan.block * plan.ld);
    memory.part(real, "sums", plan.block * plan.value_width);
    let mask_rows = MaskRows::new(spec, plan, &mut memory);
    let visible = VisibleKeys::new(spec, plan, "full", &mut memory);
    if spec.dropout {
        memory.part(real, "kept", plan.ld + 3 * plan.lanes);
    }
    (memory, mask_rows, visible)
}

/// Bytes of working memory of the kernel that [`forward`] would write.
pub fn forward_workspace(spec: &AttentionSpec, isa: Isa) -> usize {
    memory(spec, &AttentionPlan::new(spec, isa)).0.bytes() * spec.threads
}

/// `out = softmax(query key^T * scale, masked) value` and the statistics.
pub fn forward(spec: &AttentionSpec, out: &View, isa: Isa) -> KernelText {
    let plan = AttentionPlan::new(spec, isa);
    let (memory, mask_rows, visible) = memory(spec, &plan);
    let (declare, each) = memory.finish();
    let mut emitter = Emitter {
        spec,
        plan: &plan,
        mask_rows,
        visible,
        helpers: BTreeSet::new(),
    };
    let source = emitter.source(out, &declare);
    let e = &spec.extents;
    let units = e.batch * e.heads * plan.blocks;
    let calls = run_part(plan.serial)(&format!("{}_blocks", spec.name), units);
    let mut kernel = finish_kernel(&spec.name, &spec.params, source, &calls, each * spec.threads);
    kernel.helpers = emitter.helpers.into_iter().collect();
    kernel
}

/// Writes the stages of the forward kernel.
struct Emitter<'a> {
    spec: &'a AttentionSpec,
    plan: &'a AttentionPlan,
    mask_rows: MaskRows,
    visible: VisibleKeys,
    /// The functions that the stages call.
    helpers: BTreeSet<Helper>,
}

impl<'a> Emitter<'a> {
    /// `name_blocks(ctx, begin, end, thread)`: blocks of query rows, whose memory `declare` declares.
    fn source(&mut self, out: &View, declare: &str) -> String {
        let (spec, plan) = (self.spec, self.plan);
        let (e, name, tile) = (&spec.extents, &spec.name, plan.tile);
        let [look, open, again, close] = self.second_try();
        let keys = section(
            "Keys, transposed, and values: once for a head.",
            &self.pack_keys(),
        );
        let by_head = self
            .mask_rows
            .once("if (masked != plane) {\n    masked = plane;\n");
        let stages = [
            by_head,
            self.visible.by_head.clone(),
            open,
            self.visible.by_block.clone(),
            section("Queries, scaled.", &self.load_queries()),
            section("Scores.", &self.scores()),
            section(
                "Scores become weights; statistics of each row.",
                &self.each_row(&look),
            ),
            again,
            section("Weighted sums of the values.", &self.sums()),
            section(
                "Results: the sums divided by those of the weights.",
                &self.store(out),
            ),
            close,
        ];
        let stages: String = stages.iter().map(|stage| indent(stage, 8)).collect();
        let [begin, end] = plan.around_tiles();
        format!(
            "/* Attention: {}; blocks of {} rows, tiles of {tile}. */\nstruct {name}_args {{\n{}    char *workspace;\n}};\nstatic void {name}_blocks(void \
             *ctx, int64_t begin, int64_t end, int thread) {{\n    const struct {name}_args *args = ctx;\n{}{}{declare}    int64_t packed = -1, masked = -1, looked = -1;\n    (void)masked, (void)looked;\n{begin}    \
             for (int64_t unit = begin; unit < end; unit++) {{\n        const int64_t row0 = unit % {blocks} * {block}, plane = unit / {blocks};\n        const \
             int64_t batch = plane / {heads}, head = plane % {heads}, group = head / {share};\n        const int64_t rows = {queries} - row0 < {block} ? \
             {queries} - row0 : {block}, tiles = (rows + {tile} - 1) / {tile};\n        if (packed != batch * {groups} + group) {{\n            packed = batch * \
             {groups} + group;\n{}        }}\n{stages}    }}\n{end}}}\n",
            spec.shape_text(),
            plan.block,
            fields(&spec.params),
            unpack(&spec.params),
            spec.read_numbers(),
            indent(&keys, 12),
            blocks = plan.blocks,
            block = plan.block,
            heads = e.heads,
            share = e.heads / e.key_heads,
            groups = e.key_heads,
            queries = e.queries,
        )
    }

    /// Packs the keys and values of a head.
    fn pack_keys(&self) -> String {
        let (spec, plan) = (self.spec, self.plan);
        let (e, lanes) = (&spec.extents, plan.lanes);
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
        let value_rows = Rows {
            view: &spec.value,
            width: e.value_width,
            pitch: plan.value_width,
            ..key_rows
        };
        match plan.pairs() {
            true => {
                let (deep, steps) = (plan.steps(e.width), plan.steps(e.keys).to_string());
                pairs::turn(&key_rows, e.keys, deep, "turned", PANEL * lanes, lanes)
                    + &pairs::zip(&value_rows, "values", &steps, lanes)
            }
            false => {
                turn_rows(&key_rows, e.keys, "turned", PANEL * lanes, lanes)
                    + &copy_rows(&value_rows, "values", &all_keys, "", lanes)
            }
        }
    }

    /// The query rows of a block.
    fn block_rows(&self) -> Rows<'a> {
        let (spec, plan) = (self.spec, self.plan);
        Rows {
            view: &spec.query,
            storage: spec.storage,
            head: "head",
            first: "row0",
            rows: "rows",
            width: spec.extents.width,
            pitch: plan.pitch(spec.extents.width, plan.width),
        }
    }

    /// Copies and scales the queries of a block. Pairs of bf16 are not scaled, because that would round
    /// them once more: their scores are scaled instead.
    fn load_queries(&self) -> String {
        let (rows, all_rows) = (self.block_rows(), format!("tiles * {}", self.plan.tile));
        match self.plan.pairs() {
            true => pairs::copy(&rows, "queries", &all_rows),
            false => copy_rows(&rows, "queries", &all_rows, "scale", self.plan.lanes),
        }
    }

    /// The product of queries and keys.
    fn scores(&mut self) -> String {
        let rows = self.block_rows();
        let strip = Strip {
            rows: "queries",
            pitch: rows.pitch,
            width: rows.width,
            panels: "turned",
            to: "strip",
        };
        self.visible
            .product(self.spec, self.plan, &strip, &mut self.helpers)
    }

    /// If some row of a block must take all keys, the block is computed again. The texts for that: the test
    /// after each row (`look`), the beginning of the loop around the block, the test after the last row,
    /// the end of the loop.
    fn second_try(&self) -> [String; 4] {
        let spec = self.spec;
        if spec.skips != Skips::Mostly {
            return Default::default();
        }
        let most = format!("({})[0]", spec.stats_of("row"));
        [
            format!(
                "low |= n < {} && {};\n",
                spec.extents.keys,
                spec.fill_counts(&most)
            ),
            section(
                "Once more with all keys if some row scores nearly as low as what is hidden from it.",
                "for (int full = 0, low = 0; full < 2; full++) {\n",
            ),
            "if (low && !full) continue;\n".to_owned(),
            "break;\n}\n".to_owned(),
        ]
    }

    /// Turns the scores of each row into weights; `look` runs behind them.
    fn each_row(&mut self, look: &str) -> String {
        let (spec, plan) = (self.spec, self.plan);
        let (masks, words) = (self.mask_rows.masks, Words::of(plan));
        let weights = rows::weights(masks, spec.safe, plan.pairs(), words, &mut self.helpers);
        let scale = if plan.pairs() { "scale, " } else { "" };
        let dropout = Dropout::new(spec, plan, &mut self.helpers);
        let dropped = dropout.times("x", "factor");
        let (of_scores, of_weights) = if spec.drop_scores {
            (dropped.as_str(), "")
        } else {
            ("", dropped.as_str())
        };
        format!(
            "for (int64_t r = 0; r < rows; r++) {{\n    const int64_t row = row0 + r, n = {};\n    {real} *x = strip + r * {ld};\n{}{}{}    {weights}(x, n, end, {}{scale}{});\n{}{}{}}}\n",
            self.visible.row,
            indent(&self.mask_rows.by_row, 4),
            indent(&dropout.draw, 4),
            indent(of_scores, 4),
            masks.arguments(),
            spec.stats_of("row"),
            indent(look, 4),
            indent(of_weights, 4),
            match plan.pairs() {
                true => indent(&pairs::round_row("x", "(bf16_pair *)x", plan.lanes), 4),
                false => String::new(),
            },
            real = plan.element.ctype(),
            ld = plan.ld,
        )
    }

    /// The product of weights and values.
    fn sums(&mut self) -> String {
        let (plan, tile) = (self.plan, self.plan.tile);
        let strip = match plan.pairs() {
            true => format!("(const {} *)strip", plan.factor.ctype()),
            false => "strip".to_owned(),
        };
        product(
            plan,
            &Product {
                a: &format!("{strip} + i * {}", tile * plan.ld),
                a_access: Access::Strided {
                    free: plan.ld as i64,
                    depth: 1,
                },
                b_access: Access::Strided {
                    free: 1,
                    depth: plan.value_width as i64,
                },
                b: "values + j",
                depth: &plan.steps_of(self.visible.tile),
                c: &format!("sums + i * {} + j", tile * plan.value_width),
                ldc: plan.value_width,
                accumulate: false,
                tiles: "tiles",
                before: "",
                columns: plan.value_width,
            },
            &mut self.helpers,
        )
    }

    /// Stores the results of a block.
    fn store(&self, out: &View) -> String {
        let rows = Rows {
            view: out,
            width: self.spec.extents.value_width,
            pitch: self.plan.value_width,
            ..self.block_rows()
        };
        let share = format!("1.0f / ({})[1]", self.spec.stats_of("row0 + r"));
        store_rows(&rows, "sums", &share, self.plan.lanes)
    }
}
