//! Gradients of slices.
//!
//! The gradient of a slice is zero everywhere but in the slice: programs write the slice into zeros. If one
//! tensor was sliced into parts (the halves of rotary embeddings, queries, keys and values of one
//! projection), its gradient is a sum of such tensors. Where the slices differ along one dimension and do
//! not overlap, the sum is a concatenation, with zeros where no slice was: it is written once, and each
//! part goes to its place directly.

use rustc_hash::FxHashSet;

use kiln_graph::op::{BinaryOp, Op};
use kiln_graph::{Graph, NodeData, Provenance, Rewriter, TensorType, TypeError, Users, Value};

/// Replaces slices written into zeros, and their sums, in `graph`.
///
/// # Errors
/// Only if a rule makes an ill-typed node, which would be a bug.
pub fn slices(graph: &Graph) -> Result<Graph, TypeError> {
    let users = graph.users();
    let mut rewriter = Rewriter::new(graph);
    // Sums that are part of a larger one need no value of their own.
    let mut inner: FxHashSet<Value> = FxHashSet::default();
    for (_, data) in graph.nodes() {
        if matches!(data.op, Op::Binary(BinaryOp::Add))
            && let [value] = data.outputs.as_slice()
            && let [user] = users.of(*value)
            && users.outputs(*value) == 0
            && matches!(graph.node(*user).op, Op::Binary(BinaryOp::Add))
            && parts(graph, &users, graph.node(*user).outputs[0]).is_some()
        {
            inner.insert(*value);
        }
    }
    for (node, data) in graph.nodes() {
        if let [value] = data.outputs.as_slice()
            && !inner.contains(value)
            && let Some((axis, parts)) = parts(graph, &users, *value)
        {
            let joined = join(&mut rewriter, graph.ty(*value), axis, &parts, &data.provenance)?;
            rewriter.replace(*value, joined);
        } else {
            rewriter.copy(node)?;
        }
    }
    Ok(rewriter.finish().without_dead_code())
}

/// A slice at `start` along the axis.
#[derive(Clone, Copy, Debug)]
struct Part {
    start: usize,
    extent: usize,
    value: Value,
}

/// The axis and the slices that `value` consists of, in order, if it is a slice in zeros or a sum of such.
fn parts(graph: &Graph, users: &Users, value: Value) -> Option<(usize, Vec<Part>)> {
    let mut leaves = Vec::new();
    collect(graph, users, value, true, &mut leaves)?;
    let mut axis = None;
    let mut parts = Vec::new();
    for data in leaves {
        let Op::UpdateSlice { starts, steps } = &data.op else {
            return None;
        };
        let (whole, slice) = (graph.shape(data.inputs[0]), graph.shape(data.inputs[1]));
        if steps.iter().any(|&step| step != 1)
            || !graph.is_zero(data.inputs[0])
            || graph.ty(data.inputs[1]).numel() == 0
        {
            return None;
        }
        let mut cut = (0..whole.rank()).filter(|&axis| slice[axis] != whole[axis]);
        let own = cut.next()?;
        if cut.next().is_some() || axis.is_some_and(|axis| axis != own) {
            return None;
        }
        axis = Some(own);
        parts.push(Part {
            start: starts[own],
            extent: slice[own],
            value: data.inputs[1],
        });
    }
    parts.sort_by_key(|part| part.start);
    let apart = parts
        .windows(2)
        .all(|two| two[0].start + two[0].extent <= two[1].start);
    apart.then_some((axis?, parts))
}

/// The terms of a sum whose partial sums nothing else needs.
fn collect<'a>(
    graph: &'a Graph,
    users: &Users,
    value: Value,
    outermost: bool,
    leaves: &mut Vec<&'a NodeData>,
) -> Option<()> {
    const MOST: usize = 16;
    let data = graph.def(value);
    match &data.op {
        Op::UpdateSlice { .. } => leaves.push(data),
        Op::Binary(BinaryOp::Add)
            if outermost || (users.of(value).len() == 1 && users.outputs(value) == 0) =>
        {
            for &operand in &data.inputs {
                collect(graph, users, operand, false, leaves)?;
            }
        }
        _ => return None,
    }
    (leaves.len() <= MOST).then_some(())
}

/// The concatenation of `parts` with zeros between.
fn join(
    rewriter: &mut Rewriter<'_>,
    ty: &TensorType,
    axis: usize,
    parts: &[Part],
    p: &Provenance,
) -> Result<Value, TypeError> {
    let mut operands = Vec::new();
    let mut at = 0;
    for part in parts {
        if part.start > at {
            operands.push(zeros(rewriter, ty, axis, part.start - at, p)?);
        }
        operands.push(rewriter.map(part.value));
        at = part.start + part.extent;
    }
    if at < ty.shape[axis] {
        operands.push(zeros(rewriter, ty, axis, ty.shape[axis] - at, p)?);
    }
    rewriter.graph.add(Op::Concat { axis }, &operands, p)
}

fn zeros(
    rewriter: &mut Rewriter<'_>,
    ty: &TensorType,
    axis: usize,
    extent: usize,
    p: &Provenance,
) -> Result<Value, TypeError> {
    let part = TensorType {
        dtype: ty.dtype,
        shape: ty.shape.with(axis, extent),
    };
    rewriter.graph.full(0.0, &part, p)
}
