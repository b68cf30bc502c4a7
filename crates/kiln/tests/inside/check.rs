//! The numerics check: the first place where two backends part.
//!
//! Backends agree on sums and products of small integers to the last bit, and round exponentials differently.
//! So `exp` is the planted fault, and everything before it is not.

use burn::tensor::{DType, Tensor};
use kiln::{CompileBackend, CompileOptions, Error, Kiln};

use super::matrix;

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
        let step = |factor: f32| {
            let mut region = kiln::compile(options().with_name("checked"));
            let (x, w) = (matrix::<8, 16>(1) * 0.013, matrix::<16, 8>(2) * 0.021);
            let run = || {
                // The reference reads the same program, so a wrong step is planted by an operation that rounding
                // to 16 bits turns into another number: 1 + 2^-12 is 1.
                let product = (x * 0.0 + 1.0 + 2f32.powi(-12)).matmul(w * 0.0 + 1.0) - 16.0;
                product * factor
            };
            region.run(run).map(drop)
        };
        step(0.0).unwrap();
        let error = step(1.0).expect_err("what is left is all rounding").to_string();
        assert!(
            error.contains("aot_eager") && error.contains("MulScalar"),
            "{error}"
        );
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
