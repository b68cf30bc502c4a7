//! Where the largest or smallest element of each line is.
//!
//! Elements are compared by their keys, so that NaN wins and the first of equal ones does. The lanes of a
//! line take its elements in turn; long lines of which there are few are divided into pieces, and a second
//! launch finds the best of the pieces.

use kiln_graph::op::ArgReduceOp;
use kiln_graph::{DType, Graph, Node};

use super::super::text::{THREADS, Text, blocks, index_type};
use super::super::{Argument, Call, KernelCode, Launch, expressions};
use super::Lanes;

/// Lines that are long enough to be divided, and elements of a piece.
const LONG: usize = 16 * 1024;
const PIECE: usize = 8 * 1024;
/// Blocks that keep a large device busy.
const BUSY: usize = 128;
/// The most pieces of a line.
const PIECES: usize = 256;

/// How a kernel gets at the elements and what it does with the best one.
struct Stage<'a> {
    /// Statements that load the `keys` of the `WIDTH` elements of line `line` from element `k` on.
    load: &'a str,
    /// Where element `k + w` of the line was.
    place: &'a str,
    /// Neighbouring elements that are loaded at once.
    width: usize,
    /// Stores `best` and `at` of piece `piece` of the line.
    store: &'a str,
}

pub(super) fn arg_reduce(graph: &Graph, node: Node, op: ArgReduceOp, axis: usize) -> Option<KernelCode> {
    let data = graph.node(node);
    let (x, out) = (data.inputs[0], data.outputs[0]);
    let (dtype, lanes) = (graph.dtype(x), Lanes::new(graph.shape(x), axis));
    u32::try_from(lanes.extent + 1).ok()?;
    let (memory, index) = (
        expressions::memory_type(dtype),
        expressions::memory_type(graph.dtype(out)),
    );
    let key = if dtype.size() == 8 { "kiln_u64" } else { "kiln_u32" };
    let helpers = key_text(dtype, op);
    let Lanes { extent, inner, .. } = lanes;
    let length = inner * extent;
    let pieces = pieces(&lanes);
    let own = 16 / dtype.size();
    let width = if inner == 1 && extent.is_multiple_of(own) {
        own
    } else {
        1
    };
    let load = if width > 1 {
        format!(
            "kiln_vector<{memory}, WIDTH> all;
        all.load(x + (line * {extent} + k));
        for (int w = 0; w < WIDTH; w++) keys[w] = @_key(all.at[w]);"
        )
    } else {
        format!("keys[0] = @_key(x[line / {inner} * {length} + k * {inner} + line % {inner}]);")
    };
    let store = format!("result[line] = ({index})at;");
    let text = || {
        Text::default()
            .helpers(&helpers)
            .ty("Key", key)
            .reads(memory, "x", Argument::value(x))
    };
    let stage = Stage {
        load: &load,
        place: "k + w",
        width,
        store: &store,
    };
    if pieces == 1 {
        let text = text().writes(index, "result", Argument::value(out));
        return Some(KernelCode::launches([launch(text, &lanes, 1, &stage)]));
    }
    let keys = lanes.lines() * pieces * if dtype.size() == 8 { 8 } else { 4 };
    let places = keys.next_multiple_of(256);
    let first = text().writes(key, "best_keys", Argument::Scratch(0)).writes(
        "kiln_u32",
        "best_places",
        Argument::Scratch(places),
    );
    let to = Stage {
        store: &format!(
            "best_keys[line * {pieces} + piece] = best; best_places[line * {pieces} + piece] = at;"
        ),
        ..stage
    };
    let second = Text::default()
        .ty("Key", key)
        .reads(key, "best_keys", Argument::Scratch(0))
        .reads("kiln_u32", "best_places", Argument::Scratch(places))
        .writes(index, "result", Argument::value(out));
    let of_pieces = Lanes {
        outer: lanes.lines(),
        extent: pieces,
        inner: 1,
    };
    let from = Stage {
        load: &format!("keys[0] = best_keys[line * {pieces} + k];"),
        place: &format!("best_places[line * {pieces} + k]"),
        width: 1,
        store: &store,
    };
    Some(KernelCode {
        calls: vec![
            Call::Launch(launch(first, &lanes, pieces, &to)),
            Call::Launch(launch(second, &of_pieces, 1, &from)),
        ],
        scratch: places + lanes.lines() * pieces * 4,
    })
}

/// The type `@_Key` of keys and the function `@_key` from an element to its key: the element with the
/// largest key wins.
fn key_text(dtype: DType, op: ArgReduceOp) -> String {
    let memory = expressions::memory_type(dtype);
    let key = if dtype.size() == 8 { "kiln_u64" } else { "kiln_u32" };
    let rank = match op {
        ArgReduceOp::Max => "kiln_key(x)",
        // NaN stays the first choice.
        ArgReduceOp::Min if dtype.is_float() => "kiln_key(x) == ~(@_Key)0 ? ~(@_Key)0 : (@_Key)~kiln_key(x)",
        ArgReduceOp::Min => "~kiln_key(x)",
    };
    format!("typedef {key} @_Key;\ninline @_Key @_key({memory} x) {{ return {rank}; }}\n")
}

fn pieces(lanes: &Lanes) -> usize {
    let lines = lanes.lines() / if lanes.inner > 1 { 32 } else { 1 };
    if lanes.extent < LONG || lines >= BUSY {
        return 1;
    }
    lanes.extent.div_ceil(PIECE).min(PIECES)
}

/// Lanes of a line, a power of two. Where lines are neighbours in memory, neighbouring threads have
/// neighbouring lines.
fn lanes_of_a_line(lanes: &Lanes) -> usize {
    let threads = THREADS as usize;
    let useful = lanes.extent.div_ceil(4).next_power_of_two().min(threads);
    if lanes.inner == 1 {
        return useful;
    }
    let across = lanes.inner.next_power_of_two().min(32);
    if lanes.lines() >= 64 * 1024 {
        useful.min(threads / across.max(threads.min(lanes.inner.next_power_of_two())))
    } else {
        useful.min(threads / across)
    }
}

fn launch(text: Text, lanes: &Lanes, pieces: usize, stage: &Stage<'_>) -> Launch {
    let own = lanes_of_a_line(lanes);
    let lines = THREADS as usize / own;
    let text = text
        .ty("Index", index_type(lanes.lines() * lanes.extent))
        .count("LINES", lanes.lines())
        .count("EXTENT", lanes.extent)
        .count("PIECES", pieces)
        // Words do not lie across the ends of pieces.
        .count("PIECE", lanes.extent.div_ceil(pieces).next_multiple_of(16))
        .count("WIDTH", stage.width)
        .count("LANES", own)
        .count("LINES_HERE", lines)
        .count("ACROSS", usize::from(lanes.inner > 1));
    let statements = format!(
        "
__shared__ Key keys_here[LINES_HERE * LANES];
__shared__ kiln_u32 places_here[LINES_HERE * LANES];
const int own_line = ACROSS ? threadIdx.x % LINES_HERE : threadIdx.x / LANES;
const int lane = ACROSS ? threadIdx.x / LINES_HERE : threadIdx.x % LANES;
const Index line = (Index)(blockIdx.x / PIECES) * LINES_HERE + own_line;
const Index piece = blockIdx.x % PIECES;
const Index end = (piece + 1) * PIECE < EXTENT ? (piece + 1) * PIECE : EXTENT;
Key best = 0;
kiln_u32 at = 0xffffffffu;
if (line < LINES) {{
    #pragma unroll 4
    for (Index k = piece * PIECE + lane * WIDTH; k < end; k += LANES * WIDTH) {{
        Key keys[WIDTH];
        {load}
        for (int w = 0; w < WIDTH; w++) {{
            if (keys[w] > best || at == 0xffffffffu) {{
                best = keys[w];
                at = {place};
            }}
        }}
    }}
}}
const int slot = own_line * LANES + lane;
keys_here[slot] = best;
places_here[slot] = at;
for (int apart = LANES / 2; apart; apart /= 2) {{
    __syncthreads();
    if (lane < apart) {{
        const Key key = keys_here[slot + apart];
        const kiln_u32 place = places_here[slot + apart];
        if (key > best || (key == best && place < at)) {{
            keys_here[slot] = best = key;
            places_here[slot] = at = place;
        }}
    }}
}}
if (lane == 0 && line < LINES) {{ {store} }}
",
        load = stage.load,
        place = stage.place,
        store = stage.store
    );
    let groups = lanes.lines().div_ceil(lines);
    text.launch(&statements, blocks(groups * pieces, 1), THREADS)
}
