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
        // lie anywhere, and so may one to a folder of checkpoints.
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
///
/// What stands above a checkpoint in a path need not be its run: a folder of the path may be a link. Then the
/// folder above it, which may have a config of its own, is nobody's run. Only the folders of a run's
/// checkpoints may be links, and a checkpoint there.
fn run_of(checkpoint: &Path) -> Option<PathBuf> {
    let folder = checkpoint.parent()?;
    let run = folder.parent()?;
    if !run.join(CONFIG).is_file() {
        return None;
    }
    let place = |path: &Path| path.canonicalize().ok();
    let checkpoints = Checkpoints::of(run);
    let is_folder_of_run = || {
        let own = [checkpoints.folder(), checkpoints.abandoned()];
        place(folder).is_some_and(|folder| own.into_iter().any(|own| place(own).as_ref() == Some(&folder)))
    };
    let lies_in_run = || {
        let above = place(checkpoint)?.parent()?.parent()?.to_path_buf();
        Some(above == place(run)?)
    };
    (is_folder_of_run() || lies_in_run() == Some(true)).then(|| run.to_path_buf())
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

    /// A folder with a config of its own is not the run of what its links lead to.
    #[cfg(unix)]
    #[test]
    fn a_folder_with_links_is_no_run() {
        use std::os::unix::fs::symlink;

        let place = tempfile::tempdir().unwrap();
        let at = |name: &str| place.path().join(name);
        std::fs::write(at("config.toml"), "").unwrap();
        std::fs::create_dir_all(at("runs/a")).unwrap();
        std::fs::write(at("runs/a/config.toml"), "").unwrap();
        checkpoint(&at("runs/a/checkpoints/step-00000004"));
        checkpoint(&at("runs/a/best/step-00000008"));
        symlink(at("runs/a/checkpoints"), at("ckpts")).unwrap();
        symlink(at("runs/a/best"), at("best")).unwrap();
        let run = at("runs/a").canonicalize().unwrap();
        for (name, found) in [
            ("ckpts/step-00000004", "checkpoints/step-00000004"),
            ("best/step-00000008", "best/step-00000008"),
        ] {
            assert_eq!(locate(&at(name)).unwrap(), (run.clone(), Some(run.join(found))));
        }
        // Where the checkpoints are on another disk, nothing of their run is left in the resolved path. The
        // folder of a link to one of them is not that run, either.
        std::fs::create_dir(at("runs/disk")).unwrap();
        std::fs::rename(at("runs/a/checkpoints"), at("runs/disk/a")).unwrap();
        symlink(at("runs/disk/a"), at("runs/a/checkpoints")).unwrap();
        std::fs::create_dir(at("links")).unwrap();
        symlink(at("runs/disk/a/step-00000004"), at("links/step-00000004")).unwrap();
        for name in ["ckpts/step-00000004", "links/step-00000004"] {
            let found = locate(&at(name));
            assert!(matches!(found, Err(CliError::NoRun { .. })), "{name}: {found:?}");
        }
        // A checkpoint in a run's own folder may be a link.
        std::fs::remove_file(at("runs/a/checkpoints")).unwrap();
        checkpoint(&at("runs/disk/b/c/step-00000004"));
        for folder in ["checkpoints", "abandoned"] {
            std::fs::create_dir(at("runs/a").join(folder)).unwrap();
            let link = at("runs/a").join(folder).join("step-00000004");
            symlink(at("runs/disk/b/c/step-00000004"), &link).unwrap();
            assert_eq!(locate(&link).unwrap(), (at("runs/a"), Some(link)));
        }
    }
}
