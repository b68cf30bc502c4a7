//! Factors: what the gradient of a product of two numbers multiplies by, where it was expensive to compute.
//!
//! In `y = x * (1 + erf(..))`, as in GELU, the gradient of `x` is that of `y` times the second factor.
//! Computing the factor once more may cost more than to keep it, and then it is kept in the type that it has
//! before the partition. So what reads it behind the forward pass reads it rounded, if that only multiplies:
//! the error of one rounding passes on as it is, as that of any stored operand does. A sum may cancel
//! instead, as `1 - t * t` of a rounded tangent would, so values that meet themselves again in sums or in
//! their own products stay as they are; so do those that no further contraction follows, which belong to the
//! loss.

use cranelift_entity::SecondaryMap;
use kiln_graph::op::{BinaryOp, Op};
use kiln_graph::{Graph, Node, Users, Value};

use crate::schedule::class::is_expensive;

/// Operations in front of an operand that are looked at for the value that it multiplies.
const MOST_OPERANDS: usize = 32;

/// Which values of the forward pass follow from an expensive operation by way of pointwise ones, are factors
/// there and lead to a contraction, and are read behind it by multiplications alone, which do not multiply
/// them by what follows from them.
pub(super) fn factors(graph: &Graph, users: &Users) -> SecondaryMap<Value, bool> {
    let is_behind = |user: Node| graph.node(user).provenance.phase.is_after_forward();
    let is_read_behind = |value: Value| users.of(value).iter().any(|&user| is_behind(user));
    let mut leads: SecondaryMap<Value, bool> = SecondaryMap::new();
    for (node, data) in graph.nodes().rev() {
        let contracts = data.op.is_contraction() || data.outputs.iter().any(|&made| leads[made]);
        for &operand in data.inputs.iter().filter(|_| contracts && !is_behind(node)) {
            leads[operand] = true;
        }
    }
    let mut expensive: SecondaryMap<Value, bool> = SecondaryMap::new();
    let mut factors = SecondaryMap::new();
    for (node, data) in graph.nodes() {
        if !data.op.is_pointwise() || is_behind(node) {
            continue;
        }
        let value = data.outputs[0];
        // What is read behind the forward pass anyway is kept, and what follows from that is cheap.
        expensive[value] = is_expensive(&data.op)
            || data
                .inputs
                .iter()
                .any(|&operand| expensive[operand] && !is_read_behind(operand));
        if !expensive[value] || !leads[value] || users.outputs(value) > 0 {
            continue;
        }
        let (behind, before): (Vec<Node>, Vec<Node>) =
            users.of(value).iter().partition(|&&user| is_behind(user));
        let made = |user: &Node| graph.node(*user).outputs.iter();
        factors[value] = !behind.is_empty()
            && before.iter().any(|&user| multiplies(graph, user, value))
            && behind.iter().all(|&user| multiplies(graph, user, value))
            // To compute these again takes the factor itself.
            && !before.iter().flat_map(made).any(|&made| is_read_behind(made));
    }
    factors
}

/// Whether `user` multiplies `value` by what pointwise operations behind the forward pass did not make from
/// it.
fn multiplies(graph: &Graph, user: Node, value: Value) -> bool {
    let data = graph.node(user);
    if !matches!(data.op, Op::Binary(BinaryOp::Mul)) {
        return false;
    }
    let mut others: Vec<Value> = data
        .inputs
        .iter()
        .copied()
        .filter(|&operand| operand != value)
        .collect();
    if others.len() != 1 {
        return false;
    }
    let mut at = 0;
    while at < others.len() {
        let data = graph.def(others[at]);
        at += 1;
        if !data.op.is_pointwise() || !data.provenance.phase.is_after_forward() {
            continue;
        }
        for &operand in &data.inputs {
            if operand == value || others.len() == MOST_OPERANDS {
                return false;
            }
            if !others.contains(&operand) {
                others.push(operand);
            }
        }
    }
    true
}
