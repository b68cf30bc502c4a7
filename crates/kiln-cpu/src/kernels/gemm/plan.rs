//! The decisions of a matrix product: tile, blocks, which operand is packed, what the threads share.

use super::pack::Pairs;
use super::{Axis, GemmSpec, Operand};
use crate::isa::Isa;
use crate::kernels::element::Factor;
use crate::kernels::round_up;
use crate::kernels::tile::{self, amx};
use crate::policy::{
    BATCH_PRODUCT, BLOCK_PANELS, BLOCKS_L2, BLOCKS_PANELS, BLOCKS_SHARE, BLOCKS_STREAMED, BLOCKS_WASTE,
    PACK_STEPS, PRODUCT_DEPTH, PRODUCT_L2, SERIAL_PRODUCT, TILE_DEPTH, TILE_DEPTH_THREADS,
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
    /// Steps of the depth in which panels meet at a time: [`Self::depth`], or chunks of it.
    pub chunk: usize,
    pub a_packed: bool,
    pub b_packed: bool,
    pub stream: Stream,
    /// Streamed panels that a thread works on at a time.
    pub group: usize,
    /// Set if both operands are packed before panels meet, and threads share blocks of the result: the
    /// stationary panels of a block, which has [`Self::group`] streamed ones.
    pub part: Option<usize>,
    pub parallel: Parallel,
    /// Whether tiles store into the result themselves.
    pub in_result: bool,
}

impl ProductPlan {
    pub fn new(spec: &GemmSpec<'_>, isa: Isa) -> Self {
        let lanes = spec.element().lanes(isa);
        let factor = spec.factor(isa);
        let (m, n, k) = (spec.m, spec.n, spec.k);
        let tiles = factor == Factor::Bf16Tile;
        let all = round_up(k.div_ceil(factor.depth()), factor.steps());
        let vectors = match tiles {
            true => n.div_ceil(lanes).min(2),
            false => choose_vectors(m, n, lanes, isa),
        };
        let width = vectors * lanes;
        let column_panels = n.div_ceil(width);
        let last_vectors = (n - (column_panels - 1) * width).div_ceil(lanes);
        let longest = spec
            .a
            .segment
            .or(spec.b.segment)
            .filter(|&segment| segment < k)
            .map_or(PRODUCT_DEPTH, |segment| segment / factor.depth());
        let cuts = all.div_ceil(longest).max(1);
        let depth = match cuts {
            1 => all,
            _ if longest == PRODUCT_DEPTH => round_up(all.div_ceil(cuts), lanes),
            _ => longest,
        };

        // Tiles store whole vectors, and those of AMX whole tiles.
        let in_result = spec
            .epilogue
            .memory
            .as_ref()
            .is_some_and(|memory| memory.col_stride == 1)
            && n.is_multiple_of(lanes)
            && (!tiles || m.is_multiple_of(amx::EXTENT));
        let adds_up = in_result || cuts > 1;
        let is_deep = depth >= 2 * TILE_DEPTH && spec.threads <= TILE_DEPTH_THREADS;
        let chunk = match tiles && adds_up && is_deep {
            true => round_up(depth.div_ceil(depth.div_ceil(TILE_DEPTH)), amx::EXTENT),
            false => depth,
        };

        let flops = 2 * m * n * k;
        let parallel = if spec.threads == 1 || flops * spec.batch < SERIAL_PRODUCT {
            Parallel::Serial
        } else if spec.batch > 1 && (flops <= BATCH_PRODUCT || spec.batch >= 8 * spec.threads) {
            Parallel::Batch
        } else {
            Parallel::Panels
        };

        let sharers = match parallel {
            Parallel::Panels => spec.threads,
            _ => 1,
        };
        let tallest = match tiles {
            true => amx::MAX_ROWS.min(round_up(m, amx::EXTENT)),
            false => tile::max_rows(isa, vectors),
        };
        let shared = RowPanels::shared(m, tallest, tiles, sharers);
        let waste = [
            shared.waste(m, tallest, tiles, sharers),
            waste(column_panels, sharers),
        ];
        let stream = choose_stream([m, n], waste);
        let alone = RowPanels::shared(m, tallest, tiles, 1);
        let a_packed = pack_a(&spec.a, factor, k, n, lanes);
        let b_packed = factor.depth() > 1 || pack_b(&spec.b, m, n, lanes);
        // What a thread streams without blocks, and the other operand; bytes of a packed row or column.
        let (streamed, panel, stationary) = match stream {
            Stream::Rows => (shared.panels, shared.rows, n),
            Stream::Columns => (column_panels, width, m),
        };
        let bytes = spec.element().bytes();
        let kept = (PRODUCT_L2 / (panel * chunk * bytes).max(1)).clamp(1, 8);
        let met = panel * streamed.div_ceil(sharers).min(kept);
        let pay = match tiles {
            true => Blocks::pay_for_tiles(spec, [alone.panels, column_panels], waste),
            false => {
                a_packed && b_packed && Blocks::pay_for_vectors(met, stationary * depth * bytes, sharers)
            }
        };
        let blocks = match pay && parallel == Parallel::Panels {
            true => Blocks::choose([alone.panels, column_panels], sharers),
            false => None,
        };
        let (stream, RowPanels { panels, rows }) = match (&blocks, stream) {
            (Some(blocks), _) => (blocks.stream, alone),
            (None, Stream::Rows) => (stream, shared),
            (None, Stream::Columns) => (stream, alone),
        };
        let (row_panels, tall_panels) = match tiles {
            // Whole tiles; the last panel may have rows that are not there.
            true => (panels, panels),
            false => (panels, m - panels * (rows - 1)),
        };
        let group = blocks.as_ref().map_or(kept, |blocks| blocks.streamed);
        Self {
            factor,
            lanes,
            vectors,
            last_vectors,
            column_panels,
            rows,
            tall_panels,
            row_panels,
            all,
            depth,
            cuts,
            chunk,
            a_packed,
            b_packed,
            stream,
            group,
            part: blocks.map(|blocks| blocks.stationary),
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

/// How rows are divided among panels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct RowPanels {
    panels: usize,
    /// Rows of the highest.
    rows: usize,
}

impl RowPanels {
    /// The panels of at most `tallest` of `m` rows with which the busiest of `threads` threads is done first.
    /// Threads take whole panels, so lower panels may divide better: 2048 rows on 16 threads are 147 panels
    /// of 14 rows, of which some threads have ten, 140 rows; 158 panels of 13 rows make that 130.
    fn shared(m: usize, tallest: usize, tiles: bool, threads: usize) -> Self {
        let of = |panels: usize| match tiles {
            true => round_up(m.div_ceil(panels), amx::EXTENT),
            false => m.div_ceil(panels),
        };
        let fewest = m.div_ceil(tallest);
        let most = if threads == 1 { fewest } else { (2 * fewest).min(m) };
        let cost = |panels: usize| {
            let rows = of(panels);
            let panels = if tiles { m.div_ceil(rows) } else { panels };
            panels.div_ceil(threads) * Self::cost(rows, tallest, tiles)
        };
        let best = (fewest..=most).min_by_key(|&panels| cost(panels));
        // Less than three percent is not worth lower panels.
        let panels = best
            .filter(|&best| 100 * cost(best) < 97 * cost(fewest))
            .unwrap_or(fewest);
        let rows = of(panels);
        match tiles {
            true => Self {
                panels: m.div_ceil(rows),
                rows,
            },
            false => Self { panels, rows },
        }
    }

    /// What a panel of so many rows costs. It grows with its rows and with reading B: that is about one row
    /// more where a panel has fourteen, and two tiles, as many as of A, where it has 32 rows of tiles.
    fn cost(rows: usize, tallest: usize, tiles: bool) -> usize {
        match tiles {
            true => rows + amx::MAX_ROWS,
            false => 14 * rows + tallest,
        }
    }

    /// The time of the busiest thread beside that of an even share of the highest panels.
    fn waste(&self, m: usize, tallest: usize, tiles: bool, threads: usize) -> f64 {
        let busiest = self.panels.div_ceil(threads) * Self::cost(self.rows, tallest, tiles);
        let even = m as f64 / tallest as f64 * Self::cost(tallest, tallest, tiles) as f64 / threads as f64;
        busiest as f64 / even
    }
}

/// The time of the busiest of `threads` threads that share `panels`, beside that of an even share.
fn waste(panels: usize, threads: usize) -> f64 {
    (panels.div_ceil(threads) * threads) as f64 / panels as f64
}

/// The longer side is streamed, unless its panels divide worse among the threads: `waste` is that of rows and
/// of columns.
fn choose_stream([m, n]: [usize; 2], [rows, columns]: [f64; 2]) -> Stream {
    if (rows - columns).abs() > 0.08 {
        match rows < columns {
            true => Stream::Rows,
            false => Stream::Columns,
        }
    } else if m > n {
        Stream::Rows
    } else {
        Stream::Columns
    }
}

/// Blocks of the result that threads share, of panels of both operands that were packed before.
///
/// A thread that takes streamed panels alone packs them into its own L2 and needs nothing from the others but
/// the stationary operand. Blocks cost more, because what one core packs another reads. They divide more
/// evenly, and each panel that comes from another core is used for a whole block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Blocks {
    stream: Stream,
    /// Streamed panels of a block.
    streamed: usize,
    /// Stationary panels of a block.
    stationary: usize,
}

impl Blocks {
    /// Whether blocks pay for tiles: where a product has so many panels of rows and of columns, and its
    /// threads would `waste` so much if they shared rows or columns.
    fn pay_for_tiles(spec: &GemmSpec<'_>, [rows, columns]: [usize; 2], waste: [f64; 2]) -> bool {
        let operand = if rows > columns { &spec.a } else { &spec.b };
        let uneven = waste.into_iter().all(|waste| waste > BLOCKS_WASTE);
        // Each row that is read while such a panel is packed lies in another page.
        let strided = Pairs::padded(operand, spec.k).contiguous() != Some(Axis::Depth);
        uneven || strided || rows.min(columns) >= BLOCKS_PANELS
    }

    /// Whether they pay for vectors: where each of `threads` threads would read the whole stationary operand,
    /// of so many bytes, from beyond its L2 for so few rows or columns that it streams.
    fn pay_for_vectors(streamed: usize, stationary: usize, threads: usize) -> bool {
        stationary > BLOCKS_L2 && streamed < BLOCKS_STREAMED * threads
    }

    /// Blocks of a product of so many panels of rows and of columns, unless threads have too many panels.
    fn choose([rows, columns]: [usize; 2], threads: usize) -> Option<Self> {
        let (stream, panels) = match rows > columns {
            true => (Stream::Rows, [rows, columns]),
            false => (Stream::Columns, [columns, rows]),
        };
        (panels[0] <= BLOCKS_SHARE * threads).then(|| Self::even(stream, panels, threads))
    }

    /// The blocks with which the busiest of `threads` threads is done first. A block of g x p panels takes
    /// the time of g p products of two panels, and g + p times half of that to bring its panels near.
    fn even(stream: Stream, [streamed, stationary]: [usize; 2], threads: usize) -> Self {
        let time = |&[g, p]: &[usize; 2]| {
            let blocks = streamed.div_ceil(g) * stationary.div_ceil(p);
            blocks.div_ceil(threads) * (2 * g * p + g + p)
        };
        // Sizes of which the last block is nearly as large.
        let sizes =
            |panels: usize| (1..=BLOCK_PANELS).map(move |most| panels.div_ceil(panels.div_ceil(most)));
        let all = sizes(streamed).flat_map(|g| sizes(stationary).map(move |p| [g, p]));
        let [streamed, stationary] = all.min_by_key(time).unwrap_or([1, 1]);
        Self {
            stream,
            streamed,
            stationary,
        }
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

    #[test]
    fn rows_divide_among_threads() {
        let panels = |m, threads| RowPanels::shared(m, 14, false, threads);
        assert_eq!(
            panels(2048, 1),
            RowPanels {
                panels: 147,
                rows: 14
            }
        );
        assert_eq!(
            panels(2048, 16),
            RowPanels {
                panels: 158,
                rows: 13
            }
        );
        // 288 rows are 21 panels of 14, of which threads would have one or two.
        assert_eq!(panels(288, 16), RowPanels { panels: 32, rows: 9 });
        for (m, threads) in [(1, 16), (5, 3), (15, 2), (77, 2), (77, 16), (1000, 7), (4096, 16)] {
            let RowPanels { panels, rows } = panels(m, threads);
            assert!(
                rows <= 14 && panels * rows >= m && panels * (rows - 1) < m,
                "{m} on {threads}"
            );
        }
    }

    #[test]
    fn tiles_divide_among_threads() {
        let panels = |m, threads| RowPanels::shared(m, 32, true, threads);
        assert_eq!(panels(2048, 16), RowPanels { panels: 64, rows: 32 });
        // Half of the threads would have none of eight panels of 32 rows.
        assert_eq!(panels(256, 16), RowPanels { panels: 16, rows: 16 });
        assert_eq!(panels(33, 1), RowPanels { panels: 2, rows: 32 });
    }

    #[test]
    fn blocks_divide_among_threads() {
        let blocks = |panels, threads| {
            let Blocks {
                streamed, stationary, ..
            } = Blocks::even(Stream::Rows, panels, threads);
            [streamed, stationary]
        };
        // One block for each thread.
        assert_eq!(blocks([24, 24], 16), [6, 6]);
        assert_eq!(blocks([32, 32], 16), [8, 8]);
        assert_eq!(blocks([24, 9], 16), [3, 5]);
        for (panels, threads) in [([1, 1], 16), ([3, 7], 5), ([128, 128], 16), ([9, 9], 2)] {
            let [streamed, stationary] = blocks(panels, threads);
            assert!(streamed <= panels[0] && stationary <= panels[1], "{panels:?}");
        }
    }

    /// Streamed and stationary panels of a block of a product on so many threads, if they share blocks.
    fn blocks_of(
        storage: Storage,
        [m, n, k]: [usize; 3],
        transposed: [bool; 2],
        threads: usize,
    ) -> Option<[usize; 2]> {
        let operand = |free: usize, transposed: bool| {
            let (free, depth) = if transposed { (1, free) } else { (k, 1) };
            Operand::stored(storage, "x", &[], free as i64, depth as i64)
        };
        let spec = GemmSpec {
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
        };
        let plan = ProductPlan::new(&spec, Isa::AmxBf16);
        plan.part.map(|part| [plan.group, part])
    }

    #[test]
    fn threads_share_blocks_where_they_pay() {
        let blocks_of = |sizes, transposed| blocks_of(Storage::BF16, sizes, transposed, 16);
        // Of bert-base: a layer, its gradients of the input and of the weight. B is the weight, whose rows are
        // those of the depth.
        assert_eq!(blocks_of([2048, 768, 768], [false, true]), None);
        assert_eq!(blocks_of([2048, 768, 3072], [false, false]), None);
        assert_eq!(blocks_of([768, 768, 2048], [true, true]), Some([6, 6]));
        assert_eq!(blocks_of([1024, 1024, 1024], [false, true]), Some([8, 8]));
        assert!(blocks_of([768, 3072, 2048], [true, true]).is_some());
        // The logits of llama-15m: the packed weight would take much memory.
        assert_eq!(blocks_of([288, 32000, 4096], [true, true]), None);
    }

    #[test]
    fn threads_share_blocks_of_deep_products() {
        let blocks_of = |sizes, transposed, threads| blocks_of(Storage::F32, sizes, transposed, threads);
        // Of llama-15m: the gradient of a weight, which two threads read fast enough, and the layer itself.
        assert!(blocks_of([288, 768, 4096], [true, true], 16).is_some());
        assert_eq!(blocks_of([288, 768, 4096], [true, true], 2), None);
        assert_eq!(blocks_of([4096, 768, 288], [false, true], 16), None);
        // Of bert-base: each thread streams enough rows.
        assert_eq!(blocks_of([768, 768, 2048], [true, true], 16), None);
    }
}
