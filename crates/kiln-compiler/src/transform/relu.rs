//! ReLU as programs record it: `select(x <= 0, 0, x)`, whose gradient reads the same comparison.

use kiln_graph::op::{BinaryOp, CompareOp, Op};
use kiln_graph::{Graph, NodeData, Value};

/// The operands of a ReLU.
#[derive(Clone, Copy, Debug)]
pub struct Relu {
    /// `x <= 0`.
    pub compare: Value,
    /// 0 in every element.
    pub zeros: Value,
    /// What it is the ReLU of.
    pub x: Value,
}

/// What `data` is the ReLU of; none if it is something else.
pub fn relu(graph: &Graph, data: &NodeData) -> Option<Relu> {
    let (Op::Select, &[compare, zeros, x]) = (&data.op, &data.inputs[..]) else {
        return None;
    };
    let compared = graph.def(compare);
    let below = matches!(compared.op, Op::Compare(CompareOp::Le)) && compared.inputs[0] == x;
    let zero = below && graph.is_zero(compared.inputs[1]) && graph.is_zero(zeros);
    zero.then_some(Relu { compare, zeros, x })
}

/// Whether `value` is a contraction's result, cast, moved, or with something added that is the same in many
/// places. (What is behind a normalisation is not stored, but computed again from what the contraction made.)
pub fn is_contracted(graph: &Graph, mut value: Value) -> bool {
    loop {
        let data = graph.def(value);
        let spread = |value: &Value| matches!(graph.def(*value).op, Op::Broadcast { .. });
        value = match &data.op {
            op if op.is_contraction() => return true,
            Op::Cast(_) | Op::Reshape(_) | Op::Transpose(_) => data.inputs[0],
            Op::Binary(BinaryOp::Add) => match data.inputs[..] {
                [a, b] if spread(&b) => a,
                [a, b] if spread(&a) => b,
                _ => return false,
            },
            _ => return false,
        };
    }
}
