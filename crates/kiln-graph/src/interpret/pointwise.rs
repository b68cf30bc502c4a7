//! Functions of single elements.

use super::array::{Array, Data, Number, int_range, map_data2, wrap};
use crate::op::{BinaryOp, CompareOp, UnaryOp};
use crate::rounding::{of_integer, round};
use crate::{DType, TensorType};

pub(super) fn unary(op: UnaryOp, x: &Array, ty: &TensorType) -> Array {
    let data = match &x.data {
        Data::Float(values) => match op {
            UnaryOp::IsNan => Data::Int(values.iter().map(|x| i128::from(x.is_nan())).collect()),
            UnaryOp::IsInf => Data::Int(values.iter().map(|x| i128::from(x.is_infinite())).collect()),
            _ => Data::Float(values.iter().map(|&x| float_unary(op, x)).collect()),
        },
        Data::Int(values) => Data::Int(values.iter().map(|&v| int_unary(op, v, x.ty.dtype)).collect()),
    };
    Array::new(ty.clone(), data)
}

fn float_unary(op: UnaryOp, x: f64) -> f64 {
    match op {
        UnaryOp::Neg => -x,
        UnaryOp::Abs => x.abs(),
        UnaryOp::Sign => match x {
            _ if x > 0.0 => 1.0,
            _ if x < 0.0 => -1.0,
            _ if x == 0.0 => 0.0,
            nan => nan,
        },
        UnaryOp::Exp => x.exp(),
        UnaryOp::Expm1 => x.exp_m1(),
        UnaryOp::Log => x.ln(),
        UnaryOp::Log1p => x.ln_1p(),
        UnaryOp::Sqrt => x.sqrt(),
        UnaryOp::Rsqrt => 1.0 / x.sqrt(),
        UnaryOp::Recip => 1.0 / x,
        UnaryOp::Sin => x.sin(),
        UnaryOp::Cos => x.cos(),
        UnaryOp::Tan => x.tan(),
        UnaryOp::Asin => x.asin(),
        UnaryOp::Acos => x.acos(),
        UnaryOp::Atan => x.atan(),
        UnaryOp::Sinh => x.sinh(),
        UnaryOp::Cosh => x.cosh(),
        UnaryOp::Tanh => x.tanh(),
        UnaryOp::Asinh => libm::asinh(x),
        // libm's takes some numbers below 1 for numbers above.
        UnaryOp::Acosh if x < 1.0 => f64::NAN,
        UnaryOp::Acosh => libm::acosh(x),
        UnaryOp::Atanh => libm::atanh(x),
        UnaryOp::Erf => libm::erf(x),
        UnaryOp::Sigmoid => 1.0 / (1.0 + (-x).exp()),
        UnaryOp::Floor => x.floor(),
        UnaryOp::Ceil => x.ceil(),
        UnaryOp::Round => x.round_ties_even(),
        UnaryOp::Trunc => x.trunc(),
        UnaryOp::Not | UnaryOp::IsNan | UnaryOp::IsInf => unreachable!("{op} of a float is no float"),
    }
}

fn int_unary(op: UnaryOp, x: i128, dtype: DType) -> i128 {
    match op {
        UnaryOp::Neg => -x,
        UnaryOp::Abs => x.abs(),
        UnaryOp::Sign => x.signum(),
        UnaryOp::Not if dtype == DType::Bool => 1 - x,
        UnaryOp::Not => !x,
        _ => unreachable!("{op} takes floats"),
    }
}

pub(super) fn binary(op: BinaryOp, a: &Array, b: &Array) -> Array {
    let dtype = a.ty.dtype;
    let data = match (&a.data, &b.data) {
        (Data::Float(x), Data::Float(y)) => {
            Data::Float(x.iter().zip(y).map(|(&x, &y)| float_binary(op, x, y)).collect())
        }
        (Data::Int(x), Data::Int(y)) => Data::Int(
            x.iter()
                .zip(y)
                .map(|(&x, &y)| int_binary(op, x, y, dtype))
                .collect(),
        ),
        _ => unreachable!("typing gives both operands one dtype"),
    };
    Array::new(a.ty.clone(), data)
}

fn float_binary(op: BinaryOp, a: f64, b: f64) -> f64 {
    match op {
        BinaryOp::Add => a + b,
        BinaryOp::Sub => a - b,
        BinaryOp::Mul => a * b,
        BinaryOp::Div => a / b,
        BinaryOp::Rem => match a % b {
            rest if rest != 0.0 && (rest < 0.0) != (b < 0.0) => rest + b,
            rest => rest,
        },
        BinaryOp::Pow => a.powf(b),
        BinaryOp::Atan2 => a.atan2(b),
        BinaryOp::Max => Number::max(a, b),
        BinaryOp::Min => Number::min(a, b),
        BinaryOp::And | BinaryOp::Or | BinaryOp::Xor | BinaryOp::Shl | BinaryOp::Shr => {
            unreachable!("{op} takes no floats")
        }
    }
}

fn int_binary(op: BinaryOp, a: i128, b: i128, dtype: DType) -> i128 {
    let bits = 8 * dtype.size() as i128;
    match op {
        BinaryOp::Add => a.wrapping_add(b),
        BinaryOp::Sub => a.wrapping_sub(b),
        BinaryOp::Mul => a.wrapping_mul(b),
        BinaryOp::Div if b == 0 => 0,
        BinaryOp::Div => a / b,
        BinaryOp::Rem if b == 0 => 0,
        BinaryOp::Rem => {
            let rest = a % b;
            if rest != 0 && (rest < 0) != (b < 0) {
                rest + b
            } else {
                rest
            }
        }
        BinaryOp::Pow => int_pow(a, b, dtype),
        BinaryOp::Max => Number::max(a, b),
        BinaryOp::Min => Number::min(a, b),
        BinaryOp::And => a & b,
        BinaryOp::Or => a | b,
        BinaryOp::Xor => a ^ b,
        BinaryOp::Shl if (0..bits).contains(&b) => a << b,
        BinaryOp::Shl => 0,
        BinaryOp::Shr if (0..bits).contains(&b) => a >> b,
        BinaryOp::Shr => -i128::from(a < 0),
        BinaryOp::Atan2 => unreachable!("{op} takes floats"),
    }
}

/// Square and multiply, wrapping at every step.
fn int_pow(base: i128, exponent: i128, dtype: DType) -> i128 {
    if exponent < 0 {
        return match base {
            1 => 1,
            -1 if exponent % 2 == 0 => 1,
            -1 => -1,
            _ => 0,
        };
    }
    let (mut square, mut left, mut power) = (base, exponent, 1i128);
    while left > 0 {
        if left & 1 == 1 {
            power = wrap(dtype, power.wrapping_mul(square));
        }
        square = wrap(dtype, square.wrapping_mul(square));
        left >>= 1;
    }
    power
}

pub(super) fn compare(op: CompareOp, a: &Array, b: &Array) -> Array {
    fn of<T: PartialOrd>(op: CompareOp, a: &[T], b: &[T]) -> Vec<i128> {
        let holds = |(a, b): (&T, &T)| match op {
            CompareOp::Eq => a == b,
            CompareOp::Ne => a != b,
            CompareOp::Lt => a < b,
            CompareOp::Le => a <= b,
            CompareOp::Gt => a > b,
            CompareOp::Ge => a >= b,
        };
        a.iter().zip(b).map(|pair| i128::from(holds(pair))).collect()
    }
    let values = match (&a.data, &b.data) {
        (Data::Float(a), Data::Float(b)) => of(op, a, b),
        (Data::Int(a), Data::Int(b)) => of(op, a, b),
        _ => unreachable!("typing gives both operands one dtype"),
    };
    Array::from_ints(DType::Bool, a.ty.shape.clone(), values)
}

pub(super) fn select(condition: &Array, a: &Array, b: &Array) -> Array {
    let choose = condition.ints().iter();
    let data = map_data2!(a.data, b.data, (a, b) => {
        choose.zip(a.iter().zip(b)).map(|(&c, (&a, &b))| if c != 0 { a } else { b }).collect()
    });
    Array::new(a.ty.clone(), data)
}

pub(super) fn cast(x: &Array, dtype: DType) -> Array {
    let narrows = dtype.size() < x.ty.dtype.size() || (dtype.size() == 2 && dtype != x.ty.dtype);
    let (low, high) = int_range(if dtype.is_float() { DType::Bool } else { dtype });
    let data = match &x.data {
        Data::Float(values) if dtype.is_float() => Data::Float(
            values
                .iter()
                .map(|&x| if narrows { round(dtype, x) } else { x })
                .collect(),
        ),
        Data::Float(values) if dtype == DType::Bool => {
            Data::Int(values.iter().map(|&x| i128::from(x != 0.0)).collect())
        }
        // `as` truncates, saturates and takes NaN to 0.
        Data::Float(values) => Data::Int(values.iter().map(|&x| (x as i128).clamp(low, high)).collect()),
        // Directly to f32: by way of f64 some integers would round twice.
        Data::Int(values) if dtype == DType::F32 => {
            Data::Float(values.iter().map(|&x| f64::from(x as f32)).collect())
        }
        Data::Int(values) if dtype == DType::F64 => Data::Float(values.iter().map(|&x| x as f64).collect()),
        Data::Int(values) if dtype.is_float() => {
            let rounded = values.iter().map(|&x| round(dtype, of_integer(x)));
            Data::Float(rounded.collect())
        }
        Data::Int(values) => Data::Int(values.clone()),
    };
    Array::new(
        TensorType {
            dtype,
            shape: x.ty.shape.clone(),
        },
        data,
    )
}
