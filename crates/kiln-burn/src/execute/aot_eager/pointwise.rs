//! Pointwise primitives on burn-flex.
//!
//! Float arithmetic, comparisons and functions are burn-flex's. Integer arithmetic is done here: the
//! primitives wrap and divide by zero where burn-flex panics. So are the few float functions burn-flex lacks.

use burn_backend::Scalar as BurnScalar;
use burn_backend::ops::{BoolTensorOps, FloatTensorOps, IntTensorOps};
use burn_backend::{BoolStore, FloatDType, IntDType};
use burn_flex::{Flex, FlexTensor, Layout};
use burn_std::Bytes;
use half::{bf16, f16};
use kiln_graph::op::{BinaryOp, CompareOp, UnaryOp};
use kiln_graph::{DType, Graph, NodeData, Op, Shape, rounding};
use smallvec::{SmallVec, smallvec};

use crate::eager::cast::float_cast;

use super::{Argument, ExecuteError, Results, convert, fallback, read_integers};

const BOOL: BoolStore = BoolStore::Native;

/// Unary functions, selection and conversion.
pub(super) fn other(
    graph: &Graph,
    data: &NodeData,
    operands: SmallVec<[FlexTensor; 3]>,
) -> Result<Results, ExecuteError> {
    let dtype = graph.dtype(data.inputs[0]);
    let mut operands = operands.into_iter();
    let (first, second, third) = (operands.next(), operands.next(), operands.next());
    let result = match (&data.op, first, second, third) {
        (Op::Unary(op), Some(x), ..) => match unary(*op, x.clone(), dtype) {
            Some(result) => result,
            None => return fallback(graph, data, &[x]),
        },
        (Op::Select, Some(condition), Some(a), Some(b)) => match graph.dtype(data.inputs[1]) {
            DType::Bool => Flex::bool_mask_where(b, condition, a),
            dtype if dtype.is_float() => Flex::float_mask_where(b, condition, a),
            _ => Flex::int_mask_where(b, condition, a),
        },
        (Op::Cast(to), Some(x), ..) => cast(x, dtype, *to),
        _ => return Err(super::failure(data, "an operand is missing")),
    };
    Ok(smallvec![result])
}

fn unary(op: UnaryOp, x: FlexTensor, dtype: DType) -> Option<FlexTensor> {
    if !dtype.is_float() {
        return match (op, dtype) {
            (UnaryOp::Not, DType::Bool) => Some(Flex::bool_not(x)),
            (UnaryOp::Not, _) => Some(Flex::bitwise_not(x)),
            (UnaryOp::Neg, _) if dtype.is_signed_int() => Some(Flex::int_neg(x)),
            (UnaryOp::Abs, _) if dtype.is_signed_int() => Some(Flex::int_abs(x)),
            (UnaryOp::Sign, _) if dtype.is_signed_int() => Some(Flex::int_sign(x)),
            _ => None,
        };
    }
    Some(match op {
        UnaryOp::Neg => Flex::float_neg(x),
        UnaryOp::Abs => Flex::float_abs(x),
        UnaryOp::Sign => Flex::float_sign(x),
        UnaryOp::Exp => Flex::float_exp(x),
        UnaryOp::Log => Flex::float_log(x),
        UnaryOp::Log1p => Flex::float_log1p(x),
        UnaryOp::Sqrt => Flex::float_sqrt(x),
        UnaryOp::Recip => Flex::float_recip(x),
        UnaryOp::Sin => Flex::float_sin(x),
        UnaryOp::Cos => Flex::float_cos(x),
        UnaryOp::Tan => Flex::float_tan(x),
        UnaryOp::Asin => Flex::float_asin(x),
        UnaryOp::Acos => Flex::float_acos(x),
        UnaryOp::Atan => Flex::float_atan(x),
        UnaryOp::Sinh => Flex::float_sinh(x),
        UnaryOp::Cosh => Flex::float_cosh(x),
        UnaryOp::Tanh => Flex::float_tanh(x),
        UnaryOp::Asinh => Flex::float_asinh(x),
        UnaryOp::Acosh => Flex::float_acosh(x),
        UnaryOp::Atanh => Flex::float_atanh(x),
        UnaryOp::Erf => Flex::float_erf(x),
        UnaryOp::Floor => Flex::float_floor(x),
        UnaryOp::Ceil => Flex::float_ceil(x),
        UnaryOp::Round => Flex::float_round(x),
        UnaryOp::Trunc => Flex::float_trunc(x),
        UnaryOp::IsNan => Flex::float_is_nan(x, BOOL),
        UnaryOp::IsInf => Flex::float_is_inf(x, BOOL),
        UnaryOp::Expm1 | UnaryOp::Rsqrt | UnaryOp::Sigmoid | UnaryOp::Not => return None,
    })
}

/// Converts between any two element types.
pub(super) fn cast(x: FlexTensor, from: DType, to: DType) -> FlexTensor {
    let burn = convert::burn_dtype(to);
    match (from, to) {
        _ if from == to => x,
        (DType::Bool, _) if to.is_float() => Flex::bool_into_float(x, FloatDType::from(burn)),
        (DType::Bool, _) => Flex::bool_into_int(x, IntDType::from(burn)),
        (_, DType::Bool) if from.is_float() => Flex::float_not_equal_elem(x, BurnScalar::Float(0.0), BOOL),
        (_, DType::Bool) => Flex::int_not_equal_elem(x, BurnScalar::Int(0), BOOL),
        _ if from.is_float() && to.is_float() => float_cast(x, FloatDType::from(burn)),
        _ if from.is_float() => Flex::float_into_int(x, IntDType::from(burn)),
        _ if to.is_float() => Flex::int_into_float(x, FloatDType::from(burn)),
        _ => Flex::int_cast(x, IntDType::from(burn)),
    }
}

/// Binary functions and comparisons.
pub(super) fn binary(
    graph: &Graph,
    data: &NodeData,
    arguments: SmallVec<[Argument; 3]>,
    shape: &Shape,
) -> Result<Results, ExecuteError> {
    let dtype = graph.dtype(data.inputs[0]);
    let mut arguments = arguments.into_iter();
    let (Some(a), Some(b)) = (arguments.next(), arguments.next()) else {
        return Err(super::failure(data, "an operand is missing"));
    };
    let result = match data.op {
        Op::Binary(op) if dtype.is_float() => float_binary(op, a, b, dtype, shape),
        Op::Binary(op) if dtype == DType::Bool => {
            let (a, b) = (a.into_tensor(shape), b.into_tensor(shape));
            match op {
                BinaryOp::And => Flex::bool_and(a, b),
                BinaryOp::Or => Flex::bool_or(a, b),
                BinaryOp::Xor => Flex::bool_xor(a, b),
                _ => return fallback(graph, data, &[a, b]),
            }
        }
        Op::Binary(op) => int_binary(op, &a.into_tensor(shape), &b.into_tensor(shape), dtype, shape),
        Op::Compare(op) => compare(op, a, b, dtype, shape),
        _ => return Err(super::failure(data, "it is no binary function")),
    };
    Ok(smallvec![result])
}

/// The only element of a rank-0 float tensor.
fn read_float(tensor: &FlexTensor) -> f64 {
    let host = convert::to_host(tensor).map(|tensor| tensor.to_f64s());
    host.and_then(|values| values.first().copied())
        .unwrap_or(f64::NAN)
}

fn float_binary(op: BinaryOp, a: Argument, b: Argument, dtype: DType, shape: &Shape) -> FlexTensor {
    let (a, b) = match (op, a, b) {
        // Addition and multiplication commute: the scalar goes to the right.
        (BinaryOp::Add | BinaryOp::Mul, Argument::Splat(a), Argument::Tensor(b)) => {
            (Argument::Tensor(b), Argument::Splat(a))
        }
        (_, a, b) => (a, b),
    };
    let (a, b) = match (op, a, b) {
        (
            BinaryOp::Add | BinaryOp::Sub | BinaryOp::Mul | BinaryOp::Div | BinaryOp::Rem,
            Argument::Tensor(a),
            Argument::Splat(b),
        ) => {
            let b = BurnScalar::Float(read_float(&b));
            return match op {
                BinaryOp::Add => Flex::float_add_scalar(a, b),
                BinaryOp::Sub => Flex::float_sub_scalar(a, b),
                BinaryOp::Mul => Flex::float_mul_scalar(a, b),
                BinaryOp::Div => Flex::float_div_scalar(a, b),
                _ => Flex::float_remainder_scalar(a, b),
            };
        }
        (_, a, b) => (a.into_tensor(shape), b.into_tensor(shape)),
    };
    match op {
        BinaryOp::Add => Flex::float_add(a, b),
        BinaryOp::Sub => Flex::float_sub(a, b),
        BinaryOp::Mul => Flex::float_mul(a, b),
        BinaryOp::Div => Flex::float_div(a, b),
        BinaryOp::Rem => Flex::float_remainder(a, b),
        BinaryOp::Pow => Flex::float_powf(a, b),
        BinaryOp::Atan2 => Flex::float_atan2(a, b),
        BinaryOp::Max => float_map(
            &a,
            &b,
            dtype,
            shape,
            |x, y| {
                if x.is_nan() || x > y { x } else { y }
            },
        ),
        BinaryOp::Min => float_map(
            &a,
            &b,
            dtype,
            shape,
            |x, y| {
                if x.is_nan() || x < y { x } else { y }
            },
        ),
        // The graph's typing admits none of these for floats.
        BinaryOp::And | BinaryOp::Or | BinaryOp::Xor | BinaryOp::Shl | BinaryOp::Shr => a,
    }
}

/// `f` of each pair; exact functions only, as every type goes through f64.
fn float_map(
    a: &FlexTensor,
    b: &FlexTensor,
    dtype: DType,
    shape: &Shape,
    f: impl Fn(f64, f64) -> f64,
) -> FlexTensor {
    let (a, b) = (a.to_contiguous(), b.to_contiguous());
    let bytes = match dtype {
        DType::F64 => Bytes::from_elems(zip(a.storage::<f64>(), b.storage::<f64>(), f)),
        DType::F32 => Bytes::from_elems(zip(a.storage::<f32>(), b.storage::<f32>(), |x, y| {
            f(f64::from(x), f64::from(y)) as f32
        })),
        DType::F16 => Bytes::from_elems(zip(a.storage::<f16>(), b.storage::<f16>(), |x, y| {
            rounding::to_f16(f(x.to_f64(), y.to_f64()))
        })),
        _ => Bytes::from_elems(zip(a.storage::<bf16>(), b.storage::<bf16>(), |x, y| {
            rounding::to_bf16(f(x.to_f64(), y.to_f64()))
        })),
    };
    make(bytes, dtype, shape)
}

fn zip<T: Copy, R>(a: &[T], b: &[T], f: impl Fn(T, T) -> R) -> Vec<R> {
    a.iter().zip(b).map(|(&x, &y)| f(x, y)).collect()
}

fn make(bytes: Bytes, dtype: DType, shape: &Shape) -> FlexTensor {
    FlexTensor::new(
        bytes,
        Layout::contiguous(convert::burn_shape(shape)),
        convert::burn_dtype(dtype),
    )
}

/// Integer arithmetic by the primitives' rules: in 128 bits, of which the low ones are kept.
fn int_binary(op: BinaryOp, a: &FlexTensor, b: &FlexTensor, dtype: DType, shape: &Shape) -> FlexTensor {
    let bits = dtype.size() as i128 * 8;
    let values = zip(&read_integers(a), &read_integers(b), |x, y| match op {
        BinaryOp::Add => x.wrapping_add(y),
        BinaryOp::Sub => x.wrapping_sub(y),
        BinaryOp::Mul => x.wrapping_mul(y),
        BinaryOp::Div => x.checked_div(y).unwrap_or(0),
        BinaryOp::Rem => x.checked_rem(y).map_or(0, |rest| {
            if rest != 0 && (rest < 0) != (y < 0) {
                rest + y
            } else {
                rest
            }
        }),
        BinaryOp::Pow => int_power(x, y),
        BinaryOp::Max => x.max(y),
        BinaryOp::Min => x.min(y),
        BinaryOp::And => x & y,
        BinaryOp::Or => x | y,
        BinaryOp::Xor => x ^ y,
        BinaryOp::Shl if (0..bits).contains(&y) => x << y,
        BinaryOp::Shr if (0..bits).contains(&y) => x >> y,
        BinaryOp::Shr if x < 0 && y >= bits => -1,
        BinaryOp::Shl | BinaryOp::Shr => 0,
        // The graph's typing admits it for floats only.
        BinaryOp::Atan2 => 0,
    });
    write_integers(&values, dtype, shape)
}

/// Wrapping power; negative exponents give 0 unless the base is 1 or -1.
fn int_power(base: i128, exponent: i128) -> i128 {
    match (base, exponent) {
        (1, _) => 1,
        (-1, _) if exponent % 2 == 0 => 1,
        (-1, _) => -1,
        _ if exponent < 0 => 0,
        (0, _) if exponent > 0 => 0,
        _ => {
            let (mut result, mut square, mut left) = (1i128, base, exponent);
            while left > 0 {
                if left & 1 == 1 {
                    result = result.wrapping_mul(square);
                }
                square = square.wrapping_mul(square);
                left >>= 1;
            }
            result
        }
    }
}

/// An integer tensor with the low bits of `values`.
pub(super) fn write_integers(values: &[i128], dtype: DType, shape: &Shape) -> FlexTensor {
    macro_rules! narrow {
        ($ty:ty) => {
            Bytes::from_elems(values.iter().map(|&value| value as $ty).collect::<Vec<_>>())
        };
    }
    let bytes = match dtype {
        DType::I64 => narrow!(i64),
        DType::I32 => narrow!(i32),
        DType::I16 => narrow!(i16),
        DType::I8 => narrow!(i8),
        DType::U64 => narrow!(u64),
        DType::U32 => narrow!(u32),
        DType::U16 => narrow!(u16),
        _ => narrow!(u8),
    };
    make(bytes, dtype, shape)
}

fn compare(op: CompareOp, a: Argument, b: Argument, dtype: DType, shape: &Shape) -> FlexTensor {
    let (a, b) = match (a, b) {
        (Argument::Tensor(a), Argument::Splat(b)) if dtype.is_float() => {
            let b = BurnScalar::Float(read_float(&b));
            return match op {
                CompareOp::Eq => Flex::float_equal_elem(a, b, BOOL),
                CompareOp::Ne => Flex::float_not_equal_elem(a, b, BOOL),
                CompareOp::Lt => Flex::float_lower_elem(a, b, BOOL),
                CompareOp::Le => Flex::float_lower_equal_elem(a, b, BOOL),
                CompareOp::Gt => Flex::float_greater_elem(a, b, BOOL),
                CompareOp::Ge => Flex::float_greater_equal_elem(a, b, BOOL),
            };
        }
        (a, b) => (a.into_tensor(shape), b.into_tensor(shape)),
    };
    match (op, dtype) {
        (CompareOp::Eq, DType::Bool) => Flex::bool_equal(a, b),
        (_, DType::Bool) => Flex::bool_not_equal(a, b),
        (CompareOp::Eq, _) if dtype.is_float() => Flex::float_equal(a, b, BOOL),
        (CompareOp::Ne, _) if dtype.is_float() => Flex::float_not_equal(a, b, BOOL),
        (CompareOp::Lt, _) if dtype.is_float() => Flex::float_lower(a, b, BOOL),
        (CompareOp::Le, _) if dtype.is_float() => Flex::float_lower_equal(a, b, BOOL),
        (CompareOp::Gt, _) if dtype.is_float() => Flex::float_greater(a, b, BOOL),
        (CompareOp::Ge, _) if dtype.is_float() => Flex::float_greater_equal(a, b, BOOL),
        (CompareOp::Eq, _) => Flex::int_equal(a, b, BOOL),
        (CompareOp::Ne, _) => Flex::int_not_equal(a, b, BOOL),
        (CompareOp::Lt, _) => Flex::int_lower(a, b, BOOL),
        (CompareOp::Le, _) => Flex::int_lower_equal(a, b, BOOL),
        (CompareOp::Gt, _) => Flex::int_greater(a, b, BOOL),
        (CompareOp::Ge, _) => Flex::int_greater_equal(a, b, BOOL),
    }
}
