//! Everything a command can fail with. The text is all that the user sees, so each one names the thing and
//! what to do.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use kiln_hub::HubError;
use kiln_hub::data::DataError;
use kiln_models::ModelError;

use crate::train::Checkpoints;

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
    /// A checkpoint lies alone.
    #[error(
        "{} is a checkpoint without its run: no config.toml is in the folder around the one that it lies in. Put it \
         beside the other checkpoints of its run, as RUN/checkpoints/STEP with RUN/config.toml (a copy of the config \
         that the run was started with, if the run is gone), and name it there",
        checkpoint.display()
    )]
    NoRun {
        /// The checkpoint.
        checkpoint: PathBuf,
    },
    /// A run has checkpoints and no config.
    #[error(
        "{} has checkpoints, but no config.toml: to go on with them, copy the config that the run was started with to \
         {} and give --resume {}; another run needs another folder",
        run.display(), run.join("config.toml").display(), run.display()
    )]
    NoConfig {
        /// The run's folder.
        run: PathBuf,
    },
    /// A run is to go on in another folder.
    #[error(
        "--out names the folder of a new run, and a resumed run goes on in its own, that of --resume {}: leave --out \
         away. To go on in {} and keep the run as it is, copy the run's folder to it, and resume the copy",
        resume.display(), out.display()
    )]
    Branch {
        /// What it goes on with.
        resume: PathBuf,
        /// The other folder.
        out: PathBuf,
    },
    /// A run has no checkpoint, but had some: it would begin anew, and lose its log, unasked.
    #[error(
        "{} has no checkpoint, but {reason}: {remedy}, or start another run with `kiln train --config {}` and --out",
        run.display(), run.join("config.toml").display()
    )]
    NoneLeft {
        /// The run's folder.
        run: PathBuf,
        /// What says so.
        reason: String,
        /// What to do.
        remedy: String,
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
        "{what} is {saved} in what the run has prepared in {}, with which it goes on, and {now} now: leave it at {saved}, \
         or start another run without --resume",
        prepared.display()
    )]
    Prepared {
        /// The key that differs.
        what: String,
        /// In what is prepared.
        saved: String,
        /// Now.
        now: String,
        /// The folder of what is prepared.
        prepared: PathBuf,
    },
    /// What a run has prepared is made with another tokenizer than its checkpoint.
    #[error(
        "{} is another tokenizer than that of the checkpoint {}, to which its tokens mean something else: remove \
         tokenizer.json, tokens.bin and evaluation-tokens.bin from {}, as far as they are there, and the data is \
         prepared again with the checkpoint's tokenizer",
        prepared.join("tokenizer.json").display(), checkpoint.display(), prepared.display()
    )]
    Tokenizer {
        /// The folder of the prepared files.
        prepared: PathBuf,
        /// The checkpoint.
        checkpoint: PathBuf,
    },
    /// There is no space for a checkpoint.
    #[error("{source}: the disk is full. {}", .room.remedy())]
    DiskFull {
        /// What the run has, and what it can do without.
        room: Room,
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
         extreme values among them, or take a lower schedule.rate, {}",
        earlier(checkpoint.as_deref())
    )]
    Evaluation {
        /// Optimizer steps done.
        step: u64,
        /// The loss.
        loss: f32,
        /// The newest checkpoint before that step.
        checkpoint: Option<PathBuf>,
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
    /// Another rank could not evaluate.
    #[error(
        "the evaluation of another rank failed, and this one ends with it: what that rank says is the reason"
    )]
    OtherRank,
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

    /// The error of writing a checkpoint of `run`, or of copying `from`, which says so if the disk is full.
    pub(crate) fn of_checkpoint(self, run: &Path, from: Option<&Path>) -> Self {
        let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(&self);
        while let Some(error) = cause {
            let kind = error.downcast_ref().map(std::io::Error::kind);
            if matches!(kind, Some(ErrorKind::StorageFull | ErrorKind::QuotaExceeded)) {
                return Self::DiskFull {
                    room: Room::of(run, from),
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

/// What a run has when its disk is full.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Room {
    /// What it goes on with: its own folder, or a checkpoint.
    resume: PathBuf,
    /// Whether it goes on, and does not begin again.
    goes_on: bool,
    /// Its checkpoints, all but the newest of which it can do without; none if it has none.
    checkpoints: Option<PathBuf>,
    /// The checkpoints that it can do without, all of them.
    abandoned: Option<PathBuf>,
}

impl Room {
    /// Of `run`, if it has to go on from `from`.
    fn of(run: &Path, from: Option<&Path>) -> Self {
        let all = Checkpoints::of(run);
        let abandoned = all.abandoned().to_path_buf();
        let is_in = |folder: &Path| {
            let folder = folder.canonicalize();
            let from = from.and_then(|from| from.canonicalize().ok());
            folder.is_ok_and(|folder| from.is_some_and(|from| from.starts_with(folder)))
        };
        let has_some = all.last().is_some();
        Self {
            resume: from.unwrap_or(run).to_path_buf(),
            goes_on: from.is_some() || has_some,
            // What is left must have a checkpoint to go on with.
            abandoned: (has_some && abandoned.is_dir() && !is_in(&abandoned)).then_some(abandoned),
            checkpoints: (has_some && !is_in(all.folder())).then(|| all.folder().to_path_buf()),
        }
    }

    fn remedy(&self) -> String {
        let whole = match self.goes_on {
            true => "The checkpoints before this one are whole; free some space, and go on",
            false => "The run has no checkpoint yet: free some space, and begin again",
        };
        let mut text = format!("{whole} with `kiln train --resume {}`", self.resume.display());
        let spare = [
            self.abandoned
                .as_ref()
                .map(|path| format!("all of {}", path.display())),
            self.checkpoints
                .as_ref()
                .map(|path| format!("all of {} but the newest", path.display())),
        ];
        let spare: Vec<String> = spare.into_iter().flatten().collect();
        if !spare.is_empty() {
            text += &format!(". What this run can do without: {}", spare.join(", and "));
        }
        text
    }
}

fn earlier(checkpoint: Option<&Path>) -> String {
    match checkpoint {
        Some(path) => format!(
            "from the checkpoint before it: kiln train --resume {}",
            path.display()
        ),
        None => "in another run: there is no checkpoint before it".to_owned(),
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
        let place = tempfile::tempdir().unwrap();
        let run = place.path();
        let [older, elsewhere] =
            ["checkpoints/step-00000004", "abandoned/step-00000008"].map(|name| run.join(name));
        let io = || CliError::io("create a folder in", "runs/a/checkpoints")(full());
        let hub = || {
            CliError::from(HubError::Io {
                action: "write",
                path: "model.safetensors".into(),
                source: full(),
            })
        };
        let told = |error: CliError, from: Option<&Path>, parts: &[&str], not: &[&str]| {
            let text = error.of_checkpoint(run, from).to_string();
            let text = text.replace(&*run.to_string_lossy(), "RUN");
            for part in ["disk is full", "free some space"].iter().chain(parts) {
                assert!(text.contains(part), "{part}: {text}");
            }
            // Nothing is removed before a checkpoint is written, however few are kept.
            for part in ["train.keep"].iter().chain(not) {
                assert!(!text.contains(part), "{part}: {text}");
            }
        };
        told(io(), None, &["no checkpoint yet", "--resume RUN`"], &["without"]);
        // The only checkpoint of all is the one to be copied.
        std::fs::create_dir_all(&elsewhere).unwrap();
        let source = "--resume RUN/abandoned/step-00000008`";
        told(hub(), Some(&elsewhere), &[source], &["without"]);
        std::fs::create_dir_all(older).unwrap();
        let checkpoints = "RUN/checkpoints but the newest";
        told(
            hub(),
            Some(&elsewhere),
            &[source, checkpoints],
            &["all of RUN/abandoned"],
        );
        told(
            io(),
            None,
            &["--resume RUN`", "all of RUN/abandoned, and", checkpoints],
            &[],
        );
        let other = CliError::io("read", "x")(ErrorKind::NotFound.into()).of_checkpoint(run, None);
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
