//! What the scheduler may do with each operation.
//!
//! There are four classes. *Inline* operations compute nothing worth storing: constants, coordinates, and
//! movements, which are folded into the index at which a consumer reads; pointwise operations on nothing
//! but those (a causal mask made of two coordinates) are inline, too. *Nest* operations become statements
//! of fused loop nests. *Joins* (concatenation) are written by one loop nest for each operand, directly
//! into its part of the result. *Library* operations run as a kernel of their own, from a template.

use kiln_graph::op::{BinaryOp, Op, UnaryOp};
use kiln_graph::{Graph, Node};

use crate::policy::Policy;

/// How an operation is scheduled.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Class {
    /// Recomputed wherever it is used, by index arithmetic.
    Inline,
    /// A statement of a loop nest: one element of result from one index.
    Pointwise,
    /// A reduction of a loop nest.
    Reduce,
    /// Written part by part.
    Join,
    /// A kernel of its own.
    Library,
}

/// The class of every node of a graph.
pub fn classify(graph: &Graph, policy: &Policy) -> Vec<Class> {
    let mut cost: Vec<u32> = vec![0; graph.num_nodes()];
    // Inline operations that read no memory in the end.
    let mut pure: Vec<bool> = vec![false; graph.num_nodes()];
    let mut classes = Vec::with_capacity(graph.num_nodes());
    for (node, data) in graph.nodes() {
        let index = node_index(node);
        let operands = || data.inputs.iter().map(|&v| node_index(graph.value(v).node));
        let operand_cost: u32 = operands().map(|operand| cost[operand]).sum();
        let pure_operands = operands().all(|operand| pure[operand]);
        let class = match &data.op {
            Op::Scalar { .. } | Op::Constant { .. } | Op::Iota { .. } => Class::Inline,
            op if op.is_pointwise() && pure_operands && operand_cost < policy.inline_operations => {
                Class::Inline
            }
            op if op.is_pointwise() => Class::Pointwise,
            Op::Random { .. } | Op::Gather { .. } | Op::IndexSelect { .. } => Class::Pointwise,
            Op::Reshape(_) | Op::Transpose(_) | Op::Broadcast { .. } | Op::Slice { .. } | Op::Flip(_) => {
                Class::Inline
            }
            Op::Reduce { .. } => Class::Reduce,
            Op::Concat { .. } => Class::Join,
            _ => Class::Library,
        };
        let empty = data
            .outputs
            .iter()
            .chain(&data.inputs)
            .any(|&v| graph.ty(v).numel() == 0);
        // Empty tensors have no index at all: the loops of the library allow that, and the algebra of
        // indices need not.
        let class = if empty { Class::Library } else { class };
        pure[index] = class == Class::Inline && pure_operands;
        // Operations that are computed once cost their users nothing.
        cost[index] = if pure[index] {
            operand_cost + u32::from(data.op.is_pointwise())
        } else {
            0
        };
        classes.push(class);
    }
    classes
}

/// Index of a node in side tables.
pub fn node_index(node: Node) -> usize {
    node.as_u32() as usize
}

/// Whether recomputing the operation once more costs about as little as loading its result.
pub fn is_cheap(op: &Op) -> bool {
    match op {
        Op::Unary(op) => matches!(
            op,
            UnaryOp::Neg
                | UnaryOp::Abs
                | UnaryOp::Sign
                | UnaryOp::Not
                | UnaryOp::Floor
                | UnaryOp::Ceil
                | UnaryOp::IsNan
                | UnaryOp::IsInf
        ),
        Op::Binary(op) => !matches!(
            op,
            BinaryOp::Div | BinaryOp::Rem | BinaryOp::Pow | BinaryOp::Atan2
        ),
        Op::Compare(_) | Op::Select | Op::Cast(_) | Op::IndexSelect { .. } | Op::Gather { .. } => true,
        _ => false,
    }
}

/// Whether computing the operation costs more than keeping its result close by until the next pass over a
/// row. These are functions of many instructions, division aside.
pub fn is_expensive(op: &Op) -> bool {
    match op {
        Op::Unary(op) => !matches!(
            op,
            UnaryOp::Neg
                | UnaryOp::Abs
                | UnaryOp::Sign
                | UnaryOp::Not
                | UnaryOp::Sqrt
                | UnaryOp::Recip
                | UnaryOp::IsNan
                | UnaryOp::IsInf
        ),
        Op::Binary(op) => matches!(op, BinaryOp::Pow | BinaryOp::Atan2 | BinaryOp::Rem),
        Op::Random { .. } => true,
        _ => false,
    }
}
