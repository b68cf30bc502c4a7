//! The folder of a run belongs to one process at a time: two would delete each other's files.

use std::fs::{File, FileType, OpenOptions, TryLockError};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

use super::checkpoint::Checkpoints;
use super::log::{self, Entry};
use super::place::locate;
use crate::data::Prepared;
use crate::error::CliError;

/// The file that is locked while a process trains.
const LOCK: &str = ".lock";
/// What makes a folder that of a run.
pub(super) const CONFIG: &str = "config.toml";
/// How long a resumed run waits for the lock: ranks that a launcher has killed need a moment to end.
const PATIENCE: Duration = Duration::from_secs(2);
/// Longer than any checkpoint takes to be written: what was begun before is left over, even where there are
/// no locks to tell.
const LONG_AGO: Duration = Duration::from_secs(24 * 60 * 60);

/// A run's folder, claimed until this is dropped.
#[derive(Debug)]
pub(super) struct Claim {
    folder: PathBuf,
    /// None where the file system has no locks.
    lock: Option<File>,
    /// Whether the folder was made for this claim.
    made: bool,
}

impl Claim {
    /// The folder of a new run. A folder asked for must not hold a run; the default one gets a number if it
    /// does, or if another process has just begun one there. A run that ended before its first step holds
    /// none: the new one takes its place, and prepares its own data.
    ///
    /// # Errors
    ///
    /// [`CliError::Occupied`], [`CliError::NoConfig`], [`CliError::InUse`] or [`CliError::Io`].
    pub(super) fn start(out: Option<&Path>, name: &str) -> Result<Self, CliError> {
        if let Some(folder) = out {
            return Self::vacant(folder)?.ok_or_else(|| match folder.join(CONFIG).exists() {
                true => CliError::Occupied {
                    path: folder.to_path_buf(),
                },
                false => CliError::NoConfig {
                    run: folder.to_path_buf(),
                },
            });
        }
        let mut number = 1;
        loop {
            let folder = Path::new("runs").join(match number {
                1 => name.to_owned(),
                _ => format!("{name}-{number}"),
            });
            match Self::vacant(&folder) {
                // Without locks, making the folder is all that only one process can do.
                Ok(Some(claim)) if claim.lock.is_some() || claim.made => return Ok(claim),
                Ok(_) | Err(CliError::InUse { .. }) => number += 1,
                Err(error) => return Err(error),
            }
        }
    }

    /// The folder of a run that `--resume place` goes on with, from the checkpoint `from`.
    ///
    /// # Errors
    ///
    /// [`CliError::InUse`] if another process trains there, or did when the checkpoint was chosen.
    pub(super) fn resume(folder: &Path, from: Option<&Path>, place: &Path) -> Result<Self, CliError> {
        let claim = Self::lock(folder, false, PATIENCE)?;
        if locate(place)?.1.as_deref() != from {
            return Err(CliError::InUse {
                path: folder.to_path_buf(),
            });
        }
        claim.sweep();
        Ok(claim)
    }

    /// Removes what a run has left that ended before its first step.
    fn clear(&self) -> Result<(), CliError> {
        Prepared::remove(&self.folder.join("data"))?;
        let config = self.folder.join(CONFIG);
        std::fs::remove_file(&config).map_err(CliError::io("remove", &config))
    }

    /// Removes what a killed program left half written.
    fn sweep(&self) {
        let age = match self.lock {
            Some(_) => Duration::ZERO,
            None => LONG_AGO,
        };
        let checkpoints = Checkpoints::of(&self.folder);
        checkpoints.remove_unfinished(age);
        let mut folders = checkpoints.list();
        folders.extend([
            self.folder.clone(),
            self.folder.join("data"),
            checkpoints.abandoned().to_path_buf(),
        ]);
        for folder in folders {
            remove_left_over(&folder, kiln_hub::TEMPORARY, FileType::is_file, age);
        }
    }

    /// Where it is.
    pub(super) fn folder(&self) -> &Path {
        &self.folder
    }

    /// Claims a folder for a new run; none if it holds one.
    fn vacant(folder: &Path) -> Result<Option<Self>, CliError> {
        if holds_run(folder)? {
            return Ok(None);
        }
        if let Some(parent) = folder.parent() {
            std::fs::create_dir_all(parent).map_err(CliError::io("create", parent))?;
        }
        let made = match std::fs::create_dir(folder) {
            Ok(()) => true,
            // An empty folder, or one that a run which failed early has left.
            Err(error) if error.kind() == ErrorKind::AlreadyExists => false,
            Err(error) => return Err(CliError::io("create", folder)(error)),
        };
        let was_claimed = folder.join(LOCK).exists();
        let claim = Self::lock(folder, made, Duration::ZERO)?;
        // Again, now that nobody else can begin one. Without locks another process may be about to take the
        // first step of its run.
        let has_config = folder.join(CONFIG).exists();
        if holds_run(folder)? || (has_config && claim.lock.is_none()) {
            return Ok(None);
        }
        // In a folder that never was a run's, such names are somebody else's.
        if was_claimed {
            claim.sweep();
        }
        if has_config {
            claim.clear()?;
        }
        Ok(Some(claim))
    }

    fn lock(folder: &Path, made: bool, patience: Duration) -> Result<Self, CliError> {
        let path = folder.join(LOCK);
        let file = OpenOptions::new()
            .create(true)
            .truncate(false)
            .write(true)
            .open(&path)
            .map_err(CliError::io("open", &path))?;
        let begun = Instant::now();
        let lock = loop {
            match file.try_lock() {
                Ok(()) => break Some(file),
                Err(TryLockError::WouldBlock) if begun.elapsed() < patience => {
                    std::thread::sleep(Duration::from_millis(50));
                }
                Err(TryLockError::WouldBlock) => {
                    return Err(CliError::InUse {
                        path: folder.to_path_buf(),
                    });
                }
                Err(TryLockError::Error(error)) => {
                    kiln_log::warn!(
                        "{} cannot be locked ({error}): nothing keeps a second process from training there",
                        folder.display()
                    );
                    break None;
                }
            }
        };
        Ok(Self {
            folder: folder.to_path_buf(),
            lock,
            made,
        })
    }
}

/// Whether there is a run in `folder`: it has a checkpoint, or its log a step, or its config is not that of a
/// process that had claimed the folder.
fn holds_run(folder: &Path) -> Result<bool, CliError> {
    let checkpoints = Checkpoints::of(folder);
    if !folder.join(CONFIG).exists() {
        return Ok(checkpoints.last().is_some());
    }
    let has_some = checkpoints.last().is_some() || !checkpoints.list_abandoned().is_empty();
    let is_claimed = folder.join(LOCK).exists();
    let is_step = |entry: &Entry| entry.step() > 0;
    Ok(has_some || !is_claimed || log::read(folder)?.iter().any(is_step))
}

/// Removes what `is_kind`, files or folders, has a name that begins with `prefix`, and was not changed by
/// anybody for `age`.
pub(super) fn remove_left_over(folder: &Path, prefix: &str, is_kind: fn(&FileType) -> bool, age: Duration) {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    for entry in entries.filter(|entry| entry.file_name().to_string_lossy().starts_with(prefix)) {
        let path = entry.path();
        // Of a link its own: what it leads to is not the program's.
        let Ok(found) = entry.metadata() else { continue };
        // A clock that was set back makes a file of the future.
        let is_old = |changed: SystemTime| changed.elapsed().unwrap_or_default() >= age;
        if is_kind(&found.file_type()) && found.modified().is_ok_and(is_old) {
            let _ = match found.is_dir() {
                true => std::fs::remove_dir_all(&path),
                false => std::fs::remove_file(&path),
            };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_is_claimed_by_one_at_a_time() {
        let place = tempfile::tempdir().unwrap();
        let folder = place.path().join("deep/run");
        let claim = Claim::start(Some(&folder), "").unwrap();
        let error = Claim::start(Some(&folder), "").unwrap_err();
        assert!(matches!(error, CliError::InUse { .. }), "{error}");
        drop(claim);
        // A run that failed before it had a config leaves its folder to the next one.
        let claim = Claim::start(Some(&folder), "").unwrap();
        std::fs::write(folder.join(CONFIG), "").unwrap();
        let unfinished = folder.join("checkpoints/.writing-x");
        std::fs::create_dir_all(&unfinished).unwrap();
        // Of an encoded corpus.
        let half = folder.join("data/.tmp-x");
        std::fs::create_dir(folder.join("data")).unwrap();
        std::fs::write(&half, "").unwrap();
        let error = Claim::resume(&folder, None, &folder).unwrap_err().to_string();
        assert!(
            error.contains("another process") && error.contains("run"),
            "{error}"
        );
        assert!(
            unfinished.is_dir() && half.is_file(),
            "they are the other process's"
        );
        drop(claim);
        let step = "{\"kind\":\"evaluation\",\"step\":1,\"loss\":1.0,\"accuracy\":null}\n";
        std::fs::write(folder.join(log::LOG), step).unwrap();
        let error = Claim::start(Some(&folder), "").unwrap_err();
        assert!(matches!(error, CliError::Occupied { .. }), "{error}");
        let claim = Claim::resume(&folder, None, &folder).unwrap();
        assert!(claim.folder() == folder && !unfinished.exists() && !half.exists());
    }

    /// The corrected command is not refused.
    #[test]
    fn a_run_without_a_step_leaves_its_folder() {
        let place = tempfile::tempdir().unwrap();
        let folder = place.path().join("run");
        let at = |name: &str| folder.join(name);
        let claim = Claim::start(Some(&folder), "").unwrap();
        for file in [CONFIG, "data/tokens.bin", "data/prepared.json", "data/notes.txt"] {
            std::fs::create_dir_all(at(file).parent().unwrap()).unwrap();
            std::fs::write(at(file), "").unwrap();
        }
        std::fs::write(at(log::LOG), "{\"kind\":\"start\"}\n").unwrap();
        // It may be about to take its first step.
        let error = Claim::start(Some(&folder), "").unwrap_err();
        assert!(matches!(error, CliError::InUse { .. }), "{error}");
        assert!(at(CONFIG).exists() && at("data/tokens.bin").exists());
        drop(claim);
        drop(Claim::resume(&folder, None, &folder).unwrap());
        drop(Claim::start(Some(&folder), "").unwrap());
        assert!(
            !at(CONFIG).exists() && !at("data/tokens.bin").exists() && !at("data/prepared.json").exists()
        );
        assert!(at("data/notes.txt").exists(), "it is somebody's");
        // A config that no run has written, beside which nobody has trained.
        let own = place.path().join("own");
        std::fs::create_dir(&own).unwrap();
        std::fs::write(own.join(CONFIG), "").unwrap();
        let error = Claim::start(Some(&own), "").unwrap_err();
        assert!(matches!(error, CliError::Occupied { .. }), "{error}");
        assert!(own.join(CONFIG).exists());
    }

    #[test]
    fn what_is_not_of_a_run_stays() {
        let place = tempfile::tempdir().unwrap();
        let at = |name: &str| place.path().join(name);
        std::fs::create_dir_all(at(".tmp-backup/deep")).unwrap();
        std::fs::create_dir_all(at("checkpoints/.writing-x")).unwrap();
        std::fs::write(at(".tmp-notes"), "").unwrap();
        drop(Claim::start(Some(place.path()), "").unwrap());
        assert!(at(".tmp-notes").exists() && at("checkpoints/.writing-x").exists());
        // From now on it is the folder of a run. A run has no folders of such a name.
        drop(Claim::start(Some(place.path()), "").unwrap());
        assert!(!at(".tmp-notes").exists() && !at("checkpoints/.writing-x").exists());
        assert!(at(".tmp-backup/deep").exists());
    }

    #[test]
    fn checkpoints_without_a_config_are_no_vacant_folder() {
        let place = tempfile::tempdir().unwrap();
        let folder = place.path();
        std::fs::create_dir_all(folder.join("checkpoints/.writing-x")).unwrap();
        drop(Claim::start(Some(folder), "").unwrap());
        std::fs::create_dir_all(folder.join("checkpoints/step-00000008")).unwrap();
        let error = Claim::start(Some(folder), "").unwrap_err();
        assert!(matches!(error, CliError::NoConfig { .. }), "{error}");
    }

    #[test]
    fn a_checkpoint_written_since_the_command_began_is_not_passed_over() {
        let place = tempfile::tempdir().unwrap();
        let folder = place.path();
        std::fs::write(folder.join(CONFIG), "").unwrap();
        std::fs::create_dir_all(folder.join("checkpoints/step-00000008")).unwrap();
        let older = folder.join("checkpoints/step-00000004");
        let error = Claim::resume(folder, Some(&older), folder).unwrap_err();
        assert!(matches!(error, CliError::InUse { .. }), "{error}");
    }
}
