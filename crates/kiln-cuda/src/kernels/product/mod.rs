//! Products in CUDA C++: templates over a case, a struct of constants that
//! [`crate::emit::product::warpgroups`] writes.

use std::fmt::Write as _;

/// Products by groups of warps, for capability 9.0, once in a program.
pub const WARPGROUP_TEMPLATES: &str = concat!(
    "#ifndef KILN_PRODUCT_WARPGROUPS\n#define KILN_PRODUCT_WARPGROUPS\n",
    include_str!("../groups.cuh"),
    include_str!("warpgroups.cuh"),
    "#endif\n"
);

/// The members `multiply` and `settle` of a case whose tiles are `columns` wide: one instruction, whose operands
/// are all sums of a thread. `element` is `bf16` or `f16`.
pub fn instructions(columns: usize, element: &str) -> String {
    let sums = columns / 2;
    let list = |each: &dyn Fn(usize) -> String| (0..sums).map(each).collect::<Vec<_>>().join(", ");
    let places = list(&|sum| format!("%{sum}"));
    let operands = list(&|sum| format!("\"+f\"(sums[{sum}])"));
    let [left, right, add, left_turned, right_turned] = [0, 1, 2, 3, 4].map(|at| format!("%{}", sums + at));
    let mut text = String::new();
    let _ = write!(
        text,
        "static void multiply(float (&sums)[{sums}], kiln_u64 left, kiln_u64 right, int add)\n{{\nasm volatile(\
         \"{{\\n.reg .pred adds;\\nsetp.ne.b32 adds, {add}, 0;\\n\"\n\
         \"wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.{element}.{element} {{{places}}}, {left}, {right}, adds, 1, 1, \
         {left_turned}, {right_turned};\\n}}\"\n\
         : {operands} : \"l\"(left), \"l\"(right), \"r\"(add), \"n\"((int)LEFT_TURNED), \"n\"((int)RIGHT_TURNED));\n}}\n\
         static void settle(float (&sums)[{sums}])\n{{\nasm volatile(\"wgmma.wait_group.sync.aligned 0;\" : {operands} :: \"memory\");\n}}\n"
    );
    text
}
