//! Products in CUDA C++: templates over a case, a struct of constants that
//! [`crate::emit::product::warpgroups`] writes.

use super::groups::{Instruction, Left};

/// Products by groups of warps, for capability 9.0, once in a program.
pub const WARPGROUP_TEMPLATES: &str = concat!(
    "#ifndef KILN_PRODUCT_WARPGROUPS\n#define KILN_PRODUCT_WARPGROUPS\n",
    include_str!("../groups.cuh"),
    include_str!("warpgroups.cuh"),
    "#endif\n"
);

/// The members `multiply` and `settle` of a case whose tiles are `columns` wide. `element` is `bf16` or `f16`.
pub fn instructions(columns: usize, element: &str) -> String {
    let sums = format!("float (&sums)[{}]", columns / 2);
    let multiply = Instruction {
        name: "multiply",
        columns,
        element,
        sums: &sums,
        sum: &|sum| format!("sums[{sum}]"),
        left: Left::Shared,
        turned: &["LEFT_TURNED", "RIGHT_TURNED"],
    };
    format!(
        "{}static void settle({sums})\n{{\nasm volatile(\"wgmma.wait_group.sync.aligned 0;\" : {} :: \"memory\");\n}}\n",
        multiply.text(),
        multiply.operands()
    )
}
