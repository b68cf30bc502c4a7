//! Register tiles of AMX: one instruction multiplies a tile of 16 rows of A, each with 16 pairs of bf16
//! along the depth, with a tile of 16 such steps of B, each with 16 columns, and adds the products to a tile
//! of 16 x 16 sums of f32.
//!
//! ```text
//!        16 pairs            16 columns
//!   A  ┌──────────┐     B  ┌──────────┐
//!   16 │ a00 a01 ..│    16 │ b00 b10 ..│   pair (0, 0) of B holds elements (0, 0) and (1, 0)
//! rows │ a10 a11 ..│ steps │ b20 b30 ..│
//!      └──────────┘        └──────────┘
//! ```
//!
//! A processor has eight tiles: four hold the sums of 32 rows by 32 columns, two A and two B. Each step of
//! the loop loads four tiles for four multiplications, each right before the first that needs it. A
//! multiplication takes 16 cycles and a load from L1 takes 8. Panels come from L2, whose latency a load of 16
//! lines does not hide: the tiles of the next step are prefetched, which gives 1.1 to 1.3 times the rate
//! (Sapphire Rapids, 16 virtual processors; prefetching three steps ahead or one operand alone gives less).
//!
//! A panel of B is that of other register tiles ([`super`]): one step after the other. A panel of A is cut
//! into blocks of 16 steps, and each block has its rows one after the other. All tiles have one form, which
//! is set once for each part of a kernel; a product pads its panels with zeros to whole tiles.
//!
//! The C functions are in `kiln_vector.h`. Where the compiler does not know AMX they keep the tiles in
//! memory, so that generated sources can be tested on any machine with pairs of bf16.

use std::fmt::Write;

use super::super::Helper;
use super::{Access, Tile};

/// Rows, columns and steps of the depth of a tile.
pub const EXTENT: usize = 16;

/// Most tiles of rows, and of columns, whose sums fit the processor beside operands.
const MOST: usize = 2;

/// Most rows of a panel of A.
pub const MAX_ROWS: usize = MOST * EXTENT;

/// Statement before the first tile of a part of a kernel.
pub const BEGIN: &str = "kiln_tiles_begin();\n";

/// Statement after its last tile: the operating system need not save tiles any more.
pub const END: &str = "kiln_tiles_end();\n";

/// Name and text of the function of `tile`, of 16 or 32 rows and one or two vectors. The arguments are
/// those of [`Tile::helper`]; `depth` is a multiple of 16.
pub(super) fn helper(tile: &Tile) -> Helper {
    let (high, wide) = (tile.rows / EXTENT, tile.vectors);
    debug_assert!((1..=MOST).contains(&high) && (1..=MOST).contains(&wide) && !tile.nested);
    // Pairs between rows of A, and from one block of steps to the next.
    let (a_row, a_block) = match tile.a {
        Access::Packed => (EXTENT as i64, (tile.rows * EXTENT) as i64),
        Access::Strided { free, .. } => (free, EXTENT as i64),
    };
    let b_row = match tile.b {
        Access::Packed => (wide * EXTENT) as i64,
        Access::Strided { depth, .. } => depth,
    };
    let name = tile.name();
    let head = format!(
        "void {name}(const bf16_pair *a, const bf16_pair *b, int64_t depth, float *c, int64_t ldc, int accumulate)"
    );
    let sums = |template: &dyn Fn(usize, usize, usize) -> String| -> String {
        let each = (0..high).flat_map(|i| (0..wide).map(move |j| (i, j)));
        each.map(|(i, j)| template(i * wide + j, i * EXTENT, j * EXTENT))
            .collect()
    };
    // Tiles 4 and 5 are of A, 6 and 7 of B.
    let mut step = String::new();
    for i in 0..high {
        let (tile, at) = (4 + i, (i * EXTENT) as i64 * a_row);
        let _ = writeln!(step, "        kiln_tile_load({tile}, a + {at}, {a_row});");
        let _ = writeln!(step, "        kiln_tile_prefetch(a + {}, {a_row});", a_block + at);
        for j in 0..wide {
            let (tile, at) = (6 + j, (j * EXTENT) as i64);
            if i == 0 {
                let _ = writeln!(step, "        kiln_tile_load({tile}, b + {at}, {b_row});");
                let next = EXTENT as i64 * b_row + at;
                let _ = writeln!(step, "        kiln_tile_prefetch(b + {next}, {b_row});");
            }
            let _ = writeln!(
                step,
                "        kiln_tile_dot({}, {}, {tile});",
                i * wide + j,
                4 + i
            );
        }
    }
    let body = format!(
        "    if (accumulate) {{\n{}    }} else {{\n{}    }}\n    for (int64_t k = 0; k < depth; k += {EXTENT}) {{\n{step}        a += {a_block};\n        b += \
         {};\n    }}\n{}",
        sums(&|sum, i, j| format!("        kiln_tile_load({sum}, c + {i} * ldc + {j}, ldc);\n")),
        sums(&|sum, _, _| format!("        kiln_tile_zero({sum});\n")),
        EXTENT as i64 * b_row,
        sums(&|sum, i, j| format!("    kiln_tile_store({sum}, c + {i} * ldc + {j}, ldc);\n")),
    );
    Helper {
        name,
        prototype: format!("{head};"),
        definition: format!("{head} {{\n{body}}}\n"),
    }
}
