//! Lowering of operations of one tensor kind alone: functions and products of floats, bits of integers,
//! logic.

use burn_ir::{
    BoolOperationIr, CastOpIr, CrossOpIr, FloatOperationIr, IntOperationIr, MatmulOpIr, OperationIr,
};
use kiln_graph::op::{BinaryOp, Dims, DotDims, UnaryOp};
use kiln_graph::{Op, Shape, Value};

use super::external;
use super::lower::{Done, Fault, Lower, shape_of, tensor_type};
use super::numeric::{binary, power, random, scalar, unary};

pub(super) fn lower_float(l: &mut Lower, operation: &OperationIr, op: &FloatOperationIr) -> Done {
    use FloatOperationIr as F;
    match op {
        F::Exp(d) => unary(l, UnaryOp::Exp, d),
        F::Log(d) => unary(l, UnaryOp::Log, d),
        F::Log1p(d) => unary(l, UnaryOp::Log1p, d),
        F::Erf(d) => unary(l, UnaryOp::Erf, d),
        F::PowfScalar(d) => power(l, d),
        F::Powf(d) => binary(l, BinaryOp::Pow, d),
        F::Sqrt(d) => unary(l, UnaryOp::Sqrt, d),
        F::Cos(d) => unary(l, UnaryOp::Cos, d),
        F::Cosh(d) => unary(l, UnaryOp::Cosh, d),
        F::Sin(d) => unary(l, UnaryOp::Sin, d),
        F::Sinh(d) => unary(l, UnaryOp::Sinh, d),
        F::Tan(d) => unary(l, UnaryOp::Tan, d),
        F::Tanh(d) => unary(l, UnaryOp::Tanh, d),
        F::ArcCos(d) => unary(l, UnaryOp::Acos, d),
        F::ArcCosh(d) => unary(l, UnaryOp::Acosh, d),
        F::ArcSin(d) => unary(l, UnaryOp::Asin, d),
        F::ArcSinh(d) => unary(l, UnaryOp::Asinh, d),
        F::ArcTan(d) => unary(l, UnaryOp::Atan, d),
        F::ArcTanh(d) => unary(l, UnaryOp::Atanh, d),
        F::ArcTan2(d) => binary(l, BinaryOp::Atan2, d),
        F::Round(d) => unary(l, UnaryOp::Round, d),
        F::Floor(d) => unary(l, UnaryOp::Floor, d),
        F::Ceil(d) => unary(l, UnaryOp::Ceil, d),
        F::Trunc(d) => unary(l, UnaryOp::Trunc, d),
        F::Recip(d) => unary(l, UnaryOp::Recip, d),
        F::IsNan(d) => unary(l, UnaryOp::IsNan, d),
        F::IsInf(d) => unary(l, UnaryOp::IsInf, d),
        F::IntoInt(d) => cast(l, d),
        F::Matmul(d) => matmul(l, d),
        F::Cross(d) => cross(l, d),
        F::Random(d) => random(l, d),
        F::GridSample2d(_) => external::keep(l, operation),
        F::Quantize(_) | F::Dequantize(_) => Err(Fault::Unsupported(
            "quantized tensors have no place in a graph; keep the tensor in a float type".into(),
        )),
    }
}

pub(super) fn lower_int(l: &mut Lower, op: &IntOperationIr) -> Done {
    use IntOperationIr as I;
    match op {
        I::IntoFloat(d) => cast(l, d),
        I::Matmul(d) => matmul(l, d),
        I::BitwiseAnd(d) => binary(l, BinaryOp::And, d),
        I::BitwiseAndScalar(d) => scalar(l, BinaryOp::And, d),
        I::BitwiseOr(d) => binary(l, BinaryOp::Or, d),
        I::BitwiseOrScalar(d) => scalar(l, BinaryOp::Or, d),
        I::BitwiseXor(d) => binary(l, BinaryOp::Xor, d),
        I::BitwiseXorScalar(d) => scalar(l, BinaryOp::Xor, d),
        I::BitwiseNot(d) => unary(l, UnaryOp::Not, d),
        I::BitwiseLeftShift(d) => binary(l, BinaryOp::Shl, d),
        I::BitwiseLeftShiftScalar(d) => scalar(l, BinaryOp::Shl, d),
        I::BitwiseRightShift(d) => binary(l, BinaryOp::Shr, d),
        I::BitwiseRightShiftScalar(d) => scalar(l, BinaryOp::Shr, d),
    }
}

pub(super) fn lower_bool(l: &mut Lower, op: &BoolOperationIr) -> Done {
    use BoolOperationIr as B;
    match op {
        B::IntoFloat(d) | B::IntoInt(d) => cast(l, d),
        B::Not(d) => unary(l, UnaryOp::Not, d),
        B::And(d) => binary(l, BinaryOp::And, d),
        B::Or(d) => binary(l, BinaryOp::Or, d),
    }
}

fn cast(l: &mut Lower, d: &CastOpIr) -> Done {
    let x = l.input(&d.input)?;
    let out = l.cast(x, tensor_type(&d.out)?.dtype)?;
    l.define(&d.out, out)
}

fn matmul(l: &mut Lower, d: &MatmulOpIr) -> Done {
    let (a, b) = (l.input(&d.lhs)?, l.input(&d.rhs)?);
    let out = product(l, a, b, &shape_of(&d.out))?;
    l.define(&d.out, out)
}

/// `[.., m, k] x [.., k, n] -> out`, batch dimensions broadcast. One matrix on the right serves all batches
/// without being repeated.
pub(super) fn product(l: &mut Lower, a: Value, b: Value, out: &Shape) -> Result<Value, Fault> {
    let batch = out.rank() - 2;
    let (m, n) = (out[batch], out[batch + 1]);
    let (of_a, of_b) = (l.shape(a), l.shape(b));
    let k = of_a[of_a.rank() - 1];
    if of_b.numel() == k * n && of_a.rank() == out.rank() && of_a[..batch] == out[..batch] {
        let b = l.reshape(b, [k, n])?;
        let dims = DotDims {
            a_contract: Dims::from_slice(&[batch + 1]),
            b_contract: Dims::from_slice(&[0]),
            ..DotDims::default()
        };
        return l.dot(dims, a, b);
    }
    let with = |rows, columns| Shape::new(out[..batch].iter().copied().chain([rows, columns]));
    let a = l.broadcast_to(a, &with(m, k))?;
    let b = l.broadcast_to(b, &with(k, n))?;
    l.dot(DotDims::matmul(batch), a, b)
}

/// Cross product of vectors of three along a dimension.
fn cross(l: &mut Lower, d: &CrossOpIr) -> Done {
    let (a, b) = (l.input(&d.lhs)?, l.input(&d.rhs)?);
    let shape = shape_of(&d.out);
    let (a, b) = (l.broadcast_to(a, &shape)?, l.broadcast_to(b, &shape)?);
    let mut components = Vec::with_capacity(3);
    for i in 0..3 {
        let (j, k) = ((i + 1) % 3, (i + 2) % 3);
        let (aj, ak) = (l.narrow(a, d.dim, j, j + 1)?, l.narrow(a, d.dim, k, k + 1)?);
        let (bj, bk) = (l.narrow(b, d.dim, j, j + 1)?, l.narrow(b, d.dim, k, k + 1)?);
        let left = l.binary(BinaryOp::Mul, aj, bk)?;
        let right = l.binary(BinaryOp::Mul, ak, bj)?;
        components.push(l.binary(BinaryOp::Sub, left, right)?);
    }
    let out = l.add(Op::Concat { axis: d.dim }, &components)?;
    l.define(&d.out, out)
}
