//! Where the folder leads that `--resume` or `--run` names.

use std::path::{Path, PathBuf};

use super::checkpoint::Checkpoints;
use super::folder::CONFIG;
use super::state::STATE;
use crate::error::CliError;

/// The run of a folder, which is that of a run or of a checkpoint, and the checkpoint to start from, if the
/// run has one.
///
/// # Errors
///
/// [`CliError::NoCheckpoint`] if the folder is neither a run nor a checkpoint, [`CliError::NoRun`] if it is a
/// checkpoint alone, [`CliError::NoConfig`] if it is a run that has lost its config.
pub fn locate(folder: &Path) -> Result<(PathBuf, Option<PathBuf>), CliError> {
    if folder.join(STATE).is_file() {
        // As it was written first: `checkpoints` may be a link to another disk. A link to a checkpoint may
        // lie anywhere, and what lies above it need not be the checkpoint's run.
        let find = || CliError::io("find", folder);
        // Without a slash at its end, which would be followed.
        let written: PathBuf = std::path::absolute(folder)
            .map_err(find())?
            .components()
            .collect();
        let resolved = folder.canonicalize().map_err(find())?;
        let order = match written.is_symlink() {
            true => [resolved, written],
            false => [written, resolved],
        };
        for checkpoint in order {
            if let Some(run) = run_of(&checkpoint) {
                return Ok((run, Some(checkpoint)));
            }
        }
        return Err(CliError::NoRun {
            checkpoint: folder.to_path_buf(),
        });
    }
    let last = Checkpoints::of(folder).last();
    match (folder.join(CONFIG).is_file(), last) {
        (true, last) => Ok((folder.to_path_buf(), last)),
        (false, Some(_)) => Err(CliError::NoConfig {
            run: folder.to_path_buf(),
        }),
        (false, None) => Err(CliError::NoCheckpoint {
            path: folder.to_path_buf(),
        }),
    }
}

/// The run in one of whose folders a checkpoint lies.
fn run_of(checkpoint: &Path) -> Option<PathBuf> {
    let run = checkpoint.parent()?.parent()?;
    run.join(CONFIG).is_file().then(|| run.to_path_buf())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn checkpoint(folder: &Path) {
        std::fs::create_dir_all(folder).unwrap();
        std::fs::write(folder.join(STATE), "").unwrap();
    }

    #[test]
    fn what_is_missing_is_named() {
        let place = tempfile::tempdir().unwrap();
        let at = |name: &str| place.path().join(name);
        checkpoint(&at("backup/step-00000004"));
        checkpoint(&at("lost/checkpoints/step-00000004"));
        std::fs::create_dir(at("empty")).unwrap();
        let told = |name: &str| locate(&at(name)).unwrap_err();
        for name in ["backup/step-00000004", "lost/checkpoints/step-00000004"] {
            let error = told(name);
            assert!(matches!(error, CliError::NoRun { .. }), "{error}");
        }
        let error = told("lost");
        assert!(matches!(error, CliError::NoConfig { .. }), "{error}");
        assert!(error.to_string().contains("lost/config.toml"), "{error}");
        for name in ["empty", "nowhere"] {
            let error = told(name);
            assert!(matches!(error, CliError::NoCheckpoint { .. }), "{error}");
        }
    }

    #[cfg(unix)]
    #[test]
    fn links_lead_to_the_run() {
        use std::os::unix::fs::symlink;

        let place = tempfile::tempdir().unwrap();
        let at = |name: &str| place.path().join(name);
        std::fs::create_dir(at("run")).unwrap();
        std::fs::write(at("run/config.toml"), "").unwrap();
        checkpoint(&at("disk/step-00000004"));
        symlink(at("disk"), at("run/checkpoints")).unwrap();
        symlink(at("run/checkpoints/step-00000004"), at("best")).unwrap();
        let run = at("run/checkpoints/step-00000004");
        assert_eq!(locate(&run).unwrap(), (at("run"), Some(run.clone())));
        assert_eq!(locate(&at("run")).unwrap(), (at("run"), Some(run)));
        // Where the whole path of the link is resolved, nothing of the run is left in it.
        assert!(matches!(locate(&at("best")), Err(CliError::NoRun { .. })));
        std::fs::remove_file(at("run/checkpoints")).unwrap();
        std::fs::rename(at("disk"), at("run/checkpoints")).unwrap();
        let run = at("run").canonicalize().unwrap();
        assert_eq!(locate(&at("best")).unwrap().0, run);
        // A config that lies where that of the run would, were the link the checkpoint.
        std::fs::write(at("config.toml"), "").unwrap();
        symlink("checkpoints/step-00000004", at("run/latest")).unwrap();
        for name in ["run/latest", "run/latest/", "run/latest/."] {
            let found = locate(&at(name)).unwrap();
            assert_eq!(found, (run.clone(), Some(run.join("checkpoints/step-00000004"))));
        }
    }
}
