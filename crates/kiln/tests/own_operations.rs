//! `custom_op`: what stays whole, what is refused, and gradients against finite differences.

use std::sync::atomic::{AtomicUsize, Ordering};

use burn_autodiff::Autodiff;
use burn_tensor::{Int, Tensor, TensorData};
use kiln::{CSource, CompileBackend, CompileOptions, Error, Kiln, KilnDevice, NoGradient};

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
        let said =
            "the function of the operation `custom short` returned f32 [1] as result 0 instead of f32 [2]";
        assert!(error.to_string().contains(said), "{error}");
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
        let said = "the function of the operation `custom panics` panicked: no such value";
        assert!(error.to_string().contains(said), "{error}");
    }
}

/// The file may change while the step's key in the disk cache stays.
#[test]
fn a_source_that_includes_a_file_is_refused() {
    const INCLUDES: CSource = CSource {
        forward: "\n  # include \"op.h\"\nvoid operation(const kiln_tensor *in, const kiln_tensor *out) {}",
        gradient: None,
    };
    fn same(inputs: &[TensorData]) -> TensorData {
        inputs[0].clone()
    }
    let x = Tensor::<Kiln, 1>::from_floats([1.0, 2.0], &device());
    // SAFETY: it is refused.
    let call = || unsafe { kiln::custom_op_with_c("same", x.clone(), [2], same, NoGradient, INCLUDES) };
    let panic = std::panic::catch_unwind(std::panic::AssertUnwindSafe(call)).unwrap_err();
    let message = panic.downcast_ref::<String>().expect("a message");
    for part in ["same", "\"op.h\"", "include_str!"] {
        assert!(message.contains(part), "{message}");
    }
}

/// [`wave`] and [`wave_gradient`] in C.
const WAVE: CSource = CSource {
    forward: "
#include <math.h>
void operation(const kiln_tensor *in, const kiln_tensor *out) {
    const float *a = in[0].data, *b = in[1].data;
    float *y = out[0].data;
    for (int64_t i = 0; i < out[0].elements; i++) y[i] = sinf(a[i]) * b[i % in[1].shape[0]];
}",
    gradient: Some(
        "
#include <math.h>
static float slope(float a) { return cosf(a); }
void operation(const kiln_tensor *in, const kiln_tensor *out) {
    const float *a = in[0].data, *b = in[1].data, *g = in[3].data;
    float *of_a = out[0].data, *of_b = out[1].data;
    int64_t columns = in[1].elements;
    for (int64_t i = 0; i < columns; i++) of_b[i] = 0;
    for (int64_t i = 0; i < in[0].elements; i++) {
        of_a[i] = g[i] * slope(a[i]) * b[i % columns];
        of_b[i % columns] += g[i] * sinf(a[i]);
    }
}",
    ),
};

type Gradients = (Tensor<Kiln, 1>, Tensor<Kiln, 2>, Tensor<Kiln, 1>);

/// A loss of [`wave`], in C or not, and its gradients.
fn wave_loss(source: Option<CSource>) -> Gradients {
    let a = TensorData::new(vec![0.1f32, -0.7, 0.9, 1.3, -0.4, 0.2], [2, 3]);
    let a = Tracked::from_data(a, &device()).require_grad();
    let b = Tensor::<Autodiff<Kiln>, 1>::from_floats([0.5, -1.5, 0.8], &device()).require_grad();
    let x = a.clone() * 2.0;
    let y = match source {
        // SAFETY: the source reads elements of its inputs, whose shapes fit, and writes all of its outputs.
        Some(source) => unsafe {
            kiln::custom_op_with_c("wave in C", (x, b.clone()), [2, 3], wave, wave_gradient, source)
        },
        None => own(x, b.clone()),
    };
    let loss = (y * 0.5).powf_scalar(2.0).sum();
    let found = loss.backward();
    (loss.inner(), a.grad(&found).unwrap(), b.grad(&found).unwrap())
}

#[test]
fn an_operation_in_c_is_inside_the_step() {
    for backend in [
        CompileBackend::Cpu,
        CompileBackend::AotEager,
        CompileBackend::Interpret,
    ] {
        let options = CompileOptions::default()
            .with_backend(backend)
            .with_fullgraph(true)
            .check_against("interpret", 1e-5)
            .unwrap();
        let mut region = kiln::compile(options);
        let expected = wave_loss(None);
        for _ in 0..2 {
            let found = region.run(|| wave_loss(Some(WAVE))).unwrap();
            let close = |found: TensorData, expected: TensorData| {
                let pairs = floats(&found).iter().zip(floats(&expected));
                assert!(
                    pairs.clone().all(|(a, b)| (a - b).abs() <= 1e-5),
                    "{found:?} {expected:?}"
                );
            };
            close(found.0.into_data(), expected.0.clone().into_data());
            close(found.1.into_data(), expected.1.clone().into_data());
            close(found.2.into_data(), expected.2.clone().into_data());
        }
        let report = region.report();
        assert_eq!(report.steps.len(), 1, "{backend}");
        let outside = &report.steps[0].externs;
        assert_eq!(
            outside.is_empty(),
            backend == CompileBackend::Cpu,
            "{backend}: {outside:?}"
        );
    }
}

#[test]
fn the_source_is_part_of_the_operation() {
    fn once(inputs: &[TensorData]) -> TensorData {
        inputs[0].clone()
    }
    // Two sources of one function, the second of which is wrong: they are told apart, and the wrong one is
    // found by comparing it with the function.
    let times = |forward: &'static str| {
        let options = CompileOptions::default()
            .check_against("interpret", 1e-6)
            .unwrap();
        let mut region = kiln::compile(options);
        let x = Tensor::<Kiln, 1>::from_floats([1.0, 2.0, 3.0], &device());
        let source = CSource {
            forward,
            gradient: None,
        };
        // SAFETY: both write three elements.
        region.run(|| unsafe { kiln::custom_op_with_c("same", x, [3], once, NoGradient, source) })
    };
    let right = times(
        "void operation(const kiln_tensor *in, const kiln_tensor *out) {
             for (int i = 0; i < 3; i++) ((float *)out->data)[i] = ((float *)in->data)[i];
         }",
    );
    assert_eq!(
        right.unwrap().into_data().to_vec::<f32>().unwrap(),
        [1.0, 2.0, 3.0]
    );
    let wrong = times(
        "void operation(const kiln_tensor *in, const kiln_tensor *out) {
             for (int i = 0; i < 3; i++) ((float *)out->data)[i] = 2 * ((float *)in->data)[i];
         }",
    );
    let error = wrong.unwrap_err().to_string();
    assert!(
        error.contains("not what interpret gives") && error.contains("same"),
        "{error}"
    );
}

#[test]
fn c_that_does_not_compile_is_an_error_with_the_compilers_words() {
    fn once(inputs: &[TensorData]) -> TensorData {
        inputs[0].clone()
    }
    let mut region = kiln::compile(CompileOptions::default());
    let x = Tensor::<Kiln, 1>::from_floats([1.0, 2.0], &device());
    let source = CSource {
        forward: "void operation(const kiln_tensor *in, const kiln_tensor *out) {\n    no_such_type y;\n}",
        gradient: None,
    };
    // SAFETY: it does not compile.
    let error = region
        .run(|| unsafe { kiln::custom_op_with_c("faulty", x, [2], once, NoGradient, source) })
        .unwrap_err();
    assert!(matches!(error, Error::Execute { .. }), "{error}");
    let text = error.to_string();
    assert!(
        text.contains("no_such_type") && text.contains("custom faulty:2"),
        "{text}"
    );
}
