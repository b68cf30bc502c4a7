//! Tensors at several places: what is refused, what moves, and operations on a GPU outside of compiled steps.
//!
//! Tests that need a GPU say so and pass where there is none; with `KILN_TEST_CUDA=required` they fail there.

use std::panic::{AssertUnwindSafe, catch_unwind};

use burn_autodiff::Autodiff;
use burn_backend::ops::FloatTensorOps;
use burn_core::module::Param;
use burn_nn::Linear;
use burn_nn::loss::CrossEntropyLossConfig;
use burn_optim::AdamWConfig;
use burn_tensor::activation::{gelu, log_softmax, softmax};
use burn_tensor::module::conv2d;
use burn_tensor::ops::ConvOptions;
use burn_tensor::{DType, Distribution, Int, Tensor, TensorData, Tolerance};
use kiln::{CompileOptions, Kiln, KilnDevice, TrainStep, Weights};

fn vector(values: &[f32], device: &KilnDevice) -> Tensor<Kiln, 1> {
    Tensor::from_floats(values, device)
}

fn message(panic: Box<dyn std::any::Any + Send>) -> String {
    match panic.downcast::<String>() {
        Ok(text) => *text,
        Err(panic) => panic
            .downcast_ref::<&str>()
            .map(|text| (*text).to_owned())
            .unwrap(),
    }
}

/// The first GPU; none, with a word about it, if there is none.
fn gpu() -> Option<KilnDevice> {
    match kiln_cuda::execute::Gpu::get(0) {
        Ok(_) => Some(KilnDevice::cuda(0)),
        Err(error) if std::env::var_os("KILN_TEST_CUDA").is_some_and(|value| value == "required") => {
            panic!("KILN_TEST_CUDA=required, but: {error}")
        }
        Err(error) => {
            eprintln!("skipped: {error}");
            None
        }
    }
}

#[test]
fn an_operation_on_tensors_of_two_places_names_both() {
    let (host, gpu) = (KilnDevice::cpu(), KilnDevice::cuda(0));
    let operation = || vector(&[1.0, 2.0], &host) + vector(&[3.0, 4.0], &gpu);
    let text = message(catch_unwind(AssertUnwindSafe(operation)).unwrap_err());
    assert!(text.contains("cpu") && text.contains("cuda:0"), "{text}");

    // Where Burn's tensors do not look, the backend does.
    let primitive = |device: &KilnDevice| vector(&[1.0, 2.0], device).into_primitive().tensor();
    let below = || Kiln::float_add(primitive(&host), primitive(&gpu));
    let text = message(catch_unwind(AssertUnwindSafe(below)).map(drop).unwrap_err());
    assert!(
        text.contains("cpu") && text.contains("cuda:0") && text.contains("to_device"),
        "{text}"
    );

    let mut region = kiln::compile(CompileOptions::default());
    let inside = || region.run(operation).map(|tensor| tensor.into_data());
    let text = message(catch_unwind(AssertUnwindSafe(inside)).unwrap_err());
    assert!(text.contains("cpu") && text.contains("cuda:0"), "{text}");

    let sum = vector(&[1.0, 2.0], &host).to_device(&gpu) + vector(&[3.0, 4.0], &gpu);
    assert_eq!(sum.into_data().to_vec::<f32>().unwrap(), [4.0, 6.0]);
}

type Matrix = Tensor<Kiln, 2>;
type Program = (&'static str, fn(Matrix) -> Matrix);

/// What an operation gives on the host and on the GPU, from operands that are drawn on each.
fn both<const D: usize>(
    gpu: &KilnDevice,
    operation: impl Fn(&KilnDevice) -> Tensor<Kiln, D>,
) -> (TensorData, TensorData) {
    let of = |device: &KilnDevice| {
        <Kiln as burn_backend::Backend>::seed(device, 7);
        operation(device).into_data()
    };
    (of(&KilnDevice::cpu()), of(gpu))
}

#[test]
fn operations_outside_of_steps_run_on_the_gpu() {
    let Some(gpu) = gpu() else { return };
    let draw = |device: &KilnDevice| Matrix::random([192, 256], Distribution::Default, device);
    let (host, device) = both(&gpu, draw);
    assert_eq!(host, device, "the same random numbers");
    let ints = |device: &KilnDevice| Tensor::<Kiln, 1, Int>::arange(0..192, device).float() * 3.0;
    let (host, device) = both(&gpu, ints);
    assert_eq!(host, device);

    let programs: [Program; 9] = [
        ("product", |x| x.clone().matmul(x.transpose())),
        ("softmax", |x| softmax(x * 4.0, 1)),
        ("log_softmax", |x| log_softmax(x, 0)),
        ("gelu", gelu),
        ("normalised", |x| {
            (x.clone() - x.clone().mean_dim(1)) / (x.var(1) + 1e-5).sqrt()
        }),
        ("selected", |x| {
            let rows = Tensor::<Kiln, 1, Int>::from_ints([5, 0, 191, 5], &x.device());
            x.select(0, rows)
        }),
        ("cut and joined", |x| {
            Tensor::cat(
                vec![x.clone().slice([3..60, 10..200]), x.slice([0..9, 0..190])],
                0,
            )
        }),
        ("masked", |x| {
            let mask = x.clone().greater_elem(0.5);
            x.mask_fill(mask, -1.0)
        }),
        ("in place", |x| {
            let kept = x.clone();
            let changed = x.add_scalar(1.0).mul_scalar(2.0);
            changed - kept
        }),
    ];
    for (name, program) in programs {
        let (host, device) = both(&gpu, |device| program(draw(device)));
        eprintln!("{name}");
        device.assert_approx_eq::<f32>(&host, Tolerance::rel_abs(1e-4, 1e-5));
    }
    let images = |device: &KilnDevice| {
        let x = Tensor::<Kiln, 4>::random([4, 8, 40, 40], Distribution::Default, device);
        let weight = Tensor::<Kiln, 4>::random([16, 8, 3, 3], Distribution::Default, device);
        conv2d(x, weight, None, ConvOptions::new([1, 1], [1, 1], [1, 1], 1))
    };
    let (host, device) = both(&gpu, images);
    device.assert_approx_eq::<f32>(&host, Tolerance::rel_abs(1e-4, 1e-4));
}

/// Lengths that grow, as of text that is generated, are not compiled for ever.
#[test]
fn more_shapes_than_are_worth_compiling_are_still_right() {
    let Some(gpu) = gpu() else { return };
    for length in 1..80 {
        let x = Tensor::<Kiln, 2>::ones([1 << 10, 32 + length], &gpu) * 2.0;
        let sum = x.sum_dim(1).into_data().to_vec::<f32>().unwrap();
        assert!(
            sum.iter().all(|&sum| sum == 2.0 * (32 + length) as f32),
            "{length}"
        );
    }
}

#[test]
fn an_index_out_of_range_stops_an_operation_on_the_gpu() {
    let Some(gpu) = gpu() else { return };
    let x = Tensor::<Kiln, 2>::ones([256, 256], &gpu) + 1.0;
    let rows = Tensor::<Kiln, 1, Int>::from_ints([3, 256], &gpu);
    let selected = catch_unwind(AssertUnwindSafe(|| x.clone().select(0, rows).into_data()));
    let text = message(selected.unwrap_err());
    assert!(text.contains("256"), "{text}");
    assert_eq!(x.sum().into_scalar(), 2.0 * 65536.0);
}

#[test]
fn a_step_with_parameters_of_sixteen_bits_trains_on_the_gpu_as_on_the_host() {
    type B = Autodiff<Kiln>;
    let Some(gpu) = gpu() else { return };
    let train = |device: KilnDevice, weights: Weights, autocast: bool| {
        let numbers = |rows: usize, columns: usize, seed: usize| {
            let value = |at: usize| ((at * 37 + seed * 101) % 97) as f32 / 97.0 - 0.5;
            let values: Vec<f32> = (0..rows * columns).map(value).collect();
            Tensor::<B, 2>::from_data(TensorData::new(values, [rows, columns]), &device)
        };
        let model = Linear {
            weight: Param::from_tensor(numbers(64, 32, 1) * 0.2),
            bias: Some(Param::from_tensor(Tensor::<B, 1>::zeros([32], &device))),
        };
        let loss = |model: &Linear<B>, (x, wanted): (Tensor<B, 2>, Tensor<B, 2>)| {
            (gelu(model.forward(x)) - wanted).powf_scalar(2.0).mean()
        };
        let options = match autocast {
            true => CompileOptions::default().with_autocast(DType::BF16),
            false => CompileOptions::default(),
        };
        let optim = AdamWConfig::new().with_epsilon(1e-3).init();
        let step = TrainStep::new(model, optim, loss).with_weights(weights);
        let mut step = step.with_options(options).build().unwrap();
        let losses: Vec<f32> = (0..10)
            .map(|call| {
                let batch = (numbers(48, 64, call), numbers(48, 32, call + 50));
                step.step(1e-2, batch).unwrap().into_scalar()
            })
            .collect();
        assert!(step.history().replayed >= 3);
        let weight = step.into_model().weight.val().inner();
        assert_eq!(weight.dtype() == DType::F32, weights.has_master());
        (losses, weight.cast(DType::F32).into_data())
    };
    for weights in [
        Weights::BF16,
        Weights::BF16.with_master(),
        Weights::F16.with_master(),
    ] {
        for autocast in [false, true] {
            let (on_host, host) = train(KilnDevice::cpu(), weights, autocast);
            let (on_gpu, device) = train(gpu, weights, autocast);
            for (a, b) in on_host.iter().zip(&on_gpu) {
                assert!(
                    (a - b).abs() <= 1e-2 * b.abs(),
                    "{weights:?}: {on_host:?} and {on_gpu:?}"
                );
            }
            device.assert_approx_eq::<f32>(&host, Tolerance::rel_abs(2e-2, 2e-2));
        }
    }
}

/// A loss that leaves out padding computes its labels from those that it is given. Steps are queued without a
/// look at their losses; a label out of range stops its step before anything is overwritten, and the next
/// goes on.
#[test]
fn losses_may_be_read_late_and_labels_out_of_range_stop_a_step() {
    type B = Autodiff<Kiln>;
    const CLASSES: usize = 10;
    let train = |device: KilnDevice, late: bool| {
        let values: Vec<f32> = (0..CLASSES * CLASSES)
            .map(|at| (at * 37 % 97) as f32 / 97.0)
            .collect();
        let weight = Tensor::<B, 2>::from_data(TensorData::new(values, [CLASSES, CLASSES]), &device);
        let model = Linear {
            weight: Param::from_tensor(weight),
            bias: None,
        };
        let loss = |model: &Linear<B>, (tokens, labels): (Tensor<B, 1, Int>, Tensor<B, 1, Int>)| {
            let config = CrossEntropyLossConfig::new().with_pad_tokens(Some(vec![0]));
            let logits = model.weight.val().select(0, tokens);
            config.init(&logits.device()).forward(logits, labels)
        };
        let mut step = TrainStep::new(model, AdamWConfig::new().init(), loss)
            .build()
            .unwrap();
        let numbers = |call: usize, by: usize| -> Vec<i32> {
            (0..12)
                .map(|at| ((at * by + call * 3) % CLASSES) as i32)
                .collect()
        };
        let ints = |values: Vec<i32>| Tensor::<B, 1, Int>::from_data(TensorData::new(values, [12]), &device);
        let (mut losses, mut read) = (Vec::new(), Vec::new());
        for call in 0..12 {
            if call == 9 {
                let mut wrong = numbers(call, 7);
                wrong[5] = CLASSES as i32;
                let error = step
                    .step(1e-2, (ints(numbers(call, 1)), ints(wrong)))
                    .unwrap_err();
                assert!(error.to_string().contains("index 10"), "{error}");
            }
            let batch = (ints(numbers(call, 1)), ints(numbers(call, 7)));
            let loss = step.step(1e-2, batch).unwrap();
            match late {
                true => losses.push(loss),
                false => read.push(loss.into_scalar()),
            }
        }
        assert!(step.history().replayed >= 5, "{:?}", step.history());
        read.extend(losses.into_iter().map(|loss| loss.into_scalar()));
        (read, step.into_model().weight.val().inner().into_data())
    };
    let (expected, weight) = train(KilnDevice::cpu(), false);
    let (late, _) = train(KilnDevice::cpu(), true);
    assert_eq!(late, expected);
    let Some(gpu) = gpu() else { return };
    let ((at_once, of_gpu), (late, later)) = (train(gpu, false), train(gpu, true));
    assert_eq!(at_once, late);
    assert_eq!(of_gpu, later);
    for (a, b) in expected.iter().zip(&late) {
        assert!((a - b).abs() <= 1e-4 * b.abs(), "{expected:?} and {late:?}");
    }
    of_gpu.assert_approx_eq::<f32>(&weight, Tolerance::rel_abs(1e-3, 1e-4));
}
