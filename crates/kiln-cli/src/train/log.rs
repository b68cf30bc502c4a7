//! The log of a run: one JSON object a line, for a step, an evaluation or a checkpoint.
//!
//! A checkpoint's line has the checksum of its weights. So a log tells the checkpoints that its steps led to
//! from those of other steps with the same numbers (see [`super::line`]).

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};

use kiln_hub::write_bytes_atomic;
use serde::{Deserialize, Deserializer, Serialize};

use crate::error::CliError;

/// The file of a run's log.
pub const LOG: &str = "log.jsonl";

/// One line.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "lowercase")]
pub enum Entry {
    /// The beginning of a log that has a line for each checkpoint. Logs of earlier versions have neither.
    Start,
    /// An optimizer step.
    Step {
        /// Its number, from 1.
        step: u64,
        /// Mean loss before the update.
        #[serde(deserialize_with = "number")]
        loss: f32,
        /// Learning rate.
        rate: f64,
        /// Seconds, data included.
        seconds: f64,
        /// Tokens or examples a second.
        per_second: f64,
        /// Peak memory of the process so far in MiB, where the system tells.
        memory_mb: Option<u64>,
        /// Seconds of the step in which this rank waited for others, where there are several: communication
        /// that no kernel hid.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        exposed: Option<f64>,
        /// What the loss is multiplied by, now and then, if the loss is scaled (`train.autocast = "f16"`).
        #[serde(default, skip_serializing_if = "Option::is_none")]
        loss_scale: Option<f32>,
        /// Steps skipped so far because a gradient was not finite, where `loss_scale` is there.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        skipped: Option<u32>,
    },
    /// An evaluation.
    Evaluation {
        /// Steps done.
        step: u64,
        /// Mean loss.
        #[serde(deserialize_with = "number")]
        loss: f32,
        /// Part of the examples whose likeliest class is theirs, of classifiers.
        accuracy: Option<f64>,
    },
    /// A checkpoint.
    Checkpoint {
        /// Steps done.
        step: u64,
        /// SHA-256 of its weights, in hexadecimal.
        weights: String,
    },
}

impl Entry {
    /// Number of the step.
    pub fn step(&self) -> u64 {
        match self {
            Self::Start => 0,
            Self::Step { step, .. } | Self::Evaluation { step, .. } | Self::Checkpoint { step, .. } => *step,
        }
    }

    /// Whether it is the line of a checkpoint.
    pub fn is_checkpoint(&self) -> bool {
        matches!(self, Self::Checkpoint { .. })
    }
}

/// A log that is being written.
pub struct Log {
    path: PathBuf,
    /// None on ranks that write no log.
    file: Option<File>,
    entries: Vec<Entry>,
}

impl Log {
    /// Begins the log of the run in `run` with these lines, in place of the one that is there.
    ///
    /// # Errors
    ///
    /// [`CliError::Io`] or [`CliError::Hub`].
    pub fn begin(run: &Path, entries: Vec<Entry>) -> Result<Self, CliError> {
        let path = run.join(LOG);
        let text: String = entries.iter().map(line).collect();
        write_bytes_atomic(&path, text.as_bytes())?;
        let file = OpenOptions::new()
            .append(true)
            .open(&path)
            .map_err(CliError::io("open", &path))?;
        Ok(Self {
            path,
            file: Some(file),
            entries,
        })
    }

    /// A log that is kept in memory alone.
    pub fn nowhere() -> Self {
        Self {
            path: PathBuf::new(),
            file: None,
            entries: Vec::new(),
        }
    }

    /// Adds a line.
    ///
    /// # Errors
    ///
    /// [`CliError::Io`].
    pub fn add(&mut self, entry: Entry) -> Result<(), CliError> {
        if let Some(file) = &mut self.file {
            file.write_all(line(&entry).as_bytes())
                .map_err(CliError::io("write", &self.path))?;
        }
        self.entries.push(entry);
        Ok(())
    }

    /// All lines, of earlier parts of the run too.
    pub fn entries(&self) -> &[Entry] {
        &self.entries
    }
}

fn line(entry: &Entry) -> String {
    // Numbers, texts and options always have a JSON form; that of a loss which is not finite is `null`.
    serde_json::to_string(entry).unwrap_or_default() + "\n"
}

/// A number as [`line`] writes it.
fn number<'de, D: Deserializer<'de>>(from: D) -> Result<f32, D::Error> {
    Ok(Option::deserialize(from)?.unwrap_or(f32::NAN))
}

/// Reads the log in `folder`, which is a run's or a checkpoint's; an incomplete last line, of a program that
/// was killed, is passed over. No file is an empty log.
///
/// # Errors
///
/// [`CliError::Io`].
pub fn read(folder: &Path) -> Result<Vec<Entry>, CliError> {
    let path = &folder.join(LOG);
    match std::fs::read_to_string(path) {
        Ok(text) => Ok(text
            .lines()
            .filter_map(|line| serde_json::from_str(line).ok())
            .collect()),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(Vec::new()),
        Err(error) => Err(CliError::io("read", path)(error)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_loss_that_is_no_number_reads_back() {
        let run = tempfile::tempdir().unwrap();
        let mut log = Log::begin(run.path(), Vec::new()).unwrap();
        for loss in [f32::NAN, f32::INFINITY, 0.1] {
            log.add(Entry::Evaluation {
                step: 3,
                loss,
                accuracy: None,
            })
            .unwrap();
        }
        let text = std::fs::read_to_string(run.path().join(LOG)).unwrap();
        assert_eq!(text.matches("\"loss\":null").count(), 2, "{text}");
        let log = Log::begin(run.path(), read(run.path()).unwrap()).unwrap();
        let losses = log.entries().iter().filter_map(|entry| match entry {
            Entry::Step { loss, .. } | Entry::Evaluation { loss, .. } => Some(*loss),
            Entry::Start | Entry::Checkpoint { .. } => None,
        });
        let losses: Vec<f32> = losses.collect();
        assert!(
            losses[0].is_nan() && losses[1].is_nan() && losses[2] == 0.1,
            "{losses:?}"
        );
        assert_eq!(std::fs::read_to_string(run.path().join(LOG)).unwrap(), text);
    }

    #[test]
    fn lines_without_a_loss_read_back() {
        let run = tempfile::tempdir().unwrap();
        let entries = vec![
            Entry::Start,
            Entry::Checkpoint {
                step: 4,
                weights: "ab".to_owned(),
            },
        ];
        Log::begin(run.path(), entries.clone()).unwrap();
        assert_eq!(read(run.path()).unwrap(), entries);
    }
}
