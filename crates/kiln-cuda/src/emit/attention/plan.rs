//! How the kernels of an attention are cut into blocks and tiles.

use kiln_graph::DType;

/// Extents of an attention.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Extents {
    /// Sequences.
    pub batch: usize,
    /// Heads of queries.
    pub heads: usize,
    /// Heads of keys and values; divides `heads`.
    pub key_heads: usize,
    /// Query positions.
    pub queries: usize,
    /// Key positions.
    pub keys: usize,
    /// Elements of a query or key.
    pub width: usize,
    /// Elements of a value.
    pub value_width: usize,
}

/// Constants of the templates in [`crate::kernels::attention`]; a function of extents and type alone, as the
/// order of the sums is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Plan {
    /// Rows and columns of a tile of scores.
    pub tile: usize,
    /// Rows and columns of a tile that one thread has.
    pub each: [usize; 2],
    /// Threads of a block.
    pub threads: usize,
    /// Elements of queries and keys that are in shared memory at a time.
    pub width_depth: usize,
    /// The same of values.
    pub value_depth: usize,
    /// Elements between rows of those.
    pub pitch: usize,
    /// Elements between rows of weights.
    pub weights_pitch: usize,
    /// Neighbouring columns of a result that one thread has, and how many times.
    pub vector: usize,
    /// How many times.
    pub groups: usize,
    /// Columns of a result that one block has.
    pub columns: usize,
    /// Blocks that share the columns.
    pub chunks: usize,
    /// Elements of the second operand of a product, in shared memory.
    pub second: usize,
    /// Bytes of an element in registers.
    pub bytes: usize,
}

impl Plan {
    /// The plan for results of up to `widest` columns.
    pub fn new(e: &Extents, real: DType, widest: usize) -> Self {
        let wide = real == DType::F64;
        // A tile of f64 has as many bytes as one of f32 with twice the elements.
        let (tile, each) = if wide { (32, [2, 4]) } else { (64, [4, 4]) };
        let bytes = if wide { 8 } else { 4 };
        let across = tile / each[1];
        let most_depth = tile;
        let depth = |width: usize| {
            let chunks = width.div_ceil(most_depth);
            width.div_ceil(chunks).next_multiple_of(4)
        };
        let (width_depth, value_depth) = (depth(e.width), depth(e.value_width));
        // Neighbouring rows begin in banks that are 16 bytes apart.
        let sixteenth = 16 / bytes;
        let lanes = width_depth.max(value_depth) / sixteenth;
        let pitch = (lanes + 1 - lanes % 2) * sixteenth;
        let (vector, groups) = columns(widest, across, if wide { 2 } else { 4 }, 2 * tile);
        let columns = across * vector * groups;
        Self {
            tile,
            each,
            threads: (tile / each[0]) * across,
            width_depth,
            value_depth,
            pitch,
            weights_pitch: tile + 4,
            vector,
            groups,
            columns,
            chunks: widest.div_ceil(columns),
            second: tile * pitch.max(columns),
            bytes,
        }
    }

    /// Tiles of `rows` rows.
    pub fn tiles(&self, rows: usize) -> usize {
        rows.div_ceil(self.tile)
    }

    /// Bytes of shared memory with `weights` tiles of weights.
    pub fn shared_bytes(&self, weights: usize) -> u32 {
        let elements = self.tile * self.pitch + self.second + weights * self.tile * self.weights_pitch;
        (elements * self.bytes) as u32
    }
}

/// Constants of the templates for tensor cores; a function of extents, the kind of element and the
/// capability.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TensorPlan {
    /// Blocks of 16 rows that a warp has.
    pub row_blocks: usize,
    /// Blocks of 8 columns of a tile of scores.
    pub column_blocks: usize,
    /// Warps of a block.
    pub warps: usize,
    /// What operands are rounded to.
    pub element: Element,
    /// Whether the four warps of a block multiply together, and not each by itself.
    pub grouped: bool,
    /// Whether a block has all keys of a head, and the whole gradient is one kernel.
    pub at_once: bool,
    /// Blocks that a multiprocessor has registers for at least; 0 leaves their number to the compiler.
    pub blocks: u32,
}

/// The kernels of an attention and its gradient.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kernel {
    /// The result.
    Forward,
    /// The gradient of the queries.
    DQuery,
    /// The gradients of keys and values.
    DKey,
}

/// Elements of the operands of tensor cores.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Element {
    /// f16 or bf16.
    Half,
    /// f32, rounded to TF32.
    Tf32,
}

impl Element {
    /// Bytes in memory.
    pub fn bytes(self) -> usize {
        match self {
            Self::Half => 2,
            Self::Tf32 => 4,
        }
    }

    /// Blocks of columns of a tile of the gradient: beside wide rows of f32 there is room for half as many.
    fn gradient_columns(self, widest: usize) -> usize {
        if self == Self::Tf32 && widest > 64 { 2 } else { 4 }
    }

    /// The width of a row in shared memory: `width`, rounded up to a multiple of the depth of one product.
    pub fn padded(self, width: usize) -> usize {
        width.next_multiple_of(32 / self.bytes())
    }
}

/// Blocks that fill the reference machine, which has two on each multiprocessor, twice: with fewer of them,
/// smaller ones spread better. The gradient of 384 blocks (bert-base, 32 x 128) takes 59 us in place of 66 as
/// 768 small ones, that of 768 blocks (llama-125m, 8 x 1024) 409 us in place of 381 as 1536.
const ENOUGH_BLOCKS: usize = 528;

/// Bytes at whose multiples operands of groups of warps begin.
const BORDER: usize = 1024;

/// Most keys of a head whose gradient is computed at once: those of a block of eight warps.
const MOST_KEYS: usize = 128;

/// Least blocks with which it is: one for each multiprocessor of the reference machine.
const LEAST_HEADS: usize = 128;

impl TensorPlan {
    /// Most queries of a head whose gradient is computed at once: a block has numbers of all of them.
    pub const MOST_QUERIES: usize = 512;

    /// Rows and columns of a block's tile, by four warps each by itself.
    const fn by_warps(row_blocks: usize, column_blocks: usize, element: Element) -> Self {
        Self {
            row_blocks,
            column_blocks,
            warps: 4,
            element,
            grouped: false,
            at_once: false,
            blocks: 0,
        }
    }

    /// Threads of a block.
    pub fn threads(&self) -> usize {
        32 * self.warps
    }

    /// The plan for the whole gradient in one kernel, of types of 16 bits where the result is given; none for
    /// heads of many keys or queries, for few heads, and for widths that do not suit it.
    ///
    /// Two kernels compute every tile of scores twice.
    pub fn at_once(e: &Extents) -> Option<Self> {
        let widths = e.width == 64 && e.value_width <= 64 && e.value_width.is_multiple_of(16);
        let short = e.keys <= MOST_KEYS && e.queries <= Self::MOST_QUERIES;
        let fits = widths && short && e.heads == e.key_heads && e.batch * e.heads >= LEAST_HEADS;
        fits.then_some(Self {
            warps: if e.keys <= MOST_KEYS / 2 { 4 } else { 8 },
            at_once: true,
            blocks: if e.keys <= MOST_KEYS / 2 { 4 } else { 2 },
            ..Self::by_warps(1, 4, Element::Half)
        })
    }

    /// The plan for a kernel by a group of warps; none for widths that these do not take. `given` says whether
    /// the gradient reads the attention's result: elsewhere it has twice the sums.
    ///
    /// A block is one group: blocks that wait for different things keep a multiprocessor busier than groups that
    /// wait for each other. For 96 heads of 1024 positions of 64 (causal, H100) the three kernels take
    /// 48, 57 and 88 us, with one block less a multiprocessor 48, 59 and 96; where each warp multiplies by itself
    /// 65, 92 and 118. Two groups a block took 54, 80 and 140 where one took 49, 67 and 101.
    pub fn by_groups(e: &Extents, kernel: Kernel, given: bool) -> Option<Self> {
        let widest = Self::widest(e)?;
        let fits = [e.width, e.value_width]
            .iter()
            .all(|width| width.is_multiple_of(64));
        // Columns of a tile, and blocks of a multiprocessor, for which there are registers.
        let (column_blocks, blocks) = match (kernel, widest <= 64) {
            (Kernel::Forward | Kernel::DQuery, true) => (8, 4),
            (Kernel::DKey, true) => (4, 4),
            (Kernel::Forward, false) => (8, 2),
            (Kernel::DQuery, false) => (4, 3),
            (Kernel::DKey, false) => (4, 2),
        };
        (fits && (given || kernel != Kernel::DQuery || widest <= 64)).then_some(Self {
            grouped: true,
            blocks,
            ..Self::by_warps(1, column_blocks, Element::Half)
        })
    }

    /// The plan for the forward kernel; none for widths that tensor cores do not take.
    pub fn forward(e: &Extents, element: Element) -> Option<Self> {
        let has_narrow_rows = Self::widest(e)? <= 64;
        // The columns of a block with `row_blocks` blocks of rows, and of one with a single block of rows.
        let (row_blocks, [columns, columns_of_single]) = match (element, has_narrow_rows) {
            (Element::Half, true) => (2, [8, 8]),
            (Element::Half, false) => (2, [4, 8]),
            (Element::Tf32, true) => (2, [4, 4]),
            (Element::Tf32, false) => (1, [2, 2]),
        };
        let wide = Self::by_warps(row_blocks, columns, element);
        let enough = e.batch * e.heads * wide.tiles(e.queries) >= ENOUGH_BLOCKS;
        Some(if enough {
            wide
        } else {
            Self::by_warps(1, columns_of_single, element)
        })
    }

    /// The plan for the gradient of the queries: blocks have as many rows as the tiles of a mask, for which
    /// they say whether `fill` counts. More columns would take the registers of a third block.
    pub fn d_query(e: &Extents, element: Element) -> Option<Self> {
        Self::widest(e).map(|widest| Self::by_warps(1, element.gradient_columns(widest), element))
    }

    /// The plan for the gradients of keys and values, of blocks with up to `most_shared` bytes of shared
    /// memory.
    pub fn d_key(e: &Extents, element: Element, most_shared: u32) -> Option<Self> {
        let widest = Self::widest(e)?;
        let wide = Self::by_warps(2, element.gradient_columns(widest), element);
        let enough = e.batch * e.key_heads * wide.tiles(e.keys) >= ENOUGH_BLOCKS;
        Some(
            if enough && widest <= 64 && wide.shared_bytes(e, true) <= most_shared {
                wide
            } else {
                Self {
                    row_blocks: 1,
                    ..wide
                }
            },
        )
    }

    /// The wider one of queries and values.
    fn widest(e: &Extents) -> Option<usize> {
        let widths = [e.width, e.value_width];
        let fits = |width: &usize| width.is_multiple_of(8) && (8..=128).contains(width);
        widths.iter().all(fits).then(|| e.width.max(e.value_width))
    }

    /// Bytes of shared memory that a block may ask for: what GPUs of that capability have, less a kibibyte
    /// for what kernels declare.
    pub fn most_shared_bytes(capability: (u32, u32)) -> u32 {
        let kibibytes = match capability {
            (8, 0 | 7) => 163,
            (9 | 10, _) => 227,
            _ => 99,
        };
        (kibibytes - 1) * 1024
    }

    /// Rows of a block.
    pub fn own(&self) -> usize {
        self.row_blocks * 16 * self.warps
    }

    /// Columns of a tile of scores.
    pub fn other(&self) -> usize {
        self.column_blocks * 8
    }

    /// Blocks for `rows` rows.
    pub fn tiles(&self, rows: usize) -> usize {
        rows.div_ceil(self.own())
    }

    /// Bytes of shared memory: rows of the block, of queries alone or of the values' width as well, and two
    /// tiles of both; of a gradient at once also a tile of scores. Rows are 16 bytes apart, but for those
    /// that groups of warps multiply.
    pub fn shared_bytes(&self, e: &Extents, own_values: bool) -> u32 {
        let bytes = self.element.bytes();
        let gap = if self.grouped { 0 } else { 16 / bytes };
        let [width, value_width] = [e.width, e.value_width].map(|width| self.element.padded(width) + gap);
        let own = self.own() * (width + if own_values { value_width } else { 0 });
        let scores = if self.at_once {
            self.own() * (self.other() + gap)
        } else {
            0
        };
        let border = if self.grouped { BORDER } else { 0 };
        (bytes * (own + 2 * self.other() * (width + value_width) + scores) + border) as u32
    }
}

/// Neighbouring columns of a thread (up to `widest_vector`), and groups of them, where `across` threads share
/// a row of up to `most` columns. Wide vectors read shared memory faster; narrow ones leave fewer threads
/// without a column.
fn columns(width: usize, across: usize, widest_vector: usize, most: usize) -> (usize, usize) {
    let chunk = width.div_ceil(width.div_ceil(most));
    let mut best = (widest_vector, chunk.div_ceil(across * widest_vector));
    let mut vector = widest_vector / 2;
    while vector > 0 {
        let groups = chunk.div_ceil(across * vector);
        if 4 * vector * groups <= 3 * best.0 * best.1 {
            best = (vector, groups);
        }
        vector /= 2;
    }
    best
}

#[cfg(test)]
mod tests {
    use super::*;

    /// All columns have a thread, rows of operands begin at multiples of 16 bytes in banks of their own,
    /// and every GPU has the shared memory.
    #[test]
    fn plans_fit() {
        for real in [DType::F32, DType::F64] {
            for (width, value_width) in (1..300).map(|width| (width, width * 7 % 290 + 1)) {
                let e = Extents {
                    batch: 1,
                    heads: 1,
                    key_heads: 1,
                    queries: 1,
                    keys: 1,
                    width,
                    value_width,
                };
                let plan = Plan::new(&e, real, width.max(value_width));
                assert!(plan.chunks * plan.columns >= width.max(value_width));
                assert!(plan.columns.is_multiple_of(4) && plan.width_depth.is_multiple_of(4));
                assert!(plan.pitch >= plan.width_depth.max(plan.value_depth));
                assert_eq!(plan.pitch * plan.bytes / 16 % 2, 1);
                assert!(plan.threads.is_multiple_of(32) && plan.threads <= 256);
                assert!(plan.shared_bytes(2) <= 99 * 1024, "{plan:?}");
            }
        }
    }

    /// Every GPU with these instructions has the shared memory, except for wide rows of f32.
    #[test]
    fn tensor_plans_fit() {
        for element in [Element::Half, Element::Tf32] {
            for (batch, width, value_width) in [(1, 16, 128), (64, 128, 128), (64, 64, 64), (1, 128, 32)] {
                let e = Extents {
                    batch,
                    heads: 8,
                    key_heads: 8,
                    queries: 1024,
                    keys: 1024,
                    width,
                    value_width,
                };
                let everywhere = TensorPlan::most_shared_bytes((8, 6));
                let forward = TensorPlan::forward(&e, element).unwrap();
                assert!(forward.shared_bytes(&e, false) <= everywhere, "{forward:?}");
                let most = match (element, width + value_width) {
                    (Element::Tf32, 256) => TensorPlan::most_shared_bytes((8, 0)),
                    _ => everywhere,
                };
                let plans = [
                    TensorPlan::d_query(&e, element),
                    TensorPlan::d_key(&e, element, most),
                ];
                for gradient in plans {
                    let gradient = gradient.unwrap();
                    assert!(gradient.shared_bytes(&e, true) <= most, "{gradient:?}");
                }
                assert_eq!(TensorPlan::forward(&Extents { width: 20, ..e }, element), None);
                let wide = Extents {
                    value_width: 144,
                    ..e
                };
                assert_eq!(TensorPlan::d_query(&wide, element), None);
                assert_eq!(TensorPlan::d_key(&wide, element, most), None);
            }
        }
    }
}
