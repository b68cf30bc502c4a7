//! Everything a command can fail with. The text is all that the user sees, so each one names the thing and
//! what to do.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use kiln_hub::HubError;
use kiln_hub::data::DataError;
use kiln_models::ModelError;

/// Why a command failed.
#[derive(Debug, thiserror::Error)]
pub enum CliError {
    /// A file cannot be read or written.
    #[error("cannot {action} {}: {source}", path.display())]
    Io {
        /// What was attempted, as a verb.
        action: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// The operating system's answer.
        source: std::io::Error,
    },
    /// A picture cannot be drawn.
    #[error("the picture cannot be drawn: {0}")]
    Draw(String),
    /// A config is not one: syntax, an unknown key, a value of another type.
    #[error("{place}: {reason}")]
    Config {
        /// The file, or `--set`.
        place: String,
        /// What is wrong and what to write instead.
        reason: String,
    },
    /// A checkpoint cannot be used.
    #[error("the checkpoint {} cannot be used: {reason}; {remedy}", path.display())]
    Checkpoint {
        /// The checkpoint's folder.
        path: PathBuf,
        /// What is wrong.
        reason: String,
        /// What to do.
        remedy: String,
    },
    /// There is no checkpoint where one was expected.
    #[error("{} has no checkpoint; give the folder of a run (with `checkpoints` in it) or of one checkpoint", path.display())]
    NoCheckpoint {
        /// The folder.
        path: PathBuf,
    },
    /// The run's folder holds another run.
    #[error(
        "{} already holds a run; continue it with `kiln train --resume {}`, or choose another folder with --out",
        path.display(), path.display()
    )]
    Occupied {
        /// The folder.
        path: PathBuf,
    },
    /// Another process trains in the run's folder.
    #[error(
        "another process trains in {}, or did when this one began; wait until it has ended, stop it, or choose \
         another folder with --out",
        path.display()
    )]
    InUse {
        /// The folder.
        path: PathBuf,
    },
    /// A resumed run has something else than its checkpoint.
    #[error(
        "{what} is {saved} in the checkpoint {}, and {now} in this run: leave it at {saved}, or start another run \
         with model.weights = \"{}\"",
        path.display(), path.display()
    )]
    Differs {
        /// What differs: a key, most often.
        what: String,
        /// In the checkpoint.
        saved: String,
        /// In this run.
        now: String,
        /// The checkpoint.
        path: PathBuf,
    },
    /// A resumed run asks for other data than it has prepared.
    #[error(
        "{what} is {saved} in the run {}, and {now} now, but the run goes on with what it prepared in {}: leave it at \
         {saved}, or start another run without --resume",
        run.display(), run.join("data").display()
    )]
    Prepared {
        /// The key that differs.
        what: String,
        /// In the run's config.
        saved: String,
        /// Now.
        now: String,
        /// The run's folder.
        run: PathBuf,
    },
    /// There is no space for a checkpoint.
    #[error(
        "{source}: the disk is full. The checkpoints before this one are whole; free some space, and go on with \
         `kiln train --resume {}`. What this run can do without: all of {}, and all of {} but the newest",
        run.display(), run.join("abandoned").display(), run.join("checkpoints").display()
    )]
    DiskFull {
        /// The run's folder.
        run: PathBuf,
        /// What failed.
        source: Box<CliError>,
    },
    /// The loss, or a parameter, is not a number.
    #[error(
        "{what} became {value} at step {step}; {}. A lower schedule.rate, a longer schedule.warmup or a \
         smaller optimizer.clip_norm helps most often",
        last_good(checkpoint.as_deref())
    )]
    NotFinite {
        /// What is not a number: the loss, or a parameter with its path.
        what: String,
        /// The optimizer step, from 1.
        step: u64,
        /// What it is instead.
        value: f32,
        /// The last checkpoint before it.
        checkpoint: Option<PathBuf>,
    },
    /// The loss of an evaluation is not a number.
    #[error(
        "the evaluation loss is {loss} after step {step}: the model overflows on the examples set aside. Look for \
         extreme values among them, or go on from an earlier checkpoint with a lower schedule.rate"
    )]
    Evaluation {
        /// Optimizer steps done.
        step: u64,
        /// The loss.
        loss: f32,
    },
    /// A name that the command does not know.
    #[error("unknown {what} `{name}`{}; known: {known}", did_you_mean(hint.as_deref()))]
    Unknown {
        /// What kind of name.
        what: &'static str,
        /// The name.
        name: String,
        /// The nearest known one.
        hint: Option<String>,
        /// All known ones.
        known: String,
    },
    /// A command that needs something it does not have.
    #[error("{0}")]
    Usage(String),
    /// The ranks of a run are not connected, or not any more.
    #[error(transparent)]
    Ranks(#[from] kiln::distributed::Error),
    /// The ranks of a run would go on from different checkpoints.
    #[error(
        "{0}; give all ranks the same checkpoint by name, as in --resume runs/NAME/checkpoints/step-00000100, in a \
         folder that they all see"
    )]
    Start(#[source] kiln::distributed::Error),
    /// The step could not be compiled or run.
    #[error(transparent)]
    Step(#[from] kiln::Error),
    /// A training step failed.
    #[error(transparent)]
    Train(#[from] kiln::TrainError),
    /// A training step cannot be exported.
    #[error(transparent)]
    Export(#[from] kiln::ExportError),
    /// Weights, a tokenizer or a file of the hub.
    #[error(transparent)]
    Hub(#[from] HubError),
    /// Data.
    #[error(transparent)]
    Data(#[from] DataError),
    /// A model's configuration.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// The disk cache.
    #[error(transparent)]
    Cache(#[from] kiln_store::StoreError),
}

impl CliError {
    pub(crate) fn io(action: &'static str, path: impl AsRef<Path>) -> impl FnOnce(std::io::Error) -> Self {
        let path = path.as_ref().to_path_buf();
        move |source| Self::Io { action, path, source }
    }

    pub(crate) fn config(place: impl ToString, reason: impl ToString) -> Self {
        Self::Config {
            place: place.to_string(),
            reason: reason.to_string(),
        }
    }

    /// The error of writing a checkpoint of `run`, which says so if the disk is full.
    pub(crate) fn of_checkpoint(self, run: &Path) -> Self {
        let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(&self);
        while let Some(error) = cause {
            let kind = error.downcast_ref().map(std::io::Error::kind);
            if matches!(kind, Some(ErrorKind::StorageFull | ErrorKind::QuotaExceeded)) {
                return Self::DiskFull {
                    run: run.to_path_buf(),
                    source: Box::new(self),
                };
            }
            cause = error.source();
        }
        self
    }

    pub(crate) fn unknown<'a>(
        what: &'static str,
        name: &str,
        known: impl IntoIterator<Item = &'a str>,
    ) -> Self {
        let known: Vec<&str> = known.into_iter().collect();
        let hint = nearest(name, known.iter().copied()).map(str::to_owned);
        Self::Unknown {
            what,
            name: name.to_owned(),
            hint,
            known: known.join(", "),
        }
    }
}

fn last_good(checkpoint: Option<&Path>) -> String {
    match checkpoint {
        Some(path) => format!("the last checkpoint with finite parameters is {}", path.display()),
        None => "there is no checkpoint before it".to_owned(),
    }
}

fn did_you_mean(hint: Option<&str>) -> String {
    hint.map_or_else(String::new, |hint| format!(", did you mean `{hint}`?"))
}

/// The known name that is most like `name`, if one is like it at all: at most a third of its letters differ,
/// or one contains the other.
pub fn nearest<'a>(name: &str, known: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let score = |candidate: &str| {
        let distance = edit_distance(name, candidate);
        let contained = name.len() >= 3 && (candidate.contains(name) || name.contains(candidate));
        (contained || distance <= name.chars().count().div_ceil(3)).then_some(distance)
    };
    let scored = known
        .into_iter()
        .filter_map(|candidate| Some((score(candidate)?, candidate)));
    scored
        .min_by_key(|&(distance, _)| distance)
        .map(|(_, candidate)| candidate)
}

/// Levenshtein's distance, one row at a time.
fn edit_distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, &y) in b.iter().enumerate() {
            let substituted = diagonal + usize::from(x != y);
            diagonal = row[j + 1];
            row[j + 1] = substituted.min(diagonal + 1).min(row[j] + 1);
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_disk_is_named_with_the_remedy() {
        let full = || std::io::Error::from(ErrorKind::StorageFull);
        let run = Path::new("runs/a");
        let io = CliError::io("create a folder in", "runs/a/checkpoints")(full());
        let hub = CliError::from(HubError::Io {
            action: "write",
            path: "model.safetensors".into(),
            source: full(),
        });
        for error in [io, hub] {
            let text = error.of_checkpoint(run).to_string();
            for part in [
                "disk is full",
                "runs/a/abandoned",
                "runs/a/checkpoints but the newest",
                "--resume runs/a",
            ] {
                assert!(text.contains(part), "{part}: {text}");
            }
            // Nothing is removed before a checkpoint is written, however few are kept.
            assert!(!text.contains("train.keep"), "{text}");
        }
        let other = CliError::io("read", "x")(ErrorKind::NotFound.into()).of_checkpoint(run);
        assert!(matches!(other, CliError::Io { .. }), "{other}");
    }

    #[test]
    fn the_nearest_name_is_the_one_meant() {
        let known = ["batch_size", "steps", "evaluate_every"];
        assert_eq!(nearest("batchsize", known), Some("batch_size"));
        assert_eq!(nearest("batch", known), Some("batch_size"));
        assert_eq!(nearest("step", known), Some("steps"));
        assert_eq!(nearest("colour", known), None);
    }

    #[test]
    fn distances_count_single_changes() {
        assert_eq!(edit_distance("kiln", "kiln"), 0);
        assert_eq!(edit_distance("", "kiln"), 4);
        assert_eq!(edit_distance("kitten", "sitting"), 3);
    }
}
