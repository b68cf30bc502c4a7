//! CUDA C++ that does not follow from a nest of loops.
//!
//! [`PRELUDE`] is what generated sources begin with: types of elements with 16-byte accesses, reductions of a
//! block in a fixed order, random numbers with the bits of every other target, and sorting. [`TableUpdate`] is one
//! launch over many tensors, which is how an optimizer's whole update runs. [`RowSum`] sums over rows in two
//! stages. [`attention`] has the templates of attention.

pub mod attention;
mod row_sum;
mod table;

pub use row_sum::RowSum;
pub use table::{TableAccess, TableOperand, TableUpdate};

use crate::products::Number;

/// What every generated source begins with.
pub const PRELUDE: &str = concat!(
    include_str!("cuda/types.cuh"),
    "\n",
    include_str!("cuda/reduce.cuh"),
    "\n",
    include_str!("cuda/philox.cuh"),
    "\n",
    include_str!("cuda/math.cuh"),
    "\n",
    include_str!("cuda/group.cuh"),
    "\n",
    include_str!("cuda/order.cuh"),
    "\n"
);

/// The name of a type of elements in CUDA C++. Kernels that compute in f32 take no f64.
fn cuda_type(number: Number) -> &'static str {
    match number {
        Number::F64 => panic!("this kernel computes in f32 and would round elements of f64"),
        Number::F32 => "float",
        Number::F16 => "kiln_f16",
        Number::Bf16 => "kiln_bf16",
    }
}
