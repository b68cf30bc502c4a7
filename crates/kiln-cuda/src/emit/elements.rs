//! Elements in CUDA C++: types in memory and in registers, literals, and how two elements combine.
//!
//! Registers hold [`DType::compute`] types. Signed integers are added and multiplied as unsigned ones, which wrap.

use kiln_graph::op::ReduceOp;
use kiln_graph::{DType, HostTensor, Scalar};

/// The type of an element in memory.
pub fn memory(dtype: DType) -> &'static str {
    match dtype {
        DType::F64 => "double",
        DType::F32 => "float",
        DType::F16 => "kiln_f16",
        DType::BF16 => "kiln_bf16",
        DType::I64 => "long long",
        DType::I32 => "int",
        DType::I16 => "short",
        DType::I8 => "signed char",
        DType::U64 => "kiln_u64",
        DType::U32 => "kiln_u32",
        DType::U16 => "kiln_u16",
        DType::U8 | DType::Bool => "unsigned char",
    }
}

/// The type of an element in a register.
pub fn register(dtype: DType) -> &'static str {
    memory(dtype.compute())
}

/// The type in which sums and products of `dtype` are taken: integers in unsigned words, which wrap.
pub fn arithmetic(dtype: DType) -> &'static str {
    match dtype.compute() {
        DType::I64 | DType::U64 => "kiln_u64",
        float if float.is_float() => memory(float),
        _ => "kiln_u32",
    }
}

/// The register that the element `x` in memory is loaded to.
pub fn widen(dtype: DType, x: &str) -> String {
    match dtype {
        DType::F16 | DType::BF16 => format!("kiln_widen({x})"),
        _ => x.to_owned(),
    }
}

/// The element in memory that the number `x` is stored as.
pub fn narrow(dtype: DType, x: &str) -> String {
    match dtype {
        DType::F16 | DType::BF16 => format!("kiln_narrow<{}>({x})", memory(dtype)),
        _ => format!("({})({x})", memory(dtype)),
    }
}

/// The literal of a value rounded to `dtype`, in a register.
pub fn literal(value: Scalar, dtype: DType) -> String {
    let rounded = HostTensor::scalar(dtype, value);
    match dtype {
        DType::Bool => u8::from(value.to_bool()).to_string(),
        DType::U64 => format!("{}ull", rounded.to_i64s()[0] as u64),
        DType::U32 => format!("{}u", rounded.to_i64s()[0]),
        DType::I64 | DType::I32 => integer(rounded.to_i64s()[0], dtype),
        _ if dtype.is_int() => rounded.to_i64s()[0].to_string(),
        DType::F64 => format!("__longlong_as_double(0x{:x}ll)", rounded.to_f64s()[0].to_bits()),
        _ => format!(
            "__uint_as_float(0x{:x}u)",
            (rounded.to_f64s()[0] as f32).to_bits()
        ),
    }
}

/// A signed number of 32 or 64 bits. The lowest one has no literal, for a literal has no sign.
fn integer(value: i64, dtype: DType) -> String {
    let suffix = if dtype == DType::I64 { "ll" } else { "" };
    let lowest = if dtype == DType::I64 {
        i64::MIN
    } else {
        i64::from(i32::MIN)
    };
    if value == lowest {
        format!("({}{suffix} - 1)", value + 1)
    } else {
        format!("({value}{suffix})")
    }
}

/// The neutral element of a reduction, in a register.
pub fn neutral(op: ReduceOp, dtype: DType) -> String {
    let extreme = |lowest: bool| {
        let bits = 8 * dtype.size() as u32;
        let value = match (dtype.is_float(), lowest) {
            (true, true) => Scalar::Float(f64::NEG_INFINITY),
            (true, false) => Scalar::Float(f64::INFINITY),
            (false, true) if dtype.is_signed_int() => Scalar::Int(i64::MIN >> (64 - bits)),
            (false, true) => Scalar::Int(0),
            (false, false) if dtype == DType::Bool => Scalar::Int(1),
            (false, false) if dtype.is_signed_int() => Scalar::Int(i64::MAX >> (64 - bits)),
            // All bits of every width; wider ones are cut off.
            (false, false) => Scalar::Int((u64::MAX >> (64 - bits)) as i64),
        };
        literal(value, dtype)
    };
    match op {
        ReduceOp::Sum => literal(Scalar::Int(0), dtype),
        ReduceOp::Prod => literal(Scalar::Int(1), dtype),
        ReduceOp::Max => extreme(true),
        ReduceOp::Min => extreme(false),
        ReduceOp::Any => "0".into(),
        ReduceOp::All => "1".into(),
    }
}

/// The registers `a` and `b` (names, for they occur several times) combined by a reduction, in a register.
pub fn combine(op: ReduceOp, dtype: DType, a: &str, b: &str) -> String {
    let (register, arithmetic) = (register(dtype), arithmetic(dtype));
    let infix = |sign: &str| match dtype {
        _ if dtype.is_float() => format!("({a} {sign} {b})"),
        _ => format!("({register})(({arithmetic}){a} {sign} ({arithmetic}){b})"),
    };
    let choose = |sign: &str| match dtype {
        _ if dtype.is_float() => format!("({a} {sign} {b} || {a} != {a} ? {a} : {b})"),
        _ => format!("({a} {sign} {b} ? {a} : {b})"),
    };
    match op {
        ReduceOp::Sum if dtype == DType::Bool => infix("|"),
        ReduceOp::Prod if dtype == DType::Bool => infix("&"),
        ReduceOp::Sum => infix("+"),
        ReduceOp::Prod => infix("*"),
        ReduceOp::Max => choose(">"),
        ReduceOp::Min => choose("<"),
        ReduceOp::Any => infix("|"),
        ReduceOp::All => infix("&"),
    }
}
