//! Whole slices at computed positions. Where the positions differ between elements, a read of a tensor that
//! is the same for all elements still reads whole slices; every other read or write goes element by
//! element.

use kiln_graph::Value;
use kiln_graph::op::{Op, ScatterMode};

use super::{Batch, Lane};
use crate::error::Result;

impl Batch {
    pub(super) fn index_select(&mut self, axis: usize, x: &[Lane]) -> Result<Value> {
        let (source, indices) = (x[0], x[1]);
        match (source.batched, indices.batched) {
            (true, false) => self
                .b
                .op(Op::IndexSelect { axis: axis + 1 }, &[source.value, indices.value]),
            (false, _) => {
                // All positions in one list: `[.., batch * n, ..]`.
                let list = self.batched(indices)?;
                let count = self.b.shape(list)[1];
                let list = self.b.reshape(list, [self.size * count])?;
                let read = self.b.op(Op::IndexSelect { axis }, &[source.value, list])?;
                let mut shape = self.b.shape(read).to_vec();
                shape[axis] = count;
                shape.insert(axis, self.size);
                let read = self.b.reshape(read, shape)?;
                self.b.move_dim(read, axis, 0)
            }
            (true, true) => {
                let mut shape = self.b.shape(source.value);
                shape[axis + 1] = self.b.shape(indices.value)[1];
                let indices = self.b.broadcast(indices.value, &shape, &[0, axis + 1])?;
                self.b.op(Op::Gather { axis: axis + 1 }, &[source.value, indices])
            }
        }
    }

    pub(super) fn index_put(&mut self, axis: usize, mode: ScatterMode, x: &[Lane]) -> Result<Value> {
        let (base, updates) = (self.batched(x[0])?, self.batched(x[2])?);
        let axis = axis + 1;
        if !x[1].batched {
            return self
                .b
                .op(Op::IndexPut { axis, mode }, &[base, x[1].value, updates]);
        }
        let shape = self.b.shape(updates);
        let indices = self.b.broadcast(x[1].value, &shape, &[0, axis])?;
        self.b.op(Op::Scatter { axis, mode }, &[base, indices, updates])
    }
}
