//! Finding the system's C compiler and asking what it can do.
//!
//! `$CC` is taken at its word (it may hold arguments: `ccache gcc`); otherwise `cc`, `gcc` and `clang` are tried in
//! that order. One process start answers everything: the predefined macros under the flags of a build contain the
//! compiler's version, the target and every instruction set of this machine. Their text is the identity that cache
//! keys contain, so a new compiler or another CPU never meets an old executable.

use std::ffi::OsStr;
use std::process::{Command, Stdio};

use sha2::{Digest, Sha256};

use crate::error::{CpuError, Result};
use crate::isa::Isa;

/// Flags that choose the CPU, best first; the first that the compiler accepts is used.
const NATIVE: [&[&str]; 3] = [&["-march=native"], &["-mcpu=native"], &[]];

/// Flags that every generated source relies on for its meaning. Contraction is off because kernels spell out each
/// fused multiply-add; NaN, infinities and signed zeros behave as IEEE 754 says; only `errno` and floating-point
/// traps, which nothing reads, are given up. One arena holds buffers of different types in turn, hence no
/// type-based alias analysis.
const MEANING: [&str; 7] = [
    "-std=gnu11",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fno-strict-aliasing",
    "-fwrapv",
    "-fvisibility=hidden",
];

/// A C compiler that works on this machine.
#[derive(Debug, Clone)]
pub struct Toolchain {
    command: Vec<String>,
    version: String,
    flags: Vec<String>,
    isa: Isa,
    identity: String,
}

impl Toolchain {
    /// Finds a compiler: `$CC` if set, else the first of `cc`, `gcc` and `clang` that runs.
    ///
    /// # Errors
    /// [`CpuError::NoCompiler`], with what was tried.
    pub fn detect() -> Result<Self> {
        match std::env::var("CC") {
            Ok(cc) if !cc.trim().is_empty() => Self::from_candidates(&[cc.trim()]),
            _ => Self::from_candidates(&["cc", "gcc", "clang"]),
        }
    }

    /// The first of `candidates` (commands, possibly with arguments) that runs.
    ///
    /// # Errors
    /// [`CpuError::NoCompiler`], with what was tried.
    pub fn from_candidates<S: AsRef<str>>(candidates: &[S]) -> Result<Self> {
        let mut tried = Vec::new();
        for candidate in candidates {
            let command: Vec<String> = candidate.as_ref().split_whitespace().map(str::to_owned).collect();
            match Self::probe(command) {
                Ok(toolchain) => {
                    tracing::debug!(compiler = %toolchain.version, isa = %toolchain.isa, "C compiler found");
                    return Ok(toolchain);
                }
                Err(reason) => tried.push(format!("{}: {reason}", candidate.as_ref())),
            }
        }
        Err(CpuError::NoCompiler {
            tried: tried.join("; "),
        })
    }

    fn probe(command: Vec<String>) -> std::result::Result<Self, String> {
        let mut reason = String::from("empty command");
        for native in NATIVE {
            let Some((program, arguments)) = command.split_first() else {
                break;
            };
            let output = Command::new(program)
                .args(arguments)
                .args(native)
                .args(["-dM", "-E", "-x", "c"])
                .arg(null_device())
                .stdin(Stdio::null())
                .output()
                .map_err(|error| error.to_string())?;
            let macros = String::from_utf8_lossy(&output.stdout);
            if output.status.success() && macros.contains("__VERSION__") {
                let isa = Isa::from_macros(&macros);
                let mut flags: Vec<String> = native.iter().copied().map(str::to_owned).collect();
                flags.extend(MEANING.map(str::to_owned));
                if isa == Isa::Avx512 {
                    // Left alone, some tunings split vectors in halves.
                    flags.push("-mprefer-vector-width=512".into());
                }
                let version = version_of(&macros);
                let identity = format!("{:x?}", Sha256::digest(macros.as_bytes()).as_slice());
                return Ok(Self {
                    command,
                    version,
                    flags,
                    isa,
                    identity,
                });
            }
            let stderr = String::from_utf8_lossy(&output.stderr);
            reason = stderr
                .lines()
                .next()
                .unwrap_or("it printed no predefined macros")
                .to_owned();
        }
        Err(reason)
    }

    /// The command, as it would be typed.
    pub fn command(&self) -> String {
        self.command.join(" ")
    }

    /// Name and version: `gcc 12.2.0`.
    pub fn version(&self) -> &str {
        &self.version
    }

    /// The widest vector instruction set that compiler and machine share.
    pub fn isa(&self) -> Isa {
        self.isa
    }

    /// Flags of every compilation, without the optimisation level.
    pub fn flags(&self) -> &[String] {
        &self.flags
    }

    /// Everything about compiler and machine that an executable depends on, for cache keys.
    pub fn identity(&self) -> String {
        format!(
            "{} {} {} {}",
            self.command(),
            self.version,
            self.flags.join(" "),
            self.identity
        )
    }

    pub(crate) fn invoke<S: AsRef<OsStr>>(&self, arguments: impl IntoIterator<Item = S>) -> Command {
        let mut command = Command::new(&self.command[0]);
        command
            .args(&self.command[1..])
            .args(arguments)
            .stdin(Stdio::null());
        command
    }
}

fn null_device() -> &'static str {
    if cfg!(windows) { "NUL" } else { "/dev/null" }
}

/// `gcc 12.2.0` from `#define __VERSION__ "12.2.0"`; clang's own string already contains its name.
fn version_of(macros: &str) -> String {
    let quoted = macros
        .lines()
        .find_map(|line| line.strip_prefix("#define __VERSION__ "))
        .map_or("unknown", |value| value.trim().trim_matches('"'));
    if macros.contains("__clang__") || quoted.to_lowercase().contains("clang") {
        quoted.to_owned()
    } else {
        format!("gcc {quoted}")
    }
}
