//! Attention in CUDA C++: templates over a case, the struct of constants that [`crate::emit::attention`]
//! writes for an operation.
//!
//! `tiles.cuh` has the products of tiles, `scores.cuh` the steps from a product to a weight, `forward.cuh`
//! and `backward.cuh` the kernels. They compute in the operands' compute type, on the cores that every GPU
//! has. `fragments.cuh`, `groups.cuh`, `tensor_forward.cuh` and `tensor_backward.cuh` are for tensor cores: operands of
//! 16 bits or of f32 rounded to TF32, sums in f32.

use super::groups::{Instruction, Left};

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
    "#ifndef KILN_HOST\n",
    include_str!("../groups.cuh"),
    "#endif\n",
    include_str!("groups.cuh"),
    include_str!("tensor_forward.cuh"),
    include_str!("tensor_backward.cuh"),
    "#endif\n"
);

/// The members `dot` and `combine` of a case that is computed by a group of four warps. `dot` adds to `columns`
/// columns, `combine` to each of `widths`. `element` is `bf16` or `f16`.
pub fn instructions(columns: usize, widths: &[usize], element: &str) -> String {
    let instruction = |name, columns: usize, left, turned| {
        Instruction {
            name,
            columns,
            element,
            sums: &format!("float (&sum)[{}][4]", columns / 8),
            sum: &|sum| format!("sum[{}][{}]", sum / 4, sum % 4),
            left,
            turned,
        }
        .text()
    };
    let mut text = instruction("dot", columns, Left::Shared, &["0", "0"]);
    for (at, &width) in widths.iter().enumerate() {
        if !widths[..at].contains(&width) {
            text.push_str(&instruction("combine", width, Left::Registers, &["1"]));
        }
    }
    // Without a GPU the templates have loops in their place.
    format!("#ifndef KILN_HOST\n{text}#endif\n")
}
