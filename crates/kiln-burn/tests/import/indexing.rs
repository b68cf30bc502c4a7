//! Selection, gathering, scattering, masks.

use burn_backend::DType;
use burn_backend::tensor::IndexingUpdateOp;
use burn_tensor::{Int, Tensor, TensorData};

use crate::check::{bools, f32s, floats, ints};
use crate::{outs, programs};

programs! {
    fn selection(device) {
        let x = f32s::<B, 3>(device, [3, 4, 2], 60);
        let i = ints::<B, 2>(device, [4, 3], 61, 0..90, DType::I64);
        let b = bools::<B, 2>(device, [4, 3], 62);
        let indices = Tensor::<B, 1, Int>::from_data(TensorData::from([2, 0, 2, 1, 1]), (device, DType::I32));
        let wide = indices.clone().cast(DType::I64);
        let update = f32s::<B, 3>(device, [3, 5, 2], 63);
        outs![
            x.clone().select(0, indices.clone()), x.clone().select(1, wide.clone()), i.clone().select(1, indices.clone()),
            b.clone().select(0, wide), x.clone().select_assign(1, indices.clone(), update, IndexingUpdateOp::Add),
            i.clone().select_assign(0, indices.clone(), ints::<B, 2>(device, [5, 3], 64, -9..9, DType::I64), IndexingUpdateOp::Add),
            b.select_assign(0, indices, bools::<B, 2>(device, [5, 3], 65), IndexingUpdateOp::Add),
        ]
    }

    fn gather_and_scatter(device) {
        let mut all = Vec::new();
        for dtype in [DType::F32, DType::F64, DType::F16] {
            let x = floats::<B, 2>(device, [4, 5], 66, dtype);
            let rows = ints::<B, 2>(device, [4, 3], 67, 0..5, DType::I64);
            let columns = ints::<B, 2>(device, [6, 5], 68, 0..4, DType::I32);
            all.extend(outs![
                x.clone().gather(1, rows.clone()), x.clone().gather(0, columns.clone()),
                x.clone().scatter(1, rows, floats::<B, 2>(device, [4, 3], 69, dtype), IndexingUpdateOp::Add),
                x.scatter(0, columns, floats::<B, 2>(device, [6, 5], 70, dtype), IndexingUpdateOp::Add),
            ]);
        }
        let i = ints::<B, 3>(device, [2, 3, 4], 71, 0..90, DType::I32);
        let b = bools::<B, 3>(device, [2, 3, 4], 72);
        let indices = ints::<B, 3>(device, [2, 5, 4], 73, 0..3, DType::I64);
        all.extend(outs![
            i.clone().gather(1, indices.clone()), b.clone().gather(1, indices.clone()),
            i.scatter(1, indices.clone(), ints::<B, 3>(device, [2, 5, 4], 74, -9..9, DType::I32), IndexingUpdateOp::Add),
            b.scatter(1, indices, bools::<B, 3>(device, [2, 5, 4], 75), IndexingUpdateOp::Add),
        ]);
        all
    }

    fn many_dimensions_at_once(device) {
        let x = f32s::<B, 3>(device, [3, 4, 2], 76);
        let i = ints::<B, 2>(device, [3, 4], 77, 0..90, DType::I32);
        let pairs = Tensor::<B, 2, Int>::from_data(TensorData::from([[0, 1], [2, 3], [0, 1], [1, 0]]), (device, DType::I64));
        let singles = Tensor::<B, 2, Int>::from_data(TensorData::from([[2], [0]]), (device, DType::I32));
        let mut all = outs![
            x.clone().gather_nd::<2, 2>(pairs.clone()), x.clone().gather_nd::<2, 3>(singles.clone()),
            i.clone().gather_nd::<2, 1>(pairs.clone()),
        ];
        let (updates, distinct) = (f32s::<B, 2>(device, [4, 2], 78), f32s::<B, 3>(device, [2, 4, 2], 79));
        for op in [IndexingUpdateOp::Assign, IndexingUpdateOp::Add, IndexingUpdateOp::Mul, IndexingUpdateOp::Min, IndexingUpdateOp::Max] {
            all.extend(outs![
                x.clone().scatter_nd(pairs.clone(), updates.clone(), op), x.clone().scatter_nd(singles.clone(), distinct.clone(), op),
                i.clone().scatter_nd(pairs.clone(), ints::<B, 1>(device, [4], 80, -3..9, DType::I32), op),
            ]);
        }
        all
    }

    fn masks(device) {
        let mut all = Vec::new();
        let mask = bools::<B, 2>(device, [3, 4], 81);
        for dtype in [DType::F32, DType::F64, DType::F16, DType::BF16] {
            let x = floats::<B, 2>(device, [3, 4], 82, dtype);
            all.extend(outs![
                x.clone().mask_fill(mask.clone(), -1e4), x.clone().mask_fill(mask.clone(), f32::NEG_INFINITY),
                x.clone().mask_where(mask.clone(), floats::<B, 2>(device, [3, 4], 83, dtype)),
            ]);
        }
        let i = ints::<B, 2>(device, [3, 4], 84, -9..9, DType::I32);
        all.extend(outs![
            i.clone().mask_fill(mask.clone(), 7), i.clone().mask_where(mask.clone(), i.neg()), mask.clone().mask_fill(mask.clone(), false),
            mask.clone().mask_where(mask.clone(), mask.bool_not()),
        ]);
        all
    }
}
