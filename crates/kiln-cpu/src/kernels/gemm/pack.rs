//! Code that copies a panel of an operand into the layout of the tiles: `packed[k * width + r]`, for
//! `width` consecutive rows of A or columns of B and one cut of the depth.

use super::{At, Axis, Memory, Operand, contiguous_axis, tiles};
use crate::kernels::element::Factor;
use crate::kernels::{Width, indent};

/// Statements that pack one panel.
///
/// In scope: `batch`, `free` (first row or column), `valid` (how many of `width` exist; the rest become
/// zero), `start` and `depth` (the cut), `extent`, `packed`. `width` is a constant. At most `depth * width`
/// factors are written. `all` is the depth of all cuts in elements of the operand; all other lengths count
/// factors.
pub(super) fn panel(operand: &Operand<'_>, factor: Factor, all: usize, width: usize, lanes: usize) -> String {
    match factor {
        Factor::Bf16Pair => Pairs::new(operand, all).panel(width, lanes),
        Factor::Bf16Tile => tiles::columns(operand, all, width, lanes),
        _ => elements(operand, width, lanes),
    }
}

/// As [`panel`], for elements of the type of registers.
fn elements(operand: &Operand<'_>, width: usize, lanes: usize) -> String {
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
    // A vector store of a narrow panel overwrites the beginning of the next depth steps, which are written
    // later; the last steps store only their own elements.
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
                    // The depth steps that a vector overwrites belong to this block, except the last ones.
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

/// An operand that is packed as pairs of bf16: element `2 i` of the depth and, in the upper half, element
/// `2 i + 1`, or zero past the end.
pub(super) struct Pairs<'a> {
    operand: &'a Operand<'a>,
    /// Elements of the whole depth.
    all: usize,
    /// Whether there may be steps past the last element.
    padded: bool,
}

impl<'a> Pairs<'a> {
    /// Panels that end with the last element.
    fn new(operand: &'a Operand<'a>, all: usize) -> Self {
        let padded = false;
        Self { operand, all, padded }
    }

    /// Panels that go on, with zeros, to a whole tile.
    pub fn padded(operand: &'a Operand<'a>, all: usize) -> Self {
        let padded = !all.is_multiple_of(Factor::Bf16Tile.depth() * Factor::Bf16Tile.steps());
        Self { operand, all, padded }
    }
}

impl Pairs<'_> {
    /// The axis along which vectors can be loaded.
    pub fn contiguous(&self) -> Option<Axis> {
        match &self.operand.halves {
            Some(memory) => contiguous_axis(memory.free_stride, memory.depth_stride),
            None => self.operand.contiguous,
        }
    }

    /// Declares `last`, the end of the steps with two elements, of which vectors are made.
    pub fn last(&self) -> String {
        match self.all.is_multiple_of(2) && !self.padded {
            true => String::from("const int64_t last = depth;\n"),
            false => format!(
                "const int64_t last = start + depth > {0} ? {0} - start : depth;\n",
                self.all / 2
            ),
        }
    }

    /// C expression of the vector of steps from `k` on of row `free`.
    pub fn along_depth_vector(&self, free: &str, k: &str, lanes: usize) -> String {
        let depth = format!("(start + {k}) * 2");
        match &self.operand.halves {
            Some(memory) => format!("vu_load((const bf16_pair *)({}))", place(memory, free, &depth)),
            None => format!(
                "vu_pairs_vf({}, {})",
                self.value(Width::Vector, free, &format!("({depth})")),
                self.value(Width::Vector, free, &format!("({depth} + {lanes})")),
            ),
        }
    }

    /// C expression of the vector of step `k` of rows from `free` on.
    pub fn along_free_vector(&self, free: &str, k: &str) -> String {
        let (low, high) = (format!("(start + {k}) * 2"), format!("((start + {k}) * 2 + 1)"));
        match &self.operand.halves {
            Some(memory) => format!(
                "vu_zip_bf16({}, {})",
                place(memory, free, &low),
                place(memory, free, &high),
            ),
            None => format!(
                "vu_zip_vf({}, {})",
                self.value(Width::Vector, free, &format!("({low})")),
                self.value(Width::Vector, free, &high),
            ),
        }
    }

    /// As [`panel`].
    fn panel(&self, width: usize, lanes: usize) -> String {
        let element = |k: &str| {
            format!(
                "for (int64_t k = {k}; k < depth; k++)\n    for (int64_t r = 0; r < {width}; r++)\n        packed[k * {width} + r] = r < valid ? \
                 {} : 0;\n",
                self.one()
            )
        };
        let Some(axis) = self.contiguous() else {
            return element("0");
        };
        // Vectors are of whole pairs.
        let last = self.last();
        let vectors = match axis {
            Axis::Free => self.along_free(width, lanes),
            Axis::Depth => self.along_depth(width, lanes),
        };
        format!("int64_t k0 = 0;\n{last}{vectors}{}", element("k0"))
    }

    /// Loops that pack steps with vectors of neighbours; `k0` counts them.
    fn along_free(&self, width: usize, lanes: usize) -> String {
        let whole = width.div_ceil(lanes) * lanes;
        // A vector store of a narrow panel runs over into the next steps, which are written later.
        let spill = (whole - width).div_ceil(width);
        let pairs = self.along_free_vector("(free + r)", "k0");
        format!(
            "if (valid == {width} && free + {whole} <= extent) {{\n    for (; k0 < last - {spill}; k0++)\n        for (int64_t r = 0; r < {width}; r += \
             {lanes}) vu_store(packed + k0 * {width} + r, {pairs});\n}}\n"
        )
    }

    /// Loops that pack steps with vectors of pairs, turned; `k0` counts them.
    fn along_depth(&self, width: usize, lanes: usize) -> String {
        let spill = (width.div_ceil(lanes) * lanes - width).div_ceil(width);
        let mut block = String::new();
        // The last group first: where it is narrow, what it spills is overwritten by the first.
        for group in (0..width).step_by(lanes).rev() {
            let rows = lanes.min(width - group);
            block.push_str(&format!("{{\n    vu row[{lanes}] = {{{{0}}}};\n"));
            for r in group..group + rows {
                let free = format!("(free + {r})");
                let pairs = self.along_depth_vector(&free, "k0", lanes);
                block.push_str(&format!("    if ({r} < valid) row[{}] = {pairs};\n", r - group));
            }
            block.push_str("    vu_transpose(row);\n");
            for l in 0..lanes {
                let to = format!("packed + (k0 + {l}) * {width} + {group}");
                // The steps that a vector runs over into belong to this block, but for the last ones.
                let store = if rows == lanes || l + spill < lanes {
                    format!("vu_store({to}, row[{l}]);")
                } else {
                    format!("vu_store_n({to}, row[{l}], {rows});")
                };
                block.push_str(&format!("    {store}\n"));
            }
            block.push_str("}\n");
        }
        format!(
            "for (; k0 + {lanes} <= last; k0 += {lanes}) {{\n{}}}\n",
            indent(&block, 4)
        )
    }

    /// C expression of the pair of row `r` at step `k`.
    pub fn one(&self) -> String {
        let half = |depth: &str| match &self.operand.halves {
            Some(memory) => format!("*({})", place(memory, "(free + r)", depth)),
            None => format!("bf16_from_sf({})", self.value(Width::Scalar, "(free + r)", depth)),
        };
        let (low, high) = (half("((start + k) * 2)"), half("((start + k) * 2 + 1)"));
        let whole = self.all / 2;
        match (self.padded, self.all % 2) {
            (false, 0) => format!("((uint32_t){low} | (uint32_t){high} << 16)"),
            (false, _) => format!("((uint32_t){low} | (start + k < {whole} ? (uint32_t){high} << 16 : 0))"),
            (true, _) => format!(
                "((start + k < {} ? (uint32_t){low} : 0) | (start + k < {whole} ? (uint32_t){high} << 16 : 0))",
                self.all.div_ceil(2)
            ),
        }
    }

    /// C expression of an element, or a vector of them, as f32.
    fn value(&self, width: Width, free: &str, depth: &str) -> String {
        (self.operand.load)(&At {
            width,
            batch: "batch",
            free,
            depth,
        })
    }
}

/// C expression of an element's address.
pub(super) fn place(memory: &Memory<'_>, free: &str, depth: &str) -> String {
    format!(
        "{} + {free} * {} + {depth} * {}",
        (memory.base)("batch"),
        memory.free_stride,
        memory.depth_stride
    )
}
