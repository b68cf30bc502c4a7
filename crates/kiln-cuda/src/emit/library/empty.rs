//! Operations on empty tensors. Their results are empty too, neutral, or another operand's elements.

use kiln_compiler::schedule::layout::strides;
use kiln_graph::op::{Op, ReduceOp};
use kiln_graph::{Graph, Node, Scalar};

use super::super::text::{THREADS, Text, blocks, index_type};
use super::super::{Argument, EmitOptions, KernelCode, Launch, expressions};
use super::{copies, fill};

/// The code of an operation with an empty result or operand; none if no tensor is empty, or if the
/// operation's own code handles empty tensors.
pub fn empty(graph: &Graph, node: Node, options: &EmitOptions<'_>) -> Option<KernelCode> {
    let data = graph.node(node);
    let is_empty = |&value: &_| graph.ty(value).numel() == 0;
    match data.op {
        Op::Extern(_) | Op::Collective(_) | Op::CollectiveWait => return None,
        _ if data.outputs.iter().all(is_empty) => return Some(KernelCode::default()),
        Op::Attention(_) | Op::AttentionGrad(_) => return None,
        _ if !data.inputs.iter().any(is_empty) => return None,
        _ => {}
    }
    let out = data.outputs[0];
    let launches = match &data.op {
        Op::Reduce { op, .. } => vec![fill(graph, out, &expressions::neutral(*op, graph.dtype(out)))],
        Op::Pad { .. } => vec![fill_with(graph, node)],
        Op::Concat { axis } => join(graph, node, *axis, options),
        Op::Scatter { .. } | Op::IndexPut { .. } => vec![copies::start(graph, node)],
        Op::UpdateSlice { .. } => vec![copies::copy(graph, data.inputs[0], out)],
        // Windows of padding only: the lowest value, at index 0.
        Op::MaxPool(_) | Op::MaxPoolWithIndices { .. } => {
            let lowest = expressions::neutral(ReduceOp::Max, graph.dtype(out));
            let indices = data.outputs.get(1).map(|&indices| fill(graph, indices, "0"));
            [fill(graph, out, &lowest)].into_iter().chain(indices).collect()
        }
        // Sums of nothing. (An index into an empty tensor is out of range, and the step stops after it.)
        _ => {
            let zero = |&value: &_| {
                fill(
                    graph,
                    value,
                    &expressions::literal(Scalar::Int(0), graph.dtype(value)),
                )
            };
            data.outputs
                .iter()
                .filter(|value| !is_empty(value))
                .map(zero)
                .collect()
        }
    };
    Some(KernelCode::launches(launches))
}

/// Padding around nothing.
fn fill_with(graph: &Graph, node: Node) -> Launch {
    let data = graph.node(node);
    let count = graph.ty(data.outputs[0]).numel();
    let memory = expressions::memory_type(graph.dtype(data.outputs[0]));
    let text = Text::default()
        .reads(memory, "value", Argument::value(data.inputs[1]))
        .writes(memory, "result", Argument::value(data.outputs[0]))
        .ty("Index", index_type(count))
        .count("COUNT", count)
        .count("THREADS", THREADS as usize);
    let statements = "
const Index i = (Index)blockIdx.x * THREADS + threadIdx.x;
if (i < COUNT) result[i] = value[0];
";
    text.launch(statements, blocks(count, THREADS as usize), THREADS)
}

/// Copies each operand of a concatenation that has elements to its place, in whatever order the result is
/// stored.
fn join(graph: &Graph, node: Node, axis: usize, options: &EmitOptions<'_>) -> Vec<Launch> {
    let data = graph.node(node);
    let out = data.outputs[0];
    let to = strides(graph.shape(out), options.layouts.get(&out));
    let mut start = 0;
    let mut launches = Vec::new();
    for &operand in &data.inputs {
        let shape = graph.shape(operand);
        if shape.numel() > 0 {
            let dims: Vec<(usize, i64)> = shape.iter().copied().zip(to.iter().copied()).collect();
            launches.push(copies::place(graph, operand, out, &dims, start * to[axis]));
        }
        start += shape[axis] as i64;
    }
    launches
}
