//! Where libraries are looked for.
//!
//! In this order: the folders of `KILN_CUDA_PATH`; the dynamic linker's own (`LD_LIBRARY_PATH`, its cache,
//! the default folders) and the folders in which drivers are usually mounted; `CUDA_HOME`; the folders in
//! which pip's wheels put them, in the Python environment that is active (`VIRTUAL_ENV`, `CONDA_PREFIX`). The
//! first library that opens is taken. What was tried is kept, so that an error can name all of it.

use std::ffi::OsString;
use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};

use super::Library;
use crate::error::{CudaError, Result};

/// Folders outside the dynamic linker's in which a driver or a toolkit is usually found.
const USUAL: [&str; 5] = [
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib64",
    "/usr/local/nvidia/lib64",
    "/usr/lib/wsl/lib",
    "/usr/local/cuda/lib64",
];

/// Where to look, in order.
#[derive(Debug, Clone)]
pub struct Search {
    places: Vec<Place>,
}

#[derive(Debug, Clone)]
struct Place {
    /// Why the place is looked at: `KILN_CUDA_PATH`.
    origin: &'static str,
    /// Empty: whatever the dynamic linker finds by name.
    folder: PathBuf,
}

/// What a search tried.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Looked {
    /// File names, in the order in which each place was asked for them.
    pub files: Vec<&'static str>,
    /// Places, with where each comes from.
    pub places: Vec<String>,
    /// Files that are there and could not be opened, with the dynamic linker's answer.
    pub refused: Vec<(PathBuf, String)>,
    /// Variables that name no place because they are not set.
    pub unset: Vec<&'static str>,
}

impl fmt::Display for Looked {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "looked for {} in:", self.files.join(", "))?;
        for place in &self.places {
            write!(f, "\n  {place}")?;
        }
        for (path, reason) in &self.refused {
            write!(f, "\n{} is there but does not open: {reason}", path.display())?;
        }
        if !self.unset.is_empty() {
            write!(f, "\nnot set: {}", self.unset.join(", "))?;
        }
        Ok(())
    }
}

/// Variables that name places.
const VARIABLES: [&str; 4] = ["KILN_CUDA_PATH", "CUDA_HOME", "VIRTUAL_ENV", "CONDA_PREFIX"];

impl Search {
    /// The search that this process's environment asks for.
    pub fn from_env() -> Self {
        Self::new(|name| std::env::var_os(name), true)
    }

    /// A search with variables from `environment`. Without `system` the dynamic linker is not asked and the
    /// usual folders are not looked at.
    pub fn new(environment: impl Fn(&str) -> Option<OsString>, system: bool) -> Self {
        let variable = |name| environment(name).filter(|value| !value.is_empty());
        let mut places = Vec::new();
        let mut add = |origin, folders: Vec<PathBuf>| {
            places.extend(folders.into_iter().map(|folder| Place { origin, folder }));
        };
        if let Some(folders) = variable("KILN_CUDA_PATH") {
            add(
                "KILN_CUDA_PATH",
                std::env::split_paths(&folders).flat_map(toolkit).collect(),
            );
        }
        if system {
            add(
                "the dynamic linker's folders and LD_LIBRARY_PATH",
                vec![PathBuf::new()],
            );
            add("usual place", USUAL.iter().map(PathBuf::from).collect());
        }
        if let Some(home) = variable("CUDA_HOME") {
            add("CUDA_HOME", toolkit(home.into()));
        }
        for name in ["VIRTUAL_ENV", "CONDA_PREFIX"] {
            if let Some(prefix) = variable(name) {
                add(name, python(Path::new(&prefix)));
            }
        }
        Self { places }
    }

    /// The first file of `library` that opens, and where it is.
    pub(super) fn find(&self, library: Library) -> Result<(libloading::Library, PathBuf)> {
        let mut looked = Looked {
            files: library.files().to_vec(),
            ..Looked::default()
        };
        for place in &self.places {
            for file in library.files() {
                match place.open(file) {
                    Attempt::Opened(handle, path) => return Ok((handle, path)),
                    Attempt::Refused(path, reason) => looked.refused.push((path, reason)),
                    Attempt::Absent => {}
                }
            }
            looked.places.push(place.to_string());
        }
        let named = |name: &&str| self.places.iter().any(|place| place.origin == *name);
        looked.unset = VARIABLES.into_iter().filter(|name| !named(name)).collect();
        Err(CudaError::MissingLibrary { library, looked })
    }
}

/// The outcome of opening one file name in one place.
enum Attempt {
    Opened(libloading::Library, PathBuf),
    Absent,
    Refused(PathBuf, String),
}

impl Place {
    fn open(&self, file: &str) -> Attempt {
        let by_name = self.by_name();
        let path = self.folder.join(file);
        if !by_name && !path.exists() {
            return Attempt::Absent;
        }
        // SAFETY: the constructors of NVIDIA's libraries set up the library itself. A file of that name which
        // is something else was put there, or named in a variable, by whoever runs this process.
        match unsafe { libloading::Library::new(&path) } {
            Ok(handle) if by_name => Attempt::Opened(handle, loaded_path(file).unwrap_or(path)),
            Ok(handle) => Attempt::Opened(handle, path),
            Err(_) if by_name => Attempt::Absent,
            Err(error) => Attempt::Refused(path, error.to_string()),
        }
    }

    fn by_name(&self) -> bool {
        self.folder.as_os_str().is_empty()
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.by_name() {
            return f.write_str(self.origin);
        }
        write!(f, "{} ({})", self.folder.display(), self.origin)
    }
}

/// The folders of a toolkit, or of a plain folder with libraries.
fn toolkit(home: PathBuf) -> Vec<PathBuf> {
    ["", "lib64", "lib", "targets/x86_64-linux/lib"]
        .iter()
        .map(|sub| {
            if sub.is_empty() {
                home.clone()
            } else {
                home.join(sub)
            }
        })
        .collect()
}

/// The folders of a Python environment in which wheels put libraries: `nvidia/cu13/lib` for all of CUDA 13,
/// one folder a library (`nvidia/cudnn/lib`) otherwise.
fn python(prefix: &Path) -> Vec<PathBuf> {
    let mut found: Vec<PathBuf> = vec![prefix.join("lib")];
    for python in folders(&prefix.join("lib")) {
        let is_python = python
            .file_name()
            .is_some_and(|name| name.to_string_lossy().starts_with("python"));
        if is_python {
            let packages = folders(&python.join("site-packages/nvidia"));
            found.extend(
                packages
                    .into_iter()
                    .map(|package| package.join("lib"))
                    .filter(|lib| lib.is_dir()),
            );
        }
    }
    found
}

/// The folders in `folder`, by name.
fn folders(folder: &Path) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(folder) else {
        return Vec::new();
    };
    let mut folders: Vec<PathBuf> = entries.filter_map(|entry| Some(entry.ok()?.path())).collect();
    folders.retain(|path| path.is_dir());
    folders.sort();
    folders
}

/// The path of a library that the dynamic linker found by name, from the list of this process's mappings.
fn loaded_path(file: &str) -> Option<PathBuf> {
    let stem = file.split(".so").next()?;
    let maps = fs::read_to_string("/proc/self/maps").ok()?;
    maps.lines()
        .filter_map(|line| line.find('/').map(|start| Path::new(&line[start..])))
        .find(|path| {
            let name = path.file_name().map(|name| name.to_string_lossy());
            name.is_some_and(|name| name.starts_with(&format!("{stem}.so")))
        })
        .map(Path::to_path_buf)
}
