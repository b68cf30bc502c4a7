//! Tangents of functions of single elements: the tangent times the derivative.

use std::f64::consts::FRAC_2_SQRT_PI;

use kiln_graph::op::{BinaryOp, CompareOp, UnaryOp};
use kiln_graph::{DType, Op, Value};

use super::Forward;
use crate::build::Builder;
use crate::error::Result;

/// The derivative of `op` at `x`, where its value is `y`; none if that is zero almost everywhere.
fn derivative(b: &mut Builder, op: UnaryOp, x: Value, y: Value) -> Result<Option<Value>> {
    use UnaryOp::*;
    Ok(Some(match op {
        Neg => b.full_like(-1.0, x)?,
        // At 0 the mean of both sides, 0.
        Abs => b.unary(Sign, x)?,
        Exp => y,
        Expm1 => b.shift(y, 1.0)?,
        Log => b.unary(Recip, x)?,
        Log1p => {
            let moved = b.shift(x, 1.0)?;
            b.unary(Recip, moved)?
        }
        Sqrt => {
            let inverse = b.unary(Recip, y)?;
            b.scale(inverse, 0.5)?
        }
        Rsqrt => {
            let quotient = b.div(y, x)?;
            b.scale(quotient, -0.5)?
        }
        Recip => {
            let square = b.mul(y, y)?;
            b.neg(square)?
        }
        Sin => b.unary(Cos, x)?,
        Cos => {
            let sin = b.unary(Sin, x)?;
            b.neg(sin)?
        }
        Tan => {
            let square = b.mul(y, y)?;
            b.shift(square, 1.0)?
        }
        Asin | Acos => {
            let rest = one_minus_square(b, x)?;
            let slope = b.unary(Rsqrt, rest)?;
            if op == Acos { b.neg(slope)? } else { slope }
        }
        Atan => {
            let square = b.mul(x, x)?;
            let sum = b.shift(square, 1.0)?;
            b.unary(Recip, sum)?
        }
        Sinh => b.unary(Cosh, x)?,
        Cosh => b.unary(Sinh, x)?,
        Tanh => one_minus_square(b, y)?,
        Asinh => {
            let square = b.mul(x, x)?;
            let sum = b.shift(square, 1.0)?;
            b.unary(Rsqrt, sum)?
        }
        Acosh => {
            let (below, above) = (b.shift(x, -1.0)?, b.shift(x, 1.0)?);
            let product = b.mul(below, above)?;
            b.unary(Rsqrt, product)?
        }
        Atanh => {
            let rest = one_minus_square(b, x)?;
            b.unary(Recip, rest)?
        }
        Erf => {
            let square = b.mul(x, x)?;
            let exponent = b.neg(square)?;
            let bell = b.unary(Exp, exponent)?;
            b.scale(bell, FRAC_2_SQRT_PI)?
        }
        Sigmoid => {
            let rest = b.subtract_from(1.0, y)?;
            b.mul(y, rest)?
        }
        Sign | Not | Floor | Ceil | Round | Trunc | IsNan | IsInf => return Ok(None),
    }))
}

/// `1 - x^2` as `(1 - x) (1 + x)`, which does not cancel near 1.
fn one_minus_square(b: &mut Builder, x: Value) -> Result<Value> {
    let (below, above) = (b.subtract_from(1.0, x)?, b.shift(x, 1.0)?);
    b.mul(below, above)
}

/// The number that every element of `x` is, if the graph shows it.
fn constant_of(b: &Builder, mut x: Value) -> Option<f64> {
    loop {
        let node = b.graph.def(x);
        match node.op {
            Op::Constant { value, .. } => return Some(value.to_f64()),
            Op::Broadcast { .. } | Op::Reshape(_) => x = node.inputs[0],
            _ => return None,
        }
    }
}

impl Forward {
    pub(super) fn unary(&mut self, op: UnaryOp, x: Value, y: Value) -> Result<Option<Value>> {
        let Some(t) = self.tangent(x) else { return Ok(None) };
        if op == UnaryOp::Neg {
            return Ok(Some(self.b.neg(t)?));
        }
        let slope = derivative(&mut self.b, op, x, y)?;
        slope.map(|slope| self.b.mul(t, slope)).transpose()
    }

    pub(super) fn binary(&mut self, op: BinaryOp, a: Value, b: Value, y: Value) -> Result<Option<Value>> {
        let (ta, tb) = (self.tangent(a), self.tangent(b));
        match op {
            BinaryOp::Add => self.sum(ta, tb),
            BinaryOp::Sub => match (ta, tb) {
                (Some(ta), Some(tb)) => Ok(Some(self.b.sub(ta, tb)?)),
                (None, Some(tb)) => Ok(Some(self.b.neg(tb)?)),
                (ta, None) => Ok(ta),
            },
            BinaryOp::Mul => {
                let by_a = self.term(ta, |_| Ok(b))?;
                let by_b = self.term(tb, |_| Ok(a))?;
                self.sum(by_a, by_b)
            }
            BinaryOp::Div => {
                let by_b = tb.map(|tb| self.b.mul(tb, y)).transpose()?;
                let top = match (ta, by_b) {
                    (Some(ta), Some(by_b)) => Some(self.b.sub(ta, by_b)?),
                    (None, Some(by_b)) => Some(self.b.neg(by_b)?),
                    (ta, None) => ta,
                };
                top.map(|top| self.b.div(top, b)).transpose()
            }
            // y = a - b floor(a / b), and the floor is constant almost everywhere. The quotient may be
            // rounded up to the next integer: 1 / 0.1 is 10, and its floor 9. The floor is found from the
            // result.
            BinaryOp::Rem => {
                let by_b = self.term(tb, |build| {
                    let multiple = build.sub(a, y)?;
                    let quotient = build.div(multiple, b)?;
                    let floor = build.unary(UnaryOp::Round, quotient)?;
                    build.neg(floor)
                })?;
                self.sum(ta, by_b)
            }
            BinaryOp::Pow => {
                let by_a = self.term(ta, |build| power_by_base(build, a, b))?;
                let by_b = self.term(tb, |build| power_by_exponent(build, a, b, y))?;
                self.sum(by_a, by_b)
            }
            BinaryOp::Atan2 => {
                let by_a = self.term(ta, |build| over_squared_radius(build, b, a, b))?;
                let by_b = self.term(tb, |build| {
                    let slope = over_squared_radius(build, a, a, b)?;
                    build.neg(slope)
                })?;
                self.sum(by_a, by_b)
            }
            BinaryOp::Max | BinaryOp::Min => self.extreme(op, a, b),
            // These take integers and bools only.
            BinaryOp::And | BinaryOp::Or | BinaryOp::Xor | BinaryOp::Shl | BinaryOp::Shr => Ok(None),
        }
    }

    /// A tangent times its slope.
    fn term(
        &mut self,
        t: Option<Value>,
        slope: impl FnOnce(&mut Builder) -> Result<Value>,
    ) -> Result<Option<Value>> {
        let Some(t) = t else { return Ok(None) };
        let slope = slope(&mut self.b)?;
        Ok(Some(self.b.mul(t, slope)?))
    }

    /// The larger or smaller of two. Where they are equal both sides count half, as in PyTorch's `maximum`;
    /// beside a bound that does not vary the tangent passes whole, as in its `clamp`. A NaN beats every number,
    /// because the result is that NaN, and ties with another NaN, as in reductions ([`Forward::reduce`]).
    fn extreme(&mut self, op: BinaryOp, a: Value, b: Value) -> Result<Option<Value>> {
        match (self.tangent(a), self.tangent(b)) {
            (Some(ta), Some(tb)) => {
                let (first, second) = (self.beats(op, a, b)?, self.beats(op, b, a)?);
                let both = self.b.add(ta, tb)?;
                let half = self.b.scale(both, 0.5)?;
                let rest = self.b.select(second, tb, half)?;
                Ok(Some(self.b.select(first, ta, rest)?))
            }
            (Some(t), None) => self.unless_beaten(op, t, a, b).map(Some),
            (None, Some(t)) => self.unless_beaten(op, t, b, a).map(Some),
            (None, None) => Ok(None),
        }
    }

    /// The tangent of `x` where the bound does not take its place, and zeros elsewhere.
    fn unless_beaten(&mut self, op: BinaryOp, t: Value, x: Value, bound: Value) -> Result<Value> {
        let beaten = self.beats(op, bound, x)?;
        self.b.drop(beaten, t)
    }

    /// Where the extreme of `a` and `b` is `a` alone.
    fn beats(&mut self, op: BinaryOp, a: Value, b: Value) -> Result<Value> {
        let wins = match op {
            BinaryOp::Max => CompareOp::Gt,
            _ => CompareOp::Lt,
        };
        let further = self.b.compare(wins, a, b)?;
        if constant_of(&self.b, a).is_some_and(|a| !a.is_nan()) {
            return Ok(further);
        }
        let a_is_nan = self.b.unary(UnaryOp::IsNan, a)?;
        let b_is_number = self.b.compare(CompareOp::Eq, b, b)?;
        let is_only_nan = self.b.binary(BinaryOp::And, a_is_nan, b_is_number)?;
        self.b.binary(BinaryOp::Or, further, is_only_nan)
    }

    pub(super) fn select(&mut self, condition: Value, a: Value, b: Value) -> Result<Option<Value>> {
        if self.tangent(a).is_none() && self.tangent(b).is_none() {
            return Ok(None);
        }
        let (ta, tb) = (self.tangent_or_zeros(a)?, self.tangent_or_zeros(b)?);
        Ok(Some(self.b.select(condition, ta, tb)?))
    }

    pub(super) fn cast(&mut self, x: Value, dtype: DType) -> Result<Option<Value>> {
        let t = self.tangent(x);
        t.map(|t| self.b.cast(t, dtype)).transpose()
    }
}

/// `x / (a^2 + b^2)`.
fn over_squared_radius(build: &mut Builder, x: Value, a: Value, b: Value) -> Result<Value> {
    let (aa, bb) = (build.mul(a, a)?, build.mul(b, b)?);
    let sum = build.add(aa, bb)?;
    build.div(x, sum)
}

/// `b a^(b - 1)`, and 0 for an exponent of 0, also at a base of 0: there the exponent is taken for 1, so that
/// further derivatives are finite as well.
fn power_by_base(build: &mut Builder, a: Value, b: Value) -> Result<Value> {
    if let Some(exponent) = constant_of(build, b) {
        if exponent == 0.0 {
            return build.zeros_like(a);
        }
        let power = if exponent == 1.0 {
            build.full_like(1.0, a)?
        } else if exponent == 2.0 {
            a
        } else {
            let lower = build.full_like(exponent - 1.0, a)?;
            build.binary(BinaryOp::Pow, a, lower)?
        };
        return build.scale(power, exponent);
    }
    let zero = build.zeros_like(b)?;
    let one = build.full_like(1.0, b)?;
    let vanishes = build.compare(CompareOp::Eq, b, zero)?;
    let exponent = build.select(vanishes, one, b)?;
    let lower = build.sub(exponent, one)?;
    let power = build.binary(BinaryOp::Pow, a, lower)?;
    build.mul(b, power)
}

/// `a^b ln a`, and 0 at a base of 0 where the power is 0.
fn power_by_exponent(build: &mut Builder, a: Value, b: Value, y: Value) -> Result<Value> {
    let zero = build.zeros_like(a)?;
    let one = build.full_like(1.0, a)?;
    let base_is_zero = build.compare(CompareOp::Eq, a, zero)?;
    let grows = build.compare(CompareOp::Ge, b, zero)?;
    let flat = build.binary(BinaryOp::And, base_is_zero, grows)?;
    let base = build.select(flat, one, a)?;
    let log = build.unary(UnaryOp::Log, base)?;
    build.mul(y, log)
}
