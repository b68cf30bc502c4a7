//! C for operations that are kernels of their own: plain loops, right for every type and shape.
//!
//! Each function writes one task over the elements (or rows) of the result; how an element is computed reads
//! like the definition of the operation in [`kiln_graph::op`]. The heavy cases of floats (matrix products,
//! convolutions, pooling) go to the templates of [`crate::kernels`] instead; [`super::contract`] chooses.

mod convolution;
mod indexed;
mod pooling;
mod sums;

use std::fmt::Write as _;

use kiln_compiler::schedule::Buffer;
use kiln_compiler::schedule::access::window;
use kiln_compiler::schedule::layout::{Layouts, strides};
use kiln_graph::op::{ArgReduceOp, Op, ReduceOp};
use kiln_graph::{DType, Graph, Node, Shape, Value};

use super::expressions as c;
use super::nest::{Argument, Launch};
use crate::policy::SERIAL_POINTS;
use convolution::{convolution, convolution_input, convolution_weight};
use indexed::{index_put, scatter, update_slice};
use pooling::{avg_pool, avg_pool_grad, max_pool, max_pool_grad};
use sums::Sums;

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
    spaced(prefix, &strides(&Shape::from(shape), None))
}

/// `prefix0 * stride0 + ..`.
fn spaced(prefix: &str, strides: &[i64]) -> String {
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

    /// Elements between neighbours of the result, in the layout it is stored in.
    fn out_strides(&self, layouts: &Layouts) -> Vec<i64> {
        let out = self.graph.node(self.node).outputs[0];
        strides(self.graph.shape(out), layouts.get(&out))
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
            grain: (SERIAL_POINTS as usize / 4 / work.max(1)).max(1) as i64,
            parallel: n.saturating_mul(work.max(1)) >= SERIAL_POINTS as usize,
            flat: false,
        }
    }
}

/// Plain loops for `node`, for at most `threads` threads; none if there are none for its operation.
pub fn generate(
    graph: &Graph,
    node: Node,
    reads: &[Buffer],
    layouts: &Layouts,
    threads: usize,
) -> Option<Vec<Launch>> {
    let data = graph.node(node);
    let w = Writer::new(graph, node);
    let launch = match &data.op {
        _ if data.outputs.iter().all(|&v| graph.ty(v).numel() == 0) => return Some(Vec::new()),
        Op::Reduce { op, .. } => fill(w, &c::neutral(*op, data_dtype(graph, node))),
        Op::Concat { axis } => return Some(concat(graph, node, *axis, layouts)),
        Op::ArgReduce { op, axis, .. } => arg_reduce(w, *op, *axis),
        Op::Cumulative { op, axis } => cumulative(w, *op, *axis),
        Op::Pad { low, .. } => pad(w, low),
        Op::UpdateSlice { starts, steps } => update_slice(w, starts, steps),
        Op::Scatter { axis, mode } => scatter(w, *axis, *mode, threads),
        Op::IndexPut { axis, mode } => index_put(w, *axis, *mode, threads),
        Op::DotGeneral(_) => dot(w, reads, layouts),
        Op::Conv(conv) => convolution(w, conv),
        Op::ConvInputGrad { conv, .. } => convolution_input(w, conv),
        Op::ConvWeightGrad { conv, .. } => convolution_weight(w, conv),
        Op::MaxPool(window) => max_pool(w, window, false),
        Op::MaxPoolWithIndices { window, .. } => max_pool(w, window, true),
        Op::MaxPoolGrad { .. } => max_pool_grad(w, threads),
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

/// Fills the result of a reduction of nothing.
fn fill(w: Writer, value: &str) -> Launch {
    let n = w.out_shape().iter().product();
    w.task(n, 1, |w, t| {
        t.line(format!("put_{}(out0 + i, {value});", w.out_dtype()))
    })
}

/// Copies each operand that has elements to its place.
fn concat(graph: &Graph, node: Node, axis: usize, layouts: &Layouts) -> Vec<Launch> {
    let data = graph.node(node);
    let mut start = 0;
    let mut launches = Vec::new();
    for at in 0..data.inputs.len() {
        let w = Writer::new(graph, node);
        let shape = w.shape(at);
        let to = w.out_strides(layouts);
        let n: usize = shape.iter().product();
        if n > 0 {
            launches.push(w.task(n, 1, |_, t| {
                t.split("i", "i", shape);
                let offset = start as i64 * to[axis];
                t.line(format!("out0[{} + {offset}] = in{at}[i];", spaced("i", &to)));
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

fn dot(mut w: Writer, reads: &[Buffer], layouts: &Layouts) -> Launch {
    let data = w.graph.node(w.node);
    let Op::DotGeneral(dims) = &data.op else {
        unreachable!("called for dot_general")
    };
    let a = window(w.graph, layouts, data.inputs[0], reads);
    let b = window(w.graph, layouts, data.inputs[1], reads);
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
        let to = spaced("i", &w.out_strides(layouts));
        t.line(format!("put_{}(out0 + {to}, sum);", w.out_dtype()));
    })
}

/// A stable merge sort of positions, one line at a time; `first` keeps that many.
fn sort(mut w: Writer, axis: usize, descending: bool, first: Option<usize>) -> Launch {
    let shape = w.shape(0);
    let (extent, inner) = (shape[axis], shape[axis + 1..].iter().product::<usize>());
    let n = shape.iter().product::<usize>() / extent.max(1);
    let kept = first.unwrap_or(extent);
    // Two lists of positions for each line would need memory that depends on threads; each line has its own
    // instead.
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

/// Bytes of scratch memory that [`generate`]'s kernel for `node` needs on at most `threads` threads.
pub fn scratch(graph: &Graph, node: Node, threads: usize) -> usize {
    let data = graph.node(node);
    match data.op {
        Op::Sort { .. } | Op::TopK { .. } => graph.ty(data.inputs[0]).numel() * 16,
        _ => Sums::of(graph, node, threads).map_or(0, |sums| sums.scratch()),
    }
}
