//! Lowering of operations that float and int tensors share: arithmetic, comparisons, reductions, random
//! numbers.

use burn_backend::Distribution;
use burn_ir::{
    BinaryOpIr, ClampOpIr, DimOpIr, NumericOperationIr, RandomOpIr, ReduceDimWithIndicesOpIr, ScalarIr,
    ScalarOpIr, TensorIr, UnaryOpIr,
};
use kiln_graph::op::{ArgReduceOp, BinaryOp, CompareOp, RandomKind, ReduceOp, UnaryOp};
use kiln_graph::{DType, Op, Value};

use super::lower::{Done, Fault, Lower, shape_of, tensor_type};
use crate::eager::random::{full_range, trial_dtype};

pub(super) fn lower(l: &mut Lower, op: &NumericOperationIr) -> Done {
    use NumericOperationIr as N;
    match op {
        N::Add(d) => binary(l, BinaryOp::Add, d),
        N::AddScalar(d) => scalar(l, BinaryOp::Add, d),
        N::Sub(d) => binary(l, BinaryOp::Sub, d),
        N::SubScalar(d) => scalar(l, BinaryOp::Sub, d),
        N::Div(d) => binary(l, BinaryOp::Div, d),
        N::DivScalar(d) => scalar(l, BinaryOp::Div, d),
        N::Rem(d) => binary(l, BinaryOp::Rem, d),
        N::RemScalar(d) => scalar(l, BinaryOp::Rem, d),
        N::Mul(d) => binary(l, BinaryOp::Mul, d),
        N::MulScalar(d) => scalar(l, BinaryOp::Mul, d),
        N::Abs(d) => unary(l, UnaryOp::Abs, d),
        N::Full(d) => {
            let ty = tensor_type(&d.out)?;
            let value = l.scalar(d.value, ty.dtype)?;
            let out = l.splat(value, &ty.shape)?;
            l.define(&d.out, out)
        }
        N::Mean(d) => mean(l, &d.input, None, &d.out),
        N::MeanDim(d) => mean(l, &d.input, Some(d.axis), &d.out),
        N::Sum(d) => reduce(l, ReduceOp::Sum, &d.input, None, &d.out),
        N::SumDim(d) => reduce(l, ReduceOp::Sum, &d.input, Some(d.axis), &d.out),
        N::Prod(d) => reduce(l, ReduceOp::Prod, &d.input, None, &d.out),
        N::ProdDim(d) => reduce(l, ReduceOp::Prod, &d.input, Some(d.axis), &d.out),
        N::Max(d) => reduce(l, ReduceOp::Max, &d.input, None, &d.out),
        N::MaxDim(d) => reduce(l, ReduceOp::Max, &d.input, Some(d.axis), &d.out),
        N::Min(d) => reduce(l, ReduceOp::Min, &d.input, None, &d.out),
        N::MinDim(d) => reduce(l, ReduceOp::Min, &d.input, Some(d.axis), &d.out),
        N::MaxAbs(d) => max_abs(l, &d.input, None, &d.out),
        N::MaxAbsDim(d) => max_abs(l, &d.input, Some(d.axis), &d.out),
        N::Greater(d) => compare(l, CompareOp::Gt, d),
        N::GreaterElem(d) => compare_elem(l, CompareOp::Gt, d),
        N::GreaterEqual(d) => compare(l, CompareOp::Ge, d),
        N::GreaterEqualElem(d) => compare_elem(l, CompareOp::Ge, d),
        N::Lower(d) => compare(l, CompareOp::Lt, d),
        N::LowerElem(d) => compare_elem(l, CompareOp::Lt, d),
        N::LowerEqual(d) => compare(l, CompareOp::Le, d),
        N::LowerEqualElem(d) => compare_elem(l, CompareOp::Le, d),
        N::ArgMax(d) => {
            let x = l.input(&d.input)?;
            let out = arg_reduce(l, ArgReduceOp::Max, x, d.axis, &d.out)?;
            l.define_reshaped(&d.out, out)
        }
        N::ArgMin(d) => {
            let x = l.input(&d.input)?;
            let out = arg_reduce(l, ArgReduceOp::Min, x, d.axis, &d.out)?;
            l.define_reshaped(&d.out, out)
        }
        N::TopK(d) => {
            let x = l.input(&d.input)?;
            let values = top_k(l, x, d.axis, shape_of(&d.out)[d.axis], DType::I64)?.0;
            l.define(&d.out, values)
        }
        N::ArgTopK(d) => {
            let x = l.input(&d.input)?;
            let out = tensor_type(&d.out)?;
            let indices = top_k(l, x, d.axis, out.shape[d.axis], out.dtype)?.1;
            l.define(&d.out, indices)
        }
        N::MaxDimWithIndices(d) => extreme(l, ReduceOp::Max, ArgReduceOp::Max, d),
        N::MinDimWithIndices(d) => extreme(l, ReduceOp::Min, ArgReduceOp::Min, d),
        N::Clamp(d) => clamp(l, d),
        N::IntRandom(d) => random(l, d),
        N::Powi(d) => {
            let (a, b) = (l.input(&d.lhs)?, l.input(&d.rhs)?);
            // An integer exponent of a float base is converted first.
            let b = l.cast(b, l.dtype(a))?;
            let shape = shape_of(&d.out);
            let (a, b) = (l.broadcast_to(a, &shape)?, l.broadcast_to(b, &shape)?);
            let out = l.binary(BinaryOp::Pow, a, b)?;
            l.define(&d.out, out)
        }
        N::PowiScalar(d) => power(l, d),
        N::CumSum(d) => cumulative(l, ReduceOp::Sum, d),
        N::CumProd(d) => cumulative(l, ReduceOp::Prod, d),
        N::CumMin(d) => cumulative(l, ReduceOp::Min, d),
        N::CumMax(d) => cumulative(l, ReduceOp::Max, d),
    }
}

pub(super) fn unary(l: &mut Lower, op: UnaryOp, d: &UnaryOpIr) -> Done {
    let x = l.input(&d.input)?;
    let out = l.unary(op, x)?;
    l.define(&d.out, out)
}

pub(super) fn binary(l: &mut Lower, op: BinaryOp, d: &BinaryOpIr) -> Done {
    let (a, b) = (l.input(&d.lhs)?, l.input(&d.rhs)?);
    let shape = shape_of(&d.out);
    let (a, b) = (l.broadcast_to(a, &shape)?, l.broadcast_to(b, &shape)?);
    let out = l.binary(op, a, b)?;
    l.define(&d.out, out)
}

pub(super) fn scalar(l: &mut Lower, op: BinaryOp, d: &ScalarOpIr) -> Done {
    let a = l.input(&d.lhs)?;
    let b = l.scalar(d.rhs, l.dtype(a))?;
    let b = l.splat(b, &shape_of(&d.out))?;
    let out = l.binary(op, a, b)?;
    l.define(&d.out, out)
}

fn compare(l: &mut Lower, op: CompareOp, d: &BinaryOpIr) -> Done {
    let (a, b) = (l.input(&d.lhs)?, l.input(&d.rhs)?);
    let shape = shape_of(&d.out);
    let (a, b) = (l.broadcast_to(a, &shape)?, l.broadcast_to(b, &shape)?);
    let out = l.compare(op, a, b)?;
    l.define(&d.out, out)
}

fn compare_elem(l: &mut Lower, op: CompareOp, d: &ScalarOpIr) -> Done {
    let a = l.input(&d.lhs)?;
    let b = l.scalar(d.rhs, l.dtype(a))?;
    let b = l.splat(b, &shape_of(&d.out))?;
    let out = l.compare(op, a, b)?;
    l.define(&d.out, out)
}

/// `x` to a scalar power. burn-flex multiplies and divides for the exponents 0, 1, 2, -1, -2, and so does
/// this lowering, because the result differs from that of a general power in the last bit.
pub(super) fn power(l: &mut Lower, d: &ScalarOpIr) -> Done {
    let x = l.input(&d.lhs)?;
    let dtype = l.dtype(x);
    let shape = shape_of(&d.out);
    let exponent = l.scalar(d.rhs, dtype)?;
    let whole = match d.rhs {
        ScalarIr::Float(value) => (value.fract() == 0.0 && value.abs() < 4.0).then_some(value as i64),
        ScalarIr::Int(value) => Some(value),
        ScalarIr::UInt(value) => i64::try_from(value).ok(),
        ScalarIr::Bool(value) => Some(i64::from(value)),
    };
    let out = match whole.filter(|_| l.statics()) {
        Some(0) => l.full(1i64, dtype, &shape)?,
        Some(1) => x,
        Some(2) => l.binary(BinaryOp::Mul, x, x)?,
        Some(-1) if dtype.is_float() => l.unary(UnaryOp::Recip, x)?,
        Some(-2) if dtype.is_float() => {
            let square = l.binary(BinaryOp::Mul, x, x)?;
            l.unary(UnaryOp::Recip, square)?
        }
        _ => {
            let exponent = l.splat(exponent, &shape)?;
            l.binary(BinaryOp::Pow, x, exponent)?
        }
    };
    l.define(&d.out, out)
}

/// All axes, or one.
fn axes(l: &Lower, x: Value, axis: Option<usize>) -> Vec<usize> {
    match axis {
        Some(axis) => vec![axis],
        None => (0..l.graph.shape(x).rank()).collect(),
    }
}

/// A reduction of all dimensions to `[1]`, or of one to extent 1.
fn reduce(l: &mut Lower, op: ReduceOp, input: &TensorIr, axis: Option<usize>, out: &TensorIr) -> Done {
    let x = l.input(input)?;
    let axes = axes(l, x, axis);
    let reduced = l.reduce(op, x, &axes)?;
    l.define_reshaped(out, reduced)
}

/// The mean divides the sum: in f32 before rounding for half types, as 64-bit integers for integers.
fn mean(l: &mut Lower, input: &TensorIr, axis: Option<usize>, out: &TensorIr) -> Done {
    let x = l.input(input)?;
    let dtype = l.dtype(x);
    let axes = axes(l, x, axis);
    let count: usize = axes.iter().map(|&axis| l.graph.shape(x)[axis]).product();
    let wide = l.widen(x)?;
    let sum = l.reduce(ReduceOp::Sum, wide, &axes)?;
    let sum = if dtype.is_int() {
        l.cast(sum, DType::I64)?
    } else {
        sum
    };
    let mean = l.with_constant(BinaryOp::Div, sum, count as i64)?;
    let mean = l.cast(mean, dtype)?;
    l.define_reshaped(out, mean)
}

fn max_abs(l: &mut Lower, input: &TensorIr, axis: Option<usize>, out: &TensorIr) -> Done {
    let x = l.input(input)?;
    let magnitude = l.unary(UnaryOp::Abs, x)?;
    let axes = axes(l, x, axis);
    let max = l.reduce(ReduceOp::Max, magnitude, &axes)?;
    l.define_reshaped(out, max)
}

fn arg_reduce(l: &mut Lower, op: ArgReduceOp, x: Value, axis: usize, out: &TensorIr) -> Result<Value, Fault> {
    let dtype = tensor_type(out)?.dtype;
    l.add(Op::ArgReduce { op, axis, dtype }, &[x])
}

fn extreme(l: &mut Lower, op: ReduceOp, arg: ArgReduceOp, d: &ReduceDimWithIndicesOpIr) -> Done {
    let x = l.input(&d.tensor)?;
    let value = l.reduce(op, x, &[d.dim])?;
    l.define_reshaped(&d.out, value)?;
    let index = arg_reduce(l, arg, x, d.dim, &d.out_indices)?;
    l.define_reshaped(&d.out_indices, index)
}

fn top_k(l: &mut Lower, x: Value, axis: usize, k: usize, dtype: DType) -> Result<(Value, Value), Fault> {
    let results = l.add_many(Op::TopK { axis, k, dtype }, &[x])?;
    Ok((results[0], results[1]))
}

/// Integers are compared in 64 bits: a bound may be one that the type of the elements does not have.
fn clamp(l: &mut Lower, d: &ClampOpIr) -> Done {
    let x = l.input(&d.tensor)?;
    let (dtype, shape) = (l.dtype(x), l.shape(x));
    let wide = match dtype {
        DType::U64 => dtype,
        _ if dtype.is_int() => DType::I64,
        _ => dtype,
    };
    let min = l.scalar(d.min, wide)?;
    let max = l.scalar(d.max, wide)?;
    let (min, max) = (l.splat(min, &shape)?, l.splat(max, &shape)?);
    let x = l.cast(x, wide)?;
    let out = l.binary(BinaryOp::Max, x, min)?;
    let out = l.binary(BinaryOp::Min, out, max)?;
    let out = l.cast(out, dtype)?;
    l.define(&d.out, out)
}

fn cumulative(l: &mut Lower, op: ReduceOp, d: &DimOpIr) -> Done {
    let x = l.input(&d.input)?;
    let out = l.add(Op::Cumulative { op, axis: d.axis }, &[x])?;
    l.define(&d.out, out)
}

/// The steps that [`crate::eager`] takes for each distribution, as primitives.
pub(super) fn random(l: &mut Lower, d: &RandomOpIr) -> Done {
    let ty = tensor_type(&d.out)?;
    let position = l.random_position();
    let draw = |l: &mut Lower, kind, dtype, bounds: &[Value]| {
        let operands: Vec<Value> = position.iter().chain(bounds).copied().collect();
        let shape = ty.shape.clone();
        l.add(Op::Random { kind, dtype, shape }, &operands)
    };
    let float = ty.dtype.is_float();
    let out = match d.distribution {
        Distribution::Default if float => draw(l, RandomKind::Uniform, ty.dtype, &[])?,
        Distribution::Default => {
            let (low, high) = full_range(ty.dtype);
            let bounds = [l.constant(low, DType::I64)?, l.constant(high, DType::I64)?];
            draw(l, RandomKind::IntRange, ty.dtype, &bounds)?
        }
        Distribution::Uniform(low, high) if float => {
            let low = l.scalar(ScalarIr::Float(low), ty.dtype)?;
            let high = l.scalar(ScalarIr::Float(high), ty.dtype)?;
            let span = l.binary(BinaryOp::Sub, high, low)?;
            let x = draw(l, RandomKind::Uniform, ty.dtype, &[])?;
            affine(l, x, span, low)?
        }
        Distribution::Uniform(low, high) => {
            let low = l.scalar(ScalarIr::Float(low), DType::I64)?;
            let high = l.scalar(ScalarIr::Float(high), DType::I64)?;
            draw(l, RandomKind::IntRange, ty.dtype, &[low, high])?
        }
        Distribution::Normal(mean, deviation) => {
            let dtype = if float { ty.dtype } else { DType::F64 };
            let mean = l.scalar(ScalarIr::Float(mean), dtype)?;
            let deviation = l.scalar(ScalarIr::Float(deviation), dtype)?;
            let x = draw(l, RandomKind::Normal, dtype, &[])?;
            let x = affine(l, x, deviation, mean)?;
            l.cast(x, ty.dtype)?
        }
        Distribution::Bernoulli(probability) => {
            let trial = trial_dtype(ty.dtype);
            let threshold = l.scalar(ScalarIr::Float(probability), trial)?;
            let threshold = l.splat(threshold, &ty.shape)?;
            let x = draw(l, RandomKind::Uniform, trial, &[])?;
            let hit = l.compare(CompareOp::Lt, x, threshold)?;
            l.cast(hit, ty.dtype)?
        }
    };
    l.define(&d.out, out)
}

/// `x * scale + shift`.
fn affine(l: &mut Lower, x: Value, scale: Value, shift: Value) -> Result<Value, Fault> {
    let shape = l.shape(x);
    let (scale, shift) = (l.splat(scale, &shape)?, l.splat(shift, &shape)?);
    let x = l.binary(BinaryOp::Mul, x, scale)?;
    l.binary(BinaryOp::Add, x, shift)
}
