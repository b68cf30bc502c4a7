//! The history of a region: what it compiled, when and why, and the folder for the dumps.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use kiln_profile::{Stage, StepCompile};
use rustc_hash::FxHashMap;

use super::guard::Mismatch;
use crate::options::CompileBackend;

/// What to do about the second compilation of a training step.
pub const EXPECTED: &str = "nothing: the first step of an optimizer creates its state and does not come again; this one is the step that stays";

/// One compilation of a region.
#[derive(Clone, Debug)]
pub struct CompileEvent {
    /// Segment of the region, from 0.
    pub segment: usize,
    /// Which step of the region, in the order of compilation, from 0.
    pub step: usize,
    /// The backend that runs it.
    pub backend: CompileBackend,
    /// Whether it was prepared for one run only.
    pub provisional: bool,
    /// How the recording differed from the nearest step compiled before; none for the first of a segment.
    pub mismatch: Option<Mismatch>,
    /// Whether nothing had to be compiled for it: it is another size of a step before, whose kernels it has.
    pub absorbed: bool,
    /// Whether sizes are variables of its kernels, so that other sizes may use them.
    pub shares: bool,
    /// What there is to say about sizes: what became of marked dimensions (`kiln::dynamic`), and which sizes
    /// the program pins.
    pub notes: Vec<String>,
    /// Time until it could run.
    pub time: Duration,
    runs: Arc<AtomicU64>,
}

impl CompileEvent {
    /// The compilation of step `step`, which counts its runs in `runs`.
    pub fn new(
        (segment, step): (usize, usize),
        (backend, provisional): (CompileBackend, bool),
        mismatch: Option<Mismatch>,
        time: Duration,
        runs: Arc<AtomicU64>,
    ) -> Self {
        Self {
            absorbed: false,
            shares: false,
            notes: Vec::new(),
            segment,
            step,
            backend,
            provisional,
            mismatch,
            time,
            runs,
        }
    }

    /// How often the step ran, even if the region has dropped it since.
    pub fn runs(&self) -> u64 {
        self.runs.load(Ordering::Relaxed)
    }
}

/// Enters a compilation into the process's list of compile times.
pub fn note_compile(
    region: &str,
    (segment, step): (usize, usize),
    backend: CompileBackend,
    from_cache: bool,
    stages: &[(&'static str, Duration)],
) {
    kiln_profile::compile::add(StepCompile {
        region: region.to_owned(),
        segment,
        step,
        backend: backend.name().to_owned(),
        from_cache,
        stages: stages
            .iter()
            .map(|&(name, time)| Stage::new(name, time))
            .collect(),
    });
}

/// The folder for the debug dumps of a region: `root/name`, or `root/name-2` and so on if other regions of
/// the process have the same name. `root` is the region's option, else `KILN_DEBUG`; none if neither is
/// given.
pub fn debug_folder(root: Option<&Path>, name: &str) -> Option<PathBuf> {
    static TAKEN: Mutex<Option<FxHashMap<PathBuf, usize>>> = Mutex::new(None);
    let variable = || {
        std::env::var_os("KILN_DEBUG")
            .filter(|folder| !folder.is_empty())
            .map(PathBuf::from)
    };
    let root = root.map(Path::to_path_buf).or_else(variable)?;
    let plain: String = name
        .chars()
        .map(|c| if c.is_alphanumeric() || c == '-' { c } else { '_' })
        .collect();
    let folder = root.join(plain);
    let mut taken = TAKEN.lock().unwrap_or_else(PoisonError::into_inner);
    let count = taken.get_or_insert_default().entry(folder.clone()).or_insert(0);
    *count += 1;
    Some(match *count {
        1 => folder,
        count => folder.with_file_name(format!(
            "{}-{count}",
            folder.file_name().unwrap_or_default().to_string_lossy()
        )),
    })
}

/// Writes the recorded stream of a step into its folder. Trouble is a warning.
pub fn write_stream(folder: &Path, text: &str) {
    let written =
        std::fs::create_dir_all(folder).and_then(|()| std::fs::write(folder.join("recorded.txt"), text));
    if let Err(error) = written {
        kiln_log::warn!(folder = %folder.display(), %error, "the debug dump cannot be written");
    }
}
