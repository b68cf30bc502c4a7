//! A long residual stream under autocast: kept in 16 bits it loses updates that are smaller than its
//! rounding, and inside `full_precision` it does not.

use burn::tensor::activation::tanh;
use burn::tensor::{DType, Tensor};
use kiln::{CompileBackend, CompileOptions, Kiln, KilnDevice};

/// The mean of a state's squares after a hundred steps, each of which `add` makes of the state and a change.
fn walk(dtype: Option<DType>, add: impl Fn(Tensor<Kiln, 2>, Tensor<Kiln, 2>) -> Tensor<Kiln, 2>) -> f32 {
    let device = KilnDevice::cpu();
    let options = CompileOptions::default().with_backend(CompileBackend::Cpu);
    let options = match dtype {
        Some(dtype) => options.with_autocast(dtype),
        None => options,
    };
    let wave = |rows: usize, step: f32| {
        let values: Vec<f32> = (0..rows * 16).map(|i| (i as f32 * step).sin()).collect();
        Tensor::<Kiln, 1>::from_floats(values.as_slice(), &device).reshape([rows, 16])
    };
    let (recurrent, input, x) = (wave(16, 0.37) * 0.2, wave(16, 0.83) * 0.2, wave(8, 0.61));
    let mut region = kiln::compile(options);
    let loss = region.run(|| {
        let mut state = Tensor::<Kiln, 2>::zeros([8, 16], &device);
        for _ in 0..100 {
            let change = tanh(state.clone().matmul(recurrent.clone()) + x.clone().matmul(input.clone()));
            state = add(state, change);
        }
        state.powf_scalar(2.0).mean()
    });
    loss.unwrap().into_scalar()
}

#[test]
fn full_precision_keeps_small_updates_of_a_long_stream() {
    let step = |state: Tensor<Kiln, 2>, change: Tensor<Kiln, 2>| state * 0.995 + change * 0.005;
    let exact = walk(None, step);
    let kept = walk(Some(DType::BF16), |state, change| {
        kiln::full_precision(|| step(state, change))
    });
    let rounded = walk(Some(DType::BF16), step);
    println!("{exact} in f32, {kept} with the stream in f32, {rounded} with all of it in bf16");
    assert!(
        (kept - exact).abs() < 5e-3 * exact,
        "{kept}, in f32 {exact}; without full_precision {rounded}"
    );
}
