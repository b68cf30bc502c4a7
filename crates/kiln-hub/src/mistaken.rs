//! Files whose content is not what their name says.
//!
//! A download that went wrong rarely leaves noise. It leaves a page that says "please log in", the pointer
//! that Git LFS keeps in place of a large file, or the right bytes under another format's name. Readers ask
//! here before they describe the first bytes as the header that these bytes are not.

use std::path::Path;

use crate::error::HubError;

/// Bytes that are looked at.
const PREFIX: usize = 512;

/// A description of the bytes and the remedy, if they have a well-known format that is neither safetensors
/// nor JSON.
pub(crate) fn describe(bytes: &[u8]) -> Option<&'static str> {
    let head = &bytes[..bytes.len().min(PREFIX)];
    let text = head
        .strip_prefix(b"\xef\xbb\xbf")
        .unwrap_or(head)
        .trim_ascii_start();
    let begins = |word: &str| {
        text.get(..word.len())
            .is_some_and(|start| start.eq_ignore_ascii_case(word.as_bytes()))
    };
    if bytes.is_empty() {
        Some("an empty file: the download or the copy did not happen; fetch it again")
    } else if begins("version https://git-lfs.github.com/") {
        Some(
            "the pointer that Git LFS keeps in place of the file, not the file: run `git lfs pull` in the repository, \
             or download the file itself",
        )
    } else if begins("<!doctype html") || begins("<html") || begins("<head") {
        Some(
            "an HTML page, probably of an error or a login, saved under this name: remove it and download the file \
             again",
        )
    } else if begins("<?xml") || begins("<error") {
        Some(
            "an XML document, probably a server's error, saved under this name: remove it and download the file again",
        )
    } else if head.starts_with(b"GGUF") {
        Some("a GGUF file, which is not read here: take the model's safetensors files")
    } else if head.starts_with(b"\x89HDF\r\n") {
        Some("an HDF5 file (Keras or TensorFlow), which is not read here: take the model's safetensors files")
    } else if head.starts_with(b"\x1f\x8b") {
        Some("a gzip archive: unpack it first")
    } else {
        None
    }
}

/// The error of a weight file whose bytes are another thing altogether.
///
/// # Errors
/// [`HubError::Mistaken`] if [`describe`] knows the bytes.
pub(crate) fn refuse(path: &Path, bytes: &[u8]) -> Result<(), HubError> {
    match describe(bytes) {
        Some(what) => Err(HubError::Mistaken {
            path: path.to_path_buf(),
            what: what.to_string(),
        }),
        None => Ok(()),
    }
}

/// [`refuse`] for files in the safetensors format.
pub(crate) fn refuse_safetensors(path: &Path, bytes: &[u8]) -> Result<(), HubError> {
    let text = bytes.trim_ascii_start();
    let what = if bytes.starts_with(b"PK\x03\x04") {
        "a zip archive, probably PyTorch's: give it the ending .bin or .pt"
    } else if bytes.starts_with(&[0x80, 2]) {
        "a pickle, probably PyTorch's older form: give it the ending .bin or .pt"
    } else if text.starts_with(b"{\"error") || text.starts_with(b"{\"message") {
        "a server's error message, saved under this name: remove it and download the file again"
    } else {
        return refuse(path, bytes);
    };
    Err(HubError::Mistaken {
        path: path.to_path_buf(),
        what: what.to_string(),
    })
}
