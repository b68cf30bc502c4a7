//! The C text of pointwise operations, on one element or on a vector of them.
//!
//! Registers hold [`DType::compute`] types. A scalar truth value is an `int` (0 or 1), a vector of them a
//! mask of 32-bit lanes (0 or -1). Operations that C has are written with C's operators; the others are the
//! functions of `kiln_nest.h`.

use kiln_graph::op::{BinaryOp, CompareOp, ReduceOp, UnaryOp};
use kiln_graph::{DType, HostTensor, Scalar};

/// C type of one element in memory.
pub fn memory_type(dtype: DType) -> &'static str {
    match dtype {
        DType::F64 => "double",
        DType::F32 => "float",
        DType::F16 | DType::BF16 | DType::U16 => "uint16_t",
        DType::I64 => "int64_t",
        DType::I32 => "int32_t",
        DType::I16 => "int16_t",
        DType::I8 => "int8_t",
        DType::U64 => "uint64_t",
        DType::U32 => "uint32_t",
        DType::U8 | DType::Bool => "uint8_t",
    }
}

/// C type of a register.
pub fn register_type(dtype: DType, vector: bool) -> String {
    match (dtype.compute(), vector) {
        (DType::Bool, true) => "v_i32".into(),
        (dtype, true) => format!("v_{dtype}"),
        (DType::Bool, false) => "int".into(),
        (dtype, false) => memory_type(dtype).into(),
    }
}

/// The literal of a value rounded to `dtype`.
pub fn literal(value: Scalar, dtype: DType) -> String {
    let rounded = HostTensor::scalar(dtype, value);
    match dtype {
        DType::Bool => u8::from(value.to_bool()).to_string(),
        DType::U64 => format!("UINT64_C({})", rounded.to_i64s()[0] as u64),
        DType::I64 if rounded.to_i64s()[0] == i64::MIN => "INT64_MIN".into(),
        DType::I64 => format!("INT64_C({})", rounded.to_i64s()[0]),
        DType::I32 if rounded.to_i64s()[0] == i64::from(i32::MIN) => "INT32_MIN".into(),
        _ if dtype.is_int() => rounded.to_i64s()[0].to_string(),
        _ => float_literal(rounded.to_f64s()[0], dtype),
    }
}

fn float_literal(x: f64, dtype: DType) -> String {
    let single = dtype.compute() == DType::F32;
    let text = if x.is_nan() {
        "(float)NAN".to_owned()
    } else if x.is_infinite() {
        "(float)INFINITY"
            .to_owned()
            .replacen("(float)", if x < 0.0 { "-(float)" } else { "(float)" }, 1)
    } else if single {
        format!("{:?}f", x as f32)
    } else {
        format!("{x:?}")
    };
    if x < 0.0 || x.is_sign_negative() {
        format!("({text})")
    } else {
        text
    }
}

/// The neutral element of a reduction.
pub fn neutral(op: ReduceOp, dtype: DType) -> String {
    let integer = |low: bool| match dtype {
        DType::I64 => {
            if low {
                "INT64_MIN"
            } else {
                "INT64_MAX"
            }
        }
        DType::I32 => {
            if low {
                "INT32_MIN"
            } else {
                "INT32_MAX"
            }
        }
        DType::I16 => {
            if low {
                "INT16_MIN"
            } else {
                "INT16_MAX"
            }
        }
        DType::I8 => {
            if low {
                "INT8_MIN"
            } else {
                "INT8_MAX"
            }
        }
        _ if low => "0",
        DType::U64 => "UINT64_MAX",
        DType::U32 => "UINT32_MAX",
        DType::U16 => "UINT16_MAX",
        _ => "UINT8_MAX",
    };
    match op {
        ReduceOp::Sum => literal(Scalar::Int(0), dtype),
        ReduceOp::Prod => literal(Scalar::Int(1), dtype),
        ReduceOp::Max if dtype.is_float() => literal(Scalar::Float(f64::NEG_INFINITY), dtype.compute()),
        ReduceOp::Min if dtype.is_float() => literal(Scalar::Float(f64::INFINITY), dtype.compute()),
        ReduceOp::Max => integer(true).into(),
        ReduceOp::Min => integer(false).into(),
        ReduceOp::Any => "0".into(),
        ReduceOp::All => "1".into(),
    }
}

/// `a` and `b` combined by a reduction.
pub fn combine(op: ReduceOp, dtype: DType, vector: bool, a: &str, b: &str) -> String {
    let prefix = if vector { "v" } else { "s" };
    let dtype = dtype.compute();
    match op {
        ReduceOp::Sum => format!("{a} + {b}"),
        ReduceOp::Prod => format!("{a} * {b}"),
        ReduceOp::Max => format!("{prefix}_max_{dtype}({a}, {b})"),
        ReduceOp::Min => format!("{prefix}_min_{dtype}({a}, {b})"),
        ReduceOp::Any => format!("{a} | {b}"),
        ReduceOp::All => format!("{a} & {b}"),
    }
}

/// `op(x)`, of operands of type `dtype`.
pub fn unary(op: UnaryOp, dtype: DType, vector: bool, x: &str) -> String {
    let prefix = if vector { "v" } else { "s" };
    let register = dtype.compute();
    match op {
        UnaryOp::Neg => format!("-{x}"),
        UnaryOp::Not if dtype == DType::Bool && !vector => format!("!{x}"),
        UnaryOp::Not => format!("~{x}"),
        UnaryOp::Abs | UnaryOp::Sign if dtype.is_unsigned_int() && op == UnaryOp::Abs => x.to_owned(),
        // One element has the bits that a lane of a vector would have.
        UnaryOp::Exp
        | UnaryOp::Expm1
        | UnaryOp::Log
        | UnaryOp::Log1p
        | UnaryOp::Sin
        | UnaryOp::Cos
        | UnaryOp::Tanh
        | UnaryOp::Erf
        | UnaryOp::Sigmoid
            if !vector && register == DType::F32 =>
        {
            format!("v_{}_f32(set_f32({x}))[0]", op.name())
        }
        _ => format!("{prefix}_{}_{register}({x})", op.name()),
    }
}

/// `op(a, b)`, of operands of type `dtype`.
pub fn binary(op: BinaryOp, dtype: DType, vector: bool, a: &str, b: &str) -> String {
    let prefix = if vector { "v" } else { "s" };
    let infix = match op {
        BinaryOp::Add => Some("+"),
        BinaryOp::Sub => Some("-"),
        BinaryOp::Mul => Some("*"),
        BinaryOp::Div if dtype.is_float() => Some("/"),
        BinaryOp::And => Some("&"),
        BinaryOp::Or => Some("|"),
        BinaryOp::Xor => Some("^"),
        _ => None,
    };
    let register = dtype.compute();
    match infix {
        Some(infix) => format!("{a} {infix} {b}"),
        None if op == BinaryOp::Pow && register == DType::F32 && !vector => {
            format!("v_pow_f32(set_f32({a}), set_f32({b}))[0]")
        }
        None => format!("{prefix}_{}_{register}({a}, {b})", op.name()),
    }
}

/// A truth value from two operands of type `dtype`.
pub fn compare(op: CompareOp, dtype: DType, vector: bool, a: &str, b: &str) -> String {
    let sign = match op {
        CompareOp::Eq => "==",
        CompareOp::Ne => "!=",
        CompareOp::Lt => "<",
        CompareOp::Le => "<=",
        CompareOp::Gt => ">",
        CompareOp::Ge => ">=",
    };
    let wide = matches!(dtype.compute().size(), 4) || dtype == DType::Bool;
    match (vector, wide) {
        (false, _) => format!("{a} {sign} {b}"),
        (true, true) => format!("(v_i32)({a} {sign} {b})"),
        (true, false) => format!("__builtin_convertvector({a} {sign} {b}, v_i32)"),
    }
}

/// `c ? a : b` on values of type `dtype`.
pub fn select(dtype: DType, vector: bool, c: &str, a: &str, b: &str) -> String {
    if vector {
        format!("sel_{}({c}, {a}, {b})", dtype.compute())
    } else {
        format!("{c} ? {a} : {b}")
    }
}

/// `x` of type `from` as `to`.
pub fn cast(from: DType, to: DType, vector: bool, x: &str) -> String {
    let prefix = if vector { "v" } else { "s" };
    let converted = convert(from, to, vector, x);
    if narrows(from, to) {
        format!("{prefix}_round_{to}({converted})")
    } else {
        converted
    }
}

/// Whether a cast rounds to one of the half types.
pub fn narrows(from: DType, to: DType) -> bool {
    matches!(to, DType::F16 | DType::BF16) && from != to
}

/// An element or vector converted to the type of registers that hold `to`; not rounded to a half type.
pub fn convert(from: DType, to: DType, vector: bool, x: &str) -> String {
    let prefix = if vector { "v" } else { "s" };
    let (source, target) = (from.compute(), to.compute());
    match (source, target) {
        (a, b) if a == b => x.to_owned(),
        (DType::Bool, _) if vector => format!("__builtin_convertvector(-{x}, v_{target})"),
        (_, DType::Bool) if vector && source.size() == 4 => format!("(v_i32)({x} != 0)"),
        (_, DType::Bool) if vector => format!("__builtin_convertvector({x} != 0, v_i32)"),
        (_, DType::Bool) => format!("{x} != 0"),
        (a, b) if a.is_float() && b.is_int() => format!("{prefix}_{a}_to_{b}({x})"),
        (DType::F64, _) if matches!(to, DType::F16 | DType::BF16) => format!("{prefix}_shortened({x})"),
        // Integers of up to 16 bits are numbers of f32. Others would be rounded twice by way of it.
        (a, _) if matches!(to, DType::F16 | DType::BF16) && a.is_int() && a.size() >= 4 => {
            format!("{prefix}_shortened_{a}({x})")
        }
        (_, b) if vector => format!("__builtin_convertvector({x}, v_{b})"),
        (_, b) => format!("({}){x}", memory_type(b)),
    }
}
