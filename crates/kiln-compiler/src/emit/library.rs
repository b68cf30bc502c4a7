//! C for operations that are kernels of their own: plain loops, right for every type and shape.
//!
//! Each function writes one task over the elements (or rows) of the result; how an element is computed reads like the definition of the
//! operation in [`kiln_graph::op`]. The heavy f32 cases (matrix products, convolutions, pooling) go to the templates of
//! [`crate::kernels`] instead; [`super::contract`] chooses.

use std::fmt::Write as _;

use kiln_graph::op::{ArgReduceOp, ConvDims, Op, ReduceOp, ScatterMode, Window};
use kiln_graph::{DType, Graph, Node, Shape, Value};

use super::nest::{Argument, Launch};
use super::pointwise as c;
use crate::schedule::Buffer;
use crate::schedule::fuse::starts_constant;
use crate::schedule::layout::Layouts;

/// Points of work below which a kernel runs on the calling thread alone.
const SERIAL_POINTS: usize = 16 * 1024;

/// The text of one function in the making.
struct Text {
    text: String,
    depth: usize,
}

impl Text {
    fn line(&mut self, line: impl AsRef<str>) {
        let _ = writeln!(self.text, "{}", line.as_ref());
    }

    /// Opens `for (name = 0..extent)`.
    fn each(&mut self, name: &str, extent: usize) {
        self.line(format!(
            "for (int64_t {name} = 0; {name} < {extent}; {name}++) {{"
        ));
        self.depth += 1;
    }

    fn open(&mut self, line: impl AsRef<str>) {
        self.line(line);
        self.depth += 1;
    }

    fn close(&mut self) {
        self.line("}");
        self.depth -= 1;
    }

    fn close_all(&mut self) {
        while self.depth > 0 {
            self.close();
        }
    }

    /// Splits `name` into coordinates `prefix0, prefix1, ..` of a shape.
    fn split(&mut self, name: &str, prefix: &str, shape: &[usize]) {
        let mut inner: usize = shape.iter().product();
        for (axis, &extent) in shape.iter().enumerate() {
            inner /= extent.max(1);
            self.line(format!(
                "const int64_t {prefix}{axis} = {name} / {inner} % {extent};"
            ));
        }
    }
}

/// `prefix0 * stride0 + ..` for row-major extents.
fn position(prefix: &str, shape: &[usize]) -> String {
    let strides = Shape::from(shape).strides();
    let terms: Vec<String> = strides
        .iter()
        .enumerate()
        .map(|(axis, stride)| format!("{prefix}{axis} * {stride}"))
        .collect();
    if terms.is_empty() {
        "0".into()
    } else {
        terms.join(" + ")
    }
}

struct Writer<'a> {
    graph: &'a Graph,
    node: Node,
    arguments: Vec<Argument>,
    head: String,
}

impl<'a> Writer<'a> {
    fn new(graph: &'a Graph, node: Node) -> Self {
        let data = graph.node(node);
        let mut writer = Self {
            graph,
            node,
            arguments: Vec::new(),
            head: String::new(),
        };
        for (at, &value) in data.inputs.iter().enumerate() {
            writer.pointer(&format!("in{at}"), value, true);
        }
        for (at, &value) in data.outputs.iter().enumerate() {
            writer.pointer(&format!("out{at}"), value, false);
        }
        writer
    }

    fn pointer(&mut self, name: &str, value: Value, read: bool) {
        let at = self.arguments.len();
        self.arguments.push(Argument::Buffer(Buffer::Value(value)));
        let ty = c::memory_type(self.graph.dtype(value));
        let qualifier = if read { "const " } else { "" };
        let _ = writeln!(self.head, "{qualifier}{ty} *{name} = b[{at}];");
    }

    fn shape(&self, input: usize) -> &'a [usize] {
        self.graph.shape(self.graph.node(self.node).inputs[input]).dims()
    }

    fn out_shape(&self) -> &'a [usize] {
        self.graph.shape(self.graph.node(self.node).outputs[0]).dims()
    }

    fn dtype(&self, input: usize) -> DType {
        self.graph.dtype(self.graph.node(self.node).inputs[input])
    }

    fn out_dtype(&self) -> DType {
        self.graph.dtype(self.graph.node(self.node).outputs[0])
    }

    /// A task over `n` iterations named `i`, with `body` for each.
    fn task(self, n: usize, work: usize, body: impl FnOnce(&Self, &mut Text)) -> Launch {
        let mut text = Text {
            text: String::new(),
            depth: 0,
        };
        text.line("void @(void *ctx, int64_t begin, int64_t end, int thread) {\nvoid *const *b = ctx;\n(void)thread;");
        text.text.push_str(&self.head);
        text.open("for (int64_t i = begin; i < end; i++) {");
        body(&self, &mut text);
        text.close_all();
        text.line("}");
        Launch {
            text: text.text,
            arguments: self.arguments,
            n: n as i64,
            grain: (SERIAL_POINTS / 4 / work.max(1)).max(1) as i64,
            parallel: n.saturating_mul(work.max(1)) >= SERIAL_POINTS,
            flat: false,
        }
    }
}

/// Plain loops for `node`; none if there are none for its operation.
pub fn generate(graph: &Graph, node: Node, reads: &[Buffer], layouts: &Layouts) -> Option<Vec<Launch>> {
    let data = graph.node(node);
    let w = Writer::new(graph, node);
    let launch = match &data.op {
        _ if data.outputs.iter().all(|&v| graph.ty(v).numel() == 0) => return Some(Vec::new()),
        Op::Reduce { op, .. } => fill(w, &c::neutral(*op, data_dtype(graph, node))),
        Op::Concat { axis } => return Some(concat(graph, node, *axis)),
        Op::ArgReduce { op, axis, .. } => arg_reduce(w, *op, *axis),
        Op::Cumulative { op, axis } => cumulative(w, *op, *axis),
        Op::Pad { low, .. } => pad(w, low),
        Op::UpdateSlice { starts, steps } => update_slice(w, starts, steps),
        Op::Scatter { axis, mode } => scatter(w, *axis, *mode),
        Op::IndexPut { axis, mode } => index_put(w, *axis, *mode),
        Op::DotGeneral(_) => dot(w, reads, layouts),
        Op::Conv(conv) => convolution(w, conv),
        Op::ConvInputGrad { conv, .. } => convolution_input(w, conv),
        Op::ConvWeightGrad { conv, .. } => convolution_weight(w, conv),
        Op::MaxPool(window) => max_pool(w, window, false),
        Op::MaxPoolWithIndices { window, .. } => max_pool(w, window, true),
        Op::MaxPoolGrad { .. } => max_pool_grad(w),
        Op::AvgPool {
            window,
            count_include_pad,
        } => avg_pool(w, window, *count_include_pad),
        Op::AvgPoolGrad {
            window,
            count_include_pad,
            ..
        } => avg_pool_grad(w, window, *count_include_pad),
        Op::Sort { axis, descending, .. } => sort(w, *axis, *descending, None),
        Op::TopK { axis, k, .. } => sort(w, *axis, true, Some(*k)),
        _ => return None,
    };
    Some(vec![launch])
}

fn data_dtype(graph: &Graph, node: Node) -> DType {
    graph.dtype(graph.node(node).outputs[0])
}

/// What a reduction of nothing gives.
fn fill(w: Writer, value: &str) -> Launch {
    let n = w.out_shape().iter().product();
    w.task(n, 1, |w, t| {
        t.line(format!("put_{}(out0 + i, {value});", w.out_dtype()))
    })
}

/// Copies each operand that has elements to its place.
fn concat(graph: &Graph, node: Node, axis: usize) -> Vec<Launch> {
    let data = graph.node(node);
    let mut start = 0;
    let mut launches = Vec::new();
    for at in 0..data.inputs.len() {
        let w = Writer::new(graph, node);
        let shape = w.shape(at);
        let out = w.out_shape();
        let n: usize = shape.iter().product();
        if n > 0 {
            launches.push(w.task(n, 1, |_, t| {
                t.split("i", "i", shape);
                let offset = start * Shape::from(out).strides()[axis];
                t.line(format!("out0[{} + {offset}] = in{at}[i];", position("i", out)));
            }));
        }
        start += shape[axis];
    }
    launches
}

fn arg_reduce(w: Writer, op: ArgReduceOp, axis: usize) -> Launch {
    let shape = w.shape(0);
    let (extent, inner) = (shape[axis], shape[axis + 1..].iter().product::<usize>());
    let n = w.out_shape().iter().product();
    let sign = match op {
        ArgReduceOp::Max => ">",
        ArgReduceOp::Min => "<",
    };
    w.task(n, extent, |w, t| {
        let dtype = w.dtype(0);
        t.line(format!(
            "const int64_t first = i / {inner} * {} + i % {inner};",
            inner * extent
        ));
        t.line(format!(
            "{} best = get_{dtype}(in0 + first);",
            c::register_type(dtype, false)
        ));
        t.line("int64_t at = 0;");
        t.open(format!("for (int64_t k = 1; k < {extent}; k++) {{"));
        t.line(format!(
            "{} x = get_{dtype}(in0 + first + k * {inner});",
            c::register_type(dtype, false)
        ));
        t.line(format!(
            "if (best == best && (x {sign} best || x != x)) {{ best = x; at = k; }}"
        ));
        t.close();
        t.line(format!("out0[i] = ({})at;", c::memory_type(w.out_dtype())));
    })
}

fn cumulative(w: Writer, op: ReduceOp, axis: usize) -> Launch {
    let shape = w.shape(0);
    let (extent, inner) = (shape[axis], shape[axis + 1..].iter().product::<usize>());
    let n = shape.iter().product::<usize>() / extent.max(1);
    w.task(n, extent, |w, t| {
        let dtype = w.dtype(0);
        let ty = c::register_type(dtype, false);
        t.line(format!(
            "const int64_t first = i / {inner} * {} + i % {inner};",
            inner * extent
        ));
        t.line(format!("{ty} sum = {};", c::neutral(op, dtype)));
        t.open(format!("for (int64_t k = 0; k < {extent}; k++) {{"));
        let x = format!("get_{dtype}(in0 + first + k * {inner})");
        t.line(format!("sum = {};", c::combine(op, dtype, false, "sum", &x)));
        t.line(format!("put_{dtype}(out0 + first + k * {inner}, sum);"));
        t.close();
    })
}

fn pad(w: Writer, low: &[i64]) -> Launch {
    let (out, shape) = (w.out_shape(), w.shape(0));
    let n = out.iter().product();
    let empty = shape.contains(&0);
    w.task(n, 1, |_, t| {
        if empty {
            t.line("out0[i] = in1[0];");
            return;
        }
        t.split("i", "i", out);
        let mut inside = vec!["1".to_owned()];
        for (axis, low) in low.iter().enumerate() {
            t.line(format!("const int64_t j{axis} = i{axis} - ({low});"));
            inside.push(format!("j{axis} >= 0 && j{axis} < {}", shape[axis]));
        }
        t.line(format!(
            "out0[i] = {} ? in0[{}] : in1[0];",
            inside.join(" && "),
            position("j", shape)
        ));
    })
}

fn update_slice(w: Writer, starts: &[usize], steps: &[usize]) -> Launch {
    let (out, update) = (w.out_shape(), w.shape(1));
    let n = out.iter().product();
    let empty = update.contains(&0);
    w.task(n, 1, |_, t| {
        if empty {
            t.line("out0[i] = in0[i];");
            return;
        }
        t.split("i", "i", out);
        let mut inside = vec!["1".to_owned()];
        for axis in 0..out.len() {
            let (start, step) = (starts[axis], steps[axis]);
            t.line(format!(
                "const int64_t d{axis} = i{axis} - {start}, j{axis} = d{axis} / {step};"
            ));
            inside.push(format!(
                "d{axis} >= 0 && d{axis} % {step} == 0 && j{axis} < {}",
                update[axis]
            ));
        }
        t.line(format!(
            "out0[i] = {} ? in1[{}] : in0[i];",
            inside.join(" && "),
            position("j", update)
        ));
    })
}

fn update_text(w: &Writer, mode: ScatterMode, place: &str, update: &str) -> String {
    let dtype = w.out_dtype();
    let op = match mode {
        ScatterMode::Assign => return format!("out0[{place}] = in2[{update}];"),
        ScatterMode::Add => ReduceOp::Sum,
        ScatterMode::Mul => ReduceOp::Prod,
        ScatterMode::Max => ReduceOp::Max,
        ScatterMode::Min => ReduceOp::Min,
    };
    let old = format!("get_{dtype}(out0 + {place})");
    let new = format!("get_{dtype}(in2 + {update})");
    format!(
        "put_{dtype}(out0 + {place}, {});",
        c::combine(op, dtype, false, &old, &new)
    )
}

/// One iteration for each line of the result along `axis`: updates of a line never meet another's.
fn scatter(w: Writer, axis: usize, mode: ScatterMode) -> Launch {
    let (out, indices) = (w.out_shape(), w.shape(1));
    let extent = out[axis];
    let inner: usize = out[axis + 1..].iter().product();
    let n = out.iter().product::<usize>() / extent.max(1);
    w.task(n, extent + indices[axis], |w, t| {
        t.line(format!(
            "const int64_t line = i / {inner} * {} + i % {inner};",
            inner * extent
        ));
        t.open(format!("for (int64_t k = 0; k < {extent}; k++) {{"));
        match starts_constant(w.graph, w.node) {
            Some(value) => t.line(format!(
                "put_{0}(out0 + line + k * {inner}, {1});",
                w.out_dtype(),
                c::literal(value, w.out_dtype())
            )),
            None => t.line(format!("out0[line + k * {inner}] = in0[line + k * {inner}];")),
        }
        t.close();
        let lines: Vec<usize> = out
            .iter()
            .enumerate()
            .map(|(at, &e)| if at == axis { 1 } else { e })
            .collect();
        t.split("i", "i", &lines);
        let inside: Vec<String> = (0..out.len())
            .filter(|&at| at != axis && indices[at] < out[at])
            .map(|at| format!("i{at} < {}", indices[at]))
            .chain(["1".to_owned()])
            .collect();
        t.open(format!(
            "if ({}) for (int64_t k = 0; k < {}; k++) {{",
            inside.join(" && "),
            indices[axis]
        ));
        t.line(format!(
            "const int64_t j = {} + k * {};",
            position("i", indices),
            Shape::from(indices).strides()[axis]
        ));
        t.line(format!(
            "const int64_t at = clamp_index((int64_t)in1[j], {extent});"
        ));
        t.line(update_text(w, mode, &format!("(line + at * {inner})"), "j"));
        t.close();
    })
}

/// Columns of the result are independent; the updates of one column run in order.
fn index_put(w: Writer, axis: usize, mode: ScatterMode) -> Launch {
    let (out, count) = (w.out_shape(), w.shape(1)[0]);
    let extent = out[axis];
    let inner: usize = out[axis + 1..].iter().product();
    let outer: usize = out[..axis].iter().product();
    // Blocks of neighbouring columns, so that a row of an update is read in whole cache lines.
    let block = inner.clamp(1, 64);
    let blocks = inner.div_ceil(block);
    w.task(outer * blocks, (extent + count) * block, |w, t| {
        t.line(format!(
            "const int64_t o = i / {blocks}, low = i % {blocks} * {block};"
        ));
        t.line(format!(
            "const int64_t high = low + {block} < {inner} ? low + {block} : {inner};"
        ));
        t.each("k", extent);
        t.line(format!("const int64_t at = (o * {extent} + k) * {inner};"));
        match starts_constant(w.graph, w.node) {
            Some(value) => t.line(format!(
                "for (int64_t q = low; q < high; q++) put_{0}(out0 + at + q, {1});",
                w.out_dtype(),
                c::literal(value, w.out_dtype())
            )),
            None => t.line("memcpy(out0 + at + low, in0 + at + low, (size_t)(high - low) * sizeof *out0);"),
        }
        t.close();
        t.each("j", count);
        t.line(format!(
            "const int64_t at = (o * {extent} + clamp_index((int64_t)in1[j], {extent})) * {inner};"
        ));
        t.line(format!("const int64_t from = (o * {count} + j) * {inner};"));
        t.open("for (int64_t q = low; q < high; q++) {");
        t.line(update_text(w, mode, "(at + q)", "(from + q)"));
        t.close();
        t.close();
    })
}

fn dot(mut w: Writer, reads: &[Buffer], layouts: &Layouts) -> Launch {
    let data = w.graph.node(w.node);
    let Op::DotGeneral(dims) = &data.op else {
        unreachable!("called for dot_general")
    };
    let a = super::contract::window(w.graph, layouts, data.inputs[0], reads);
    let b = super::contract::window(w.graph, layouts, data.inputs[1], reads);
    let (sa, sb) = (w.shape(0), w.shape(1));
    let free_a = kiln_graph::op::DotDims::free(sa.len(), &dims.a_batch, &dims.a_contract);
    let free_b = kiln_graph::op::DotDims::free(sb.len(), &dims.b_batch, &dims.b_contract);
    w.arguments[0] = Argument::Buffer(Buffer::Value(a.base));
    w.arguments[1] = Argument::Buffer(Buffer::Value(b.base));
    let k: usize = dims.a_contract.iter().map(|&axis| sa[axis]).product();
    let n = w.out_shape().iter().product();
    w.task(n, k, |w, t| {
        let dtype = w.dtype(0);
        t.split("i", "i", w.out_shape());
        let mut at_a = vec![a.offset.to_string()];
        let mut at_b = vec![b.offset.to_string()];
        let batch = dims.a_batch.len();
        for axis in 0..batch {
            at_a.push(format!("i{axis} * {}", a.strides[dims.a_batch[axis]]));
            at_b.push(format!("i{axis} * {}", b.strides[dims.b_batch[axis]]));
        }
        for (at, &axis) in free_a.iter().enumerate() {
            at_a.push(format!("i{} * {}", batch + at, a.strides[axis]));
        }
        for (at, &axis) in free_b.iter().enumerate() {
            at_b.push(format!("i{} * {}", batch + free_a.len() + at, b.strides[axis]));
        }
        let ty = c::register_type(dtype, false);
        t.line(format!("{ty} sum = 0;"));
        for (at, (&i, &j)) in dims.a_contract.iter().zip(&dims.b_contract).enumerate() {
            t.each(&format!("k{at}"), sa[i]);
            at_a.push(format!("k{at} * {}", a.strides[i]));
            at_b.push(format!("k{at} * {}", b.strides[j]));
        }
        t.line(format!(
            "sum += get_{dtype}(in0 + {}) * get_{dtype}(in1 + {});",
            at_a.join(" + "),
            at_b.join(" + ")
        ));
        for _ in &dims.a_contract {
            t.close();
        }
        t.line(format!("put_{dtype}(out0 + i, sum);"));
    })
}

/// Opens loops over kernel positions `k0, k1, ..` and defines the input coordinates `p0, p1, ..` under output coordinates
/// `o0, o1, ..`, skipping those outside.
fn taps(
    t: &mut Text,
    window: &[usize],
    stride: &[usize],
    low: &[usize],
    dilation: &[usize],
    input: &[usize],
) {
    for axis in 0..window.len() {
        t.each(&format!("k{axis}"), window[axis]);
        t.line(format!(
            "const int64_t p{axis} = o{axis} * {} - {} + k{axis} * {};",
            stride[axis], low[axis], dilation[axis]
        ));
        t.line(format!(
            "if (p{axis} < 0 || p{axis} >= {}) continue;",
            input[axis]
        ));
    }
}

fn convolution(w: Writer, conv: &ConvDims) -> Launch {
    let (x, k, out) = (w.shape(0), w.shape(1), w.out_shape());
    let n = out.iter().product();
    let work = k[1..].iter().product();
    w.task(n, work, |w, t| {
        let dtype = w.dtype(0);
        t.split("i", "c", out);
        for axis in 2..out.len() {
            t.line(format!("const int64_t o{} = c{axis};", axis - 2));
        }
        t.line(format!("{} sum = 0;", c::register_type(dtype, false)));
        t.each("c", k[1]);
        t.line(format!("const int64_t channel = c1 / {} * {} + c;", k[0] / conv.groups, k[1]));
        taps(t, &k[2..], &conv.stride, &conv.pad_low, &conv.dilation, &x[2..]);
        let plane: usize = x[2..].iter().product();
        let taps_count: usize = k[2..].iter().product();
        t.line(format!(
            "sum += get_{dtype}(in0 + (c0 * {} + channel) * {plane} + {}) * get_{dtype}(in1 + (c1 * {} + c) * {taps_count} + {});",
            x[1],
            position("p", &x[2..]),
            k[1],
            position("k", &k[2..])
        ));
        for _ in 0..k.len() - 1 {
            t.close();
        }
        t.line(format!("put_{dtype}(out0 + i, sum);"));
    })
}

/// Opens loops over kernel positions and defines the output coordinates `o0, ..` that read input coordinates `p0, ..`.
fn reverse_taps(
    t: &mut Text,
    window: &[usize],
    stride: &[usize],
    low: &[usize],
    dilation: &[usize],
    output: &[usize],
) {
    for axis in 0..window.len() {
        t.each(&format!("k{axis}"), window[axis]);
        t.line(format!(
            "const int64_t d{axis} = p{axis} + {} - k{axis} * {};",
            low[axis], dilation[axis]
        ));
        t.line(format!(
            "if (d{axis} < 0 || d{axis} % {} != 0) continue;",
            stride[axis]
        ));
        t.line(format!("const int64_t o{axis} = d{axis} / {};", stride[axis]));
        t.line(format!("if (o{axis} >= {}) continue;", output[axis]));
    }
}

fn convolution_input(w: Writer, conv: &ConvDims) -> Launch {
    let (dy, k, out) = (w.shape(0), w.shape(1), w.out_shape());
    let n = out.iter().product();
    let per_group = k[0] / conv.groups;
    let work = per_group * k[2..].iter().product::<usize>();
    w.task(n, work, |w, t| {
        let dtype = w.dtype(0);
        t.split("i", "c", out);
        for axis in 2..out.len() {
            t.line(format!("const int64_t p{} = c{axis};", axis - 2));
        }
        t.line(format!("{} sum = 0;", c::register_type(dtype, false)));
        t.each("f", per_group);
        t.line(format!("const int64_t filter = c1 / {} * {per_group} + f, c = c1 % {};", k[1], k[1]));
        reverse_taps(t, &k[2..], &conv.stride, &conv.pad_low, &conv.dilation, &dy[2..]);
        let plane: usize = dy[2..].iter().product();
        let taps_count: usize = k[2..].iter().product();
        t.line(format!(
            "sum += get_{dtype}(in0 + (c0 * {} + filter) * {plane} + {}) * get_{dtype}(in1 + (filter * {} + c) * {taps_count} + {});",
            dy[1],
            position("o", &dy[2..]),
            k[1],
            position("k", &k[2..])
        ));
        for _ in 0..k.len() - 1 {
            t.close();
        }
        t.line(format!("put_{dtype}(out0 + i, sum);"));
    })
}

fn convolution_weight(w: Writer, conv: &ConvDims) -> Launch {
    let (x, dy, k) = (w.shape(0), w.shape(1), w.out_shape());
    let n = k.iter().product();
    let work = dy[0] * dy[2..].iter().product::<usize>();
    w.task(n, work, |w, t| {
        let dtype = w.dtype(0);
        t.split("i", "c", k);
        t.line(format!("const int64_t channel = c0 / {} * {} + c1;", k[0] / conv.groups, k[1]));
        t.line(format!("{} sum = 0;", c::register_type(dtype, false)));
        t.each("n", dy[0]);
        for axis in 0..k.len() - 2 {
            t.each(&format!("o{axis}"), dy[axis + 2]);
            t.line(format!(
                "const int64_t p{axis} = o{axis} * {} - {} + c{} * {};",
                conv.stride[axis],
                conv.pad_low[axis],
                axis + 2,
                conv.dilation[axis]
            ));
            t.line(format!("if (p{axis} < 0 || p{axis} >= {}) continue;", x[axis + 2]));
        }
        let (px, py): (usize, usize) = (x[2..].iter().product(), dy[2..].iter().product());
        t.line(format!(
            "sum += get_{dtype}(in0 + (n * {} + channel) * {px} + {}) * get_{dtype}(in1 + (n * {} + c0) * {py} + {});",
            x[1],
            position("p", &x[2..]),
            dy[1],
            position("o", &dy[2..])
        ));
        for _ in 0..k.len() - 1 {
            t.close();
        }
        t.line(format!("put_{dtype}(out0 + i, sum);"));
    })
}

fn max_pool(w: Writer, window: &Window, indices: bool) -> Launch {
    let (x, out) = (w.shape(0), w.out_shape());
    let n = out.iter().product();
    let plane: usize = x[2..].iter().product();
    w.task(n, window.size.iter().product(), |w, t| {
        let dtype = w.dtype(0);
        let ty = c::register_type(dtype, false);
        t.split("i", "c", out);
        for axis in 2..out.len() {
            t.line(format!("const int64_t o{} = c{axis};", axis - 2));
        }
        t.line(format!("{ty} best = {};", c::neutral(ReduceOp::Max, dtype)));
        t.line("int64_t at = -1;");
        taps(
            t,
            &window.size,
            &window.stride,
            &window.pad_low,
            &window.dilation,
            &x[2..],
        );
        t.line(format!("const int64_t place = {};", position("p", &x[2..])));
        t.line(format!(
            "const {ty} x = get_{dtype}(in0 + (c0 * {} + c1) * {plane} + place);",
            x[1]
        ));
        t.line("if (at < 0 || (best == best && (x > best || x != x))) { best = x; at = place; }");
        for _ in 0..window.size.len() {
            t.close();
        }
        t.line(format!("put_{dtype}(out0 + i, best);"));
        if indices {
            let ty = c::memory_type(w.graph.dtype(w.graph.node(w.node).outputs[1]));
            t.line(format!("out1[i] = ({ty})(at < 0 ? 0 : at);"));
        }
    })
}

fn max_pool_grad(w: Writer) -> Launch {
    let (dy, out) = (w.shape(0), w.out_shape());
    let (small, large): (usize, usize) = (dy[2..].iter().product(), out[2..].iter().product());
    w.task(out[0] * out[1], small + large, |w, t| {
        let dtype = w.dtype(0);
        t.line(format!("memset(out0 + i * {large}, 0, {large} * sizeof *out0);"));
        t.each("k", small);
        t.line(format!(
            "const int64_t at = i * {large} + clamp_index((int64_t)in1[i * {small} + k], {large});"
        ));
        t.line(format!(
            "put_{dtype}(out0 + at, get_{dtype}(out0 + at) + get_{dtype}(in0 + i * {small} + k));"
        ));
        t.close();
    })
}

/// Defines `count`, the divisor of the window at output coordinates `o0, ..`.
fn divisor(t: &mut Text, window: &Window, include: bool, input: &[usize]) {
    t.line("int64_t count = 1;");
    for (axis, &extent) in input.iter().enumerate() {
        let (size, stride, low, high) = (
            window.size[axis],
            window.stride[axis],
            window.pad_low[axis],
            window.pad_high[axis],
        );
        t.open("{");
        t.line(format!(
            "int64_t from = o{axis} * {stride} - {low}, to = from + {size};"
        ));
        let (first, last) = if include {
            (format!("-{low}"), extent + high)
        } else {
            ("0".into(), extent)
        };
        t.line(format!("if (from < {first}) from = {first};"));
        t.line(format!("if (to > {last}) to = {last};"));
        t.line("count *= to > from ? to - from : 0;");
        t.close();
    }
}

fn avg_pool(w: Writer, window: &Window, include: bool) -> Launch {
    let (x, out) = (w.shape(0), w.out_shape());
    let n = out.iter().product();
    let plane: usize = x[2..].iter().product();
    w.task(n, window.size.iter().product(), |w, t| {
        let dtype = w.dtype(0);
        t.split("i", "c", out);
        for axis in 2..out.len() {
            t.line(format!("const int64_t o{} = c{axis};", axis - 2));
        }
        divisor(t, window, include, &x[2..]);
        t.line(format!("{} sum = 0;", c::register_type(dtype, false)));
        taps(
            t,
            &window.size,
            &window.stride,
            &window.pad_low,
            &window.dilation,
            &x[2..],
        );
        t.line(format!(
            "sum += get_{dtype}(in0 + (c0 * {} + c1) * {plane} + {});",
            x[1],
            position("p", &x[2..])
        ));
        for _ in 0..window.size.len() {
            t.close();
        }
        let mean = c::binary(
            kiln_graph::op::BinaryOp::Div,
            dtype,
            false,
            "sum",
            &format!("({})count", c::register_type(dtype, false)),
        );
        t.line(format!("put_{dtype}(out0 + i, {mean});"));
    })
}

fn avg_pool_grad(w: Writer, window: &Window, include: bool) -> Launch {
    let (dy, out) = (w.shape(0), w.out_shape());
    let n = out.iter().product();
    let plane: usize = dy[2..].iter().product();
    w.task(n, window.size.iter().product::<usize>() * 4, |w, t| {
        let dtype = w.dtype(0);
        t.split("i", "c", out);
        for axis in 2..out.len() {
            t.line(format!("const int64_t p{} = c{axis};", axis - 2));
        }
        t.line(format!("{} sum = 0;", c::register_type(dtype, false)));
        reverse_taps(
            t,
            &window.size,
            &window.stride,
            &window.pad_low,
            &window.dilation,
            &dy[2..],
        );
        divisor(t, window, include, &out[2..]);
        let share = c::binary(
            kiln_graph::op::BinaryOp::Div,
            dtype,
            false,
            &format!(
                "get_{dtype}(in0 + (c0 * {} + c1) * {plane} + {})",
                dy[1],
                position("o", &dy[2..])
            ),
            &format!("({})count", c::register_type(dtype, false)),
        );
        t.line(format!("sum += {share};"));
        for _ in 0..window.size.len() {
            t.close();
        }
        t.line(format!("put_{dtype}(out0 + i, sum);"));
    })
}

/// A stable merge sort of positions, one line at a time; `first` keeps that many.
fn sort(mut w: Writer, axis: usize, descending: bool, first: Option<usize>) -> Launch {
    let shape = w.shape(0);
    let (extent, inner) = (shape[axis], shape[axis + 1..].iter().product::<usize>());
    let n = shape.iter().product::<usize>() / extent.max(1);
    let kept = first.unwrap_or(extent);
    // Two lists of positions for each line would need memory that depends on threads; each line has its own instead.
    let scratch = w.arguments.len();
    w.arguments.push(Argument::Scratch(0));
    w.task(n, extent * 16, |w, t| {
        let dtype = w.dtype(0);
        let ty = c::memory_type(w.graph.dtype(w.graph.node(w.node).outputs[1]));
        t.line(format!(
            "const int64_t line = i / {inner} * {} + i % {inner};",
            inner * extent
        ));
        t.line(format!(
            "const int64_t out_line = i / {inner} * {} + i % {inner};",
            inner * kept
        ));
        t.line(format!(
            "int64_t *from = (int64_t *)b[{scratch}] + i * {}, *to = from + {extent};",
            2 * extent
        ));
        t.line(format!("for (int64_t k = 0; k < {extent}; k++) from[k] = k;"));
        t.open(format!(
            "for (int64_t width = 1; width < {extent}; width *= 2) {{"
        ));
        t.open(format!(
            "for (int64_t low = 0; low < {extent}; low += 2 * width) {{"
        ));
        t.line(format!(
            "int64_t middle = low + width < {extent} ? low + width : {extent};"
        ));
        t.line(format!(
            "int64_t high = low + 2 * width < {extent} ? low + 2 * width : {extent};"
        ));
        t.line("int64_t p = low, q = middle;");
        t.open("for (int64_t k = low; k < high; k++) {");
        t.line("int right = p >= middle;");
        t.open("if (p < middle && q < high) {");
        let ty_x = c::register_type(dtype, false);
        t.line(format!("{ty_x} x = get_{dtype}(in0 + line + from[p] * {inner});"));
        t.line(format!("{ty_x} y = get_{dtype}(in0 + line + from[q] * {inner});"));
        // NaN counts as the largest.
        let less = |a: &str, b: &str| format!("({a} < {b} || ({b} != {b} && {a} == {a}))");
        t.line(format!(
            "right = {};",
            if descending {
                less("x", "y")
            } else {
                less("y", "x")
            }
        ));
        t.close();
        t.line("to[k] = from[right ? q++ : p++];");
        t.close();
        t.close();
        t.line("int64_t *t = from; from = to; to = t;");
        t.close();
        t.open(format!("for (int64_t k = 0; k < {kept}; k++) {{"));
        t.line(format!(
            "out0[out_line + k * {inner}] = in0[line + from[k] * {inner}];"
        ));
        t.line(format!("out1[out_line + k * {inner}] = ({ty})from[k];"));
        t.close();
    })
}

/// Bytes of scratch memory that [`generate`]'s kernel for `node` needs.
pub fn scratch(graph: &Graph, node: Node) -> usize {
    let data = graph.node(node);
    match data.op {
        Op::Sort { .. } | Op::TopK { .. } => graph.ty(data.inputs[0]).numel() * 16,
        _ => 0,
    }
}
