//! Attention in CUDA C++: templates over a case, the struct of constants that [`crate::emit::attention`] writes for an operation.
//!
//! `tiles.cuh` has the products of tiles, `scores.cuh` what is between a product and a weight, `forward.cuh` and `backward.cuh` the kernels. They
//! compute in the type that the operands' type is computed in, on the cores that every GPU has.

/// The templates, once in a program.
pub const TEMPLATES: &str = concat!(
    "#ifndef KILN_ATTENTION\n#define KILN_ATTENTION\n",
    include_str!("tiles.cuh"),
    include_str!("scores.cuh"),
    include_str!("forward.cuh"),
    include_str!("backward.cuh"),
    "#endif\n"
);
