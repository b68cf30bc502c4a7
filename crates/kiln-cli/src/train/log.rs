//! The log of a run: one JSON object a line, for a step or an evaluation.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};

use kiln_hub::write_bytes_atomic;
use serde::{Deserialize, Deserializer, Serialize};

use crate::error::CliError;

/// One line.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "lowercase")]
pub enum Entry {
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
}

impl Entry {
    /// Number of the step.
    pub fn step(&self) -> u64 {
        match self {
            Self::Step { step, .. } | Self::Evaluation { step, .. } => *step,
        }
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
    /// Opens the log of a run that goes on after `step`. Lines of later steps, from before the run was
    /// interrupted, are removed: those steps come again.
    ///
    /// # Errors
    ///
    /// [`CliError::Io`] or [`CliError::Hub`].
    pub fn open(run: &Path, step: u64) -> Result<Self, CliError> {
        let path = run.join("log.jsonl");
        let entries: Vec<Entry> = read(&path)?
            .into_iter()
            .filter(|entry| entry.step() <= step)
            .collect();
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

    /// The last step of the log of a run; 0 if it has none.
    ///
    /// # Errors
    ///
    /// [`CliError::Io`].
    pub fn last_step(run: &Path) -> Result<u64, CliError> {
        let entries = read(&run.join("log.jsonl"))?;
        Ok(entries.iter().map(Entry::step).max().unwrap_or(0))
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

/// Reads a log; an incomplete last line, of a program that was killed, is passed over. No file is an empty
/// log.
fn read(path: &Path) -> Result<Vec<Entry>, CliError> {
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
        let mut log = Log::open(run.path(), 0).unwrap();
        for loss in [f32::NAN, f32::INFINITY, 0.1] {
            log.add(Entry::Evaluation {
                step: 3,
                loss,
                accuracy: None,
            })
            .unwrap();
        }
        let text = std::fs::read_to_string(run.path().join("log.jsonl")).unwrap();
        assert_eq!(text.matches("\"loss\":null").count(), 2, "{text}");
        let log = Log::open(run.path(), 3).unwrap();
        let losses = log.entries().iter().map(|entry| match entry {
            Entry::Step { loss, .. } | Entry::Evaluation { loss, .. } => *loss,
        });
        let losses: Vec<f32> = losses.collect();
        assert!(
            losses[0].is_nan() && losses[1].is_nan() && losses[2] == 0.1,
            "{losses:?}"
        );
        assert_eq!(
            std::fs::read_to_string(run.path().join("log.jsonl")).unwrap(),
            text
        );
    }
}
