//! Transposes of reads and writes at computed positions: the transpose of a read is a sum at the same
//! positions, that of a write is a read.

use kiln_graph::op::{CompareOp, Op, ScatterMode};
use kiln_graph::{DType, TensorType, Value};

use super::Reverse;
use crate::error::Result;
use crate::forward::index::pick_in_planes;

impl Reverse<'_> {
    pub(super) fn gather(&mut self, axis: usize, x: &[Value], ct: Value) -> Result<()> {
        let indices = self.primal(x[1]);
        let zeros = self.b.zeros(self.linear.ty(x[0]))?;
        let op = Op::Scatter {
            axis,
            mode: ScatterMode::Add,
        };
        let ct = self.b.op(op, &[zeros, indices, ct])?;
        self.accumulate(x[0], ct)
    }

    pub(super) fn index_select(&mut self, axis: usize, x: &[Value], ct: Value) -> Result<()> {
        let indices = self.primal(x[1]);
        let zeros = self.b.zeros(self.linear.ty(x[0]))?;
        let op = Op::IndexPut {
            axis,
            mode: ScatterMode::Add,
        };
        let ct = self.b.op(op, &[zeros, indices, ct])?;
        self.accumulate(x[0], ct)
    }

    pub(super) fn scatter(&mut self, axis: usize, mode: ScatterMode, x: &[Value], ct: Value) -> Result<()> {
        let indices = self.primal(x[1]);
        if self.varies(x[0]) {
            let kept = match mode {
                ScatterMode::Assign => {
                    let zeros = self.b.zeros(self.linear.ty(x[2]))?;
                    self.b.op(Op::Scatter { axis, mode }, &[ct, indices, zeros])?
                }
                ScatterMode::Mul => {
                    let factors = self.primal(x[2]);
                    self.b.op(Op::Scatter { axis, mode }, &[ct, indices, factors])?
                }
                _ => ct,
            };
            self.accumulate(x[0], kept)?;
        }
        if self.varies(x[2]) {
            let mut read = self.b.op(Op::Gather { axis }, &[ct, indices])?;
            if mode == ScatterMode::Assign {
                let shape = self.b.shape(indices);
                let number = self.b.iota(DType::I64, &shape, axis)?;
                let ty = TensorType {
                    dtype: DType::I64,
                    shape: self.b.shape(ct),
                };
                let nobody = self.b.zeros(&ty)?;
                let last = self
                    .b
                    .op(Op::Scatter { axis, mode }, &[nobody, indices, number])?;
                let last = self.b.op(Op::Gather { axis }, &[last, indices])?;
                let wins = self.b.compare(CompareOp::Eq, last, number)?;
                read = self.b.keep(wins, read)?;
            }
            self.accumulate(x[2], read)?;
        }
        Ok(())
    }

    pub(super) fn index_put(&mut self, axis: usize, mode: ScatterMode, x: &[Value], ct: Value) -> Result<()> {
        let indices = self.primal(x[1]);
        if self.varies(x[0]) {
            let kept = match mode {
                ScatterMode::Assign => {
                    let zeros = self.b.zeros(self.linear.ty(x[2]))?;
                    self.b.op(Op::IndexPut { axis, mode }, &[ct, indices, zeros])?
                }
                ScatterMode::Mul => {
                    let factors = self.primal(x[2]);
                    self.b.op(Op::IndexPut { axis, mode }, &[ct, indices, factors])?
                }
                _ => ct,
            };
            self.accumulate(x[0], kept)?;
        }
        if self.varies(x[2]) {
            let mut read = self.b.op(Op::IndexSelect { axis }, &[ct, indices])?;
            if mode == ScatterMode::Assign {
                let count = self.b.shape(indices);
                let number = self.b.iota(DType::I64, &count, 0)?;
                let extent = self.b.shape(ct)[axis];
                let nobody = self.b.zeros(&TensorType::new(DType::I64, [extent]))?;
                let last = self
                    .b
                    .op(Op::IndexPut { axis: 0, mode }, &[nobody, indices, number])?;
                let last = self.b.op(Op::IndexSelect { axis: 0 }, &[last, indices])?;
                let wins = self.b.compare(CompareOp::Eq, last, number)?;
                let shape = self.b.shape(read);
                let wins = self.b.broadcast(wins, &shape, &[axis])?;
                read = self.b.keep(wins, read)?;
            }
            self.accumulate(x[2], read)?;
        }
        Ok(())
    }

    pub(super) fn max_pool_grad(&mut self, x: &[Value], ct: Value) -> Result<()> {
        let indices = self.primal(x[1]);
        let ct = pick_in_planes(&mut self.b, ct, indices)?;
        self.accumulate(x[0], ct)
    }
}
