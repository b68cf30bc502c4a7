//! Checkpoints: everything that a run needs to continue as if it had never stopped.
//!
//! ```text
//! runs/NAME/
//!   config.toml                 the config as it was used
//!   data/                       tokenizer and encoded corpus, and the settings that they were made by
//!   log.jsonl  curves.svg       what happened so far
//!   checkpoints/step-00000200/
//!     model.safetensors  config.json  tokenizer.json   what other programs read
//!     optimizer.mpk             the optimizer's state, in Burn's recorder format
//!     state.json                step, place in the data, random generator, what the run keeps, checksums
//!   abandoned/step-00000300/    checkpoints that the run does not go on with, such as those of later steps
//!                               than the one that it was resumed from, each with its line's log (`line.rs`)
//!   .lock                       locked by the process that trains here
//! ```
//!
//! A checkpoint is written into a folder with another name, flushed to the disk, and renamed: whatever stands
//! under `step-N` is whole, whenever the program is killed. Checksums tell a damaged disk or a half-copied
//! folder from a checkpoint.

use std::fs::{File, FileType};
use std::io::{ErrorKind, Read};
use std::path::{Path, PathBuf};
use std::time::Duration;

use kiln_hub::write_bytes_atomic;
use sha2::{Digest, Sha256};

use super::copy::{copy_file, copy_files, copy_folder, flush_folder, has_all_of};
use super::folder::remove_left_over;
use super::line::Line;
use super::log::LOG;
use super::state::{STATE, State};
use crate::error::CliError;

const OPTIMIZER: &str = "optimizer.mpk";
/// Where a run has the checkpoints of a line that it does not go on with.
const ABANDONED: &str = "abandoned";
/// Names of folders that are being written.
const UNFINISHED: &str = ".writing-";

/// The checkpoints of a run.
#[derive(Clone, Debug)]
pub struct Checkpoints {
    run: PathBuf,
    folder: PathBuf,
    abandoned: PathBuf,
}

/// What was set aside.
#[derive(Debug, Default)]
pub struct Aside {
    /// Where the checkpoints are now, oldest first.
    pub moved: Vec<PathBuf>,
    /// Whether one of them took the run's log along.
    pub took_log: bool,
}

impl Checkpoints {
    /// The checkpoints of the run in `run`.
    pub fn of(run: &Path) -> Self {
        Self {
            run: run.to_path_buf(),
            folder: run.join("checkpoints"),
            abandoned: run.join(ABANDONED),
        }
    }

    /// Where they are.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Where those are that were set aside.
    pub fn abandoned(&self) -> &Path {
        &self.abandoned
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

    /// Whether `checkpoint` is the one of `step` among them, which a later resume finds.
    pub fn holds(&self, checkpoint: &Path, step: u64) -> bool {
        let place = |path: &Path| path.canonicalize().ok();
        let found = place(&self.folder.join(name_of(step)));
        found.is_some() && found == place(checkpoint)
    }

    /// The newest checkpoint of a step before `step`.
    pub fn before(&self, step: u64) -> Option<PathBuf> {
        let mut all = self.list();
        all.retain(|path| step_of(path).is_some_and(|found| found < step));
        all.pop()
    }

    /// The checkpoints that were set aside.
    pub fn list_abandoned(&self) -> Vec<PathBuf> {
        let entries = std::fs::read_dir(&self.abandoned).into_iter().flatten().flatten();
        let mut paths: Vec<PathBuf> = entries.map(|entry| entry.path()).collect();
        paths.retain(|path| path.join(STATE).is_file());
        paths.sort();
        paths
    }

    /// Moves the checkpoints that a run on `line` goes on without out of the way: those from `step` on, and
    /// those of another line. They are neither the newest nor to be counted any more. Each takes the run's
    /// log along, which is about to be cut, unless it has that of another line.
    ///
    /// # Errors
    ///
    /// [`CliError::Io`] or [`CliError::Hub`].
    pub fn set_aside(&self, step: u64, line: &Line) -> Result<Aside, CliError> {
        let is_other = |path: &PathBuf| step_of(path).is_some_and(|found| found >= step) || !line.holds(path);
        let others: Vec<PathBuf> = self.list().into_iter().filter(is_other).collect();
        let mut aside = Aside::default();
        // The newest first: until the last one is moved, the newest is of the old line, as before.
        for path in others.into_iter().rev() {
            std::fs::create_dir_all(&self.abandoned).map_err(CliError::io("create", &self.abandoned))?;
            aside.took_log |= line.copy_log(&self.run, &path)?;
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            let target = free_name(&self.abandoned, &name, "");
            aside.moved.push(match std::fs::rename(&path, &target) {
                // `checkpoints` may be a link to another disk.
                Err(error) if error.kind() == ErrorKind::CrossesDevices => self.carry(&path, target)?,
                renamed => {
                    renamed.map_err(CliError::io("move a checkpoint to", &target))?;
                    target
                }
            });
        }
        aside.moved.reverse();
        Ok(aside)
    }

    /// Moves a checkpoint to another disk. It is whole in one of the two places at any time. Returns where it
    /// is: in `target`, or where a program that was killed before it removed the checkpoint has copied it to.
    fn carry(&self, path: &Path, target: PathBuf) -> Result<PathBuf, CliError> {
        let target = match self.copy_of(path)? {
            Some(copy) => {
                // The run's log may have become longer since.
                if path.join(LOG).is_file() {
                    copy_file(&path.join(LOG), &copy.join(LOG))?;
                }
                copy
            }
            None => {
                let copy = unfinished_in(&self.abandoned)?;
                let root = path.canonicalize().map_err(CliError::io("find", path))?;
                copy_folder(&root, path, copy.path())?;
                rename_unfinished(copy, &target)?;
                target
            }
        };
        let left = self.unfinished()?;
        std::fs::rename(path, left.path().join("moved")).map_err(CliError::io("remove", path))?;
        left.close().map_err(CliError::io("remove", path))?;
        Ok(target)
    }

    /// A checkpoint among those set aside that has everything which `path` has.
    fn copy_of(&self, path: &Path) -> Result<Option<PathBuf>, CliError> {
        let root = path.canonicalize().map_err(CliError::io("find", path))?;
        let state = |folder: &Path| std::fs::read(folder.join(STATE)).ok();
        let own = state(path);
        for known in self.list_abandoned() {
            // The state has the checksums of the large files: mostly it tells them apart.
            if own.is_some() && state(&known) == own {
                let has_all = has_all_of(&known, &root, path);
                if has_all.map_err(CliError::io("compare with a copy", path))? {
                    return Ok(Some(known));
                }
            }
        }
        Ok(None)
    }

    /// Makes the checkpoint `from`, of `step` on `line`, the one that a later resume finds, and sets aside
    /// what the run goes on without; without a checkpoint the run begins, and that is everything. Returns
    /// where the checkpoint is now.
    ///
    /// # Errors
    ///
    /// As [`Self::take`].
    pub fn go_on_from(
        &self,
        from: Option<&Path>,
        step: u64,
        line: &Line,
    ) -> Result<(Option<PathBuf>, Aside), CliError> {
        match from {
            Some(from) if !self.holds(from, step) => {
                let (copy, aside) = self.take(from, step, line)?;
                Ok((Some(copy), aside))
            }
            Some(from) => Ok((Some(from.to_path_buf()), self.set_aside(step + 1, line)?)),
            None => Ok((None, self.set_aside(0, line)?)),
        }
    }

    /// Makes `source`, a checkpoint of `step` on `line` that lies elsewhere, the newest: copies it, and sets
    /// others aside, its own step's too. Returns the copy.
    ///
    /// The copy is whole before another checkpoint is moved, and `source` stays where it is, unless it is one
    /// of those set aside. A log that it has is copied too: it says which line the copy is of, if the program
    /// is killed before the run's log is that of this line.
    ///
    /// # Errors
    ///
    /// [`CliError::Io`]; if the copy cannot be written, all checkpoints are where they were.
    pub fn take(&self, source: &Path, step: u64, line: &Line) -> Result<(PathBuf, Aside), CliError> {
        let unfinished = self.unfinished()?;
        copy_files(source, unfinished.path())?;
        let aside = self.set_aside(step, line)?;
        Ok((self.name(unfinished, step)?, aside))
    }

    /// Writes a checkpoint; `write` puts the model into the folder it is given. Returns the folder.
    ///
    /// # Errors
    ///
    /// [`CliError::Io`] or what `write` returns; the checkpoints before are untouched then.
    pub fn write(
        &self,
        mut state: State,
        optimizer: &[u8],
        write: impl FnOnce(&Path) -> Result<(), CliError>,
    ) -> Result<PathBuf, CliError> {
        let unfinished = self.unfinished()?;
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
        self.name(unfinished, state.step)
    }

    /// A folder for a checkpoint that is being written.
    fn unfinished(&self) -> Result<tempfile::TempDir, CliError> {
        std::fs::create_dir_all(&self.folder).map_err(CliError::io("create", &self.folder))?;
        unfinished_in(&self.folder)
    }

    /// Gives a whole checkpoint its name.
    fn name(&self, unfinished: tempfile::TempDir, step: u64) -> Result<PathBuf, CliError> {
        let target = self.folder.join(name_of(step));
        if target.exists() {
            // The same step again, after a resume from an older checkpoint: the same contents.
            self.discard(&target).map_err(CliError::io("replace", &target))?;
        }
        rename_unfinished(unfinished, &target)?;
        Ok(target)
    }

    /// Removes all checkpoints but `last`, the one written last, and the newest `keep - 1` of the others.
    pub fn remove_old(&self, last: &Path, keep: usize) {
        let mut others = self.list();
        others.retain(|other| other.file_name() != last.file_name());
        for old in &others[..others.len().saturating_sub(keep.saturating_sub(1))] {
            if let Err(error) = self.discard(old) {
                kiln_log::warn!("cannot remove the old checkpoint {}: {error}", old.display());
            }
        }
    }

    /// Removes a checkpoint. It loses its name first: half of one, if the program is killed, is unfinished.
    fn discard(&self, checkpoint: &Path) -> std::io::Result<()> {
        let unfinished = tempfile::Builder::new()
            .prefix(UNFINISHED)
            .tempdir_in(&self.folder)?;
        std::fs::rename(checkpoint, unfinished.path().join("discarded"))?;
        unfinished.close()
    }

    /// Removes folders that a killed program left unfinished, at least `age` ago: nothing for the one process
    /// that trains here, and longer than a checkpoint takes where there may be others.
    pub fn remove_unfinished(&self, age: Duration) {
        for folder in [&self.folder, &self.abandoned] {
            remove_left_over(folder, UNFINISHED, FileType::is_dir, age);
        }
    }
}

/// A folder in `folder` for a checkpoint that is being written.
fn unfinished_in(folder: &Path) -> Result<tempfile::TempDir, CliError> {
    tempfile::Builder::new()
        .prefix(UNFINISHED)
        .tempdir_in(folder)
        .map_err(CliError::io("create a folder in", folder))
}

/// Gives what was written its name, which nothing has.
fn rename_unfinished(unfinished: tempfile::TempDir, target: &Path) -> Result<(), CliError> {
    let unfinished = unfinished.keep();
    make_readable(&unfinished).map_err(CliError::io("set the permissions of", &unfinished))?;
    std::fs::rename(&unfinished, target).map_err(CliError::io("rename a folder to", target))?;
    // The entry in the folder above, so that the name outlives a power loss.
    flush_folder(target.parent().unwrap_or(target));
    Ok(())
}

/// The name of the checkpoint of a step.
fn name_of(step: u64) -> String {
    format!("step-{step:08}")
}

/// The step in a checkpoint folder's name.
fn step_of(path: &Path) -> Option<u64> {
    path.file_name()?.to_str()?.strip_prefix("step-")?.parse().ok()
}

/// A name in `folder` that nothing has: STEM, STEM-2 and so on, with an ending.
pub fn free_name(folder: &Path, stem: &str, ending: &str) -> PathBuf {
    let mut path = folder.join(format!("{stem}{ending}"));
    let mut number = 2;
    while path.exists() {
        path = folder.join(format!("{stem}-{number}{ending}"));
        number += 1;
    }
    path
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

/// The error of a checkpoint that cannot be used, with the one before it as the remedy, or the newest where
/// it lies elsewhere.
pub fn damaged(folder: &Path, reason: String) -> CliError {
    let all = folder
        .parent()
        .and_then(Path::parent)
        .map_or_else(Vec::new, |run| Checkpoints::of(run).list());
    let remedy = match all.iter().position(|path| path == folder) {
        Some(0) => "there is none before it: copy it again from where it came, or start anew".to_owned(),
        Some(at) => format!(
            "resume from the one before it with --resume {}",
            all[at - 1].display()
        ),
        None => match all.last() {
            Some(newest) => format!(
                "copy it again from where it came, or resume from the newest of its run with --resume {}",
                newest.display()
            ),
            None => "copy it again from where it came, or start anew".to_owned(),
        },
    };
    CliError::Checkpoint {
        path: folder.to_path_buf(),
        reason,
        remedy,
    }
}

/// SHA-256 of a file, in hexadecimal.
pub(super) fn checksum(path: &Path) -> std::io::Result<String> {
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

#[cfg(test)]
mod tests {
    use kiln_hub::data::LoaderState;

    use super::super::log::{self, Entry, Log};
    use super::super::state::entry_of;
    use super::*;
    use crate::config::OptimizerName;
    use crate::data::HeldOut;

    fn names(folder: &Path) -> Vec<String> {
        let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
        let mut names: Vec<_> = entries
            .map(|entry| entry.file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    }

    /// What goes on with the run's own line.
    fn own() -> Line {
        Line::default()
    }

    fn write(checkpoints: &Checkpoints, step: u64, keep: usize) -> PathBuf {
        let data = LoaderState {
            seed: 0,
            epoch: 0,
            batch: step,
            batch_size: 1,
            examples: 9,
            contents: 0,
        };
        let state = State::now(step, data, None, OptimizerName::Sgd, HeldOut::Random);
        let written = checkpoints.write(state, b"state", |_| Ok(())).unwrap();
        checkpoints.remove_old(&written, keep);
        written
    }

    #[test]
    fn later_checkpoints_are_set_aside_and_nothing_is_overwritten() {
        let run = tempfile::tempdir().unwrap();
        let checkpoints = Checkpoints::of(run.path());
        for step in [10, 20, 30] {
            write(&checkpoints, step, 9);
        }
        let abandoned = run.path().join(ABANDONED);
        assert_eq!(
            checkpoints.set_aside(11, &own()).unwrap().moved,
            ["step-00000020", "step-00000030"].map(|name| abandoned.join(name))
        );
        assert!(checkpoints.set_aside(11, &own()).unwrap().moved.is_empty());
        let first = write(&checkpoints, 20, 9);
        assert_eq!(checkpoints.last(), Some(first));
        checkpoints.set_aside(11, &own()).unwrap();
        assert_eq!(
            names(&abandoned),
            ["step-00000020", "step-00000020-2", "step-00000030"]
        );
        assert_eq!(names(&run.path().join("checkpoints")), ["step-00000010"]);
    }

    #[test]
    fn a_checkpoint_from_elsewhere_is_copied_before_others_are_moved() {
        let run = tempfile::tempdir().unwrap();
        let checkpoints = Checkpoints::of(run.path());
        for step in [10, 20, 30] {
            write(&checkpoints, step, 9);
        }
        let abandoned = run.path().join(ABANDONED);
        checkpoints.set_aside(20, &own()).unwrap();
        write(&checkpoints, 20, 9);
        let state = |path: &Path| std::fs::read(path.join(STATE)).unwrap();
        let source = abandoned.join("step-00000020");
        let (copy, aside) = checkpoints.take(&source, 20, &own()).unwrap();
        assert_eq!(aside.moved, [abandoned.join("step-00000020-2")]);
        assert_eq!(checkpoints.last().as_deref(), Some(&*copy));
        assert!(read_state(&copy).is_ok() && state(&copy) == state(&source));
        // A source that cannot be copied, here for want of a file, leaves everything where it is.
        let before = [names(&abandoned), names(&run.path().join("checkpoints"))];
        std::fs::remove_dir_all(&source).unwrap();
        assert!(checkpoints.take(&source, 20, &own()).is_err());
        std::fs::create_dir(&source).unwrap();
        assert_eq!(
            [names(&abandoned), names(&run.path().join("checkpoints"))],
            before
        );
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn checkpoints_on_another_disk_are_set_aside() {
        let Some((disk, _run, checkpoints)) = on_another_disk() else {
            return;
        };
        let written = write(&checkpoints, 10, 9);
        std::fs::create_dir(written.join("notes")).unwrap();
        std::fs::write(written.join("notes/a"), "of mine").unwrap();
        let state = std::fs::read(written.join(STATE)).unwrap();
        let moved = checkpoints.set_aside(0, &own()).unwrap().moved;
        assert_eq!(moved, [checkpoints.abandoned().join("step-00000010")]);
        assert!(read_state(&moved[0]).is_ok());
        assert_eq!(std::fs::read(moved[0].join(STATE)).unwrap(), state);
        assert_eq!(std::fs::read(moved[0].join("notes/a")).unwrap(), b"of mine");
        assert!(names(disk.path()).is_empty());
        assert_eq!(names(checkpoints.abandoned()), ["step-00000010"]);
    }

    /// A run whose checkpoints are on another disk, where there is one: memory is another disk than that of a
    /// temporary folder.
    #[cfg(target_os = "linux")]
    fn on_another_disk() -> Option<(tempfile::TempDir, tempfile::TempDir, Checkpoints)> {
        let disk = tempfile::tempdir_in("/dev/shm").ok()?;
        let run = tempfile::tempdir().unwrap();
        let checkpoints = Checkpoints::of(run.path());
        std::os::unix::fs::symlink(disk.path(), checkpoints.folder()).unwrap();
        Some((disk, run, checkpoints))
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn a_checkpoint_that_cannot_be_copied_whole_stays() {
        let Some((disk, _run, checkpoints)) = on_another_disk() else {
            return;
        };
        let written = write(&checkpoints, 10, 9);
        let socket = written.join("socket");
        let _listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
        let error = checkpoints.set_aside(0, &own()).unwrap_err().to_string();
        assert!(
            error.contains("step-00000010/socket") && error.contains("neither a file"),
            "{error}"
        );
        assert_eq!(names(disk.path()), ["step-00000010"]);
        assert!(names(checkpoints.abandoned()).is_empty());
        std::fs::remove_file(socket).unwrap();
        assert_eq!(checkpoints.set_aside(0, &own()).unwrap().moved.len(), 1);
    }

    /// The program was killed when a checkpoint was on both disks.
    #[cfg(target_os = "linux")]
    #[test]
    fn a_checkpoint_that_was_copied_already_is_not_copied_again() {
        let Some((disk, run, checkpoints)) = on_another_disk() else {
            return;
        };
        let written = write(&checkpoints, 10, 9);
        let entry = entry_of(&written).unwrap();
        let evaluation = |step| Entry::Evaluation {
            step,
            loss: 1.0,
            accuracy: None,
        };
        std::fs::create_dir(written.join("notes")).unwrap();
        std::fs::write(written.join("notes/a"), "of mine").unwrap();
        let line = || Line::of(run.path(), None).unwrap();
        let aside = |log: &[Entry]| {
            Log::begin(run.path(), log.to_vec()).unwrap();
            checkpoints.set_aside(0, &line()).unwrap()
        };
        let copy_back = || {
            std::fs::create_dir(&written).unwrap();
            let copy = checkpoints.abandoned().join("step-00000010");
            copy_folder(&copy, &copy, &written).unwrap();
        };
        let mut log = vec![Entry::Start, entry];
        let first = aside(&log);
        for steps in [0, 2] {
            log.extend((0..steps).map(|step| evaluation(11 + step)));
            copy_back();
            let again = aside(&log);
            assert_eq!(again.moved, first.moved);
            assert!(again.took_log && names(disk.path()).is_empty());
            assert_eq!(names(checkpoints.abandoned()), ["step-00000010"]);
            assert_eq!(log::read(&first.moved[0]).unwrap(), log);
        }
        // Another log, or another note, would be lost.
        copy_back();
        log.truncate(3);
        assert_eq!(
            aside(&log).moved,
            [checkpoints.abandoned().join("step-00000010-2")]
        );
        copy_back();
        std::fs::write(written.join("notes/a"), "of mine, too").unwrap();
        assert_eq!(
            aside(&log).moved,
            [checkpoints.abandoned().join("step-00000010-3")]
        );
    }

    #[test]
    fn a_checkpoint_before_a_step_is_the_newest_of_those() {
        let run = tempfile::tempdir().unwrap();
        let checkpoints = Checkpoints::of(run.path());
        let [first, second] = [10, 20].map(|step| write(&checkpoints, step, 9));
        assert_eq!(checkpoints.before(21), Some(second));
        assert_eq!(checkpoints.before(20), Some(first));
        assert_eq!(checkpoints.before(10), None);
        assert!(checkpoints.list_abandoned().is_empty());
        let aside = checkpoints.set_aside(0, &own()).unwrap();
        assert_eq!(checkpoints.list_abandoned(), aside.moved);
    }

    #[test]
    fn the_checkpoint_just_written_stays() {
        let run = tempfile::tempdir().unwrap();
        let checkpoints = Checkpoints::of(run.path());
        write(&checkpoints, 30, 1);
        let written = write(&checkpoints, 20, 1);
        assert_eq!(checkpoints.list(), std::slice::from_ref(&written));
        assert!(read_state(&written).is_ok());
    }

    #[test]
    fn a_checkpoint_elsewhere_is_not_among_them() {
        let run = tempfile::tempdir().unwrap();
        let checkpoints = Checkpoints::of(run.path());
        let written = write(&checkpoints, 20, 1);
        let best = run.path().join("best/step-00000020");
        std::fs::create_dir_all(&best).unwrap();
        assert!(checkpoints.holds(&written, 20));
        assert!(checkpoints.holds(&written.join("../step-00000020"), 20));
        assert!(!checkpoints.holds(&written, 30));
        assert!(!checkpoints.holds(&best, 20));
    }

    #[cfg(unix)]
    #[test]
    fn unfinished_folders_are_removed_by_age() {
        let run = tempfile::tempdir().unwrap();
        let checkpoints = Checkpoints::of(run.path());
        let folder = |name: &str, age: Duration| {
            let folder = run.path().join(name);
            std::fs::create_dir_all(&folder).unwrap();
            let changed = std::time::SystemTime::now() - age;
            File::open(folder).unwrap().set_modified(changed).unwrap();
        };
        let day = Duration::from_secs(24 * 60 * 60);
        folder("abandoned/.writing-old", 2 * day);
        folder("checkpoints/.writing-old", 2 * day);
        folder("checkpoints/.writing-now", Duration::ZERO);
        folder("checkpoints/step-00000001", 2 * day);
        let left = || names(&run.path().join("checkpoints"));
        checkpoints.remove_unfinished(day);
        assert_eq!(left(), [".writing-now", "step-00000001"]);
        assert!(names(&run.path().join(ABANDONED)).is_empty());
        checkpoints.remove_unfinished(Duration::ZERO);
        assert_eq!(left(), ["step-00000001"]);
    }

    #[test]
    fn a_state_that_does_not_say_sets_every_nth_example_aside() {
        let run = tempfile::tempdir().unwrap();
        let written = write(&Checkpoints::of(run.path()), 20, 1);
        assert_eq!(read_state(&written).unwrap().held_out, HeldOut::Random);
        let path = written.join(STATE);
        let mut state: serde_json::Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
        state.as_object_mut().unwrap().remove("held_out").unwrap();
        std::fs::write(&path, state.to_string()).unwrap();
        assert_eq!(read_state(&written).unwrap().held_out, HeldOut::EveryNth);
    }
}
