//! Panels in whole tiles of AMX ([`crate::kernels::tile::amx`]): blocks of 16 steps of the depth. A block of
//! A has the rows one after the other, each with 16 pairs of bf16, and a block of B one tile after the other.

use super::pack::Pairs;
use super::{Axis, Operand};
use crate::kernels::indent;
use crate::kernels::tile::amx::EXTENT;

/// Steps that are copied from one row before the next: four cache lines of bf16.
const RUN: usize = 4 * EXTENT;

/// Statements that pack one panel of `height` rows, a multiple of 16: pair `k` of row `r` is at `packed + k /
/// 16 * 16 * height + r * 16 + k % 16`. In scope are the names of [`super::pack::panel`]; `depth` is a
/// multiple of 16, and steps past the end of the operand become zero. Rows from `valid` on become zero, too.
pub(super) fn rows(operand: &Operand<'_>, all: usize, height: usize, lanes: usize) -> String {
    debug_assert_eq!(lanes, EXTENT);
    let pairs = Pairs::padded(operand, all);
    let block = height * EXTENT;
    let place =
        |k: &str, r: &str| format!("packed + {k} / {EXTENT} * {block} + {r} * {EXTENT} + {k} % {EXTENT}");
    let mut text = format!("int64_t k0 = 0;\n{}", pairs.last());
    let zeros = format!(
        "for (int64_t r = valid; r < {height}; r++) vu_store({}, (vu){{0}});\n",
        place("k0", "r")
    );
    match pairs.contiguous() {
        Some(Axis::Depth) => {
            let copy = format!(
                "for (int64_t r = 0; r < valid; r++)\n    for (int64_t l = 0; l < some; l += {EXTENT}) vu_store(packed + (k0 + l) * {height} + r * \
                 {EXTENT}, {});\n",
                pairs.along_depth_vector("(free + r)", "(k0 + l)", lanes)
            );
            let fill = format!(
                "for (int64_t l = 0; l < some; l += {EXTENT})\n    for (int64_t r = valid; r < {height}; r++) vu_store(packed + (k0 + l) * {height} + r * \
                 {EXTENT}, (vu){{0}});\n"
            );
            text.push_str(&format!(
                "while (k0 + {EXTENT} <= last) {{\n    const int64_t some = last - k0 >= {RUN} ? {RUN} : {EXTENT};\n{}    k0 += some;\n}}\n",
                indent(&(copy + &fill), 4)
            ));
        }
        Some(Axis::Free) => {
            // Steps are vectors of rows, and a group of 16 of both is turned.
            let turn = format!(
                "vu line[{EXTENT}];\nKILN_UNROLL for (int l = 0; l < {EXTENT}; l++) line[l] = {};\nvu_transpose(line);\nKILN_UNROLL for (int l = 0; l < \
                 {EXTENT}; l++) vu_store(packed + k0 * {height} + (r + l) * {EXTENT}, line[l]);\n",
                pairs.along_free_vector("(free + r)", "(k0 + l)")
            );
            text.push_str(&format!(
                "if (valid % {EXTENT} == 0)\nfor (; k0 + {EXTENT} <= last; k0 += {EXTENT}) {{\n    for (int64_t r = 0; r < valid; r += {EXTENT}) {{\n{}    }}\n    {zeros}}}\n",
                indent(&turn, 8)
            ));
        }
        None => {}
    }
    text.push_str(&format!(
        "for (int64_t k = k0; k < depth; k++)\n    for (int64_t r = 0; r < {height}; r++)\n        *({}) = r < valid ? {} : 0;\n",
        place("k", "r"),
        pairs.one()
    ));
    text
}

/// Statements that pack one panel of B of `width` columns, a multiple of 16: a block of 16 steps has a tile
/// for each 16 columns, and a tile its steps one after the other, each with 16 pairs. Else as [`rows`].
pub(super) fn columns(operand: &Operand<'_>, all: usize, width: usize, lanes: usize) -> String {
    debug_assert_eq!(lanes, EXTENT);
    let pairs = Pairs::padded(operand, all);
    let (block, tile) = (width * EXTENT, EXTENT * EXTENT);
    let mut text = format!("int64_t k0 = 0;\n{}", pairs.last());
    match pairs.contiguous() {
        Some(Axis::Free) => {
            let copies: String = (0..width / EXTENT)
                .map(|t| {
                    format!(
                        "        vu_store(packed + k0 * {width} + {} + l * {EXTENT}, {});\n",
                        t * tile,
                        pairs.along_free_vector(&format!("(free + {})", t * EXTENT), "(k0 + l)")
                    )
                })
                .collect();
            text.push_str(&format!(
                "if (valid == {width})\n    for (; k0 + {EXTENT} <= last; k0 += {EXTENT})\n    for (int64_t l = 0; l < {EXTENT}; l++) {{\n{copies}    }}\n"
            ));
        }
        Some(Axis::Depth) => {
            let turn = format!(
                "vu line[{EXTENT}] = {{{{0}}}};\nKILN_UNROLL for (int l = 0; l < {EXTENT}; l++) if (r + l < valid) line[l] = {};\nvu_transpose(line);\nKILN_UNROLL for \
                 (int l = 0; l < {EXTENT}; l++) vu_store(packed + k0 * {width} + r * {EXTENT} + l * {EXTENT}, line[l]);\n",
                pairs.along_depth_vector("(free + r + l)", "k0", lanes)
            );
            text.push_str(&format!(
                "for (; k0 + {EXTENT} <= last; k0 += {EXTENT})\n    for (int64_t r = 0; r < {width}; r += {EXTENT}) {{\n{}    }}\n",
                indent(&turn, 8)
            ));
        }
        None => {}
    }
    text.push_str(&format!(
        "for (int64_t k = k0; k < depth; k++)\n    for (int64_t r = 0; r < {width}; r++)\n        packed[k / {EXTENT} * {block} + r / {EXTENT} * {tile} + k % {EXTENT} * \
         {EXTENT} + r % {EXTENT}] = r < valid ? {} : 0;\n",
        pairs.one()
    ));
    text
}
