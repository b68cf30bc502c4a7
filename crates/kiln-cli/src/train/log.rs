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

/// A log that is being written. A disk that is full costs no step: lines wait until they can be written.
pub struct Log {
    path: PathBuf,
    /// None on ranks that write no log.
    file: Option<File>,
    entries: Vec<Entry>,
    /// Lines that are not in the file.
    waiting: String,
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
            waiting: String::new(),
        })
    }

    /// A log that is kept in memory alone.
    pub fn nowhere() -> Self {
        Self {
            path: PathBuf::new(),
            file: None,
            entries: Vec::new(),
            waiting: String::new(),
        }
    }

    /// Adds a line. If it cannot be written, a warning says so, and it is written with the next one that can.
    pub fn add(&mut self, entry: Entry) {
        if let Some(file) = &mut self.file {
            let is_first = self.waiting.is_empty();
            self.waiting.push_str(&line(&entry));
            match append(file, &self.waiting) {
                Ok(()) => self.waiting.clear(),
                Err(error) if is_first => kiln_log::warn!(
                    "{} cannot be written, and training goes on: {error}. Make room; lines from step {} on are \
                     written when that is possible",
                    self.path.display(),
                    entry.step()
                ),
                Err(_) => {}
            }
        }
        self.entries.push(entry);
    }

    /// All lines, of earlier parts of the run too.
    pub fn entries(&self) -> &[Entry] {
        &self.entries
    }
}

/// Appends all of `text`, or nothing.
fn append(file: &mut File, text: &str) -> std::io::Result<()> {
    let length = file.metadata()?.len();
    file.write_all(text.as_bytes()).inspect_err(|_| {
        // Half a line would end up in the middle of the log.
        let _ = file.set_len(length);
    })
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
/// was killed, is passed over, and so is what is no line of a log. No file is an empty log.
///
/// # Errors
///
/// [`CliError::Io`].
pub fn read(folder: &Path) -> Result<Vec<Entry>, CliError> {
    let path = &folder.join(LOG);
    match std::fs::read(path) {
        Ok(bytes) => Ok(String::from_utf8_lossy(&bytes)
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
            });
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

    #[test]
    fn bytes_that_are_no_text_are_passed_over() {
        let run = tempfile::tempdir().unwrap();
        Log::begin(run.path(), vec![Entry::Start]).unwrap();
        let mut file = OpenOptions::new()
            .append(true)
            .open(run.path().join(LOG))
            .unwrap();
        file.write_all(b"\xff\xfe\n").unwrap();
        assert_eq!(read(run.path()).unwrap(), [Entry::Start]);
    }

    /// What a full disk does not take is written when there is room again.
    #[test]
    #[cfg(target_os = "linux")]
    fn lines_wait_for_room() {
        let entry = |step| Entry::Evaluation {
            step,
            loss: 1.0,
            accuracy: None,
        };
        let run = tempfile::tempdir().unwrap();
        let mut log = Log::begin(run.path(), vec![entry(0)]).unwrap();
        let full = OpenOptions::new().append(true).open("/dev/full").unwrap();
        let with_room = log.file.replace(full);
        log.add(entry(1));
        log.add(entry(2));
        assert_eq!(read(run.path()).unwrap(), [entry(0)]);
        log.file = with_room;
        log.add(entry(3));
        assert_eq!(read(run.path()).unwrap(), [0, 1, 2, 3].map(entry));
        assert_eq!(read(run.path()).unwrap(), log.entries());
    }
}
