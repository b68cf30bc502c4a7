//! The numbers of a product that Kiln's own template computes ([`super::warpgroups`]): the shape of its
//! tiles, and what threads and shared memory are used for.

use crate::emit::nest::PROCESSORS;
use crate::products::Product;

/// Steps of the depth in a place of shared memory, and columns that a turned operand comes in.
pub(super) const DEPTH: u64 = 64;
/// Neighbours that a finishing thread has.
pub(super) const NEIGHBOURS: u64 = 8;
/// Rows of a tile where sums of columns decide nothing else.
pub(super) const TILE_ROWS: u64 = 128;
/// Bytes of shared memory that a block may ask for, without the barriers.
const SHARED: u64 = (227 << 10) - 512;
/// Places begin at multiples of so many bytes.
const BORDER: u64 = 1024;
/// Turns that a finishing thread has in shared memory, where two groups multiply.
const AHEAD: u64 = 3;
/// Registers of a thread that multiplies, and of the others, where the latter have turns ahead: those of 512
/// threads, which are 128 each, shared out otherwise. With 128, the gradient's sums of two batch norms behind
/// [401408, 64] · [64, 256] take 401 microseconds, with 160 349 (H100).
const SHARED_OUT: [u32; 2] = [96, 160];
/// The same where one group multiplies: what it gives back is shared by three.
const SHARED_OUT_BY_ONE: [u32; 2] = [96, 136];
/// Rows of a tile that one group multiplies: as many sums in each thread as where two have 128.
const FEW_ROWS: u64 = 64;
/// Depth up to which one group keeps up with those who finish, and the right operand stays in shared memory.
const SHORT: u64 = 256;
/// Bytes that are under way to those who finish where one group multiplies. A multiprocessor's part of 4.2 TB
/// a second is 32 bytes a nanosecond, and they take about a microsecond (H200).
const UNDER_WAY: u64 = 40 << 10;
/// Tiles of results between one group that multiplies and those who finish. Tiles are short work for these:
/// they have the next one when they are through, and warps need not wait for each other.
const RESULTS_OF_ONE: u64 = 2;
/// Least pieces that are kept in shared memory where two groups multiply and threads have turns ahead. Sums
/// behind [25088, 256] · [256, 1024] with 16 pieces take 103 microseconds, from the cache 113, behind
/// [401408, 64] · [64, 256] 355 and 366; with 8 such kernels take a tenth longer than from the cache. Without
/// turns ahead it always pays: behind [401408, 256] · [256, 64] 84.5 and 92, behind [100352, 512] · [512,
/// 128] 46 and 49.5 (H200).
const MANY_PIECES: u64 = 16;

/// Widths of a tile. Each with the clocks that a step of the depth takes, of two floating-point operations a
/// thousand and twenty-four a clock: narrower tiles read their operands more often (H100).
pub(super) const WIDTHS: [(u64, f64); 3] = [(256, 1024.0), (192, 790.0), (128, 590.0)];
/// The same where a nest follows, which also takes a part of what shared memory moves in a clock. A tile of
/// 256 leaves registers for three warps that finish, a narrower one for seven: SwiGLU behind [8192, 768] ·
/// [768, 2048] takes 70, 61 and 55 microseconds, behind [8192, 1024] · [1024, 32768] 1201, 1055 and 1067; its
/// gradient 1362, 1208 and 1361 (H100).
pub(super) const WIDTHS_WITH_NEST: [(u64, f64); 3] = [(256, 1600.0), (192, 950.0), (128, 640.0)];
/// Clocks that a block takes for a tile besides: filling the places, and what is left when all have
/// multiplied.
pub(super) const TILE_CLOCKS: f64 = 2000.0;

/// The template's numbers for a product.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Case {
    /// Rows of a tile.
    pub(super) rows: u64,
    /// Columns of a tile.
    pub(super) columns: u64,
    /// Whether results of 16 bits are finished by warps of their own; those of f32 are stored by those who
    /// multiply.
    pub(super) finishes: bool,
    /// Whether a block stays in its columns, whose sums its threads keep.
    pub(super) keeps_columns: bool,
    /// Groups of four warps that multiply.
    pub(super) groups: u64,
    /// Steps of the depth of a right operand that stays in shared memory; 0 if it comes with the left one.
    pub(super) right_steps: u64,
    /// Whether the right operand is turned, which then comes in whole blocks of [`DEPTH`] of its columns.
    pub(super) right_turned: bool,
    /// Bytes of a turn that a finishing thread has in shared memory, ahead of its use; 0 if it has one in
    /// registers.
    pub(super) ahead: u64,
    /// Turns that it has there.
    pub(super) turns: u64,
    /// Pieces of sixteen bytes that a block keeps of what each thread side by side needs of its columns.
    pub(super) pieces_kept: u64,
}

/// Columns of the widest tile where sums are kept. A wider one takes registers that a nest's loads need:
/// statistics behind [401408, 64] · [64, 256] take 101 microseconds, with 256 columns 114 (H100).
pub(super) const WIDEST_KEPT: u64 = 128;
/// Columns of the widest tile that is 256 rows tall: each thread that multiplies has as many sums.
const WIDEST_TALL: u64 = 96;
/// The same where it has fewer registers.
const WIDEST_TALL_AHEAD: u64 = 64;
/// Columns up to which tiles are as wide as they need be. Narrow tiles are short work, so they are also tall:
/// statistics behind [1605632, 32] · [32, 16] take 110 microseconds in tiles of 128 by 64, 80 by 16, and 70
/// in such of 256 by 16; behind [1605632, 16] · [16, 96] 251 in tiles of 128 by 128, and 159 in such of 256
/// by 96; behind [401408, 24] · [24, 144] 153, and in two of 256 by 80 92 (H100).
const FITTED: u64 = 192;

impl Case {
    /// Tiles of so many columns, whatever follows the product.
    pub(super) fn plain(product: &Product, columns: u64, finishes: bool) -> Self {
        Self {
            rows: TILE_ROWS,
            columns,
            finishes,
            keeps_columns: false,
            groups: 2,
            right_steps: 0,
            right_turned: !product.right.transposed,
            ahead: 0,
            turns: 0,
            pieces_kept: 0,
        }
    }

    /// Tiles as wide as a result of few columns, and tall if they are narrow.
    pub(super) fn fitted(product: &Product, finishes: bool) -> Self {
        let columns = product.n.next_multiple_of(16);
        let rows = if columns <= WIDEST_TALL {
            2 * TILE_ROWS
        } else {
            TILE_ROWS
        };
        Self {
            rows,
            ..Self::plain(product, columns, finishes)
        }
    }

    /// Tiles whose columns a block stays in. `has_ahead` is whether threads have turns in shared memory,
    /// which only the nest says how large.
    pub(super) fn with_sums(product: &Product, has_ahead: bool) -> Self {
        let fitted = |tiles: u64| product.n.div_ceil(tiles).next_multiple_of(16);
        let columns = if product.n <= WIDEST_KEPT {
            fitted(1)
        } else if product.n <= FITTED {
            fitted(2)
        } else {
            WIDEST_KEPT
        };
        let case = Self {
            columns,
            keeps_columns: true,
            ..Self::plain(product, columns, true)
        };
        let tall = Self {
            rows: 2 * TILE_ROWS,
            ..case
        };
        let widest = if has_ahead { WIDEST_TALL_AHEAD } else { WIDEST_TALL };
        let rows = |case: Self| case.rows_of_block(product);
        match columns <= widest && 4 * rows(tall) <= 5 * rows(case) {
            true => tall,
            false => case,
        }
    }

    /// Tiles whose columns a block stays in, of few rows: one group multiplies them by a right operand that
    /// stays in shared memory, so that four more warps finish. For nests whose threads have turns ahead,
    /// which their arithmetic holds up: while seven warps finish with the gradient's sums of two batch norms
    /// behind [401408, 64] · [64, 256], memory moves 2.4 TB a second of the 4.2 that it can (H200). None for
    /// deep products, and for narrow ones, whose tiles are tall.
    pub(super) fn of_one_group(product: &Product) -> Option<Self> {
        let case = Self {
            rows: FEW_ROWS,
            groups: 1,
            right_steps: product.k.div_ceil(DEPTH),
            ..Self::with_sums(product, true)
        };
        (product.k <= SHORT && case.columns > WIDEST_TALL_AHEAD).then_some(case)
    }

    pub(super) fn threads(self) -> u64 {
        // The sums of a tile of 256 columns take 128 registers of each thread that multiplies.
        if self.finishes && self.columns < 256 {
            512
        } else {
            384
        }
    }

    /// The thread behind those that multiply, which are from number 128 on.
    pub(super) fn behind_groups(self) -> u64 {
        128 + 128 * self.groups
    }

    /// Threads that finish: all but warp 0 and the groups that multiply.
    pub(super) fn finishers(self) -> u64 {
        if self.finishes {
            self.threads() - 32 - 128 * self.groups
        } else {
            0
        }
    }

    /// Registers of a thread that multiplies, and of the others; none if all have as many.
    pub(super) fn registers(self) -> Option<[u32; 2]> {
        let shared_out = match self.groups {
            1 => SHARED_OUT_BY_ONE,
            _ => SHARED_OUT,
        };
        (self.ahead > 0).then_some(shared_out)
    }

    /// Whether so many pieces of what a thread needs of its columns are kept in shared memory rather than
    /// left to the cache.
    pub(super) fn keeps_pieces(self, pieces: u64, has_ahead: bool) -> bool {
        self.groups == 1 || !has_ahead || pieces >= MANY_PIECES
    }

    /// Rows that are finished side by side: so many threads have the same columns.
    pub(super) fn lines(self) -> u64 {
        self.finishers() / (self.columns / NEIGHBOURS)
    }

    /// How many rows a finishing thread has at a time, of so many at most.
    pub(super) fn together(self, most: u64) -> u64 {
        (self.rows / self.lines())
            .clamp(1, most)
            .next_power_of_two()
            .min(most)
    }

    /// Bytes of a step of the depth of the right operand.
    fn right_step(self) -> u64 {
        let columns = match self.right_turned {
            true => self.columns.next_multiple_of(DEPTH),
            false => self.columns,
        };
        columns * DEPTH * 2
    }

    /// Bytes of a place for operands.
    fn stage(self) -> u64 {
        let left = self.rows * DEPTH * 2;
        match self.right_steps {
            0 => left + self.right_step(),
            _ => left,
        }
    }

    /// Tiles of results between those who multiply and those who finish.
    pub(super) fn result_tiles(self) -> u64 {
        match self.groups {
            1 => RESULTS_OF_ONE,
            _ => 1,
        }
    }

    fn results(self) -> u64 {
        if self.finishes {
            self.result_tiles() * self.rows * (self.columns * 2 + 16)
        } else {
            0
        }
    }

    /// Places for operands.
    pub(super) fn stages(self) -> u64 {
        (SHARED.saturating_sub(self.others()) / self.stage()).min(6)
    }

    /// Least places. One is filled while another is multiplied, and of a left operand alone, which is soon
    /// multiplied, one more.
    pub(super) fn least_stages(self) -> u64 {
        if self.right_steps > 0 { 3 } else { 2 }
    }

    /// The same with turns in shared memory, for each of which a thread loads so many bytes.
    pub(super) fn with_turns(self, loaded: u64) -> Self {
        let turn = loaded.max(1) * self.finishers();
        Self {
            // An odd number of vectors of sixteen bytes.
            ahead: loaded / 32 * 32 + 16,
            turns: match self.groups {
                1 => 1 + UNDER_WAY.div_ceil(turn),
                _ => AHEAD,
            },
            ..self
        }
    }

    /// Bytes of the turns that threads have ahead.
    fn bytes_ahead(self) -> u64 {
        self.turns * self.ahead * self.finishers()
    }

    /// Bytes that a block keeps of its columns.
    fn kept(self) -> u64 {
        self.pieces_kept * 16 * (self.columns / NEIGHBOURS)
    }

    /// Bytes of all but the places for operands.
    fn others(self) -> u64 {
        let right = self.right_steps * self.right_step();
        right + self.results() + self.kept() + self.bytes_ahead() + BORDER
    }

    pub(super) fn shared_bytes(self) -> u64 {
        self.stages() * self.stage() + self.others()
    }

    /// How many tiles a result has, one below the other and side by side.
    pub(super) fn tiles(self, product: &Product) -> [u64; 2] {
        [product.m.div_ceil(self.rows), product.n.div_ceil(self.columns)]
    }

    /// Blocks below each other, where they stay in their columns: as many on every device, because what they
    /// keep is added up block by block.
    pub(super) fn blocks_down(self, product: &Product) -> u64 {
        let [down, across] = self.tiles(product);
        down.min((PROCESSORS as u64 / across).max(1))
    }

    /// Rows that such a block computes at most.
    pub(super) fn rows_of_block(self, product: &Product) -> u64 {
        self.tiles(product)[0].div_ceil(self.blocks_down(product)) * self.rows
    }

    /// Blocks on so many multiprocessors.
    pub(super) fn blocks(self, product: &Product, processors: u32) -> u64 {
        let [down, across] = self.tiles(product);
        match self.keeps_columns {
            true => self.blocks_down(product) * across,
            false => (down * across).min(u64::from(processors.max(1))),
        }
    }
}
