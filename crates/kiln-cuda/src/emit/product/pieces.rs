//! Products that read an operand in pieces, each where it is stored ([`kiln_compiler::products`]).
//!
//! Kiln's own template finds the piece of each tile it loads, so that the whole is one launch. Elsewhere each
//! piece is a product of its own: into its part of the result, or into working memory where the products are
//! terms of a sum.

use kiln_compiler::products::{Cut, cut, pieces};
use kiln_compiler::schedule::layout::{Layouts, strides};
use kiln_compiler::schedule::{Buffer, Kernel};
use kiln_graph::{DType, Graph, Node, Value};

use super::warpgroups::{self, in_working_memory};
use super::{Frame, code, matrices};
use crate::emit::text::{THREADS, Text, blocks, index_type};
use crate::emit::{Argument, Call, EmitOptions, KernelCode, Launch, ProductCall, expressions};

/// Buffers in working memory begin at multiples of so many bytes.
const BORDER: usize = 256;

/// A product, piece by piece.
pub(super) struct Pieces {
    pub cut: Cut,
    /// The products of the pieces, in order.
    pub frames: Vec<Frame>,
}

impl Pieces {
    /// The pieces of the product `node`; none if its kernel reads whole operands.
    pub fn new(graph: &Graph, kernel: &Kernel, node: Node, layouts: &Layouts) -> Option<Self> {
        let cut = cut(graph, node)?;
        let data = graph.node(node);
        let [lefts, rights] = [0, 1].map(|operand| pieces(graph, node, Some(cut), operand));
        let is_stored = |operand: usize| kernel.reads.contains(&Buffer::Value(data.inputs[operand]));
        let (side, count) = match cut {
            Cut::Columns => (1, rights.len()),
            Cut::Rows | Cut::Depth => (0, lefts.len()),
        };
        if is_stored(side) || (cut == Cut::Depth && is_stored(1)) {
            return None;
        }
        let result = data.outputs[0];
        let strides = strides(graph.shape(result), layouts.get(&result));
        let mut at = 0;
        let frames = (0..count).map(|piece| {
            let operands = [lefts, rights].map(|pieces| pieces[piece.min(pieces.len() - 1)]);
            let mut frame = Frame::of(graph, kernel, node, layouts, operands)?;
            let (extent, stride) = match cut {
                Cut::Rows => (frame.extent(&frame.rows), *strides.first()?),
                Cut::Columns => (frame.extent(&frame.columns), *strides.last()?),
                Cut::Depth => (0, 0),
            };
            frame.result.1 = at * stride;
            at += extent as i64;
            Some(frame)
        });
        Some(Self {
            cut,
            frames: frames.collect::<Option<_>>()?,
        })
    }

    /// The products as matrices, if each is one.
    pub fn calls(&self, tf32: bool) -> Option<Vec<ProductCall>> {
        let each = self
            .frames
            .iter()
            .map(|frame| match &mut matrices::calls(frame, tf32)?[..] {
                [call] => Some(call.clone()),
                _ => None,
            });
        each.collect()
    }
}

/// The code of a product in pieces.
pub(super) fn generate(graph: &Graph, pieces: &Pieces, options: &EmitOptions<'_>) -> KernelCode {
    let own = warpgroups::of_pieces(pieces, options);
    if pieces.cut == Cut::Depth {
        return match own {
            Some((launch, _)) => KernelCode::launches([launch]),
            None => sum(graph, pieces, options),
        };
    }
    let mut whole = KernelCode::default();
    for frame in &pieces.frames {
        let own = code(graph, frame, options);
        whole.scratch = whole.scratch.max(own.scratch);
        whole.calls.extend(own.calls);
    }
    if let Some((launch, trial)) = own {
        // The library's side of each is what the one launch is timed beside.
        let library = whole.calls.into_iter().flat_map(|call| match call {
            Call::Either(library, ..) => library,
            call => vec![call],
        });
        whole.calls = vec![Call::Either(
            library.collect(),
            vec![Call::Launch(launch)],
            Some(Box::new(trial)),
        )];
    }
    whole
}

/// The products one by one into working memory, and their sum. Terms of 16 bits stay there in f32: the sum is
/// rounded once, and a term may be larger than any number of 16 bits where the sum is not.
fn sum(graph: &Graph, pieces: &Pieces, options: &EmitOptions<'_>) -> KernelCode {
    let result = pieces.frames[0].result.0;
    let (dtype, count) = (graph.dtype(result).compute(), graph.ty(result).numel());
    let bytes = count * dtype.size();
    let part = |frame: &Frame| {
        let frame = Frame {
            result_dtype: dtype,
            ..frame.clone()
        };
        code(graph, &frame, options)
    };
    let parts: Vec<KernelCode> = pieces.frames.iter().map(part).collect();
    let own = parts.iter().map(|part| part.scratch).max().unwrap_or(0);
    let mut at = own.next_multiple_of(BORDER);
    let mut starts = Vec::new();
    let mut calls = Vec::new();
    for part in parts {
        for mut call in part.calls {
            in_working_memory(&mut call, Buffer::Value(result), at);
            calls.push(call);
        }
        starts.push(at);
        at = (at + bytes).next_multiple_of(BORDER);
    }
    calls.push(Call::Launch(added(graph, dtype, count, &starts, result)));
    KernelCode { calls, scratch: at }
}

/// The sum of tensors of `dtype` in working memory, element by element as they lie.
fn added(graph: &Graph, dtype: DType, count: usize, starts: &[usize], result: Value) -> Launch {
    let memory = expressions::memory_type(dtype);
    let stored = graph.dtype(result);
    let names = || (0..starts.len()).map(|part| format!("part{part}"));
    let terms: Vec<String> = names()
        .map(|name| expressions::widened(dtype, &format!("{name}[i]")))
        .collect();
    let text = names().zip(starts).fold(Text::default(), |text, (name, &start)| {
        text.reads(memory, &name, Argument::Scratch(start))
    });
    let statements = format!(
        "const Index i = (Index)blockIdx.x * blockDim.x + threadIdx.x;\n\
         if (i >= COUNT) return;\nresult[i] = {};\n",
        expressions::narrowed(stored, &format!("({})", terms.join(" + ")))
    );
    text.writes(
        expressions::memory_type(stored),
        "result",
        Argument::value(result),
    )
    .count("COUNT", count)
    .ty("Index", index_type(count))
    .launch(&statements, blocks(count, THREADS as usize), THREADS)
}
