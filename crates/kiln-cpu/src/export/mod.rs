//! Exported steps: a folder that trains, resumes and saves without Kiln, Rust or a compiler.
//!
//! ```text
//! step.so              the compiled step, and the session that calls it (session.c)
//! step.h               the functions of step.so, for C and for foreign-function interfaces
//! manifest.json        inputs, results, states, numbers: their types, shapes and bindings
//! state.safetensors    the state to start from
//! README.md            how to call it
//! ```
//!
//! An exported step is plain data ([`ExportedStep`]): where each argument of the graph comes from and where
//! each output goes. The caller, who knows the program that the step was recorded from, makes that data;
//! this module turns it into C tables and files.

mod manifest;
mod tables;

use std::path::{Path, PathBuf};

use kiln_compiler::{Options, compile};
use kiln_graph::{DType, Graph, TensorType};

use crate::build::{BuildOptions, SourceFile, Toolchain};
use crate::error::{CpuError, StepError};
use crate::target::CpuTarget;

/// The session: it keeps the state, computes the numbers and calls the step.
const SESSION: &str = include_str!("session.c");

/// The instructions that the session looks for before it runs any of them.
const PROCESSOR: &str = include_str!("processor.h");

/// The functions of an exported step.
const HEADER: &str = include_str!("step.h");

/// A tensor that people know by a name.
#[derive(Clone, Debug)]
pub struct NamedTensor {
    /// Its name, without quotes or backslashes.
    pub name: String,
    /// Its element type and shape.
    pub ty: TensorType,
}

/// A tensor that the session keeps, with the elements it starts from.
#[derive(Clone, Debug)]
pub struct StateTensor {
    /// Name and type.
    pub tensor: NamedTensor,
    /// Row-major elements in the machine's byte order.
    pub elements: Vec<u8>,
    /// Whether no run changes it.
    pub constant: bool,
}

/// Where an argument of the step comes from.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ArgumentSource {
    /// The state of this number.
    State(usize),
    /// The tensor of this number of the call's input.
    Input(usize),
}

/// The source of a result of a call.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ResultSource {
    /// This output of the step.
    Output(usize),
    /// This state, before the call.
    State(usize),
    /// This tensor of the call's input, unchanged.
    Input(usize),
}

/// Where a number of the step comes from.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum NumberSource {
    /// The same eight bytes at each call.
    Fixed(u64),
    /// `offset + factor * learning rate`, computed in f64 and rounded to the number's type.
    Rate {
        /// What is added.
        offset: f64,
        /// What the learning rate is multiplied by.
        factor: f64,
    },
    /// The entry of this table for the call.
    Table(usize),
    /// The seed of the random numbers.
    Seed,
    /// The stream of this random operation of the call.
    Stream(usize),
}

/// Numbers that follow from how many steps were run.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct NumberTable {
    /// The eight bytes for each call from the export on.
    pub bits: Vec<u64>,
    /// Whether the last entry is that of all later calls, too.
    pub settles: bool,
}

/// A step and everything that a call of it needs.
#[derive(Clone, Debug)]
pub struct ExportedStep<'a> {
    /// The graph.
    pub graph: &'a Graph,
    /// The tensors of a call's input.
    pub inputs: Vec<NamedTensor>,
    /// The tensors that a call returns, with where they come from.
    pub results: Vec<(NamedTensor, ResultSource)>,
    /// What the session keeps.
    pub states: Vec<StateTensor>,
    /// Where each parameter of the graph comes from.
    pub arguments: Vec<ArgumentSource>,
    /// The state that each output of the graph becomes; none if it is only a result, or nobody needs it.
    pub outputs: Vec<Option<usize>>,
    /// Where each runtime scalar of the graph comes from.
    pub numbers: Vec<NumberSource>,
    /// The tables of [`NumberSource::Table`].
    pub tables: Vec<NumberTable>,
    /// The learning rate that the numbers were made for; none if calls may have any.
    pub fixed_rate: Option<f64>,
    /// Steps that were run before the export.
    pub steps: u64,
    /// Seed of the random numbers, and the first stream of the next call.
    pub random: (u64, u64),
    /// Random operations in a call.
    pub streams: u64,
}

/// Why a step was not exported.
#[derive(Debug, thiserror::Error)]
pub enum ExportError {
    /// An operation runs outside of the compiled code.
    #[error(
        "the step calls `{operation}`, which runs outside of the compiled code: an exported step has only compiled operations"
    )]
    Extern {
        /// The operation.
        operation: String,
    },
    /// The step could not be compiled.
    #[error(transparent)]
    Step(#[from] StepError),
    /// A file could not be written.
    #[error("writing {}: {source}", path.display())]
    Write {
        /// The file or folder.
        path: PathBuf,
        /// The operating system's answer.
        source: std::io::Error,
    },
    /// The state could not be written as safetensors.
    #[error("writing the state: {0}")]
    State(String),
}

impl From<CpuError> for ExportError {
    fn from(error: CpuError) -> Self {
        Self::Step(error.into())
    }
}

/// Compiles `step` and writes its folder, which is made if it is not there.
///
/// # Errors
///
/// [`ExportError`].
pub fn write(
    folder: &Path,
    step: &ExportedStep<'_>,
    options: &Options,
    target: &CpuTarget,
    toolchain: &Toolchain,
    build: &BuildOptions,
) -> Result<(), ExportError> {
    let quiet = Options {
        debug: None,
        ..options.clone()
    };
    // Whether the program that loads the step asks for tiles is not known here.
    let target = &CpuTarget::of(target.isa.without_tiles(), target.threads);
    let compiled = compile(step.graph, &quiet, target).map_err(StepError::from)?;
    if let Some(outside) = compiled.externs.first() {
        return Err(ExportError::Extern {
            operation: outside.name.clone(),
        });
    }
    let tables = tables::text(step, &compiled, target.threads);
    let mut sources = compiled.code.clone();
    sources.push(SourceFile::new("session.c", SESSION));
    sources.push(SourceFile::new("processor.h", PROCESSOR));
    sources.push(SourceFile::new("step.h", HEADER));
    sources.push(SourceFile::new("tables.h", tables));
    let built = toolchain.build(&sources, build)?;
    let failed = |path: &Path| {
        let path = path.to_path_buf();
        move |source| ExportError::Write { path, source }
    };
    std::fs::create_dir_all(folder).map_err(failed(folder))?;
    let file = |name: &str| folder.join(name);
    // The library is written last: a program that finds it finds everything else.
    let manifest = manifest::json(step, target.threads);
    for (name, text) in [
        ("manifest.json", manifest.as_str()),
        ("README.md", &manifest::readme(step)),
        ("step.h", &tables::header(step, HEADER)),
    ] {
        std::fs::write(file(name), text).map_err(failed(&file(name)))?;
    }
    manifest::write_state(step, &file("state.safetensors"))?;
    let part = file("step.so.part");
    std::fs::copy(built.path(), &part).map_err(failed(&part))?;
    std::fs::rename(&part, file("step.so")).map_err(failed(&file("step.so")))
}

/// The name of an element type in safetensors.
const fn safetensors_name(dtype: DType) -> &'static str {
    match dtype {
        DType::F64 => "F64",
        DType::F32 => "F32",
        DType::F16 => "F16",
        DType::BF16 => "BF16",
        DType::I64 => "I64",
        DType::I32 => "I32",
        DType::I16 => "I16",
        DType::I8 => "I8",
        DType::U64 => "U64",
        DType::U32 => "U32",
        DType::U16 => "U16",
        DType::U8 => "U8",
        DType::Bool => "BOOL",
    }
}

#[cfg(all(test, target_arch = "x86_64", target_os = "linux"))]
mod tests {
    use std::process::Command;

    use super::PROCESSOR;

    /// Macros that compilers define, the names in the message, and those in `/proc/cpuinfo`. The first
    /// [`OLD`] are known to every kernel.
    const FEATURES: [(&str, &str, &str); 22] = [
        ("__SSSE3__", "ssse3", "ssse3"),
        ("__SSE4_2__", "sse4.2", "sse4_2"),
        ("__MOVBE__", "movbe", "movbe"),
        ("__POPCNT__", "popcnt", "popcnt"),
        ("__F16C__", "f16c", "f16c"),
        ("__LZCNT__", "lzcnt", "abm"),
        ("__XOP__", "xop", "xop"),
        ("__BMI__", "bmi", "bmi1"),
        ("__BMI2__", "bmi2", "bmi2"),
        ("__AVX__", "avx", "avx"),
        ("__AVX2__", "avx2", "avx2"),
        ("__AVX512F__", "avx512f", "avx512f"),
        ("__AVX512BW__", "avx512bw", "avx512bw"),
        ("__AVX512VNNI__", "avx512vnni", "avx512_vnni"),
        ("__AVX512BF16__", "avx512bf16", "avx512_bf16"),
        ("__AVX512FP16__", "avx512fp16", "avx512_fp16"),
        ("__AVX512VPOPCNTDQ__", "avx512vpopcntdq", "avx512_vpopcntdq"),
        ("__AVX512BITALG__", "avx512bitalg", "avx512_bitalg"),
        ("__GFNI__", "gfni", "gfni"),
        ("__VAES__", "vaes", "vaes"),
        ("__VPCLMULQDQ__", "vpclmulqdq", "vpclmulqdq"),
        ("__AVXVNNI__", "avxvnni", "avx_vnni"),
    ];

    /// A kernel that is older than the processor does not list the instructions after these.
    const OLD: usize = 11;

    /// What the kernel says that the processor has, the session does not miss. The other way round that holds
    /// for old instructions only.
    #[test]
    fn missing_instructions_are_named() {
        let Ok(text) = std::fs::read_to_string("/proc/cpuinfo") else {
            return;
        };
        let flags = text.lines().find_map(|line| line.strip_prefix("flags"));
        let flags: Vec<&str> = flags.unwrap_or_default().split_whitespace().collect();
        let folder = tempfile::tempdir().unwrap();
        let file = |name: &str| folder.path().join(name);
        let main = "int main(void) { char missing[1024] = \"\"; missing_features(missing); puts(missing); return 0; }";
        let source = format!("#include <stdio.h>\n#include \"processor.h\"\n{main}\n");
        std::fs::write(file("processor.h"), PROCESSOR).unwrap();
        std::fs::write(file("main.c"), source).unwrap();
        for compiler in ["cc", "gcc-12", "clang-14", "clang-16", "clang-19"] {
            for all in [true, false] {
                let macros = FEATURES
                    .iter()
                    .filter(|_| all)
                    .map(|(name, ..)| format!("-D{name}=1"));
                let built = Command::new(compiler)
                    .args(["-Wall", "-Wextra", "-Werror", "-march=x86-64", "-o"])
                    .args([file("main"), file("main.c")])
                    .args(macros)
                    .output();
                let Ok(built) = built else {
                    eprintln!("not tested: {compiler}");
                    break;
                };
                assert!(
                    built.status.success(),
                    "{compiler}: {}",
                    String::from_utf8_lossy(&built.stderr)
                );
                let output = Command::new(file("main")).output().unwrap();
                let found = String::from_utf8(output.stdout).unwrap();
                let found: Vec<&str> = found.split_whitespace().collect();
                for (number, (_, name, flag)) in FEATURES.into_iter().enumerate() {
                    let (is_missing, is_listed) = (found.contains(&name), flags.contains(&flag));
                    let about = format!("{compiler}: {name} of {found:?}");
                    assert!(!is_missing || all && !is_listed, "{about}");
                    assert!(is_missing || !all || is_listed || number >= OLD, "{about}");
                }
            }
        }
    }
}
