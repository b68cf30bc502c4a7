//! Entries of folders in a fixed order, links followed.
//!
//! A link stands for what it leads to, as for the programs that laid the files out. A link to a folder above
//! itself would have no end, so a walk enters each folder once, whatever the names that lead to it.

use std::collections::HashSet;
use std::path::{Path, PathBuf};

use super::error::DataError;

/// What a name in a folder leads to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Folder,
    File,
    /// A link whose target is not there, or cannot be reached.
    DeadLink,
    /// No file at all: a socket, a pipe, a device.
    Other,
}

/// The entries of a folder by name.
///
/// # Errors
/// [`DataError::Io`].
pub(super) fn list(folder: &Path) -> Result<Vec<(PathBuf, Kind)>, DataError> {
    let fail = |source| DataError::io("list", folder, source);
    let mut entries = Vec::new();
    for entry in std::fs::read_dir(folder).map_err(fail)? {
        let path = entry.map_err(fail)?.path();
        let kind = match std::fs::metadata(&path) {
            Ok(found) if found.is_dir() => Kind::Folder,
            Ok(found) if found.is_file() => Kind::File,
            Err(_) if path.is_symlink() => Kind::DeadLink,
            _ => Kind::Other,
        };
        entries.push((path, kind));
    }
    entries.sort_by(|(a, _), (b, _)| a.file_name().cmp(&b.file_name()));
    Ok(entries)
}

/// The folders that a walk has entered.
#[derive(Debug, Default)]
pub(super) struct Entered(HashSet<PathBuf>);

impl Entered {
    /// Whether the walk is in `folder` for the first time.
    ///
    /// # Errors
    /// [`DataError::Io`].
    pub(super) fn is_new(&mut self, folder: &Path) -> Result<bool, DataError> {
        let place = folder
            .canonicalize()
            .map_err(|source| DataError::io("find", folder, source))?;
        Ok(self.0.insert(place))
    }
}
