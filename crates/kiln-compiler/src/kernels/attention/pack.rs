//! Statements that copy windows of tensors to and from the working memory of attention.

use super::View;

/// Neighbouring rows of a head, and how they lie in the working memory. Texts are C expressions.
pub(super) struct Rows<'a> {
    pub view: &'a View,
    /// The head, of sequence `batch`.
    pub head: &'a str,
    /// Position of the first row.
    pub first: &'a str,
    pub rows: &'a str,
    /// Elements of a row.
    pub width: usize,
    /// Elements of a row in the working memory.
    pub pitch: usize,
}

/// Copies rows to `to`, the rest of each zero; rows from `rows.rows` to `all` become zero. `factor` multiplies, if not empty.
pub(super) fn copy_rows(rows: &Rows<'_>, to: &str, all: &str, factor: &str, lanes: usize) -> String {
    let Rows {
        view,
        head,
        first,
        rows,
        width,
        pitch,
    } = *rows;
    let from = view.head("batch", head);
    let [_, _, row, element] = view.strides;
    let times = |x: String| {
        if factor.is_empty() {
            x
        } else {
            format!("{x} * {factor}")
        }
    };
    let whole = width / lanes * lanes;
    let body = if element == 1 {
        let mut body = String::new();
        if whole > 0 {
            body.push_str(&format!(
                "        for (int64_t c = 0; c < {whole}; c += {lanes}) vf_store(to + c, {});\n",
                times("vf_load(from + c)".into())
            ));
        }
        if whole < width {
            body.push_str(&format!(
                "        vf_store(to + {whole}, {});\n",
                times(format!("vf_load_n(from + {whole}, {})", width - whole))
            ));
        }
        body
    } else {
        format!(
            "        for (int64_t c = 0; c < {pitch}; c++) to[c] = c < {width} ? {} : 0.0f;\n",
            times(format!("from[c * {element}]"))
        )
    };
    format!(
        "for (int64_t r = 0; r < {all}; r++) {{\n    float *to = {to} + r * {pitch};\n    if (r < {rows}) {{\n        const float *from = {from} + \
         ({first} + r) * {row};\n{body}    }} else {{\n        for (int64_t c = 0; c < {pitch}; c += {lanes}) vf_store(to + c, (vf){{0}});\n    \
         }}\n}}\n"
    )
}

/// Copies rows from `from` back to their places; `factor`, a C expression of row `r`, multiplies, if not empty.
pub(super) fn store_rows(rows: &Rows<'_>, from: &str, factor: &str, lanes: usize) -> String {
    let Rows {
        view,
        head,
        first,
        rows,
        width,
        pitch,
    } = *rows;
    let to = view.head("batch", head);
    let [_, _, row, element] = view.strides;
    let (declare, times) = if factor.is_empty() {
        (String::new(), "")
    } else {
        (format!("    const float factor_r = {factor};\n"), " * factor_r")
    };
    let whole = if element == 1 { width / lanes * lanes } else { 0 };
    let mut body = String::new();
    if whole > 0 {
        body.push_str(&format!(
            "    for (int64_t c = 0; c < {whole}; c += {lanes}) vf_store(to + c, vf_load(from + c){times});\n"
        ));
    }
    if whole < width {
        body.push_str(&format!(
            "    for (int64_t c = {whole}; c < {width}; c++) to[c * {element}] = from[c]{times};\n"
        ));
    }
    format!(
        "for (int64_t r = 0; r < {rows}; r++) {{\n    const float *from = {from} + r * {pitch};\n    float *to = {to} + ({first} + r) * \
         {row};\n{declare}{body}}}\n"
    )
}

/// Packs the rows at `from` transposed, in panels of `panel` columns (the last one narrower, in whole vectors): element `c` of row `j` is at
/// `to + panel start * width + c * panel width + column`. Rows past `rows` become zero columns.
pub(super) fn turn_rows(
    view: &View,
    from: &str,
    rows: usize,
    width: usize,
    to: &str,
    panel: usize,
    lanes: usize,
) -> String {
    let [_, _, row, element] = view.strides;
    let all = rows.div_ceil(lanes) * lanes;
    let full = all / panel * panel;
    // Columns of the panel that key `j` is in, and its place.
    let place = format!(
        "const int64_t first = j / {panel} * {panel}, pitch = first < {full} ? {panel} : {last};\n    float *to = {to} + first * {width} + (j - \
         first);\n",
        last = (all - full).max(1),
    );
    if element != 1 {
        return format!(
            "for (int64_t j = 0; j < {all}; j++) {{\n    {place}    for (int64_t c = 0; c < {width}; c++)\n        to[c * pitch] = j < {rows} ? \
             ({from})[j * {row} + c * {element}] : 0.0f;\n}}\n"
        );
    }
    format!(
        "for (int64_t j = 0; j < {all}; j += {lanes}) {{\n    {place}    const float *from = {from} + j * {row};\n    for (int64_t c = 0; c < {width}; \
         c += {lanes}) {{\n        const int64_t some = {width} - c < {lanes} ? {width} - c : {lanes};\n        vf line[KILN_LANES];\n        \
         KILN_UNROLL for (int l = 0; l < KILN_LANES; l++)\n            line[l] = j + l < {rows} ? vf_load_n(from + l * {row} + c, some) : \
         (vf){{0}};\n        vf_transpose(line);\n        KILN_UNROLL for (int l = 0; l < KILN_LANES; l++)\n            if (l < some) vf_store(to + (c + l) * \
         pitch, line[l]);\n    }}\n}}\n"
    )
}
