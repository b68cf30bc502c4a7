//! Compiles the kernels of a step to a library that the host loads.

use std::collections::HashMap;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::fmt::Write as _;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::Duration;
use std::{env, fs};

use libloading::Library;
use sha2::{Digest, Sha256};

use crate::code::{Function, StepCode};
use crate::kernels::PRELUDE;

const HEADER: &str = include_str!("kiln_host.h");

/// Compilers that machines have, in the order in which they are tried behind `$CXX`.
const COMPILERS: [&str; 3] = ["g++", "c++", "clang++"];

/// Type-based alias analysis is off, because one arena holds buffers of different types in turn. Symbols
/// are hidden, so that one library's shared memory is not that of another. Contraction is off, so that
/// results do not depend on the host's instructions.
///
/// Undefined behaviour becomes a trap: unaligned accesses, which a GPU refuses; shifts by too much and
/// casts of floats that are out of range, which a GPU computes differently; sums that overflow, which
/// compilers assume do not.
const FLAGS: [&str; 14] = [
    "-x",
    "c++",
    "-std=c++17",
    "-w",
    "-shared",
    "-fPIC",
    "-fvisibility=hidden",
    "-fno-strict-aliasing",
    "-fno-threadsafe-statics",
    "-fno-math-errno",
    "-fno-exceptions",
    "-ffp-contract=off",
    "-fsanitize=alignment,bounds,shift,integer-divide-by-zero,signed-integer-overflow,float-cast-overflow",
    "-fsanitize-undefined-trap-on-error",
];

/// The host's versions of the instructions of tensor cores. Most kernels take longer to compile than to run,
/// but where one of these is called it takes nearly all of the time: with `-O2` a third to a half less, and
/// the compiler takes 1.2 to 1.9 times as long.
const EMULATED: [&str; 2] = ["multiply_fragments(", "kiln_fragment_product"];

/// How hard the compiler tries for `text`.
fn level(text: &str) -> &'static str {
    match EMULATED.iter().any(|name| text.contains(name)) {
        true => "-O2",
        false => "-O1",
    }
}

/// How long a library is kept.
const KEPT: Duration = Duration::from_secs(2 * 24 * 3600);

/// `kiln_host_launch` of the header.
type LaunchFunction =
    unsafe extern "C" fn(usize, *const u32, u32, usize, *mut *mut c_void, c_int, *mut c_char, usize) -> c_int;

/// One launch at a time: a library that is loaded twice is one, with one set of fibers.
static RUNNING: Mutex<()> = Mutex::new(());

/// The kernels of a step, built for the host.
#[derive(Debug)]
pub(super) struct Kernels {
    library: Library,
    source: PathBuf,
}

/// How a kernel is launched.
#[derive(Debug, Clone, Copy)]
pub(super) struct Shape {
    pub function: usize,
    pub grid: [u32; 3],
    pub threads: u32,
    pub shared_bytes: u32,
    /// Whether the last thread of the last block runs first.
    pub backward: bool,
}

impl Kernels {
    /// Builds the kernels of `code`, or loads what was built of the same sources before.
    pub fn build(code: &StepCode) -> Result<Self, String> {
        let text = source(code)?;
        let mut hash = Sha256::new();
        hash.update(FLAGS.join(" "));
        hash.update(level(&text));
        hash.update(&text);
        let key: String = hash.finalize()[..12].iter().fold(String::new(), |mut key, byte| {
            let _ = write!(key, "{byte:02x}");
            key
        });
        let path = folder()?.join(format!("{key}.so"));
        if !path.is_file() {
            compile(&text, &path)?;
        }
        // SAFETY: the library was built of the header and kernels; loading it runs no code of theirs.
        let library =
            unsafe { Library::new(&path) }.map_err(|error| format!("{}: {error}", path.display()))?;
        let source = path.with_extension("cpp");
        Ok(Self { library, source })
    }

    /// The program.
    pub fn source(&self) -> &Path {
        &self.source
    }

    /// Runs a launch to its end.
    ///
    /// # Safety
    /// The arguments point to what the kernel reads and writes.
    pub unsafe fn launch(&self, shape: Shape, arguments: &mut [*mut c_void]) -> Result<(), String> {
        let _alone = RUNNING.lock().unwrap_or_else(PoisonError::into_inner);
        let mut message: [c_char; 1024] = [0; 1024];
        // SAFETY: the header defines the symbol with this type; it writes a text that ends with a zero into
        // `message`.
        unsafe {
            let launch = self
                .library
                .get::<LaunchFunction>(b"kiln_host_launch\0")
                .map_err(|error| error.to_string())?;
            let failed = launch(
                shape.function,
                shape.grid.as_ptr(),
                shape.threads,
                shape.shared_bytes as usize,
                arguments.as_mut_ptr(),
                shape.backward.into(),
                message.as_mut_ptr(),
                message.len(),
            );
            match failed {
                0 => Ok(()),
                _ => Err(CStr::from_ptr(message.as_ptr()).to_string_lossy().into_owned()),
            }
        }
    }
}

/// Where libraries are kept: a folder of this user alone, from which old ones are removed.
fn folder() -> Result<&'static Path, String> {
    static FOLDER: OnceLock<Result<PathBuf, String>> = OnceLock::new();
    let made = FOLDER.get_or_init(|| {
        // SAFETY: asks for a number.
        let user = unsafe { libc::geteuid() };
        let folder = env::temp_dir().join(format!("kiln-cuda-host-{user}"));
        let mut builder = fs::DirBuilder::new();
        let made = builder.recursive(true).mode(0o700).create(&folder);
        made.map_err(|error| format!("{}: {error}", folder.display()))?;
        remove_old(&folder);
        Ok(folder)
    });
    made.as_deref().map_err(Clone::clone)
}

/// Removes what was built more than [`KEPT`] ago. What cannot be removed stays.
fn remove_old(folder: &Path) {
    let files = fs::read_dir(folder).into_iter().flatten().flatten();
    for file in files {
        let age = file
            .metadata()
            .and_then(|it| it.modified())
            .map(|at| at.elapsed().unwrap_or_default());
        if age.is_ok_and(|age| age > KEPT) {
            let _ = fs::remove_file(file.path());
        }
    }
}

/// The header, the prelude and all kernels as one program.
fn source(code: &StepCode) -> Result<String, String> {
    let mut text = format!("#line 1 \"kiln_host.h\"\n{HEADER}\n#line 1 \"prelude\"\n{PRELUDE}\n");
    let mut kernels = String::new();
    // Functions of a family's step may be one kernel with other numbers. On a device they are in one program or
    // in two, and here all are in one.
    let mut written: HashMap<&str, String> = HashMap::new();
    for Function {
        name,
        text: function,
        guarded,
    } in &code.functions
    {
        if function.device_only {
            return Err(format!("kernel {name} runs on a GPU alone"));
        }
        let own = function.source(name, *guarded);
        match written.get(&**name) {
            Some(known) if *known == own => {}
            Some(_) => return Err(format!("two kernels have the name {name} and different texts")),
            None => {
                let _ = write!(text, "#line 1 \"{name}\"\n{own}");
                written.insert(name, own);
            }
        }
        let _ = writeln!(
            kernels,
            "    {{ \"{name}\", [](void** arguments) {{ kiln_host::call({name}, arguments); }} }},"
        );
    }
    let _ = write!(
        text,
        "extern \"C\" const kiln_host::Kernel kiln_host_kernels[] = {{\n{kernels}    {{ nullptr, nullptr }}\n}};\n"
    );
    Ok(text)
}

/// Compiles `text` to the library at `path`.
fn compile(text: &str, path: &Path) -> Result<(), String> {
    let folder = path.parent().unwrap_or(Path::new("."));
    let failed = |error: std::io::Error| format!("{}: {error}", folder.display());
    let source = path.with_extension("cpp");
    fs::write(&source, text).map_err(failed)?;
    // Another process may build the same: the finished library takes its place at once.
    let built = tempfile::Builder::new()
        .suffix(".so")
        .tempfile_in(folder)
        .map_err(failed)?
        .into_temp_path();
    let output = Command::new(compiler()?)
        .args(FLAGS)
        .arg(level(text))
        .args(if cfg!(target_arch = "x86_64") {
            &["-march=native"][..]
        } else {
            &[]
        })
        .arg("-o")
        .arg(&built)
        .arg(&source)
        .output()
        .map_err(failed)?;
    if !output.status.success() {
        let log = String::from_utf8_lossy(&output.stderr);
        let lines: Vec<&str> = log.lines().take(40).collect();
        return Err(format!(
            "the host's compiler rejects {}:\n{}",
            source.display(),
            lines.join("\n")
        ));
    }
    built
        .persist(path)
        .map_err(|error| format!("{}: {error}", path.display()))
}

/// The first compiler that runs.
fn compiler() -> Result<&'static Path, String> {
    static FOUND: OnceLock<Option<PathBuf>> = OnceLock::new();
    let found = FOUND.get_or_init(|| {
        let chosen = env::var_os("CXX").map(PathBuf::from);
        let candidates = chosen.into_iter().chain(COMPILERS.map(PathBuf::from));
        let runs = |command: &PathBuf| {
            let output = Command::new(command).arg("--version").output();
            output.is_ok_and(|output| output.status.success())
        };
        candidates.into_iter().find(runs)
    });
    found
        .as_deref()
        .ok_or_else(|| "there is no C++ compiler ($CXX, g++, c++ and clang++ were tried)".into())
}
