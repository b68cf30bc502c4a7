//! Operations of neural network modules.

use burn_backend::DType;
use burn_backend::ops::{
    AttentionModuleOptions, ConvOptions, ConvTransposeOptions, DeformConvOptions, GridSampleOptions,
    InterpolateMode, InterpolateOptions,
};
use burn_tensor::{Tensor, module};

use crate::check::{bools, f32s, floats, ints};
use crate::{outs, programs};

programs! {
    fn linear_and_embedding(device) {
        let x = f32s::<B, 3>(device, [2, 3, 4], 120);
        let w = f32s::<B, 2>(device, [4, 5], 121);
        let indices = ints::<B, 2>(device, [3, 6], 122, 0..4, DType::I32);
        outs![
            module::linear(x.clone(), w.clone(), Some(f32s::<B, 1>(device, [5], 123))), module::linear(x, w.clone(), None),
            module::linear(f32s::<B, 2>(device, [1, 4], 124), w.clone(), None), module::linear(f32s::<B, 1>(device, [4], 125), w.clone(), None),
            module::embedding(w, indices),
        ]
    }

    fn convolutions(device) {
        let mut all = Vec::new();
        for dtype in [DType::F32, DType::F64] {
            let x = floats::<B, 3>(device, [2, 4, 11], 126, dtype);
            let w = floats::<B, 3>(device, [6, 2, 3], 127, dtype);
            let b = floats::<B, 1>(device, [6], 128, dtype);
            all.extend(outs![
                module::conv1d(x.clone(), w.clone(), Some(b.clone()), ConvOptions::new([2], [1], [2], 2)),
                module::conv1d(x, w, None, ConvOptions::new([1], [0], [1], 2)),
            ]);
            let x = floats::<B, 4>(device, [2, 4, 7, 6], 129, dtype);
            let w = floats::<B, 4>(device, [6, 4, 3, 2], 130, dtype);
            let depth = floats::<B, 4>(device, [4, 1, 3, 3], 131, dtype);
            all.extend(outs![
                module::conv2d(x.clone(), w.clone(), Some(b.clone()), ConvOptions::new([1, 2], [1, 0], [1, 1], 1)),
                module::conv2d(x.clone(), w, Some(b.clone()), ConvOptions::new([2, 1], [2, 1], [2, 3], 1)),
                module::conv2d(x, depth, None, ConvOptions::new([2, 2], [1, 1], [1, 1], 4)),
            ]);
            let x = floats::<B, 5>(device, [1, 2, 4, 5, 4], 132, dtype);
            let w = floats::<B, 5>(device, [4, 1, 2, 3, 2], 133, dtype);
            all.extend(outs![module::conv3d(x, w, None, ConvOptions::new([1, 2, 1], [0, 1, 1], [1, 1, 2], 2))]);
        }
        all
    }

    fn transposed_convolutions(device) {
        let mut all = Vec::new();
        let x = f32s::<B, 3>(device, [2, 4, 5], 134);
        let w = f32s::<B, 3>(device, [4, 3, 3], 135);
        let b = f32s::<B, 1>(device, [6], 136);
        for (stride, padding, extra, dilation) in [(1, 0, 0, 1), (2, 1, 1, 1), (3, 0, 2, 2), (2, 2, 0, 2), (1, 1, 0, 1), (2, 0, 1, 1), (1, 0, 3, 1)] {
            let options = ConvTransposeOptions::new([stride], [padding], [extra], [dilation], 2);
            all.extend(outs![module::conv_transpose1d(x.clone(), w.clone(), Some(b.clone()), options)]);
        }
        let x = f32s::<B, 4>(device, [2, 2, 4, 3], 137);
        let w = f32s::<B, 4>(device, [2, 3, 3, 2], 138);
        let options = ConvTransposeOptions::new([2, 1], [1, 0], [1, 0], [1, 2], 1);
        all.extend(outs![module::conv_transpose2d(x, w, None, options)]);
        let x = f32s::<B, 5>(device, [1, 2, 3, 2, 3], 139);
        let w = f32s::<B, 5>(device, [2, 2, 2, 2, 3], 140);
        let options = ConvTransposeOptions::new([2, 1, 2], [0, 1, 1], [1, 0, 0], [1, 1, 1], 1);
        all.extend(outs![module::conv_transpose3d(x, w, None, options)]);
        all
    }

    fn pooling(device) {
        let mut all = Vec::new();
        let x = f32s::<B, 3>(device, [2, 3, 11], 141);
        let y = floats::<B, 4>(device, [2, 3, 9, 8], 142, DType::F64);
        for ceil in [false, true] {
            for include in [false, true] {
                all.extend(outs![
                    module::avg_pool1d(x.clone(), 3, 2, 1, include, ceil),
                    module::avg_pool2d(y.clone(), [3, 2], [2, 3], [1, 0], include, ceil),
                ]);
            }
            let (values, indices) = module::max_pool1d_with_indices(x.clone(), 3, 2, 1, 2, ceil);
            let (more, places) = module::max_pool2d_with_indices(y.clone(), [2, 3], [2, 2], [1, 1], [2, 1], ceil);
            all.extend(outs![
                module::max_pool1d(x.clone(), 3, 3, 1, 1, ceil), module::max_pool2d(y.clone(), [3, 2], [2, 2], [1, 0], [1, 2], ceil),
                values, indices, more, places,
            ]);
        }
        all
    }

    /// A last window that starts in the padding after the input exists on burn-flex only.
    fn pooling_beyond_the_input(device) {
        let x = f32s::<B, 4>(device, [1, 2, 5, 5], 143);
        outs![
            module::avg_pool2d(x.clone(), [2, 2], [3, 3], [1, 1], true, true), module::max_pool2d(x.clone(), [2, 2], [3, 3], [1, 1], [1, 1], true),
            module::avg_pool1d(x.reshape([1, 2, 25]), 1, 13, 0, false, true),
        ]
    }

    fn adaptive_pooling(device) {
        let x = f32s::<B, 3>(device, [2, 3, 12], 144);
        let y = f32s::<B, 4>(device, [2, 3, 7, 9], 145);
        outs![
            module::adaptive_avg_pool1d(x.clone(), 4), module::adaptive_avg_pool1d(x.clone(), 5), module::adaptive_avg_pool1d(x, 17),
            module::adaptive_avg_pool2d(y.clone(), [1, 1]), module::adaptive_avg_pool2d(y.clone(), [7, 3]), module::adaptive_avg_pool2d(y, [3, 4]),
        ]
    }

    fn interpolation(device) {
        let mut all = Vec::new();
        let x = f32s::<B, 4>(device, [2, 2, 5, 7], 146);
        for mode in [InterpolateMode::Nearest, InterpolateMode::Bilinear, InterpolateMode::Bicubic, InterpolateMode::Lanczos3] {
            for align in [false, true] {
                for size in [[10, 14], [3, 4], [1, 9], [5, 7], [13, 1]] {
                    let options = InterpolateOptions { mode: mode.clone(), align_corners: align };
                    all.extend(outs![module::interpolate(x.clone(), size, options)]);
                }
            }
        }
        all
    }

    fn attention(device) {
        let mut all = Vec::new();
        for (length, keys) in [(5, 5), (3, 6)] {
            let q = f32s::<B, 4>(device, [2, 3, length, 4], 147);
            let k = f32s::<B, 4>(device, [2, 3, keys, 4], 148);
            let v = f32s::<B, 4>(device, [2, 3, keys, 5], 149);
            let bias = f32s::<B, 4>(device, [2, 3, length, keys], 150);
            let mask = bools::<B, 4>(device, [2, 3, length, keys], 151);
            let nobody = Tensor::ones_like(&mask);
            let plain = AttentionModuleOptions { scale: None, softcap: None, is_causal: false };
            let full = AttentionModuleOptions { scale: Some(0.7), softcap: Some(1.5), is_causal: true };
            all.extend(outs![
                module::attention(q.clone(), k.clone(), v.clone(), None, None, plain), module::attention(q.clone(), k.clone(), v.clone(), Some(mask.clone()), None, plain),
                module::attention(q.clone(), k.clone(), v.clone(), Some(mask), Some(bias), full), module::attention(q, k, v, Some(nobody), None, plain),
            ]);
        }
        all
    }

    fn kept_whole(device) {
        let x = f32s::<B, 4>(device, [1, 2, 5, 6], 152);
        let grid = f32s::<B, 4>(device, [1, 3, 4, 2], 153) / 2.0;
        let w = f32s::<B, 4>(device, [3, 2, 3, 3], 154);
        let offset = f32s::<B, 4>(device, [1, 18, 3, 4], 155) / 4.0;
        let mask = f32s::<B, 4>(device, [1, 9, 3, 4], 156);
        outs![
            x.clone().grid_sample_2d(grid, GridSampleOptions::default()),
            module::deform_conv2d(x, offset, w, Some(mask), Some(f32s::<B, 1>(device, [3], 157)), DeformConvOptions::new([1, 1], [0, 0], [1, 1], 1, 1)),
        ]
    }
}
