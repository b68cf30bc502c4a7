//! From a tree of C sources to one shared object.
//!
//! Each source becomes an object file in a compiler process of its own, as many at once as there are threads,
//! unless an earlier build made the object ([`objects`]); one more process links them. The tree lives in a
//! fresh temporary folder that disappears with the result, unless a compilation fails: then it stays, and the
//! error says where.

mod compile;
pub mod objects;
pub mod toolchain;
pub mod trial;

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use kiln_store::Key;
use tempfile::TempDir;

use crate::error::{CpuError, Result};
use crate::runtime::abi::{RUNTIME_HEADER, RUNTIME_HEADER_NAME};
use compile::{Unit, write};
use objects::Objects;

pub use toolchain::Toolchain;

/// One file of a generated source tree.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SourceFile {
    /// File name without folders; `.c` files are compiled, others (headers) only written.
    pub name: String,
    /// Contents.
    pub text: String,
    /// Whether a person wrote what is to be compiled.
    written_by_hand: bool,
}

impl SourceFile {
    /// A file called `name` holding `text`.
    pub fn new(name: impl Into<String>, text: impl Into<String>) -> Self {
        Self {
            name: name.into(),
            text: text.into(),
            written_by_hand: false,
        }
    }

    /// The file, as a person's: in a build of [`OptLevel::Generated`] it is compiled as for
    /// [`OptLevel::Full`].
    #[must_use]
    pub fn written_by_hand(self) -> Self {
        Self {
            written_by_hand: true,
            ..self
        }
    }
}

/// How hard the C compiler tries.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum OptLevel {
    /// `-O0`: for reading generated code in a debugger.
    None,
    /// `-O1`.
    Quick,
    /// What generated kernels gain from, which the generator has vectorised and unrolled: they are as fast as
    /// with `-O2`, for which GCC takes half as long again. Other compilers get `-O2`.
    #[default]
    Generated,
    /// `-O2`.
    Full,
    /// `-O3`.
    Most,
}

/// GCC's for [`OptLevel::Generated`]. It lowers conversions between vectors of different widths to pieces,
/// which SLP joins; the others are what some loops of products gain from.
const GENERATED: [&str; 5] = [
    "-O1",
    "-ftree-slp-vectorize",
    "-ftree-vrp",
    "-fcode-hoisting",
    "-fthread-jumps",
];

impl OptLevel {
    /// The flags of `compiler`.
    pub fn flags(self, compiler: &Toolchain) -> &'static [&'static str] {
        match self {
            Self::None => &["-O0"],
            Self::Quick => &["-O1"],
            Self::Generated if compiler.is_gcc() => &GENERATED,
            Self::Generated | Self::Full => &["-O2"],
            Self::Most => &["-O3"],
        }
    }
}

/// Options of a build.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BuildOptions {
    /// Optimisation level.
    pub level: OptLevel,
    /// Compiler processes at once.
    pub jobs: usize,
    /// Whether to include debug information, so that profilers show the generated lines.
    pub debug_info: bool,
}

impl Default for BuildOptions {
    fn default() -> Self {
        let jobs = std::thread::available_parallelism().map_or(1, usize::from);
        Self {
            level: OptLevel::default(),
            jobs,
            debug_info: false,
        }
    }
}

impl BuildOptions {
    /// The options that the result of `compiler` depends on, for cache keys.
    pub fn identity(&self, compiler: &Toolchain) -> String {
        format!(
            "{} debug={}",
            self.level.flags(compiler).join(" "),
            self.debug_info
        )
    }
}

/// A freshly built shared object; its folder is removed on drop.
#[derive(Debug)]
pub struct Built {
    folder: TempDir,
    library: PathBuf,
    /// Time in compiler and linker.
    pub elapsed: Duration,
    /// How many sources this build compiled; the others' objects existed already, or other processes made
    /// them.
    pub compiled: usize,
}

impl Built {
    /// The shared object.
    pub fn path(&self) -> &Path {
        &self.library
    }

    /// Keeps the source tree and the shared object; returns their folder.
    pub fn keep(self) -> PathBuf {
        self.folder.keep()
    }
}

/// The commands of a build.
struct Commands {
    /// The arguments of each source's compilation, longest source first.
    compile: Vec<(String, Vec<String>)>,
    /// The arguments of the linker's run.
    link: Vec<String>,
}

/// The shared object in the folder of a build.
const LIBRARY_NAME: &str = "step.so";

impl Toolchain {
    /// Compiles the `.c` files of `sources` and links them into one shared object. `kiln_runtime.h` is added
    /// to the tree.
    ///
    /// # Errors
    /// [`CpuError::Compile`] with the compiler's output and the kept sources; [`CpuError::Io`] when the
    /// temporary folder cannot be written or the compiler cannot be started.
    pub fn build(&self, sources: &[SourceFile], options: &BuildOptions) -> Result<Built> {
        self.build_reusing(sources, options, &Objects::default())
    }

    /// [`Toolchain::build`], but sources whose objects `objects` has are not compiled again, and new
    /// objects are added to it.
    ///
    /// # Errors
    /// Those of [`Toolchain::build`].
    pub fn build_reusing(
        &self,
        sources: &[SourceFile],
        options: &BuildOptions,
        objects: &Objects,
    ) -> Result<Built> {
        let span = tracing::info_span!("cc", files = sources.len());
        let _entered = span.enter();
        let mut profiled = kiln_profile::span(kiln_profile::Category::Compile, "cc");
        profiled.argument("files", sources.len());
        let start = Instant::now();
        let folder = tempfile::Builder::new()
            .prefix("kiln-")
            .tempdir()
            .map_err(CpuError::io("creating a folder in", std::env::temp_dir()))?;
        write(folder.path(), RUNTIME_HEADER_NAME, RUNTIME_HEADER.as_bytes())?;
        for file in sources {
            write(folder.path(), &file.name, file.text.as_bytes())?;
        }

        let Commands { compile, link } = self.commands(sources, options);
        let keys = self.object_keys(sources, &compile);
        let units = keys
            .into_iter()
            .zip(compile)
            .map(|(key, (name, arguments))| Unit { key, name, arguments });
        let made = self
            .compile(units.collect(), folder.path(), objects, options.jobs.max(1))
            .and_then(|compiled| {
                let linker = self.start(&link, folder.path())?;
                self.finish("link", linker, folder.path())?;
                Ok(compiled)
            });
        let compiled = match made {
            Ok(compiled) => compiled,
            Err(error) => return Err(keep_sources(error, folder)),
        };
        let library = folder.path().join(LIBRARY_NAME);
        let elapsed = start.elapsed();
        profiled.argument("compiled", compiled);
        tracing::debug!(?elapsed, files = sources.len(), compiled, "built");
        Ok(Built {
            folder,
            library,
            elapsed,
            compiled,
        })
    }

    /// The arguments of every compiler process of a build.
    fn commands(&self, sources: &[SourceFile], options: &BuildOptions) -> Commands {
        // Long files first: the last process to finish is then a short one.
        let mut units: Vec<&SourceFile> = sources.iter().filter(|file| file.name.ends_with(".c")).collect();
        units.sort_by_key(|file| std::cmp::Reverse(file.text.len()));
        let owned = |arguments: &[&str]| arguments.iter().copied().map(str::to_owned).collect::<Vec<_>>();
        let compile = units.iter().map(|unit| {
            let level = match options.level {
                OptLevel::Generated if unit.written_by_hand => OptLevel::Full,
                level => level,
            };
            let mut arguments = self.flags().to_vec();
            arguments.extend(owned(level.flags(self)));
            arguments.extend(owned(&[
                "-fPIC",
                "-pipe",
                "-w",
                "-c",
                &unit.name,
                "-o",
                &object_name(&unit.name),
            ]));
            if options.debug_info {
                arguments.push("-g".to_owned());
            }
            (unit.name.clone(), arguments)
        });
        let mut link = owned(&["-shared", "-o", LIBRARY_NAME]);
        link.extend(units.iter().map(|unit| object_name(&unit.name)));
        link.push("-lm".to_owned());
        // A function that no file and no header has would be missed when it is called. Elsewhere linkers look
        // for themselves.
        if cfg!(target_os = "linux") {
            link.push("-Wl,-z,defs".to_owned());
            // An exported step starts threads, and glibc has them in a library of their own before 2.34.
            link.push("-lpthread".to_owned());
        }
        Commands {
            compile: compile.collect(),
            link,
        }
    }

    /// The keys of the objects of `compile`: everything that each object depends on.
    fn object_keys(&self, sources: &[SourceFile], compile: &[(String, Vec<String>)]) -> Vec<Key> {
        let identity = self.identity();
        let headers = sources.iter().filter(|file| !file.name.ends_with(".c"));
        let headers: Vec<&str> = headers
            .flat_map(|file| [&*file.name, &*file.text])
            .chain([RUNTIME_HEADER])
            .collect();
        let key = |(unit, arguments): &(String, Vec<String>)| {
            let text = sources
                .iter()
                .filter(|file| file.name == *unit)
                .map(|file| &*file.text);
            // The name of the file is in the object's symbol table only.
            let flags = arguments
                .iter()
                .map(String::as_str)
                .filter(|argument| !argument.starts_with(&**unit));
            let all = [&*identity].into_iter().chain(headers.iter().copied());
            Key::of(all.chain(flags).chain(text))
        };
        compile.iter().map(key).collect()
    }

    /// The commands of a build, as they would be typed in the folder that holds the sources and
    /// `kiln_runtime.h`: one for each `.c` file, then the one that links them to `step.so`.
    pub fn build_commands(&self, sources: &[SourceFile], options: &BuildOptions) -> Vec<String> {
        let Commands { compile, link } = self.commands(sources, options);
        let all = compile.into_iter().map(|(_, arguments)| arguments).chain([link]);
        all.map(|arguments| format!("{} {}", self.command(), arguments.join(" ")))
            .collect()
    }
}

fn object_name(source: &str) -> String {
    format!("{source}.o")
}

fn keep_sources(error: CpuError, folder: TempDir) -> CpuError {
    if matches!(error, CpuError::Compile { .. }) {
        let _kept = folder.keep();
    }
    error
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_of_people_are_optimised_as_usual() {
        let toolchain = Toolchain::detect().unwrap();
        let file = |name: &str| SourceFile::new(name, "int f(void) { return 1; }\n");
        let sources = [file("kernels.c"), file("own.c").written_by_hand()];
        let commands = |level| {
            let options = BuildOptions {
                level,
                ..BuildOptions::default()
            };
            let all = toolchain.build_commands(&sources, &options);
            let of = |name: &str| all.iter().find(|command| command.contains(name)).cloned();
            (of(" kernels.c ").unwrap(), of(" own.c ").unwrap())
        };
        let (kernels, own) = commands(OptLevel::Generated);
        assert_eq!(
            kernels.contains("-O1 -ftree-slp-vectorize"),
            toolchain.is_gcc(),
            "{kernels}"
        );
        assert!(own.contains(" -O2 "), "{own}");
        // Who asks for a level gets it.
        let (kernels, own) = commands(OptLevel::None);
        assert!(
            kernels.contains(" -O0 ") && own.contains(" -O0 "),
            "{kernels} {own}"
        );
    }
}
