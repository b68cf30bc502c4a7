//! Code of `exp(log(u) * s)` with a number `s` that is known when the step runs
//! ([`kiln_compiler::schedule::power`]).

use kiln_compiler::index::Index;
use kiln_compiler::schedule::power::power_of_scalar;
use kiln_graph::{DType, Value};

use super::{Register, Writer};

impl Writer<'_> {
    /// The value at `index`, if it is such a power.
    pub(super) fn power(&mut self, value: Value, index: &[Index]) -> Option<Register> {
        let (base, exponent) = power_of_scalar(self.graph, &self.space.loops.nest, value)?;
        let (u, s) = (self.eval(base, index), self.eval(exponent, &[]));
        let prefix = if u.vector { "v" } else { "s" };
        let text = format!("{prefix}_power_of_f32({}, {})", u.name, s.name);
        Some(self.define(DType::F32, u.vector, u.level, u.stage, &text))
    }
}
