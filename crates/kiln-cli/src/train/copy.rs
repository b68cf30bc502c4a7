//! Copies of a checkpoint's files: for the place that a later resume finds, and for another disk.
//!
//! Whatever is copied is on the disk before the copy gets its name or the source is removed.

use std::fs::File;
use std::path::{Path, PathBuf};

use kiln_hub::{HubError, write_atomic};

use super::checkpoint::checksum;
use super::log::LOG;
use crate::error::CliError;

/// Copies a file in place of the one that is there; `to` is the old one or the new one at any time.
pub(super) fn copy_file(from: &Path, to: &Path) -> Result<(), CliError> {
    let copy = |temporary: &Path| {
        let copied = std::fs::copy(from, temporary);
        copied.map(drop).map_err(|source| HubError::Io {
            action: "copy to",
            path: to.to_path_buf(),
            source,
        })
    };
    Ok(write_atomic(to, copy)?)
}

/// Flushes the names in a folder to the disk; not every file system can.
pub(super) fn flush_folder(folder: &Path) {
    if let Ok(folder) = File::open(folder) {
        let _ = folder.sync_all();
    }
}

/// Copies the files of a folder into another one, and flushes them to the disk.
pub(super) fn copy_files(source: &Path, target: &Path) -> Result<(), CliError> {
    let list = || CliError::io("list", source);
    for entry in std::fs::read_dir(source).map_err(list())? {
        let from = entry.map_err(list())?.path();
        if !from.is_file() {
            continue;
        }
        let to = target.join(from.file_name().unwrap_or_default());
        copy_to_disk(&from, &to).map_err(CliError::io("copy to", &to))?;
    }
    flush_folder(target);
    Ok(())
}

/// Copies a folder with everything that somebody has put into it, links as links. `source` is a checkpoint or
/// a folder in one, and `root` the resolved path of this checkpoint.
///
/// # Errors
///
/// [`CliError::Io`], also for what is neither a file, a folder nor a link.
pub(super) fn copy_folder(root: &Path, source: &Path, target: &Path) -> Result<(), CliError> {
    let list = || CliError::io("list", source);
    for entry in std::fs::read_dir(source).map_err(list())? {
        let entry = entry.map_err(list())?;
        let (from, to) = (entry.path(), target.join(entry.file_name()));
        let kind = entry.file_type().map_err(list())?;
        if kind.is_dir() {
            std::fs::create_dir(&to).map_err(CliError::io("create", &to))?;
            copy_folder(root, &from, &to)?;
            continue;
        }
        let copied = if kind.is_symlink() {
            link_to(root, &from).and_then(|place| make_link(&place, &to))
        } else if kind.is_file() {
            copy_to_disk(&from, &to)
        } else {
            Err(std::io::Error::other("it is neither a file, a folder nor a link"))
        };
        copied.map_err(CliError::io("copy", &from))?;
    }
    flush_folder(target);
    Ok(())
}

/// Copies a file, and flushes it to the disk.
fn copy_to_disk(from: &Path, to: &Path) -> std::io::Result<()> {
    std::fs::copy(from, to)?;
    File::open(to)?.sync_all()
}

/// Where a copy of a link leads. A path that begins at the link's folder, and leads out of the checkpoint in
/// `root`, would lead elsewhere from the copy.
fn link_to(root: &Path, link: &Path) -> std::io::Result<PathBuf> {
    let place = std::fs::read_link(link)?;
    match link.canonicalize() {
        Ok(found) if place.is_relative() && !found.starts_with(root) => Ok(found),
        _ => Ok(place),
    }
}

#[cfg(unix)]
fn make_link(place: &Path, link: &Path) -> std::io::Result<()> {
    std::os::unix::fs::symlink(place, link)
}

#[cfg(not(unix))]
fn make_link(_place: &Path, _link: &Path) -> std::io::Result<()> {
    Err(std::io::Error::other("links are not copied on this system"))
}

/// Whether `copy` has everything that [`copy_folder`] would copy from `source`. Its log may be the beginning
/// of the source's: then the source's is the same log, which has become longer.
pub(super) fn has_all_of(copy: &Path, root: &Path, source: &Path) -> std::io::Result<bool> {
    for entry in std::fs::read_dir(source)? {
        let entry = entry?;
        let (from, to) = (entry.path(), copy.join(entry.file_name()));
        let kind = entry.file_type()?;
        let Ok(copied) = to.symlink_metadata() else {
            return Ok(false);
        };
        let is_same = if copied.file_type() != kind {
            false
        } else if kind.is_dir() {
            has_all_of(&to, root, &from)?
        } else if kind.is_symlink() {
            link_to(root, &from)? == std::fs::read_link(&to)?
        } else if entry.file_name() == LOG {
            std::fs::read(&from)?.starts_with(&std::fs::read(&to)?)
        } else {
            kind.is_file() && checksum(&from)? == checksum(&to)?
        };
        if !is_same {
            return Ok(false);
        }
    }
    Ok(true)
}

#[cfg(all(test, unix))]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    /// A folder with a checkpoint in it, and one beside it.
    fn checkpoint() -> (tempfile::TempDir, PathBuf, PathBuf) {
        let place = tempfile::tempdir().unwrap();
        let root = place.path().canonicalize().unwrap();
        let (source, target) = (root.join("from/step-00000004"), root.join("to/run/copy"));
        for folder in [&source.join("notes"), &target, &root.join("from/plots")] {
            std::fs::create_dir_all(folder).unwrap();
        }
        std::fs::write(source.join("state.json"), "{}").unwrap();
        std::fs::write(source.join("notes/a"), "of mine").unwrap();
        std::fs::write(root.join("from/plots/b"), "of mine, too").unwrap();
        (place, source, target)
    }

    #[test]
    fn links_are_copied_as_links() {
        let (_place, source, target) = checkpoint();
        let plots = source.with_file_name("plots");
        for (place, name) in [
            (&*plots, "plots"),
            (Path::new("../plots/b"), "b"),
            (Path::new("../../plots"), "notes/plots"),
            (Path::new("../state.json"), "notes/own"),
            (Path::new("nowhere"), "dangling"),
        ] {
            symlink(place, source.join(name)).unwrap();
        }
        copy_folder(&source, &source, &target).unwrap();
        let leads_to = |name: &str| std::fs::read_link(target.join(name)).unwrap();
        assert_eq!(leads_to("plots"), plots);
        assert_eq!(leads_to("dangling"), Path::new("nowhere"));
        assert_eq!(leads_to("notes/own"), Path::new("../state.json"));
        let read = |name: &str| std::fs::read(target.join(name)).unwrap();
        assert_eq!(read("notes/a"), b"of mine");
        for name in ["b", "plots/b", "notes/plots/b"] {
            assert_eq!(read(name), b"of mine, too");
        }
        assert!(has_all_of(&target, &source, &source).unwrap());
        // Links of other places are not the same.
        std::fs::remove_file(target.join("dangling")).unwrap();
        assert!(!has_all_of(&target, &source, &source).unwrap());
        symlink("elsewhere", target.join("dangling")).unwrap();
        assert!(!has_all_of(&target, &source, &source).unwrap());
    }

    #[test]
    fn what_cannot_be_copied_is_an_error() {
        let (_place, source, target) = checkpoint();
        let _listener = std::os::unix::net::UnixListener::bind(source.join("notes/socket")).unwrap();
        let error = copy_folder(&source, &source, &target).unwrap_err().to_string();
        assert!(
            error.contains("notes/socket") && error.contains("neither a file"),
            "{error}"
        );
    }
}
