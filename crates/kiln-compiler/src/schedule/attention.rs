//! The result of an attention, which its gradient may read.
//!
//! The gradient of a softmax needs for each row the sum of `p dp`. Over an attention that sum is the inner
//! product of the row's result and of the result's gradient. The operation has no operand for the result,
//! since only some templates want it: the schedule finds it in the graph.

use kiln_graph::op::Op;
use kiln_graph::{Graph, Node, Value};
use rustc_hash::FxHashMap;

/// The result of the attention that `node` is the gradient of; none where the graph has no such attention.
///
/// The statistics name the attention. Its operands are those of the gradient, or are computed again in the
/// same way.
pub fn result_of_forward(graph: &Graph, node: Node) -> Option<Value> {
    let data = graph.node(node);
    let Op::AttentionGrad(dims) = &data.op else {
        return None;
    };
    let count = dims.operands().forward;
    let stats = data.inputs[count];
    let forward = graph.def(stats);
    let is_forward = forward.op == Op::Attention(*dims) && forward.outputs.get(1) == Some(&stats);
    let mut known = FxHashMap::default();
    let operands = || data.inputs[..count].iter().zip(&forward.inputs);
    (is_forward && operands().all(|(&own, &theirs)| are_equal(graph, own, theirs, &mut known)))
        .then(|| forward.outputs[0])
}

/// Whether two values are computed by the same operations from the same values.
fn are_equal(graph: &Graph, a: Value, b: Value, known: &mut FxHashMap<(Value, Value), bool>) -> bool {
    if a == b {
        return true;
    }
    if let Some(&known) = known.get(&(a, b)) {
        return known;
    }
    let (left, right) = (graph.def(a), graph.def(b));
    let place = |of: &[Value], value| of.iter().position(|&own| own == value);
    // What runs outside, or on several ranks, need not give the same results twice.
    let repeats = !matches!(
        left.op,
        Op::Parameter { .. } | Op::Extern(_) | Op::Collective(_) | Op::CollectiveWait
    );
    let equal = repeats
        && left.op == right.op
        && left.inputs.len() == right.inputs.len()
        && place(&left.outputs, a) == place(&right.outputs, b)
        && left
            .inputs
            .iter()
            .zip(&right.inputs)
            .all(|(&a, &b)| are_equal(graph, a, b, known));
    known.insert((a, b), equal);
    equal
}
