//! One entry of the cache on disk: `<key>.so` and, beside it, `<key>.json` with what is needed to trust it.
//!
//! The shared object is written first and the description last, each to a temporary name, flushed, then
//! renamed. An entry therefore either has a complete description or does not exist, and its checksum catches
//! what a crash, a full disk or a careless hand did to the object afterwards. The description's modification
//! time is the time of last use.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

/// The description beside a shared object.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Description {
    /// SHA-256 of the shared object, in hexadecimal.
    checksum: String,
    /// Size of the shared object in bytes.
    bytes: u64,
    /// Version of Kiln that wrote the entry.
    kiln: String,
    /// What the entry is, for people.
    pub(super) name: String,
    /// Whatever the step compiler wants to find again beside the object.
    pub(super) payload: String,
    /// SHA-256 of the payload, in hexadecimal.
    payload_checksum: String,
}

/// Why an entry cannot be used.
#[derive(Debug)]
pub(super) enum Unusable {
    /// There is none.
    Absent,
    /// There is one, but it is not what was written.
    Damaged(String),
}

pub(super) fn object_path(folder: &Path, key: &str) -> PathBuf {
    folder.join(format!("{key}.so"))
}

pub(super) fn description_path(folder: &Path, key: &str) -> PathBuf {
    folder.join(format!("{key}.json"))
}

pub(super) fn lock_path(folder: &Path, key: &str) -> PathBuf {
    folder.join(format!("{key}.lock"))
}

pub(super) fn note_path(folder: &Path, key: &str) -> PathBuf {
    folder.join(format!("{key}.note"))
}

/// Removes all notes.
pub(super) fn remove_notes(folder: &Path) -> io::Result<()> {
    let files = match fs::read_dir(folder) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        other => other?,
    };
    for file in files {
        let path = file?.path();
        if path.extension().is_some_and(|extension| extension == "note") {
            fs::remove_file(&path)?;
            // Its lock, which nobody needs any more, may be gone.
            let _ = fs::remove_file(path.with_extension("lock"));
        }
    }
    Ok(())
}

/// Reads and checks an entry.
pub(super) fn read(folder: &Path, key: &str) -> Result<Description, Unusable> {
    let text = match fs::read(description_path(folder, key)) {
        Ok(text) => text,
        // A folder that cannot be read is as good as empty; whoever writes to it next hears why.
        Err(error)
            if matches!(
                error.kind(),
                io::ErrorKind::NotFound | io::ErrorKind::NotADirectory | io::ErrorKind::PermissionDenied
            ) =>
        {
            return Err(Unusable::Absent);
        }
        Err(error) => return Err(Unusable::Damaged(format!("reading its description: {error}"))),
    };
    let description: Description = serde_json::from_slice(&text)
        .map_err(|error| Unusable::Damaged(format!("its description does not parse: {error}")))?;
    let object = fs::read(object_path(folder, key))
        .map_err(|error| Unusable::Damaged(format!("reading its object: {error}")))?;
    if object.len() as u64 != description.bytes || checksum(&object) != description.checksum {
        return Err(Unusable::Damaged("the checksum of its object differs".into()));
    }
    if checksum(description.payload.as_bytes()) != description.payload_checksum {
        return Err(Unusable::Damaged("the checksum of its payload differs".into()));
    }
    Ok(description)
}

/// Writes an entry from a built object.
pub(super) fn write(folder: &Path, key: &str, object: &Path, name: &str, payload: &str) -> io::Result<()> {
    let object = fs::read(object)?;
    let description = Description {
        checksum: checksum(&object),
        bytes: object.len() as u64,
        kiln: env!("CARGO_PKG_VERSION").into(),
        name: name.into(),
        payload: payload.into(),
        payload_checksum: checksum(payload.as_bytes()),
    };
    write_atomically(folder, &object_path(folder, key), &object)?;
    let text = serde_json::to_vec_pretty(&description).map_err(io::Error::other)?;
    write_atomically(folder, &description_path(folder, key), &text)
}

/// Removes an entry, as far as it exists.
pub(super) fn remove(folder: &Path, key: &str) -> io::Result<()> {
    for path in [
        description_path(folder, key),
        object_path(folder, key),
        lock_path(folder, key),
    ] {
        match fs::remove_file(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
    }
    Ok(())
}

/// Notes that the entry was used now. In a read-only folder this fails, and the order of eviction, which
/// cannot happen there either, stays as it was.
pub(super) fn touch(folder: &Path, key: &str) {
    let touched = File::options()
        .append(true)
        .open(description_path(folder, key))
        .and_then(|file| file.set_modified(SystemTime::now()));
    if let Err(error) = touched {
        tracing::trace!(%error, key, "last use not recorded");
    }
}

pub(super) fn write_atomically(folder: &Path, target: &Path, contents: &[u8]) -> io::Result<()> {
    let mut file = tempfile::Builder::new().prefix(".writing-").tempfile_in(folder)?;
    file.write_all(contents)?;
    file.as_file().sync_all()?;
    file.persist(target).map_err(|error| error.error)?;
    Ok(())
}

fn checksum(bytes: &[u8]) -> String {
    Sha256::digest(bytes)
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect()
}
