//! The numerics check: the first place where two backends part.
//!
//! Backends agree on sums and products of small integers to the last bit, and round exponentials differently.
//! So `exp` is the planted fault, and everything before it is not.

use burn::tensor::Tensor;
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
