//! The CUDA C++ text of pointwise operations on one element.
//!
//! Registers hold [`DType::compute`] types; a truth value is a `bool`. C++'s own operators are used where
//! they mean the same; the other operations are functions of the prelude's `math.cuh`. Operands are names
//! or literals, so that they need no parentheses.

use kiln_graph::op::{BinaryOp, CompareOp, ReduceOp, UnaryOp};
use kiln_graph::{DType, HostTensor, Scalar};

/// The type of an element in memory.
pub fn memory_type(dtype: DType) -> &'static str {
    match dtype {
        DType::F64 => "double",
        DType::F32 => "float",
        DType::F16 => "kiln_f16",
        DType::BF16 => "kiln_bf16",
        DType::I64 => "kiln_i64",
        DType::I32 => "kiln_i32",
        DType::I16 => "kiln_i16",
        DType::I8 => "kiln_i8",
        DType::U64 => "kiln_u64",
        DType::U32 => "kiln_u32",
        DType::U16 => "kiln_u16",
        DType::U8 | DType::Bool => "kiln_u8",
    }
}

/// The type of a register.
pub fn register_type(dtype: DType) -> &'static str {
    match dtype {
        DType::Bool => "bool",
        dtype => memory_type(dtype.compute()),
    }
}

/// What `element`, as it is in memory, is in a register.
pub fn widened(dtype: DType, element: &str) -> String {
    match dtype {
        DType::Bool => format!("{element} != 0"),
        DType::F16 | DType::BF16 => format!("kiln_get({element})"),
        _ => element.to_owned(),
    }
}

/// What the register `x` is in memory.
pub fn narrowed(dtype: DType, x: &str) -> String {
    match dtype {
        DType::Bool | DType::F16 | DType::BF16 => format!("kiln_element<{}>::of({x})", memory_type(dtype)),
        _ => x.to_owned(),
    }
}

/// What the register `x`, which holds a number that `dtype` has, is in memory.
pub fn narrowed_exactly(dtype: DType, x: &str) -> String {
    match dtype {
        DType::BF16 => format!("kiln_upper({x})"),
        dtype => narrowed(dtype, x),
    }
}

/// The literal of a value rounded to `dtype`.
pub fn literal(value: Scalar, dtype: DType) -> String {
    let rounded = HostTensor::scalar(dtype, value);
    match dtype {
        DType::Bool => value.to_bool().to_string(),
        DType::U64 => format!("{}ull", rounded.to_i64s()[0] as u64),
        DType::I64 if rounded.to_i64s()[0] == i64::MIN => format!("({}ll - 1)", -i64::MAX),
        DType::I64 => integer_literal(rounded.to_i64s()[0], "ll"),
        DType::U32 => format!("{}u", rounded.to_i64s()[0]),
        DType::I32 if rounded.to_i64s()[0] == i64::from(i32::MIN) => format!("({} - 1)", -i32::MAX),
        DType::I32 => integer_literal(rounded.to_i64s()[0], ""),
        _ if dtype.is_int() => {
            let number = integer_literal(rounded.to_i64s()[0], "");
            format!("(({}){number})", memory_type(dtype))
        }
        _ => float_literal(rounded.to_f64s()[0], dtype),
    }
}

fn integer_literal(x: i64, suffix: &str) -> String {
    match x < 0 {
        true => format!("({x}{suffix})"),
        false => format!("{x}{suffix}"),
    }
}

fn float_literal(x: f64, dtype: DType) -> String {
    let single = dtype.compute() == DType::F32;
    if !x.is_finite() {
        return match single {
            true => format!("__uint_as_float({:#x}u)", (x as f32).to_bits()),
            false => format!("__longlong_as_double((long long){:#x}ull)", x.to_bits()),
        };
    }
    let text = match single {
        true => format!("{:?}f", x as f32),
        false => format!("{x:?}"),
    };
    match x.is_sign_negative() {
        true => format!("({text})"),
        false => text,
    }
}

/// The neutral element of a reduction, in a register of `dtype`.
pub fn neutral(op: ReduceOp, dtype: DType) -> String {
    let dtype = dtype.compute();
    let value = match op {
        ReduceOp::Sum => Scalar::Int(0),
        ReduceOp::Prod => Scalar::Int(1),
        ReduceOp::Max if dtype.is_float() => Scalar::Float(f64::NEG_INFINITY),
        ReduceOp::Min if dtype.is_float() => Scalar::Float(f64::INFINITY),
        ReduceOp::Max => match dtype.is_unsigned_int() {
            true => Scalar::UInt(0),
            false => Scalar::Int(i64::MIN >> (64 - 8 * dtype.size())),
        },
        ReduceOp::Min => match dtype.is_unsigned_int() {
            true => Scalar::UInt(u64::MAX >> (64 - 8 * dtype.size())),
            false => Scalar::Int(i64::MAX >> (64 - 8 * dtype.size())),
        },
        ReduceOp::Any => Scalar::Bool(false),
        ReduceOp::All => Scalar::Bool(true),
    };
    literal(value, dtype)
}

/// The prelude's structure that says how a reduction combines.
pub fn joiner(op: ReduceOp) -> &'static str {
    match op {
        ReduceOp::Sum => "kiln_by_sum",
        ReduceOp::Prod => "kiln_by_prod",
        ReduceOp::Max => "kiln_by_max",
        ReduceOp::Min => "kiln_by_min",
        ReduceOp::Any => "kiln_by_any",
        ReduceOp::All => "kiln_by_all",
    }
}

/// `a` and `b` combined by a reduction.
pub fn combine(op: ReduceOp, dtype: DType, a: &str, b: &str) -> String {
    match op {
        ReduceOp::Sum if dtype.is_float() => format!("{a} + {b}"),
        ReduceOp::Prod if dtype.is_float() => product(dtype, a, b),
        op => format!("{}::join({a}, {b})", joiner(op)),
    }
}

/// `op(x)`, of an operand of type `dtype`.
pub fn unary(op: UnaryOp, dtype: DType, x: &str) -> String {
    let single = dtype.compute() == DType::F32;
    let library = |name: &str| format!("{name}{}({x})", if single { "f" } else { "" });
    let one = if single { "1.0f" } else { "1.0" };
    match op {
        UnaryOp::Neg if dtype.is_float() => format!("-{x}"),
        UnaryOp::Neg => format!("kiln_neg({x})"),
        UnaryOp::Not if dtype == DType::Bool => format!("!{x}"),
        UnaryOp::Not => format!("({})~{x}", register_type(dtype)),
        UnaryOp::Abs | UnaryOp::Sign | UnaryOp::Sigmoid | UnaryOp::IsInf => {
            format!("kiln_{}({x})", op.name())
        }
        UnaryOp::IsNan => format!("{x} != {x}"),
        UnaryOp::Rsqrt => format!("{one} / {}", library("sqrt")),
        UnaryOp::Recip => format!("{one} / {x}"),
        UnaryOp::Round => library("rint"),
        op => library(op.name()),
    }
}

/// `op(x)` as [`unary`], by functions that are a little off where there are such.
pub fn near(op: UnaryOp, dtype: DType, x: &str) -> String {
    match op {
        UnaryOp::Exp | UnaryOp::Sqrt | UnaryOp::Rsqrt | UnaryOp::Erf | UnaryOp::Sigmoid => {
            format!("kiln_near_{}({x})", op.name())
        }
        UnaryOp::Recip => format!("kiln_reciprocal({x})"),
        op => unary(op, dtype, x),
    }
}

/// `a * b` of floats, rounded. The compiler joins a plain product with a sum behind it, which rounds once:
/// two kernels that compute one value would disagree about it, `x * x - y * y` of equal numbers would not be
/// 0, and `(x * 20 - 10).floor()` not what the program says.
fn product(dtype: DType, a: &str, b: &str) -> String {
    let function = match dtype.compute() {
        DType::F32 => "__fmul_rn",
        _ => "__dmul_rn",
    };
    format!("{function}({a}, {b})")
}

/// The literal of the exponent of an inverse root.
const INVERSE_ROOT: &str = "(-0.5f)";

/// `op(a, b)`, of operands of type `dtype`.
pub fn binary(op: BinaryOp, dtype: DType, a: &str, b: &str) -> String {
    let float = dtype.is_float();
    let single = dtype.compute() == DType::F32;
    let infix = match op {
        BinaryOp::Add if float => "+",
        BinaryOp::Sub if float => "-",
        BinaryOp::Div if float => "/",
        BinaryOp::And => "&",
        BinaryOp::Or => "|",
        BinaryOp::Xor => "^",
        _ => "",
    };
    match op {
        _ if !infix.is_empty() => format!("{a} {infix} {b}"),
        BinaryOp::Mul if float => product(dtype, a, b),
        // What normalisations of variances ask for; the general power takes five times as long.
        BinaryOp::Pow if single && b == INVERSE_ROOT => format!("kiln_inverse_root({a})"),
        BinaryOp::Max => format!("kiln_larger({a}, {b})"),
        BinaryOp::Min => format!("kiln_smaller({a}, {b})"),
        BinaryOp::Pow | BinaryOp::Atan2 if float => {
            format!("{}{}({a}, {b})", op.name(), if single { "f" } else { "" })
        }
        op => format!("kiln_{}({a}, {b})", op.name()),
    }
}

/// A truth value from two operands of one type.
pub fn compare(op: CompareOp, a: &str, b: &str) -> String {
    let sign = match op {
        CompareOp::Eq => "==",
        CompareOp::Ne => "!=",
        CompareOp::Lt => "<",
        CompareOp::Le => "<=",
        CompareOp::Gt => ">",
        CompareOp::Ge => ">=",
    };
    format!("{a} {sign} {b}")
}

/// `x` of type `from` as `to`.
pub fn cast(from: DType, to: DType, x: &str) -> String {
    let (source, target) = (from.compute(), to.compute());
    let ty = register_type(target);
    let converted = match (source, target) {
        (a, b) if a == b => x.to_owned(),
        (_, DType::Bool) => format!("{x} != 0"),
        (a, b) if a.is_float() && b.is_int() => {
            let bits = 8 * b.size() - usize::from(b.is_signed_int());
            format!("kiln_to_integer<{ty}, {bits}>({x})")
        }
        (DType::F64, _) if matches!(to, DType::F16 | DType::BF16) => format!("kiln_shortened({x})"),
        // f32 has not all of their digits, and the result would be rounded twice.
        (a, _) if to == DType::BF16 && a.is_int() && a.size() == 4 => format!("kiln_shortened((double){x})"),
        (a, _) if to == DType::BF16 && a.is_int() && a.size() == 8 => {
            format!("kiln_shortened_integer<{}>({x})", memory_type(a))
        }
        _ => format!("({ty}){x}"),
    };
    if matches!(to, DType::F16 | DType::BF16) && from != to {
        rounded(to, &converted)
    } else {
        converted
    }
}

/// A register of f32 rounded to a type of 16 bits.
pub fn rounded(dtype: DType, x: &str) -> String {
    format!("kiln_rounded<{}>({x})", memory_type(dtype))
}
