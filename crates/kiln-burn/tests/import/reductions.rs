//! Reductions, running reductions, extremes with their places.

use burn_backend::DType;
use burn_tensor::{Tensor, TensorData};

use crate::check::{check_executors, f32s, floats, ints};
use crate::{outs, programs};

programs! {
    fn of_floats(device) {
        let mut all = Vec::new();
        for dtype in [DType::F32, DType::F64, DType::F16, DType::BF16] {
            let x = floats::<B, 3>(device, [3, 4, 5], 100, dtype);
            all.extend(outs![x.clone().sum(), x.clone().mean(), x.clone().prod(), x.clone().max(), x.clone().min(), x.clone().max_abs()]);
            for axis in 0..3 {
                all.extend(outs![
                    x.clone().sum_dim(axis), x.clone().mean_dim(axis), x.clone().prod_dim(axis), x.clone().max_dim(axis),
                    x.clone().min_dim(axis), x.clone().max_abs_dim(axis), x.clone().argmax(axis), x.clone().argmin(axis),
                    x.clone().cumsum(axis), x.clone().cumprod(axis), x.clone().cummax(axis), x.clone().cummin(axis),
                ]);
                let (max, max_at) = x.clone().max_dim_with_indices(axis);
                let (min, min_at) = x.clone().min_dim_with_indices(axis);
                all.extend(outs![max, max_at, min, min_at, x.clone().var(axis)]);
            }
        }
        all
    }

    fn of_integers(device) {
        let mut all = Vec::new();
        for dtype in [DType::I64, DType::I32, DType::I16, DType::I8] {
            let x = ints::<B, 2>(device, [4, 3], 101, -3..4, dtype);
            all.extend(outs![x.clone().sum(), x.clone().mean(), x.clone().prod(), x.clone().max(), x.clone().min(), x.clone().max_abs()]);
            for axis in 0..2 {
                all.extend(outs![
                    x.clone().sum_dim(axis), x.clone().mean_dim(axis), x.clone().prod_dim(axis), x.clone().max_dim(axis),
                    x.clone().min_dim(axis), x.clone().argmax(axis), x.clone().argmin(axis), x.clone().cumsum(axis),
                    x.clone().cumprod(axis), x.clone().cummax(axis), x.clone().cummin(axis),
                ]);
                let (max, max_at) = x.clone().max_dim_with_indices(axis);
                all.extend(outs![max, max_at]);
            }
        }
        all
    }

    fn first_of_equals(device) {
        let x = Tensor::<B, 2>::from_data(TensorData::from([[1.0, 3.0, 3.0, f32::NAN], [2.0, 2.0, -1.0, -1.0]]), device);
        let y = x.clone().slice([0..2, 0..3]);
        outs![y.clone().argmax(1), y.argmin(1), x.clone().argmax(1), x.clone().argmin(0), x.clone().max_dim(1), x.min_dim(1)]
    }

    fn long_rows(device) {
        let x = f32s::<B, 2>(device, [3, 300], 102);
        outs![x.clone().sum_dim(1), x.clone().mean(), x.clone().max_dim(1), x.clone().argmin(1), x.clone().argmax(1), x.cumsum(1)]
    }
}

/// burn-flex has no top-k; the eager one is a sort.
#[test]
fn top_k() {
    let device = &burn_flex::FlexDevice;
    type L = crate::record::Log;
    check_executors(|_| {
        let x = f32s::<L, 2>(device, [3, 40], 103);
        let i = ints::<L, 2>(device, [4, 6], 104, -50..50, DType::I32);
        outs![
            x.clone().topk(3, 1),
            x.clone().argtopk(3, 1),
            x.clone().topk(2, 0),
            i.clone().topk(4, 1),
            i.argtopk(1, 0),
            x.argtopk(39, 1)
        ]
    });
}
