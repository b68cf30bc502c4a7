//! Attention in CUDA C++: templates over a case, the struct of constants that [`crate::emit::attention`]
//! writes for an operation.
//!
//! `tiles.cuh` has the products of tiles, `scores.cuh` the steps from a product to a weight, `forward.cuh`
//! and `backward.cuh` the kernels. They compute in the operands' compute type, on the cores that every GPU
//! has. `fragments.cuh`, `groups.cuh`, `tensor_forward.cuh` and `tensor_backward.cuh` are for tensor cores: operands of
//! 16 bits or of f32 rounded to TF32, sums in f32.

use std::fmt::Write as _;

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

/// The members `dot` and `combine` of a case that is computed by groups of four warps: each is one instruction,
/// whose operands are all sums of a thread. `dot` adds to `columns` columns, `combine` to each of `widths`.
/// `element` is `bf16` or `f16`.
pub fn instructions(columns: usize, widths: &[usize], element: &str) -> String {
    // The left operand is in shared memory, or in four registers.
    let mut text = instruction("dot", columns, element, false);
    for (at, &width) in widths.iter().enumerate() {
        if !widths[..at].contains(&width) {
            text.push_str(&instruction("combine", width, element, true));
        }
    }
    // Without a GPU the templates have loops in their place.
    format!("#ifndef KILN_HOST\n{text}#endif\n")
}

fn instruction(name: &str, columns: usize, element: &str, in_registers: bool) -> String {
    let sums = columns / 2;
    let list =
        |count: usize, each: &dyn Fn(usize) -> String| (0..count).map(each).collect::<Vec<_>>().join(", ");
    let places = list(sums, &|sum| format!("%{sum}"));
    let operands = list(sums, &|sum| format!("\"+f\"(sum[{}][{}])", sum / 4, sum % 4));
    let (parameter, left, count, given, turned) = match in_registers {
        true => {
            let words = list(4, &|word| format!("%{}", sums + word));
            let given = list(4, &|word| format!("\"r\"(left[{word}])"));
            ("const kiln_u32 (&left)[4]", format!("{{{words}}}"), 4, given, "1")
        }
        false => (
            "kiln_u64 left",
            format!("%{sums}"),
            1,
            "\"l\"(left)".into(),
            "0, 0",
        ),
    };
    let mut text = String::new();
    let _ = write!(
        text,
        "static void {name}(float (&sum)[{}][4], {parameter}, kiln_u64 right, int add)\n{{\nasm volatile(\
         \"{{\\n.reg .pred adds;\\nsetp.ne.b32 adds, %{}, 0;\\n\"\n\
         \"wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.{element}.{element} {{{places}}}, {left}, %{}, adds, 1, 1, {turned};\\n}}\"\n\
         : {operands} : {given}, \"l\"(right), \"r\"(add));\n}}\n",
        columns / 8,
        sums + count + 1,
        sums + count,
    );
    text
}
