//! The numerics check: the first place where two backends part.
//!
//! Backends agree on sums and products of small integers to the last bit, and round exponentials differently.
//! So `exp` is the planted fault, and everything before it is not.

use burn::tensor::{DType, Tensor, TensorData};
use kiln::{CSource, CompileBackend, CompileOptions, Error, Kiln, NoGradient};

use super::{B, device, matrix};

fn program(x: Tensor<Kiln, 2>, w: Tensor<Kiln, 2>) -> Tensor<Kiln, 2> {
    // Exact, then rounded, then on.
    let exact = x.matmul(w) + 1.0;
    let rounded = (exact * 0.37).exp();
    rounded.sum_dim(1) * 2.0
}

fn run(options: CompileOptions) -> Result<(), Error> {
    let mut region = kiln::compile(options.with_name("checked"));
    let (x, w) = (matrix::<8, 16>(1), matrix::<16, 8>(2));
    region.run(|| program(x, w)).map(drop)
}

#[test]
fn a_step_that_agrees_runs() {
    run(CompileOptions::default()
        .check_against("aot_eager", 1e-4)
        .unwrap())
    .unwrap();
}

#[test]
fn the_first_kernel_that_parts_is_named() {
    let options = CompileOptions::default()
        .check_against("interpret", 1e-12)
        .unwrap();
    let error = run(options)
        .expect_err("f32 and f64 do not agree to twelve digits")
        .to_string();
    assert!(
        error.contains("kernel ") && error.contains("interpret"),
        "{error}"
    );
    assert!(!error.contains("dot"), "the product is exact: {error}");
}

#[test]
fn the_first_operation_that_parts_is_named() {
    let options = CompileOptions::default()
        .with_backend(CompileBackend::AotEager)
        .check_against("interpret", 1e-12)
        .unwrap();
    let error = run(options).expect_err("they part").to_string();
    assert!(
        !error.contains("`dot") && !error.contains("`add`"),
        "these are exact: {error}"
    );
    assert!(
        error.contains("Float.") || error.contains("NumericFloat."),
        "the Burn call is named: {error}"
    );
}

#[test]
fn autocast_may_round_and_nothing_more() {
    for dtype in [DType::BF16, DType::F16] {
        let options = || {
            CompileOptions::default()
                .with_autocast(dtype)
                .with_loss_scaling(kiln::LossScaling::default())
                .check_against("aot_eager", 1e-6)
                .unwrap()
        };
        // The reference reads the same program, so a wrong step is planted by an operation whose C source is
        // not its function.
        let step = |forward: &'static str| {
            fn same(inputs: &[TensorData]) -> TensorData {
                inputs[0].clone()
            }
            let mut region = kiln::compile(options().with_name("checked"));
            let (x, w) = (matrix::<8, 16>(1) * 0.013, matrix::<16, 8>(2) * 0.021);
            let source = CSource {
                forward,
                gradient: None,
            };
            let run = || {
                // SAFETY: both sources read the elements of the input and write those of the output.
                unsafe { kiln::custom_op_with_c("same", x.matmul(w), [8, 8], same, NoGradient, source) * 2.0 }
            };
            region.run(run).map(drop)
        };
        step(
            "void operation(const kiln_tensor *in, const kiln_tensor *out) {
                 for (int i = 0; i < 64; i++) ((float *)out->data)[i] = ((float *)in->data)[i];
             }",
        )
        .unwrap();
        let error = step(
            "void operation(const kiln_tensor *in, const kiln_tensor *out) {
                 for (int i = 0; i < 64; i++) ((float *)out->data)[i] = 1.25f * ((float *)in->data)[i];
             }",
        )
        .expect_err("a quarter is no rounding")
        .to_string();
        assert!(error.contains("aot_eager") && error.contains("same"), "{error}");
    }
}

#[test]
fn only_the_first_runs_are_compared() {
    let options = CompileOptions::default()
        .check_against("interpret", 1e-12)
        .unwrap();
    run(options.with_check_steps(0)).unwrap();
}

#[test]
fn an_unknown_backend_is_an_error() {
    assert!(CompileOptions::default().check_against("aot", 1e-4).is_err());
}

/// The gradient of a bias before a normalisation is zero but for rounding, of which backends do not agree on
/// a digit.
#[test]
fn a_gradient_that_is_only_rounding_is_no_difference() {
    for backend in ["aot_eager", "interpret"] {
        for autocast in [None, Some(DType::BF16)] {
            let mut options = CompileOptions::default().check_against(backend, 1e-4).unwrap();
            options.autocast = autocast;
            let mut region = kiln::compile(options.with_name("checked"));
            let (x, w) = (matrix::<8, 16>(1) * 0.37, matrix::<16, 8>(2) * 0.21);
            let weights = (matrix::<8, 8>(3) * 0.7).sin();
            let gradient = region.run(|| {
                let bias = Tensor::<B, 2>::zeros([1, 8], &device()).require_grad();
                let y = Tensor::from_inner(x.matmul(w)) + bias.clone();
                let centred = y.clone() - y.mean_dim(0);
                let loss = (centred.tanh() * Tensor::from_inner(weights)).sum();
                bias.grad(&loss.backward()).unwrap()
            });
            let largest = gradient.unwrap().abs().max().into_scalar();
            assert!(largest < 0.1, "it is rounding: {largest}");
        }
    }
}
