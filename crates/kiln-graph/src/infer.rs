//! Typing: which operands an operation takes, and the types of its results.
//!
//! [`infer`] is the only place where shapes of results are computed; builders, the parser and the verifier all call it.

use smallvec::{SmallVec, smallvec};

use crate::op::{ConvDims, Dims, DotDims, Op, RandomKind, ReduceOp, UnaryOp, Window};
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
    // Types an operation brings along are looked at first, so that the rules may compute sizes without care.
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

    /// Operations that move elements: shapes, slices, indices.
    fn movement(&self) -> Infer<Results> {
        let one = |dtype: DType, shape: Shape| Ok(smallvec![TensorType { dtype, shape }]);
        match self.op {
            Op::Reshape(shape) => {
                let [x] = self.operands()?;
                self.require(x.numel() == shape.numel(), || {
                    format!("{x} does not have the {} elements of {shape}", shape.numel())
                })?;
                one(x.dtype, shape.clone())
            }
            Op::Transpose(perm) => {
                let [x] = self.operands()?;
                self.per_dimension("the permutation", perm.len(), x.shape.rank())?;
                let mut seen = perm.clone();
                seen.sort_unstable();
                self.require(seen.iter().copied().eq(0..perm.len()), || {
                    format!("{perm:?} is no permutation")
                })?;
                one(x.dtype, perm.iter().map(|&axis| x.shape[axis]).collect())
            }
            Op::Broadcast { shape, dims } => {
                let [x] = self.operands()?;
                self.per_dimension("dims", dims.len(), x.shape.rank())?;
                self.require(dims.windows(2).all(|pair| pair[0] < pair[1]), || {
                    format!("dims {dims:?} do not increase")
                })?;
                for (from, &to) in dims.iter().enumerate() {
                    let fits = to < shape.rank() && (x.shape[from] == 1 || x.shape[from] == shape[to]);
                    self.require(fits, || {
                        format!("dimension {from} of {x} does not fit dimension {to} of {shape}")
                    })?;
                }
                one(x.dtype, shape.clone())
            }
            Op::Slice {
                starts,
                limits,
                steps,
            } => {
                let [x] = self.operands()?;
                self.slice_extents(starts, limits, steps, &x.shape)
                    .and_then(|shape| one(x.dtype, shape))
            }
            Op::Pad { low, high } => {
                let [x, value] = self.operands()?;
                self.scalar(value, x.dtype)?;
                self.per_dimension("low", low.len(), x.shape.rank())?;
                self.per_dimension("high", high.len(), x.shape.rank())?;
                let mut shape = x.shape.clone();
                for axis in 0..shape.rank() {
                    let extent = (shape[axis] as i64)
                        .checked_add(low[axis])
                        .and_then(|n| n.checked_add(high[axis]));
                    let Some(extent) = extent.and_then(|n| usize::try_from(n).ok()) else {
                        return self.fail(format!(
                            "dimension {axis} of {x} is cropped below nothing or overflows"
                        ));
                    };
                    shape[axis] = extent;
                }
                one(x.dtype, shape)
            }
            Op::Concat { axis } => {
                let Some(first) = self.inputs.first() else {
                    return self.fail("takes at least one operand");
                };
                self.axis(*axis, first)?;
                let mut extent = 0;
                for x in self.inputs {
                    self.same_dtype(first, x)?;
                    let agree = x.shape.rank() == first.shape.rank()
                        && x.shape.with(*axis, 0) == first.shape.with(*axis, 0);
                    self.require(agree, || {
                        format!("{first} and {x} differ outside dimension {axis}")
                    })?;
                    extent += x.shape[*axis];
                    self.fits(&TensorType {
                        dtype: x.dtype,
                        shape: x.shape.with(*axis, extent),
                    })?;
                }
                one(first.dtype, first.shape.with(*axis, extent))
            }
            Op::Flip(axes) => {
                let [x] = self.operands()?;
                self.axes(axes, x)?;
                Ok(smallvec![(*x).clone()])
            }
            Op::UpdateSlice { starts, steps } => {
                let [x, update] = self.operands()?;
                self.same_dtype(x, update)?;
                self.per_dimension("update", update.shape.rank(), x.shape.rank())?;
                self.per_dimension("starts", starts.len(), x.shape.rank())?;
                self.per_dimension("steps", steps.len(), x.shape.rank())?;
                for axis in 0..x.shape.rank() {
                    let reach = update.shape[axis].saturating_sub(1).checked_mul(steps[axis]);
                    let last = reach.and_then(|reach| reach.checked_add(starts[axis]));
                    let inside = last.is_some_and(|last| last < x.shape[axis]);
                    let fits = steps[axis] >= 1 && (update.shape[axis] == 0 || inside);
                    self.require(fits, || {
                        format!("{update} does not fit into dimension {axis} of {x}")
                    })?;
                }
                Ok(smallvec![(*x).clone()])
            }
            Op::Gather { axis } => {
                let [x, indices] = self.operands()?;
                self.index_operand(*axis, x, indices)?;
                one(x.dtype, indices.shape.clone())
            }
            Op::Scatter { axis, .. } => {
                let [x, indices, updates] = self.operands()?;
                self.index_operand(*axis, x, indices)?;
                let expected = TensorType {
                    dtype: x.dtype,
                    shape: indices.shape.clone(),
                };
                self.require(*updates == expected, || {
                    format!("updates are {updates}, expected {expected}")
                })?;
                Ok(smallvec![(*x).clone()])
            }
            Op::IndexSelect { axis } => {
                let [x, indices] = self.operands()?;
                self.index_list(*axis, x, indices)?;
                one(x.dtype, x.shape.with(*axis, indices.shape[0]))
            }
            Op::IndexPut { axis, .. } => {
                let [x, indices, updates] = self.operands()?;
                self.index_list(*axis, x, indices)?;
                let expected = TensorType {
                    dtype: x.dtype,
                    shape: x.shape.with(*axis, indices.shape[0]),
                };
                self.require(*updates == expected, || {
                    format!("updates are {updates}, expected {expected}")
                })?;
                Ok(smallvec![(*x).clone()])
            }
            other => unreachable!("{} has a rule of its own", other.name()),
        }
    }

    fn slice_extents(&self, starts: &Dims, limits: &Dims, steps: &Dims, shape: &Shape) -> Infer<Shape> {
        for (what, list) in [("starts", starts), ("limits", limits), ("steps", steps)] {
            self.per_dimension(what, list.len(), shape.rank())?;
        }
        let mut out = shape.clone();
        for axis in 0..shape.rank() {
            let (start, limit, step) = (starts[axis], limits[axis], steps[axis]);
            let fits = start <= limit && limit <= shape[axis] && step >= 1;
            self.require(fits, || {
                format!("{start}..{limit} by {step} is no slice of dimension {axis} of {shape}")
            })?;
            out[axis] = (limit - start).div_ceil(step);
        }
        Ok(out)
    }

    fn index_operand(&self, axis: usize, x: &TensorType, indices: &TensorType) -> Infer<()> {
        self.axis(axis, x)?;
        self.integer(indices)?;
        self.per_dimension("indices", indices.shape.rank(), x.shape.rank())?;
        for other in (0..x.shape.rank()).filter(|&other| other != axis) {
            let fits = indices.shape[other] <= x.shape[other];
            self.require(fits, || {
                format!("indices {indices} exceed {x} in dimension {other}")
            })?;
        }
        Ok(())
    }

    fn index_list(&self, axis: usize, x: &TensorType, indices: &TensorType) -> Infer<()> {
        self.axis(axis, x)?;
        self.integer(indices)?;
        self.require(indices.shape.rank() == 1, || {
            format!("indices are {indices}, expected one dimension")
        })
    }

    fn dot_general(&self, dims: &DotDims) -> Infer<Results> {
        let [a, b] = self.operands()?;
        self.same_dtype(a, b)?;
        self.number(a)?;
        let lists = [
            (&dims.a_batch, &dims.a_contract, a),
            (&dims.b_batch, &dims.b_contract, b),
        ];
        for (batch, contract, ty) in lists {
            let mut all: Dims = batch.iter().chain(contract.iter()).copied().collect();
            all.sort_unstable();
            self.axes(&all, ty)?;
        }
        for (what, of_a, of_b) in [
            ("batch", &dims.a_batch, &dims.b_batch),
            ("contracted", &dims.a_contract, &dims.b_contract),
        ] {
            self.per_dimension(what, of_b.len(), of_a.len())?;
            for (&i, &j) in of_a.iter().zip(of_b) {
                let agree = a.shape[i] == b.shape[j];
                self.require(agree, || {
                    format!("{what} dimensions {i} of {a} and {j} of {b} differ")
                })?;
            }
        }
        let free_a = DotDims::free(a.shape.rank(), &dims.a_batch, &dims.a_contract);
        let free_b = DotDims::free(b.shape.rank(), &dims.b_batch, &dims.b_contract);
        let batch = dims.a_batch.iter().map(|&axis| a.shape[axis]);
        let shape = batch
            .chain(free_a.iter().map(|&axis| a.shape[axis]))
            .chain(free_b.iter().map(|&axis| b.shape[axis]))
            .collect();
        Ok(smallvec![TensorType {
            dtype: a.dtype,
            shape
        }])
    }

    /// Convolutions and pooling.
    fn windowed(&self) -> Infer<Results> {
        let one = |dtype: DType, shape: Shape| Ok(smallvec![TensorType { dtype, shape }]);
        match self.op {
            Op::Conv(conv) => {
                let [x, w] = self.operands()?;
                self.same_dtype(x, w)?;
                let out = self.conv_output(conv, x, w)?;
                one(x.dtype, out)
            }
            Op::ConvInputGrad { conv, input } => {
                let [dy, w] = self.operands()?;
                self.same_dtype(dy, w)?;
                self.planes(dy, input.len())?;
                self.planes(w, input.len())?;
                let Some(channels) = w.shape[1].checked_mul(conv.groups) else {
                    return self.fail(format!("{} groups of {w} overflow", conv.groups));
                };
                let x = TensorType::new(
                    dy.dtype,
                    Shape::new([dy.shape[0], channels].into_iter().chain(input.iter().copied())),
                );
                let expected = self.conv_output(conv, &x, w)?;
                self.require(dy.shape == expected, || {
                    format!("the gradient is {dy}, the forward result is {expected}")
                })?;
                Ok(smallvec![x])
            }
            Op::ConvWeightGrad { conv, kernel } => {
                let [x, dy] = self.operands()?;
                self.same_dtype(x, dy)?;
                self.planes(x, kernel.len())?;
                self.planes(dy, kernel.len())?;
                let divides = conv.groups > 0 && x.shape[1] % conv.groups == 0;
                self.require(divides, || {
                    format!("{} groups do not divide the channels of {x}", conv.groups)
                })?;
                let channels = x.shape[1] / conv.groups;
                let w = TensorType::new(
                    x.dtype,
                    Shape::new([dy.shape[1], channels].into_iter().chain(kernel.iter().copied())),
                );
                let expected = self.conv_output(conv, x, &w)?;
                self.require(dy.shape == expected, || {
                    format!("the gradient is {dy}, the forward result is {expected}")
                })?;
                Ok(smallvec![w])
            }
            Op::MaxPool(window) | Op::AvgPool { window, .. } => {
                let [x] = self.operands()?;
                one(x.dtype, self.pool_output(window, x)?)
            }
            Op::MaxPoolWithIndices { window, dtype } => {
                let [x] = self.operands()?;
                let shape = self.pool_output(window, x)?;
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
            Op::MaxPoolGrad { input } => {
                let [dy, indices] = self.operands()?;
                self.planes(dy, input.len())?;
                self.integer(indices)?;
                self.require(dy.shape == indices.shape, || {
                    format!("{dy} and {indices} differ in shape")
                })?;
                one(dy.dtype, Shape::new(dy.shape[..2].iter().chain(input).copied()))
            }
            Op::AvgPoolGrad { window, input, .. } => {
                let [dy] = self.operands()?;
                self.planes(dy, input.len())?;
                let x = TensorType::new(dy.dtype, Shape::new(dy.shape[..2].iter().chain(input).copied()));
                let expected = self.pool_output(window, &x)?;
                self.require(dy.shape == expected, || {
                    format!("the gradient is {dy}, the forward result is {expected}")
                })?;
                Ok(smallvec![x])
            }
            other => unreachable!("{} has no window", other.name()),
        }
    }

    fn planes(&self, ty: &TensorType, spatial: usize) -> Infer<()> {
        self.require(ty.shape.rank() == spatial + 2, || {
            format!("{ty} does not have {spatial} spatial dimensions")
        })
    }

    fn conv_output(&self, conv: &ConvDims, x: &TensorType, w: &TensorType) -> Infer<Shape> {
        let spatial = conv.stride.len();
        self.planes(x, spatial)?;
        self.planes(w, spatial)?;
        self.number(x)?;
        for (what, list) in [
            ("pad_low", &conv.pad_low),
            ("pad_high", &conv.pad_high),
            ("dilation", &conv.dilation),
        ] {
            self.per_dimension(what, list.len(), spatial)?;
        }
        let positive = conv.groups >= 1 && conv.stride.iter().chain(&conv.dilation).all(|&n| n >= 1);
        self.require(positive, || "groups, strides and dilations are at least 1".into())?;
        let grouped =
            Some(x.shape[1]) == w.shape[1].checked_mul(conv.groups) && w.shape[0].is_multiple_of(conv.groups);
        self.require(grouped, || {
            format!("{x} and weight {w} do not fit {} groups", conv.groups)
        })?;
        let mut shape = Shape::new(
            [x.shape[0], w.shape[0]]
                .into_iter()
                .chain(x.shape[2..].iter().copied()),
        );
        for axis in 0..spatial {
            match conv.output_extent(axis, x.shape[axis + 2], w.shape[axis + 2]) {
                Some(extent) => shape[axis + 2] = extent,
                None => {
                    return self.fail(format!(
                        "kernel {w} does not fit into {x} in spatial dimension {axis}"
                    ));
                }
            }
        }
        Ok(shape)
    }

    fn pool_output(&self, window: &Window, x: &TensorType) -> Infer<Shape> {
        let spatial = window.size.len();
        self.planes(x, spatial)?;
        self.number(x)?;
        for (what, list) in [
            ("stride", &window.stride),
            ("pad_low", &window.pad_low),
            ("pad_high", &window.pad_high),
            ("dilation", &window.dilation),
        ] {
            self.per_dimension(what, list.len(), spatial)?;
        }
        let positive = window.stride.iter().chain(&window.dilation).all(|&n| n >= 1);
        self.require(positive, || "strides and dilations are at least 1".into())?;
        let mut shape = x.shape.clone();
        for axis in 0..spatial {
            match window.output_extent(axis, x.shape[axis + 2]) {
                Some(extent) => shape[axis + 2] = extent,
                None => {
                    return self.fail(format!(
                        "the window does not fit into {x} in spatial dimension {axis}"
                    ));
                }
            }
        }
        Ok(shape)
    }

    fn attention(&self) -> Infer<Results> {
        let (dims, extra) = match self.op {
            Op::Attention(dims) => (dims, 0),
            Op::AttentionGrad(dims) => (dims, 3),
            other => unreachable!("{} is no attention", other.name()),
        };
        let expected = 4 + usize::from(dims.mask) + 3 * usize::from(dims.dropout);
        self.require(self.inputs.len() == expected + extra, || {
            format!("takes {} operands, got {}", expected + extra, self.inputs.len())
        })?;
        let (q, k, v, scale) = (self.inputs[0], self.inputs[1], self.inputs[2], self.inputs[3]);
        for ty in [q, k, v] {
            self.same_dtype(q, ty)?;
            self.float(ty)?;
            self.require(ty.shape.rank() == 4, || {
                format!("{ty} is not [batch, heads, length, width]")
            })?;
        }
        self.scalar(scale, q.dtype)?;
        let fits = k.shape[1] > 0
            && q.shape[1] % k.shape[1] == 0
            && q.shape[0] == k.shape[0]
            && k.shape[..3] == v.shape[..3]
            && q.shape[3] == k.shape[3];
        self.require(fits, || format!("query {q}, key {k} and value {v} do not fit"))?;
        if dims.mask {
            let mask = self.inputs[4];
            self.same_dtype(q, mask)?;
            let scores = [q.shape[0], q.shape[1], q.shape[2], k.shape[2]];
            let fits = mask.shape.rank() == 4
                && mask
                    .shape
                    .iter()
                    .zip(scores)
                    .all(|(&have, want)| have == 1 || have == want);
            self.require(fits, || {
                format!("mask {mask} does not broadcast to scores {scores:?}")
            })?;
        }
        if dims.dropout {
            let first = 4 + usize::from(dims.mask);
            self.scalar(self.inputs[first], DType::U64)?;
            self.scalar(self.inputs[first + 1], DType::U64)?;
            self.scalar(self.inputs[first + 2], q.dtype)?;
        }
        let out = TensorType {
            dtype: q.dtype,
            shape: q.shape.with(3, v.shape[3]),
        };
        let stats = TensorType {
            dtype: DType::F32,
            shape: q.shape.without(&[3]),
        };
        if extra == 0 {
            return Ok(smallvec![out, stats]);
        }
        for (index, expected) in [(0, &out), (1, &stats), (2, &out)] {
            let given = self.inputs[self.inputs.len() - 3 + index];
            self.require(given == expected, || format!("expected {expected}, got {given}"))?;
        }
        Ok(smallvec![q.clone(), k.clone(), v.clone()])
    }
}
