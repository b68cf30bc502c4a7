//! Statements that copy windows of tensors to and from the working memory of attention. Tensors of 16 bits
//! are f32 in the working memory.

use super::View;
use crate::kernels::Width;
use crate::kernels::element::Storage;

/// Neighbouring rows of a head, and how they lie in the working memory. Texts are C expressions.
pub(super) struct Rows<'a> {
    pub view: &'a View,
    pub storage: Storage,
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

/// Copies rows to `to` and fills each with zeros up to `rows.pitch`; rows from `rows.rows` to `all` become
/// zero. Elements are multiplied by `factor`, if that is not empty.
pub(super) fn copy_rows(rows: &Rows<'_>, to: &str, all: &str, factor: &str, lanes: usize) -> String {
    let Rows {
        view,
        storage,
        head,
        first,
        rows,
        width,
        pitch,
    } = *rows;
    let (real, vf) = storage.element().ctypes();
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
                "        for (int64_t c = 0; c < {whole}; c += {lanes}) {vf}_store(to + c, {});\n",
                times(storage.load(Width::Vector, "from + c"))
            ));
        }
        if whole < width {
            let rest = storage.load_some(&format!("from + {whole}"), &(width - whole).to_string());
            body.push_str(&format!("        {vf}_store(to + {whole}, {});\n", times(rest)));
        }
        body
    } else {
        format!(
            "        for (int64_t c = 0; c < {pitch}; c++) to[c] = c < {width} ? {} : 0;\n",
            times(storage.load(Width::Scalar, &format!("from + c * {element}")))
        )
    };
    format!(
        "for (int64_t r = 0; r < {all}; r++) {{\n    {real} *to = {to} + r * {pitch};\n    if (r < {rows}) {{\n        const {} *from = {from} + \
         ({first} + r) * {row};\n{body}    }} else {{\n        for (int64_t c = 0; c < {pitch}; c += {lanes}) {vf}_store(to + c, ({vf}){{0}});\n    \
         }}\n}}\n",
        storage.ctype(),
    )
}

/// Copies rows from `from` back to their places, multiplied by `factor` (a C expression of row `r`), if
/// that is not empty.
pub(super) fn store_rows(rows: &Rows<'_>, from: &str, factor: &str, lanes: usize) -> String {
    let Rows {
        view,
        storage,
        head,
        first,
        rows,
        width,
        pitch,
    } = *rows;
    let (real, vf) = storage.element().ctypes();
    let to = view.head("batch", head);
    let [_, _, row, element] = view.strides;
    let (declare, times) = if factor.is_empty() {
        (String::new(), "")
    } else {
        (format!("    const {real} factor_r = {factor};\n"), " * factor_r")
    };
    let whole = if element == 1 { width / lanes * lanes } else { 0 };
    let mut body = String::new();
    if whole > 0 {
        let store = storage.store(Width::Vector, "to + c", &format!("{vf}_load(from + c){times}"));
        body.push_str(&format!(
            "    for (int64_t c = 0; c < {whole}; c += {lanes}) {store}\n"
        ));
    }
    if whole < width {
        let place = format!("to + c * {element}");
        let store = storage.store(Width::Scalar, &place, &format!("from[c]{times}"));
        body.push_str(&format!(
            "    for (int64_t c = {whole}; c < {width}; c++) {store}\n"
        ));
    }
    format!(
        "for (int64_t r = 0; r < {rows}; r++) {{\n    const {real} *from = {from} + r * {pitch};\n    {} *to = {to} + ({first} + r) * \
         {row};\n{declare}{body}}}\n",
        storage.ctype(),
    )
}

/// Packs all `keys` rows of a head transposed, in panels of `panel` columns (the last one narrower, in
/// whole vectors): element `c` of row `j` is at `to + panel start * width + c * panel width + column`. Rows
/// past the last become zero columns.
pub(super) fn turn_rows(rows: &Rows<'_>, keys: usize, to: &str, panel: usize, lanes: usize) -> String {
    let Rows {
        view,
        storage,
        head,
        width,
        ..
    } = *rows;
    let (real, vf) = storage.element().ctypes();
    let from = view.head("batch", head);
    let [_, _, row, element] = view.strides;
    let all = keys.div_ceil(lanes) * lanes;
    let full = all / panel * panel;
    // Columns of the panel that key `j` is in, and its place.
    let place = format!(
        "const int64_t first = j / {panel} * {panel}, pitch = first < {full} ? {panel} : {last};\n    {real} *to = {to} + first * {width} + (j - \
         first);\n",
        last = (all - full).max(1),
    );
    if element != 1 {
        let one = storage.load(Width::Scalar, &format!("({from}) + j * {row} + c * {element}"));
        return format!(
            "for (int64_t j = 0; j < {all}; j++) {{\n    {place}    for (int64_t c = 0; c < {width}; c++)\n        to[c * pitch] = j < {keys} ? \
             {one} : 0;\n}}\n"
        );
    }
    let some = storage.load_some(&format!("from + l * {row} + c"), "some");
    format!(
        "for (int64_t j = 0; j < {all}; j += {lanes}) {{\n    {place}    const {} *from = {from} + j * {row};\n    for (int64_t c = 0; c < {width}; \
         c += {lanes}) {{\n        const int64_t some = {width} - c < {lanes} ? {width} - c : {lanes};\n        {vf} line[{lanes}];\n        \
         KILN_UNROLL for (int l = 0; l < {lanes}; l++)\n            line[l] = j + l < {keys} ? {some} : ({vf}){{0}};\n        \
         {vf}_transpose(line);\n        KILN_UNROLL for (int l = 0; l < {lanes}; l++)\n            if (l < some) {vf}_store(to + (c + l) * \
         pitch, line[l]);\n    }}\n}}\n",
        storage.ctype(),
    )
}
