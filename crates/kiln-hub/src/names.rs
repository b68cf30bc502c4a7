//! Names that come from outside: is this one safe to join to a folder?
//!
//! An index of shards and an endpoint's list of files are written by strangers, and both end up in
//! `folder.join(name)`. `join` follows `..`, replaces everything on an absolute path, and on Windows honours
//! drive letters and backslashes. One predicate guards all such joins: a name is relative, made of plain
//! components, in portable characters.

use std::path::{Component, Path, PathBuf};

use crate::error::HubError;

/// Joins a name from outside to a folder.
///
/// `origin` says where the name was found, for the error.
pub(crate) fn join_checked(folder: &Path, name: &str, origin: &str) -> Result<PathBuf, HubError> {
    if is_plain_relative(name) {
        Ok(folder.join(name))
    } else {
        Err(HubError::UnsafePath {
            origin: origin.to_string(),
            name: name.to_string(),
        })
    }
}

/// Whether a name has only plain components and stays below the folder it is joined to.
pub(crate) fn is_plain_relative(name: &str) -> bool {
    let portable = !name.is_empty()
        && name.len() <= 1024
        && !name.contains(['\\', ':', '\0'])
        && !name.chars().any(char::is_control)
        // `components` swallows these, so "a/./b" and "a//b" would be two names for one file.
        && name.split('/').all(|part| !part.is_empty() && part != "." && part != "..");
    portable
        && Path::new(name)
            .components()
            .all(|c| matches!(c, Component::Normal(_)))
}

/// Whether a string has the form of a repository's name: `name` or `owner/name` in the hub's alphabet.
pub(crate) fn is_repository(name: &str) -> bool {
    let parts: Vec<&str> = name.split('/').collect();
    parts.len() <= 2
        && parts.iter().all(|part| {
            !part.is_empty()
                && part.len() <= 96
                && !part.starts_with(['.', '-'])
                && !part.contains("..")
                && !part.contains("--")
                && part
                    .bytes()
                    .all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.'))
        })
}

/// Whether a string can be one component of a path in the cache: a commit or an ETag.
pub(crate) fn is_identifier(text: &str) -> bool {
    !text.is_empty()
        && text.len() <= 128
        && text
            .bytes()
            .all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_names_below_the_folder_pass() {
        for good in [
            "model.safetensors",
            "onnx/model.onnx",
            "a b.txt",
            "model-00001-of-00002.safetensors",
            "...",
        ] {
            assert!(is_plain_relative(good), "{good}");
        }
        for bad in [
            "",
            "..",
            ".",
            "../x",
            "a/../../x",
            "/etc/passwd",
            "a//b",
            "a/./b",
            "a/",
            "C:\\x",
            "C:x",
            "a\\..\\b",
            "a\0b",
            "a\nb",
        ] {
            assert!(!is_plain_relative(bad), "{bad:?}");
        }
    }

    #[test]
    fn repository_names() {
        for good in [
            "gpt2",
            "bert-base-uncased",
            "TinyLlama/TinyLlama-1.1B-Chat-v1.0",
            "a_b/c.d",
        ] {
            assert!(is_repository(good), "{good}");
        }
        for bad in [
            "",
            "a/b/c",
            "../x",
            "a/..",
            "./a",
            "/a",
            "a b",
            "~/x",
            "a/",
            "owner--x/y",
            "a/b?c",
        ] {
            assert!(!is_repository(bad), "{bad:?}");
        }
    }
}
