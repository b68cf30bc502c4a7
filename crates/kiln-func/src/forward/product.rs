//! Tangents of operations that are linear in each of two operands: products and convolutions.

use kiln_graph::{Op, Value};

use super::Forward;
use crate::error::Result;

impl Forward {
    pub(super) fn bilinear(&mut self, op: &Op, a: Value, b: Value) -> Result<Option<Value>> {
        let (ta, tb) = (self.tangent(a), self.tangent(b));
        let by_a = ta.map(|ta| self.b.op(op.clone(), &[ta, b])).transpose()?;
        let by_b = tb.map(|tb| self.b.op(op.clone(), &[a, tb])).transpose()?;
        self.sum(by_a, by_b)
    }
}
