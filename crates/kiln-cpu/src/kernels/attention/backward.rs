//! The gradient kernel.

use std::collections::BTreeSet;

use super::masks::MaskRows;
use super::memory::Memory;
use super::pack::{Rows, copy_rows, store_rows, turn_rows};
use super::pairs;
use super::plan::{AttentionPlan, PANEL, Product, product};
use super::rows::{self, Dropout, Words};
use super::visible_keys::{VisibleKeys, scores};
use super::{AttentionSpec, View, section};
use crate::isa::Isa;
use crate::kernels::tile::Access;
use crate::kernels::{Helper, KernelText, fields, finish_kernel, indent, run_part, unpack};

/// What the gradient reads besides the forward's operands, and what it writes.
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

/// A thread's working memory, and what finds its way through masks there.
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
    let mask_rows = MaskRows::new(spec, plan, &mut memory);
    let most = format!("({})[0]", spec.stats_of("row0 + r"));
    let seen = VisibleKeys::new(spec, plan, &spec.fill_counts(&most), &mut memory);
    if spec.dropout {
        memory.part(real, "kept", plan.ld + 3 * plan.lanes);
    }
    (memory, mask_rows, seen)
}

/// Bytes of working memory of the kernel that [`gradient`] would write.
pub fn gradient_workspace(spec: &AttentionSpec, isa: Isa) -> usize {
    memory(spec, &AttentionPlan::new(spec, isa)).0.bytes() * spec.threads
}

/// Gradients of queries, keys and values.
pub fn gradient(spec: &AttentionSpec, tensors: &Gradients, isa: Isa) -> KernelText {
    let plan = AttentionPlan::new(spec, isa);
    let e = &spec.extents;
    let (lanes, tile, ld, name) = (plan.lanes, plan.tile, plan.ld, &spec.name);
    let mut helpers = BTreeSet::new();
    let (_, vf) = plan.element.ctypes();
    let (memory, mask_rows, seen) = memory(spec, &plan);
    let (declare, each) = memory.finish();

    let all_keys = e.keys.to_string();
    let (key_size, value_size) = ((e.width, plan.width), (e.value_width, plan.value_width));
    let rows = |view, head, (first, rows), (width, pitch)| Rows {
        view,
        storage: spec.storage,
        head,
        first,
        rows,
        width,
        pitch,
    };
    let of_keys = |view, size| rows(view, "group", ("0", all_keys.as_str()), size);
    let of_queries = |view, size| rows(view, "head", ("row0", "rows"), size);
    let wide = PANEL * lanes;
    let (keys, values) = (of_keys(&spec.key, key_size), of_keys(&spec.value, value_size));
    let packed = match plan.pairs() {
        true => {
            pairs::turn(&keys, e.keys, "turned_keys", wide, lanes)
                + &pairs::turn(&values, e.keys, "turned_values", wide, lanes)
                + &pairs::zip(&keys, "keys", lanes)
        }
        false => {
            turn_rows(&keys, e.keys, "turned_keys", wide, lanes)
                + &turn_rows(&values, e.keys, "turned_values", wide, lanes)
                + &copy_rows(&keys, "keys", &all_keys, "", lanes)
        }
    };
    let pack = packed
        + &format!(
            "for (int64_t c = 0; c < {}; c += {lanes}) {vf}_store(d_keys + c, ({vf}){{0}});\nfor (int64_t c = 0; c < {}; c += {lanes}) {vf}_store(d_values + c, \
             ({vf}){{0}});\n",
            plan.key_rows * plan.width,
            plan.key_rows * plan.value_width
        );
    let all_rows = format!("tiles * {tile}");
    let (queries, outs) = (
        of_queries(&spec.query, key_size),
        of_queries(&tensors.d_out, value_size),
    );
    let (query_pitch, out_pitch) = (
        plan.pitch(e.width, plan.width),
        plan.pitch(e.value_width, plan.value_width),
    );
    let load = match plan.pairs() {
        true => {
            let rows = |pitch, rows| Rows { pitch, ..rows };
            pairs::zip(&queries, "zipped_queries", lanes)
                + &pairs::zip(&outs, "zipped_outs", lanes)
                + &pairs::copy(&rows(query_pitch, queries), "queries", &all_rows)
                + &pairs::copy(&rows(out_pitch, outs), "outs", &all_rows)
        }
        false => {
            copy_rows(&queries, "queries", &all_rows, "", lanes)
                + &copy_rows(&outs, "outs", &all_rows, "", lanes)
        }
    };
    let strips = scores(
        spec,
        &plan,
        &seen,
        "queries",
        "turned_keys",
        (query_pitch, e.width),
        "strip",
        &mut helpers,
    ) + &scores(
        spec,
        &plan,
        &seen,
        "outs",
        "turned_values",
        (out_pitch, e.value_width),
        "d_strip",
        &mut helpers,
    );

    let mut each_row = each_row(spec, &plan, &mask_rows, &seen, &mut helpers);
    if plan.pairs() {
        each_row.push_str(&pairs::round_strips(&plan));
    }
    let (d_scores, d_ld) = match plan.pairs() {
        true => ("d_pairs", plan.pair_ld()),
        false => ("d_strip", ld),
    };
    let d_queries = product(
        &plan,
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
            depth: &plan.steps_of(seen.tile),
            c: &format!("d_queries + i * {} + j", tile * plan.width),
            ldc: plan.width,
            accumulate: false,
            tiles: "tiles",
            before: "",
            columns: plan.width,
        },
        &mut helpers,
    ) + &store_rows(&of_queries(&tensors.d_query, key_size), "d_queries", "", lanes);
    // Rows before `start` see none of the tile's keys.
    let before = if spec.varies() {
        // Pairs of rows begin at even ones.
        let even = if plan.pairs() {
            "\n        start &= ~INT64_C(1);"
        } else {
            ""
        };
        format!(
            "int64_t start = 0;\n        while (start < rows && n_of[start] <= i * {tile}) start++;\n        if (start == rows) continue;{even}"
        )
    } else {
        "const int64_t start = 0;".to_owned()
    };
    let step = plan.factor.depth();
    let [zipped, cast] = match plan.pairs() {
        true => ["zipped_", "(const bf16_pair *)"],
        false => [""; 2],
    };
    let mut collect = |strip: &str, rows: &str, pitch: usize, to: &str| {
        product(
            &plan,
            &Product {
                a: &format!("{cast}{strip} + start * {ld} + i * {tile}"),
                a_access: Access::Strided {
                    free: 1,
                    depth: (step * ld) as i64,
                },
                b_access: Access::Strided {
                    free: 1,
                    depth: pitch as i64,
                },
                b: &match plan.pairs() {
                    true => format!("{zipped}{rows} + start / 2 * {pitch} + j"),
                    false => format!("{rows} + start * {pitch} + j"),
                },
                depth: &plan.steps_of("rows - start"),
                c: &format!("{to} + i * {} + j", tile * pitch),
                ldc: pitch,
                accumulate: true,
                tiles: &(plan.key_rows / tile).to_string(),
                before: &before,
                columns: pitch,
            },
            &mut helpers,
        )
    };
    let collected = collect("strip", "outs", plan.value_width, "d_values")
        + &collect("d_strip", "queries", plan.width, "d_keys");
    let stored = store_rows(&of_keys(&tensors.d_key, key_size), "d_keys", "", lanes)
        + &store_rows(&of_keys(&tensors.d_value, value_size), "d_values", "", lanes);

    let by_head = mask_rows.once("if (row0 == 0) {\n");
    let source = format!(
        "/* Gradient of attention: {}; blocks of {block} rows, tiles of {tile}. */\nstruct {name}_args {{\n{}    char *workspace;\n}};\nstatic void \
         {name}_heads(void *ctx, int64_t begin, int64_t end, int thread) {{\n    const struct {name}_args *args = ctx;\n{}{}{declare}    int64_t looked = -1;\n    (void)looked;\n    for (int64_t unit = \
         begin; unit < end; unit++) {{\n        const int64_t batch = unit / {groups}, group = unit % {groups};\n{}        for (int64_t part = 0; part < \
         {share} * {blocks}; part++) {{\n            const int64_t head = group * {share} + part / {blocks}, row0 = part % {blocks} * {block};\n            \
         const int64_t rows = {queries} - row0 < {block} ? {queries} - row0 : {block}, tiles = (rows + {tile} - 1) / {tile};\n{}{}{}{}{}{}{}{}        }}\n{}    }}\n}}\n",
        spec.shape_text(),
        fields(&spec.params),
        unpack(&spec.params),
        spec.read_numbers(),
        indent(
            &section(
                "Keys and values, as they are and transposed; their gradients start from zero.",
                &pack
            ),
            8
        ),
        indent(&by_head, 12),
        indent(&seen.by_head, 12),
        indent(&seen.by_block, 12),
        indent(&section("Queries, and the gradient of their results.", &load), 12),
        indent(
            &section("Products with keys, and the gradient of the weights.", &strips),
            12
        ),
        indent(
            &section(
                "Products become weights, the gradient of weights that of scores.",
                &each_row
            ),
            12
        ),
        indent(&section("Gradient of the queries.", &d_queries), 12),
        indent(
            &section(
                "The share of these rows in the gradients of values and keys.",
                &collected
            ),
            12
        ),
        indent(&section("Gradients of keys and values.", &stored), 8),
        groups = e.key_heads,
        share = e.heads / e.key_heads,
        blocks = plan.blocks,
        block = plan.block,
        queries = e.queries,
    );
    let units = e.batch * e.key_heads;
    let calls = run_part(plan.serial)(&format!("{name}_heads"), units);
    let mut kernel = finish_kernel(name, &spec.params, source, &calls, each * spec.threads);
    kernel.helpers = helpers.into_iter().collect();
    kernel
}

/// Turns the strips into probabilities and gradients of scores, row by row.
fn each_row(
    spec: &AttentionSpec,
    plan: &AttentionPlan,
    mask_rows: &MaskRows,
    seen: &VisibleKeys,
    helpers: &mut BTreeSet<Helper>,
) -> String {
    let (ld, masks) = (plan.ld, mask_rows.masks);
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
    format!(
        "for (int64_t r = 0; r < rows; r++) {{\n    const int64_t row = row0 + r, n = {};\n    {real} *x = strip + r * {ld}, *d = d_strip + r * {ld};\n{}{}{}    const {real} sum = {probabilities}(x, d, n, scale, \
         {}{});\n    {score_gradients}(x, d, n, end, {}inner * sum, d_scale);\n{}}}\n",
        seen.row,
        indent(&mask_rows.by_row, 4),
        indent(&dropout.draw, 4),
        indent(&before, 4),
        masks.arguments(),
        spec.stats_of("row"),
        if masks.hide { "hide, " } else { "" },
        indent(&after, 4),
    )
}
