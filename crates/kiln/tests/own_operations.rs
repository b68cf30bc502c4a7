//! `custom_op`: what stays whole, what is refused, and gradients against finite differences.

use std::sync::atomic::{AtomicUsize, Ordering};

use burn_autodiff::Autodiff;
use burn_tensor::{Int, Tensor, TensorData};
use kiln::{CompileBackend, CompileOptions, Error, Kiln, KilnDevice, NoGradient};

type Tracked = Tensor<Autodiff<Kiln>, 2>;

fn device() -> KilnDevice {
    KilnDevice::cpu()
}

fn floats(data: &TensorData) -> &[f32] {
    data.as_slice().expect("f32")
}

/// `sin(a) * b`, `b` of one row for all rows of `a`.
fn wave(inputs: &[TensorData]) -> TensorData {
    let (a, b) = (floats(&inputs[0]), floats(&inputs[1]));
    let y: Vec<f32> = (0..a.len()).map(|i| a[i].sin() * b[i % b.len()]).collect();
    TensorData::new(y, inputs[0].shape.clone())
}

fn wave_gradient(inputs: &[TensorData], _: &TensorData, gradient: &TensorData) -> Vec<TensorData> {
    let (a, b, g) = (floats(&inputs[0]), floats(&inputs[1]), floats(gradient));
    let of_a: Vec<f32> = (0..a.len()).map(|i| g[i] * a[i].cos() * b[i % b.len()]).collect();
    let mut of_b = vec![0.0; b.len()];
    (0..a.len()).for_each(|i| of_b[i % b.len()] += g[i] * a[i].sin());
    vec![
        TensorData::new(of_a, inputs[0].shape.clone()),
        TensorData::new(of_b, inputs[1].shape.clone()),
    ]
}

fn own(a: Tracked, b: Tensor<Autodiff<Kiln>, 1>) -> Tracked {
    let shape = a.dims();
    kiln::custom_op("wave", (a, b), shape, wave, wave_gradient)
}

#[test]
fn an_operation_stays_whole_on_every_backend() {
    for &backend in kiln::list_backends()
        .iter()
        .filter(|&&backend| backend != CompileBackend::Cuda)
    {
        let options = CompileOptions::default()
            .with_backend(backend)
            .with_fullgraph(true);
        let mut region = kiln::compile(options);
        let gradients = |a: &[f32; 6], b: &[f32; 3]| {
            let a = Tracked::from_data(TensorData::new(a.to_vec(), [2, 3]), &device()).require_grad();
            let b = Tensor::<Autodiff<Kiln>, 1>::from_floats(*b, &device()).require_grad();
            let loss = (own(a.clone() * 2.0, b.clone()) * 0.5).powf_scalar(2.0).sum();
            let found = loss.backward();
            (loss.inner(), a.grad(&found).unwrap(), b.grad(&found).unwrap())
        };
        let (a, b) = ([0.1, -0.7, 0.9, 1.3, -0.4, 0.2], [0.5, -1.5, 0.8]);
        let expected = |a: &[f32; 6], b: &[f32; 3]| -> f64 {
            (0..6)
                .map(|i| (0.5 * (2.0 * f64::from(a[i])).sin() * f64::from(b[i % 3])).powi(2))
                .sum()
        };
        for _ in 0..2 {
            let (loss, of_a, of_b) = region.run(|| gradients(&a, &b)).unwrap();
            assert!(
                (f64::from(loss.into_scalar()) - expected(&a, &b)).abs() < 1e-5,
                "{backend}"
            );
            let (of_a, of_b) = (of_a.into_data(), of_b.into_data());
            let step = 1e-3f32;
            for i in 0..9 {
                let at = |sign: f32| {
                    let (mut a, mut b) = (a, b);
                    if i < 6 {
                        a[i] += sign * step
                    } else {
                        b[i - 6] += sign * step
                    }
                    expected(&a, &b)
                };
                let slope = (at(1.0) - at(-1.0)) / (2.0 * f64::from(step));
                let found = f64::from(if i < 6 {
                    floats(&of_a)[i]
                } else {
                    floats(&of_b)[i - 6]
                });
                assert!(
                    (slope - found).abs() < 2e-3,
                    "{backend}: gradient {i} is {found}, by differences {slope}"
                );
            }
        }
        let report = region.report();
        assert!(report.breaks.is_empty(), "{backend}: {:?}", report.breaks);
        if backend != CompileBackend::Eager {
            assert_eq!(report.steps.len(), 1, "{backend}: one step for both calls");
            let externs = &report.steps[0].externs;
            assert_eq!(externs.len(), 2, "{backend}: {externs:?}");
            assert!(externs.iter().any(|name| name == "custom wave"), "{externs:?}");
            assert!(
                externs.iter().any(|name| name == "custom wave, gradient"),
                "{externs:?}"
            );
        }
    }
}

#[test]
fn the_function_runs_once_a_step_and_not_while_recording() {
    static RUNS: AtomicUsize = AtomicUsize::new(0);
    // A count is no result: a test may look behind the curtain.
    fn counted(inputs: &[TensorData]) -> TensorData {
        RUNS.fetch_add(1, Ordering::Relaxed);
        inputs[0].clone()
    }
    let mut region = kiln::compile(CompileOptions::default());
    let x = Tensor::<Kiln, 1>::from_floats([1.0, 2.0], &device());
    for call in 1..4 {
        let y = region.run(|| {
            let y = kiln::custom_op("counted", x.clone(), [2], counted, NoGradient);
            assert_eq!(RUNS.load(Ordering::Relaxed), call - 1);
            y * 2.0
        });
        assert_eq!(RUNS.load(Ordering::Relaxed), call);
        assert_eq!(y.unwrap().into_data().to_vec::<f32>().unwrap(), [2.0, 4.0]);
    }
}

#[test]
fn functions_of_one_name_are_two_operations() {
    fn twice(inputs: &[TensorData]) -> TensorData {
        let y: Vec<f32> = floats(&inputs[0]).iter().map(|x| 2.0 * x).collect();
        TensorData::new(y, inputs[0].shape.clone())
    }
    fn thrice(inputs: &[TensorData]) -> TensorData {
        let y: Vec<f32> = floats(&inputs[0]).iter().map(|x| 3.0 * x).collect();
        TensorData::new(y, inputs[0].shape.clone())
    }
    let options = CompileOptions::default().with_backend(CompileBackend::AotEager);
    let mut region = kiln::compile(options);
    let x = Tensor::<Kiln, 1>::from_floats([1.0], &device());
    let mut run = |triple: bool| {
        let y = region.run(|| match triple {
            true => kiln::custom_op("times", x.clone(), [1], thrice, NoGradient),
            false => kiln::custom_op("times", x.clone(), [1], twice, NoGradient),
        });
        y.unwrap().into_scalar()
    };
    assert_eq!(
        [run(false), run(true), run(false), run(true)],
        [2.0, 3.0, 2.0, 3.0]
    );
    assert_eq!(region.report().steps.len(), 2);
}

#[test]
fn other_kinds_of_inputs() {
    /// How many of the indices are even, times the scale.
    fn even(inputs: &[TensorData]) -> TensorData {
        let count = inputs[0].iter::<i64>().filter(|index| index % 2 == 0).count();
        TensorData::new(vec![count as f32 * floats(&inputs[1])[0]], [1, 1])
    }
    let indices = Tensor::<Kiln, 1, Int>::from_ints([1, 2, 4, 7], &device());
    let scale = Tensor::<Kiln, 1>::from_floats([0.5], &device());
    for backend in [CompileBackend::AotEager, CompileBackend::Cpu] {
        let mut region = kiln::compile(CompileOptions::default().with_backend(backend));
        let y: Tensor<Kiln, 2> = region
            .run(|| kiln::custom_op("even", (indices.clone(), scale.clone()), [1, 1], even, NoGradient))
            .unwrap();
        assert_eq!(y.into_data().to_vec::<f32>().unwrap(), [1.0], "{backend}");
    }
}

#[test]
fn a_result_of_another_shape_is_an_error_of_the_step() {
    fn short(inputs: &[TensorData]) -> TensorData {
        TensorData::new(floats(&inputs[0])[1..].to_vec(), [inputs[0].shape[0] - 1])
    }
    for backend in [
        CompileBackend::AotEager,
        CompileBackend::Interpret,
        CompileBackend::Cpu,
    ] {
        let mut region = kiln::compile(CompileOptions::default().with_backend(backend));
        let x = Tensor::<Kiln, 1>::from_floats([1.0, 2.0], &device());
        let error = region
            .run(|| kiln::custom_op("short", x.clone(), [2], short, NoGradient))
            .unwrap_err();
        assert!(matches!(error, Error::Execute { .. }), "{error}");
        assert!(
            error.to_string().contains("short") && error.to_string().contains("result 0"),
            "{error}"
        );
        // The region goes on.
        let y = region.run(|| x.clone() + 1.0).unwrap();
        assert_eq!(y.into_data().to_vec::<f32>().unwrap(), [2.0, 3.0]);
    }
}

#[test]
fn a_panic_of_the_function_is_an_error_of_the_step() {
    fn panics(_: &[TensorData]) -> TensorData {
        panic!("no such value")
    }
    for backend in [CompileBackend::AotEager, CompileBackend::Cpu] {
        let mut region = kiln::compile(CompileOptions::default().with_backend(backend));
        let x = Tensor::<Kiln, 1>::from_floats([1.0, 2.0], &device());
        let error = region
            .run(|| kiln::custom_op("panics", x.clone(), [2], panics, NoGradient))
            .unwrap_err();
        assert!(error.to_string().contains("no such value"), "{error}");
    }
}
