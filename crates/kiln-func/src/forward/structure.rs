//! Tangents of movements and reductions.

use kiln_graph::op::{BinaryOp, CompareOp, Dims, Op, ReduceOp, UnaryOp};
use kiln_graph::{DType, Value};

use super::Forward;
use crate::error::Result;

impl Forward {
    /// An operation that is linear in all of its operands: the operation on their tangents.
    pub(super) fn moved(&mut self, op: &Op, x: &[Value]) -> Result<Option<Value>> {
        let tangents = x.iter().map(|&value| self.tangent_or_zeros(value));
        let tangents = tangents.collect::<Result<Vec<Value>>>()?;
        Ok(Some(self.b.op(op.clone(), &tangents)?))
    }

    /// Extremes share the tangent equally among the elements that reach them, as PyTorch's `amax` does. A NaN
    /// is reached by every NaN. The elements are counted in the type of sums: in f16 there are none above
    /// 65504, and in bf16 not every number above 256.
    pub(super) fn reduce(
        &mut self,
        op: ReduceOp,
        axes: &[usize],
        x: Value,
        y: Value,
    ) -> Result<Option<Value>> {
        let Some(t) = self.tangent(x) else { return Ok(None) };
        match op {
            ReduceOp::Sum => Ok(Some(self.b.sum(t, axes)?)),
            ReduceOp::Max | ReduceOp::Min => {
                let (shape, dtype) = (self.b.shape(x), self.b.dtype(x));
                let extreme = self.b.expand(y, &shape, axes)?;
                let reached = self.reaches(x, extreme)?;
                let ones = self.b.cast(reached, dtype.compute())?;
                let count = self.b.sum(ones, axes)?;
                let kept = self.b.keep(reached, t)?;
                let kept = self.b.cast(kept, dtype.compute())?;
                let total = self.b.sum(kept, axes)?;
                let mean = self.b.div(total, count)?;
                Ok(Some(self.b.cast(mean, dtype)?))
            }
            ReduceOp::Prod => unreachable!("a product is expanded"),
            ReduceOp::Any | ReduceOp::All => Ok(None),
        }
    }

    /// Where an element is the extreme that its place has in `extreme`.
    fn reaches(&mut self, x: Value, extreme: Value) -> Result<Value> {
        let equal = self.b.compare(CompareOp::Eq, x, extreme)?;
        let [one, other] = [x, extreme].map(|value| self.b.unary(UnaryOp::IsNan, value));
        let both = self.b.binary(BinaryOp::And, one?, other?)?;
        self.b.binary(BinaryOp::Or, equal, both)
    }

    /// A running extreme has the tangent of the last element that reached it.
    pub(super) fn cumulative(
        &mut self,
        op: ReduceOp,
        axis: usize,
        x: Value,
        y: Value,
    ) -> Result<Option<Value>> {
        let Some(t) = self.tangent(x) else { return Ok(None) };
        match op {
            ReduceOp::Max | ReduceOp::Min => {
                let shape = self.b.shape(x);
                let reached = self.reaches(x, y)?;
                let place = self.b.iota(DType::I64, &shape, axis)?;
                let place = self.b.keep(reached, place)?;
                let op = Op::Cumulative {
                    op: ReduceOp::Max,
                    axis,
                };
                let place = self.b.op(op, &[place])?;
                Ok(Some(self.b.op(Op::Gather { axis }, &[t, place])?))
            }
            _ => Ok(Some(self.b.op(Op::Cumulative { op, axis }, &[t])?)),
        }
    }
}

/// The dimensions of a tensor of rank `rank`.
pub(crate) fn all_axes(rank: usize) -> Dims {
    (0..rank).collect()
}
