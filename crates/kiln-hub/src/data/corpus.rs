//! Text for language models, gathered from files and folders.
//!
//! A corpus is a list of documents in a fixed order: files as given, folders walked in the order of their
//! names, so two machines with the same files have the same corpus. In a source tree (this one, for the
//! default run) it takes files that people write and leaves out hidden folders and the output of tools. Links
//! are followed. What is left out although its name is that of a text is counted, and a warning says so.

use std::fmt;
use std::path::{Path, PathBuf};

use super::error::DataError;
use super::listing::{Entered, Kind, list};

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

/// Files of folders that have the name of a text and are not in a corpus.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LeftOut {
    /// Files larger than [`CorpusOptions::max_file_bytes`].
    pub large: usize,
    /// Their bytes.
    pub large_bytes: u64,
    /// Files that are not UTF-8.
    pub not_utf8: usize,
    /// Their bytes.
    pub not_utf8_bytes: u64,
    /// Links that lead nowhere.
    pub dangling: usize,
}

impl LeftOut {
    /// Whether nothing is left out.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

impl fmt::Display for LeftOut {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            large,
            large_bytes,
            not_utf8,
            not_utf8_bytes,
            dangling,
        } = *self;
        let mut parts = Vec::new();
        if large > 0 {
            parts.push(format!("files too large: {large} ({large_bytes} bytes)"));
        }
        if not_utf8 > 0 {
            parts.push(format!("files not UTF-8: {not_utf8} ({not_utf8_bytes} bytes)"));
        }
        if dangling > 0 {
            parts.push(format!("links with nothing behind them: {dangling}"));
        }
        match parts.as_slice() {
            [] => f.write_str("nothing"),
            parts => f.write_str(&parts.join(", ")),
        }
    }
}

/// Documents in a fixed order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Corpus {
    documents: Vec<Document>,
    left_out: LeftOut,
}

impl Corpus {
    /// Reads files and folders. A file is taken whatever its name; of a folder, what the options say.
    ///
    /// In folders, files that are not UTF-8 are left out; a file given by itself must be. Links are followed;
    /// a folder that several names lead to is read under the first. One warning says what was left out.
    ///
    /// # Errors
    /// [`DataError::Io`], [`DataError::Format`] for a given file that is not UTF-8, [`DataError::Empty`] if
    /// there is no text at all.
    pub fn read<P: AsRef<Path>>(paths: &[P], options: &CorpusOptions) -> Result<Self, DataError> {
        let mut corpus = Self::default();
        for path in paths {
            let path = path.as_ref();
            if path.is_dir() {
                corpus.walk(path, options, &mut Entered::default())?;
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
            let size = match options.max_file_bytes {
                u64::MAX => String::new(),
                most => format!(" of at most {most} bytes"),
            };
            let looked_for = format!(
                "no text; looked for files named .{}{size}, links followed; left out: {}",
                options.extensions.join(", ."),
                corpus.left_out
            );
            return Err(DataError::empty(places.join(", "), looked_for));
        }
        if !corpus.left_out.is_empty() {
            kiln_log::warn!("left out of the texts: {}", corpus.left_out);
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
            left_out: LeftOut::default(),
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

    fn walk(
        &mut self,
        folder: &Path,
        options: &CorpusOptions,
        entered: &mut Entered,
    ) -> Result<(), DataError> {
        if !entered.is_new(folder)? {
            return Ok(());
        }
        for (path, kind) in list(folder)? {
            let name = path.file_name().unwrap_or_default().to_string_lossy().to_string();
            if name.starts_with('.') {
                continue;
            }
            match kind {
                Kind::Folder if options.skip_folders.contains(&name) => {}
                Kind::Folder => self.walk(&path, options, entered)?,
                Kind::File if is_text(&path, options) => self.add_file(&path, options)?,
                Kind::DeadLink if path.extension().is_none() || is_text(&path, options) => {
                    self.left_out.dangling += 1;
                }
                Kind::File | Kind::DeadLink | Kind::Other => {}
            }
        }
        Ok(())
    }

    /// Adds a file of a folder, unless it is too large or not UTF-8.
    fn add_file(&mut self, path: &Path, options: &CorpusOptions) -> Result<(), DataError> {
        let fail = |source| DataError::io("read", path, source);
        let size = std::fs::metadata(path).map_err(fail)?.len();
        if size > options.max_file_bytes {
            self.left_out.large += 1;
            self.left_out.large_bytes += size;
            return Ok(());
        }
        match String::from_utf8(std::fs::read(path).map_err(fail)?) {
            Ok(text) => self.add(path, text),
            Err(_) => {
                tracing::debug!(path = %path.display(), "left out: not UTF-8");
                self.left_out.not_utf8 += 1;
                self.left_out.not_utf8_bytes += size;
            }
        }
        Ok(())
    }

    /// The documents.
    pub fn documents(&self) -> &[Document] {
        &self.documents
    }

    /// What is missing of the folders.
    pub fn left_out(&self) -> LeftOut {
        self.left_out
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

/// Whether a file has the name of a text.
fn is_text(path: &Path, options: &CorpusOptions) -> bool {
    let extension = path
        .extension()
        .unwrap_or_default()
        .to_string_lossy()
        .to_lowercase();
    let mut wanted = options.extensions.iter();
    wanted.any(|wanted| wanted.eq_ignore_ascii_case(&extension))
}
