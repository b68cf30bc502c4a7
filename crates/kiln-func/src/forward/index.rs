//! Tangents of reads and writes at computed positions. Indices have none.

use kiln_graph::op::{Op, Window};
use kiln_graph::{DType, Shape, Value};

use super::Forward;
use crate::build::Builder;
use crate::error::Result;

impl Forward {
    /// An operation that reads its first operand at the positions in its second.
    pub(super) fn read(&mut self, op: &Op, x: &[Value]) -> Result<Option<Value>> {
        let t = self.tangent(x[0]);
        t.map(|t| self.b.op(op.clone(), &[t, x[1]])).transpose()
    }

    /// An operation that is linear in the updates and in the tensor that it writes to; also products with
    /// updates that do not depend on tangents.
    pub(super) fn write(&mut self, op: &Op, x: &[Value]) -> Result<Option<Value>> {
        let base = self.tangent_or_zeros(x[0])?;
        let multiplies = matches!(
            op,
            Op::Scatter {
                mode: kiln_graph::op::ScatterMode::Mul,
                ..
            } | Op::IndexPut {
                mode: kiln_graph::op::ScatterMode::Mul,
                ..
            }
        );
        let updates = if multiplies {
            x[2]
        } else {
            self.tangent_or_zeros(x[2])?
        };
        Ok(Some(self.b.op(op.clone(), &[base, x[1], updates])?))
    }

    /// The tangents of the largest elements.
    pub(super) fn max_pool(&mut self, window: &Window, x: Value) -> Result<Option<Value>> {
        let op = Op::MaxPoolWithIndices {
            window: window.clone(),
            dtype: DType::I64,
        };
        let indices = self.b.node(op, &[x])?[1];
        self.pick(x, indices)
    }

    /// The tangents of `x` at positions within its spatial extents.
    pub(super) fn pick(&mut self, x: Value, indices: Value) -> Result<Option<Value>> {
        let t = self.tangent(x);
        t.map(|t| pick_in_planes(&mut self.b, t, indices)).transpose()
    }
}

/// The elements of `x: [n, c, s..]` at `indices: int[n, c, out..]`, which count through the spatial
/// dimensions.
pub(crate) fn pick_in_planes(b: &mut Builder, x: Value, indices: Value) -> Result<Value> {
    let flat = |shape: &Shape| Shape::from([shape[0], shape[1], shape[2..].iter().product()]);
    let (x_shape, shape) = (b.shape(x), b.shape(indices));
    let x = b.reshape(x, flat(&x_shape))?;
    let indices = b.reshape(indices, flat(&shape))?;
    let picked = b.op(Op::Gather { axis: 2 }, &[x, indices])?;
    b.reshape(picked, shape)
}
