//! Products of matrices as the target emits them: through cuBLASLt, and by its own kernels.

mod common;
mod emitted;

use emitted::{Emitted, machine_code};
use kiln_cuda::emit::Call;
use kiln_graph::Graph;

/// The calls that the product in `text` becomes.
fn emitted(text: &str) -> Emitted {
    Emitted::new(&Graph::parse(text).unwrap_or_else(|error| panic!("{error}\n{text}")))
}

/// A graph that multiplies operands of type `dtype`; `{d}` in the text stands for the type.
const MATRICES: &[&str] = &["graph g {
      %a = parameter 0 : {d}[5,7]
      %b = parameter 1 : {d}[7,3]
      %c = dot_general %a, %b {a_contract=[1], b_contract=[0]} : {d}[5,3]
      return %c
    }"];

#[test]
fn all_types_compile() {
    let mut kernels = Vec::new();
    for dtype in [
        "f32", "f64", "f16", "bf16", "i64", "i32", "i16", "i8", "u64", "u32", "u16", "u8",
    ] {
        for text in MATRICES {
            kernels.extend(emitted(&text.replace("{d}", dtype)).functions);
        }
    }
    machine_code(&kernels);
}

#[test]
fn floats_are_products_of_the_library() {
    let calls = emitted(&MATRICES[0].replace("{d}", "bf16")).calls;
    let [Call::Product(call)] = &calls[..] else {
        panic!("{calls:?}");
    };
    assert_eq!(call.product.to_string(), "[5, 7] · [7, 3] of bf16");
}
