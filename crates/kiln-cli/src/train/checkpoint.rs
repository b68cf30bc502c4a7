//! Checkpoints: everything that a run needs to continue as if it had never stopped.
//!
//! ```text
//! runs/NAME/
//!   config.toml                 the config as it was used
//!   data/                       tokenizer and encoded corpus
//!   log.jsonl  curves.svg       what happened so far
//!   checkpoints/step-00000200/
//!     model.safetensors  config.json  tokenizer.json   what other programs read
//!     optimizer.mpk             the optimizer's state, in Burn's recorder format
//!     state.json                step, place in the data, random generator, checksums
//! ```
//!
//! A checkpoint is written into a folder with another name, flushed to the disk, and renamed: whatever stands
//! under `step-N` is whole, whenever the program is killed. Checksums tell a damaged disk or a half-copied
//! folder from a checkpoint.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use kiln::LossScale;
use kiln_burn::random::{self, Stream};
use kiln_hub::data::LoaderState;
use kiln_hub::write_bytes_atomic;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::error::CliError;

const STATE: &str = "state.json";
const OPTIMIZER: &str = "optimizer.mpk";
/// Names of folders that are being written.
const UNFINISHED: &str = ".writing-";

/// `state.json`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct State {
    /// Optimizer steps done.
    pub step: u64,
    /// Place in the data.
    pub data: LoaderState,
    /// The random generator: its seed, and the stream that comes next.
    pub random: Option<(u64, u64)>,
    /// Loss scaling, if the loss is scaled: the scale, the steps since it changed, and the skipped steps.
    #[serde(default)]
    pub loss_scale: Option<(f32, u32, u32)>,
    /// SHA-256 of each other file, in hexadecimal.
    pub files: BTreeMap<String, String>,
}

impl State {
    /// The state now, after `step` optimizer steps.
    pub fn now(step: u64, data: LoaderState, loss_scale: Option<LossScale>) -> Self {
        let random = random::state().map(|Stream { seed, stream }| (seed, stream));
        Self {
            step,
            data,
            random,
            loss_scale: loss_scale.map(|now| (now.scale, now.steps, now.skipped)),
            files: BTreeMap::new(),
        }
    }

    /// Where loss scaling stood.
    pub fn loss_scale(&self) -> Option<LossScale> {
        self.loss_scale.map(|(scale, steps, skipped)| LossScale {
            scale,
            steps,
            skipped,
        })
    }

    /// Restores the random generator.
    pub fn restore_random(&self) {
        if let Some((seed, stream)) = self.random {
            random::restore(Stream { seed, stream });
        }
    }
}

/// The checkpoints of a run.
#[derive(Clone, Debug)]
pub struct Checkpoints {
    folder: PathBuf,
}

impl Checkpoints {
    /// The checkpoints of the run in `run`.
    pub fn of(run: &Path) -> Self {
        Self {
            folder: run.join("checkpoints"),
        }
    }

    /// Folders of all checkpoints, oldest first.
    pub fn list(&self) -> Vec<PathBuf> {
        let entries = std::fs::read_dir(&self.folder).into_iter().flatten().flatten();
        let mut found: Vec<(u64, PathBuf)> = entries
            .filter_map(|entry| Some((step_of(&entry.path())?, entry.path())))
            .collect();
        found.sort();
        found.into_iter().map(|(_, path)| path).collect()
    }

    /// The newest checkpoint.
    pub fn last(&self) -> Option<PathBuf> {
        self.list().pop()
    }

    /// Writes a checkpoint; `write` puts the model into the folder it is given. Then removes all but the
    /// newest `keep`. Returns the folder.
    ///
    /// # Errors
    ///
    /// [`CliError::Io`] or what `write` returns; the checkpoints before are untouched then.
    pub fn write(
        &self,
        mut state: State,
        optimizer: &[u8],
        keep: usize,
        write: impl FnOnce(&Path) -> Result<(), CliError>,
    ) -> Result<PathBuf, CliError> {
        std::fs::create_dir_all(&self.folder).map_err(CliError::io("create", &self.folder))?;
        self.remove_unfinished();
        let unfinished = tempfile::Builder::new()
            .prefix(UNFINISHED)
            .tempdir_in(&self.folder)
            .map_err(CliError::io("create a folder in", &self.folder))?;
        write(unfinished.path())?;
        write_bytes_atomic(&unfinished.path().join(OPTIMIZER), optimizer)?;
        for entry in std::fs::read_dir(unfinished.path()).map_err(CliError::io("list", unfinished.path()))? {
            let path = entry.map_err(CliError::io("list", unfinished.path()))?.path();
            let name = path
                .file_name()
                .unwrap_or_default()
                .to_string_lossy()
                .into_owned();
            state
                .files
                .insert(name, checksum(&path).map_err(CliError::io("read", &path))?);
        }
        let json = serde_json::to_vec_pretty(&state)
            .map_err(|error| CliError::Usage(format!("{STATE}: {error}")))?;
        write_bytes_atomic(&unfinished.path().join(STATE), &json)?;

        let target = self.folder.join(format!("step-{:08}", state.step));
        if target.exists() {
            // The same step again, after a resume from an older checkpoint: the same contents.
            std::fs::remove_dir_all(&target).map_err(CliError::io("replace", &target))?;
        }
        let unfinished = unfinished.keep();
        make_readable(&unfinished).map_err(CliError::io("set the permissions of", &unfinished))?;
        std::fs::rename(&unfinished, &target).map_err(CliError::io("rename a folder to", &target))?;
        // The folder's own entry, so that the name outlives a power loss; not every file system can.
        if let Ok(folder) = File::open(&self.folder) {
            let _ = folder.sync_all();
        }
        let all = self.list();
        for old in &all[..all.len().saturating_sub(keep)] {
            if let Err(error) = std::fs::remove_dir_all(old) {
                tracing::warn!("cannot remove the old checkpoint {}: {error}", old.display());
            }
        }
        Ok(target)
    }

    /// Removes folders that a killed program left unfinished.
    fn remove_unfinished(&self) {
        let entries = std::fs::read_dir(&self.folder).into_iter().flatten().flatten();
        for entry in entries.filter(|entry| entry.file_name().to_string_lossy().starts_with(UNFINISHED)) {
            let _ = std::fs::remove_dir_all(entry.path());
        }
    }
}

/// The step in a checkpoint folder's name.
fn step_of(path: &Path) -> Option<u64> {
    path.file_name()?.to_str()?.strip_prefix("step-")?.parse().ok()
}

/// Where `--resume DIR` leads: the run, and the checkpoint to start from, if the run has one.
///
/// # Errors
///
/// [`CliError::NoCheckpoint`] if the folder is neither a run nor a checkpoint.
pub fn locate(folder: &Path) -> Result<(PathBuf, Option<PathBuf>), CliError> {
    if folder.join(STATE).is_file() {
        let absolute = folder.canonicalize().map_err(CliError::io("find", folder))?;
        let run = absolute
            .parent()
            .and_then(Path::parent)
            .filter(|run| run.join("config.toml").is_file());
        let run = run.ok_or_else(|| CliError::NoCheckpoint {
            path: folder.to_path_buf(),
        })?;
        return Ok((run.to_path_buf(), Some(absolute)));
    }
    if folder.join("config.toml").is_file() {
        return Ok((folder.to_path_buf(), Checkpoints::of(folder).last()));
    }
    Err(CliError::NoCheckpoint {
        path: folder.to_path_buf(),
    })
}

/// Reads `state.json` and checks every file of the checkpoint against it.
///
/// # Errors
///
/// [`CliError::Checkpoint`] naming the file that is missing or damaged.
pub fn read_state(folder: &Path) -> Result<State, CliError> {
    let bytes =
        std::fs::read(folder.join(STATE)).map_err(|error| damaged(folder, format!("{STATE}: {error}")))?;
    let state: State =
        serde_json::from_slice(&bytes).map_err(|error| damaged(folder, format!("{STATE}: {error}")))?;
    for (name, expected) in &state.files {
        match checksum(&folder.join(name)) {
            Ok(found) if found == *expected => {}
            Ok(_) => return Err(damaged(folder, format!("{name} is not what was written"))),
            Err(error) => return Err(damaged(folder, format!("{name}: {error}"))),
        }
    }
    Ok(state)
}

/// The optimizer's state.
///
/// # Errors
///
/// [`CliError::Checkpoint`] if it is missing.
pub fn read_optimizer(folder: &Path) -> Result<Vec<u8>, CliError> {
    std::fs::read(folder.join(OPTIMIZER)).map_err(|error| damaged(folder, format!("{OPTIMIZER}: {error}")))
}

/// The error of a checkpoint that cannot be used, with the one before it as the remedy.
pub fn damaged(folder: &Path, reason: String) -> CliError {
    let older = folder.parent().and_then(Path::parent).and_then(|run| {
        let all = Checkpoints::of(run).list();
        let at = all
            .iter()
            .position(|path| path.file_name() == folder.file_name())?;
        all.get(at.checked_sub(1)?).cloned()
    });
    let remedy = match older {
        Some(older) => format!("resume from the one before it with --resume {}", older.display()),
        None => "there is none before it: copy it again from where it came, or start anew".to_owned(),
    };
    CliError::Checkpoint {
        path: folder.to_path_buf(),
        reason,
        remedy,
    }
}

fn checksum(path: &Path) -> std::io::Result<String> {
    let mut file = File::open(path)?;
    let mut hasher = Sha256::new();
    let mut buffer = vec![0; 1 << 20];
    loop {
        match file.read(&mut buffer)? {
            0 => break,
            read => hasher.update(&buffer[..read]),
        }
    }
    Ok(hasher
        .finalize()
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect())
}

/// Temporary folders are private to their owner; a checkpoint should be as readable as any other folder.
#[cfg(unix)]
fn make_readable(path: &Path) -> std::io::Result<()> {
    use std::os::unix::fs::PermissionsExt;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o755))
}

#[cfg(not(unix))]
fn make_readable(_path: &Path) -> std::io::Result<()> {
    Ok(())
}
