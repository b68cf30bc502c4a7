//! Unary, binary, compare, select and cast: the element type decides which arithmetic runs.

use candle_core::{DType as CandleType, Result, Tensor};
use kiln_graph::op::{BinaryOp, CompareOp, UnaryOp};
use kiln_graph::{DType, rounding};

use crate::value::{Val, both, either, float, int, is_nan, not, rounded, select, storage, vector, wrap};
use crate::{float as floats, ints};

pub(crate) fn unary(op: UnaryOp, x: &Val) -> Result<Val> {
    let mask = |tensor| Ok(Val::new(tensor, DType::Bool));
    match op {
        UnaryOp::IsNan => return mask(is_nan(&x.tensor)?),
        UnaryOp::IsInf => {
            let x = x.compute()?;
            return mask(x.abs()?.eq(&float(&x, f64::INFINITY)?)?);
        }
        UnaryOp::Not if x.dtype == DType::Bool => return mask(not(&x.tensor)?),
        _ => {}
    }
    if x.dtype.is_float() {
        return Val::narrow(floats::unary(op, &x.compute()?)?, x.dtype);
    }
    let (t, zero) = (&x.tensor, int(&x.tensor, 0)?);
    let result = match op {
        UnaryOp::Neg => ints::neg(t, x.dtype)?,
        UnaryOp::Not => wrap(&ints::complement(t)?, x.dtype)?,
        UnaryOp::Abs if x.dtype.is_unsigned_int() => t.clone(),
        UnaryOp::Abs => select(&t.lt(&zero)?, &ints::neg(t, x.dtype)?, t)?,
        // As an i64 a large u64 is negative, but its sign is 1.
        UnaryOp::Sign if x.dtype.is_unsigned_int() => t.ne(&zero)?.to_dtype(CandleType::I64)?,
        UnaryOp::Sign => t.sign()?,
        other => candle_core::bail!("`{other}` takes floats"),
    };
    Ok(Val::new(result, x.dtype))
}

pub(crate) fn binary(op: BinaryOp, a: &Val, b: &Val) -> Result<Val> {
    if a.dtype.is_float() {
        return Val::narrow(floats::binary(op, &a.compute()?, &b.compute()?)?, a.dtype);
    }
    if a.dtype.is_int() {
        return Ok(Val::new(
            ints::binary(op, &a.tensor, &b.tensor, a.dtype)?,
            a.dtype,
        ));
    }
    let result = match op {
        BinaryOp::And => both(&a.tensor, &b.tensor)?,
        BinaryOp::Or => either(&a.tensor, &b.tensor)?,
        BinaryOp::Xor => a.tensor.ne(&b.tensor)?,
        other => candle_core::bail!("`{other}` takes numbers"),
    };
    Ok(Val::new(result, a.dtype))
}

pub(crate) fn compare(op: CompareOp, a: &Val, b: &Val) -> Result<Val> {
    let order = |x: &Val| match x.dtype.is_int() {
        true => ints::to_ordered(&x.tensor, x.dtype),
        false => Ok(x.tensor.clone()),
    };
    let (a, b) = (order(a)?, order(b)?);
    let result = match op {
        CompareOp::Eq => a.eq(&b)?,
        CompareOp::Ne => a.ne(&b)?,
        CompareOp::Lt => a.lt(&b)?,
        CompareOp::Le => a.le(&b)?,
        CompareOp::Gt => a.gt(&b)?,
        CompareOp::Ge => a.ge(&b)?,
    };
    Ok(Val::new(result, DType::Bool))
}

pub(crate) fn select_op(condition: &Val, a: &Val, b: &Val) -> Result<Val> {
    Ok(Val::new(
        select(&condition.tensor, &a.tensor, &b.tensor)?,
        a.dtype,
    ))
}

pub(crate) fn cast(x: &Val, dtype: DType) -> Result<Val> {
    let t = &x.tensor;
    let tensor = match (x.dtype, dtype) {
        (from, to) if from == to => t.clone(),
        (_, DType::Bool) => t.ne(&t.zeros_like()?)?,
        (DType::Bool, to) => t.to_dtype(storage(to))?,
        (from, to) if from.is_float() && to.is_float() => rounded(t, to)?,
        (from, to) if from.is_float() => float_to_int(&x.wide()?, to)?,
        (from, to) if to.is_float() => int_to_float(t, from, to)?,
        (_, to) => wrap(t, to)?,
    };
    Ok(Val::new(tensor, dtype))
}

/// The integers `x` of type `from` in a float type, rounded once.
fn int_to_float(x: &Tensor, from: DType, to: DType) -> Result<Tensor> {
    let numbers = x.flatten_all()?.to_vec1::<i64>()?.into_iter();
    let numbers = numbers.map(|number| match from {
        // Held as the i64 of the same bits.
        DType::U64 => i128::from(number as u64),
        _ => i128::from(number),
    });
    let nearest = rounding::of_integer;
    match to {
        DType::F64 => vector(numbers.map(|number| number as f64), x.dims()),
        DType::F32 => vector(numbers.map(|number| number as f32), x.dims()),
        DType::F16 => vector(numbers.map(|number| rounding::to_f16(nearest(number))), x.dims()),
        _ => vector(numbers.map(|number| rounding::to_bf16(nearest(number))), x.dims()),
    }
}

/// f64 to an integer type: toward zero, saturating, NaN to 0. candle's own conversion does this for i64.
fn float_to_int(x: &Tensor, dtype: DType) -> Result<Tensor> {
    let clamped = |low: f64, high: f64| {
        x.maximum(&float(x, low)?)?
            .minimum(&float(x, high)?)?
            .to_dtype(CandleType::I64)
    };
    let bits = 8 * dtype.size() as i32;
    match dtype {
        DType::I64 => x.to_dtype(CandleType::I64),
        DType::U64 => {
            // Above 2^63 the bits are those of the i64 that is 2^64 less.
            let border = float(x, 2f64.powi(63))?;
            let above = x
                .sub(&border)?
                .maximum(&float(x, 0.0)?)?
                .to_dtype(CandleType::I64)?;
            let high = above.add(&int(&above, i64::MIN)?)?;
            let low = x.maximum(&float(x, 0.0)?)?.to_dtype(CandleType::I64)?;
            select(&x.ge(&border)?, &high, &low)
        }
        _ if dtype.is_unsigned_int() => clamped(0.0, 2f64.powi(bits) - 1.0),
        _ => clamped(-(2f64.powi(bits - 1)), 2f64.powi(bits - 1) - 1.0),
    }
}
