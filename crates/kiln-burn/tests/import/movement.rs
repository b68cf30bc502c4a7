//! Movement and creation.

use burn_backend::DType;
use burn_tensor::{Bool, Int, Tensor, s};

use crate::check::{bools, f32s, floats, ints};
use crate::{outs, programs};

programs! {
    fn views(device) {
        let mut all = Vec::new();
        let x = f32s::<B, 3>(device, [2, 3, 4], 30);
        let i = ints::<B, 3>(device, [2, 3, 4], 31, 0..50, DType::I64);
        let b = bools::<B, 3>(device, [2, 3, 4], 32);
        macro_rules! each { ($($t:ident),*) => {$(
            all.extend(outs![
                $t.clone().reshape([4, 6]), $t.clone().swap_dims(0, 2), $t.clone().permute([2, 0, 1]), $t.clone().flip([0, 2]),
                $t.clone().slice(s![.., 1..2, ..]).expand([2, 5, 4]), $t.clone().reshape([1, 2, 3, 4]).expand([3, 2, 3, 4]),
                $t.clone().repeat_dim(1, 3), $t.clone().repeat(&[2, 1, 2]), $t.clone().slice(s![.., 0..1, ..]).repeat_dim(1, 4),
                Tensor::cat(vec![$t.clone(), $t.clone().flip([1])], 1), Tensor::cat(vec![$t.clone()], 0),
                $t.clone().squeeze_dims::<3>(&[]), $t.clone().unsqueeze_dim::<4>(1), $t.clone().swap_dims(0, 1).reshape([24]),
                Tensor::stack::<4>(vec![$t.clone(), $t.clone()], 2),
            ]);
        )*}; }
        each!(x, i, b);
        all
    }

    fn slices(device) {
        let mut all = Vec::new();
        let x = f32s::<B, 3>(device, [4, 5, 6], 33);
        let i = ints::<B, 3>(device, [4, 5, 6], 34, 0..50, DType::I32);
        let b = bools::<B, 3>(device, [4, 5, 6], 35);
        macro_rules! each { ($($t:ident),*) => {$(
            all.extend(outs![
                $t.clone().slice(s![1..3, .., 2..]), $t.clone().slice(s![..;2, 1..;2, ..-1]), $t.clone().slice(s![..;-1, .., ..]),
                $t.clone().slice(s![.., ..;-2, 1..5;-3]), $t.clone().slice(s![-2.., -3..-1]), $t.clone().slice(s![1..1]),
                $t.clone().narrow(1, 2, 2), $t.clone().slice(s![2, .., 3]),
            ]);
        )*}; }
        each!(x, i, b);
        all
    }

    fn slice_assignment(device) {
        let x = f32s::<B, 3>(device, [4, 5, 6], 36);
        let i = ints::<B, 2>(device, [4, 5], 37, 0..50, DType::I32);
        let b = bools::<B, 2>(device, [4, 5], 38);
        outs![
            x.clone().slice_assign(s![1..3, .., 2..4], f32s::<B, 3>(device, [2, 5, 2], 39)),
            x.clone().slice_assign(s![..;2, 1..;2, ..], f32s::<B, 3>(device, [2, 2, 6], 40)),
            x.clone().slice_assign(s![..;-1, 0..1, ..;-2], f32s::<B, 3>(device, [4, 1, 3], 41)),
            x.clone().slice_assign(s![0..0, .., ..], Tensor::zeros([0, 5, 6], device)),
            x.clone().slice_fill(s![1..2, 2..4], 9.5),
            i.clone().slice_assign(s![0..2], ints::<B, 2>(device, [2, 5], 42, 0..50, DType::I32)),
            b.clone().slice_assign(s![.., 1..3], bools::<B, 2>(device, [4, 2], 43)),
        ]
    }

    fn windows(device) {
        let x = f32s::<B, 3>(device, [2, 7, 3], 44);
        let i = ints::<B, 2>(device, [9, 2], 45, 0..50, DType::I32);
        let b = bools::<B, 1>(device, [10], 46);
        let a: Tensor<B, 4> = x.clone().unfold(1, 3, 1);
        let c: Tensor<B, 4> = x.clone().unfold(1, 2, 2);
        let d: Tensor<B, 4> = x.unfold(0, 2, 5);
        let e: Tensor<B, 3, Int> = i.unfold(0, 4, 2);
        let f: Tensor<B, 2, Bool> = b.unfold(0, 3, 3);
        outs![a, c, d, e, f]
    }

    fn creation(device) {
        outs![
            Tensor::<B, 2>::zeros([2, 3], (device, DType::F64)), Tensor::<B, 1>::ones([4], (device, DType::F16)),
            Tensor::<B, 2, Int>::ones([2, 2], (device, DType::U8)), Tensor::<B, 1, Int>::full([3], -4, (device, DType::I64)),
            Tensor::<B, 1, Bool>::full([3], true, device), Tensor::<B, 2>::empty([2, 2], device), Tensor::<B, 2, Int>::eye(4, device),
            f32s::<B, 2>(device, [5, 5], 47).triu(1), floats::<B, 2>(device, [5, 4], 48, DType::F64).tril(-1),
            f32s::<B, 2>(device, [2, 3], 49).pad((1, 0, 2, 1), 0.5),
        ]
    }
}
