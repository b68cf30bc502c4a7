//! How a matrix product is divided: rows and columns among panels, panels among threads.

use super::pack::Pairs;
use super::plan::{Depth, Parallel, Stream};
use super::{Axis, GemmSpec};
use crate::kernels::round_up;
use crate::kernels::tile::amx;
use crate::policy::{
    BLOCK_PANELS, BLOCKS_L2, BLOCKS_PANELS, BLOCKS_SHARE, BLOCKS_STREAMED, BLOCKS_WASTE, CHUNKED_PANELS,
    PRODUCT_L2, STREAMED_L2,
};

/// How the result is divided among threads.
pub(super) struct Shares {
    pub stream: Stream,
    pub rows: RowPanels,
    /// See [`super::plan::ProductPlan::group`].
    pub group: usize,
    /// See [`super::plan::ProductPlan::part`].
    pub part: usize,
    /// See [`super::plan::ProductPlan::shared`].
    pub shared: bool,
    /// See [`super::plan::ProductPlan::by_chunk`].
    pub by_chunk: bool,
}

impl Shares {
    /// Shares of a product whose row panels have at most `tallest` rows. `packed` says whether A and B are.
    pub fn new(
        spec: &GemmSpec<'_>,
        tiles: bool,
        tallest: usize,
        columns: &ColumnPanels,
        depth: &Depth,
        packed: [bool; 2],
        parallel: Parallel,
    ) -> Self {
        let (m, n) = (spec.m, spec.n);
        let sharers = match parallel {
            Parallel::Panels => spec.threads,
            Parallel::Serial | Parallel::Batch | Parallel::Depth => 1,
        };
        let alone = RowPanels::shared(m, tallest, tiles, 1);
        let shared = RowPanels::shared(m, tallest, tiles, sharers);
        let waste = [
            shared.waste(m, tallest, tiles, sharers),
            waste(columns.panels, sharers),
        ];
        let stream = choose_stream([m, n], waste);
        // What a thread streams without blocks, and the other operand.
        let (streamed, panel, stationary) = match stream {
            Stream::Rows => (shared.panels, shared.rows, n),
            Stream::Columns => (columns.panels, columns.width, m),
        };
        let bytes = spec.element().bytes();
        let kept = (PRODUCT_L2 / (panel * depth.chunk * bytes).max(1)).clamp(1, 8);
        let met = panel * streamed.div_ceil(sharers).min(kept);
        let panels = [alone.panels, columns.panels];
        let pay = match tiles {
            true => Blocks::pay_for_tiles(spec, panels, waste),
            false => {
                packed == [true; 2] && Blocks::pay_for_vectors(met, stationary * depth.each * bytes, sharers)
            }
        };
        let blocks = match pay && parallel == Parallel::Panels {
            true => Blocks::choose(panels, sharers),
            false => None,
        };
        match blocks {
            Some(blocks) => Self {
                stream: blocks.stream,
                rows: alone,
                group: blocks.streamed,
                part: blocks.stationary,
                shared: true,
                by_chunk: false,
            },
            None => {
                let (rows, met) = match stream {
                    Stream::Rows => (shared, columns.panels),
                    Stream::Columns => (alone, alone.panels),
                };
                let whole = kept * panel * depth.each * bytes;
                let in_chunks = depth.chunk < depth.each;
                let by_chunk = in_chunks && whole > STREAMED_L2 && met <= CHUNKED_PANELS;
                Self {
                    stream,
                    rows,
                    group: kept,
                    part: match tiles && !by_chunk {
                        true => evenly(met, BLOCK_PANELS),
                        false => met,
                    },
                    shared: false,
                    by_chunk,
                }
            }
        }
    }
}

/// How columns are divided among panels.
pub(super) struct ColumnPanels {
    pub panels: usize,
    pub width: usize,
}

/// How rows are divided among panels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct RowPanels {
    pub panels: usize,
    /// Rows of the highest.
    pub rows: usize,
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

/// The size of at most `most` with which the last of the groups that `panels` are cut into is nearly as
/// large.
fn evenly(panels: usize, most: usize) -> usize {
    panels.div_ceil(panels.div_ceil(most))
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
        let sizes = |panels: usize| (1..=BLOCK_PANELS).map(move |most| evenly(panels, most));
        let all = sizes(streamed).flat_map(|g| sizes(stationary).map(move |p| [g, p]));
        let [streamed, stationary] = all.min_by_key(time).unwrap_or([1, 1]);
        Self {
            stream,
            streamed,
            stationary,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
}
