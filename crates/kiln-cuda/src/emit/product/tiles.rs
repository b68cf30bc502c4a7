//! Products by Kiln's own kernels, for every type and every window.
//!
//! A block computes a tile of the result: tiles of both operands go through shared memory, and each thread
//! sums some results in registers. Products with very few rows or columns are computed number by number, by a
//! thread or by the lanes of a warp that divide the depth.

use std::fmt::Write as _;

use super::{Dim, Frame};
use crate::emit::text::{THREADS, Text, blocks, index_type};
use crate::emit::{Argument, Launch, elements, expressions};

/// Threads of a tile in each direction.
const SIDE: usize = 16;
/// The depth of a tile.
const DEPTH: usize = 16;
/// Rows or columns below which tiles would mostly be empty.
const NARROW: usize = 8;
/// Blocks that keep a large device busy.
const BUSY: usize = 256;

/// Declarations: `ROWS`, `COLUMNS` and `REACH` are of the product, `TALL` and `WIDE` of a thread.
const TILES: &str = "
constexpr int TILE_ROWS = SIDE * TALL, TILE_COLUMNS = SIDE * WIDE;
__shared__ Sum left_tile[TILE_DEPTH][TILE_ROWS + 1];
__shared__ Sum right_tile[TILE_DEPTH][TILE_COLUMNS + 1];
const int across = threadIdx.x % SIDE, down = threadIdx.x / SIDE;
const Index first_column = (Index)(blockIdx.x % BLOCKS_ACROSS) * TILE_COLUMNS;
const Index first_row = (Index)(blockIdx.x / BLOCKS_ACROSS % BLOCKS_DOWN) * TILE_ROWS;
const Index batch = blockIdx.x / (BLOCKS_ACROSS * BLOCKS_DOWN);
left += LEFT_START + @_batch_left(batch);
right += RIGHT_START + @_batch_right(batch);
result += RESULT_START + @_batch_result(batch);
Sum sums[TALL][WIDE] = {};
for (Index start = 0; start < REACH; start += TILE_DEPTH) {
    #pragma unroll
    for (int e = threadIdx.x; e < TILE_DEPTH * TILE_ROWS; e += SIDE * SIDE) {
        const int k = LEFT_DEEP ? e % TILE_DEPTH : e / TILE_ROWS, i = LEFT_DEEP ? e / TILE_DEPTH : e % TILE_ROWS;
        Sum x = 0;
        if (first_row + i < ROWS && start + k < REACH)
            x = (Sum)@_widen(left[@_rows_left(first_row + i) + @_depth_left(start + k)]);
        left_tile[k][i] = x;
    }
    #pragma unroll
    for (int e = threadIdx.x; e < TILE_DEPTH * TILE_COLUMNS; e += SIDE * SIDE) {
        const int k = RIGHT_DEEP ? e % TILE_DEPTH : e / TILE_COLUMNS, j = RIGHT_DEEP ? e / TILE_DEPTH : e % TILE_COLUMNS;
        Sum x = 0;
        if (first_column + j < COLUMNS && start + k < REACH)
            x = (Sum)@_widen(right[@_depth_right(start + k) + @_columns_right(first_column + j)]);
        right_tile[k][j] = x;
    }
    __syncthreads();
    #pragma unroll
    for (int k = 0; k < TILE_DEPTH; k++) {
        Sum x[TALL], y[WIDE];
        for (int i = 0; i < TALL; i++) x[i] = left_tile[k][down + i * SIDE];
        for (int j = 0; j < WIDE; j++) y[j] = right_tile[k][across + j * SIDE];
        for (int i = 0; i < TALL; i++)
            for (int j = 0; j < WIDE; j++) sums[i][j] += x[i] * y[j];
    }
    // Nobody writes the next tiles before everybody has read these.
    __syncthreads();
}
#pragma unroll
for (int i = 0; i < TALL; i++) {
    const Index row = first_row + down + i * SIDE;
    #pragma unroll
    for (int j = 0; j < WIDE; j++) {
        const Index column = first_column + across + j * SIDE;
        if (row < ROWS && column < COLUMNS)
            result[@_rows_result(row) + @_columns_result(column)] = @_narrow(sums[i][j]);
    }
}
";

/// Each group of `LANES` threads computes one number.
const NUMBERS: &str = "
const int lane = threadIdx.x % LANES;
const Index number = (Index)blockIdx.x * (THREADS / LANES) + threadIdx.x / LANES;
const bool inside = number < COUNT;
const Index column = number % COLUMNS, row = number / COLUMNS % ROWS, batch = inside ? number / COLUMNS / ROWS : 0;
left += LEFT_START + @_batch_left(batch) + @_rows_left(row);
right += RIGHT_START + @_batch_right(batch) + @_columns_right(column);
Sum sum = 0;
#pragma unroll 4
for (Index k = lane; k < REACH; k += LANES)
    sum += (Sum)@_widen(left[@_depth_left(k)]) * (Sum)@_widen(right[@_depth_right(k)]);
for (int apart = LANES / 2; apart; apart /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, apart);
if (inside && lane == 0)
    result[RESULT_START + @_batch_result(batch) + @_rows_result(row) + @_columns_result(column)] = @_narrow(sum);
";

/// The launch that computes the product.
pub(super) fn launch(frame: &Frame) -> Launch {
    let (rows, columns) = (frame.extent(&frame.rows), frame.extent(&frame.columns));
    let (batch, reach) = (frame.extent(&frame.batch), frame.extent(&frame.depth));
    let contiguous = |stride: fn(&Dim) -> i64| frame.depth.last().is_some_and(|dim| stride(dim) == 1);
    let (left_deep, right_deep) = (contiguous(|dim| dim.left), contiguous(|dim| dim.right));
    let text = declared(frame)
        .count("ROWS", rows)
        .count("COLUMNS", columns)
        .count("REACH", reach)
        .number("LEFT_START", frame.left.1)
        .number("RIGHT_START", frame.right.1)
        .number("RESULT_START", frame.result.1);
    let count = batch * rows * columns;
    if rows < NARROW || columns < NARROW {
        let deep = if rows < columns { right_deep } else { left_deep };
        let lanes = if reach >= 64 && (deep || count < 16 * 1024) {
            32
        } else {
            1
        };
        return text
            .count("LANES", lanes)
            .count("THREADS", THREADS as usize)
            .count("COUNT", count)
            .launch(NUMBERS, blocks(count, THREADS as usize / lanes), THREADS);
    }
    let tiles = |tall: usize, wide: usize| (rows.div_ceil(SIDE * tall), columns.div_ceil(SIDE * wide));
    let fits = |extent: usize| {
        [1, 2, 4]
            .into_iter()
            .find(|each| extent <= SIDE * each)
            .unwrap_or(4)
    };
    let (mut tall, mut wide) = (fits(rows), fits(columns));
    let blocks_of = |tall, wide| {
        let (down, across) = tiles(tall, wide);
        batch * down * across
    };
    // Few large tiles leave most of the device idle.
    if blocks_of(tall, wide) < BUSY {
        (tall, wide) = (tall.min(2), wide.min(2));
    }
    let (down, across) = tiles(tall, wide);
    text.count("SIDE", SIDE)
        .count("TILE_DEPTH", DEPTH)
        .count("TALL", tall)
        .count("WIDE", wide)
        .count("BLOCKS_DOWN", down)
        .count("BLOCKS_ACROSS", across)
        .count("LEFT_DEEP", usize::from(left_deep))
        .count("RIGHT_DEEP", usize::from(right_deep))
        .launch(TILES, blocks(batch * down * across, 1), (SIDE * SIDE) as u32)
}

/// Parameters, types and the functions that find elements.
fn declared(frame: &Frame) -> Text {
    let dtype = frame.dtype;
    let (memory, stored) = (
        expressions::memory_type(dtype),
        expressions::memory_type(frame.result_dtype),
    );
    let all = || {
        frame
            .batch
            .iter()
            .chain(&frame.rows)
            .chain(&frame.columns)
            .chain(&frame.depth)
    };
    let span = |stride: fn(&Dim) -> i64| -> usize {
        all()
            .map(|dim| (dim.extent - 1) * stride(dim).unsigned_abs() as usize)
            .sum()
    };
    let count = frame.extent(&frame.batch) * frame.extent(&frame.rows) * frame.extent(&frame.columns);
    let limit = span(|dim| dim.left)
        .max(span(|dim| dim.right))
        .max(span(|dim| dim.result))
        .max(frame.extent(&frame.depth))
        .max(count);
    let index = index_type(limit);
    let mut helpers = format!(
        "inline {wide} @_widen({memory} x) {{ return {}; }}\ninline {stored} @_narrow({sum} x) {{ return {}; }}\n",
        expressions::widened(dtype, "x"),
        expressions::narrowed(frame.result_dtype, "x"),
        wide = expressions::register_type(dtype),
        sum = elements::arithmetic(dtype),
    );
    let mut position = |name: &str, dims: &[Dim], stride: fn(&Dim) -> i64| {
        let text = position(dims, stride);
        let _ = writeln!(helpers, "inline {index} @_{name}({index} i) {{ return {text}; }}");
    };
    position("batch_left", &frame.batch, |dim| dim.left);
    position("batch_right", &frame.batch, |dim| dim.right);
    position("batch_result", &frame.batch, |dim| dim.result);
    position("rows_left", &frame.rows, |dim| dim.left);
    position("rows_result", &frame.rows, |dim| dim.result);
    position("columns_right", &frame.columns, |dim| dim.right);
    position("columns_result", &frame.columns, |dim| dim.result);
    position("depth_left", &frame.depth, |dim| dim.left);
    position("depth_right", &frame.depth, |dim| dim.right);
    Text::default()
        .helpers(&helpers)
        .reads(memory, "left", Argument::value(frame.left.0))
        .reads(memory, "right", Argument::value(frame.right.0))
        .writes(stored, "result", Argument::value(frame.result.0))
        .ty("Sum", elements::arithmetic(dtype))
        .ty("Index", index)
}

/// The position of element `i` of dimensions taken as one.
fn position(dims: &[Dim], stride: fn(&Dim) -> i64) -> String {
    let mut inner = 1;
    let mut terms = Vec::new();
    for (at, dim) in dims.iter().enumerate().rev() {
        let coordinate = match (inner, at) {
            (1, 0) => "i".to_owned(),
            (_, 0) => format!("i / {inner}"),
            (1, _) => format!("i % {}", dim.extent),
            _ => format!("i / {inner} % {}", dim.extent),
        };
        if stride(dim) != 0 {
            terms.push(format!("({coordinate}) * {}", stride(dim)));
        }
        inner *= dim.extent;
    }
    if terms.is_empty() {
        "0".into()
    } else {
        terms.join(" + ")
    }
}
