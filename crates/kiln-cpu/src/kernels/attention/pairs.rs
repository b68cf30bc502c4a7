//! Working memory with pairs of bf16, where products multiply pairs, one by one
//! ([`crate::kernels::element::Factor::Bf16Pair`]) or in tiles of AMX ([`crate::kernels::tile::amx::rows`]).
//!
//! A pair holds two neighbours along the dimension that a product sums over: two elements of a query and of a
//! key for the scores, two keys for the products with weights, two queries for the gradients of keys and
//! values. So tensors are packed as rows of pairs ([`copy`]), transposed ([`turn`]), or with two rows in each
//! row ([`zip`]); tiles add up the gradients of keys and values transposed, from rows of pairs that are
//! transposed ([`turn_zipped`]). Values between the products are f32: weights and the gradients of scores are
//! rounded once, to pairs, after all f32 results have been computed from them.

use super::pack::Rows;
use super::plan::AttentionPlan;

/// Copies rows to `to`, each as `pitch` pairs; rows from `rows.rows` to `all` become zero.
pub(super) fn copy(rows: &Rows<'_>, to: &str, all: &str) -> String {
    let Rows {
        view,
        head,
        first,
        rows,
        width,
        pitch,
        ..
    } = *rows;
    let from = view.head("batch", head);
    let [_, _, row, element] = view.strides;
    let body = match element {
        1 => format!(
            "__builtin_memcpy(to, from, {width} * sizeof *from);\n        for (int64_t c = {width}; c < 2 * {pitch}; c++) to[c] = 0;"
        ),
        _ => format!(
            "for (int64_t c = 0; c < 2 * {pitch}; c++) to[c] = c < {width} ? from[c * {element}] : 0;"
        ),
    };
    format!(
        "for (int64_t r = 0; r < {all}; r++) {{\n    uint16_t *to = (uint16_t *)({to} + r * {pitch});\n    if (r < {rows}) {{\n        const \
         uint16_t *from = {from} + ({first} + r) * {row};\n        {body}\n    }} else {{\n        for (int64_t c = 0; c < 2 * {pitch}; c++) \
         to[c] = 0;\n    }}\n}}\n"
    )
}

/// Copies pairs of rows to `to`: row `p` of `pitch` pairs has the elements of rows `2 p` and `2 p + 1`, or
/// zero for rows past the last. Rows of pairs up to `all` (a C expression) become zero.
pub(super) fn zip(rows: &Rows<'_>, to: &str, all: &str, lanes: usize) -> String {
    let Rows {
        view,
        head,
        first,
        rows,
        width,
        pitch,
        ..
    } = *rows;
    let from = view.head("batch", head);
    let [_, _, row, element] = view.strides;
    let whole = if element == 1 { width / lanes * lanes } else { 0 };
    format!(
        "for (int64_t r = 0; r < {rows}; r += 2) {{\n    bf16_pair *to = {to} + r / 2 * {pitch};\n    const uint16_t *low = {from} + ({first} + r) * \
         {row}, *high = low + {row};\n    if (r + 1 < {rows}) {{\n        for (int64_t c = 0; c < {whole}; c += {lanes}) vu_store(to + c, vu_zip_bf16(low + c, \
         high + c));\n        for (int64_t c = {whole}; c < {width}; c++) to[c] = low[c * {element}] | (uint32_t)high[c * {element}] << 16;\n    }} else {{\n        \
         for (int64_t c = 0; c < {width}; c++) to[c] = low[c * {element}];\n    }}\n    for (int64_t c = {width}; c < {pitch}; c++) to[c] = 0;\n}}\n\
         for (int64_t p = ({rows} + 1) / 2; p < {all}; p++)\n    for (int64_t c = 0; c < {pitch}; c++) ({to})[p * {pitch} + c] = 0;\n"
    )
}

/// Transposes pairs of rows: row `c` of `turned`, `all` pairs long, has element `c` of each of the rows of
/// pairs at `zipped`. Both extents are whole vectors.
pub(super) fn turn_zipped(
    zipped: &str,
    turned: &str,
    pitch: usize,
    all: usize,
    rows: &str,
    lanes: usize,
) -> String {
    format!(
        "for (int64_t p = 0; p < {rows}; p += {lanes})\n    for (int64_t c = 0; c < {pitch}; c += {lanes}) {{\n        vu line[{lanes}];\n        \
         KILN_UNROLL for (int l = 0; l < {lanes}; l++) line[l] = vu_load({zipped} + (p + l) * {pitch} + c);\n        vu_transpose(line);\n        \
         KILN_UNROLL for (int l = 0; l < {lanes}; l++) vu_store({turned} + (c + l) * {all} + p, line[l]);\n    }}\n"
    )
}

/// Packs all `keys` rows of a head transposed, in panels as [`super::pack::turn_rows`] does: pair `c` of row
/// `j` is at `to + panel start * steps + c * panel width + column`.
/// Rows have `steps` pairs, zeros behind their last element.
pub(super) fn turn(
    rows: &Rows<'_>,
    keys: usize,
    steps: usize,
    to: &str,
    panel: usize,
    lanes: usize,
) -> String {
    let Rows {
        view, head, width, ..
    } = *rows;
    let from = view.head("batch", head);
    let [_, _, row, element] = view.strides;
    let all = keys.div_ceil(lanes) * lanes;
    let full = all / panel * panel;
    let place = format!(
        "const int64_t first = j / {panel} * {panel}, pitch = first < {full} ? {panel} : {last};\n    bf16_pair *to = {to} + first * {steps} + (j - \
         first);\n",
        last = (all - full).max(1),
    );
    if element != 1 {
        return format!(
            "for (int64_t j = 0; j < {all}; j++) {{\n    {place}    const uint16_t *from = {from} + j * {row};\n    for (int64_t c = 0; c < {steps}; c++)\n        to[c * \
             pitch] = j >= {keys} || 2 * c >= {width} ? 0 : from[2 * c * {element}] | (2 * c + 1 < {width} ? (uint32_t)from[(2 * c + 1) * {element}] << 16 : 0);\n}}\n"
        );
    }
    let load = "vu_load((const bf16_pair *)(from + l * ROW + 2 * c))".replace("ROW", &row.to_string());
    // Nothing past the end of a row is read.
    let rest = width % (2 * lanes);
    let load = match rest {
        0 => load,
        _ => format!(
            "2 * c + {} <= {width} ? {load} : vu_load_halves(from + l * {row} + 2 * c, {rest})",
            2 * lanes
        ),
    };
    format!(
        "for (int64_t j = 0; j < {all}; j += {lanes}) {{\n    {place}    const uint16_t *from = {from} + j * {row};\n    for (int64_t c = 0; c < {steps}; c += \
         {lanes}) {{\n        const int64_t some = {steps} - c < {lanes} ? {steps} - c : {lanes};\n        vu line[{lanes}];\n        KILN_UNROLL for (int \
         l = 0; l < {lanes}; l++)\n            line[l] = j + l < {keys} ? ({load}) : (vu){{0}};\n        vu_transpose(line);\n        KILN_UNROLL for (int l = 0; \
         l < {lanes}; l++)\n            if (l < some) vu_store(to + (c + l) * pitch, line[l]);\n    }}\n}}\n"
    )
}

/// Statements that round row `x` of `end` elements to pairs of neighbours at `to`, which may be the row
/// itself.
pub(super) fn round_row(x: &str, to: &str, lanes: usize) -> String {
    format!(
        "for (int64_t j = 0; j < end; j += {}) vu_store({to} + j / 2, vu_pairs_vf(vf_load({x} + j), vf_load({x} + j + {lanes})));\n",
        2 * lanes
    )
}

/// Statements that round the strips of a block. Rows `2 p` and `2 p + 1` of both become the pairs of row `2
/// p`, in place; before, those of the gradients of scores become rows of pairs at `d_pairs`.
pub(super) fn round_strips(plan: &AttentionPlan) -> String {
    let (ld, pitch, lanes) = (plan.ld, plan.pair_ld(), plan.lanes);
    // Rows up to the end of the last tile are zero, because products add them up.
    let rest = match plan.tiles() {
        true => format!(
            "for (int64_t r = (rows + 1) / 2 * 2; r < tiles * {}; r += 2)\n    for (int64_t j = 0; j < end; j += {lanes}) {{\n        vf_store(strip + r * \
             {ld} + j, (vf){{0}});\n        vf_store(d_strip + r * {ld} + j, (vf){{0}});\n    }}\n",
            plan.tile
        ),
        false => String::new(),
    };
    format!(
        "for (int64_t r = 0; r < rows; r++) {{\n    const float *d = d_strip + r * {ld};\n    bf16_pair *to = d_pairs + r * {pitch};\n    {}}}\nfor (int64_t r = 0; r < rows; r += \
         2) {{\n    float *x = strip + r * {ld}, *d = d_strip + r * {ld};\n    const int both = r + 1 < rows;\n    for (int64_t j = 0; j < end; j += {lanes}) {{\n        const vf \
         x1 = both ? vf_load(x + {ld} + j) : (vf){{0}}, d1 = both ? vf_load(d + {ld} + j) : (vf){{0}};\n        vu_store((bf16_pair *)x + j, vu_zip_vf(vf_load(x + j), \
         x1));\n        vu_store((bf16_pair *)d + j, vu_zip_vf(vf_load(d + j), d1));\n    }}\n}}\n{rest}",
        round_row("d", "to", lanes)
    )
}
