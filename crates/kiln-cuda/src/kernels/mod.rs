//! CUDA C++ that is written by hand, not generated from a nest of loops.
//!
//! [`PRELUDE`] is what generated sources begin with: types of elements with 16-byte accesses, reductions of a
//! block in a fixed order, random numbers with the bits of every other target, and sorting. [`attention`] and
//! [`product`] have templates.

pub mod attention;
pub mod convolution;
mod groups;
pub mod product;

/// What every generated source begins with.
pub const PRELUDE: &str = concat!(
    include_str!("cuda/types.cuh"),
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

/// What crops, scales and normalises the pictures of a batch, behind [`PRELUDE`] or its first part.
pub const PICTURES: &str = include_str!("cuda/pictures.cuh");

/// What templates for several shapes begin with, behind [`PRELUDE`]: numbers that are a parameter of the
/// kernel.
pub const NUMBERS: &str = include_str!("cuda/numbers.cuh");
