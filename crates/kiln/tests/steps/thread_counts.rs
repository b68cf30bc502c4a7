//! Results do not depend on the number of threads: the partition does not, which decides what is rounded
//! under autocast, and neither does the order of a sum.

use burn::tensor::activation::{relu, sigmoid, softmax, tanh};
use burn::tensor::module::conv2d;
use burn::tensor::ops::ConvOptions;
use burn::tensor::{DType, Tensor};
use kiln::{CompileBackend, CompileOptions, KilnDevice};

use crate::harness::Compiled;

/// The bits of a loss and of its gradients: of a convolution, and of attention with capped scores and a gate,
/// which is no pattern of the compiler's and leaves the partition many choices.
fn bits(threads: usize) -> Vec<Vec<u32>> {
    let device = KilnDevice::cpu();
    let wave = |shape: [usize; 4], step: f32, scale: f32| {
        let values: Vec<f32> = (0..shape.iter().product())
            .map(|i| (i as f32 * step).sin() * scale)
            .collect();
        Tensor::<Compiled, 1>::from_floats(values.as_slice(), &device).reshape(shape)
    };
    let x = wave([2, 8, 48, 32], 0.61, 1.0);
    let kernel = wave([16, 8, 3, 3], 0.37, 0.1).require_grad();
    let weights = [0.83, 0.29, 0.47].map(|step| wave([1, 1, 32, 32], step, 0.15).require_grad());
    let options = CompileOptions::default()
        .with_backend(CompileBackend::Cpu)
        .with_threads(threads)
        .with_autocast(DType::BF16);
    let mut region = kiln::compile(options);
    let results = region.run(|| {
        let images = conv2d(
            x.clone(),
            kernel.clone(),
            None,
            ConvOptions::new([1, 1], [1, 1], [1, 1], 1),
        );
        let images = relu(images);
        let [q, k, v] = weights
            .each_ref()
            .map(|weight| images.clone().matmul(weight.clone().expand([2, 16, 32, 32])));
        let scores = tanh(q.clone().matmul(k.swap_dims(2, 3)) * 0.2) * 3.0;
        let mixed = softmax(scores, 3).matmul(v) * sigmoid(q);
        let loss = (mixed - images).powf_scalar(2.0).mean();
        let gradients = loss.backward();
        let of = |leaf: &Tensor<Compiled, 4>| leaf.grad(&gradients).unwrap();
        let [q, k, v] = weights.each_ref().map(of);
        (loss.inner(), [of(&kernel), q, k, v])
    });
    let (loss, gradients) = results.unwrap();
    let bits = |data: burn::tensor::TensorData| data.iter::<f32>().map(f32::to_bits).collect();
    let mut all: Vec<Vec<u32>> = vec![bits(loss.into_data())];
    all.extend(gradients.map(|gradient| bits(gradient.into_data())));
    all
}

#[test]
fn results_are_the_same_bits_on_any_number_of_threads() {
    let one = bits(1);
    for threads in [2, 5] {
        assert!(bits(threads) == one, "{threads} threads");
    }
}
