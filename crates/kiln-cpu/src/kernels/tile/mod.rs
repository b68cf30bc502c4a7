//! Register tiles: the inner loops of matrix products and convolutions.
//!
//! A tile keeps `rows x vectors` accumulators in registers. Each step of the depth adds the outer product
//! of `rows` elements of A (each broadcast) and `vectors` vectors of B. With 32 registers that is 14 x 2:
//! 28 accumulators, two vectors of B, and the broadcast folded into the multiply-add's memory operand. Two
//! loads and fourteen broadcasts feed 28 multiply-adds, so the multipliers are the limit as long as both
//! panels come from L1 or L2.
//!
//! An operand is either packed (one depth step after the other, contiguous) or read in place with strides
//! that are constants of the generated code, so that addresses cost nothing. The result goes to memory
//! (normally a small buffer in L1), not directly to its consumer. So the consumer's code exists once for
//! each kernel instead of once for each accumulator, and all kernels of a step share tiles.
//!
//! An accumulator of f32 rounds at each addition in proportion to the sum so far, so the error of a sum of
//! n terms grows as sqrt(n). A tile of f32 therefore adds up a block of steps of the depth in its
//! registers, and adds the sums of blocks in memory of its own: the error is that of a block, however great
//! the depth.

pub mod amx;

use std::fmt::Write;

use super::Helper;
use super::element::{Element, Factor};
use crate::isa::Isa;

/// Steps of the depth that add up in registers. A block's end costs a load and a store for each
/// accumulator: 1 % of the time of 128 steps.
pub const BLOCK: usize = 128;

/// How a tile reads one of its operands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Access {
    /// From a panel: consecutive depth steps follow each other without gaps.
    Packed,
    /// So, but from a panel that passes by: its lines are not needed in L1 again. Of B, by tiles of AMX.
    Passing,
    /// In place.
    Strided {
        /// Elements between neighbours along the rows (of A); B needs 1 along its columns and ignores this.
        free: i64,
        /// Elements between neighbours along the depth.
        depth: i64,
    },
}

/// One register tile.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Tile {
    /// Rows of the result.
    pub rows: usize,
    /// Vectors in each row of the result.
    pub vectors: usize,
    /// How A is read.
    pub a: Access,
    /// How B is read.
    pub b: Access,
    /// The factors that it multiplies; steps of the depth and strides count these.
    pub factor: Factor,
    /// Whether the depth is three nested loops, the outer two with steps of their own through A and B.
    pub nested: bool,
    /// Steps of the depth that add up in registers, of f32: [`BLOCK`] or less.
    pub block: usize,
}

/// Most rows of a tile of `vectors` vectors that the registers hold.
pub fn max_rows(isa: Isa, vectors: usize) -> usize {
    // AVX-512 broadcasts from memory within the multiply-add; the others need a register for it.
    let spare = if isa.is_avx512() { 1 } else { 2 };
    ((isa.registers() - spare - vectors) / vectors).clamp(1, 24)
}

impl Tile {
    /// Name of its function.
    pub fn name(&self) -> String {
        let access = |access: Access| match access {
            Access::Packed => "p".into(),
            Access::Passing => "t".into(),
            Access::Strided { free, depth } => format!("s{free}_{depth}").replace('-', "m"),
        };
        let nested = if self.nested { "_nested" } else { "" };
        let block = match self.block {
            BLOCK => String::new(),
            block => format!("_by{block}"),
        };
        let factor = match self.factor {
            Factor::F32 => "",
            Factor::F64 => "f64_",
            Factor::Bf16Pair => "bf16_",
            Factor::Bf16Tile => "amx_",
        };
        format!(
            "kiln_tile_{factor}{}x{}_{}_{}{nested}{block}",
            self.rows,
            self.vectors,
            access(self.a),
            access(self.b)
        )
    }

    /// The function, here of f32: `c[rows][vectors * lanes] (+)= a[rows][depth] * b[depth][vectors * lanes]`.
    ///
    /// ```c
    /// void name(const float *a, const float *b, int64_t depth, float *c, int64_t ldc, int accumulate);
    /// void name_nested(..., const int64_t nest[6]);
    /// ```
    /// `ldc` is the distance of rows of `c`; `accumulate` adds to what `c` holds. Nested: `nest` is
    /// `{count, a, b}` twice, outermost first: how often, and the elements that A and B advance by each
    /// time.
    pub fn helper(&self, isa: Isa) -> Helper {
        let element = self.factor.sum();
        let (rows, vectors, lanes) = (self.rows, self.vectors, element.lanes(isa));
        let (real, vf) = element.ctypes();
        let (factor, factors) = (self.factor.ctype(), self.factor.vector());
        let multiply = match self.factor {
            Factor::F32 | Factor::F64 => format!("{vf}_fma"),
            Factor::Bf16Pair => "vf_dot_bf16".to_owned(),
            Factor::Bf16Tile => return amx::helper(self),
        };
        let nested = if self.nested {
            ", const int64_t nest[6]"
        } else {
            ""
        };
        let head = format!(
            "void {}(const {factor} *a, const {factor} *b, int64_t depth, {real} *c, int64_t ldc, int accumulate{nested})",
            self.name()
        );
        let (a_free, a_depth) = match self.a {
            Access::Packed | Access::Passing => (1, rows as i64),
            Access::Strided { free, depth } => (free, depth),
        };
        let b_depth = match self.b {
            Access::Packed | Access::Passing => (vectors * lanes) as i64,
            Access::Strided { depth, .. } => depth,
        };
        let each = |template: &dyn Fn(usize, usize) -> String| -> String {
            (0..rows)
                .map(|r| (0..vectors).map(|v| template(r, v)).collect::<String>() + "\n")
                .collect()
        };
        let mut body = String::new();
        let declare: Vec<String> = (0..rows)
            .flat_map(|r| (0..vectors).map(move |v| format!("c{r}_{v} = {{0}}")))
            .collect();
        let _ = writeln!(body, "    {vf} {};", declare.join(", "));
        let mut step = String::new();
        for v in 0..vectors {
            let _ = writeln!(
                step,
                "        {factors} b{v} = {factors}_load(b + {});",
                v * lanes
            );
        }
        for r in 0..rows {
            let at = r as i64 * a_free;
            let _ = write!(step, "        {{ {factors} x = {factors}_set1(a[{at}]);");
            for v in 0..vectors {
                let _ = write!(step, " c{r}_{v} = {multiply}(x, b{v}, c{r}_{v});");
            }
            step.push_str(" }\n");
        }
        let _ = writeln!(step, "        a += {a_depth};\n        b += {b_depth};");
        let steps = if element == Element::F32 {
            let _ = writeln!(
                body,
                "    {vf} sums[{}];\n    int64_t added = 0;\n    int blocks = 0;",
                rows * vectors
            );
            self.in_blocks(&step)
        } else {
            format!("    for (int64_t k = 0; k < depth; k++) {{\n{step}    }}\n")
        };
        if self.nested {
            let _ = write!(
                body,
                "    const {factor} *a1 = a, *b1 = b;\n    for (int64_t n1 = 0; n1 < nest[0]; n1++, a1 += nest[1], b1 += nest[2]) \
                 {{\n    const {factor} *a2 = a1, *b2 = b1;\n    for (int64_t n2 = 0; n2 < nest[3]; n2++, a2 += nest[4], b2 += \
                 nest[5]) {{\n    a = a2, b = b2;\n{steps}    }}\n    }}\n"
            );
        } else {
            body.push_str(&steps);
        }
        if element == Element::F32 {
            let _ = write!(
                body,
                "    if (blocks) {{\n{}    }}\n",
                each(&|r, v| format!("        c{r}_{v} = sums[{}] + c{r}_{v};", r * vectors + v))
            );
        }
        let _ = write!(
            body,
            "    if (accumulate) {{\n{}    }}\n",
            each(&|r, v| format!(
                "        c{r}_{v} = {vf}_load(c + {r} * ldc + {}) + c{r}_{v};",
                v * lanes
            ))
        );
        body.push_str(&each(&|r, v| {
            format!("    {vf}_store(c + {r} * ldc + {}, c{r}_{v});", v * lanes)
        }));
        Helper {
            name: self.name(),
            prototype: format!("{head};"),
            definition: format!("{head} {{\n{body}}}\n"),
        }
    }

    /// `depth` times the statements of a step; after each block its sums go to `sums`. The last block has
    /// at least half a block's steps.
    fn in_blocks(&self, step: &str) -> String {
        let each = |template: &dyn Fn(usize, usize, usize) -> String| -> String {
            (0..self.rows)
                .map(|r| {
                    (0..self.vectors)
                        .map(|v| template(r, v, r * self.vectors + v))
                        .collect::<String>()
                        + "\n"
                })
                .collect()
        };
        let block = self.block;
        // A nested tile does not know here how many steps are still to come.
        let more = if self.nested { "" } else { " && left > 0" };
        format!(
            "    for (int64_t left = depth; left > 0;) {{\n    const int64_t some = left <= {longest} ? left : {block};\n    for \
             (int64_t k = 0; k < some; k++) {{\n{step}    }}\n    left -= some;\n    added += some;\n    if (added >= {block}{more}) \
             {{\n        if (blocks) {{\n{}        }} else {{\n{}        }}\n{}        added = 0;\n        blocks = 1;\n    }}\n    }}\n",
            each(&|r, v, at| format!("            sums[{at}] = sums[{at}] + c{r}_{v};")),
            each(&|r, v, at| format!("            sums[{at}] = c{r}_{v};")),
            each(&|r, v, _| format!("        c{r}_{v} = (vf){{0}};")),
            longest = block + block / 2,
        )
    }
}
