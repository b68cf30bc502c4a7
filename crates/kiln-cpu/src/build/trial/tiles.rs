//! Tiles of AMX, tried in a process of their own: where CPU, hypervisor and operating system disagree about
//! them, an instruction ends the process.

use super::{Distrust, is_of_machine, untried};
use crate::build::Toolchain;
use crate::build::toolchain::process;
use crate::kernels::vector;

/// The program, which includes the headers of generated sources.
const PROGRAM: &str = include_str!("tiles.c");

/// Compiles the program, runs it, and says why tiles are not to be used.
pub(super) fn check(toolchain: &Toolchain) -> Result<(), Distrust> {
    let untried = |reason: String| untried(toolchain, reason);
    let failed = |error: std::io::Error| untried(error.to_string());
    let folder = tempfile::tempdir().map_err(failed)?;
    for file in vector::headers() {
        std::fs::write(folder.path().join(file.name), file.text).map_err(failed)?;
    }
    let (source, program) = (folder.path().join("tiles.c"), folder.path().join("tiles"));
    std::fs::write(&source, PROGRAM).map_err(failed)?;
    let output = toolchain
        .invoke(toolchain.flags())
        .arg("-O1")
        .arg(&source)
        .arg("-o")
        .arg(&program)
        .output()
        .map_err(failed)?;
    if !output.status.success() {
        let complaint = String::from_utf8_lossy(&output.stderr);
        let first = complaint.lines().next().unwrap_or_default().to_owned();
        return Err(match is_of_machine(&complaint, &output.status.to_string()) {
            true => untried(first),
            false => Distrust::Unusable(first),
        });
    }
    let status = process(&program).status().map_err(failed)?;
    match status.code() {
        Some(0) => Ok(()),
        _ => Err(Distrust::Wrong {
            function: "product of tiles".to_owned(),
            found: format!("the program that tries them ended with {status}"),
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::isa::Isa;

    /// Tiles in memory, which is what a compiler without AMX makes of the program.
    #[test]
    fn tiles_in_memory_are_right() {
        let toolchain = Toolchain::detect().unwrap();
        if toolchain.isa().has_bf16_pairs() {
            check(&toolchain).unwrap();
        }
    }

    /// The flags promise what the machine does not have.
    #[test]
    fn instructions_that_the_machine_lacks_are_noticed() {
        let command = format!("{} -mamx-tile -mamx-bf16", Toolchain::detect().unwrap().command());
        let Ok(toolchain) = Toolchain::from_candidates(&[command]) else {
            return;
        };
        let pairs = toolchain.isa() == Isa::Avx512Bf16 && !crate::tiles::permitted();
        if !pairs {
            return;
        }
        // The flags of the toolchain take the instructions away again, because the system refuses them.
        check(&toolchain).unwrap();
        let flags = |flag: &&String| !flag.starts_with("-mno-amx");
        let promised = toolchain.with_flags(toolchain.flags().iter().filter(flags).cloned().collect());
        let error = check(&promised).unwrap_err();
        assert!(matches!(error, Distrust::Wrong { .. }), "{error}");
    }
}
