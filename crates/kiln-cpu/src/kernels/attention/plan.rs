//! Sizes of tiles, blocks and working memory, and the loops of tiles that make a product.

use std::collections::BTreeSet;

use super::AttentionSpec;
use crate::isa::Isa;
use crate::kernels::element::{Element, Factor, Storage};
use crate::kernels::tile::amx::{self, EXTENT};
use crate::kernels::tile::{self, Access, Tile};
use crate::kernels::{Helper, indent, round_up};
use crate::policy::{ATTENTION_ROWS, ATTENTION_STRIP, SERIAL_ATTENTION};

/// Vectors in a column panel.
pub(super) const PANEL: usize = 2;

/// The decisions for one attention.
#[derive(Debug, Clone)]
pub(super) struct AttentionPlan {
    pub element: Element,
    /// What products multiply: elements, or pairs of bf16, which hold two neighbours along the sum.
    pub factor: Factor,
    /// Elements of a vector.
    pub lanes: usize,
    pub isa: Isa,
    /// Rows of a register tile.
    pub tile: usize,
    /// Query rows of a block: whole tiles.
    pub block: usize,
    /// Blocks of a head.
    pub blocks: usize,
    /// Elements between rows of a strip.
    pub ld: usize,
    /// Key rows in whole tiles.
    pub key_rows: usize,
    /// Width of queries and keys, and of values, in whole vectors.
    pub width: usize,
    pub value_width: usize,
    pub serial: bool,
}

impl AttentionPlan {
    pub fn new(spec: &AttentionSpec, isa: Isa) -> Self {
        let e = &spec.extents;
        let element = spec.storage.element();
        let lanes = element.lanes(isa);
        let factor = match spec.storage {
            Storage::BF16 if isa.has_tiles() && (spec.tallest || fills_tiles(spec)) => Factor::Bf16Tile,
            // Processors with tiles multiply pairs at less than the rate of f32: attention took 1.6 times as
            // long.
            Storage::BF16 if isa.has_bf16_pairs() && !isa.has_tiles() => Factor::Bf16Pair,
            _ => element.into(),
        };
        let tallest = tile::max_rows(isa, PANEL);
        let (tile, unit) = match factor {
            Factor::Bf16Tile => (amx::MAX_ROWS, 2 * EXTENT),
            _ if spec.tallest => (tallest, lanes),
            _ => (tile_rows(e.queries, tallest), lanes),
        };
        let key_rows = round_up(e.keys, tile);
        let ld = round_up(e.keys.max(key_rows), unit);
        // Rows whose distance is a multiple of 1 KiB share few lines of L1.
        let ld = if (ld * element.bytes()).is_multiple_of(1024) {
            ld + unit
        } else {
            ld
        };
        let most =
            (ATTENTION_STRIP / (element.bytes() * ld)).clamp(tile, ATTENTION_ROWS.max(tile)) / tile * tile;
        let count = e.queries.div_ceil(most).max(1);
        let block = round_up(e.queries.div_ceil(count).max(1), tile);
        let work = e.batch * e.heads * e.queries * e.keys * (e.width + e.value_width);
        Self {
            element,
            factor,
            lanes,
            isa,
            tile,
            block,
            blocks: e.queries.div_ceil(block),
            ld,
            key_rows,
            width: round_up(e.width, lanes),
            value_width: round_up(e.value_width, lanes),
            serial: spec.threads == 1 || work < SERIAL_ATTENTION,
        }
    }

    /// Whether products multiply pairs, one by one or in tiles.
    pub fn pairs(&self) -> bool {
        self.factor.depth() == 2
    }

    /// Whether products multiply tiles of pairs.
    pub fn tiles(&self) -> bool {
        self.factor == Factor::Bf16Tile
    }

    /// Statements in front of the first tile of AMX and behind the last one.
    pub fn around_tiles(&self) -> [String; 2] {
        amx::around(self.tiles()).map(|statement| indent(statement, 4))
    }

    /// How many factors hold so many elements; whole tiles of them.
    pub fn steps(&self, elements: usize) -> usize {
        round_up(elements.div_ceil(self.factor.depth()), self.factor.steps())
    }

    /// C expression of how many factors hold the elements that the C expression `elements` counts.
    pub fn steps_of(&self, elements: &str) -> String {
        match self.factor {
            Factor::Bf16Tile => format!("(({elements}) + 31) / 32 * 16"),
            Factor::Bf16Pair => format!("(({elements}) + 1) / 2"),
            _ => elements.to_owned(),
        }
    }

    /// C expression of where strips end whose rows see `most` keys (a C variable) at most: they are zero
    /// behind what they see, as far as products read them.
    pub fn strip_end(&self) -> String {
        let (tile, ld) = (self.tile, self.ld);
        match self.tiles() {
            true => "(most + 31) / 32 * 32".to_owned(),
            false => format!("most + {tile} < {ld} ? most + {tile} : {ld}"),
        }
    }

    /// Factors from one row of a block to the next, where each row has `width` elements (`padded` in whole
    /// vectors).
    pub fn pitch(&self, width: usize, padded: usize) -> usize {
        match self.pairs() {
            true => self.steps(width),
            false => padded,
        }
    }

    /// Pairs between rows of a strip that was rounded.
    pub fn pair_ld(&self) -> usize {
        round_up(self.ld, 2 * self.lanes) / 2
    }

    /// Factors in the transposed panels of all keys, `width` elements deep.
    pub fn turned(&self, keys: usize, width: usize) -> usize {
        round_up(keys, self.lanes) * self.steps(width)
    }
}

/// Whether an attention fills tiles of AMX so far that they pay: they multiply at some six times the rate of
/// f32, and their strips are rounded.
fn fills_tiles(spec: &AttentionSpec) -> bool {
    let e = &spec.extents;
    let volume = |unit: usize| {
        let [queries, keys] = [e.queries, e.keys].map(|extent| round_up(extent, unit));
        let [width, value_width] = [e.width, e.value_width].map(|extent| round_up(extent, unit));
        queries * keys * (width + value_width)
    };
    volume(2 * EXTENT) <= 3 * volume(1)
}

/// The height of tiles that wastes least on the last of `rows` rows. Among nearly equal heights it is the
/// largest, because higher tiles read B less often.
fn tile_rows(rows: usize, most: usize) -> usize {
    let most = most.min(rows).max(1);
    let lowest = (most / 2).max(1);
    // A step of the depth costs its rows and about one more for the vectors of B.
    let cost = |height: usize| rows.div_ceil(height).max(1) * (height + 1);
    (lowest..=most)
        .min_by_key(|&height| (cost(height), most - height))
        .unwrap_or(1)
}

/// One product of tiles: `c[rows][columns] (+)= a b`.
pub(super) struct Product<'a> {
    /// C expression of the address of A's first row in tile `i` (a C variable).
    pub a: &'a str,
    /// How A is read.
    pub a_access: Access,
    /// How B is read: packed panels, or rows of a stride.
    pub b_access: Access,
    /// C expression of B's address in the panel that starts at column `j` (a C variable).
    pub b: &'a str,
    /// C expression of the depth.
    pub depth: &'a str,
    /// C expression of the address of C at tile `i`, column `j`.
    pub c: &'a str,
    /// Elements between rows of C.
    pub ldc: usize,
    /// Whether to add to C instead of overwriting it.
    pub accumulate: bool,
    /// C expression of the number of tiles.
    pub tiles: &'a str,
    /// Statements at the start of each tile, which may `continue`.
    pub before: &'a str,
    /// Columns, in whole vectors.
    pub columns: usize,
}

/// The loops of a product; adds the tile functions that they call to `helpers`. The loop over panels is
/// outermost: a panel stays in L1 while tiles pass.
pub(super) fn product(plan: &AttentionPlan, product: &Product<'_>, helpers: &mut BTreeSet<Helper>) -> String {
    let accumulate = u8::from(product.accumulate);
    let mut call = |vectors: usize| {
        if plan.tiles() {
            let helper = amx::rows(vectors);
            let (lda, ldb) = match (product.a_access, product.b_access) {
                (Access::Strided { free, depth: 1 }, Access::Strided { free: 1, depth }) => (free, depth),
                (Access::Strided { free, depth: 1 }, _) => (free, (vectors * plan.lanes) as i64),
                (a, _) => unreachable!("tiles have rows along the depth, not {a:?}"),
            };
            let text = format!(
                "{}({}, {lda}, {}, {ldb}, {}, {}, {}, {accumulate});",
                helper.name, product.a, product.b, product.depth, product.c, product.ldc
            );
            helpers.insert(helper);
            return text;
        }
        let tile = Tile {
            rows: plan.tile,
            vectors,
            a: product.a_access,
            b: product.b_access,
            factor: plan.factor,
            nested: false,
            block: tile::BLOCK,
        };
        helpers.insert(tile.helper(plan.isa));
        format!(
            "{}({}, {}, {}, {}, {}, {accumulate});",
            tile.name(),
            product.a,
            product.b,
            product.depth,
            product.c,
            product.ldc,
        )
    };
    let vectors = product.columns / plan.lanes;
    let (full, rest) = (vectors / PANEL, vectors % PANEL);
    let wide = PANEL * plan.lanes;
    let tiles = |call: &str, margin: &str| {
        format!(
            "{margin}for (int64_t i = 0; i < {}; i++) {{\n{}{margin}    {call}\n{margin}}}\n",
            product.tiles,
            if product.before.is_empty() {
                String::new()
            } else {
                format!("{margin}    {}\n", product.before)
            }
        )
    };
    let mut text = String::new();
    if full > 0 {
        text.push_str(&format!(
            "for (int64_t j = 0; j < {}; j += {wide}) {{\n{}}}\n",
            full * wide,
            tiles(&call(PANEL), "    ")
        ));
    }
    if rest > 0 {
        text.push_str(&format!(
            "{{\n    const int64_t j = {};\n{}}}\n",
            full * wide,
            tiles(&call(rest), "    ")
        ));
    }
    text
}
