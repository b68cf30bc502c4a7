//! Gradients of slices.
//!
//! The gradient of a slice is zero everywhere but in the slice: programs write the slice into zeros. If one
//! tensor was sliced into parts (the halves of rotary embeddings, queries, keys and values of one
//! projection), its gradient is a sum of such tensors. Where the slices differ along one dimension and do
//! not overlap, the sum is a concatenation, with zeros where no slice was: it is written once, and each
//! part goes to its place directly.

use rustc_hash::{FxHashMap, FxHashSet};

use kiln_graph::op::{BinaryOp, Op};
use kiln_graph::{Graph, NodeData, Provenance, Rewriter, TensorType, TypeError, Users, Value};

use super::updates::concatenation;

/// Replaces slices written into zeros, and their sums, in `graph`.
///
/// # Errors
/// Only if a rule makes an ill-typed node, which would be a bug.
pub fn slices(graph: &Graph) -> Result<Graph, TypeError> {
    let users = graph.users();
    let mut rewriter = Rewriter::new(graph);
    // Sums that are part of a larger one need no value of their own.
    let mut inner: FxHashSet<Value> = FxHashSet::default();
    let mut whole: FxHashMap<Value, (usize, Vec<Part>)> = FxHashMap::default();
    for (_, data) in graph.nodes().rev() {
        if let &[value] = data.outputs.as_slice()
            && !inner.contains(&value)
            && let Some(found) = parts(graph, &users, value, &mut inner)
        {
            whole.insert(value, found);
        }
    }
    for (node, data) in graph.nodes() {
        let value = data.outputs[0];
        if let Some((axis, parts)) = whole.get(&value) {
            let joined = join(&mut rewriter, graph.ty(value), *axis, parts, &data.provenance)?;
            rewriter.replace(value, joined);
        } else if !inner.contains(&value) {
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
/// The sums in between go to `inner`.
fn parts(
    graph: &Graph,
    users: &Users,
    value: Value,
    inner: &mut FxHashSet<Value>,
) -> Option<(usize, Vec<Part>)> {
    let (leaves, sums) = terms(graph, users, value)?;
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
    let found = apart.then_some((axis?, parts));
    if found.is_some() {
        inner.extend(sums);
    }
    found
}

/// The terms of a sum, all of which are updates, and the partial sums, which nothing else needs.
fn terms<'a>(graph: &'a Graph, users: &Users, value: Value) -> Option<(Vec<&'a NodeData>, Vec<Value>)> {
    let (mut terms, mut sums) = (Vec::new(), Vec::new());
    let mut left = vec![value];
    while let Some(next) = left.pop() {
        let data = graph.def(next);
        match &data.op {
            Op::UpdateSlice { .. } => terms.push(data),
            Op::Binary(BinaryOp::Add) if next == value || users.single(next).is_some() => {
                if next != value {
                    sums.push(next);
                }
                // The last term first: most sums grow at their ends.
                left.extend(&data.inputs);
            }
            _ => return None,
        }
    }
    Some((terms, sums))
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
    concatenation(rewriter, axis, operands, p)
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

#[cfg(test)]
mod tests {
    use super::*;
    use kiln_graph::testing::random_arguments;
    use kiln_graph::{DType, Shape, interpret};

    /// The gradient of `steps` slices of one tensor, every other of which is used: a sum that grows at its
    /// end, of the last slice first, as Burn makes it.
    fn gradient(steps: usize) -> Graph {
        let (mut graph, p) = (Graph::new("gradient"), Provenance::default());
        let ty = |extent: usize| TensorType::new(DType::F32, Shape::from(&[2, extent][..]));
        let zeros = graph.full(0.0, &ty(2 * steps), &p).unwrap();
        let mut sum = None;
        for at in (0..steps).rev() {
            let slice = graph.parameter(ty(1));
            let op = Op::UpdateSlice {
                starts: [0, 2 * at].as_slice().into(),
                steps: [1, 1].as_slice().into(),
            };
            let own = graph.add(op, &[zeros, slice], &p).unwrap();
            sum = Some(match sum {
                None => own,
                Some(sum) => graph.binary(BinaryOp::Add, sum, own, &p).unwrap(),
            });
        }
        graph.output(sum.expect("there are steps"), None);
        graph
    }

    #[test]
    fn a_sum_of_any_number_of_slices_is_a_concatenation() {
        for steps in [1, 2, 17, 500] {
            let graph = gradient(steps);
            let joined = slices(&graph).expect("well typed");
            kiln_graph::verify::verify(&joined).expect("well formed");
            let left = joined
                .nodes()
                .filter(|(_, data)| matches!(data.op, Op::UpdateSlice { .. } | Op::Binary(BinaryOp::Add)));
            assert_eq!(left.count(), 0, "{steps} steps\n{joined}");
            let (arguments, scalars) = random_arguments(&graph, 3);
            let [expected, actual] =
                [&graph, &joined].map(|graph| interpret(graph, &arguments, &scalars).unwrap());
            assert_eq!(actual, expected);
        }
    }
}
