//! The epilogue of a matrix product, which consumes finished tiles.

use super::{Epilogue, GemmSpec, Result, TileCode};
use crate::kernels::element::Element;
use crate::kernels::{Width, indent, unpack};

/// `name_finish(args, batch, tile, ld, row, rows, col, cols)`: the epilogue of one tile; `rest` says
/// whether some tiles end within a vector.
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
