//! Code that copies a panel of an operand into the layout of the tiles: `packed[k * width + r]`, for `width` consecutive
//! rows of A or columns of B and one cut of the depth.

use super::{At, Axis, Operand};
use crate::kernels::{Width, indent};

/// Statements that pack one panel.
///
/// In scope: `batch`, `free` (first row or column), `valid` (how many of `width` exist; the rest become zero), `start`
/// and `depth` (the cut), `extent`, `packed`. `width` is a constant. At most `depth * width` elements are written.
pub(super) fn panel(operand: &Operand<'_>, width: usize, lanes: usize) -> String {
    let vf = operand.element.vector();
    let load = |width, free: &str, depth: &str| {
        (operand.load)(&At {
            width,
            batch: "batch",
            free,
            depth,
        })
    };
    let scalar = load(Width::Scalar, "(free + r)", "(start + k)");
    // A vector store of a narrow panel runs over into the next depth steps, which are written later; the last steps
    // store what is theirs only.
    let whole = width.div_ceil(lanes) * lanes;
    let spill = (whole - width).div_ceil(width);
    let element = |k: &str| {
        format!(
            "for (int64_t k = {k}; k < depth; k++)\n    for (int64_t r = 0; r < {width}; r++)\n        packed[k * {width} + r] \
             = r < valid ? {scalar} : 0;\n"
        )
    };
    match operand.contiguous {
        None => element("0"),
        Some(Axis::Free) => {
            let vector = load(Width::Vector, "(free + r)", "(start + k)");
            format!(
                "int64_t k0 = 0;\nif (valid == {width} && free + {whole} <= extent) {{\n    for (; k0 < depth - {spill}; k0++) \
                 {{\n        int64_t k = k0;\n        for (int64_t r = 0; r < {width}; r += {lanes}) {vf}_store(packed + k * {width} + \
                 r, {vector});\n    }}\n}}\n{}",
                element("k0")
            )
        }
        Some(Axis::Depth) => {
            let mut block = String::new();
            // The last group first: where it is narrow, what it spills is overwritten by the first.
            for group in (0..width).step_by(lanes).rev() {
                let rows = lanes.min(width - group);
                block.push_str(&format!("{{\n    {vf} row[{lanes}] = {{{{0}}}};\n"));
                for r in group..group + rows {
                    let place = format!("(free + {r})");
                    let vector = load(Width::Vector, &place, "(start + k0)");
                    block.push_str(&format!("    if ({r} < valid) row[{}] = {vector};\n", r - group));
                }
                block.push_str(&format!("    {vf}_transpose(row);\n"));
                for l in 0..lanes {
                    let place = format!("packed + (k0 + {l}) * {width} + {group}");
                    // The depth steps that a vector runs over into belong to this block, but for the last ones.
                    let store = if rows == lanes || l + spill < lanes {
                        format!("{vf}_store({place}, row[{l}]);")
                    } else {
                        format!("{vf}_store_n({place}, row[{l}], {rows});")
                    };
                    block.push_str(&format!("    {store}\n"));
                }
                block.push_str("}\n");
            }
            format!(
                "int64_t k0 = 0;\nfor (; k0 + {lanes} <= depth; k0 += {lanes}) {{\n{}}}\n{}",
                indent(&block, 4),
                element("k0")
            )
        }
    }
}
