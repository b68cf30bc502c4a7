//! Shapes of tiles.

/// Blocks that fill a large device: two for each of 132 multiprocessors. A number, not the device's: the
/// shape of a tile and the number of chunks follow from the tensors alone.
pub const BLOCKS: usize = 264;

/// A tile of results: what a block computes, and what each of its threads does.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Tile {
    /// Rows and columns of a block.
    pub block: [usize; 2],
    /// Rows and columns of a thread.
    pub thread: [usize; 2],
}

impl Tile {
    /// A tile for results of `rows` by `columns`, of which `count` are computed side by side.
    pub fn new([rows, columns]: [usize; 2], count: usize, wide: bool) -> Self {
        let across = |most: usize| {
            [4, 8, 16, 32, 64]
                .into_iter()
                .find(|&n| columns <= n)
                .unwrap_or(most)
        };
        let blocks = |[m, n]: [usize; 2]| rows.div_ceil(m) * columns.div_ceil(n) * count;
        if wide {
            // Twice the registers for each result.
            let n = across(64);
            let m = if n <= 8 { 128 } else { 64 };
            return Self {
                block: [m, n],
                thread: [4, 4],
            };
        }
        let n = match across(128) {
            // No column of the tile is left over, and there are enough tiles.
            128 if columns % 128 != 0 && columns % 128 <= 64 || blocks([128, 128]) < BLOCKS => 64,
            n => n,
        };
        let m = if n <= 8 || blocks([128, n]) >= BLOCKS && rows > 64 {
            128
        } else {
            64
        };
        let thread = match (m, n) {
            (128, 64..) => [8, 8],
            (_, 128) => [8, 8],
            (128, 32) | (_, 64) => [8, 4],
            _ => [4, 4],
        };
        Self {
            block: [m, n],
            thread,
        }
    }

    /// A tile for the gradient of a weight of `channels` by `columns`. Chunks of pixels fill the device,
    /// whatever the tile is.
    pub fn of_weight(channels: usize, columns: usize, wide: bool) -> Self {
        let m = match channels {
            65.. if !wide => 128,
            33.. => 64,
            _ => channels.next_power_of_two().max(8),
        };
        // At least a warp of threads with four by four results.
        let least = (32 * 16 / m).max(8);
        let n = [8, 16, 32]
            .into_iter()
            .find(|&n| n >= least && columns <= n)
            .unwrap_or(64);
        let thread = match (m, n) {
            _ if wide => [4, 4],
            (128, 64) => [8, 8],
            (128, 32) | (64, 64) => [8, 4],
            _ => [4, 4],
        };
        Self {
            block: [m, n],
            thread,
        }
    }

    /// Threads of a block.
    pub fn threads(self) -> u32 {
        let [rows, columns] = [0, 1].map(|side| self.block[side] / self.thread[side]);
        (rows * columns) as u32
    }

    /// The constants of a template.
    pub fn constants(self) -> [(&'static str, usize); 5] {
        // A thread with 64 results whose loop is unrolled completely reads so far ahead that it takes 150
        // registers and more, which leaves a multiprocessor room for one block of 256 threads. Unrolled
        // twice it takes 128 registers, which leaves room for two blocks.
        let unrolled = if self.thread == [8, 8] { 2 } else { 8 };
        [
            ("BM", self.block[0]),
            ("BN", self.block[1]),
            ("TM", self.thread[0]),
            ("TN", self.thread[1]),
            ("UNROLLED", unrolled),
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::Tile;

    #[test]
    fn blocks_are_whole_warps_that_fill_registers() {
        for columns in [1, 4, 7, 16, 31, 64, 65, 96, 128, 147, 192, 512] {
            for rows in [1, 64, 65, 1000, 100_000] {
                for wide in [false, true] {
                    let tile = Tile::new([rows, columns], 3, wide);
                    let threads = tile.threads();
                    assert!(
                        threads.is_multiple_of(32) && (32..=256).contains(&threads),
                        "{tile:?}"
                    );
                    assert!(tile.thread.iter().all(|n| n.is_multiple_of(4)), "{tile:?}");
                }
            }
        }
    }
}
