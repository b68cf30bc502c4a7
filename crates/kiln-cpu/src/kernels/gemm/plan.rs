//! The decisions of a matrix product: tile, depth, which operand is packed, what the threads share.

use super::shares::{ColumnPanels, RowPanels, Shares};
use super::{Axis, GemmSpec, Operand};
use crate::isa::Isa;
use crate::kernels::element::Factor;
use crate::kernels::round_up;
use crate::kernels::tile::{self, amx};
use crate::policy::{
    BATCH_PRODUCT, DEEP_PANELS, DEEP_RESULT, DEEP_SLICE, DEEP_SLICES, DEEP_TILE_SLICES, PACK_STEPS,
    PRODUCT_DEPTH, SERIAL_PRODUCT, TILE_DEPTH, TILE_DEPTH_THREADS,
};

/// The unit of work that threads share.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Parallel {
    /// Nothing: one thread runs it all.
    Serial,
    /// The batch: each product is one thread's.
    Batch,
    /// The streamed panels of each product.
    Panels,
    /// Slices of the depth.
    Depth,
}

/// Which operand each thread takes some panels of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Stream {
    /// Row panels, of A.
    Rows,
    /// Column panels, of B.
    Columns,
}

#[derive(Debug, Clone)]
pub(super) struct ProductPlan {
    /// The factors that panels hold. The depth is counted in these.
    pub factor: Factor,
    pub lanes: usize,
    /// Vectors in a column panel.
    pub vectors: usize,
    /// Vectors in the last column panel.
    pub last_vectors: usize,
    pub column_panels: usize,
    /// Height of the first `tall_panels` row panels; the others have one row less.
    pub rows: usize,
    pub tall_panels: usize,
    pub row_panels: usize,
    /// Depth of all cuts.
    pub all: usize,
    /// Depth of each cut but the last.
    pub depth: usize,
    pub cuts: usize,
    /// Steps of the depth in which panels meet at a time: [`Self::depth`], or chunks of it, or slices that
    /// threads share.
    pub chunk: usize,
    pub a_packed: bool,
    pub b_packed: bool,
    pub stream: Stream,
    /// Streamed panels that a thread works on at a time.
    pub group: usize,
    /// Whether row panels of AMX tiles stay in L1, chunk by chunk of the depth, while column panels pass.
    pub near: bool,
    /// Stationary panels of a block of the result, which has [`Self::group`] streamed ones.
    pub part: usize,
    /// Whether both operands are packed before panels meet, and threads share blocks of the result.
    pub shared: bool,
    /// Whether streamed panels are packed chunk by chunk of the depth, each for all stationary panels.
    pub by_chunk: bool,
    pub parallel: Parallel,
    /// Whether tiles store into the result themselves.
    pub in_result: bool,
}

impl ProductPlan {
    pub fn new(spec: &GemmSpec<'_>, isa: Isa) -> Self {
        let lanes = spec.element().lanes(isa);
        let factor = spec.factor(isa);
        let (m, n) = (spec.m, spec.n);
        let tiles = factor == Factor::Bf16Tile;
        let vectors = match tiles {
            true => n.div_ceil(lanes).min(2),
            false => choose_vectors(m, n, lanes, isa),
        };
        let width = vectors * lanes;
        let column_panels = n.div_ceil(width);
        let last_vectors = (n - (column_panels - 1) * width).div_ceil(lanes);
        let near = tiles && spec.threads <= TILE_DEPTH_THREADS;
        let packed = [
            pack_a(&spec.a, factor, spec.k, n, lanes),
            factor.depth() > 1 || pack_b(&spec.b, m, n, lanes),
        ];
        let near = near && slices_of(spec, tiles).is_none();
        let depth = Depth::new(spec, factor, lanes, near);
        let parallel = match slices_of(spec, tiles) {
            Some(_) => Parallel::Depth,
            None => Parallel::of(spec),
        };
        // Tiles store whole vectors, and those of AMX whole tiles. Sums of several chunks add up faster in a
        // block, where rows are near each other.
        let in_result = spec
            .epilogue
            .memory
            .as_ref()
            .is_some_and(|memory| memory.col_stride == 1)
            && n.is_multiple_of(lanes)
            && (!tiles || m.is_multiple_of(amx::EXTENT) && depth.chunk == depth.each)
            && parallel != Parallel::Depth;
        let tallest = match tiles {
            true => amx::MAX_ROWS.min(round_up(m, amx::EXTENT)),
            false => tile::max_rows(isa, vectors),
        };
        let columns = ColumnPanels {
            panels: column_panels,
            width,
        };
        let shares = Shares::new(spec, tiles, tallest, &columns, &depth, packed, parallel);
        let RowPanels { panels, rows } = shares.rows;
        let (row_panels, tall_panels) = match tiles {
            // Whole tiles; the last panel may have rows that are not there.
            true => (panels, panels),
            false => (panels, m - panels * (rows - 1)),
        };
        Self {
            factor,
            lanes,
            vectors,
            last_vectors,
            column_panels,
            rows,
            tall_panels,
            row_panels,
            all: depth.all,
            depth: depth.each,
            cuts: depth.cuts,
            chunk: depth.chunk,
            near,
            a_packed: packed[0],
            b_packed: packed[1],
            stream: shares.stream,
            group: shares.group,
            part: shares.part,
            shared: shares.shared,
            by_chunk: shares.by_chunk,
            parallel,
            in_result,
        }
    }

    /// Panels of the streamed operand and of the stationary one.
    pub fn panels(&self) -> (usize, usize) {
        match self.stream {
            Stream::Rows => (self.row_panels, self.column_panels),
            Stream::Columns => (self.column_panels, self.row_panels),
        }
    }

    /// Steps of the depth that are packed at a time: all, or so many that threads have enough to share.
    pub fn pack_steps(&self) -> usize {
        let steps = match self.parallel {
            Parallel::Panels => PACK_STEPS.min(self.depth),
            _ => self.depth,
        };
        steps.max(1)
    }

    /// Whether panels meet in chunks of the depth.
    pub fn in_chunks(&self) -> bool {
        self.chunk < self.depth
    }

    /// Slices of each cut of the depth, and of all cuts.
    pub fn slices(&self) -> (usize, usize) {
        let of = |depth: usize| depth.div_ceil(self.chunk);
        let last = self.all - (self.cuts - 1) * self.depth;
        (of(self.depth), (self.cuts - 1) * of(self.depth) + of(last))
    }

    /// Steps of streamed panels that are packed at a time.
    pub fn streamed_steps(&self) -> usize {
        match self.by_chunk {
            true => self.chunk,
            false => self.depth,
        }
    }

    /// Columns of a full column panel.
    pub fn width(&self) -> usize {
        self.vectors * self.lanes
    }

    /// Columns of all panels together: `n` rounded up to whole vectors.
    pub fn padded_columns(&self) -> usize {
        (self.column_panels - 1) * self.width() + self.last_vectors * self.lanes
    }

    /// Whether panels are of whole tiles of AMX.
    pub fn tiles(&self) -> bool {
        self.factor == Factor::Bf16Tile
    }

    /// Rows of the last row panel of tiles, those included that only fill a tile.
    pub fn last_rows(&self, m: usize) -> usize {
        round_up(m - (self.row_panels - 1) * self.rows, amx::EXTENT)
    }

    /// Rows of all row panels together: `m`, rounded up to whole tiles where there are tiles.
    pub fn padded_rows(&self, m: usize) -> usize {
        match self.tiles() {
            true => round_up(m, amx::EXTENT),
            false => m,
        }
    }

    /// Whether some row panels have fewer rows than `rows`.
    pub fn uneven_rows(&self) -> bool {
        self.tall_panels < self.row_panels
    }

    /// Whether the last column panel is narrower than the others.
    pub fn uneven_columns(&self) -> bool {
        self.last_vectors < self.vectors && self.column_panels > 1
    }
}

impl Parallel {
    /// What threads share of a product.
    fn of(spec: &GemmSpec<'_>) -> Self {
        let flops = 2 * spec.m * spec.n * spec.k;
        if spec.threads == 1 || flops * spec.batch < SERIAL_PRODUCT {
            Self::Serial
        } else if spec.batch > 1 && (flops <= BATCH_PRODUCT || spec.batch >= 8 * spec.threads) {
            Self::Batch
        } else {
            Self::Panels
        }
    }
}

/// How the depth is taken, in steps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Depth {
    /// Of all cuts.
    pub all: usize,
    /// Of each cut but the last.
    pub each: usize,
    pub cuts: usize,
    /// Steps in which panels meet at a time.
    pub chunk: usize,
}

impl Depth {
    /// The depth of a product of `factor`s; see [`ProductPlan::near`].
    fn new(spec: &GemmSpec<'_>, factor: Factor, lanes: usize, near: bool) -> Self {
        let all = round_up(spec.k.div_ceil(factor.depth()), factor.steps());
        let longest = spec
            .a
            .segment
            .or(spec.b.segment)
            .filter(|&segment| segment < spec.k)
            .map_or(PRODUCT_DEPTH, |segment| segment / factor.depth());
        let cuts = all.div_ceil(longest).max(1);
        let each = match cuts {
            1 => all,
            _ if longest == PRODUCT_DEPTH => round_up(all.div_ceil(cuts), lanes),
            _ => longest,
        };
        let evenly = |longest: usize| each.div_ceil(each.div_ceil(longest).max(1));
        let chunk = match slices_of(spec, factor == Factor::Bf16Tile) {
            Some(slices) => round_up(evenly(all.div_ceil(slices)), factor.steps()),
            None if near => round_up(evenly(TILE_DEPTH), factor.steps()),
            None => each,
        };
        Self {
            all,
            each,
            cuts,
            chunk,
        }
    }
}

/// Slices of the depth that threads share, if the product is deep; `tiles` says whether it multiplies tiles.
/// They follow from the shape alone, because each is added up by itself.
fn slices_of(spec: &GemmSpec<'_>, tiles: bool) -> Option<usize> {
    let (m, n, k) = (spec.m, spec.n, spec.k);
    let (result, bytes) = (m * n, spec.element().bytes());
    let fills = k >= DEEP_SLICES * DEEP_SLICE && 2 * result * k >= SERIAL_PRODUCT;
    // Each segment would be a slice, and there may be many.
    let in_segments = [&spec.a, &spec.b]
        .iter()
        .any(|operand| operand.segment.is_some_and(|length| length < k));
    if spec.batch != 1 || result * bytes > DEEP_RESULT || !fills || in_segments {
        return None;
    }
    let panels = (m + n) * k * if tiles { 2 } else { bytes };
    // Sums are written and read again.
    let affordable = panels / (2 * 2 * bytes * result);
    let wanted = panels.div_ceil(DEEP_PANELS).max(DEEP_SLICES).min(affordable);
    match tiles {
        true => (wanted >= DEEP_TILE_SLICES).then_some(wanted),
        false => Some(wanted.max(DEEP_SLICES)),
    }
}

fn choose_vectors(m: usize, n: usize, lanes: usize, isa: Isa) -> usize {
    let needed = n.div_ceil(lanes);
    // Few rows leave registers free: wider tiles then keep more multiply-adds in flight.
    let wanted = if m <= tile::max_rows(isa, 4) { 4 } else { 2 };
    match needed {
        3 if m > tile::max_rows(isa, 4) => 3,
        _ => needed.min(wanted),
    }
}

/// Whether packing A pays. Each element is used once for each column panel; a tile can read A in place with
/// any stride, at some cost in cache lines. Pairs can only be read in place if they lie in memory as pairs.
fn pack_a(a: &Operand<'_>, factor: Factor, k: usize, n: usize, lanes: usize) -> bool {
    let (memory, bytes) = match factor {
        Factor::Bf16Pair => (&a.halves, 2),
        _ => (&a.memory, a.element.bytes() as i64),
    };
    let Some(memory) = memory else { return true };
    if factor == Factor::Bf16Tile {
        return true;
    }
    let in_pairs = memory.depth_stride == 1 && memory.free_stride % 2 == 0 && k.is_multiple_of(2);
    if factor == Factor::Bf16Pair && !in_pairs {
        return true;
    }
    if n <= 4 * lanes {
        return false;
    }
    // Rows whose distance is a multiple of 2 KiB fight for the same lines of L1.
    let aliased = memory.free_stride * bytes % 2048 == 0 && memory.free_stride != 0;
    let in_lines = a.contiguous == Some(Axis::Depth) && !aliased;
    !(in_lines && n <= 32 * lanes)
}

/// Whether packing B pays. In place, whole vectors must be readable along the columns.
fn pack_b(b: &Operand<'_>, m: usize, n: usize, lanes: usize) -> bool {
    let in_place = b.memory.as_ref().is_some_and(|memory| memory.free_stride == 1) && n.is_multiple_of(lanes);
    !(in_place && m <= 48)
}

#[cfg(test)]
mod tests {
    use super::super::Epilogue;
    use super::*;
    use crate::kernels::element::Storage;

    /// Streamed and stationary panels of a block of a product on so many threads, if they share blocks.
    fn blocks_of(
        storage: Storage,
        [m, n, k]: [usize; 3],
        transposed: [bool; 2],
        threads: usize,
    ) -> Option<[usize; 2]> {
        let plan = ProductPlan::new(&spec(storage, [m, n, k], transposed, threads), Isa::AmxBf16);
        plan.shared.then_some([plan.group, plan.part])
    }

    fn spec(
        storage: Storage,
        [m, n, k]: [usize; 3],
        transposed: [bool; 2],
        threads: usize,
    ) -> GemmSpec<'static> {
        let operand = |free: usize, transposed: bool| {
            let (free, depth) = if transposed { (1, free) } else { (k, 1) };
            Operand::stored(storage, "x", &[], free as i64, depth as i64)
        };
        GemmSpec {
            name: String::new(),
            comment: String::new(),
            batch: 1,
            m,
            n,
            k,
            a: operand(m, transposed[0]),
            b: operand(n, transposed[1]),
            epilogue: Epilogue::store("y", &[], n as i64, 1),
            params: Vec::new(),
            threads,
        }
    }

    #[test]
    fn threads_share_blocks_where_they_pay() {
        let blocks_of = |sizes, transposed| blocks_of(Storage::BF16, sizes, transposed, 16);
        // Of bert-base: a layer, its gradients of the input and of the weight. B is the weight, whose rows
        // are those of the depth.
        assert_eq!(blocks_of([2048, 768, 768], [false, true]), None);
        assert_eq!(blocks_of([2048, 768, 3072], [false, false]), None);
        assert_eq!(blocks_of([768, 768, 2048], [true, true]), Some([6, 6]));
        assert_eq!(blocks_of([1024, 1024, 1024], [false, true]), Some([8, 8]));
        assert!(blocks_of([768, 3072, 2048], [true, true]).is_some());
        // The logits of llama-15m: the packed weight would take much memory.
        assert_eq!(blocks_of([288, 32000, 4096], [true, true]), None);
    }

    #[test]
    fn threads_share_slices_of_deep_products() {
        let plan = |[m, n, k]: [usize; 3], threads| {
            let spec = spec(Storage::F32, [m, n, k], [true, true], threads);
            ProductPlan::new(&spec, Isa::AmxBf16)
        };
        // Of llama-15m: the gradient of a weight.
        let deep = plan([288, 768, 4096], 2);
        assert_eq!(
            (deep.parallel, deep.chunk, deep.slices()),
            (Parallel::Depth, 256, (16, 16))
        );
        // Of bert-base, and the logits of llama-15m: results beyond L2.
        assert_eq!(plan([288, 32_000, 4096], 16).parallel, Parallel::Panels);
        assert_eq!(plan([768, 768, 2048], 16).parallel, Parallel::Panels);
        // A depth that is cut has slices of its cuts.
        let cut = plan([64, 256, 50_176], 16);
        assert_eq!(
            (cut.cuts, cut.depth, cut.chunk, cut.slices()),
            (13, 3872, 775, (5, 65))
        );
    }
}
