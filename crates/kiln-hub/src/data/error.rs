//! Errors of data, with the file and line of each.

use std::path::{Path, PathBuf};

use thiserror::Error;

use crate::error::HubError;

/// An error of reading data or making batches.
#[derive(Debug, Error)]
pub enum DataError {
    /// The operating system refused to read or write a file.
    #[error("cannot {action} {}: {source}", path.display())]
    Io {
        /// What was attempted, as a verb.
        action: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// The operating system's answer.
        source: std::io::Error,
    },

    /// A file is not what its format says.
    #[error("{}{}: {reason}", path.display(), line.map(|line| format!(" line {line}")).unwrap_or_default())]
    Format {
        /// The file.
        path: PathBuf,
        /// The line, counted from 1, where lines mean something.
        line: Option<u64>,
        /// What is wrong.
        reason: String,
    },

    /// A link among the data leads nowhere: what it stood for would be missing, or count as something else.
    #[error(
        "{} is a link to {}, which is not there or cannot be read: restore what it leads to, or remove the link",
        path.display(), target.display()
    )]
    DeadLink {
        /// The link.
        path: PathBuf,
        /// What it leads to.
        target: PathBuf,
    },

    /// There is nothing to learn from: no files, no examples, or fewer tokens than one window.
    #[error("{place}: {reason}")]
    Empty {
        /// The file, folder or dataset.
        place: String,
        /// What was looked for.
        reason: String,
    },

    /// An example number outside the dataset.
    #[error("example {index} of a dataset of {len}")]
    OutOfRange {
        /// The number asked for.
        index: usize,
        /// The number of examples.
        len: usize,
    },

    /// A label is not the index of a class.
    #[error("{example} has label {label}, but there are {classes} classes, counted from 0")]
    Label {
        /// The example: its number in the dataset, from 0, or its line.
        example: String,
        /// Its label.
        label: usize,
        /// Number of classes.
        classes: usize,
    },

    /// Examples cannot be put into one batch, or an augmentation does not fit its image.
    #[error("{operation}: {reason}")]
    Shape {
        /// The operation.
        operation: &'static str,
        /// What does not fit.
        reason: String,
    },

    /// A saved position belongs to other data or another order.
    #[error("cannot resume: the saved position has {what} {saved}, this run has {now}")]
    Resume {
        /// What differs.
        what: &'static str,
        /// In the saved state.
        saved: u64,
        /// In this run.
        now: u64,
    },

    /// A setting that cannot work.
    #[error("{0}")]
    Setting(String),

    /// The thread that prepares batches has panicked.
    #[error("the data thread stopped: {0}")]
    Worker(String),

    /// A tokenizer failed.
    #[error(transparent)]
    Hub(#[from] HubError),
}

impl DataError {
    pub(crate) fn io(action: &'static str, path: impl AsRef<Path>, source: std::io::Error) -> Self {
        Self::Io {
            action,
            path: path.as_ref().to_path_buf(),
            source,
        }
    }

    pub(crate) fn format(path: impl AsRef<Path>, line: Option<u64>, reason: impl ToString) -> Self {
        Self::Format {
            path: path.as_ref().to_path_buf(),
            line,
            reason: reason.to_string(),
        }
    }

    pub(crate) fn dead_link(path: impl AsRef<Path>) -> Self {
        let path = path.as_ref().to_path_buf();
        let target = std::fs::read_link(&path).unwrap_or_default();
        Self::DeadLink { path, target }
    }

    pub(crate) fn empty(place: impl AsRef<Path>, reason: impl ToString) -> Self {
        Self::Empty {
            place: place.as_ref().display().to_string(),
            reason: reason.to_string(),
        }
    }
}
