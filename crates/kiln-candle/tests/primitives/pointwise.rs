//! Pointwise primitives over every pair of telling numbers, in every element type.

use crate::common::{FLOATS, INTS, Relative, check, check_by, pairs, random, special, special_ints};
use kiln_graph::op::{BinaryOp, CompareOp, ReduceOp, UnaryOp};
use kiln_graph::{DType, HostTensor, Op};

fn all_special(dtype: DType) -> HostTensor {
    if dtype.is_float() {
        let values = special(dtype);
        HostTensor::from_floats(dtype, [values.len()], values)
    } else if dtype == DType::Bool {
        HostTensor::from_ints(dtype, [2], [0, 1])
    } else {
        let values = special_ints(dtype);
        HostTensor::from_ints(dtype, [values.len()], values)
    }
}

#[test]
fn functions_of_floats() {
    for dtype in FLOATS {
        for &op in UnaryOp::ALL.iter().filter(|&&op| op != UnaryOp::Not) {
            check(Op::Unary(op), &[all_special(dtype)]);
            check(Op::Unary(op), &[random(dtype, [5, 7], 3)]);
            check(Op::Unary(op), &[random(dtype, [], 4)]);
        }
    }
}

/// Near zero and near one these functions cancel when composed naively.
#[test]
fn functions_keep_their_digits_near_zero_and_one() {
    use UnaryOp::{Acos, Acosh, Asin, Asinh, Atan, Atanh, Expm1, Log1p, Sinh, Tanh};
    let tiny: Vec<f64> = (1..16)
        .flat_map(|n| [10f64.powi(-n), -(10f64.powi(-n)) / 3.0])
        .collect();
    let near_one: Vec<f64> = tiny.iter().map(|x| 1.0 - x.abs()).collect();
    let above_one: Vec<f64> = tiny.iter().map(|x| 1.0 + x.abs()).collect();
    let of = |values: &[f64]| [HostTensor::from_vec([values.len()], values)];
    for op in [Expm1, Log1p, Sinh, Asinh, Tanh, Atanh, Asin, Atan] {
        check(Op::Unary(op), &of(&tiny));
    }
    for op in [Asin, Acos, Atanh] {
        check(Op::Unary(op), &of(&near_one));
    }
    check(Op::Unary(Acosh), &of(&above_one));
}

#[test]
fn functions_of_integers_and_bools() {
    for dtype in INTS {
        for op in [UnaryOp::Neg, UnaryOp::Abs, UnaryOp::Sign, UnaryOp::Not] {
            check(Op::Unary(op), &[all_special(dtype)]);
        }
    }
    check(Op::Unary(UnaryOp::Not), &[all_special(DType::Bool)]);
}

#[test]
fn pairs_of_floats() {
    use BinaryOp::{Add, Atan2, Div, Max, Min, Mul, Pow, Rem, Sub};
    for dtype in FLOATS {
        for op in [Add, Sub, Mul, Div, Rem, Max, Min, Atan2] {
            check(Op::Binary(op), &pairs(dtype));
        }
        // The error of exp(b ln a) is the exponent's: up to 710 units in the last place in f64.
        check_by(Op::Binary(Pow), &pairs(dtype), Relative::Element, 2.0);
    }
}

#[test]
fn pairs_of_integers() {
    use BinaryOp::{Add, And, Div, Max, Min, Mul, Or, Pow, Rem, Shl, Shr, Sub, Xor};
    for dtype in INTS {
        for op in [Add, Sub, Mul, Div, Rem, Pow, Max, Min, And, Or, Xor, Shl, Shr] {
            check(Op::Binary(op), &pairs(dtype));
        }
    }
    for op in [And, Or, Xor] {
        check(Op::Binary(op), &pairs(DType::Bool));
    }
}

#[test]
fn comparisons() {
    for dtype in DType::ALL {
        for &op in CompareOp::ALL {
            if dtype != DType::Bool || matches!(op, CompareOp::Eq | CompareOp::Ne) {
                check(Op::Compare(op), &pairs(dtype));
            }
        }
    }
}

#[test]
fn selection() {
    for dtype in DType::ALL {
        let [a, b] = pairs(dtype);
        let condition = random(DType::Bool, a.ty().shape.clone(), 9);
        check(Op::Select, &[condition, a, b]);
    }
}

#[test]
fn casts_between_all_types() {
    for from in DType::ALL {
        for to in DType::ALL {
            check(Op::Cast(to), &[all_special(from)]);
        }
    }
}

/// Around the limits of the integer types, where a conversion saturates.
#[test]
fn casts_saturate() {
    let limits: Vec<f64> = [7, 8, 15, 16, 31, 32, 63, 64]
        .iter()
        .flat_map(|&bits| {
            let border = 2f64.powi(bits);
            [
                border,
                -border,
                border - 0.5,
                -border - 0.5,
                border * (1.0 - 1e-15),
                border * 1.5,
                -border * 1.5,
            ]
        })
        .collect();
    for dtype in FLOATS {
        let x = HostTensor::from_floats(dtype, [limits.len()], limits.iter().copied());
        for to in INTS {
            check(Op::Cast(to), std::slice::from_ref(&x));
        }
    }
}

/// Numbers a little above the middle of two results, which a rounding on the way takes to the middle.
#[test]
fn casts_round_once() {
    let exact = |x: HostTensor, to: DType, expected: f64| {
        let got = check(Op::Cast(to), std::slice::from_ref(&x));
        assert_eq!(got[0].to_f64s(), [expected], "{:?} to {to}", x.ty());
    };
    let int = |dtype: DType, value: i64| HostTensor::from_ints(dtype, [1], [value]);
    // 2^25 + 2^17 + 1: results are 2^18 apart, and numbers of f32 4.
    for dtype in [DType::I32, DType::U32, DType::I64, DType::U64] {
        exact(int(dtype, 33_685_505), DType::BF16, 33_816_576.0);
    }
    // 2049: results are 2 apart.
    exact(int(DType::I16, 2049), DType::F16, 2048.0);
    // 2^62 + 2^54 + 1: f64 ends where the middle is.
    let near_middle = (1i64 << 62) + (1 << 54) + 1;
    for dtype in [DType::I64, DType::U64] {
        exact(
            int(dtype, near_middle),
            DType::BF16,
            2f64.powi(62) + 2f64.powi(55),
        );
    }
    // 2^63 + 2^39 + 1 by its bits, to f32.
    let near_middle = i64::MIN + (1 << 39) + 1;
    exact(
        int(DType::U64, near_middle),
        DType::F32,
        2f64.powi(63) + 2f64.powi(40),
    );
    let float = |value: f64| HostTensor::from_floats(DType::F64, [1], [value]);
    exact(
        float(1.0 + 2f64.powi(-8) + 2f64.powi(-40)),
        DType::BF16,
        1.0 + 2f64.powi(-7),
    );
    exact(
        float(1.0 + 2f64.powi(-11) + 2f64.powi(-40)),
        DType::F16,
        1.0 + 2f64.powi(-10),
    );
    // A sum of such, in f64.
    let terms = HostTensor::from_floats(DType::BF16, [3], [1.0, 2f64.powi(-8), 2f64.powi(-40)]);
    let sum = Op::Reduce {
        op: ReduceOp::Sum,
        axes: [0].into_iter().collect(),
    };
    let got = check(sum, &[terms]);
    assert_eq!(got[0].to_f64s(), [1.0 + 2f64.powi(-7)]);
}
