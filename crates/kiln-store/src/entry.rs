//! The files of one entry: `<key>.<extension>` with the content and, beside it, `<key>.json` with the data
//! needed to trust it.
//!
//! The content is written first and the description last, each to a temporary name, flushed, then renamed.
//! So an entry has a complete description or does not exist, and its checksums detect later damage by a
//! crash, a full disk or a person. A store may leave out the flush: then they also detect what a crash cut off.
//! The description's modification time is the time of last use.

use std::fs::{self, File, TryLockError};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::store::Entry;

/// Digits of a key.
const KEY_DIGITS: usize = 64;

/// Extensions of the files that belong to a store but to no entry's content.
const DESCRIPTION: &str = "json";
const LOCK: &str = "lock";
const NOTE: &str = "note";

/// The beginning of names of files while they are written.
pub(crate) const WRITING: &str = ".writing-";

/// The description beside a content.
#[derive(Debug, Serialize, Deserialize)]
struct Description {
    /// SHA-256 of the content, in hexadecimal.
    checksum: String,
    /// Bytes of the content.
    bytes: u64,
    /// Version of Kiln that wrote the entry.
    kiln: String,
    /// The entry's name, for people.
    name: String,
    /// Text that is given back with the content.
    payload: String,
    /// SHA-256 of the payload, in hexadecimal.
    payload_checksum: String,
}

/// Why an entry cannot be used.
#[derive(Debug)]
pub(crate) enum Unusable {
    /// There is none.
    Absent,
    /// There is one, but it is not what was written.
    Damaged(String),
}

/// Where the files of one key lie.
pub(crate) struct Files<'a> {
    /// The folder of the store.
    pub(crate) folder: &'a Path,
    /// The key's digits.
    pub(crate) key: &'a str,
}

impl Files<'_> {
    pub(crate) fn with(&self, extension: &str) -> PathBuf {
        self.folder.join(format!("{}.{extension}", self.key))
    }

    pub(crate) fn lock(&self) -> PathBuf {
        self.with(LOCK)
    }

    pub(crate) fn note(&self) -> PathBuf {
        self.with(NOTE)
    }

    /// Reads and checks an entry: its content, its name and its payload.
    pub(crate) fn read(&self, extension: &str) -> Result<(Vec<u8>, String, String), Unusable> {
        let text = match fs::read(self.with(DESCRIPTION)) {
            Ok(text) => text,
            // A folder that cannot be read counts as empty; the next write reports the error.
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
        let content = fs::read(self.with(extension))
            .map_err(|error| Unusable::Damaged(format!("reading its content: {error}")))?;
        if content.len() as u64 != description.bytes || checksum(&content) != description.checksum {
            return Err(Unusable::Damaged("the checksum of its content differs".into()));
        }
        if checksum(description.payload.as_bytes()) != description.payload_checksum {
            return Err(Unusable::Damaged("the checksum of its payload differs".into()));
        }
        Ok((content, description.name, description.payload))
    }

    /// Writes an entry, and waits until it is on the disk if it is to be `flushed`.
    pub(crate) fn write(
        &self,
        extension: &str,
        content: &[u8],
        name: &str,
        payload: &str,
        flushed: bool,
    ) -> io::Result<()> {
        let description = Description {
            checksum: checksum(content),
            bytes: content.len() as u64,
            kiln: env!("CARGO_PKG_VERSION").into(),
            name: name.into(),
            payload: payload.into(),
            payload_checksum: checksum(payload.as_bytes()),
        };
        write_atomically(self.folder, &self.with(extension), content, flushed)?;
        let text = serde_json::to_vec_pretty(&description).map_err(io::Error::other)?;
        write_atomically(self.folder, &self.with(DESCRIPTION), &text, flushed)
    }

    /// Removes the entry, as far as it exists. The description goes first: without it there is no entry.
    pub(crate) fn remove(&self, extension: &str) -> io::Result<()> {
        [DESCRIPTION, extension, LOCK]
            .iter()
            .try_for_each(|extension| remove_if_there(&self.with(extension)))
    }

    /// Notes that the entry was used now. In a read-only folder this fails, and the order of eviction, which
    /// cannot happen there either, stays as it was.
    pub(crate) fn touch(&self) {
        let touched = File::options()
            .append(true)
            .open(self.with(DESCRIPTION))
            .and_then(|file| file.set_modified(SystemTime::now()));
        if let Err(error) = touched {
            tracing::trace!(%error, key = self.key, "last use not recorded");
        }
    }

    /// The entry's name; empty if its description cannot be read.
    pub(crate) fn name(&self) -> String {
        fs::read(self.with(DESCRIPTION))
            .ok()
            .and_then(|text| serde_json::from_slice::<Description>(&text).ok())
            .map_or_else(String::new, |description| description.name)
    }
}

/// A file of a store.
struct StoredFile {
    key: String,
    extension: String,
    path: PathBuf,
}

/// The files of a folder that are named after keys; none if there is no such folder.
fn files_of(folder: &Path) -> io::Result<Vec<StoredFile>> {
    let files = match fs::read_dir(folder) {
        Err(error)
            if matches!(
                error.kind(),
                io::ErrorKind::NotFound | io::ErrorKind::NotADirectory
            ) =>
        {
            return Ok(Vec::new());
        }
        other => other?,
    };
    let of_key = |path: PathBuf| {
        let (key, extension) = path.file_name()?.to_str()?.split_once('.')?;
        let is_key = key.len() == KEY_DIGITS && key.bytes().all(|byte| byte.is_ascii_hexdigit());
        is_key.then(|| StoredFile {
            key: key.to_owned(),
            extension: extension.to_owned(),
            path: path.clone(),
        })
    };
    Ok(files.filter_map(|file| of_key(file.ok()?.path())).collect())
}

/// The entries of a folder, also incomplete ones.
pub(crate) fn entries(folder: &Path) -> io::Result<Vec<Entry>> {
    let mut files = files_of(folder)?;
    files.retain(|file| ![LOCK, NOTE].contains(&file.extension.as_str()));
    files.sort_by(|a, b| a.key.cmp(&b.key));
    let entry = |files: &[StoredFile]| {
        let data = |file: &StoredFile| fs::metadata(&file.path).ok();
        let description = files.iter().find(|file| file.extension == DESCRIPTION);
        let content = files.iter().find(|file| file.extension != DESCRIPTION);
        Entry {
            folder: folder.to_owned(),
            key: files[0].key.clone(),
            extension: content.map_or_else(String::new, |file| file.extension.clone()),
            bytes: files.iter().filter_map(data).map(|data| data.len()).sum(),
            last_used: description
                .and_then(|file| data(file)?.modified().ok())
                .unwrap_or(SystemTime::UNIX_EPOCH),
        }
    };
    Ok(files.chunk_by(|a, b| a.key == b.key).map(entry).collect())
}

/// Removes every note of a folder, with its lock.
pub(crate) fn remove_notes(folder: &Path) -> io::Result<()> {
    for file in files_of(folder)?.iter().filter(|file| file.extension == NOTE) {
        remove_if_there(&file.path)?;
        remove_if_there(&file.path.with_extension(LOCK))?;
    }
    Ok(())
}

/// Removes files that were being written and were last written `age` ago or earlier, as killed programs leave
/// them behind; returns their bytes.
pub(crate) fn remove_unfinished(folder: &Path, age: Duration) -> io::Result<u64> {
    let mut bytes = 0;
    for file in fs::read_dir(folder)?.filter_map(Result::ok) {
        if !file.file_name().to_string_lossy().starts_with(WRITING) {
            continue;
        }
        // What is gone by now was being written.
        let Ok(data) = file.metadata() else { continue };
        let old = |written: SystemTime| written.elapsed().is_ok_and(|since| since >= age);
        if age.is_zero() || data.modified().is_ok_and(old) {
            remove_if_there(&file.path())?;
            bytes += data.len();
        }
    }
    Ok(bytes)
}

/// Removes the locks of a folder that nobody holds.
pub(crate) fn remove_locks(folder: &Path) -> io::Result<()> {
    for lock in files_of(folder)?.iter().filter(|file| file.extension == LOCK) {
        let file = match File::options().append(true).open(&lock.path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            other => other?,
        };
        if take(&file)? {
            remove_if_there(&lock.path)?;
        }
    }
    Ok(())
}

/// Takes the lock of a file, if nobody has it. A file system without locks gives everybody the lock.
pub(crate) fn take(file: &File) -> io::Result<bool> {
    match file.try_lock() {
        Err(TryLockError::WouldBlock) => Ok(false),
        Err(TryLockError::Error(error)) if error.kind() != io::ErrorKind::Unsupported => Err(error),
        _ => Ok(true),
    }
}

fn remove_if_there(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// Writes a file that is whole or absent; also after a crash of the machine if it is `flushed`.
pub(crate) fn write_atomically(
    folder: &Path,
    target: &Path,
    contents: &[u8],
    flushed: bool,
) -> io::Result<()> {
    let mut file = tempfile::Builder::new().prefix(WRITING).tempfile_in(folder)?;
    file.write_all(contents)?;
    if flushed {
        file.as_file().sync_all()?;
    }
    file.persist(target).map_err(|error| error.error)?;
    Ok(())
}

fn checksum(bytes: &[u8]) -> String {
    Sha256::digest(bytes)
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect()
}
