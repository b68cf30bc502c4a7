//! Operations that write where indices say: `scatter` and `index_put`.
//!
//! Nothing is written twice and nothing is added atomically: each thread computes some elements of the result
//! from all updates that go there, in the order of the updates. Both operations are lists of indices along a
//! dimension. `index_put` has one list, for whole slices; `scatter` has a list for each line.
//!
//! - Short lists are looked through by each thread ([`DIRECT`]).
//! - Longer ones are sorted first, as pairs of index and position. The updates of an element are then
//!   neighbours in the list, found by bisection. Where many updates go to one place, such as the most common
//!   token of a text, whole chunks of the list are joined beforehand, all at the same time.
//!
//! ```text
//! indices   3 0 3 1 3 ..        sorted    (0,1) (1,3) (3,0) (3,2) (3,4) ..     updates of row 3:  0, 2, 4
//! ```

use kiln_compiler::schedule::fuse::starts_constant;
use kiln_graph::op::{Op, ReduceOp, ScatterMode};
use kiln_graph::{DType, Graph, Node, Shape, Value};

use super::super::text::{THREADS, Text, blocks, index_type};
use super::super::{Argument, Call, KernelCode, Launch, expressions};
use super::Lanes;
use super::order::{Order, Port};

/// Indices that a thread looks through: always, or where the result is small.
const FEW: usize = 32;
const SOME: usize = 512;
/// The most comparisons with an index that take only some microseconds.
const LOOKS: usize = 1 << 22;
/// Updates that are joined beforehand if all of them go to one place.
const CHUNK: usize = 32;

/// Each thread looks through the list.
const DIRECT: &str = "
const Index i = (Index)blockIdx.x * THREADS + threadIdx.x;
if (i >= COUNT) return;
const Index q = i % WORDS * WIDTH, v = i / WORDS % EXTENT, o = i / (WORDS * EXTENT);
@_Elements all = @_start(i * WIDTH STARTS);
PLACE
if (inside) {
    #pragma unroll 4
    for (Index j = 0; j < LENGTH; j++)
        if (@_clamp(indices[first_index + j * INDEX_STEP]) == v) all.update(updates + first + j * STEP);
}
all.store(result + i * WIDTH);
";

/// Where the updates of each element along the dimension begin in the one list.
const BOUNDS: &str = "
const Index i = (Index)blockIdx.x * THREADS + threadIdx.x;
if (i <= EXTENT) bounds[i] = kiln_first_of<kiln_item32, int>(sorted, 0, LENGTH, (kiln_u32)i);
";

/// Joins the updates of each chunk of the list that has one index.
const PARTS: &str = "
const Index i = (Index)blockIdx.x * THREADS + threadIdx.x;
if (i >= COUNT) return;
PART
const kiln_item32* own = sorted + list * LENGTH + chunk * CHUNK;
if (own[0].key() != own[CHUNK - 1].key()) return;
@_Elements all;
all.load(updates + first + (Index)own[0].place() * STEP);
#pragma unroll 4
for (int p = 1; p < CHUNK; p++) all.update(updates + first + (Index)own[p].place() * STEP);
for (int w = 0; w < WIDTH; w++) parts[i * WIDTH + w] = all.at[w];
";

/// Which chunk of which list a part is of, and where the list's updates begin. The one list of slices has
/// parts for each word of a slice; other lists are numbered as the indices have them, which may be far fewer
/// than the lines of the result.
const PART_OF_SLICES: &str =
    "const Index q = i % WORDS * WIDTH, chunk = i / WORDS % CHUNKS, o = i / (WORDS * CHUNKS);
PLACE";
const PART_OF_LIST: &str = "const Index list = i / CHUNKS, chunk = i % CHUNKS;
const Index first = list / NEIGHBOURS * BLOCK + list % NEIGHBOURS;";

/// Where those parts are.
const AT_SLICE: &str = "((o * CHUNKS + p / CHUNK) * WORDS * WIDTH + q)";
const AT_LIST: &str = "(list * CHUNKS + p / CHUNK)";

/// Joins the updates of each element.
const SORTED: &str = "
const Index i = (Index)blockIdx.x * THREADS + threadIdx.x;
if (i >= COUNT) return;
const Index q = i % WORDS * WIDTH, v = i / WORDS % EXTENT, o = i / (WORDS * EXTENT);
@_Elements all = @_start(i * WIDTH STARTS);
PLACE
if (inside) {
    const kiln_item32* own = sorted + list * LENGTH;
    FIND
    UPDATE
}
all.store(result + i * WIDTH);
";

/// The list's bounds from memory, or by bisection.
const FIND_BOUNDS: &str = "const int low = bounds[v], high = bounds[v + 1];";
const FIND_HERE: &str = "const int low = kiln_first_of<kiln_item32, int>(own, 0, LENGTH, (kiln_u32)v);
    const int high = kiln_first_of<kiln_item32, int>(own, low, LENGTH, (kiln_u32)v + 1);";

/// The last update wins.
const UPDATE_LAST: &str =
    "if (low < high) all.update(updates + first + (Index)own[high - 1].place() * STEP);";
const UPDATE_ALL: &str = "#pragma unroll 4
    for (int p = low; p < high; p++) all.update(updates + first + (Index)own[p].place() * STEP);";
/// Chunks as a whole, the updates in front of them and behind them one by one.
const UPDATE_CHUNKS: &str = "int front = high, back = high;
    if ((low + CHUNK - 1) / CHUNK < high / CHUNK) {
        front = (low + CHUNK - 1) / CHUNK * CHUNK;
        back = high / CHUNK * CHUNK;
    }
    #pragma unroll 4
    for (int p = low; p < front; p++) all.update(updates + first + (Index)own[p].place() * STEP);
    #pragma unroll 4
    for (int p = front; p < back; p += CHUNK) all.join(parts + AT_PART);
    #pragma unroll 4
    for (int p = back; p < high; p++) all.update(updates + first + (Index)own[p].place() * STEP);";

/// The operation, its extents, and how threads share it out.
struct Scatter<'a> {
    graph: &'a Graph,
    node: Node,
    mode: ScatterMode,
    /// Whether there is one list, for whole slices.
    whole: bool,
    out: Value,
    dtype: DType,
    lanes: Lanes,
    /// Indices of a list, lists, and neighbouring lists.
    length: usize,
    lists: usize,
    neighbours: usize,
    /// Elements of a thread.
    width: usize,
    /// Statements that give `inside`, `first`, `first_index` and `list` for `o` and `q`.
    place: String,
    /// Distance between updates and between indices of a list.
    steps: (usize, usize),
}

/// The code of a `scatter` or `index_put`; none for more indices than a word counts.
pub(super) fn scatter(graph: &Graph, node: Node, axis: usize, mode: ScatterMode) -> Option<KernelCode> {
    let scatter = Scatter::new(graph, node, axis, mode);
    let Lanes { extent, .. } = scatter.lanes;
    i32::try_from(extent).ok()?;
    i32::try_from(scatter.length).ok()?;
    let words = graph.ty(scatter.out).numel() / scatter.width;
    let direct = scatter.length <= FEW || (scatter.length <= SOME && words * scatter.length <= LOOKS);
    Some(if direct {
        KernelCode::launches([scatter.direct()])
    } else {
        scatter.sorted()
    })
}

impl<'a> Scatter<'a> {
    fn new(graph: &'a Graph, node: Node, axis: usize, mode: ScatterMode) -> Self {
        let data = graph.node(node);
        let out = data.outputs[0];
        let (shape, indices) = (graph.shape(out), graph.shape(data.inputs[1]));
        let (dtype, lanes) = (graph.dtype(out), Lanes::new(shape, axis));
        let whole = matches!(data.op, Op::IndexPut { .. });
        let own = 16 / dtype.size();
        let width = if whole && lanes.inner.is_multiple_of(own) {
            own
        } else {
            1
        };
        let (place, lists, neighbours, step) = if whole {
            let Lanes { inner, .. } = lanes;
            let slices = indices[0] * inner;
            let place = format!(
                "const bool inside = true;
const Index first = o * {slices} + q;
const Index first_index = 0, list = 0;"
            );
            (place, 1, 1, inner)
        } else {
            let of_indices = Lanes::new(indices, axis);
            let step = of_indices.inner;
            (line_text(shape, indices, axis), of_indices.lines(), step, step)
        };
        Self {
            graph,
            node,
            mode,
            whole,
            out,
            dtype,
            lanes,
            length: if whole { indices[0] } else { indices[axis] },
            lists,
            neighbours,
            width,
            place,
            steps: (step, if whole { 1 } else { step }),
        }
    }

    /// The number of words of the result, and of one place along the dimension.
    fn words(&self) -> (usize, usize) {
        let count = self.graph.ty(self.out).numel();
        (count / self.width, self.lanes.inner / self.width)
    }

    fn text(&self, count: usize) -> Text {
        let data = self.graph.node(self.node);
        let (memory, limit) = (
            expressions::memory_type(self.dtype),
            self.graph
                .ty(self.out)
                .numel()
                .max(self.graph.ty(data.inputs[2]).numel())
                .max(count),
        );
        Text::default()
            .helpers(&self.elements())
            .ty("Index", index_type(limit))
            .count("THREADS", THREADS as usize)
            .count("COUNT", count)
            .count("WIDTH", self.width)
            .count("WORDS", self.words().1)
            .count("EXTENT", self.lanes.extent)
            .count("LENGTH", self.length)
            .count("STEP", self.steps.0)
            .count("INDEX_STEP", self.steps.1)
            .count("CHUNK", CHUNK)
            .count("CHUNKS", self.length / CHUNK)
            .reads(memory, "updates", Argument::value(data.inputs[2]))
    }

    /// Adds the indices, in their original order, to a text.
    fn with_indices(&self, text: Text) -> Text {
        let indices = self.graph.node(self.node).inputs[1];
        let ty = expressions::memory_type(self.graph.dtype(indices));
        text.reads(ty, "indices", Argument::value(indices))
    }

    /// Some neighbouring elements in registers, and how updates reach them.
    fn elements(&self) -> String {
        let indices = self.graph.dtype(self.graph.node(self.node).inputs[1]);
        let (memory, wide) = (
            expressions::memory_type(self.dtype),
            expressions::register_type(self.dtype),
        );
        let join = match reduction(self.mode) {
            None => "b".to_owned(),
            Some(op) => expressions::combine(op, self.dtype, "a", "b"),
        };
        let vector = |load: &str, store: &str| {
            if self.width > 1 {
                (
                    format!("kiln_vector<{memory}, {}> v; v.load(from);", self.width),
                    format!("kiln_vector<{memory}, {}> v; {store} v.store(to);", self.width),
                )
            } else {
                (load.to_owned(), store.to_owned())
            }
        };
        let loop_ = format!("for (int w = 0; w < {}; w++)", self.width);
        let (load, store) = vector(
            &format!("struct {{ {memory} at[1]; }} v; v.at[0] = from[0];"),
            &format!(
                "{loop_} {}[w] = {};",
                if self.width > 1 { "v.at" } else { "to" },
                expressions::narrowed(self.dtype, "at[w]")
            ),
        );
        let last = self.lanes.extent - 1;
        let low = if indices.is_signed_int() {
            "x < 0 ? 0 : "
        } else {
            ""
        };
        let start = match starts_constant(self.graph, self.node) {
            Some(value) => format!(
                "inline @_Elements @_start(long long) {{ @_Elements all; {loop_} all.at[w] = {}; return all; }}",
                expressions::literal(value, self.dtype)
            ),
            None => format!(
                "inline @_Elements @_start(long long i, const {memory}* x) {{ @_Elements all; all.load(x + i); return all; }}"
            ),
        };
        format!(
            "struct @_Elements {{
    {wide} at[{width}];
    static {wide} joined({wide} a, {wide} b) {{ return {join}; }}
    void load(const {memory}* from) {{ {load} {loop_} at[w] = {widen}; }}
    void update(const {memory}* from) {{ {load} {loop_} at[w] = joined(at[w], {widen}); }}
    void join(const {wide}* from) {{ {loop_} at[w] = joined(at[w], from[w]); }}
    void store({memory}* to) const {{ {store} }}
}};
{start}
inline int @_clamp({index} x) {{ return {low}x > {last} ? {last} : (int)x; }}
",
            width = self.width,
            widen = expressions::widened(self.dtype, "v.at[w]"),
            index = expressions::memory_type(indices),
        )
    }

    /// Adds the elements that the result has before any update to a text; returns the name by which
    /// statements refer to them.
    fn with_start(&self, text: Text) -> (Text, &'static str) {
        match starts_constant(self.graph, self.node) {
            Some(_) => (text, ""),
            None => {
                let x = self.graph.node(self.node).inputs[0];
                (
                    text.reads(expressions::memory_type(self.dtype), "x", Argument::value(x)),
                    ", x",
                )
            }
        }
    }

    fn statements(&self, template: &str, starts: &str) -> String {
        template.replace("PLACE", &self.place).replace(" STARTS", starts)
    }

    fn direct(&self) -> Launch {
        let count = self.words().0;
        let (text, starts) = self.with_start(self.with_indices(self.text(count)));
        let text = text.writes(
            expressions::memory_type(self.dtype),
            "result",
            Argument::value(self.out),
        );
        text.launch(
            &self.statements(DIRECT, starts),
            blocks(count, THREADS as usize),
            THREADS,
        )
    }

    fn sorted(&self) -> KernelCode {
        let order = Order {
            rows: self.lists,
            extent: self.length,
            keep: self.length,
            wide: false,
            across: self.neighbours > 1,
        };
        let list_bytes = (self.lists * self.length * order.item_bytes()).next_multiple_of(256);
        let bounds_at = list_bytes;
        let bounds_bytes = if self.lists == 1 {
            ((self.lanes.extent + 1) * 4).next_multiple_of(256)
        } else {
            0
        };
        // The working memory of the sort is free again when the parts are written.
        let rest = bounds_at + bounds_bytes;
        let chunks = self.length / CHUNK;
        let has_parts = self.mode != ScatterMode::Assign && chunks >= 4;
        let (part_of, at_part, part_words) = if self.whole {
            let words = self.lanes.outer * chunks * self.words().1;
            (PART_OF_SLICES, AT_SLICE, words)
        } else {
            (PART_OF_LIST, AT_LIST, self.lists * chunks)
        };
        let part_bytes = if has_parts {
            part_words * self.width * self.dtype.compute().size()
        } else {
            0
        };
        let sorted = |text: Text| text.reads("kiln_item32", "sorted", Argument::Scratch(0));
        let mut launches = self.sort(&order, rest);
        if self.lists == 1 {
            let text = sorted(self.text(0)).writes("int", "bounds", Argument::Scratch(bounds_at));
            let count = self.lanes.extent + 1;
            launches.push(text.launch(BOUNDS, blocks(count, THREADS as usize), THREADS));
        }
        let wide = expressions::register_type(self.dtype);
        if has_parts {
            let text = sorted(self.text(part_words))
                .count("NEIGHBOURS", self.neighbours)
                .count("BLOCK", self.length * self.neighbours)
                .writes(wide, "parts", Argument::Scratch(rest));
            let statements = self.statements(&PARTS.replace("PART\n", &format!("{part_of}\n")), "");
            launches.push(text.launch(&statements, blocks(part_words, THREADS as usize), THREADS));
        }
        let count = self.words().0;
        let (mut text, starts) = self.with_start(sorted(self.text(count)));
        let mut statements = self.statements(SORTED, starts);
        if self.lists == 1 {
            text = text.reads("int", "bounds", Argument::Scratch(bounds_at));
            statements = statements.replace("FIND", FIND_BOUNDS);
        } else {
            statements = statements.replace("FIND", FIND_HERE);
        }
        if has_parts {
            text = text.reads(wide, "parts", Argument::Scratch(rest));
        }
        let update = match (self.mode, has_parts) {
            (ScatterMode::Assign, _) => UPDATE_LAST,
            (_, true) => UPDATE_CHUNKS,
            (_, false) => UPDATE_ALL,
        };
        let text = text.writes(
            expressions::memory_type(self.dtype),
            "result",
            Argument::value(self.out),
        );
        let statements = statements.replace("UPDATE", update).replace("AT_PART", at_part);
        launches.push(text.launch(&statements, blocks(count, THREADS as usize), THREADS));
        KernelCode {
            calls: launches.into_iter().map(Call::Launch).collect(),
            scratch: rest + order.scratch().max(part_bytes),
        }
    }

    /// Sorts each list by index and then by position, to the start of the working memory.
    fn sort(&self, order: &Order, scratch: usize) -> Vec<Launch> {
        let (length, neighbours) = (self.length, self.neighbours);
        let clamp = self.elements();
        let declare = |text: Text| self.with_indices(text.helpers(&clamp));
        let row = length * neighbours;
        let read = format!(
            "Item::make((kiln_u32)@_clamp(indices[row / {neighbours} * {row} + k * {neighbours} + row % {neighbours}]), (kiln_u32)k)"
        );
        let write = format!("sorted[row * {length} + k] = item;");
        let sink = |text: Text| text.writes("kiln_item32", "sorted", Argument::Scratch(0));
        order.launches(
            scratch,
            &Port {
                declare: &declare,
                text: &read,
            },
            &Port {
                declare: &sink,
                text: &write,
            },
        )
    }
}

/// How updates combine; none if the last one wins.
fn reduction(mode: ScatterMode) -> Option<ReduceOp> {
    match mode {
        ScatterMode::Assign => None,
        ScatterMode::Add => Some(ReduceOp::Sum),
        ScatterMode::Mul => Some(ReduceOp::Prod),
        ScatterMode::Max => Some(ReduceOp::Max),
        ScatterMode::Min => Some(ReduceOp::Min),
    }
}

/// The line of the indices that belongs to the line `o`, `q` of a result: whether there is one, where it
/// begins and its number.
fn line_text(shape: &Shape, indices: &Shape, axis: usize) -> String {
    let strides = indices.strides();
    let (mut inside, mut first, mut list) = (
        vec!["true".to_owned()],
        vec!["0".to_owned()],
        vec!["0".to_owned()],
    );
    let mut lines = 1;
    for (name, axes) in [("q", axis + 1..shape.rank()), ("o", 0..axis)] {
        let mut inner = 1;
        for at in axes.rev() {
            let coordinate = format!("{name} / {inner} % {}", shape[at]);
            if indices[at] < shape[at] {
                inside.push(format!("{coordinate} < {}", indices[at]));
            }
            first.push(format!("{coordinate} * {}", strides[at]));
            list.push(format!("{coordinate} * {lines}"));
            lines *= indices[at];
            inner *= shape[at];
        }
    }
    format!(
        "const bool inside = {};
const Index first = {};
const Index first_index = first, list = {};",
        inside.join(" && "),
        first.join(" + "),
        list.join(" + ")
    )
}
