//! Transposes of arithmetic, movements and sums.

use kiln_graph::op::{BinaryOp, Dims, Op, ReduceOp, SignedDims};
use kiln_graph::{DType, Shape, TensorType, Value};

use super::Reverse;
use crate::error::Result;
use crate::forward::structure::all_axes;

impl Reverse<'_> {
    pub(super) fn arithmetic(&mut self, op: BinaryOp, x: &[Value], ct: Value) -> Result<()> {
        let (a, b) = (x[0], x[1]);
        match op {
            BinaryOp::Add | BinaryOp::Sub => {
                if self.varies(a) {
                    self.accumulate(a, ct)?;
                }
                if self.varies(b) {
                    let ct = if op == BinaryOp::Sub { self.b.neg(ct)? } else { ct };
                    self.accumulate(b, ct)?;
                }
                Ok(())
            }
            BinaryOp::Div => {
                let divisor = self.primal(b);
                let ct = self.b.div(ct, divisor)?;
                self.accumulate(a, ct)
            }
            // One factor depends on tangents; the other is its slope.
            _ => {
                let (to, slope) = if self.varies(a) { (a, b) } else { (b, a) };
                let slope = self.primal(slope);
                let ct = self.b.mul(ct, slope)?;
                self.accumulate(to, ct)
            }
        }
    }

    pub(super) fn select(&mut self, x: &[Value], ct: Value) -> Result<()> {
        let condition = self.primal(x[0]);
        if self.varies(x[1]) {
            let ct = self.b.keep(condition, ct)?;
            self.accumulate(x[1], ct)?;
        }
        if self.varies(x[2]) {
            let ct = self.b.drop(condition, ct)?;
            self.accumulate(x[2], ct)?;
        }
        Ok(())
    }

    /// The running sum from the other end.
    pub(super) fn running_sum(&mut self, axis: usize, x: &[Value], ct: Value) -> Result<()> {
        let flip = Op::Flip(Dims::from_slice(&[axis]));
        let op = Op::Cumulative {
            op: ReduceOp::Sum,
            axis,
        };
        let ct = self.b.op(flip.clone(), &[ct])?;
        let ct = self.b.op(op, &[ct])?;
        let ct = self.b.op(flip, &[ct])?;
        self.accumulate(x[0], ct)
    }

    pub(super) fn permuted(&mut self, perm: &[usize], x: &[Value], ct: Value) -> Result<()> {
        let mut inverse = Dims::from_elem(0, perm.len());
        perm.iter().enumerate().for_each(|(to, &from)| inverse[from] = to);
        let ct = self.b.transpose(ct, &inverse)?;
        self.accumulate(x[0], ct)
    }

    /// The sum over everything that an element was repeated to.
    pub(super) fn broadcast(&mut self, shape: &Shape, dims: &[usize], x: &[Value], ct: Value) -> Result<()> {
        let operand = self.linear.shape(x[0]).clone();
        let repeated = |dim: usize| match dims.iter().position(|&to| to == dim) {
            Some(from) => operand[from] == 1 && shape[dim] != 1,
            None => true,
        };
        let axes: Dims = (0..shape.rank()).filter(|&dim| repeated(dim)).collect();
        let ct = self.b.sum(ct, &axes)?;
        let ct = self.b.reshape(ct, operand)?;
        self.accumulate(x[0], ct)
    }

    pub(super) fn slice(&mut self, starts: &Dims, steps: &Dims, x: &[Value], ct: Value) -> Result<()> {
        let (shape, taken) = (self.linear.shape(x[0]).clone(), self.b.shape(ct));
        let ct = if steps.iter().all(|&step| step == 1) {
            let zero = self.b.constant(0.0, self.b.dtype(ct))?;
            let low: SignedDims = starts.iter().map(|&start| start as i64).collect();
            let rest = |axis: usize| (shape[axis] - starts[axis] - taken[axis]) as i64;
            let high: SignedDims = (0..shape.rank()).map(rest).collect();
            self.b.pad(ct, zero, low, high)?
        } else {
            let zeros = self.b.zeros(self.linear.ty(x[0]))?;
            let (starts, steps) = (starts.clone(), steps.clone());
            self.b.op(Op::UpdateSlice { starts, steps }, &[zeros, ct])?
        };
        self.accumulate(x[0], ct)
    }

    pub(super) fn pad(&mut self, low: &SignedDims, high: &SignedDims, x: &[Value], ct: Value) -> Result<()> {
        if self.varies(x[0]) {
            let opposite = |amounts: &SignedDims| amounts.iter().map(|&n| -n).collect::<SignedDims>();
            let zero = self.b.constant(0.0, self.b.dtype(ct))?;
            let inner = self.b.pad(ct, zero, opposite(low), opposite(high))?;
            self.accumulate(x[0], inner)?;
        }
        if self.varies(x[1]) {
            let inside = TensorType {
                dtype: DType::Bool,
                shape: self.linear.shape(x[0]).clone(),
            };
            let inside = self.b.full(true, &inside)?;
            let outside = self.b.constant(false, DType::Bool)?;
            let inside = self.b.pad(inside, outside, low.clone(), high.clone())?;
            let around = self.b.drop(inside, ct)?;
            let total = self.b.sum(around, &all_axes(low.len()))?;
            self.accumulate(x[1], total)?;
        }
        Ok(())
    }

    pub(super) fn concat(&mut self, axis: usize, x: &[Value], ct: Value) -> Result<()> {
        let mut start = 0;
        for &part in x {
            let limit = start + self.linear.shape(part)[axis];
            if self.varies(part) {
                let ct = self.b.slice(ct, axis, start, limit)?;
                self.accumulate(part, ct)?;
            }
            start = limit;
        }
        Ok(())
    }

    pub(super) fn update_slice(&mut self, starts: &Dims, steps: &Dims, x: &[Value], ct: Value) -> Result<()> {
        let ty = self.linear.ty(x[1]).clone();
        if self.varies(x[0]) {
            let zeros = self.b.zeros(&ty)?;
            let op = Op::UpdateSlice {
                starts: starts.clone(),
                steps: steps.clone(),
            };
            let kept = self.b.op(op, &[ct, zeros])?;
            self.accumulate(x[0], kept)?;
        }
        if self.varies(x[1]) && ty.numel() > 0 {
            let last = |axis: usize| starts[axis] + (ty.shape[axis] - 1) * steps[axis] + 1;
            let op = Op::Slice {
                starts: starts.clone(),
                limits: (0..ty.shape.rank()).map(last).collect(),
                steps: steps.clone(),
            };
            let written = self.b.op(op, &[ct])?;
            self.accumulate(x[1], written)?;
        }
        Ok(())
    }
}
