//! Sums over rows: the gradient of a bias, of a normalisation's weight.
//!
//! Few columns and many rows leave one block a column idle, and float atomics would add in any order. So
//! there are two stages, both in a fixed order: in the first each block adds some rows, thread by thread one
//! column, and writes a partial sum; in the second each thread adds the partial sums of one column, first to
//! last.

use std::sync::Arc;

use super::{PRELUDE, cuda_type};
use crate::build::Source;
use crate::error::Result;
use crate::products::Number;
use crate::runtime::{Arguments, Launch, Module, Storage, Stream};

/// Threads of a block, in x; each has one column.
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
    /// Rows of one block of the first stage: a function of the shape alone, as the order of the sums is.
    fn piece(&self) -> u64 {
        let across = self.columns.div_ceil(COLUMNS.into());
        let pieces = (BLOCKS / across).max(1);
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
    pub fn source(&self) -> Source {
        let Self {
            rows,
            columns,
            number,
        } = *self;
        let (kind, piece, pieces) = (cuda_type(number), self.piece(), self.pieces());
        let text = format!(
            "{PRELUDE}
extern \"C\" __global__ void __launch_bounds__({threads}) row_sum_parts(const {kind}* x, float* parts)
{{
    __shared__ float lanes[{LANES}][{COLUMNS}];
    const kiln_u64 column = (kiln_u64)blockIdx.x * {COLUMNS} + threadIdx.x;
    const kiln_u64 start = (kiln_u64)blockIdx.y * {piece};
    const kiln_u64 end = start + {piece} < {rows} ? start + {piece} : {rows};
    float sum = 0;
    if (column < {columns})
        for (kiln_u64 row = start + threadIdx.y; row < end; row += {LANES})
            sum += kiln_widen(x[row * {columns} + column]);
    lanes[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y == 0 && column < {columns}) {{
        for (int lane = 1; lane < {LANES}; lane++) sum += lanes[lane][threadIdx.x];
        parts[blockIdx.y * (kiln_u64){columns} + column] = sum;
    }}
}}

extern \"C\" __global__ void __launch_bounds__({threads}) row_sum_total(const float* parts, float* y)
{{
    const kiln_u64 column = (kiln_u64)blockIdx.x * {threads} + threadIdx.x;
    if (column >= {columns}) return;
    float sum = 0;
    for (int piece = 0; piece < {pieces}; piece++) sum += parts[piece * (kiln_u64){columns} + column];
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
        let threads = COLUMNS * LANES;
        Ok([
            Launch {
                kernel: module.kernel("row_sum_parts")?,
                grid: [
                    count(self.columns.div_ceil(COLUMNS.into())),
                    count(self.pieces()),
                    1,
                ],
                block: [COLUMNS, LANES, 1],
                shared_bytes: 0,
                arguments: Arguments::new().memory(x, 0).memory(parts, 0),
            },
            Launch {
                kernel: module.kernel("row_sum_total")?,
                grid: [count(self.columns.div_ceil(threads.into())), 1, 1],
                block: [threads, 1, 1],
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
