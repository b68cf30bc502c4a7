//! Trying a C compiler before steps are trusted to it.
//!
//! Compilers have been wrong about the C of this crate: one folded a select of a copysign into the wrong
//! instruction, another lost half of the lanes of a sum of constants. Such an error goes unnoticed, because
//! a training step with a wrong `erf` still trains. So the first time Kiln finds a compiler, it compiles
//! and runs one step that has every kind of generated code: [`program`] lists functions, conversions,
//! reductions, kernels and the patterns of fused kernels, each with arguments at which mistakes show. The
//! expected values come from the interpreter, which computes in double precision with Rust's own functions.
//!
//! ```text
//! compiler ──► verdict in the cache? ──yes──► right, or the function that is wrong
//!                    └─no─► compile the trial ──► run ──► compare ──► verdict
//! ```
//!
//! Tiles of AMX are tried before that, in a process of their own ([`tiles`]).
//!
//! The verdict is kept in the cache under the compiler's file, version, flags and CPU and this crate's
//! sources; a verdict that cannot be read is made again. A compiler that fails to compile the trial gets no
//! lasting verdict, and none at all where the machine is what failed: a disk that is full, a compiler that
//! was ended ([`Distrust::Untried`]).

mod program;
mod tiles;

use kiln_compiler::{Options, identity};
use kiln_graph::{DType, HostTensor, interpret};

use crate::build::{BuildOptions, Toolchain};
use crate::cache::{Cache, step_key};
use crate::error::{CpuError, StepError};
use crate::runtime::buffer::AlignedBuffer;
use crate::runtime::executable::CpuExecutable;
use crate::runtime::library::NoHooks;
use crate::runtime::thread_pool::ThreadPool;
use crate::target::{CPU_SOURCES, CpuTarget};
use program::Program;

/// The beginning of the text of a good verdict.
const RIGHT: &str = "right\n";
const WRONG: &str = "wrong ";

/// Threads that the trial's step may use. Results do not depend on their number.
const THREADS: usize = 1;

/// Why a compiler is not trusted.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Distrust {
    /// The compiled code computes something else than the source says.
    #[error("it compiles `{function}` wrongly: {found}")]
    Wrong {
        /// The function or pattern.
        function: String,
        /// An element of the result, and what it should be.
        found: String,
    },
    /// It cannot compile Kiln's C, or the result cannot be run.
    #[error("it cannot compile Kiln's C (gcc 11 and clang 13 are the oldest that are known to): {0}")]
    Unusable(String),
    /// The machine did not let it be tried: [`CpuError::Untried`].
    #[error(transparent)]
    Untried(CpuError),
}

/// Whether steps may be trusted to `toolchain`: the verdict in `cache` if it has one, else that of a trial.
///
/// # Errors
/// [`Distrust`], with the function that is wrong.
pub fn try_compiler(toolchain: &Toolchain, cache: &Cache) -> Result<(), Distrust> {
    let key = step_key(toolchain, &BuildOptions::default())
        .field("compiler", identity::COMPILER_SOURCES)
        .field("cpu", CPU_SOURCES)
        .field("trial", toolchain.fingerprint())
        .finish();
    let verdict = cache.notes().note(
        &key,
        |text| parse(text).is_some(),
        || match trial(toolchain) {
            Ok(()) => Ok(RIGHT.to_owned()),
            Err(Distrust::Wrong { function, found }) => Ok(format!("{WRONG}{function}\n{found}\n")),
            Err(unusable) => Err(unusable),
        },
    )?;
    parse(&verdict).unwrap_or(Ok(()))
}

/// The verdict in a text of the cache, if the text is complete.
fn parse(text: &str) -> Option<Result<(), Distrust>> {
    if text == RIGHT {
        return Some(Ok(()));
    }
    let (function, found) = text.strip_prefix(WRONG)?.strip_suffix('\n')?.split_once('\n')?;
    Some(Err(Distrust::Wrong {
        function: function.to_owned(),
        found: found.to_owned(),
    }))
}

/// Compiles the trial, runs it, and compares.
fn trial(toolchain: &Toolchain) -> Result<(), Distrust> {
    let _span = tracing::info_span!("try the compiler").entered();
    if toolchain.isa().has_tiles() {
        tiles::check(toolchain)?;
    }
    let program = Program::new().map_err(|error| Distrust::Unusable(error.to_string()))?;
    let expected = interpret(&program.graph, &program.arguments, &program.scalars)
        .map_err(|error| Distrust::Unusable(error.to_string()))?;
    let actual = run(&program, toolchain).map_err(|error| refused(toolchain, &error))?;
    for ((check, actual), expected) in program.checks.iter().zip(&actual).zip(&expected) {
        if let Some(found) = difference(actual, expected, check.units) {
            return Err(Distrust::Wrong {
                function: check.name.clone(),
                found,
            });
        }
    }
    Ok(())
}

/// Why a compiler is not trusted that the trial failed with.
fn refused(toolchain: &Toolchain, error: &StepError) -> Distrust {
    let is_of_machine = match error {
        // An object that cannot be loaded: from a folder mounted with noexec, most often.
        StepError::Cpu(CpuError::Io { .. } | CpuError::OutOfMemory { .. } | CpuError::Load { .. }) => true,
        StepError::Cpu(CpuError::Compile { stderr, status, .. }) => is_of_machine(stderr, status),
        _ => false,
    };
    match is_of_machine {
        true => untried(toolchain, brief(error)),
        false => Distrust::Unusable(brief(error)),
    }
}

fn untried(toolchain: &Toolchain, reason: String) -> Distrust {
    Distrust::Untried(CpuError::Untried {
        compiler: toolchain.command(),
        folder: std::env::temp_dir(),
        reason,
    })
}

/// Whether a compiler that printed `stderr` and ended with `status` found no room, or was ended by a signal:
/// it, or the program of it that compiles.
fn is_of_machine(stderr: &str, status: &str) -> bool {
    const FAULTS: [&str; 5] = [
        "No space left on device",
        "Disk quota exceeded",
        "Cannot allocate memory",
        "Resource temporarily unavailable",
        "Killed signal",
    ];
    status.starts_with("signal:") || FAULTS.iter().any(|it| stderr.contains(it))
}

/// The message of `error`; of a compiler's output only the first complaint.
fn brief(error: &StepError) -> String {
    let StepError::Cpu(CpuError::Compile {
        stderr,
        status,
        folder,
        ..
    }) = error
    else {
        return error.to_string();
    };
    // The sources need not be kept for inspection: they are the same everywhere.
    let _ = std::fs::remove_dir_all(folder);
    let complaint = stderr
        .lines()
        .find(|line| line.contains("error"))
        .or(stderr.lines().next());
    complaint.unwrap_or(status).to_owned()
}

/// The results of the trial as `toolchain` compiles it.
fn run(program: &Program, toolchain: &Toolchain) -> Result<Vec<HostTensor>, StepError> {
    let graph = &program.graph;
    let options = Options {
        // Transforms would change the operations of the list.
        transform: false,
        ..Options::default()
    };
    let target = CpuTarget::new(toolchain, THREADS);
    let build = BuildOptions::default();
    let step = CpuExecutable::new(graph, &options, &target, toolchain, &Cache::disabled(), &build)?;
    let arguments = program.arguments.iter().map(|tensor| {
        let mut buffer = AlignedBuffer::zeroed(tensor.bytes().len())?;
        buffer.as_mut_slice().copy_from_slice(tensor.bytes());
        Ok(buffer)
    });
    let mut arguments: Vec<AlignedBuffer> = arguments.collect::<Result<_, CpuError>>()?;
    let results = graph
        .outputs
        .iter()
        .map(|output| AlignedBuffer::zeroed(graph.ty(output.value).bytes()));
    let mut results: Vec<AlignedBuffer> = results.collect::<Result<_, _>>()?;
    let inputs: Vec<*const u8> = arguments.iter().map(AlignedBuffer::as_ptr).collect();
    let aliases = &step.contract().aliases;
    let outputs: Vec<*mut u8> = results
        .iter_mut()
        .zip(aliases)
        .map(|(buffer, alias)| match alias {
            Some(index) => arguments[*index as usize].as_mut_ptr(),
            None => buffer.as_mut_ptr(),
        })
        .collect();
    let scalars: Vec<u64> = graph
        .scalars()
        .iter()
        .zip(&program.scalars)
        .map(|(&value, scalar)| scalar.to_bits(graph.dtype(value)))
        .collect();
    // SAFETY: one buffer of the declared size for each parameter and output; an output that takes over an
    // argument's memory has its pointer.
    unsafe { step.run(&ThreadPool::new(THREADS), &inputs, &outputs, &scalars, &NoHooks) }?;
    let tensors = graph.outputs.iter().zip(&results).zip(aliases);
    let tensors = tensors.filter_map(|((output, buffer), alias)| {
        let bytes = match alias {
            Some(index) => arguments[*index as usize].as_slice(),
            None => buffer.as_slice(),
        };
        HostTensor::from_bytes(graph.ty(output.value).clone(), bytes.to_vec())
    });
    Ok(tensors.collect())
}

/// The first element of `actual` that is more than `units` in the last place from `expected`; NaN is like any
/// other NaN, zeros of either sign are different.
fn difference(actual: &HostTensor, expected: &HostTensor, units: f64) -> Option<String> {
    let dtype = expected.ty().dtype;
    if !dtype.is_float() {
        let (actual, expected) = (actual.to_i64s(), expected.to_i64s());
        let mut pairs = actual.iter().zip(&expected);
        let (a, e) = pairs.find(|(a, e)| a != e)?;
        return Some(format!("{a} instead of {e}"));
    }
    let (actual, expected) = (actual.to_f64s(), expected.to_f64s());
    let mut pairs = actual.iter().zip(&expected);
    let (a, e) = pairs.find(|&(&a, &e)| !close(dtype, a, e, units))?;
    Some(format!("{a:e} instead of {e:e}"))
}

/// Whether `actual` is within so many units in the last place of `expected`.
fn close(dtype: DType, actual: f64, expected: f64, units: f64) -> bool {
    if expected.is_nan() || actual.is_nan() {
        return expected.is_nan() && actual.is_nan();
    }
    if actual == expected {
        return actual != 0.0 || actual.is_sign_negative() == expected.is_sign_negative();
    }
    if actual.is_infinite() || expected.is_infinite() {
        return false;
    }
    // Bits of the significand, and the exponent of the smallest normal number.
    let (bits, smallest) = match dtype {
        DType::F16 => (10, -14),
        DType::BF16 => (7, -126),
        DType::F32 => (23, -126),
        _ => (52, -1022),
    };
    let exponent = expected.abs().log2().floor().max(f64::from(smallest));
    let unit = (exponent - f64::from(bits)).exp2();
    (actual - expected).abs() <= units * unit
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn verdicts_that_are_cut_off_are_none() {
        assert!(matches!(parse("right\n"), Some(Ok(()))));
        let wrong = "wrong erf of f32\n1 instead of 2\n";
        assert!(
            matches!(parse(wrong), Some(Err(Distrust::Wrong { function, .. })) if function == "erf of f32")
        );
        for text in [
            "",
            "right",
            "rig",
            "wrong erf",
            "wrong erf\n1 instead",
            "\0\0\0\0\0\0",
        ] {
            assert!(parse(text).is_none(), "{text:?}");
        }
    }

    #[test]
    fn units_in_the_last_place() {
        let next = f64::from(f32::from_bits(1.0f32.to_bits() + 1));
        assert!(close(DType::F32, next, 1.0, 1.0) && !close(DType::F32, next, 1.0, 0.5));
        assert!(close(DType::F64, f64::NAN, f64::NAN, 0.0) && !close(DType::F64, 1.0, f64::NAN, 1e9));
        assert!(!close(DType::F32, -0.0, 0.0, 1.0) && !close(DType::F32, 3e38, f64::INFINITY, 4.0));
    }
}
