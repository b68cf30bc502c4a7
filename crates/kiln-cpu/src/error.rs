//! Errors between a graph and a finished step.

use std::io;
use std::path::PathBuf;

use kiln_compiler::CompileError;
use kiln_graph::IndexError;

/// An error of the CPU runtime.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CpuError {
    /// No usable C compiler.
    #[error(
        "no C compiler found (tried {tried}): install gcc or clang, or set CC to the compiler's path; until then \
         use the `aot_eager` backend"
    )]
    NoCompiler {
        /// The commands that were tried, each with what happened.
        tried: String,
    },

    /// A C compiler could not be tried, which says nothing of the compiler.
    #[error(
        "{compiler} could not be tried in {}: {reason}; make room there, or set TMPDIR to a folder with \
         room from which programs can be loaded (not mounted with noexec)", folder.display()
    )]
    Untried {
        /// The compiler command.
        compiler: String,
        /// The folder of temporary files.
        folder: PathBuf,
        /// What happened.
        reason: String,
    },

    /// The C compiler rejected a generated source.
    #[error("{compiler} failed on {file} ({status}); the sources are kept in {}\n{stderr}", folder.display())]
    Compile {
        /// The compiler command.
        compiler: String,
        /// The file that failed, or `link` when linking did.
        file: String,
        /// Exit status in words.
        status: String,
        /// What the compiler printed.
        stderr: String,
        /// The source tree, left in place for inspection.
        folder: PathBuf,
    },

    /// A file could not be read or written.
    #[error("{action} {}: {source}", path.display())]
    Io {
        /// What was being done, as a verb: `writing`.
        action: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// The operating system's answer.
        source: io::Error,
    },

    /// The shared object could not be loaded.
    #[error("loading the compiled step {}: {reason}; clear the cache with `kiln cache clear`", path.display())]
    Load {
        /// The shared object.
        path: PathBuf,
        /// The dynamic linker's answer.
        reason: String,
    },

    /// The shared object was built for another version of the runtime's contract.
    #[error("compiled step {} has ABI {found}, this runtime has {expected}; clear the cache", path.display())]
    Abi {
        /// The shared object.
        path: PathBuf,
        /// Its version.
        found: u64,
        /// This runtime's version.
        expected: u64,
    },

    /// A step was called with the wrong number of arguments, or an arena that is too small or not aligned.
    #[error("compiled step expects {expected} {what}, was given {given}")]
    Arguments {
        /// Which argument.
        what: &'static str,
        /// How many (or how large) the step expects.
        expected: u64,
        /// What the caller passed.
        given: u64,
    },

    /// An operation that the step runs outside its compiled code failed.
    #[error("operation {index} outside the compiled step failed: {message}")]
    Extern {
        /// Index of the operation among the step's extern operations.
        index: usize,
        /// What it reported.
        message: String,
    },

    /// A check that the step makes of its arguments failed, and the step stopped there.
    #[error("check {number} of the compiled step failed")]
    Check {
        /// Number of the check.
        number: usize,
    },

    /// Memory could not be allocated.
    #[error("allocating {bytes} bytes: out of memory; set a smaller memory budget or batch")]
    OutOfMemory {
        /// Size of the request.
        bytes: usize,
    },
}

impl CpuError {
    pub(crate) fn io(action: &'static str, path: impl Into<PathBuf>) -> impl FnOnce(io::Error) -> Self {
        let path = path.into();
        move |source| Self::Io { action, path, source }
    }
}

/// Result of the CPU runtime.
pub type Result<T> = std::result::Result<T, CpuError>;

/// Why a step cannot be compiled for the CPU, built or run.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StepError {
    /// The step compiler failed.
    #[error(transparent)]
    Compile(#[from] CompileError),
    /// The compiled code takes other arguments than were given.
    #[error("step `{name}` takes {expected} {what}, got {given}")]
    Arguments {
        /// Name of the step.
        name: String,
        /// Which arguments.
        what: &'static str,
        /// How many.
        expected: usize,
        /// How many were given.
        given: usize,
    },
    /// The description that was stored beside a cached step cannot be read.
    #[error(
        "the cached description of step `{name}` cannot be read: {reason}; clear the cache with `kiln cache clear`"
    )]
    Description {
        /// Name of the step.
        name: String,
        /// Why.
        reason: String,
    },
    /// An index is out of range. Nothing was overwritten: arguments are as they were, and outputs hold
    /// nothing.
    #[error(transparent)]
    Index(Box<IndexError>),
    /// Compiling the generated C, loading it or running it failed.
    #[error(transparent)]
    Cpu(#[from] CpuError),
}
