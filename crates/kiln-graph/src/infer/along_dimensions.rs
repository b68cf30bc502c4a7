//! Types of the results of reductions, running operations and sorts: operations along dimensions.

use smallvec::smallvec;

use super::{Infer, Results, Rule, single};
use crate::op::{Dims, Op, ReduceOp};
use crate::{DType, TensorType};

impl Rule<'_> {
    /// Operations along one or several dimensions.
    pub(super) fn along_dimensions(&self) -> Infer<Results> {
        match self.op {
            Op::Reduce { op, axes } => self.reduce(*op, axes),
            Op::ArgReduce { axis, dtype, .. } => self.arg_reduce(*axis, *dtype),
            Op::Cumulative { op, axis } => self.cumulative(*op, *axis),
            Op::Sort { axis, dtype, .. } => self.sort(*axis, *dtype),
            Op::TopK { axis, k, dtype } => self.top_k(*axis, *k, *dtype),
            other => unreachable!("{} has a rule of its own", other.name()),
        }
    }

    fn reduce(&self, op: ReduceOp, axes: &Dims) -> Infer<Results> {
        let [x] = self.operands()?;
        match op {
            ReduceOp::Any | ReduceOp::All => {
                self.require(x.dtype == DType::Bool, || format!("{op} takes bools, got {x}"))?
            }
            _ => self.number(x)?,
        }
        self.require(!axes.is_empty(), || "reduces no dimension".into())?;
        self.axes(axes, x)?;
        single(x.dtype, x.shape.without(axes))
    }

    fn arg_reduce(&self, axis: usize, dtype: DType) -> Infer<Results> {
        let [x] = self.operands()?;
        self.number(x)?;
        self.axis(axis, x)?;
        self.require(x.shape[axis] > 0, || format!("dimension {axis} of {x} is empty"))?;
        let ty = TensorType {
            dtype,
            shape: x.shape.without(&[axis]),
        };
        self.integer(&ty)?;
        Ok(smallvec![ty])
    }

    fn cumulative(&self, op: ReduceOp, axis: usize) -> Infer<Results> {
        let [x] = self.operands()?;
        self.number(x)?;
        self.axis(axis, x)?;
        let known = matches!(op, ReduceOp::Sum | ReduceOp::Prod | ReduceOp::Max | ReduceOp::Min);
        self.require(known, || format!("{op} has no running form"))?;
        Ok(smallvec![(*x).clone()])
    }

    fn sort(&self, axis: usize, dtype: DType) -> Infer<Results> {
        let [x] = self.operands()?;
        self.axis(axis, x)?;
        let indices = TensorType {
            dtype,
            shape: x.shape.clone(),
        };
        self.integer(&indices)?;
        Ok(smallvec![(*x).clone(), indices])
    }

    fn top_k(&self, axis: usize, k: usize, dtype: DType) -> Infer<Results> {
        let [x] = self.operands()?;
        self.number(x)?;
        self.axis(axis, x)?;
        self.require(k <= x.shape[axis], || {
            format!("{k} of {} elements", x.shape[axis])
        })?;
        let shape = x.shape.with(axis, k);
        let indices = TensorType {
            dtype,
            shape: shape.clone(),
        };
        self.integer(&indices)?;
        Ok(smallvec![
            TensorType {
                dtype: x.dtype,
                shape
            },
            indices
        ])
    }
}
