//! Floating point functions: those candle has, and the others composed from them.
//!
//! Functions are computed in f64 and rounded once to the type of the operand, so that composing them loses
//! nothing that an f32 result would show; in f64 itself they are accurate to some units in the last place
//! (powers to `|b ln a|` of them). Naive compositions would lose accuracy; known means avoid that:
//!
//! - `expm1` and `log1p` by Kahan's corrections: `(u - 1) * x / ln u` with `u = exp x`, and
//!   `x * ln u / (u - 1)` with `u = 1 + x`, where the rounding error of `u` cancels;
//! - `sinh`, `asinh`, `acosh`, `atanh` through these two near zero, and through halved exponents where `exp`
//!   would overflow first;
//! - candle has no inverse trigonometric function, but sine and cosine: the angle of a point `(c, s)` on the
//!   unit circle is guessed to two digits and then corrected by `e + e^3 / 6` with
//!   `e = s cos - c sin = sin(error)`, which triples the number of digits at every step.

use std::f64::consts::{FRAC_PI_2, FRAC_PI_4, LN_2, PI};

use candle_core::{DType as CandleType, Result, Tensor};
use kiln_graph::op::{BinaryOp, UnaryOp};

use crate::value::{both, either, float, is_nan, not, select};

/// A pointwise function of an f32 or f64 tensor, in its type. `Not`, `IsNan` and `IsInf` are not among them.
pub(crate) fn unary(op: UnaryOp, x: &Tensor) -> Result<Tensor> {
    match op {
        UnaryOp::Neg => x.neg(),
        UnaryOp::Abs => x.abs(),
        UnaryOp::Sqrt => x.sqrt(),
        UnaryOp::Recip => x.recip(),
        UnaryOp::Floor => x.floor(),
        UnaryOp::Ceil => x.ceil(),
        UnaryOp::Trunc => trunc(x),
        UnaryOp::Round => round(x),
        UnaryOp::Sign => select(&is_nan(x)?, x, &x.sign()?),
        _ => function(op, &x.to_dtype(CandleType::F64)?)?.to_dtype(x.dtype()),
    }
}

/// Functions computed in f64.
fn function(op: UnaryOp, x: &Tensor) -> Result<Tensor> {
    let one = float(x, 1.0)?;
    match op {
        UnaryOp::Exp => x.exp(),
        UnaryOp::Expm1 => expm1(x),
        UnaryOp::Log => x.log(),
        UnaryOp::Log1p => log1p(x),
        UnaryOp::Rsqrt => x.sqrt()?.recip(),
        UnaryOp::Sin => x.sin(),
        UnaryOp::Cos => x.cos(),
        UnaryOp::Tan => x.sin()?.div(&x.cos()?),
        UnaryOp::Asin => atan2(x, &other_leg(x)?),
        UnaryOp::Acos => atan2(&other_leg(x)?, x),
        UnaryOp::Atan => atan2(x, &one),
        UnaryOp::Sinh => sinh(x),
        UnaryOp::Cosh => {
            let half = halved_exp(&x.abs()?)?;
            half.0.add(&half.1)
        }
        UnaryOp::Tanh => x.tanh(),
        UnaryOp::Asinh => asinh(x),
        UnaryOp::Acosh => acosh(x),
        UnaryOp::Atanh => {
            let magnitude = x.abs()?;
            let ratio = magnitude.mul(&float(x, 2.0)?)?.div(&one.sub(&magnitude)?)?;
            odd(x, &log1p(&ratio)?.mul(&float(x, 0.5)?)?)
        }
        UnaryOp::Erf => x.erf(),
        UnaryOp::Sigmoid => one.add(&x.neg()?.exp()?)?.recip(),
        other => candle_core::bail!("`{other}` is no function of a float"),
    }
}

/// A pointwise function of two f32 or two f64 tensors, in their type.
pub(crate) fn binary(op: BinaryOp, a: &Tensor, b: &Tensor) -> Result<Tensor> {
    let in_f64 = |f: fn(&Tensor, &Tensor) -> Result<Tensor>| {
        f(&a.to_dtype(CandleType::F64)?, &b.to_dtype(CandleType::F64)?)?.to_dtype(a.dtype())
    };
    match op {
        BinaryOp::Add => a.add(b),
        BinaryOp::Sub => a.sub(b),
        BinaryOp::Mul => a.mul(b),
        BinaryOp::Div => a.div(b),
        BinaryOp::Max => propagating(a, b, &a.maximum(b)?),
        BinaryOp::Min => propagating(a, b, &a.minimum(b)?),
        BinaryOp::Rem => in_f64(rem),
        BinaryOp::Pow => in_f64(pow),
        BinaryOp::Atan2 => in_f64(atan2),
        other => candle_core::bail!("`{other}` is no function of floats"),
    }
}

/// The remainder with the sign of the divisor, of f64. candle has none, and a quotient is rounded: it is
/// computed on the host.
fn rem(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    let [left, right] = [a, b].map(|tensor| tensor.flatten_all()?.to_vec1::<f64>());
    let rests = left?.into_iter().zip(right?).map(|(a, b)| match a % b {
        rest if rest != 0.0 && (rest < 0.0) != (b < 0.0) => rest + b,
        rest => rest,
    });
    Tensor::from_vec(rests.collect::<Vec<f64>>(), a.shape(), a.device())
}

/// `chosen`, or NaN where an operand is.
fn propagating(a: &Tensor, b: &Tensor, chosen: &Tensor) -> Result<Tensor> {
    let chosen = select(&is_nan(b)?, b, chosen)?;
    select(&is_nan(a)?, a, &chosen)
}

fn trunc(x: &Tensor) -> Result<Tensor> {
    select(&x.lt(&float(x, 0.0)?)?, &x.ceil()?, &x.floor()?)
}

/// To the nearest integer, halves to even: candle rounds halves away from zero.
fn round(x: &Tensor) -> Result<Tensor> {
    let half = float(x, 0.5)?;
    let is_half = x.sub(&trunc(x)?)?.abs()?.eq(&half)?;
    let even = x.mul(&half)?.round()?.mul(&float(x, 2.0)?)?;
    select(&is_half, &even, &x.round()?)
}

/// `of_magnitude`, a function of `|x|`, with the sign of `x`, and `x` itself for zeros.
fn odd(x: &Tensor, of_magnitude: &Tensor) -> Result<Tensor> {
    let zero = float(x, 0.0)?;
    let signed = select(&x.lt(&zero)?, &of_magnitude.neg()?, of_magnitude)?;
    select(&x.eq(&zero)?, x, &signed)
}

fn expm1(x: &Tensor) -> Result<Tensor> {
    let u = x.exp()?;
    let one = float(x, 1.0)?;
    let minus = u.sub(&one)?;
    let corrected = minus.mul(&x.div(&u.log()?)?)?;
    let corrected = select(&u.eq(&one)?, x, &corrected)?;
    let limit = either(&minus.eq(&float(x, -1.0)?)?, &u.eq(&float(x, f64::INFINITY)?)?)?;
    select(&limit, &minus, &corrected)
}

fn log1p(x: &Tensor) -> Result<Tensor> {
    let one = float(x, 1.0)?;
    let u = x.add(&one)?;
    let corrected = u.log()?.mul(&x.div(&u.sub(&one)?)?)?;
    let corrected = select(&u.eq(&one)?, x, &corrected)?;
    select(&u.eq(&float(x, f64::INFINITY)?)?, &u, &corrected)
}

/// `exp(x) / 2` and `exp(-x) / 2` for `x >= 0`; the first overflows no sooner than its value does.
fn halved_exp(x: &Tensor) -> Result<(Tensor, Tensor)> {
    let half = float(x, 0.5)?;
    let root = x.mul(&half)?.exp()?;
    Ok((half.mul(&root)?.mul(&root)?, half.div(&root)?.div(&root)?))
}

fn sinh(x: &Tensor) -> Result<Tensor> {
    let magnitude = x.abs()?;
    let one = float(x, 1.0)?;
    let grown = expm1(&magnitude)?;
    let small = grown.add(&grown.div(&grown.add(&one)?)?)?.mul(&float(x, 0.5)?)?;
    let (large, _) = halved_exp(&magnitude)?;
    odd(x, &select(&magnitude.gt(&float(x, 20.0)?)?, &large, &small)?)
}

fn asinh(x: &Tensor) -> Result<Tensor> {
    let a = x.abs()?;
    let one = float(x, 1.0)?;
    let square = a.mul(&a)?;
    let small = log1p(&a.add(&square.div(&square.add(&one)?.sqrt()?.add(&one)?)?)?)?;
    odd(x, &select(&a.gt(&float(x, 1e10)?)?, &log_of_double(&a)?, &small)?)
}

fn acosh(x: &Tensor) -> Result<Tensor> {
    let t = x.sub(&float(x, 1.0)?)?;
    let root = t.mul(&t.add(&float(x, 2.0)?)?)?.sqrt()?;
    let small = log1p(&t.add(&root)?)?;
    // For numbers far below 1 the sum of leg and root may not be negative.
    let small = select(&t.lt(&float(x, 0.0)?)?, &float(x, f64::NAN)?, &small)?;
    select(&x.gt(&float(x, 1e10)?)?, &log_of_double(x)?, &small)
}

/// `ln(2 x)` without overflow.
fn log_of_double(x: &Tensor) -> Result<Tensor> {
    x.log()?.add(&float(x, LN_2)?)
}

/// The other leg of the right triangle with hypotenuse 1 and leg `x`; NaN if `|x| > 1`.
fn other_leg(x: &Tensor) -> Result<Tensor> {
    let one = float(x, 1.0)?;
    one.sub(x)?.mul(&one.add(x)?)?.sqrt()
}

/// Where the sign bit is set (NaN aside): negative numbers and -0.0.
fn is_negative(x: &Tensor) -> Result<Tensor> {
    let zero = float(x, 0.0)?;
    let minus_zero = both(&x.eq(&zero)?, &x.recip()?.lt(&zero)?)?;
    either(&x.lt(&zero)?, &minus_zero)
}

/// Angle of the point `(x, y)`, in `[-pi, pi]`.
fn atan2(y: &Tensor, x: &Tensor) -> Result<Tensor> {
    let (one, infinity) = (float(x, 1.0)?, float(x, f64::INFINITY)?);
    let (up, right) = (y.abs()?, x.abs()?);
    // If a coordinate is infinite, the angle only depends on which coordinates are.
    let (far_up, far_right) = (up.eq(&infinity)?, right.eq(&infinity)?);
    let far = either(&far_up, &far_right)?;
    let up = select(&far, &far_up.to_dtype(CandleType::F64)?, &up)?;
    let right = select(&far, &far_right.to_dtype(CandleType::F64)?, &right)?;
    // To the unit circle, in two steps so that no square overflows.
    let largest = up.maximum(&right)?;
    let largest = select(&largest.eq(&float(x, 0.0)?)?, &one, &largest)?;
    let (s, c) = (up.div(&largest)?, right.div(&largest)?);
    let radius = s.mul(&s)?.add(&c.mul(&c)?)?.sqrt()?;
    let radius = select(&radius.eq(&float(x, 0.0)?)?, &one, &radius)?;
    let (s, c) = (s.div(&radius)?, c.div(&radius)?);
    // A guess that is off by less than 0.005.
    let ratio = s.minimum(&c)?.div(&select(&s.eq(&c)?, &one, &s.maximum(&c)?)?)?;
    let ratio = select(&both(&s.eq(&c)?, &s.gt(&float(x, 0.0)?)?)?, &one, &ratio)?;
    let bend = float(x, FRAC_PI_4 + 0.273)?.sub(&ratio.mul(&float(x, 0.273)?)?)?;
    let guess = ratio.mul(&bend)?;
    let steep = s.gt(&c)?;
    let mut angle = select(&steep, &float(x, FRAC_PI_2)?.sub(&guess)?, &guess)?;
    for _ in 0..3 {
        let error = s.mul(&angle.cos()?)?.sub(&c.mul(&angle.sin()?)?)?;
        let cube = error.mul(&error)?.mul(&error)?;
        angle = angle.add(&error)?.add(&cube.div(&float(x, 6.0)?)?)?;
    }
    let angle = select(&is_negative(x)?, &float(x, PI)?.sub(&angle)?, &angle)?;
    let angle = select(&is_negative(y)?, &angle.neg()?, &angle)?;
    let angle = select(&is_nan(y)?, y, &angle)?;
    select(&is_nan(x)?, x, &angle)
}

/// `a` to the power `b` with the special cases of IEEE 754's `pow`.
fn pow(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    let (zero, one) = (float(a, 0.0)?, float(a, 1.0)?);
    let half = float(a, 0.5)?;
    let magnitude = a.abs()?.log()?.mul(b)?.exp()?;
    // A base of -1 under an infinite exponent: 0 * inf above.
    let magnitude = select(&a.abs()?.eq(&one)?, &one, &magnitude)?;
    let whole = b.floor()?.eq(b)?;
    let halved = b.mul(&half)?;
    // Infinite exponents count as even.
    let is_odd = both(&whole, &halved.floor()?.ne(&halved)?)?;
    let negative = is_negative(a)?;
    let signed = select(&both(&negative, &is_odd)?, &magnitude.neg()?, &magnitude)?;
    let infinite_base = a.abs()?.eq(&float(a, f64::INFINITY)?)?;
    let undefined = both(&a.lt(&zero)?, &both(&not(&whole)?, &not(&infinite_base)?)?)?;
    let result = select(&undefined, &float(a, f64::NAN)?, &signed)?;
    let result = select(&is_nan(b)?, b, &result)?;
    let result = select(&is_nan(a)?, a, &result)?;
    select(&either(&b.eq(&zero)?, &a.eq(&one)?)?, &one, &result)
}
