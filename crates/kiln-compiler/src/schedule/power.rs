//! `exp(log(u) * s)` with a number `s` that is known when the step runs.
//!
//! Burn spells the logistic function, and with it SiLU and SwiGLU, as `exp(-log(1 + exp(-x)))`, and the
//! minus one is an argument of the step like every other scalar. The generated code tests the exponent when
//! it runs: at minus one the power is a division, which saves a logarithm and an exponential.

use kiln_graph::op::{BinaryOp, UnaryOp};
use kiln_graph::{DType, Graph, Op, Value};

use super::nest::Nest;

/// The base and the exponent if `value` is such a power in f32 and `nest` computes all of it.
pub fn power_of_scalar(graph: &Graph, nest: &Nest, value: Value) -> Option<(Value, Value)> {
    power(graph, nest, value, |exponent| {
        matches!(exponent, Op::Scalar { .. })
    })
}

/// The same where the exponent may be a constant as well.
pub fn power_of_number(graph: &Graph, nest: &Nest, value: Value) -> Option<(Value, Value)> {
    power(graph, nest, value, |exponent| {
        matches!(exponent, Op::Scalar { .. } | Op::Constant { .. })
    })
}

fn power(
    graph: &Graph,
    nest: &Nest,
    value: Value,
    is_exponent: impl Fn(&Op) -> bool,
) -> Option<(Value, Value)> {
    // The nest must compute all of it: its operations are none of the contraction that the nest follows.
    let here = |value: Value| nest.uses_of(value).is_empty();
    let data = graph.def(value);
    if data.op != Op::Unary(UnaryOp::Exp) || graph.dtype(value) != DType::F32 || !here(data.inputs[0]) {
        return None;
    }
    let product = graph.def(data.inputs[0]);
    if product.op != Op::Binary(BinaryOp::Mul) {
        return None;
    }
    let [a, b] = product.inputs[..] else { return None };
    [(a, b), (b, a)].into_iter().find_map(|(log, factor)| {
        let (logarithm, broadcast) = (graph.def(log), graph.def(factor));
        let matches = logarithm.op == Op::Unary(UnaryOp::Log)
            && matches!(broadcast.op, Op::Broadcast { .. })
            && here(log)
            && here(factor)
            && is_exponent(&graph.def(broadcast.inputs[0]).op);
        matches.then(|| (logarithm.inputs[0], broadcast.inputs[0]))
    })
}
