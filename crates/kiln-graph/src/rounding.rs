//! Rounding to the float types of 16 bits: to the nearest number, and from the middle of two to the even one.
//!
//! An `f64` must not be rounded to `f32` on its way to 16 bits. A number a little above the middle of two
//! results may round to the middle itself, and the second rounding then takes it to the even result, which may
//! be the farther one. (`half` 2.7 has that fault: `bf16::from_f64` looks at the upper 32 bits alone, and
//! `f16::from_f64` goes by way of `f32` where the processor converts `f32`.) Here the number is first
//! shortened to 13 significant bits by rounding *to odd*: digits are cut off, and the last one that stays
//! becomes 1 if any of them was not 0. A shortened number is in the middle of two results only if the number
//! itself is, and otherwise on the number's side of the middle, so that rounding it gives the result of
//! rounding once (S. Boldo and G. Melquiond, "Emulation of a FMA and correctly rounded sums: proved algorithms
//! using rounding to odd", 2008; the bits beyond the result must be two at least, and `f16` has 11 bits).
//!
//! Kernels shorten likewise before they round an `f64`.

use half::{bf16, f16};

use crate::DType;

/// Bits of an `f64` after the 13 significant ones that rounding to 16 bits looks at.
const CUT: u32 = 53 - 13;

/// `value`, in 13 significant bits. Exact in `f32` wherever a type of 16 bits does not round it to 0 or
/// infinity: the last bit of the smallest number that `bf16` does not round to 0, above 2^-134, is 2^-146, and
/// `f32` has multiples of 2^-149.
fn shortened(value: f64) -> f32 {
    let bits = value.to_bits();
    let cut = (1 << CUT) - 1;
    let odd = u64::from(bits & cut != 0) << CUT;
    // NaN keeps a fraction that is not 0, and infinity has none.
    f64::from_bits(bits & !cut | odd) as f32
}

/// An integer of 64 bits as an `f64` that rounds to the number of 16 bits nearest to the integer. One of more
/// than 53 bits is shortened as [`shortened`] does, to multiples of 2^11: they are `f64`s, and the middles of
/// two results are multiples of 2^12 there.
pub fn of_integer(value: i128) -> f64 {
    match value >> 53 {
        0 | -1 => value as f64,
        _ => ((value >> 12 << 12) | (i128::from(value & 0xfff != 0) << 11)) as f64,
    }
}

/// The number of `f16` nearest to `value`; infinity from 65520 on, and NaN for NaN.
pub fn to_f16(value: f64) -> f16 {
    f16::from_f32(shortened(value))
}

/// The number of `bf16` nearest to `value`; infinity from the middle between its largest number and 2^128 on,
/// and NaN for NaN.
pub fn to_bf16(value: f64) -> bf16 {
    bf16::from_f32(shortened(value))
}

/// The number of the float type `dtype` nearest to `value`. Numbers of other types are left as they are.
pub fn round(dtype: DType, value: f64) -> f64 {
    match dtype {
        DType::F32 => f64::from(value as f32),
        DType::F16 => to_f16(value).to_f64(),
        DType::BF16 => to_bf16(value).to_f64(),
        _ => value,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A type of 16 bits by its bits alone: the sign, then the exponent, then `fraction` bits.
    struct Format {
        fraction: u32,
        /// The exponent of the last bit of the subnormal numbers.
        last: i32,
    }

    const F16: Format = Format {
        fraction: 10,
        last: -24,
    };
    const BF16: Format = Format {
        fraction: 7,
        last: -133,
    };

    impl Format {
        fn infinity(&self) -> u16 {
            0x7fff >> self.fraction << self.fraction
        }

        /// A number that is not negative, as an integer and the power of two that it is multiplied by. In the
        /// place of infinity stands the number that would follow the largest one.
        fn exact(&self, bits: u16) -> (u64, i32) {
            let (exponent, fraction) = (
                i32::from(bits >> self.fraction),
                u64::from(bits) % (1 << self.fraction),
            );
            match exponent {
                0 => (fraction, self.last),
                _ => (fraction + (1 << self.fraction), self.last + exponent - 1),
            }
        }

        /// The bits nearest to `value`, found by bisection over the type's numbers and by exact comparison
        /// with the middle of two neighbours: no float is rounded on the way.
        fn nearest(&self, value: f64) -> u16 {
            let sign = if value.is_sign_negative() { 0x8000 } else { 0 };
            let magnitude = integer(value.abs());
            // The last number that is not above `value`.
            let (mut low, mut high) = (0, self.infinity());
            while high - low > 1 {
                let middle = low + (high - low) / 2;
                match compare(self.exact(middle), magnitude).is_le() {
                    true => low = middle,
                    false => high = middle,
                }
            }
            if compare(self.exact(high), magnitude).is_le() {
                return sign | high;
            }
            // Neighbours have the lower one's last bit between them, so the middle is half of that above it.
            let (number, exponent) = self.exact(low);
            let above = compare(magnitude, (2 * number + 1, exponent - 1));
            let up = above.is_gt() || above.is_eq() && low % 2 == 1;
            sign | (low + u16::from(up))
        }
    }

    /// A finite number that is not negative, as an integer and the power of two that it is multiplied by.
    fn integer(value: f64) -> (u64, i32) {
        let bits = value.to_bits();
        let (exponent, fraction) = ((bits >> 52) as i32, bits % (1 << 52));
        match exponent {
            0 => (fraction, -1074),
            _ => (fraction + (1 << 52), exponent - 1075),
        }
    }

    /// Compares `a.0 * 2^a.1` with `b.0 * 2^b.1`, both below 2^54 times their powers.
    fn compare(a: (u64, i32), b: (u64, i32)) -> std::cmp::Ordering {
        // With the highest bit at the same place numbers compare as their digits, otherwise by that place.
        let top = |(number, exponent): (u64, i32)| match number {
            0 => (i32::MIN, 0),
            _ => (
                exponent + 63 - number.leading_zeros() as i32,
                number << number.leading_zeros(),
            ),
        };
        top(a).cmp(&top(b))
    }

    fn check(value: f64) {
        let (half, brain) = (to_f16(value).to_bits(), to_bf16(value).to_bits());
        assert_eq!(half, F16.nearest(value), "{value:e} as f16");
        assert_eq!(brain, BF16.nearest(value), "{value:e} as bf16");
        let single = value as f32;
        if f64::from(single) == value {
            // What casts of f32 do.
            assert_eq!(half, f16::from_f32(single).to_bits(), "{value:e}");
            assert_eq!(half, f16::from_f32_const(single).to_bits(), "{value:e}");
            assert_eq!(brain, bf16::from_f32(single).to_bits(), "{value:e}");
        }
    }

    /// Integers at and beside the middles, where `f64` has none beside them.
    #[test]
    fn integers_round_once() {
        let nearest = |value: i128| to_bf16(of_integer(value)).to_f64() as i128;
        let step = 1i128 << 55;
        for magnitude in [1i128 << 62, (1 << 62) + step] {
            let middle = magnitude + step / 2;
            let even = if magnitude % (2 * step) == 0 {
                magnitude
            } else {
                magnitude + step
            };
            for sign in [1, -1] {
                assert_eq!(nearest(sign * middle), sign * even);
                assert_eq!(nearest(sign * (middle - 1)), sign * magnitude);
                assert_eq!(nearest(sign * (middle + 1)), sign * (magnitude + step));
            }
        }
        assert_eq!(nearest(i128::from(u64::MAX)), 1 << 64);
        for exact in [0, 1, -1, 255, -256, 1 << 53, -(1 << 53), i128::from(i64::MIN)] {
            assert_eq!(nearest(exact), exact);
        }
    }

    /// Each number of both types, the middle between it and the next one, and what lies beside both in `f64`
    /// and in `f32`.
    #[test]
    fn numbers_at_and_beside_the_middles() {
        for bits in 0..0x7fff_u16 {
            for format in [F16, BF16] {
                if bits > format.infinity() {
                    continue;
                }
                let (number, exponent) = format.exact(bits);
                let scaled = |number: u64, exponent: i32| number as f64 * 2f64.powi(exponent);
                for centre in [scaled(number, exponent), scaled(2 * number + 1, exponent - 1)] {
                    for beside in [
                        centre,
                        centre.next_up(),
                        centre.next_down(),
                        f64::from((centre as f32).next_up()),
                        f64::from((centre as f32).next_down()),
                        f64::from((centre as f32).next_up()).next_down(),
                        f64::from((centre as f32).next_down()).next_up(),
                    ] {
                        if beside.is_finite() {
                            check(beside);
                            check(-beside);
                        }
                    }
                }
            }
        }
    }

    /// Random bits with random exponents, and with all digits but a few cleared.
    #[test]
    fn random_numbers() {
        let mut state = 1_u64;
        let mut random = || {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            state ^ state >> 29
        };
        for _ in 0..200_000 {
            let bits = random();
            let exponent = 1023 - 140 + random() % 280;
            let near = bits & 0x800f_ffff_ffff_ffff | exponent << 52;
            let digits = random() % 53;
            let short = (near >> digits << digits) | (random() % 2);
            for bits in [bits, near, short] {
                let value = f64::from_bits(bits);
                if value.is_finite() {
                    check(value);
                }
            }
        }
    }

    #[test]
    fn infinities_nan_and_the_ends() {
        for (value, half, brain) in [
            (f64::INFINITY, 0x7c00, 0x7f80),
            (f64::NEG_INFINITY, 0xfc00, 0xff80),
            (0.0, 0, 0),
            (-0.0, 0x8000, 0x8000),
            (f64::MAX, 0x7c00, 0x7f80),
            (f64::MIN_POSITIVE, 0, 0),
            (65520f64.next_down(), 0x7bff, 0x4780),
            (65520.0, 0x7c00, 0x4780),
            // The middle between 2^128 and the largest bf16.
            ((2.0 - 2f64.powi(-8)) * 2f64.powi(127), 0x7c00, 0x7f80),
            (
                ((2.0 - 2f64.powi(-8)) * 2f64.powi(127)).next_down(),
                0x7c00,
                0x7f7f,
            ),
            (2f64.powi(-25), 0, 0x3300),
            (2f64.powi(-25).next_up(), 1, 0x3300),
            (2f64.powi(-134), 0, 0),
            (2f64.powi(-134).next_up(), 0, 1),
        ] {
            assert_eq!(
                (to_f16(value).to_bits(), to_bf16(value).to_bits()),
                (half, brain),
                "{value:e}"
            );
        }
        // Of the fraction of this NaN only the last bit is set.
        for nan in [f64::NAN, f64::from_bits(0x7ff0_0000_0000_0001)] {
            assert!(to_f16(nan).is_nan() && to_bf16(nan).is_nan() && round(DType::F16, nan).is_nan());
        }
        assert_eq!(round(DType::F32, 1.0 + 2f64.powi(-24)), 1.0);
        assert_eq!(round(DType::F64, 0.1), 0.1);
    }
}
