//! Minifying by itself: with `KILN_MINIFY=1` a step that does not compile, that crashes, or whose results are
//! not the reference's becomes the smallest graph that still shows it.
//!
//! The variable is `1`, for a file in the current folder, or a folder. What is compiled then runs on made-up
//! arguments in a process of its own before it runs here, so that a crash is seen and not suffered. Graphs are
//! observed by `kiln minify --check`: the program `kiln` beside this one or on the path, or the command of
//! `KILN_MINIFY_COMMAND`, which is given a file and answers as that does ([`kiln_minify::print_verdict`]).
//! Without such a program graphs are observed in this process: differences and failures to compile are found,
//! and a crash is one.
//!
//! The file begins with the fault and the one command that repeats it; the error names both.

use std::ffi::OsString;
use std::fmt;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use kiln_compiler::CompileError;
use kiln_cpu::{CpuError, StepError};
use kiln_graph::{Graph, HostTensor, Scalar};
use kiln_minify::{Case, ChildProbe, Failure, Fault, Limits, Minified, Subject, minify, observe, provoke};

use super::{ExecuteError, Setting, convert, prepare_here};
use crate::options::{CompileBackend, CompileOptions};
use crate::storage::Storage;

/// How long a smaller graph is looked for.
const SEARCH: Duration = Duration::from_secs(120);

/// After how long a process that observes a graph is given up. The interpreter may be slow on a large graph:
/// that is no fault.
const PATIENCE: Duration = Duration::from_secs(60);

/// By how much results may differ where no comparison says so.
const TOLERANCE: f64 = 1e-4;

/// A backend as what is observed.
#[derive(Clone, Copy, Debug)]
pub struct Observed {
    /// What runs the graph.
    pub backend: CompileBackend,
    /// Ordinal of the GPU, for a backend that runs on one.
    pub gpu: usize,
}

impl Subject for Observed {
    fn run(
        &self,
        graph: &Graph,
        inputs: &[HostTensor],
        scalars: &[Scalar],
    ) -> Result<Vec<HostTensor>, Failure> {
        let options = CompileOptions::default()
            .with_backend(self.backend)
            .with_name("minify");
        let refused = |reason: String| Failure::Refused(reason);
        let graph = Arc::new(graph.clone());
        let (executable, runs_on) = prepare_here(
            self.backend,
            self.gpu,
            graph.clone(),
            &options,
            Setting::default(),
        )
        .map_err(|error| refused(error.to_string()))?;
        if runs_on != self.backend {
            return Err(refused(format!("no code for it: it would run on {runs_on}")));
        }
        let storage = |tensor: &HostTensor| {
            let dtype = convert::burn_dtype(tensor.ty().dtype);
            Storage::from(convert::from_host(tensor, dtype))
        };
        let types = graph.scalars().iter().map(|&value| graph.dtype(value));
        let scalars: Vec<u64> = scalars
            .iter()
            .zip(types)
            .map(|(scalar, dtype)| scalar.to_bits(dtype))
            .collect();
        let failed = |reason: String| Failure::Failed(reason);
        let outputs = executable
            .run(inputs.iter().map(storage).collect(), &scalars)
            .map_err(|error| failed(error.to_string()))?;
        let tensors = outputs.iter().map(Storage::to_host_tensor);
        let tensors: Option<Vec<HostTensor>> = tensors.collect();
        tensors.ok_or_else(|| failed("an output has an element type that graphs have not".to_owned()))
    }
}

impl Observed {
    /// The options of `kiln minify` for this backend, as they are typed.
    pub fn arguments(&self, tolerance: f64) -> String {
        let device = match self.backend {
            CompileBackend::Cuda => format!("cuda:{}", self.gpu),
            _ => "cpu".to_owned(),
        };
        format!(
            "--backend {} --device {device} --tolerance {tolerance:?}",
            self.backend
        )
    }
}

/// What became of the search for a smaller graph, for people.
#[derive(Clone, Debug)]
pub struct Search {
    /// The file with the smallest graph, if one was written.
    pub file: Option<PathBuf>,
    text: String,
}

impl fmt::Display for Search {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

/// The folder for smallest graphs, if they are asked for.
fn folder() -> Option<PathBuf> {
    match std::env::var_os("KILN_MINIFY")? {
        value if value.is_empty() || value == "0" => None,
        value if value == "1" => Some(PathBuf::from(".")),
        folder => Some(folder.into()),
    }
}

/// The command that observes a file in a process of its own; none if there is no such program.
fn command(arguments: &str) -> Option<Vec<OsString>> {
    if let Some(command) = std::env::var_os("KILN_MINIFY_COMMAND").filter(|it| !it.is_empty()) {
        return Some(
            command
                .to_string_lossy()
                .split_whitespace()
                .map(OsString::from)
                .collect(),
        );
    }
    let name = format!("kiln{}", std::env::consts::EXE_SUFFIX);
    let beside = std::env::current_exe().ok();
    let beside = beside.as_deref().and_then(Path::parent).map(Path::to_path_buf);
    let path = std::env::var_os("PATH").unwrap_or_default();
    let folders = beside.into_iter().chain(std::env::split_paths(&path));
    let program = folders
        .map(|folder| folder.join(&name))
        .find(|file| file.is_file())?;
    let words = arguments.split_whitespace().chain(["--verdict", "--check"]);
    let words = std::iter::once("minify").chain(words).map(OsString::from);
    Some(std::iter::once(program.into_os_string()).chain(words).collect())
}

/// A step that went wrong, or may.
pub(super) struct Suspect<'a> {
    pub(super) graph: &'a Graph,
    pub(super) backend: CompileBackend,
    pub(super) gpu: usize,
    pub(super) options: &'a CompileOptions,
}

impl Suspect<'_> {
    /// `error` with the file of the smallest graph that shows it, if that is asked for and if it is a fault
    /// of the backend.
    pub(super) fn minified(&self, error: ExecuteError) -> ExecuteError {
        let (Some(folder), Some(wanted)) = (folder(), kind(&error)) else {
            return error;
        };
        self.explained(error, &folder, wanted)
    }

    /// Runs the graph in a process of its own, if minifying is asked for and there is a program that can.
    ///
    /// # Errors
    ///
    /// If that process crashes, with the file of the smallest graph that crashes.
    pub(super) fn survives(&self) -> Result<(), ExecuteError> {
        let Some(folder) = folder().filter(|_| self.backend.compiles()) else {
            return Ok(());
        };
        let Some(probe) = self.probe() else { return Ok(()) };
        let crashes = |case: &Case| {
            let seen = probe.observe(case).ok().flatten();
            seen.filter(|fault| matches!(fault, Fault::Crashed(_)))
        };
        let mut seen = None;
        provoke(self.graph, &mut |case| {
            seen = crashes(case);
            // One try: a kernel that crashes rarely waits for certain numbers.
            seen.clone().or(Some(Fault::Hung))
        });
        let Some(fault) = seen else { return Ok(()) };
        let error = ExecuteError::Crashes {
            fault: fault.to_string(),
        };
        Err(self.explained(error, &folder, |fault| matches!(fault, Fault::Crashed(_))))
    }

    fn tolerance(&self) -> f64 {
        self.options.check.map_or(TOLERANCE, |check| check.tolerance)
    }

    fn observed(&self) -> Observed {
        Observed {
            backend: self.backend,
            gpu: self.gpu,
        }
    }

    /// What observes graphs in processes of their own; none if there is no such program. They share this
    /// process's cache, which knows that the C compiler is right and has the step that is tried first.
    fn probe(&self) -> Option<ChildProbe> {
        Some(ChildProbe {
            command: command(&self.observed().arguments(self.tolerance()))?,
            environment: vec![("KILN_MINIFY".into(), "0".into())],
            timeout: PATIENCE,
        })
    }

    fn explained(&self, error: ExecuteError, folder: &Path, wanted: fn(&Fault) -> bool) -> ExecuteError {
        let seconds = SEARCH.as_secs();
        kiln_log::warn!(
            target: "kiln",
            region = %self.graph.name,
            "KILN_MINIFY: looking for the smallest graph that shows this, for up to {seconds} s: {error}"
        );
        let search = self.search(folder, wanted).unwrap_or_else(|error| Search {
            file: None,
            text: format!("no smallest graph was written: {error}"),
        });
        ExecuteError::Minified {
            source: Box::new(error),
            search: Box::new(search),
        }
    }

    fn search(&self, folder: &Path, wanted: fn(&Fault) -> bool) -> io::Result<Search> {
        let (observed, tolerance) = (self.observed(), self.tolerance());
        let probe = self.probe();
        let mut trouble = None;
        let mut oracle = |case: &Case| {
            let fault = match &probe {
                Some(probe) => probe.observe(case).unwrap_or_else(|error| {
                    trouble.get_or_insert(error);
                    None
                }),
                // A graph that the interpreter refuses shows nothing.
                None => observe(case, &observed, tolerance).ok().flatten(),
            };
            fault.filter(wanted)
        };
        let limits = Limits {
            time: SEARCH,
            ..Limits::default()
        };
        let found = provoke(self.graph, &mut oracle).and_then(|case| minify(case, &mut oracle, &limits));
        if let Some(error) = trouble {
            return Err(error);
        }
        let Some(found) = found else {
            let text = "the minifier does not see this on arguments of its own, compared with the interpreter and with default options";
            return Ok(Search {
                file: None,
                text: text.to_owned(),
            });
        };
        self.write(&found, folder)
    }

    fn write(&self, found: &Minified, folder: &Path) -> io::Result<Search> {
        std::fs::create_dir_all(folder)?;
        let file = std::path::absolute(folder)?.join(self.file_name());
        let arguments = self.observed().arguments(self.tolerance());
        let repeat = format!("kiln minify --check {} {arguments}", file.display());
        std::fs::write(&file, found.to_text(&repeat))?;
        let (nodes, all) = (found.case.graph.num_nodes(), self.graph.num_nodes());
        let text = format!(
            "{nodes} of its {all} nodes still show it and are in {}: {}; `{repeat}` repeats it",
            file.display(),
            found.fault
        );
        Ok(Search {
            file: Some(file),
            text,
        })
    }

    /// A name that follows from the graph.
    fn file_name(&self) -> String {
        let mut hasher = DefaultHasher::new();
        self.graph.to_string().hash(&mut hasher);
        let name = self.graph.name.chars();
        let name: String = name
            .map(|c| if c.is_ascii_alphanumeric() { c } else { '_' })
            .collect();
        format!("{name}-{:08x}.min.kg", hasher.finish() as u32)
    }
}

/// Which faults are the one that `error` is; none if it is no fault of a backend.
fn kind(error: &ExecuteError) -> Option<fn(&Fault) -> bool> {
    match error {
        ExecuteError::Parted { .. } => Some(|fault| matches!(fault, Fault::Differs { .. })),
        ExecuteError::Compile(
            CompileError::Invalid(_) | CompileError::Pass { .. } | CompileError::Plan(_),
        )
        | ExecuteError::Step(StepError::Cpu(CpuError::Compile { .. } | CpuError::Load { .. })) => {
            Some(|fault| matches!(fault, Fault::Refused(_)))
        }
        _ => None,
    }
}
