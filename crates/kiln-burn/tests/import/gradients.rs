//! Gradients: the operations that autodiff emits.

use burn_backend::DType;
use burn_backend::ops::{ConvOptions, ConvTransposeOptions, InterpolateMode, InterpolateOptions};
use burn_tensor::{Tensor, activation, module};

use crate::check::{bools, f32s, ints};
use crate::{gradients, outs};

/// The gradients of the sum of a weighted result, so that no two of its elements weigh the same.
macro_rules! grads {
    ($loss:expr; $($x:ident),*) => {{
        let y = $loss;
        let weights = crate::check::f32s(&y.device(), y.dims(), 999);
        let grads = (y * weights).sum().backward();
        outs![$($x.grad(&grads).expect("reached")),*]
    }};
}

/// burn-flex has a GELU of its own, less accurate than the operations the router makes of it.
#[test]
fn gelu() {
    type A = burn_autodiff::Autodiff<crate::record::Log>;
    crate::check::check_executors(|device| {
        let x = f32s::<A, 2>(device, [3, 4], 199).require_grad();
        grads!(activation::gelu(x.clone()); x)
    });
}

gradients! {
    fn pointwise(device, A) {
        let x = f32s::<A, 2>(device, [3, 4], 200).require_grad();
        let y = (f32s::<A, 2>(device, [1, 4], 201) + 3.0).require_grad();
        let z = x.clone().exp() * y.clone().log() + x.clone().sin() / y.clone() - (x.clone() * y.clone()).tanh() + x.clone().powf_scalar(3.0)
            + y.clone().powf_scalar(0.5) + x.clone().abs() + x.clone().clamp(-1.0, 1.0) + activation::silu(x.clone()) + activation::relu(x.clone()) + x.clone().erf() + y.clone().recip();
        grads!(z; x, y)
    }

    fn reductions(device, A) {
        let x = f32s::<A, 3>(device, [3, 4, 5], 202).require_grad();
        let z = x.clone().mean_dim(1) + x.clone().max_dim(1) * x.clone().min_dim(1) + x.clone().sum_dim(1) + x.clone().var(1)
            + activation::softmax(x.clone(), 2).sum_dim(1) + activation::log_softmax(x.clone(), 1).mean_dim(1)
            + x.clone().prod_dim(1) + x.clone().cumsum(0).sum_dim(1);
        grads!(z; x)
    }

    fn movement_and_indexing(device, A) {
        let x = f32s::<A, 2>(device, [4, 6], 203).require_grad();
        let indices = ints::<A, 1>(device, [5], 204, 0..4, DType::I64);
        let places = ints::<A, 2>(device, [4, 6], 205, 0..6, DType::I64);
        let z = x.clone().select(0, indices).sum_dim(0).expand([4, 6]) + x.clone().gather(1, places)
            + x.clone().slice([1..3, 0..6]).repeat_dim(0, 2) + x.clone().swap_dims(0, 1).reshape([4, 6])
            + Tensor::cat(vec![x.clone().slice([0..4, 3..6]), x.clone().slice([0..4, 0..3])], 1) + x.clone().flip([1])
            + x.clone().mask_fill(bools::<A, 2>(device, [4, 6], 206), 0.5)
            + x.clone().slice_assign([0..2, 0..2], x.clone().slice([2..4, 1..3]));
        grads!(z; x)
    }

    fn products(device, A) {
        let a = f32s::<A, 3>(device, [2, 3, 4], 207).require_grad();
        let b = f32s::<A, 3>(device, [1, 4, 5], 208).require_grad();
        let w = f32s::<A, 2>(device, [5, 2], 209).require_grad();
        let c = f32s::<A, 1>(device, [2], 210).require_grad();
        let z = module::linear(a.clone().matmul(b.clone()), w.clone(), Some(c.clone()));
        grads!(z; a, b, w, c)
    }

    fn embedding(device, A) {
        let w = f32s::<A, 2>(device, [7, 3], 211).require_grad();
        let z = module::embedding(w.clone(), ints::<A, 2>(device, [2, 5], 212, 0..7, DType::I32));
        grads!(z; w)
    }

    fn convolution_1d(device, A) {
        let x = f32s::<A, 3>(device, [2, 4, 9], 213).require_grad();
        let w = f32s::<A, 3>(device, [6, 2, 3], 214).require_grad();
        let b = f32s::<A, 1>(device, [6], 215).require_grad();
        let z = module::conv1d(x.clone(), w.clone(), Some(b.clone()), ConvOptions::new([2], [1], [2], 2));
        grads!(z; x, w, b)
    }

    fn convolution_2d(device, A) {
        let x = f32s::<A, 4>(device, [2, 3, 8, 7], 216).require_grad();
        let w = f32s::<A, 4>(device, [4, 3, 3, 2], 217).require_grad();
        let b = f32s::<A, 1>(device, [4], 218).require_grad();
        let z = module::conv2d(x.clone(), w.clone(), Some(b.clone()), ConvOptions::new([2, 1], [1, 0], [1, 2], 1));
        grads!(z; x, w, b)
    }

    fn convolution_2d_by_channel(device, A) {
        let x = f32s::<A, 4>(device, [2, 4, 6, 6], 219).require_grad();
        let w = f32s::<A, 4>(device, [4, 1, 3, 3], 220).require_grad();
        let z = module::conv2d(x.clone(), w.clone(), None, ConvOptions::new([2, 2], [1, 1], [1, 1], 4));
        grads!(z; x, w)
    }

    fn convolution_3d(device, A) {
        let x = f32s::<A, 5>(device, [1, 2, 4, 5, 4], 221).require_grad();
        let w = f32s::<A, 5>(device, [3, 2, 2, 3, 2], 222).require_grad();
        let b = f32s::<A, 1>(device, [3], 223).require_grad();
        let z = module::conv3d(x.clone(), w.clone(), Some(b.clone()), ConvOptions::new([1, 2, 1], [0, 1, 1], [1, 1, 1], 1));
        grads!(z; x, w, b)
    }

    fn transposed_convolution(device, A) {
        let x = f32s::<A, 4>(device, [2, 2, 4, 3], 224).require_grad();
        let w = f32s::<A, 4>(device, [2, 3, 3, 2], 225).require_grad();
        let z = module::conv_transpose2d(x.clone(), w.clone(), None, ConvTransposeOptions::new([2, 1], [1, 0], [1, 0], [1, 2], 1));
        grads!(z; x, w)
    }

    fn pooling(device, A) {
        let x = f32s::<A, 4>(device, [2, 3, 8, 9], 226).require_grad();
        let z = module::max_pool2d(x.clone(), [3, 3], [2, 2], [1, 1], [1, 1], false).sum_dim(2).sum_dim(3)
            + module::avg_pool2d(x.clone(), [2, 3], [2, 3], [0, 1], true, false).sum_dim(2).sum_dim(3) * 2.0
            + module::avg_pool2d(x.clone(), [3, 2], [2, 2], [1, 1], false, false).sum_dim(2).sum_dim(3)
            + module::adaptive_avg_pool2d(x.clone(), [4, 3]).slice([0..2, 0..3, 0..1, 0..1])
            + module::adaptive_avg_pool2d(x.clone(), [3, 2]).slice([0..2, 0..3, 1..2, 1..2]);
        grads!(z; x)
    }

    fn pooling_1d(device, A) {
        let x = f32s::<A, 3>(device, [2, 3, 11], 227).require_grad();
        let z = module::max_pool1d(x.clone(), 3, 2, 1, 1, false) + module::avg_pool1d(x.clone(), 3, 2, 1, true, false)
            + module::adaptive_avg_pool1d(x.clone(), 6);
        grads!(z; x)
    }

    fn interpolation(device, A) {
        let x = f32s::<A, 4>(device, [1, 2, 5, 4], 228).require_grad();
        let with = |mode, align_corners, size| module::interpolate(x.clone(), size, InterpolateOptions { mode, align_corners });
        let z = with(InterpolateMode::Nearest, false, [7, 8]) + with(InterpolateMode::Bilinear, true, [7, 8])
            + with(InterpolateMode::Bilinear, false, [7, 8]) + with(InterpolateMode::Bicubic, true, [7, 8])
            + with(InterpolateMode::Bilinear, false, [3, 2]).sum_dim(2).sum_dim(3);
        grads!(z; x)
    }

    fn attention(device, A) {
        let q = f32s::<A, 4>(device, [1, 2, 4, 3], 229).require_grad();
        let k = f32s::<A, 4>(device, [1, 2, 5, 3], 230).require_grad();
        let v = f32s::<A, 4>(device, [1, 2, 5, 3], 231).require_grad();
        let z = module::attention(q.clone(), k.clone(), v.clone(), Some(bools::<A, 4>(device, [1, 2, 4, 5], 232)), None, Default::default());
        grads!(z; q, k, v)
    }
}
