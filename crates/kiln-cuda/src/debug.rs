//! The GPU's part of a debug dump ([`kiln_compiler::debug`]).
//!
//! ```text
//! source/prelude.cuh source/NAME.cu    CUDA C++: what all kernels begin with, and each kernel
//! calls.txt                            the calls of the step, in order, with grids and addresses
//! step.json                            the same for programs: `cargo run -p kiln-cuda --example rerun -- FOLDER` runs and times it alone
//! ```

use std::fmt::Write as _;
use std::io;
use std::path::Path;

use kiln_compiler::Contract;
use kiln_compiler::debug::warn_unless_written;

use crate::code::{CallKind, StepCode};
use crate::kernels::PRELUDE;

/// Name of the file that [`read`] reads.
const STEP: &str = "step.json";

/// Adds the sources and the calls.
pub fn write(folder: &Path, code: &StepCode, contract: &Contract) {
    let written = || -> io::Result<()> {
        let source = folder.join("source");
        std::fs::create_dir_all(&source)?;
        std::fs::write(source.join("prelude.cuh"), PRELUDE)?;
        for function in &code.functions {
            let text = function.text.source(&function.name, function.guarded);
            let text = format!("#include \"prelude.cuh\"\n{text}");
            std::fs::write(source.join(format!("{}.cu", function.name)), text)?;
        }
        std::fs::write(folder.join("calls.txt"), calls(code))?;
        let step = serde_json::to_vec(&(code, contract))?;
        std::fs::write(folder.join(STEP), step)
    };
    warn_unless_written(folder, written());
}

/// Reads a step that [`write()`] wrote.
///
/// # Errors
/// If the file is missing or no step.
pub fn read(folder: &Path) -> io::Result<(StepCode, Contract)> {
    let bytes = std::fs::read(folder.join(STEP))?;
    Ok(serde_json::from_slice(&bytes)?)
}

/// One line for each call.
fn calls(code: &StepCode) -> String {
    let mut text = String::new();
    for call in &code.calls {
        write_call(&mut text, code, &format!("{:>4}  ", call.kernel), &call.kind);
    }
    text
}

/// The line of a call behind `start`, or the lines of both sides of one that is decided on the device.
fn write_call(text: &mut String, code: &StepCode, start: &str, kind: &CallKind) {
    if let CallKind::Either { library, own, trial } = kind {
        let first = if trial.is_some() {
            "the faster of: "
        } else {
            "cuDNN: "
        };
        for (side, calls) in [(first, library), ("or: ", own)] {
            for call in calls {
                write_call(text, code, &format!("{start}{side}"), call);
            }
        }
        return;
    }
    text.push_str(start);
    let _ = match kind {
        CallKind::Launch {
            function,
            grid,
            shared_bytes,
            arguments,
        } => {
            let function = &code.functions[*function];
            let threads = function.text.threads;
            writeln!(
                text,
                "{} {grid:?} x {threads}, {shared_bytes} B shared: {arguments:?}",
                function.name
            )
        }
        CallKind::Product {
            product,
            left,
            right,
            result,
            ..
        } => writeln!(text, "cuBLASLt {product}: {left:?} {right:?} -> {result:?}"),
        CallKind::Convolution {
            convolution,
            tensors: [x, w, y],
            workspace,
        } => writeln!(
            text,
            "{convolution}: x {x:?} w {w:?} y {y:?}, {} B of working memory",
            workspace.1
        ),
        CallKind::Guard {
            check,
            extent,
            least,
            most,
            ..
        } => writeln!(text, "guard {check}: {least:?} and {most:?} in 0..{extent}"),
        CallKind::Across {
            across,
            operand,
            result,
        } => writeln!(
            text,
            "NCCL {} of {} {}, {} ranks: {operand:?} -> {result:?}",
            across.kind, across.elements, across.dtype, across.ranks
        ),
        CallKind::Extern(number, places) => writeln!(text, "outside: operation {number} {places:?}"),
        CallKind::Either { .. } => Ok(()),
    };
}
