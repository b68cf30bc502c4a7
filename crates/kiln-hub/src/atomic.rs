//! Files that appear whole or not at all.
//!
//! A checkpoint may be read while it is written, and the writer may be killed between any two instructions.
//! So every file is written under a temporary name in the folder it belongs to, flushed to the disk, and
//! renamed: `rename` within one folder replaces the old file in one step. The folder's own entry is flushed
//! too, so the new name survives a power loss.

use std::fs::File;
use std::path::Path;

use crate::error::HubError;

/// What the names of files begin with that are being written. A killed program leaves them behind.
pub const TEMPORARY: &str = ".tmp-";

/// Writes a file atomically; `write` receives the temporary path and fills it.
///
/// # Errors
/// What `write` returns, or [`HubError::Io`]. The old file, if any, is untouched then.
pub fn write_atomic(path: &Path, write: impl FnOnce(&Path) -> Result<(), HubError>) -> Result<(), HubError> {
    let folder = match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    };
    let io = |action| move |source| HubError::io(action, path, source);
    let temporary = tempfile::Builder::new()
        .prefix(TEMPORARY)
        .tempfile_in(folder)
        .map_err(io("create a temporary file for"))?
        .into_temp_path();
    write(&temporary)?;
    make_readable(&temporary).map_err(io("set the permissions of"))?;
    File::open(&temporary)
        .and_then(|file| file.sync_all())
        .map_err(io("flush"))?;
    temporary
        .persist(path)
        .map_err(|error| HubError::io("rename a temporary file to", path, error.error))?;
    // Not every file system can flush a folder; the rename has happened either way.
    if let Ok(folder) = File::open(folder) {
        let _ = folder.sync_all();
    }
    Ok(())
}

/// Writes bytes to a file atomically.
///
/// # Errors
/// [`HubError::Io`].
pub fn write_bytes_atomic(path: &Path, bytes: &[u8]) -> Result<(), HubError> {
    write_atomic(path, |temporary| {
        std::fs::write(temporary, bytes).map_err(|source| HubError::io("write", path, source))
    })
}

/// Temporary files are private to their owner; a saved model should be as readable as any other file.
#[cfg(unix)]
fn make_readable(path: &Path) -> std::io::Result<()> {
    use std::os::unix::fs::PermissionsExt;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o644))
}

#[cfg(not(unix))]
fn make_readable(_path: &Path) -> std::io::Result<()> {
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failed_write_leaves_the_old_file_and_no_litter() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("state");
        write_bytes_atomic(&path, b"old").unwrap();
        let failed = write_atomic(&path, |temporary| {
            std::fs::write(temporary, b"half of the new").unwrap();
            Err(HubError::KeyMap("stop".into()))
        });
        assert!(failed.is_err());
        assert_eq!(std::fs::read(&path).unwrap(), b"old");
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
        write_bytes_atomic(&path, b"new").unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), b"new");
    }
}
