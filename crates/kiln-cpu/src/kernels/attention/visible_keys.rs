//! How many keys each row sees, and the products that leave out the others.

use std::collections::BTreeSet;

use super::memory::Memory;
use super::plan::{AttentionPlan, Product, product};
use super::{AttentionSpec, Skips, View};
use crate::kernels::tile::Access;
use crate::kernels::{Helper, indent};

/// How many keys each row sees, where that varies: `n_of` for each row of a block, `limit_of` the most of
/// each tile, `most` the most of all. Strips are zero up to `end`.
pub(super) struct VisibleKeys {
    /// Statements when the plane of the mask may have changed.
    pub by_head: String,
    /// Statements at the start of a block.
    pub by_block: String,
    /// C expression for row `r` of a block.
    pub row: &'static str,
    /// C expression for tile `i` of a block.
    pub tile: &'static str,
}

impl VisibleKeys {
    /// `all` is a C condition: row `row0 + r` takes all keys. It is tested where hidden keys are mostly
    /// left out.
    pub fn new(spec: &AttentionSpec, plan: &AttentionPlan, all: &str, memory: &mut Memory) -> Self {
        let e = &spec.extents;
        let (queries, keys, ld, tile) = (e.queries as i64, e.keys as i64, plan.ld, plan.tile);
        if !spec.varies() {
            return Self {
                by_head: String::new(),
                by_block: format!("const int64_t end = {ld}, most = {keys};\n"),
                row: "most",
                tile: "most",
            };
        }
        let mut by_head = String::new();
        let mut bounds = format!("int64_t n = {keys};\n");
        if let Some(hidden) = spec.hidden.as_ref().filter(|_| spec.skips != Skips::Never) {
            memory.part("int32_t", "last", e.queries);
            by_head = last_seen(spec, hidden);
            bounds = match spec.skips {
                Skips::Mostly => format!("int64_t n = {all} ? {keys} : last[row0 + r];\n"),
                _ => "int64_t n = last[row0 + r];\n".into(),
            };
        }
        if spec.causal {
            let ahead = keys - queries + 1;
            bounds.push_str(&format!(
                "if (row0 + r + {ahead} < n) n = row0 + r + {ahead};\nif (n < 0) n = 0;\n"
            ));
        }
        // No initialiser: where sizes are variables the number of tiles is one.
        let tiles = plan.block / tile;
        let by_block = format!(
            "/* How many keys each row sees, and each tile of rows. */\nint32_t n_of[{}], limit_of[{tiles}];\nfor (int64_t t = 0; t < {tiles}; t++) limit_of[t] = 0;\nint64_t most = 0;\nfor (int64_t r = 0; r < rows; r++) {{\n{}    n_of[r] = (int32_t)n;\n    if \
             (limit_of[r / {tile}] < n) limit_of[r / {tile}] = (int32_t)n;\n    if (most < n) most = n;\n}}\nconst int64_t end = {};\n",
            plan.block,
            indent(&bounds, 4),
            plan.strip_end(),
        );
        Self {
            by_head,
            by_block,
            row: "n_of[r]",
            tile: "limit_of[i]",
        }
    }
}

/// Statements that find `last[row]`, one past the last key that is not hidden from the row, when the plane
/// of the mask changes. A row whose keys are all hidden sees them all, with equal weights.
fn last_seen(spec: &AttentionSpec, hidden: &View) -> String {
    let e = &spec.extents;
    let [of_batch, of_head, of_row, of_key] = hidden.strides;
    let plane = format!(
        "{} + {}",
        if of_batch == 0 {
            "0".into()
        } else {
            format!("batch * {}", e.heads)
        },
        if of_head == 0 { "0" } else { "head" }
    );
    let quick = if of_key == 1 {
        "        for (uint64_t some; n >= 8; n -= 8) {\n            __builtin_memcpy(&some, from + n - 8, 8);\n            if (some != \
         UINT64_C(0x0101010101010101)) break;\n        }\n"
    } else {
        ""
    };
    format!(
        "/* One past the last key that each row sees. */\nif (looked != {plane}) {{\n    looked = {plane};\n    for (int64_t row = 0; row < {queries}; row++) {{\n        const uint8_t *from = {} + row * \
         {of_row};\n        int64_t n = {keys};\n{quick}        while (n > 0 && from[(n - 1) * {of_key}]) n--;\n        last[row] = n > 0 ? (int32_t)n : \
         {keys};\n    }}\n}}\n",
        hidden.head("batch", "head"),
        queries = e.queries,
        keys = e.keys,
    )
}

/// Operands and result of a product that makes a strip.
pub(super) struct Strip<'a> {
    /// C expression of the block of rows.
    pub rows: &'a str,
    /// From one of its rows to the next, in factors (elements or pairs).
    pub pitch: usize,
    /// Elements of a row.
    pub width: usize,
    /// C expression of the transposed panels, of keys or of values.
    pub panels: &'a str,
    /// C expression of the result.
    pub to: &'a str,
}

impl VisibleKeys {
    /// The product of a block of rows with transposed panels, into a strip; tiles that no row sees are left
    /// out.
    pub fn product(
        &self,
        spec: &AttentionSpec,
        plan: &AttentionPlan,
        strip: &Strip<'_>,
        helpers: &mut BTreeSet<Helper>,
    ) -> String {
        let Strip {
            rows,
            pitch,
            width,
            panels,
            to,
        } = *strip;
        let (tile, depth) = (plan.tile, plan.steps(width));
        let before = if spec.varies() {
            format!("if (j >= {}) continue;", self.tile)
        } else {
            String::new()
        };
        product(
            plan,
            &Product {
                a: &format!("{rows} + i * {}", tile * pitch),
                a_access: Access::Strided {
                    free: pitch as i64,
                    depth: 1,
                },
                b_access: Access::Packed,
                b: &format!("{panels} + j * {depth}"),
                depth: &depth.to_string(),
                c: &format!("{to} + i * {} + j", tile * plan.ld),
                ldc: plan.ld,
                accumulate: false,
                tiles: "tiles",
                before: &before,
                columns: spec.extents.keys.div_ceil(plan.lanes) * plan.lanes,
            },
            helpers,
        )
    }
}
