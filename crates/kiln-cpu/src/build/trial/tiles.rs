//! Tiles of AMX, tried in a process of their own: where CPU, hypervisor and operating system disagree about
//! them, an instruction ends the process.

use std::process::ExitStatus;

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
    verdict(status, untried)
}

/// What the end of the program says: nothing where somebody else ended it.
fn verdict(status: ExitStatus, untried: impl FnOnce(String) -> Distrust) -> Result<(), Distrust> {
    let ended = format!("the program that tries them ended with {status}");
    if status.success() {
        return Ok(());
    }
    if is_of_others(status) {
        return Err(untried(ended));
    }
    Err(Distrust::Wrong {
        function: "product of tiles".to_owned(),
        found: ended,
    })
}

/// Whether a user, or a system without memory, ended the process.
#[cfg(unix)]
fn is_of_others(status: ExitStatus) -> bool {
    use std::os::unix::process::ExitStatusExt;
    let signals = [libc::SIGKILL, libc::SIGTERM, libc::SIGINT, libc::SIGHUP];
    status.signal().is_some_and(|signal| signals.contains(&signal))
}

#[cfg(not(unix))]
fn is_of_others(_status: ExitStatus) -> bool {
    false
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

    /// Memory that ran out, or a user, says nothing about tiles.
    #[test]
    #[cfg(unix)]
    fn a_program_that_somebody_ended_says_nothing() {
        use std::os::unix::process::ExitStatusExt;
        let toolchain = Toolchain::detect().unwrap();
        let verdict =
            |status: i32| verdict(ExitStatus::from_raw(status), |reason| untried(&toolchain, reason));
        verdict(0).unwrap();
        for status in [libc::SIGKILL, libc::SIGTERM, libc::SIGINT, libc::SIGHUP] {
            assert!(matches!(verdict(status), Err(Distrust::Untried(_))), "{status}");
        }
        for status in [libc::SIGILL, libc::SIGSEGV, 1 << 8] {
            assert!(matches!(verdict(status), Err(Distrust::Wrong { .. })), "{status}");
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
