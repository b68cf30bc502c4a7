//! Errors between a name and a filled module, as one type.
//!
//! Every variant names the file, repository or tensor it is about and says what the caller can do. Nothing
//! here is recoverable by the crate itself: a damaged file stays damaged, so the error leaves it to the
//! caller to fetch again, choose another revision or fix the mapping. Errors of datasets are apart, in
//! [`DataError`](crate::data::DataError).

use std::fmt;
use std::path::{Path, PathBuf};

use thiserror::Error;

/// An error of loading, fetching or saving a model's files.
#[derive(Debug, Error)]
pub enum HubError {
    /// The operating system refused to read or write a file.
    #[error("cannot {action} {}: {source}", path.display())]
    Io {
        /// What was attempted, as a verb: "read", "write", "map".
        action: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// The operating system's answer.
        source: std::io::Error,
    },

    /// The name is neither an existing path nor a repository's name.
    #[error(
        "`{name}` is neither a file or folder on this machine nor the name of a repository (`owner/name`); \
         check the spelling of the path"
    )]
    NotFound {
        /// The name as given.
        name: String,
    },

    /// The folder or repository has no weights in a format that this crate reads.
    #[error(
        "{place} has no weights: looked for {looked_for}; for another file, give its path instead of the folder's"
    )]
    NoWeights {
        /// The folder or `owner/name@revision`.
        place: String,
        /// The file names that were tried.
        looked_for: String,
    },

    /// A file that is needed does not exist in the folder or repository.
    #[error("{place} has no file `{file}`")]
    MissingFile {
        /// The folder or `owner/name@revision`.
        place: String,
        /// The file's name relative to it.
        file: String,
    },

    /// Offline mode is on (or the network is down) and the file is not in the cache.
    #[error(
        "`{repo}` at revision `{revision}` is not in the cache {} ({what} missing) and {why}; \
         unset HF_HUB_OFFLINE or load it once with a connection",
        cache.display()
    )]
    NotCached {
        /// `owner/name`.
        repo: String,
        /// Branch, tag or commit.
        revision: String,
        /// What is missing: the revision itself or a file.
        what: String,
        /// The cache folder that was searched.
        cache: PathBuf,
        /// Why the network was not asked.
        why: String,
    },

    /// The endpoint answered that the repository, revision or file does not exist.
    #[error(
        "{endpoint} has no `{repo}` at revision `{revision}` (status 404); check the name and the revision"
    )]
    UnknownRepository {
        /// The address that was asked.
        endpoint: String,
        /// `owner/name`.
        repo: String,
        /// Branch, tag or commit.
        revision: String,
    },

    /// The endpoint refused access: the repository is private or gated, or does not exist.
    #[error(
        "{endpoint} refuses access to `{repo}` (status {status}): {hint}",
        hint = if *had_token { "the token may not read it; request access or use another token" }
               else { "it is private, gated or misspelled; set HF_TOKEN to a token that may read it" }
    )]
    AccessDenied {
        /// The address that was asked.
        endpoint: String,
        /// `owner/name`.
        repo: String,
        /// The HTTP status, 401 or 403.
        status: u16,
        /// Whether a token was sent.
        had_token: bool,
    },

    /// A download failed for another reason.
    #[error(
        "cannot download `{file}` of `{repo}` from {endpoint}: {reason}; what arrived is kept and will be resumed"
    )]
    Download {
        /// The address that was asked.
        endpoint: String,
        /// `owner/name`.
        repo: String,
        /// The file, or "the list of files".
        file: String,
        /// What happened.
        reason: String,
    },

    /// A download ended with another length than the endpoint announced; the damaged file was removed.
    #[error(
        "`{file}` of `{repo}` should be {expected} bytes but {actual} arrived; it was removed, load again"
    )]
    Incomplete {
        /// `owner/name`.
        repo: String,
        /// The file.
        file: String,
        /// Bytes announced.
        expected: u64,
        /// Bytes that arrived.
        actual: u64,
    },

    /// A name found in a file or sent by an endpoint would leave its folder.
    #[error("{origin} names the file `{name}`, which is not a plain relative path; refusing to follow it")]
    UnsafePath {
        /// Where the name was found.
        origin: String,
        /// The name.
        name: String,
    },

    /// A file is something else than its name says: a web page, a pointer of Git LFS, another format.
    #[error("{} is {what}", path.display())]
    Mistaken {
        /// The file.
        path: PathBuf,
        /// What it is and what to do.
        what: String,
    },

    /// A safetensors file is damaged.
    #[error("{} is not a valid safetensors file: {reason}; fetch or save it again", path.display())]
    Safetensors {
        /// The file.
        path: PathBuf,
        /// Which rule of the format it breaks.
        reason: String,
    },

    /// An index of shards is damaged or does not agree with its shards.
    #[error("{} is not a valid index of shards: {reason}", path.display())]
    Index {
        /// The index file.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },

    /// A PyTorch archive is damaged, or holds something other than plain tensors.
    #[error("cannot read the PyTorch file {}: {reason}; safetensors are preferred, convert it with safetensors.torch", path.display())]
    Pytorch {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },

    /// The checkpoint has no tensor of this name.
    #[error("{place} has no tensor `{name}`")]
    UnknownTensor {
        /// The checkpoint.
        place: String,
        /// The tensor's name.
        name: String,
    },

    /// A tensor's element type cannot be read as the requested one.
    #[error("tensor `{name}` holds {stored}, which cannot be read as {wanted}")]
    DType {
        /// The tensor's name.
        name: String,
        /// Element type in the file.
        stored: String,
        /// Element type asked for.
        wanted: String,
    },

    /// `config.json` or another JSON file is not what it should be.
    #[error("{}: {reason}", path.display())]
    Config {
        /// The file.
        path: PathBuf,
        /// What is wrong and where.
        reason: String,
    },

    /// A tokenizer could not be read, trained or applied.
    #[error("tokenizer{}: {reason}", path.as_deref().map(|p| format!(" {}", p.display())).unwrap_or_default())]
    Tokenizer {
        /// The file, if there is one.
        path: Option<PathBuf>,
        /// What is wrong.
        reason: String,
    },

    /// The checkpoint and the module do not fit together.
    #[error("{0}")]
    Keys(Box<KeyReport>),

    /// The mapping itself is contradictory.
    #[error("key map: {0}")]
    KeyMap(String),
}

impl HubError {
    pub(crate) fn io(action: &'static str, path: impl AsRef<Path>, source: std::io::Error) -> Self {
        Self::Io {
            action,
            path: path.as_ref().to_path_buf(),
            source,
        }
    }

    pub(crate) fn config(path: impl AsRef<Path>, reason: impl fmt::Display) -> Self {
        Self::Config {
            path: path.as_ref().to_path_buf(),
            reason: reason.to_string(),
        }
    }

    pub(crate) fn index(path: impl AsRef<Path>, reason: impl fmt::Display) -> Self {
        Self::Index {
            path: path.as_ref().to_path_buf(),
            reason: reason.to_string(),
        }
    }

    pub(crate) fn safetensors(path: impl AsRef<Path>, reason: impl fmt::Display) -> Self {
        Self::Safetensors {
            path: path.as_ref().to_path_buf(),
            reason: reason.to_string(),
        }
    }
}

/// Every disagreement between a checkpoint and a module, found in one look at both.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KeyReport {
    /// The checkpoint, for the message.
    pub place: String,
    /// Parameters of the module whose key is not in the checkpoint.
    pub missing: Vec<MissingKey>,
    /// Keys of the checkpoint that no parameter uses.
    pub unexpected: Vec<String>,
    /// Keys whose shape is not the parameter's.
    pub misshapen: Vec<MisshapenKey>,
    /// Keys whose element type cannot fill the parameter.
    pub mistyped: Vec<MistypedKey>,
    /// Parameters of the module that the key map has no rule for.
    pub unmapped: Vec<String>,
    /// Parameters for which the checkpoint has several tensors that are not equal.
    pub ambiguous: Vec<AmbiguousKeys>,
}

/// A parameter without a tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MissingKey {
    /// Path of the parameter in the module, joined with dots.
    pub param: String,
    /// The key that the mapping expects.
    pub key: String,
    /// Shape in the checkpoint that the parameter needs.
    pub shape: Vec<usize>,
    /// Whether the parameter belongs to a task head.
    pub head: bool,
}

/// A tensor of the wrong shape.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MisshapenKey {
    /// Path of the parameter in the module, joined with dots.
    pub param: String,
    /// The key in the checkpoint.
    pub key: String,
    /// Shape in the checkpoint that the parameter needs.
    pub expected: Vec<usize>,
    /// Shape in the checkpoint.
    pub found: Vec<usize>,
    /// Whether the parameter belongs to a task head.
    pub head: bool,
}

/// Two tensors of a checkpoint that stand for one parameter and differ.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AmbiguousKeys {
    /// Path of the parameter in the module, joined with dots.
    pub param: String,
    /// The key that would be taken.
    pub key: String,
    /// The key of the other tensor.
    pub other: String,
}

/// A tensor of the wrong kind of element.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MistypedKey {
    /// Path of the parameter in the module, joined with dots.
    pub param: String,
    /// The key in the checkpoint.
    pub key: String,
    /// "float", "int" or "bool".
    pub expected: &'static str,
    /// Element type in the checkpoint.
    pub found: String,
}

impl KeyReport {
    /// Whether checkpoint and module agree in everything.
    pub fn is_clean(&self) -> bool {
        self.missing.is_empty()
            && self.unexpected.is_empty()
            && self.misshapen.is_empty()
            && self.mistyped.is_empty()
            && self.unmapped.is_empty()
            && self.ambiguous.is_empty()
    }

    /// Whether a tensor of a task head is missing or has another shape.
    fn lacks_a_head(&self) -> bool {
        self.missing.iter().any(|key| key.head) || self.misshapen.iter().any(|key| key.head)
    }
}

impl fmt::Display for KeyReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} does not fit the module:", self.place)?;
        if !self.missing.is_empty() {
            write!(f, "\n  missing ({}):", self.missing.len())?;
            for m in &self.missing {
                write!(f, "\n    {} {:?} (for parameter {})", m.key, m.shape, m.param)?;
            }
        }
        if !self.unexpected.is_empty() {
            write!(f, "\n  unexpected ({}):", self.unexpected.len())?;
            for key in &self.unexpected {
                write!(f, "\n    {key}")?;
            }
        }
        if !self.misshapen.is_empty() {
            write!(f, "\n  misshapen ({}):", self.misshapen.len())?;
            for m in &self.misshapen {
                write!(
                    f,
                    "\n    {}: {:?}, but parameter {} needs {:?}",
                    m.key, m.found, m.param, m.expected
                )?;
            }
        }
        if !self.mistyped.is_empty() {
            write!(f, "\n  of another element type ({}):", self.mistyped.len())?;
            for m in &self.mistyped {
                write!(
                    f,
                    "\n    {}: {}, but parameter {} is {}",
                    m.key, m.found, m.param, m.expected
                )?;
            }
        }
        if !self.unmapped.is_empty() {
            write!(
                f,
                "\n  parameters without a rule in the key map ({}):",
                self.unmapped.len()
            )?;
            for param in &self.unmapped {
                write!(f, "\n    {param}")?;
            }
        }
        if !self.ambiguous.is_empty() {
            write!(
                f,
                "\n  one parameter but different tensors ({}; weights that are tied must be equal, else set \
                 `tie_word_embeddings` to false in config.json):",
                self.ambiguous.len()
            )?;
            for a in &self.ambiguous {
                write!(f, "\n    {} and {} (for parameter {})", a.key, a.other, a.param)?;
            }
        }
        if self.lacks_a_head() {
            write!(
                f,
                "\n  this model's head is not in the checkpoint: take a checkpoint that was saved with it; only \
                 fine-tuning starts a head anew (`model.weights` of kiln train, `LoadOptions::with_new_heads`)"
            )?;
        }
        Ok(())
    }
}
