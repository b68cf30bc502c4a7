//! Typing: which operands an operation takes, and the types of its results.
//!
//! [`infer`] is the only place where shapes of results are computed; builders, the parser and the verifier
//! all call it.

mod kernels;
mod movement;

use smallvec::{SmallVec, smallvec};

use crate::op::{Op, RandomKind, ReduceOp, UnaryOp};
use crate::{DType, Shape, TensorType};

/// Operands that do not fit an operation.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("`{op}`: {reason}")]
pub struct TypeError {
    /// Mnemonic of the operation.
    pub op: String,
    /// The rule that was broken, with the types at fault.
    pub reason: String,
}

impl TypeError {
    /// An error about `op`.
    pub fn new(op: &Op, reason: impl Into<String>) -> Self {
        Self {
            op: op.name().to_owned(),
            reason: reason.into(),
        }
    }
}

/// Result types, most often one.
pub type Results = SmallVec<[TensorType; 2]>;

/// The types of the results of `op` applied to operands of types `inputs`.
pub fn infer(op: &Op, inputs: &[&TensorType]) -> Result<Results, TypeError> {
    let rule = Rule { op, inputs };
    // The types in an operation's own attributes are checked first, so that the rules may compute sizes
    // without care.
    let brought: &[TensorType] = match op {
        Op::Parameter { ty, .. } => std::slice::from_ref(ty),
        Op::Extern(op) => &op.outputs,
        Op::Reshape(shape) => {
            // The element type is the operand's.
            let dtype = inputs.first().map_or(DType::Bool, |x| x.dtype);
            rule.fits(&TensorType {
                dtype,
                shape: shape.clone(),
            })?;
            &[]
        }
        _ => &[],
    };
    brought.iter().try_for_each(|ty| rule.fits(ty))?;
    let results = rule.results()?;
    results.iter().try_for_each(|ty| rule.fits(ty))?;
    Ok(results)
}

struct Rule<'a> {
    op: &'a Op,
    inputs: &'a [&'a TensorType],
}

type Infer<T> = Result<T, TypeError>;

impl Rule<'_> {
    fn fail<T>(&self, reason: impl Into<String>) -> Infer<T> {
        Err(TypeError::new(self.op, reason))
    }

    fn require(&self, holds: bool, reason: impl FnOnce() -> String) -> Infer<()> {
        if holds { Ok(()) } else { self.fail(reason()) }
    }

    fn fits(&self, ty: &TensorType) -> Infer<()> {
        self.require(ty.fits_memory(), || format!("{ty} is larger than any memory"))
    }

    fn operands<const N: usize>(&self) -> Infer<[&TensorType; N]> {
        match <[&TensorType; N]>::try_from(self.inputs) {
            Ok(inputs) => Ok(inputs),
            Err(_) => self.fail(format!("takes {N} operands, got {}", self.inputs.len())),
        }
    }

    fn axis(&self, axis: usize, ty: &TensorType) -> Infer<()> {
        self.require(axis < ty.shape.rank(), || {
            format!("dimension {axis} is out of range for {ty}")
        })
    }

    fn axes(&self, axes: &[usize], ty: &TensorType) -> Infer<()> {
        self.require(axes.windows(2).all(|pair| pair[0] < pair[1]), || {
            format!("dimensions {axes:?} are not sorted and distinct")
        })?;
        axes.iter().try_for_each(|&axis| self.axis(axis, ty))
    }

    fn per_dimension(&self, what: &str, given: usize, expected: usize) -> Infer<()> {
        self.require(given == expected, || {
            format!("{what} has {given} entries for {expected} dimensions")
        })
    }

    fn same_dtype(&self, a: &TensorType, b: &TensorType) -> Infer<()> {
        self.require(a.dtype == b.dtype, || {
            format!("operands {a} and {b} differ in element type")
        })
    }

    fn same_type(&self, a: &TensorType, b: &TensorType) -> Infer<()> {
        self.require(a == b, || format!("operands {a} and {b} differ"))
    }

    fn float(&self, ty: &TensorType) -> Infer<()> {
        self.require(ty.dtype.is_float(), || format!("takes floats, got {ty}"))
    }

    fn number(&self, ty: &TensorType) -> Infer<()> {
        self.require(ty.dtype != DType::Bool, || format!("takes numbers, got {ty}"))
    }

    fn integer(&self, ty: &TensorType) -> Infer<()> {
        self.require(ty.dtype.is_int(), || format!("takes integers, got {ty}"))
    }

    fn scalar(&self, ty: &TensorType, dtype: DType) -> Infer<()> {
        self.require(*ty == TensorType::scalar(dtype), || {
            format!("takes a scalar of type {dtype}[], got {ty}")
        })
    }

    fn results(&self) -> Infer<Results> {
        let one = |dtype: DType, shape: Shape| Ok(smallvec![TensorType { dtype, shape }]);
        match self.op {
            Op::Parameter { ty, .. } => {
                self.operands::<0>()?;
                Ok(smallvec![ty.clone()])
            }
            Op::Scalar { dtype, .. } | Op::Constant { dtype, .. } => {
                self.operands::<0>()?;
                one(*dtype, Shape::scalar())
            }
            Op::Iota { dtype, shape, axis } => {
                self.operands::<0>()?;
                let ty = TensorType::new(*dtype, shape.clone());
                self.number(&ty)?;
                self.axis(*axis, &ty)?;
                Ok(smallvec![ty])
            }
            Op::Random { kind, dtype, shape } => self.random(*kind, *dtype, shape),
            Op::Unary(op) => {
                let [x] = self.operands()?;
                match op {
                    UnaryOp::Neg | UnaryOp::Abs | UnaryOp::Sign => self.number(x)?,
                    UnaryOp::Not => self.require(!x.dtype.is_float(), || {
                        format!("takes bools or integers, got {x}")
                    })?,
                    _ => self.float(x)?,
                }
                let to_bool = matches!(op, UnaryOp::IsNan | UnaryOp::IsInf);
                one(if to_bool { DType::Bool } else { x.dtype }, x.shape.clone())
            }
            Op::Binary(op) => {
                use crate::op::BinaryOp::*;
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
            Op::Compare(op) => {
                use crate::op::CompareOp::*;
                let [a, b] = self.operands()?;
                self.same_type(a, b)?;
                if !matches!(op, Eq | Ne) {
                    self.number(a)?;
                }
                one(DType::Bool, a.shape.clone())
            }
            Op::Select => {
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
            Op::Cast(dtype) => {
                let [x] = self.operands()?;
                one(*dtype, x.shape.clone())
            }
            Op::Reduce { op, axes } => {
                let [x] = self.operands()?;
                match op {
                    ReduceOp::Any | ReduceOp::All => {
                        self.require(x.dtype == DType::Bool, || format!("{op} takes bools, got {x}"))?
                    }
                    _ => self.number(x)?,
                }
                self.require(!axes.is_empty(), || "reduces no dimension".into())?;
                self.axes(axes, x)?;
                one(x.dtype, x.shape.without(axes))
            }
            Op::ArgReduce { axis, dtype, .. } => {
                let [x] = self.operands()?;
                self.number(x)?;
                self.axis(*axis, x)?;
                self.require(x.shape[*axis] > 0, || format!("dimension {axis} of {x} is empty"))?;
                let ty = TensorType {
                    dtype: *dtype,
                    shape: x.shape.without(&[*axis]),
                };
                self.integer(&ty)?;
                Ok(smallvec![ty])
            }
            Op::Cumulative { op, axis } => {
                let [x] = self.operands()?;
                self.number(x)?;
                self.axis(*axis, x)?;
                let known = matches!(op, ReduceOp::Sum | ReduceOp::Prod | ReduceOp::Max | ReduceOp::Min);
                self.require(known, || format!("{op} has no running form"))?;
                Ok(smallvec![(*x).clone()])
            }
            Op::Sort { axis, dtype, .. } => {
                let [x] = self.operands()?;
                self.axis(*axis, x)?;
                let indices = TensorType {
                    dtype: *dtype,
                    shape: x.shape.clone(),
                };
                self.integer(&indices)?;
                Ok(smallvec![(*x).clone(), indices])
            }
            Op::TopK { axis, k, dtype } => {
                let [x] = self.operands()?;
                self.number(x)?;
                self.axis(*axis, x)?;
                self.require(*k <= x.shape[*axis], || {
                    format!("{k} of {} elements", x.shape[*axis])
                })?;
                let shape = x.shape.with(*axis, *k);
                let indices = TensorType {
                    dtype: *dtype,
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
            Op::Collective(collective) => {
                let [x] = self.operands()?;
                match collective.result(x) {
                    Ok(ty) => Ok(smallvec![ty]),
                    Err(reason) => self.fail(reason),
                }
            }
            Op::CollectiveWait => {
                let [x] = self.operands()?;
                Ok(smallvec![(*x).clone()])
            }
            Op::Extern(op) => Ok(op.outputs.iter().cloned().collect()),
            Op::DotGeneral(dims) => self.dot_general(dims),
            Op::Conv(_)
            | Op::ConvInputGrad { .. }
            | Op::ConvWeightGrad { .. }
            | Op::MaxPool(_)
            | Op::MaxPoolWithIndices { .. }
            | Op::MaxPoolGrad { .. }
            | Op::AvgPool { .. }
            | Op::AvgPoolGrad { .. } => self.windowed(),
            Op::Attention(_) | Op::AttentionGrad(_) => self.attention(),
            _ => self.movement(),
        }
    }

    fn random(&self, kind: RandomKind, dtype: DType, shape: &Shape) -> Infer<Results> {
        let scalars = if kind == RandomKind::IntRange {
            let [seed, stream, low, high] = self.operands()?;
            self.scalar(low, DType::I64)?;
            self.scalar(high, DType::I64)?;
            [seed, stream]
        } else {
            self.operands()?
        };
        for scalar in scalars {
            self.scalar(scalar, DType::U64)?;
        }
        let fits = if kind == RandomKind::IntRange {
            dtype.is_int()
        } else {
            dtype.is_float()
        };
        self.require(fits, || {
            format!("distribution {kind} has no numbers of type {dtype}")
        })?;
        Ok(smallvec![TensorType {
            dtype,
            shape: shape.clone()
        }])
    }
}
