//! `exp(log(u) * s)` with a number `s` that is known when the step runs.
//!
//! Burn spells the logistic function, and with it SiLU and SwiGLU, as `exp(-log(1 + exp(-x)))`, and the minus one is an argument of the step like
//! every other scalar. The code asks for it when it runs: at minus one the power is a division, and the logarithm and one exponential are saved.

use kiln_compiler::index::Index;
use kiln_graph::op::{BinaryOp, Op, UnaryOp};
use kiln_graph::{DType, Value};

use super::{Register, Writer};

impl Writer<'_> {
    /// The base and the exponent if `value` is such a power and all of it is computed in this nest.
    fn power_of(&self, value: Value) -> Option<(Value, Value)> {
        let graph = self.graph;
        let here = |value: Value| {
            let given = self.given.as_ref().is_some_and(|(given, _)| *given == value);
            !given && self.space.nest.uses_of(value).is_empty()
        };
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
            let (logarithm, spread) = (graph.def(log), graph.def(factor));
            let matches = logarithm.op == Op::Unary(UnaryOp::Log)
                && matches!(spread.op, Op::Broadcast { .. })
                && here(log)
                && here(factor)
                && matches!(graph.def(spread.inputs[0]).op, Op::Scalar { .. });
            matches.then(|| (logarithm.inputs[0], spread.inputs[0]))
        })
    }

    /// The value at `index`, if it is such a power.
    pub(super) fn power(&mut self, value: Value, index: &[Index]) -> Option<Register> {
        let (base, exponent) = self.power_of(value)?;
        let (u, s) = (self.eval(base, index), self.eval(exponent, &[]));
        let prefix = if u.vector { "v" } else { "s" };
        let text = format!("{prefix}_power_of_f32({}, {})", u.name, s.name);
        Some(self.define(DType::F32, u.vector, u.level, u.stage, &text))
    }
}
