//! Convolutions by groups of four warps: what their templates (`cuda/convolution/bands.cuh`) stand behind.

use kiln_graph::DType;

use super::groups::{Instruction, Left};

/// Operands of the instructions, once in a program. Without a GPU the templates have loops in their place.
pub const GROUPS: &str = concat!("#ifndef KILN_HOST\n", include_str!("groups.cuh"), "#endif\n");

/// The instruction of a kernel for elements of `dtype` with `columns` columns of the right operand: the function
/// `gather_group` of a gradient of a weight, `multiply_group` elsewhere.
pub fn instruction(dtype: DType, columns: usize, is_gradient: bool) -> String {
    let (name, left, turned): (_, _, &[&str]) = match is_gradient {
        true => ("gather_group", Left::Registers, &["1"]),
        false => ("multiply_group", Left::Shared, &["0", "0"]),
    };
    let text = Instruction {
        name,
        columns,
        element: if dtype == DType::F16 { "f16" } else { "bf16" },
        sums: &format!("float (&sum)[{}][4]", columns / 8),
        sum: &|sum| format!("sum[{}][{}]", sum / 4, sum % 4),
        left,
        turned,
    }
    .text();
    format!("#ifndef KILN_HOST\n{text}#endif\n")
}
