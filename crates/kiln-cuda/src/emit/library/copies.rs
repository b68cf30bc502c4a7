//! Copies: padding, slices that are replaced, and what a scatter begins with.
//!
//! Elements are moved as words of up to 16 bytes, as long as a word never lies across the border between two
//! sources. Dimensions that are taken whole are joined with the one in front of them, so that most copies
//! have one or two dimensions.

use std::fmt::Write as _;

use kiln_compiler::schedule::fuse::starts_constant;
use kiln_graph::{Graph, Node, Value};

use super::super::elements::{elements_of_a_word, word};
use super::super::text::{THREADS, Text, blocks, index_type};
use super::super::{Argument, Launch, expressions};
use super::fill;

/// Fills a scatter's result with its elements before any update: a constant, or the first operand's.
pub(super) fn start(graph: &Graph, node: Node) -> Launch {
    let data = graph.node(node);
    let out = data.outputs[0];
    match starts_constant(graph, node) {
        Some(value) => fill(graph, out, &expressions::literal(value, graph.dtype(out))),
        None => copy(graph, data.inputs[0], out),
    }
}

/// A copy of a whole tensor.
pub(in crate::emit) fn copy(graph: &Graph, from: Value, to: Value) -> Launch {
    let count = graph.ty(from).numel();
    place(graph, from, to, &[(count, 1)], 0)
}

/// A copy of the elements of `from`, row-major in dimensions of extent and stride `dims`, into `to` from
/// element `start` on.
pub(super) fn place(graph: &Graph, from: Value, to: Value, dims: &[(usize, i64)], start: i64) -> Launch {
    let mut joined: Vec<(usize, i64)> = Vec::new();
    for &(extent, stride) in dims.iter().filter(|(extent, _)| *extent != 1) {
        match joined.last_mut() {
            Some(outer) if outer.1 == stride * extent as i64 => *outer = (outer.0 * extent, stride),
            _ => joined.push((extent, stride)),
        }
    }
    let size = graph.dtype(from).size();
    let (count, reach) = (graph.ty(from).numel(), graph.ty(to).numel());
    let width = match joined.split_last() {
        Some((&(extent, 1), outer)) => {
            let strides = outer.iter().map(|(_, stride)| stride.unsigned_abs() as usize);
            elements_of_a_word(size, strides.chain([extent, start.unsigned_abs() as usize]))
        }
        _ => 1,
    };
    if width > 1 {
        let last = joined.len() - 1;
        for (_, stride) in &mut joined[..last] {
            *stride /= width as i64;
        }
        joined[last].0 /= width;
    }
    let mut inner = 1;
    let mut position = format!("{}", start / width as i64);
    for &(extent, stride) in joined.iter().rev() {
        let _ = write!(position, " + i / {inner} % {extent} * {stride}");
        inner *= extent;
    }
    let text = Text::default()
        .reads(word(size * width), "from", Argument::value(from))
        .writes(word(size * width), "to", Argument::value(to))
        .ty("Index", index_type(count.max(reach)))
        .count("COUNT", count / width)
        .count("THREADS", THREADS as usize);
    let statements = format!(
        "
const Index i = (Index)blockIdx.x * THREADS + threadIdx.x;
if (i < COUNT) to[{position}] = from[i];
"
    );
    text.launch(&statements, blocks(count / width, THREADS as usize), THREADS)
}

/// A dimension of a result into which a part of another tensor goes: the element at `start + i * step` is
/// element `i` of that part.
#[derive(Clone, Copy)]
struct Part {
    extent: usize,
    start: i64,
    step: usize,
    part: usize,
}

impl Part {
    fn is_whole(&self) -> bool {
        self.start == 0 && self.step == 1 && self.part == self.extent
    }
}

/// Dimensions with those joined to the one in front of them that are taken whole.
fn joined(dims: impl IntoIterator<Item = Part>) -> Vec<Part> {
    let mut out: Vec<Part> = Vec::new();
    for dim in dims {
        match out.last_mut() {
            Some(outer) if dim.is_whole() && outer.step == 1 => {
                outer.extent *= dim.extent;
                outer.part *= dim.extent;
                outer.start *= dim.extent as i64;
            }
            _ => out.push(dim),
        }
    }
    out
}

/// Writes the declarations of `inside` (whether word `i` of the result belongs to the part) and of `at`
/// (where in the part it is). Returns the number of elements of a word.
fn parts(dims: &mut [Part], size: usize, statements: &mut String) -> usize {
    let width = match dims.last() {
        Some(last) if last.step == 1 => {
            let lengths = [last.extent, last.part, last.start.unsigned_abs() as usize];
            elements_of_a_word(size, lengths)
        }
        _ => 1,
    };
    if let Some(last) = dims.last_mut() {
        last.extent /= width;
        last.part /= width;
        last.start /= width as i64;
    }
    let (mut inner, mut part_inner) = (1, 1);
    let (mut inside, mut at) = (vec!["true".to_owned()], vec!["0".to_owned()]);
    for (axis, dim) in dims.iter().enumerate().rev() {
        let Part {
            extent,
            start,
            step,
            part,
        } = *dim;
        if dim.is_whole() && dims.len() == 1 {
            at.push("i".into());
            break;
        }
        let _ = writeln!(
            statements,
            "const Index d{axis} = i / {inner} % {extent} - ({start});"
        );
        if !dim.is_whole() {
            inside.push(format!("d{axis} >= 0 && d{axis} < {}", part * step));
        }
        if step == 1 {
            at.push(format!("d{axis} * {part_inner}"));
        } else {
            inside.push(format!("d{axis} % {step} == 0"));
            at.push(format!("d{axis} / {step} * {part_inner}"));
        }
        inner *= extent;
        part_inner *= part;
    }
    let _ = writeln!(statements, "const bool inside = {};", inside.join(" && "));
    let _ = writeln!(statements, "const Index at = {};", at.join(" + "));
    width
}

/// The operand with padding around it, or cropped.
pub(super) fn pad(graph: &Graph, node: Node, low: &[i64]) -> Launch {
    let data = graph.node(node);
    let (x, out) = (graph.shape(data.inputs[0]), graph.shape(data.outputs[0]));
    let mut dims = joined((0..out.rank()).map(|axis| Part {
        extent: out[axis],
        start: low[axis],
        step: 1,
        part: x[axis],
    }));
    let dtype = graph.dtype(data.outputs[0]);
    let count = out.numel();
    let mut place = String::new();
    let width = parts(&mut dims, dtype.size(), &mut place);
    let text = Text::default()
        .reads(word(dtype.size() * width), "x", Argument::value(data.inputs[0]))
        .reads(word(dtype.size()), "value", Argument::value(data.inputs[1]))
        .writes(
            word(dtype.size() * width),
            "result",
            Argument::value(data.outputs[0]),
        )
        .ty("Element", word(dtype.size()))
        .ty("Word", word(dtype.size() * width))
        .ty("Index", index_type(count.max(x.numel())))
        .count("COUNT", count / width)
        .count("WIDTH", width)
        .count("THREADS", THREADS as usize);
    let statements = format!(
        "
const Index i = (Index)blockIdx.x * THREADS + threadIdx.x;
if (i >= COUNT) return;
{place}if (inside) {{
    result[i] = x[at];
}} else {{
    union {{ Word word; Element elements[WIDTH]; }} padding;
    for (int j = 0; j < WIDTH; j++) padding.elements[j] = value[0];
    result[i] = padding.word;
}}
"
    );
    text.launch(&statements, blocks(count / width, THREADS as usize), THREADS)
}

/// The first operand with a slice of it replaced by the second.
pub(super) fn update_slice(graph: &Graph, node: Node, starts: &[usize], steps: &[usize]) -> Launch {
    let data = graph.node(node);
    let (update, out) = (graph.shape(data.inputs[1]), graph.shape(data.outputs[0]));
    let mut dims = joined((0..out.rank()).map(|axis| Part {
        extent: out[axis],
        start: starts[axis] as i64,
        // The step of a single element does not matter.
        step: if update[axis] == 1 { 1 } else { steps[axis] },
        part: update[axis],
    }));
    let size = graph.dtype(data.outputs[0]).size();
    let count = out.numel();
    let mut place = String::new();
    let width = parts(&mut dims, size, &mut place);
    let word = word(size * width);
    let text = Text::default()
        .reads(word, "x", Argument::value(data.inputs[0]))
        .reads(word, "update", Argument::value(data.inputs[1]))
        .writes(word, "result", Argument::value(data.outputs[0]))
        .ty("Index", index_type(count))
        .count("COUNT", count / width)
        .count("THREADS", THREADS as usize);
    let statements = format!(
        "
const Index i = (Index)blockIdx.x * THREADS + threadIdx.x;
if (i >= COUNT) return;
{place}result[i] = inside ? update[at] : x[i];
"
    );
    text.launch(&statements, blocks(count / width, THREADS as usize), THREADS)
}
