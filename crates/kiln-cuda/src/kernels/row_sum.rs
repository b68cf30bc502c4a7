//! Sums over rows: the gradient of a bias, of a normalisation's weight.
//!
//! Few columns and many rows leave one block a column idle, and float atomics would add in any order. So
//! there are two stages, both in a fixed order: in the first each block adds some rows and writes one partial
//! sum a column; the second adds the partial sums. In both, eight lanes of a block add every eighth row, and
//! then the lanes are added first to last.

use std::sync::Arc;

use super::{PRELUDE, cuda_type};
use crate::build::Source;
use crate::error::Result;
use crate::products::Number;
use crate::runtime::{Arguments, Launch, Module, Storage, Stream};

/// Threads of a block, in x; each has one column, or as many neighbours as 16 bytes hold.
const COLUMNS: u32 = 32;
/// Threads of a block, in y; each adds every eighth row of the block's.
const LANES: u32 = 8;
/// The fewest rows of a block, so that the second stage stays small.
const LEAST_ROWS: u64 = 64;
/// Blocks of the first stage that fill the device: some four for each of 132 multiprocessors.
const BLOCKS: u64 = 512;

/// The sum over the rows of a matrix of `rows` by `columns`, dense and row-major, into f32.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct RowSum {
    /// Number of rows.
    pub rows: u64,
    /// Number of columns.
    pub columns: u64,
    /// Type of the elements: f32, f16 or bf16.
    pub number: Number,
}

impl RowSum {
    /// Neighbouring columns of one thread: as many as 16 bytes hold, if that divides the columns.
    fn width(&self) -> u64 {
        let whole = 16 / self.number.bytes() as u64;
        if self.columns.is_multiple_of(whole) {
            whole
        } else {
            1
        }
    }

    /// Columns of one block of the first stage.
    fn across(&self) -> u64 {
        u64::from(COLUMNS) * self.width()
    }

    /// Rows of one block of the first stage: a function of the shape alone, as the order of the sums is.
    fn piece(&self) -> u64 {
        let pieces = (BLOCKS / self.columns.div_ceil(self.across())).max(1);
        self.rows.div_ceil(pieces).max(LEAST_ROWS)
    }

    fn pieces(&self) -> u64 {
        self.rows.div_ceil(self.piece())
    }

    /// Bytes of the partial sums.
    pub fn partial_bytes(&self) -> usize {
        usize::try_from(self.pieces() * self.columns * 4).unwrap_or(usize::MAX)
    }

    /// The source of both kernels, `row_sum_parts` and `row_sum_total`.
    ///
    /// # Panics
    /// For elements of f64, which these kernels would round.
    pub fn source(&self) -> Source {
        let Self {
            rows,
            columns,
            number,
        } = *self;
        let (kind, width, piece, pieces) = (cuda_type(number), self.width(), self.piece(), self.pieces());
        let load = if width == 1 {
            format!("sum[0] += kiln_widen(x[row * {columns} + column]);")
        } else {
            format!(
                "kiln_vector<{kind}, {width}> v;
            v.load(x + row * {columns} + column);
            for (int j = 0; j < {width}; j++) sum[j] += kiln_widen(v.at[j]);"
            )
        };
        let text = format!(
            "{PRELUDE}
extern \"C\" __global__ void __launch_bounds__({threads}) row_sum_parts(const {kind}* x, float* parts)
{{
    __shared__ float lanes[{LANES}][{COLUMNS} * {width}];
    const kiln_u64 column = ((kiln_u64)blockIdx.x * {COLUMNS} + threadIdx.x) * {width};
    const kiln_u64 start = (kiln_u64)blockIdx.y * {piece};
    const kiln_u64 end = start + {piece} < {rows} ? start + {piece} : {rows};
    float sum[{width}] = {{}};
    if (column < {columns}) {{
        #pragma unroll 4
        for (kiln_u64 row = start + threadIdx.y; row < end; row += {LANES}) {{
            {load}
        }}
    }}
    for (int j = 0; j < {width}; j++) lanes[threadIdx.y][j * {COLUMNS} + threadIdx.x] = sum[j];
    __syncthreads();
    if (threadIdx.y != 0 || column >= {columns}) return;
    for (int j = 0; j < {width}; j++) {{
        for (int lane = 1; lane < {LANES}; lane++) sum[j] += lanes[lane][j * {COLUMNS} + threadIdx.x];
        parts[blockIdx.y * (kiln_u64){columns} + column + j] = sum[j];
    }}
}}

extern \"C\" __global__ void __launch_bounds__({threads}) row_sum_total(const float* parts, float* y)
{{
    __shared__ float lanes[{LANES}][{COLUMNS}];
    const kiln_u64 column = (kiln_u64)blockIdx.x * {COLUMNS} + threadIdx.x;
    float sum = 0;
    if (column < {columns}) {{
        #pragma unroll 8
        for (int piece = threadIdx.y; piece < {pieces}; piece += {LANES})
            sum += parts[piece * (kiln_u64){columns} + column];
    }}
    lanes[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y != 0 || column >= {columns}) return;
    for (int lane = 1; lane < {LANES}; lane++) sum += lanes[lane][threadIdx.x];
    y[column] = sum;
}}
",
            threads = COLUMNS * LANES
        );
        Source {
            name: format!("row_sum_{rows}x{columns}_{number}"),
            text,
        }
    }

    /// The two launches, the second after the first. `module` has this sum's source, `parts` has
    /// [`Self::partial_bytes`] bytes.
    ///
    /// # Errors
    /// [`crate::CudaError::Range`] if a storage is too small, [`crate::CudaError::Launch`],
    /// [`crate::CudaError::Lost`].
    pub fn launches(
        &self,
        module: &Module,
        x: &Arc<Storage>,
        parts: &Arc<Storage>,
        y: &Arc<Storage>,
    ) -> Result<[Launch; 2]> {
        let bytes = |elements: u64, each: usize| {
            usize::try_from(elements)
                .unwrap_or(usize::MAX)
                .saturating_mul(each)
        };
        x.part(
            &(0..bytes(self.rows * self.columns, self.number.bytes())),
            "a sum over rows",
        )?;
        parts.part(&(0..self.partial_bytes()), "partial sums over rows")?;
        y.part(&(0..bytes(self.columns, 4)), "the result of a sum over rows")?;
        let count = |blocks: u64| u32::try_from(blocks).unwrap_or(u32::MAX);
        Ok([
            Launch {
                kernel: module.kernel("row_sum_parts")?,
                grid: [
                    count(self.columns.div_ceil(self.across())),
                    count(self.pieces()),
                    1,
                ],
                block: [COLUMNS, LANES, 1],
                shared_bytes: 0,
                arguments: Arguments::new().memory(x, 0).memory(parts, 0),
            },
            Launch {
                kernel: module.kernel("row_sum_total")?,
                grid: [count(self.columns.div_ceil(COLUMNS.into())), 1, 1],
                block: [COLUMNS, LANES, 1],
                shared_bytes: 0,
                arguments: Arguments::new().memory(parts, 0).memory(y, 0),
            },
        ])
    }

    /// Queues both launches.
    ///
    /// # Errors
    /// Those of [`Self::launches`] and of [`Stream::launch`].
    pub fn run(
        &self,
        stream: &Stream,
        module: &Module,
        x: &Arc<Storage>,
        parts: &Arc<Storage>,
        y: &Arc<Storage>,
    ) -> Result<()> {
        for launch in &self.launches(module, x, parts, y)? {
            // SAFETY: `launches` has checked that every storage holds what the kernels of this shape touch.
            unsafe { stream.launch(launch) }?;
        }
        Ok(())
    }
}
