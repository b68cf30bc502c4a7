//! Arithmetic, functions, comparisons, bits.

use burn_backend::{DType, FloatDType, IntDType};
use burn_tensor::{ElementConversion, Int, Tensor, TensorData, s};

use crate::check::{bools, f32s, floats, ints};
use crate::{outs, programs};

programs! {
    fn unary_functions(device) {
        let mut all = Vec::new();
        for dtype in [DType::F32, DType::F64, DType::F16, DType::BF16] {
            let x = floats::<B, 2>(device, [3, 5], 1, dtype);
            let positive = x.clone().abs() + 0.25;
            let unit = x.clone() / 2.5;
            all.extend(outs![
                x.clone().neg(), x.clone().abs(), x.clone().sign(), x.clone().exp(), x.clone().erf(), x.clone().recip(),
                x.clone().cos(), x.clone().sin(), x.clone().tan(), x.clone().cosh(), x.clone().sinh(), x.clone().tanh(),
                x.clone().atan(), x.clone().asinh(), unit.clone().acos(), unit.clone().asin(), unit.atanh(),
                x.clone().round(), x.clone().floor(), x.clone().ceil(), x.clone().trunc(), x.clone().square(),
                positive.clone().log(), positive.clone().log1p(), positive.clone().sqrt(), (positive + 1.0).acosh(),
                x.clone().is_nan(), x.clone().is_inf(), x.int(),
            ]);
        }
        all
    }

    fn binary_functions(device) {
        let mut all = Vec::new();
        for dtype in [DType::F32, DType::F64, DType::F16] {
            let a = floats::<B, 3>(device, [2, 3, 4], 2, dtype);
            let b = floats::<B, 3>(device, [2, 3, 4], 3, dtype) + 2.125;
            let row = floats::<B, 3>(device, [1, 1, 4], 4, dtype) + 3.0;
            let column = floats::<B, 3>(device, [2, 3, 1], 5, dtype) + 3.0;
            all.extend(outs![
                a.clone() + b.clone(), a.clone() - row.clone(), a.clone() * column.clone(), a.clone() / row.clone(),
                column.clone() - row.clone(), a.clone().remainder(b.clone() + 1.0), a.clone().atan2(b.clone()),
                a.clone().abs().powf(row.clone()), a.clone().greater(b.clone()), a.clone().greater_equal(row.clone()),
                a.clone().lower(column.clone()), a.clone().lower_equal(b.clone()), a.clone().equal(a.clone()),
                a.clone().not_equal(b.clone()), a.clone().max_pair(b.clone()), a.min_pair(row),
            ]);
        }
        all
    }

    fn scalars_and_powers(device) {
        let mut all = Vec::new();
        for dtype in [DType::F32, DType::F64] {
            let x = floats::<B, 2>(device, [4, 4], 6, dtype);
            let positive = x.clone().abs() + 0.5;
            all.extend(outs![
                x.clone() + 1.5, x.clone() - 0.1, x.clone() * 3.0, x.clone() / 0.3, x.clone().remainder_scalar(0.75),
                2.0 - x.clone(), 1.0 / positive.clone(), x.clone().clamp(-0.5, 0.75), x.clone().clamp_min(0.0),
                x.clone().clamp_max(0.1), x.clone().greater_elem(0.5), x.clone().greater_equal_elem(0.5),
                x.clone().lower_elem(-0.25), x.clone().lower_equal_elem(0.0), x.clone().equal_elem(0.5),
                x.clone().not_equal_elem(0.5), x.clone().powi_scalar(0), x.clone().powi_scalar(1),
                x.clone().powi_scalar(2), x.clone().powi_scalar(3), positive.clone().powi_scalar(-1),
                positive.clone().powi_scalar(-2), positive.clone().powf_scalar(0.5), positive.clone().powf_scalar(-1.5),
                x.clone().powf_scalar(2.0), positive.powf_scalar(4.0),
                Tensor::<B, 2>::full([2, 3], 0.7, (device, dtype)), x.full_like(-1.25),
            ]);
        }
        all
    }

    fn integers(device) {
        let mut all = Vec::new();
        for dtype in [DType::I64, DType::I32, DType::I16, DType::I8] {
            let a = ints::<B, 2>(device, [4, 5], 8, -9..10, dtype);
            let b = ints::<B, 2>(device, [4, 5], 9, 1..6, dtype);
            let c = ints::<B, 2>(device, [1, 5], 10, -4..0, dtype);
            all.extend(outs![
                a.clone() + c.clone(), a.clone() - b.clone(), a.clone() * c.clone(), a.clone() / b.clone(), a.clone() / c.clone(),
                a.clone().remainder(b.clone()), a.clone().remainder(c.clone()), a.clone() + 3, a.clone() - 7, a.clone() * -2,
                a.clone() / 4, a.clone().remainder_scalar(4), a.clone().neg(), a.clone().abs(), a.clone().sign(),
                a.clone().clamp(-3, 4), a.clone().greater(b.clone()), a.clone().lower_equal(c.clone()),
                a.clone().equal(b.clone()), a.clone().equal_elem(3), a.clone().greater_elem(-2), a.clone().lower_elem(5),
                a.clone().bitwise_and(b.clone()), a.clone().bitwise_or(c.clone()), a.clone().bitwise_xor(b.clone()),
                a.clone().bitwise_not(), a.clone().bitwise_and_scalar(6.elem()), a.clone().bitwise_or_scalar(9.elem()),
                a.clone().bitwise_xor_scalar(5.elem()), a.clone().bitwise_left_shift(b.clone()), a.clone().bitwise_right_shift(b.clone()),
                a.clone().bitwise_left_shift_scalar(2.elem()), a.clone().bitwise_right_shift_scalar(1.elem()), a.clone().powi_scalar(2),
                a.clone().powi_scalar(3), a.clone().powi(b.clone() / 2), a.clone().float(),
            ]);
        }
        all
    }

    fn unsigned_integers(device) {
        let mut all = Vec::new();
        for dtype in [DType::U64, DType::U32, DType::U16, DType::U8] {
            let a = ints::<B, 2>(device, [4, 5], 11, 0..12, dtype);
            let b = ints::<B, 2>(device, [4, 5], 12, 1..6, dtype);
            all.extend(outs![
                a.clone() + b.clone(), a.clone() * b.clone(), a.clone() / b.clone(), a.clone().remainder(b.clone()),
                a.clone().bitwise_and(b.clone()), a.clone().bitwise_left_shift(b.clone()), a.clone().greater(b.clone()),
                a.clone().equal(b), a.clone().float(), a.cast(DType::I64),
            ]);
        }
        all
    }

    fn truth_values(device) {
        let a = bools::<B, 2>(device, [3, 4], 13);
        let b = bools::<B, 2>(device, [3, 4], 14);
        outs![
            a.clone().bool_and(b.clone()), a.clone().bool_or(b.clone()), a.clone().bool_not(), a.clone().bool_xor(b.clone()),
            a.clone().equal(b.clone()), a.clone().not_equal(b), a.clone().int(), a.clone().float(), a.clone().any(), a.clone().all(),
            a.clone().any_dim(0), a.all_dim(1),
        ]
    }

    fn conversions(device) {
        let x = f32s::<B, 1>(device, [9], 15) * 100.0;
        let i = ints::<B, 1>(device, [9], 16, -200..300, DType::I32);
        outs![
            x.clone().cast(DType::F64), x.clone().cast(DType::F16), x.clone().cast(DType::BF16), x.clone().cast(IntDType::I8),
            x.clone().cast(IntDType::U8), x.clone().cast(IntDType::I64), i.clone().cast(DType::I64), i.clone().cast(DType::I8),
            i.clone().cast(DType::U8), i.clone().cast(FloatDType::F16), i.clone().cast(FloatDType::F64), i.clone().bool(), x.bool(),
            i.float().int(),
        ]
    }

    fn products(device) {
        let mut all = Vec::new();
        for dtype in [DType::F32, DType::F64, DType::F16] {
            let a = floats::<B, 3>(device, [2, 3, 4], 17, dtype);
            let b = floats::<B, 3>(device, [2, 4, 5], 18, dtype);
            let one = floats::<B, 3>(device, [1, 4, 5], 19, dtype);
            let left = floats::<B, 3>(device, [1, 3, 4], 20, dtype);
            let u = floats::<B, 2>(device, [5, 3], 21, dtype);
            let v = floats::<B, 2>(device, [1, 3], 22, dtype);
            all.extend(outs![
                a.clone().matmul(b.clone()), a.clone().matmul(one.clone()), left.clone().matmul(b), left.matmul(one),
                a.clone().swap_dims(1, 2).matmul(a.clone()), u.clone().cross(v, 1), u.clone().matmul(u.transpose()),
            ]);
        }
        let a = floats::<B, 4>(device, [2, 1, 3, 4], 23, DType::F32);
        let b = floats::<B, 4>(device, [1, 3, 4, 2], 24, DType::F32);
        let i = ints::<B, 2>(device, [3, 4], 25, -5..6, DType::I32);
        all.extend(outs![a.matmul(b), i.clone().matmul(i.transpose())]);
        all
    }

    fn nothing_at_all(device) {
        let x = Tensor::<B, 2>::zeros([0, 3], device);
        let y = f32s::<B, 2>(device, [2, 3], 26);
        let i = Tensor::<B, 1, Int>::zeros([0], device);
        outs![
            x.clone() + 1.0, x.clone() * x.clone(), x.clone().exp(), x.clone().sum(), x.clone().sum_dim(0), x.clone().swap_dims(0, 1),
            Tensor::cat(vec![x.clone(), y.clone(), x.clone()], 0), x.clone().matmul(y.clone().transpose()), x.transpose().matmul(Tensor::zeros([0, 2], device)),
            y.select(0, i),
        ]
    }
}

/// The router composes sign and others of its own operations, which do not keep NaN as burn-flex does:
/// executors only.
#[test]
fn special_values() {
    use crate::record::Log;
    crate::check::check_executors(|device| {
        let values = [
            f32::NAN,
            f32::INFINITY,
            f32::NEG_INFINITY,
            0.0,
            -0.0,
            1.0,
            f32::MAX,
            f32::MIN_POSITIVE,
        ];
        let x = Tensor::<Log, 1>::from_data(TensorData::from(values), device);
        let y = x.clone().flip([0]);
        let no_nan = x.clone().slice(s![1..8]);
        outs![
            x.clone() + y.clone(),
            x.clone() * y.clone(),
            x.clone() / y.clone(),
            x.clone().clamp(-1.0, 1.0),
            x.clone().is_nan(),
            x.clone().is_inf(),
            x.clone().greater(y.clone()),
            x.clone().equal(y.clone()),
            x.clone().not_equal(y),
            x.clone().equal_elem(0.0),
            x.clone().sqrt(),
            x.clone().log(),
            x.clone().exp(),
            x.clone().recip(),
            x.clone().int(),
            x.clone().sign(),
            x.clone().abs(),
            x.clone().round(),
            x.clone().tanh(),
            x.clone().powi_scalar(2),
            x.clone().powi_scalar(0),
            x.clone().cumsum(0),
            x.clone().cummax(0),
            x.clone().cummin(0),
            x.clone().max(),
            x.clone().min(),
            x.clone().sum(),
            x.clone().argmax(0),
            x.argmin(0),
            no_nan.clone().max(),
            no_nan.min(),
        ]
    });
}
