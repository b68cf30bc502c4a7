//! Typing: which operands an operation takes, and the types of its results.
//!
//! [`infer`] is the only place where shapes of results are computed; builders, the parser and the verifier
//! all call it.

mod along_dimensions;
mod elementwise;
mod kernels;
mod movement;

use smallvec::{SmallVec, smallvec};

use crate::op::{Op, RandomKind};
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

/// One result.
fn single(dtype: DType, shape: Shape) -> Infer<Results> {
    Ok(smallvec![TensorType { dtype, shape }])
}

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
        match self.op {
            Op::Parameter { ty, .. } => {
                self.operands::<0>()?;
                Ok(smallvec![ty.clone()])
            }
            Op::Scalar { dtype, .. } | Op::Constant { dtype, .. } => {
                self.operands::<0>()?;
                single(*dtype, Shape::scalar())
            }
            Op::Iota { dtype, shape, axis } => {
                self.operands::<0>()?;
                let ty = TensorType::new(*dtype, shape.clone());
                self.number(&ty)?;
                self.axis(*axis, &ty)?;
                Ok(smallvec![ty])
            }
            Op::Random { kind, dtype, shape } => self.random(*kind, *dtype, shape),
            Op::Unary(_) | Op::Binary(_) | Op::Compare(_) | Op::Select | Op::Cast(_) => self.elementwise(),
            Op::Reduce { .. }
            | Op::ArgReduce { .. }
            | Op::Cumulative { .. }
            | Op::Sort { .. }
            | Op::TopK { .. } => self.along_dimensions(),
            Op::Collective(collective) => {
                let [x] = self.operands()?;
                match collective.result(x) {
                    Ok(ty) => Ok(smallvec![ty]),
                    Err(reason) => self.fail(reason),
                }
            }
            Op::CollectiveWait => {
                // The second one is that of the collective, which is read until here.
                self.require((1..=2).contains(&self.inputs.len()), || {
                    format!("takes 1 or 2 operands, got {}", self.inputs.len())
                })?;
                Ok(smallvec![self.inputs[0].clone()])
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
