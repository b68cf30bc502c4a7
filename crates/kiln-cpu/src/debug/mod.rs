//! The CPU's part of a debug dump ([`kiln_compiler::debug`]).
//!
//! ```text
//! source/                          the C sources
//! build.sh                         the commands that build them, for a folder that holds the sources
//! rerun rerun.c rerun.h            builds the step and times it alone, kernel by kernel, on random inputs
//! ```

mod rerun;

use std::io;
use std::path::Path;

use kiln_compiler::debug::warn_unless_written;

use crate::build::{BuildOptions, Toolchain};
use crate::runtime::abi::{RUNTIME_HEADER, RUNTIME_HEADER_NAME};
use crate::target::{CpuStep, CpuTarget};

/// Adds the sources, the commands that build them, and a program that times the step without Kiln.
pub fn write(
    folder: &Path,
    compiled: &CpuStep,
    target: &CpuTarget,
    toolchain: &Toolchain,
    options: &BuildOptions,
) {
    let written = || -> io::Result<()> {
        let source = folder.join("source");
        std::fs::create_dir_all(&source)?;
        for file in &compiled.code {
            std::fs::write(source.join(&file.name), &file.text)?;
        }
        std::fs::write(source.join(RUNTIME_HEADER_NAME), RUNTIME_HEADER)?;
        let mut build = String::from("# Run in a folder that holds the files of source/.\nset -e\n");
        for command in toolchain.build_commands(&compiled.code, options) {
            build.push_str(&command);
            build.push('\n');
        }
        std::fs::write(folder.join("build.sh"), build)?;
        rerun::write(folder, compiled, target.threads, &toolchain.command())
    };
    warn_unless_written(folder, written());
}
