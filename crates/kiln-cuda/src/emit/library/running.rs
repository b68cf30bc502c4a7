//! Running sums, products, largest and smallest elements along a dimension.
//!
//! Lines that are neighbours in memory have a thread each; other lines have the lanes of a warp or of a
//! block, which scan tiles of the line in turn. Few long lines are divided into chunks: a first launch joins
//! the elements of each chunk, and in a second one each chunk begins with all that is in front of it.

use kiln_graph::op::ReduceOp;
use kiln_graph::{Graph, Node};

use super::super::text::{THREADS, Text, blocks, index_type};
use super::super::{Argument, Call, KernelCode, Launch, expressions};
use super::Lanes;

/// Lines that keep a large device busy: threads, or blocks.
const BUSY_THREADS: usize = 32 * 1024;
const BUSY_BLOCKS: usize = 256;
/// The least elements of a chunk of a thread, and the most chunks: each thread joins those in front of its
/// own.
const THREAD_CHUNK: usize = 64;
const THREAD_CHUNKS: usize = 64;
/// The least elements of a chunk of a block, and the most chunks.
const BLOCK_CHUNK: usize = 4096;
const BLOCK_CHUNKS: usize = 1024;
/// Neighbouring elements of a lane.
const EACH: usize = 4;

/// Joins the elements of each chunk but the last, by a thread.
const THREAD_PARTS: &str = "
const Index i = (Index)blockIdx.x * THREADS + threadIdx.x;
if (i >= LINES * (CHUNKS - 1)) return;
const Index line = i % LINES, chunk = i / LINES;
const Index first = line / INNER * (EXTENT * INNER) + line % INNER;
Wide sum = @_none();
#pragma unroll 4
for (Index k = chunk * CHUNK; k < (chunk + 1) * CHUNK; k++) sum = @_join(sum, @_widen(x[first + k * INNER]));
parts[chunk * LINES + line] = sum;
";

/// The running sums of a chunk, by a thread.
const THREAD_SCAN: &str = "
const Index i = (Index)blockIdx.x * THREADS + threadIdx.x;
if (i >= LINES * CHUNKS) return;
const Index line = i % LINES, chunk = i / LINES;
const Index first = line / INNER * (EXTENT * INNER) + line % INNER;
const Index end = (chunk + 1) * CHUNK < EXTENT ? (chunk + 1) * CHUNK : EXTENT;
Wide sum = @_none();
for (Index c = 0; c < chunk; c++) sum = @_join(sum, parts[c * LINES + line]);
#pragma unroll 4
for (Index k = chunk * CHUNK; k < end; k++) {
    sum = @_join(sum, @_widen(x[first + k * INNER]));
    result[first + k * INNER] = @_narrow(sum);
}
";

/// Joins the elements of each chunk but the last, by a block.
const BLOCK_PARTS: &str = "
__shared__ Wide sums[THREADS];
const Index line = blockIdx.x / (CHUNKS - 1), chunk = blockIdx.x % (CHUNKS - 1);
const Index first = line / INNER * (EXTENT * INNER) + line % INNER;
Wide sum = @_none();
#pragma unroll 4
for (Index k = chunk * CHUNK + threadIdx.x; k < (chunk + 1) * CHUNK; k += THREADS)
    sum = @_join(sum, @_widen(x[first + k * INNER]));
sums[threadIdx.x] = sum;
for (int apart = THREADS / 2; apart; apart /= 2) {
    __syncthreads();
    if (threadIdx.x < apart) sums[threadIdx.x] = sum = @_join(sum, sums[threadIdx.x + apart]);
}
if (threadIdx.x == 0) parts[line * CHUNKS + chunk] = sum;
";

/// The running sums of a chunk, by `LANES` threads.
const BLOCK_SCAN: &str = "
__shared__ Wide sums[2][THREADS];
const int slot = threadIdx.x, lane = slot % LANES;
const Index line = (Index)(blockIdx.x / CHUNKS) * (THREADS / LANES) + slot / LANES, chunk = blockIdx.x % CHUNKS;
const Index first = line / INNER * (EXTENT * INNER) + line % INNER;
const Index end = (chunk + 1) * CHUNK < EXTENT ? (chunk + 1) * CHUNK : EXTENT;
Wide carry = @_none();
if (CHUNKS > 1) {
    for (Index c = lane; c < chunk; c += LANES) carry = @_join(carry, parts[line * CHUNKS + c]);
    sums[0][slot] = carry;
    for (int apart = LANES / 2; apart; apart /= 2) {
        __syncthreads();
        if (lane < apart) sums[0][slot] = carry = @_join(carry, sums[0][slot + apart]);
    }
    __syncthreads();
    carry = sums[0][slot - lane];
    __syncthreads();
}
for (Index tile = chunk * CHUNK; tile < end; tile += LANES * EACH) {
    const Index start = tile + lane * EACH;
    Wide own[EACH], sum = @_none();
    #pragma unroll
    for (int e = 0; e < EACH; e++) {
        if (line < LINES && start + e < end) sum = @_join(sum, @_widen(x[first + (start + e) * INNER]));
        own[e] = sum;
    }
    sums[0][slot] = sum;
    int from = 0;
    for (int apart = 1; apart < LANES; apart *= 2) {
        __syncthreads();
        sum = sums[from][slot];
        if (lane >= apart) sum = @_join(sums[from][slot - apart], sum);
        from = 1 - from;
        sums[from][slot] = sum;
    }
    __syncthreads();
    const Wide before = lane ? @_join(carry, sums[from][slot - 1]) : carry;
    carry = @_join(carry, sums[from][slot - lane + LANES - 1]);
    #pragma unroll
    for (int e = 0; e < EACH; e++)
        if (line < LINES && start + e < end) result[first + (start + e) * INNER] = @_narrow(@_join(before, own[e]));
    // Nobody writes the next tile's sums before everybody has read these.
    __syncthreads();
}
";

/// How the lines are divided.
struct Division {
    chunks: usize,
    chunk: usize,
    /// Threads of a line; none where a line has one of its own.
    lanes: Option<usize>,
}

impl Division {
    fn of(lanes: &Lanes) -> Self {
        let (lines, extent) = (lanes.lines(), lanes.extent);
        let divided = |chunks: usize, lanes: Option<usize>| {
            let chunk = extent.div_ceil(chunks.max(1));
            Self {
                chunks: extent.div_ceil(chunk),
                chunk,
                lanes,
            }
        };
        if lanes.inner >= 32 || extent < 64 {
            let wanted = BUSY_THREADS.div_ceil(lines).min(THREAD_CHUNKS);
            return divided(wanted.min(extent / THREAD_CHUNK), None);
        }
        if lines >= BUSY_BLOCKS || extent < 4 * BLOCK_CHUNK {
            let own = if extent <= 512 { 32 } else { THREADS as usize };
            return divided(1, Some(own));
        }
        let wanted = extent.div_ceil(BLOCK_CHUNK).min(BLOCK_CHUNKS);
        divided(wanted, Some(THREADS as usize))
    }
}

pub(super) fn cumulative(graph: &Graph, node: Node, op: ReduceOp, axis: usize) -> KernelCode {
    let data = graph.node(node);
    let (x, out) = (data.inputs[0], data.outputs[0]);
    let (dtype, lanes) = (graph.dtype(x), Lanes::new(graph.shape(x), axis));
    let Division {
        chunks,
        chunk,
        lanes: own,
    } = Division::of(&lanes);
    let (memory, wide) = (expressions::memory_type(dtype), expressions::register_type(dtype));
    let helpers = format!(
        "inline {wide} @_none() {{ return {}; }}
inline {wide} @_join({wide} a, {wide} b) {{ return {}; }}
inline {wide} @_widen({memory} x) {{ return {}; }}
inline {memory} @_narrow({wide} x) {{ return {}; }}
",
        expressions::neutral(op, dtype),
        expressions::combine(op, dtype, "a", "b"),
        expressions::widened(dtype, "x"),
        expressions::narrowed(dtype, "x"),
    );
    let text = || {
        Text::default()
            .helpers(&helpers)
            .ty("Wide", wide)
            .ty("Index", index_type(lanes.lines() * lanes.extent))
            .count("THREADS", THREADS as usize)
            .count("LINES", lanes.lines())
            .count("EXTENT", lanes.extent)
            .count("INNER", lanes.inner)
            .count("CHUNKS", chunks)
            .count("CHUNK", chunk)
            .reads(memory, "x", Argument::value(x))
    };
    let parts = text().writes(wide, "parts", Argument::Scratch(0));
    let scan = text()
        // Without chunks no thread reads the parts, and any address will do.
        .reads(
            wide,
            "parts",
            if chunks > 1 {
                Argument::Scratch(0)
            } else {
                Argument::value(x)
            },
        )
        .writes(memory, "result", Argument::value(out));
    let scratch = if chunks > 1 {
        lanes.lines() * chunks * dtype.compute().size()
    } else {
        0
    };
    let (parts, scan) = launches(&lanes, chunks, own, parts, scan);
    KernelCode {
        calls: (chunks > 1)
            .then_some(parts)
            .into_iter()
            .chain([scan])
            .map(Call::Launch)
            .collect(),
        scratch,
    }
}

fn launches(lanes: &Lanes, chunks: usize, own: Option<usize>, parts: Text, scan: Text) -> (Launch, Launch) {
    let (lines, threads) = (lanes.lines(), THREADS as usize);
    match own {
        None => (
            parts.launch(THREAD_PARTS, blocks(lines * (chunks - 1), threads), THREADS),
            scan.launch(THREAD_SCAN, blocks(lines * chunks, threads), THREADS),
        ),
        Some(own) => (
            parts.launch(BLOCK_PARTS, blocks(lines * (chunks - 1), 1), THREADS),
            scan.count("LANES", own).count("EACH", EACH).launch(
                BLOCK_SCAN,
                blocks(lines.div_ceil(threads / own) * chunks, 1),
                THREADS,
            ),
        ),
    }
}
