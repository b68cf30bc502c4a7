//! Finding the system's C compiler and its abilities.
//!
//! `$CC` comes first (it may hold arguments: `ccache gcc`), then `cc`, `gcc` and `clang`. One process start
//! answers everything: the predefined macros under the flags of a build contain the compiler's version, the
//! target and every instruction set of this machine. Their text is the identity that cache keys contain, so a
//! new compiler or another CPU never meets an old executable.
//!
//! Tiles of AMX are used if the operating system lets this process use them; the flags, which are part of
//! that identity too, say so.
//!
//! A compiler that runs may still compile wrongly. [`Toolchain::find`] asks its caller about each compiler,
//! and passes over those that the caller refuses.

use std::ffi::OsStr;
use std::fmt::{Display, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::SystemTime;

use sha2::{Digest, Sha256};

use crate::error::{CpuError, Result};
use crate::isa::Isa;
use crate::tiles;

/// The compilers that machines have, in the order in which they are tried.
const USUAL: [&str; 3] = ["cc", "gcc", "clang"];

/// Flags that choose the CPU, best first; the first that the compiler accepts is used.
const NATIVE: [&[&str]; 3] = [&["-march=native"], &["-mcpu=native"], &[]];

/// Flags that every generated source relies on for its meaning. Contraction is off because kernels spell out
/// each fused multiply-add; NaN, infinities and signed zeros behave as IEEE 754 says; only `errno` and
/// floating-point traps, which nothing reads, are given up. One arena holds buffers of different types in
/// turn, hence no type-based alias analysis.
const MEANING: [&str; 7] = [
    "-std=gnu11",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fno-strict-aliasing",
    "-fwrapv",
    "-fvisibility=hidden",
];

/// How the version of GCC begins.
const GCC: &str = "gcc";

/// Flags without tiles of AMX.
const NO_TILES: [&str; 2] = ["-mno-amx-bf16", "-mno-amx-tile"];

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
    /// Takes a compiler at its word: `$CC` if set, else the first of `cc`, `gcc` and `clang` that runs.
    ///
    /// # Errors
    /// [`CpuError::NoCompiler`], with what was tried.
    pub fn detect() -> Result<Self> {
        match chosen() {
            Some(cc) => Self::from_candidates(&[cc]),
            None => Self::from_candidates(&USUAL),
        }
    }

    /// The first of `candidates` (commands, possibly with arguments) that runs.
    ///
    /// # Errors
    /// [`CpuError::NoCompiler`], with what was tried.
    pub fn from_candidates<S: AsRef<str>>(candidates: &[S]) -> Result<Self> {
        Self::first_accepted(candidates, |_| Ok::<(), String>(()))
    }

    /// The compiler that programs are built with: the first of `$CC`, `cc`, `gcc` and `clang` that runs and
    /// that `accept` takes. One warning names the compilers that were passed over, and why: the one in
    /// `$CC`, and those that `accept` refused.
    ///
    /// # Errors
    /// [`CpuError::NoCompiler`], with what was tried.
    pub fn find<E: Display>(accept: impl FnMut(&Self) -> std::result::Result<(), E>) -> Result<Self> {
        let mut candidates: Vec<String> = chosen().into_iter().collect();
        candidates.extend(USUAL.map(str::to_owned));
        candidates.dedup();
        Self::first_accepted(&candidates, accept)
    }

    /// [`Toolchain::find`] among `candidates`.
    ///
    /// # Errors
    /// [`CpuError::NoCompiler`], with what was tried.
    pub fn first_accepted<S: AsRef<str>, E: Display>(
        candidates: &[S],
        mut accept: impl FnMut(&Self) -> std::result::Result<(), E>,
    ) -> Result<Self> {
        let mut refused: Vec<Self> = Vec::new();
        let (mut tried, mut passed_over) = (Vec::new(), Vec::new());
        for candidate in candidates {
            let candidate = candidate.as_ref();
            let command: Vec<String> = candidate.split_whitespace().map(str::to_owned).collect();
            let reason = match Self::probe(command) {
                // `cc` is `gcc` on most machines: a compiler that was refused under one name is not tried
                // under another.
                Ok(toolchain) if refused.iter().any(|other| other.is(&toolchain)) => continue,
                Ok(toolchain) => match toolchain.accepted(&mut accept, &mut passed_over) {
                    Ok(toolchain) => {
                        tracing::debug!(compiler = %toolchain.version, isa = %toolchain.isa, "C compiler found");
                        if !passed_over.is_empty() {
                            let (passed, version) = (passed_over.join("; "), &toolchain.version);
                            kiln_log::warn!(target: "kiln", "C compiler passed over, {candidate} ({version}) is used instead: {passed}");
                        }
                        return Ok(toolchain);
                    }
                    Err((toolchain, reason)) => {
                        let reason = format!("{candidate} ({}): {reason}", toolchain.version);
                        passed_over.push(reason.clone());
                        refused.push(toolchain);
                        reason
                    }
                },
                Err(reason) => {
                    let reason = format!("{candidate}: {reason}");
                    if !USUAL.contains(&candidate) {
                        passed_over.push(reason.clone());
                    }
                    reason
                }
            };
            tried.push(reason);
        }
        Err(CpuError::NoCompiler {
            tried: tried.join("; "),
        })
    }

    /// This compiler if `accept` takes it, else this compiler without tiles if `accept` takes that; a line in
    /// `passed_over` then says so. Gives back a compiler that was refused, with the reason.
    fn accepted<E: Display>(
        self,
        mut accept: impl FnMut(&Self) -> std::result::Result<(), E>,
        passed_over: &mut Vec<String>,
    ) -> std::result::Result<Self, (Self, E)> {
        let reason = match accept(&self) {
            Ok(()) => return Ok(self),
            Err(reason) => reason,
        };
        if !self.isa.has_tiles() {
            return Err((self, reason));
        }
        let narrower = self.without_tiles();
        if accept(&narrower).is_err() {
            return Err((self, reason));
        }
        passed_over.push(format!("{} with tiles of AMX: {reason}", self.command()));
        Ok(narrower)
    }

    /// The same compiler, which uses no tiles. Sources that use them anyway keep them in memory.
    fn without_tiles(&self) -> Self {
        let mut narrower = self.clone();
        narrower.isa = self.isa.without_tiles();
        narrower.flags.extend(NO_TILES.map(str::to_owned));
        narrower
    }

    /// The same compiler with other flags.
    #[cfg(test)]
    pub(crate) fn with_flags(&self, flags: Vec<String>) -> Self {
        let mut other = self.clone();
        other.flags = flags;
        other
    }

    fn probe(command: Vec<String>) -> std::result::Result<Self, String> {
        let mut reason = String::from("empty command");
        for native in NATIVE {
            let Some((program, arguments)) = command.split_first() else {
                break;
            };
            let output = process(program)
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
                if isa.is_avx512() {
                    // Left alone, some tunings split vectors in halves.
                    flags.push("-mprefer-vector-width=512".into());
                }
                let version = version_of(&macros);
                let identity = format!("{:x?}", Sha256::digest(macros.as_bytes()).as_slice());
                let found = Self {
                    command,
                    version,
                    flags,
                    isa,
                    identity,
                };
                return Ok(match isa.has_tiles() && !tiles::permitted() {
                    true => found.without_tiles(),
                    false => found,
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

    /// Whether it is GCC, and not another compiler that calls itself so.
    pub(crate) fn is_gcc(&self) -> bool {
        self.version.starts_with(GCC)
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

    /// [`Toolchain::identity`], and the files of the commands with their sizes and times of change: it
    /// differs after an upgrade that leaves the version as it was. The name that a compiler is called by
    /// does not matter.
    pub fn fingerprint(&self) -> String {
        let mut text = format!("{} {} {}", self.version, self.flags.join(" "), self.identity);
        for word in &self.command {
            let Some(path) = resolve(word) else {
                let _ = write!(text, " {word}");
                continue;
            };
            let data = path.metadata().ok();
            let bytes = data.as_ref().map_or(0, std::fs::Metadata::len);
            let changed = data.and_then(|data| data.modified().ok());
            let changed = changed.and_then(|time| time.duration_since(SystemTime::UNIX_EPOCH).ok());
            let _ = write!(text, " {} {bytes} {changed:?}", path.display());
        }
        text
    }

    /// Whether both are one compiler with the same arguments.
    fn is(&self, other: &Self) -> bool {
        self.fingerprint() == other.fingerprint()
    }

    pub(crate) fn invoke<S: AsRef<OsStr>>(&self, arguments: impl IntoIterator<Item = S>) -> Command {
        let mut command = process(&self.command[0]);
        command
            .args(&self.command[1..])
            .args(arguments)
            .stdin(Stdio::null());
        command
    }
}

/// `program` as a process that Ctrl-C leaves alone: a terminal sends it to all of the foreground's group, and
/// a program that wants to finish its step needs its compiler.
pub(super) fn process(program: impl AsRef<OsStr>) -> Command {
    let mut command = Command::new(program);
    #[cfg(unix)]
    std::os::unix::process::CommandExt::process_group(&mut command, 0);
    command
}

/// The command in `$CC`, if it is set and not empty.
fn chosen() -> Option<String> {
    let cc = std::env::var("CC").ok()?;
    let cc = cc.trim();
    (!cc.is_empty()).then(|| cc.to_owned())
}

/// The file that a word of a command names, links followed; none for an argument that is no program.
fn resolve(word: &str) -> Option<PathBuf> {
    if word.contains(std::path::MAIN_SEPARATOR) {
        return Path::new(word).canonicalize().ok();
    }
    let path = std::env::var_os("PATH")?;
    let mut folders = std::env::split_paths(&path);
    let file = folders.find_map(|folder| Some(folder.join(word)).filter(|file| file.is_file()))?;
    file.canonicalize().ok()
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
        format!("{GCC} {quoted}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_compiler_whose_tiles_are_refused_goes_on_without() {
        let mut toolchain = Toolchain::detect().unwrap();
        toolchain.isa = Isa::AmxBf16;
        let refuse_tiles = |toolchain: &Toolchain| match toolchain.isa.has_tiles() {
            true => Err("tiles are wrong"),
            false => Ok(()),
        };
        let mut said = Vec::new();
        let found = toolchain.clone().accepted(refuse_tiles, &mut said).unwrap();
        assert_eq!(found.isa(), Isa::Avx512Bf16);
        assert!(
            NO_TILES
                .iter()
                .all(|flag| found.flags().iter().any(|f| f == flag))
        );
        assert_ne!(found.identity(), toolchain.identity(), "its steps are others");
        assert!(said.len() == 1 && said[0].contains("tiles are wrong"), "{said:?}");
        // A compiler that is wrong without them, too, is passed over as it was found.
        let (refused, reason) = toolchain.accepted(|_| Err("wrong"), &mut said).unwrap_err();
        assert!(refused.isa().has_tiles() && reason == "wrong" && said.len() == 1);
    }
}
