//! What the compiler thought, on disk: [`crate::Options::debug`] names the folder of one step.
//!
//! ```text
//! 0-recorded.kg 1-simplify.kg ..   the graph as recorded and after each pass
//! schedule.txt plan.txt            kernels; where every buffer lives
//! source/                          the C sources
//! build.sh                         the commands that build them, for a folder that holds the sources
//! rerun rerun.c rerun.h            builds the step and times it alone, kernel by kernel, on random inputs
//! ```
//!
//! Names and contents are a function of the graph and the options, so that `diff -r` of two dumps shows what changed. (Times are therefore not among
//! them; they are in `kiln::compile_times`.) Trouble with writing is a warning and never stops a compilation.

mod rerun;

use std::io;
use std::path::Path;

use kiln_cpu::abi::{RUNTIME_HEADER, RUNTIME_HEADER_NAME};
use kiln_cpu::{BuildOptions, Toolchain};

use crate::CompiledStep;

/// Writes everything about a compilation into `folder`.
pub fn write(folder: &Path, compiled: &CompiledStep) {
    if let Err(error) = write_files(folder, compiled) {
        tracing::warn!(folder = %folder.display(), %error, "the debug dump cannot be written");
    }
}

fn write_files(folder: &Path, compiled: &CompiledStep) -> io::Result<()> {
    let source = folder.join("source");
    std::fs::create_dir_all(&source)?;
    let put = |name: &str, text: &str| std::fs::write(folder.join(name), text);
    for (number, (pass, text)) in compiled.dumps.iter().enumerate() {
        put(&format!("{number}-{}.kg", pass.replace(' ', "-")), text)?;
    }
    put("schedule.txt", &compiled.schedule.to_text(&compiled.graph))?;
    put("plan.txt", &compiled.plan.to_text(&compiled.graph))?;
    for file in &compiled.sources {
        std::fs::write(source.join(&file.name), &file.text)?;
    }
    std::fs::write(source.join(RUNTIME_HEADER_NAME), RUNTIME_HEADER)
}

/// Adds how the sources are built, and the means to build and time the step without Kiln.
pub fn write_build(folder: &Path, compiled: &CompiledStep, toolchain: &Toolchain, options: &BuildOptions) {
    let mut build = String::from("# Run in a folder that holds the files of source/.\nset -e\n");
    for command in toolchain.build_commands(&compiled.sources, options) {
        build.push_str(&command);
        build.push('\n');
    }
    let written = std::fs::create_dir_all(folder)
        .and_then(|()| std::fs::write(folder.join("build.sh"), build))
        .and_then(|()| rerun::write(folder, compiled, &toolchain.command()));
    if let Err(error) = written {
        tracing::warn!(folder = %folder.display(), %error, "the debug dump cannot be written");
    }
}
