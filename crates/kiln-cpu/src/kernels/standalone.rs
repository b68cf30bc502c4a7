//! Kernels as a complete step, for tests and benchmarks of templates.

use std::collections::BTreeSet;

use super::{KernelText, Param, vector};
use crate::build::SourceFile;
use crate::isa::Isa;
use crate::runtime::abi::Signature;

/// Kernels that share a source file.
const KERNELS_IN_A_FILE: usize = 8;

/// Whether the step reads (and does not write) what a parameter points to.
pub fn is_input(param: &Param) -> bool {
    param.ctype.starts_with("const")
}

/// A source tree whose `kiln_step` calls each of `kernels` once, in order. All parameters are pointers:
/// those to `const`, over all kernels in order, are the step's inputs, the others its outputs.
pub fn step(kernels: &[KernelText], isa: Isa) -> Vec<SourceFile> {
    let (mut inputs, mut outputs) = (0, 0);
    let mut calls = String::new();
    for kernel in kernels {
        calls.push_str(&format!("    {}(rt, ", kernel.name));
        for param in &kernel.params {
            let (list, count) = if is_input(param) {
                ("inputs", &mut inputs)
            } else {
                ("outputs", &mut outputs)
            };
            calls.push_str(&format!("{list}[{count}], "));
            *count += 1;
        }
        calls.push_str("arena);\n");
    }
    let arena = kernels
        .iter()
        .map(|kernel| kernel.workspace_bytes)
        .max()
        .unwrap_or(0);
    let signature = Signature::new(inputs, outputs, 0, arena).to_c();
    let helpers: BTreeSet<_> = kernels.iter().flat_map(|kernel| &kernel.helpers).collect();
    let prototypes: String = helpers
        .iter()
        .map(|helper| format!("{}\n", helper.prototype))
        .collect();
    let definitions: String = helpers
        .iter()
        .map(|helper| format!("{}\n", helper.definition))
        .collect();
    let declared: String = kernels
        .iter()
        .map(|kernel| format!("{}\n", kernel.prototype))
        .collect();
    let source = |text: &str| vector::prelude(isa, text) + text;
    let entry = format!(
        "{signature}{declared}\nint kiln_step(const kiln_runtime *rt, void *const *inputs, void \
         *const *outputs, void *arena,\n              const uint64_t *scalars) {{\n{calls}    return 0;\n}}\n",
    );
    let mut files = vector::headers();
    files.push(SourceFile::new("step.c", source(&entry)));
    // Several files, so that compiler processes can share the work.
    for (index, some) in kernels.chunks(KERNELS_IN_A_FILE).enumerate() {
        let sources: String = some.iter().map(|kernel| format!("{}\n", kernel.source)).collect();
        files.push(SourceFile::new(
            format!("kernels{index}.c"),
            source(&format!("{prototypes}\n{sources}")),
        ));
    }
    files.push(SourceFile::new("helpers.c", source(&definitions)));
    files
}
