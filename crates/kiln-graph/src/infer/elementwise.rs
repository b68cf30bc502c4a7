//! Types of the results of operations that compute each element by itself.

use smallvec::smallvec;

use super::{Infer, Results, Rule, single};
use crate::op::{BinaryOp, CompareOp, Op, UnaryOp};
use crate::{DType, TensorType};

impl Rule<'_> {
    /// Operations on the elements at each place.
    pub(super) fn elementwise(&self) -> Infer<Results> {
        match self.op {
            Op::Unary(op) => self.unary(*op),
            Op::Binary(op) => self.binary(*op),
            Op::Compare(op) => self.compare(*op),
            Op::Select => self.select(),
            Op::Cast(dtype) => {
                let [x] = self.operands()?;
                single(*dtype, x.shape.clone())
            }
            other => unreachable!("{} has a rule of its own", other.name()),
        }
    }

    fn unary(&self, op: UnaryOp) -> Infer<Results> {
        let [x] = self.operands()?;
        match op {
            UnaryOp::Neg | UnaryOp::Abs | UnaryOp::Sign => self.number(x)?,
            UnaryOp::Not => self.require(!x.dtype.is_float(), || {
                format!("takes bools or integers, got {x}")
            })?,
            _ => self.float(x)?,
        }
        let to_bool = matches!(op, UnaryOp::IsNan | UnaryOp::IsInf);
        single(if to_bool { DType::Bool } else { x.dtype }, x.shape.clone())
    }

    fn binary(&self, op: BinaryOp) -> Infer<Results> {
        use BinaryOp::*;
        let [a, b] = self.operands()?;
        self.same_type(a, b)?;
        match op {
            And | Or | Xor => self.require(!a.dtype.is_float(), || {
                format!("takes bools or integers, got {a}")
            })?,
            Shl | Shr => self.integer(a)?,
            Atan2 => self.float(a)?,
            _ => self.number(a)?,
        }
        Ok(smallvec![a.clone()])
    }

    fn compare(&self, op: CompareOp) -> Infer<Results> {
        use CompareOp::*;
        let [a, b] = self.operands()?;
        self.same_type(a, b)?;
        if !matches!(op, Eq | Ne) {
            self.number(a)?;
        }
        single(DType::Bool, a.shape.clone())
    }

    fn select(&self) -> Infer<Results> {
        let [c, a, b] = self.operands()?;
        self.same_type(a, b)?;
        let expected = TensorType {
            dtype: DType::Bool,
            shape: a.shape.clone(),
        };
        self.require(*c == expected, || {
            format!("the condition is {c}, expected {expected}")
        })?;
        Ok(smallvec![a.clone()])
    }
}
