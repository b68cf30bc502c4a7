//! Attention in CUDA C++: templates over a case, the struct of constants that [`crate::emit::attention`]
//! writes for an operation.
//!
//! `tiles.cuh` has the products of tiles, `scores.cuh` the steps from a product to a weight, `forward.cuh`
//! and `backward.cuh` the kernels. They compute in the operands' compute type, on the cores that every GPU
//! has. `fragments.cuh`, `tensor_forward.cuh` and `tensor_backward.cuh` are for tensor cores: operands of
//! 16 bits or of f32 rounded to TF32, sums in f32.

/// The templates, once in a program.
pub const TEMPLATES: &str = concat!(
    "#ifndef KILN_ATTENTION\n#define KILN_ATTENTION\n",
    include_str!("tiles.cuh"),
    include_str!("scores.cuh"),
    include_str!("forward.cuh"),
    include_str!("backward.cuh"),
    "#endif\n"
);

/// The templates for tensor cores, once in a program, behind [`TEMPLATES`].
pub const TENSOR_TEMPLATES: &str = concat!(
    "#ifndef KILN_ATTENTION_TENSOR\n#define KILN_ATTENTION_TENSOR\n",
    include_str!("fragments.cuh"),
    include_str!("tensor_forward.cuh"),
    include_str!("tensor_backward.cuh"),
    "#endif\n"
);
