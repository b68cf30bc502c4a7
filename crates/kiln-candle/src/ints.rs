//! Integer arithmetic that wraps.
//!
//! candle's i64 kernels are Rust's operators: they panic on overflow where overflow checks are on. So no
//! operation here may overflow. Types of up to 32 bits are computed in i64, where one operation has room,
//! and wrapped into range. For 64 bits the extremes of the operands most often show that no result can
//! overflow; otherwise numbers are split into 32-bit limbs, `x = hi * 2^32 + lo` with `0 <= lo < 2^32`, and
//! carries are propagated by hand. A u64 is the i64 of the same bits, for which sums, differences and
//! products are the signed ones; only order, division and shifting right differ.
//!
//! Bitwise operations go byte by byte through a table of 65,536 products `a & b`; or and xor follow from
//! `a | b = a + b - (a & b)` and `a ^ b = a + b - 2 (a & b)`.

use candle_core::{DType as CandleType, Result, Tensor};
use kiln_graph::DType;
use kiln_graph::op::BinaryOp;

use crate::value::{both, either, indices, int, select, wrap};

const LIMB: i64 = 1 << 32;

/// Whether arithmetic on this type needs all bits of an i64.
fn is_64(dtype: DType) -> bool {
    matches!(dtype, DType::I64 | DType::U64)
}

fn bits(dtype: DType) -> i64 {
    8 * dtype.size() as i64
}

/// The largest absolute value in a tensor; 0 if it is empty.
fn magnitude(x: &Tensor) -> Result<i128> {
    if x.elem_count() == 0 {
        return Ok(0);
    }
    let low = x.min_all()?.to_scalar::<i64>()?;
    let high = x.max_all()?.to_scalar::<i64>()?;
    Ok(i128::from(low).abs().max(i128::from(high).abs()))
}

/// A bound on the absolute values of sums of `count` products of an element of `a` and one of `b`; saturates.
pub(crate) fn product_bound(a: &Tensor, b: &Tensor, count: usize) -> Result<i128> {
    Ok((magnitude(a)? * magnitude(b)?).saturating_mul(count as i128))
}

/// `x` modulo 2^32, in `0..2^32`.
fn low(x: &Tensor) -> Result<Tensor> {
    x.to_dtype(CandleType::U32)?.to_dtype(CandleType::I64)
}

/// The limbs `(hi, lo)` of `x`, `hi` signed.
pub(crate) fn split(x: &Tensor) -> Result<(Tensor, Tensor)> {
    let lo = low(x)?;
    let hi = x.sub(&lo)?.div(&int(x, LIMB)?)?;
    Ok((hi, lo))
}

/// `hi * 2^32 + lo` modulo 2^64 for any `hi` and any `lo >= 0`.
pub(crate) fn join(hi: &Tensor, lo: &Tensor) -> Result<Tensor> {
    let carry = lo.div(&int(lo, LIMB)?)?;
    // Both summands are reduced first, so that their sum has room.
    let hi = low(hi)?.add(&low(&carry)?)?;
    let hi = hi.to_dtype(CandleType::I32)?.to_dtype(CandleType::I64)?;
    hi.mul(&int(&hi, LIMB)?)?.add(&low(lo)?)
}

/// `-1 - x`, which no `x` overflows: the bitwise complement.
pub(crate) fn complement(x: &Tensor) -> Result<Tensor> {
    int(x, -1)?.sub(x)
}

/// `a + b`.
pub(crate) fn add(a: &Tensor, b: &Tensor, dtype: DType) -> Result<Tensor> {
    if !is_64(dtype) {
        return wrap(&a.add(b)?, dtype);
    }
    if magnitude(a)? + magnitude(b)? <= i128::from(i64::MAX) {
        return a.add(b);
    }
    let ((a1, a0), (b1, b0)) = (split(a)?, split(b)?);
    join(&a1.add(&b1)?, &a0.add(&b0)?)
}

/// `-x`.
pub(crate) fn neg(x: &Tensor, dtype: DType) -> Result<Tensor> {
    add(&complement(x)?, &int(x, 1)?, dtype)
}

/// `a - b`.
pub(crate) fn sub(a: &Tensor, b: &Tensor, dtype: DType) -> Result<Tensor> {
    if !is_64(dtype) {
        return wrap(&a.sub(b)?, dtype);
    }
    if magnitude(a)? + magnitude(b)? <= i128::from(i64::MAX) {
        return a.sub(b);
    }
    add(a, &neg(b, dtype)?, dtype)
}

/// `a * b`.
pub(crate) fn mul(a: &Tensor, b: &Tensor, dtype: DType) -> Result<Tensor> {
    match dtype {
        // The product of two u32 does not fit into an i64; of two i32 with the same low bits it does.
        DType::U32 => return wrap(&wrap(a, DType::I32)?.mul(&wrap(b, DType::I32)?)?, dtype),
        _ if !is_64(dtype) => return wrap(&a.mul(b)?, dtype),
        _ => {}
    }
    if magnitude(a)? * magnitude(b)? <= i128::from(i64::MAX) {
        return a.mul(b);
    }
    let half = int(a, 1 << 16)?;
    let ((a1, a0), (b1, b0)) = (split(a)?, split(b)?);
    // a0 * b0 is up to 64 bits: with b0 = b01 * 2^16 + b00 it is a0 * b00 + (q1 * 2^16 + q0) * 2^16.
    let b01 = b0.div(&half)?;
    let b00 = b0.sub(&b01.mul(&half)?)?;
    let q = a0.mul(&b01)?;
    let q1 = q.div(&half)?;
    let q0 = q.sub(&q1.mul(&half)?)?;
    let lo = a0.mul(&b00)?.add(&q0.mul(&half)?)?;
    let cross = low(&a1.mul(&b0)?)?.add(&low(&a0.mul(&b1)?)?)?;
    join(&q1.add(&cross)?, &lo)
}

/// Sum along the last dimension.
pub(crate) fn sum_last(x: &Tensor, dtype: DType) -> Result<Tensor> {
    let axis = x.rank() - 1;
    if !is_64(dtype) {
        return wrap(&x.sum(axis)?, dtype);
    }
    if magnitude(x)? * (x.dims()[axis] as i128) <= i128::from(i64::MAX) {
        return x.sum(axis);
    }
    let (hi, lo) = split(&x.contiguous()?)?;
    join(&hi.sum(axis)?, &lo.sum(axis)?)
}

/// Mean along the last dimension with `counts >= 1` as divisors, truncated toward zero: of the sum in 64 bits,
/// where it wraps.
pub(crate) fn mean_last(x: &Tensor, counts: &Tensor, dtype: DType) -> Result<Tensor> {
    let wide = if is_64(dtype) { dtype } else { DType::I64 };
    div(&sum_last(x, wide)?, counts, wide)
}

/// `x` with slices of `src` added at `at` along `axis`.
pub(crate) fn index_add(x: &Tensor, at: &Tensor, src: &Tensor, axis: usize, dtype: DType) -> Result<Tensor> {
    let x = x.contiguous()?;
    let src = src.contiguous()?;
    if !is_64(dtype) {
        return wrap(&x.index_add(at, &src, axis)?, dtype);
    }
    let bound = magnitude(&x)? + magnitude(&src)? * src.dims()[axis] as i128;
    if bound <= i128::from(i64::MAX) {
        return x.index_add(at, &src, axis);
    }
    let ((x1, x0), (s1, s0)) = (split(&x)?, split(&src)?);
    join(&x1.index_add(at, &s1, axis)?, &x0.index_add(at, &s0, axis)?)
}

/// A u64 as the i64 that stands at the same place in the order of its type, and back: the top bit flips.
fn flip_order(x: &Tensor) -> Result<Tensor> {
    // For x < 0, x + 2^63 in two steps; for x >= 0, x - 2^63. Each branch sees only numbers it has room for.
    let negative = x.minimum(&int(x, -1)?)?;
    let up = negative.add(&int(x, i64::MAX)?)?.add(&int(x, 1)?)?;
    let down = x.maximum(&int(x, 0)?)?.add(&int(x, i64::MIN)?)?;
    select(&x.lt(&int(x, 0)?)?, &up, &down)
}

/// Numbers whose signed order is the order of `x` in its type; [`from_ordered`] goes back.
pub(crate) fn to_ordered(x: &Tensor, dtype: DType) -> Result<Tensor> {
    if dtype == DType::U64 {
        flip_order(x)
    } else {
        Ok(x.clone())
    }
}

/// The reverse of [`to_ordered`].
pub(crate) fn from_ordered(x: &Tensor, dtype: DType) -> Result<Tensor> {
    to_ordered(x, dtype)
}

/// A u64 shifted right by one bit, which is never negative as an i64.
fn half_unsigned(x: &Tensor) -> Result<Tensor> {
    let (hi, lo) = split(x)?;
    low(&hi)?.mul(&int(x, 1 << 31)?)?.add(&lo.div(&int(x, 2)?)?)
}

/// Quotient of two u64 for a divisor other than zero (Hacker's Delight, 9-3: halve, divide, correct by one).
fn div_u64(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    let at_least = |x: &Tensor, y: &Tensor| flip_order(x)?.ge(&flip_order(y)?)?.to_dtype(CandleType::I64);
    let large = b.lt(&int(b, 0)?)?;
    let divisor = select(&large, &int(b, 1)?, b)?;
    let quotient = mul(&half_unsigned(a)?.div(&divisor)?, &int(a, 2)?, DType::U64)?;
    let rest = sub(a, &mul(&quotient, &divisor, DType::U64)?, DType::U64)?;
    let small = add(&quotient, &at_least(&rest, &divisor)?, DType::U64)?;
    select(&large, &at_least(a, b)?, &small)
}

/// Quotient, truncated toward zero; 0 for a divisor of zero.
pub(crate) fn div(a: &Tensor, b: &Tensor, dtype: DType) -> Result<Tensor> {
    let one = int(b, 1)?;
    let zero = int(b, 0)?;
    let by_zero = b.eq(&zero)?;
    let divisor = select(&by_zero, &one, b)?;
    let quotient = if dtype == DType::U64 {
        div_u64(a, &divisor)?
    } else {
        // The lowest number by -1 overflows; negation wraps.
        let by_minus_one = divisor.eq(&int(b, -1)?)?;
        let divisor = select(&by_minus_one, &one, &divisor)?;
        select(&by_minus_one, &neg(a, dtype)?, &a.div(&divisor)?)?
    };
    select(&by_zero, &zero, &quotient)
}

/// Remainder with the sign of the divisor; 0 for a divisor of zero.
fn rem(a: &Tensor, b: &Tensor, dtype: DType) -> Result<Tensor> {
    let zero = int(b, 0)?;
    let quotient = div(a, b, dtype)?;
    let rest = sub(a, &mul(&quotient, b, dtype)?, dtype)?;
    let adjusted = if dtype.is_unsigned_int() {
        rest
    } else {
        let signs_differ = rest.lt(&zero)?.ne(&b.lt(&zero)?)?;
        let adjust = both(&signs_differ, &rest.ne(&zero)?)?;
        // The two have opposite signs where this is used; elsewhere the sum may not overflow either.
        rest.add(&select(&adjust, b, &zero)?)?
    };
    select(&b.eq(&zero)?, &zero, &adjusted)
}

/// `a` to the power `b` by repeated squaring; a negative exponent gives 0 unless `|a|` is 1.
fn pow(a: &Tensor, b: &Tensor, dtype: DType) -> Result<Tensor> {
    let (zero, one, two) = (int(a, 0)?, int(a, 1)?, int(a, 2)?);
    let odd = |x: &Tensor| {
        let lo = low(x)?;
        lo.sub(&lo.div(&two)?.mul(&two)?)?.ne(&zero)
    };
    let negative = if dtype.is_signed_int() {
        Some(b.lt(&zero)?)
    } else {
        None
    };
    let mut exponent = match &negative {
        Some(negative) => select(negative, &zero, b)?,
        None => b.clone(),
    };
    let mut base = a.clone();
    let mut result = one.contiguous()?;
    loop {
        result = select(&odd(&exponent)?, &mul(&result, &base, dtype)?, &result)?;
        exponent = half_unsigned(&exponent)?;
        if magnitude(&exponent)? == 0 {
            break;
        }
        base = mul(&base, &base, dtype)?;
    }
    let Some(negative) = negative else {
        return Ok(result);
    };
    let minus_one = int(a, -1)?;
    let of_minus_one = select(&odd(b)?, &minus_one, &one)?;
    let inverse = select(&a.eq(&one)?, &one, &zero)?;
    let inverse = select(&a.eq(&minus_one)?, &of_minus_one, &inverse)?;
    select(&negative, &inverse, &result)
}

/// 2^shift for shifts in `0..=62`; shifts outside are clamped.
fn power_of_two(shift: &Tensor) -> Result<Tensor> {
    let table = indices((0..63).map(|bit| 1i64 << bit).collect())?;
    let clamped = shift.maximum(&int(shift, 0)?)?.minimum(&int(shift, 62)?)?;
    table
        .index_select(&clamped.flatten_all()?.contiguous()?, 0)?
        .reshape(shift.shape())
}

/// `x << shift`; 0 for a shift outside of `0..bits`.
fn shl(x: &Tensor, shift: &Tensor, dtype: DType) -> Result<Tensor> {
    let zero = int(x, 0)?;
    let inside = both(&shift.ge(&zero)?, &shift.lt(&int(x, bits(dtype))?)?)?;
    let shift = select(&inside, shift, &zero)?;
    let mut shifted = mul(x, &power_of_two(&shift)?, dtype)?;
    if is_64(dtype) {
        let top = select(&shift.eq(&int(x, 63)?)?, &int(x, 2)?, &int(x, 1)?)?;
        shifted = mul(&shifted, &top, dtype)?;
    }
    select(&inside, &shifted, &zero)
}

/// `x >> shift`, arithmetic for signed types; a shift outside of `0..bits` leaves the sign: -1 for negative
/// numbers, else 0.
fn shr(x: &Tensor, shift: &Tensor, dtype: DType) -> Result<Tensor> {
    let (zero, one) = (int(x, 0)?, int(x, 1)?);
    let outside = either(&shift.lt(&zero)?, &shift.ge(&int(x, bits(dtype))?)?)?;
    if dtype == DType::U64 {
        // One bit first, because the rest is not negative.
        let less = shift.maximum(&one)?.sub(&one)?;
        let shifted = half_unsigned(x)?.div(&power_of_two(&less)?)?;
        let shifted = select(&shift.eq(&zero)?, x, &shifted)?;
        return select(&outside, &zero, &shifted);
    }
    // Floor division, through the complement for negative numbers. A shift by 63 is one by 62 and one more.
    let negative = x.lt(&zero)?;
    let positive = select(&negative, &complement(x)?, x)?;
    let last = select(&shift.ge(&int(x, 63)?)?, &int(x, 2)?, &one)?;
    let shifted = positive.div(&power_of_two(shift)?)?.div(&last)?;
    let shifted = select(&outside, &zero, &shifted)?;
    select(&negative, &complement(&shifted)?, &shifted)
}

/// Bitwise and, or, xor of `width` bits of numbers in `0..2^32`.
fn bitwise_limb(op: BinaryOp, a: &Tensor, b: &Tensor) -> Result<Tensor> {
    let table = indices((0..65536).map(|pair| (pair >> 8) & (pair & 255)).collect())?;
    let mut conjunction = a.zeros_like()?;
    for byte in 0..4 {
        let place = int(a, 1 << (8 * byte))?;
        let digit = |x: &Tensor| x.div(&place)?.to_dtype(CandleType::U8)?.to_dtype(CandleType::I64);
        let pair = digit(a)?.mul(&int(a, 256)?)?.add(&digit(b)?)?;
        let digit = table.index_select(&pair.flatten_all()?, 0)?.reshape(a.shape())?;
        conjunction = conjunction.add(&digit.mul(&place)?)?;
    }
    match op {
        BinaryOp::And => Ok(conjunction),
        BinaryOp::Or => a.add(b)?.sub(&conjunction),
        _ => a.add(b)?.sub(&conjunction)?.sub(&conjunction),
    }
}

fn bitwise(op: BinaryOp, a: &Tensor, b: &Tensor, dtype: DType) -> Result<Tensor> {
    if !is_64(dtype) {
        // The low 32 bits of the sign-extended number hold all of it.
        return wrap(&bitwise_limb(op, &low(a)?, &low(b)?)?, dtype);
    }
    let ((a1, a0), (b1, b0)) = (split(a)?, split(b)?);
    let hi = bitwise_limb(op, &low(&a1)?, &low(&b1)?)?;
    join(&hi, &bitwise_limb(op, &a0, &b0)?)
}

/// A pointwise function of two integers.
pub(crate) fn binary(op: BinaryOp, a: &Tensor, b: &Tensor, dtype: DType) -> Result<Tensor> {
    match op {
        BinaryOp::Add => add(a, b, dtype),
        BinaryOp::Sub => sub(a, b, dtype),
        BinaryOp::Mul => mul(a, b, dtype),
        BinaryOp::Div => div(a, b, dtype),
        BinaryOp::Rem => rem(a, b, dtype),
        BinaryOp::Pow => pow(a, b, dtype),
        BinaryOp::Max | BinaryOp::Min => {
            let (a, b) = (to_ordered(a, dtype)?, to_ordered(b, dtype)?);
            let chosen = if op == BinaryOp::Max {
                a.maximum(&b)?
            } else {
                a.minimum(&b)?
            };
            from_ordered(&chosen, dtype)
        }
        BinaryOp::And | BinaryOp::Or | BinaryOp::Xor => bitwise(op, a, b, dtype),
        BinaryOp::Shl => shl(a, b, dtype),
        BinaryOp::Shr => shr(a, b, dtype),
        BinaryOp::Atan2 => candle_core::bail!("atan2 takes floats"),
    }
}
