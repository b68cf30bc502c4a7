//! Errors of looking into the cache on purpose.

use std::io;
use std::path::{Path, PathBuf};

/// The cache exists and cannot be read or emptied. Making and finding entries has no errors: trouble is a
/// warning there.
#[derive(Debug, thiserror::Error)]
#[error("{action} {}: {source}", path.display())]
pub struct StoreError {
    /// What was being done, as a verb: `reading`.
    pub action: &'static str,
    /// The file or folder.
    pub path: PathBuf,
    /// The operating system's answer.
    pub source: io::Error,
}

impl StoreError {
    /// Wraps an answer of the operating system.
    pub(crate) fn of(action: &'static str, path: &Path) -> impl Fn(io::Error) -> Self {
        move |source| Self {
            action,
            path: path.to_owned(),
            source,
        }
    }
}
