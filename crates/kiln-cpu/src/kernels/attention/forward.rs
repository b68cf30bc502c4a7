//! The forward kernel.

use std::collections::BTreeSet;

use super::masks::MaskRows;
use super::memory::Memory;
use super::pack::{Rows, copy_rows, store_rows, turn_rows};
use super::pairs;
use super::plan::{AttentionPlan, PANEL, Product, product};
use super::rows::{self, Dropout, Words};
use super::visible_keys::{VisibleKeys, scores};
use super::{AttentionSpec, Skips, View, section};
use crate::isa::Isa;
use crate::kernels::tile::Access;
use crate::kernels::{KernelText, fields, finish_kernel, indent, run_part, unpack};

/// A thread's working memory, and what finds its way through masks there.
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
    let seen = VisibleKeys::new(spec, plan, "full", &mut memory);
    if spec.dropout {
        memory.part(real, "kept", plan.ld + 3 * plan.lanes);
    }
    (memory, mask_rows, seen)
}

/// Bytes of working memory of the kernel that [`forward`] would write.
pub fn forward_workspace(spec: &AttentionSpec, isa: Isa) -> usize {
    memory(spec, &AttentionPlan::new(spec, isa)).0.bytes() * spec.threads
}

/// `out = softmax(query key^T * scale, masked) value` and the statistics.
pub fn forward(spec: &AttentionSpec, out: &View, isa: Isa) -> KernelText {
    let plan = AttentionPlan::new(spec, isa);
    let e = &spec.extents;
    let (lanes, tile, ld, name) = (plan.lanes, plan.tile, plan.ld, &spec.name);
    let mut helpers = BTreeSet::new();
    let (real, _) = plan.element.ctypes();
    let words = Words::of(&plan);
    let (memory, mask_rows, seen) = memory(spec, &plan);
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
    let value_rows = Rows {
        view: &spec.value,
        width: e.value_width,
        pitch: plan.value_width,
        ..key_rows
    };
    let keys = match plan.pairs() {
        true => {
            pairs::turn(&key_rows, e.keys, "turned", PANEL * lanes, lanes)
                + &pairs::zip(&value_rows, "values", lanes)
        }
        false => {
            turn_rows(&key_rows, e.keys, "turned", PANEL * lanes, lanes)
                + &copy_rows(&value_rows, "values", &all_keys, "", lanes)
        }
    };
    let block_rows = Rows {
        view: &spec.query,
        storage: spec.storage,
        head: "head",
        first: "row0",
        rows: "rows",
        width: e.width,
        pitch: plan.pitch(e.width, plan.width),
    };
    let all_rows = format!("tiles * {tile}");
    // Scaled queries would have to be rounded: of pairs, the scores are scaled.
    let load = match plan.pairs() {
        true => pairs::copy(&block_rows, "queries", &all_rows),
        false => copy_rows(&block_rows, "queries", &all_rows, "scale", lanes),
    };
    let scores = scores(
        spec,
        &plan,
        &seen,
        "queries",
        "turned",
        (block_rows.pitch, e.width),
        "strip",
        &mut helpers,
    );
    let weights = rows::weights(mask_rows.masks, spec.safe, plan.pairs(), words, &mut helpers);
    let scale = if plan.pairs() { "scale, " } else { "" };
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
        "for (int64_t r = 0; r < rows; r++) {{\n    const int64_t row = row0 + r, n = {};\n    {real} *x = strip + r * {ld};\n{}{}{}    {weights}(x, n, end, {}{scale}{});\n{}{}{}}}\n",
        seen.row,
        indent(&mask_rows.by_row, 4),
        indent(&dropout.draw, 4),
        indent(of_scores, 4),
        mask_rows.masks.arguments(),
        spec.stats_of("row"),
        indent(&look, 4),
        indent(of_weights, 4),
        match plan.pairs() {
            true => indent(&pairs::round_row("x", "(bf16_pair *)x", lanes), 4),
            false => String::new(),
        },
    );
    let strip = format!("(const {} *)strip", plan.factor.ctype());
    let combine = product(
        &plan,
        &Product {
            a: &format!(
                "{} + i * {}",
                if plan.pairs() { &strip } else { "strip" },
                tile * ld
            ),
            a_access: Access::Strided {
                free: ld as i64,
                depth: 1,
            },
            b_access: Access::Strided {
                free: 1,
                depth: plan.value_width as i64,
            },
            b: "values + j",
            depth: &plan.steps_of(seen.tile),
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
