//! Text for language models, gathered from files and folders.
//!
//! A corpus is a list of documents in a fixed order: files as given, folders walked in the order of their
//! names, so two machines with the same files have the same corpus. In a source tree (this one, for the
//! default run) it takes files that people write and leaves out hidden folders and the output of tools.

use std::path::{Path, PathBuf};

use super::error::DataError;

/// One text with its origin.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Document {
    /// The file.
    pub path: PathBuf,
    /// Its text.
    pub text: String,
}

/// Which files of a folder are taken.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CorpusOptions {
    /// Extensions without the dot.
    pub extensions: Vec<String>,
    /// Names of folders that are not entered, beside hidden ones.
    pub skip_folders: Vec<String>,
    /// Files larger than this many bytes are left out: they are data, not writing.
    pub max_file_bytes: u64,
}

impl Default for CorpusOptions {
    /// Sources and documents up to 1 MiB.
    fn default() -> Self {
        let strings = |names: &[&str]| names.iter().map(|name| name.to_string()).collect();
        Self {
            extensions: strings(&["txt", "md", "rs", "py", "toml", "c", "h", "cu", "cpp", "sh"]),
            skip_folders: strings(&["target", "runs", "node_modules", "__pycache__", "fixtures"]),
            max_file_bytes: 1 << 20,
        }
    }
}

/// Documents in a fixed order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Corpus {
    documents: Vec<Document>,
}

impl Corpus {
    /// Reads files and folders. A file is taken whatever its name; of a folder, what the options say.
    ///
    /// In folders, files that are not UTF-8 are left out; a file given by itself must be.
    ///
    /// # Errors
    /// [`DataError::Io`], [`DataError::Format`] for a given file that is not UTF-8, [`DataError::Empty`] if
    /// there is no text at all.
    pub fn read<P: AsRef<Path>>(paths: &[P], options: &CorpusOptions) -> Result<Self, DataError> {
        let mut corpus = Self::default();
        for path in paths {
            let path = path.as_ref();
            if path.is_dir() {
                corpus.walk(path, options)?;
                continue;
            }
            let bytes = std::fs::read(path).map_err(|source| DataError::io("read", path, source))?;
            let text = String::from_utf8(bytes).map_err(|error| {
                DataError::format(path, None, format!("not UTF-8: {}", error.utf8_error()))
            })?;
            corpus.add(path, text);
        }
        if corpus.documents.is_empty() {
            let places: Vec<String> = paths.iter().map(|p| p.as_ref().display().to_string()).collect();
            let looked_for = format!(
                "no text; looked for files named .{}",
                options.extensions.join(", .")
            );
            return Err(DataError::empty(places.join(", "), looked_for));
        }
        Ok(corpus)
    }

    /// A corpus of texts that are already in memory.
    pub fn from_texts<S: Into<String>>(texts: impl IntoIterator<Item = S>) -> Self {
        let document = |(number, text): (usize, S)| Document {
            path: format!("text {number}").into(),
            text: text.into(),
        };
        Self {
            documents: texts.into_iter().enumerate().map(document).collect(),
        }
    }

    fn add(&mut self, path: &Path, text: String) {
        if !text.trim().is_empty() {
            self.documents.push(Document {
                path: path.to_path_buf(),
                text,
            });
        }
    }

    fn walk(&mut self, folder: &Path, options: &CorpusOptions) -> Result<(), DataError> {
        let entries = std::fs::read_dir(folder).map_err(|source| DataError::io("list", folder, source))?;
        let mut paths = Vec::new();
        for entry in entries {
            let entry = entry.map_err(|source| DataError::io("list", folder, source))?;
            // The entry's own type, not that of what it links to: a link to a parent would have no end.
            let kind = entry
                .file_type()
                .map_err(|source| DataError::io("read", entry.path(), source))?;
            paths.push((entry.path(), kind));
        }
        paths.sort_by(|(a, _), (b, _)| a.file_name().cmp(&b.file_name()));
        for (path, kind) in paths {
            let name = path.file_name().unwrap_or_default().to_string_lossy().to_string();
            if name.starts_with('.') {
                continue;
            }
            if kind.is_dir() {
                if !options.skip_folders.contains(&name) {
                    self.walk(&path, options)?;
                }
            } else if kind.is_file() && wanted(&path, options) {
                let bytes = std::fs::read(&path).map_err(|source| DataError::io("read", &path, source))?;
                match String::from_utf8(bytes) {
                    Ok(text) => self.add(&path, text),
                    Err(_) => tracing::debug!(path = %path.display(), "left out: not UTF-8"),
                }
            }
        }
        Ok(())
    }

    /// The documents.
    pub fn documents(&self) -> &[Document] {
        &self.documents
    }

    /// The texts.
    pub fn texts(&self) -> impl Iterator<Item = &str> {
        self.documents.iter().map(|document| document.text.as_str())
    }

    /// Bytes of all texts together.
    pub fn num_bytes(&self) -> usize {
        self.texts().map(str::len).sum()
    }
}

fn wanted(path: &Path, options: &CorpusOptions) -> bool {
    let extension = path
        .extension()
        .unwrap_or_default()
        .to_string_lossy()
        .to_lowercase();
    let small = || std::fs::metadata(path).is_ok_and(|metadata| metadata.len() <= options.max_file_bytes);
    options
        .extensions
        .iter()
        .any(|wanted| wanted.eq_ignore_ascii_case(&extension))
        && small()
}
