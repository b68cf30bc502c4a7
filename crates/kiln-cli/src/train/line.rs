//! The line of steps that led to a checkpoint.
//!
//! A run that goes on from an older checkpoint leaves one line for another, and may go back. Both lines have
//! steps and checkpoints of the same numbers:
//!
//! ```text
//!      4       8      12
//! ─────┼── A ──┼───────┤   --resume run/checkpoints/step-00000004: 8 and 12 of A are set aside
//!      └── B ──┤           --resume run/abandoned/step-00000012: so is 8 of B, and the log is A's again
//! ```
//!
//! The log of the run is that of one line, and names the checkpoints of this line by the checksums of their
//! weights. A checkpoint that is set aside takes a copy of the log along. Which line a checkpoint is of is
//! found out from these files whenever a run goes on, and from nothing else: a run that was killed while it
//! went from one line to another finds the same.

use std::path::{Path, PathBuf};

use super::checkpoint::{Checkpoints, free_name};
use super::copy::copy_file;
use super::log::{self, Entry, LOG, Log};
use super::state::entry_of;
use crate::error::CliError;

/// The line that a run goes on with.
#[derive(Debug, Default)]
pub struct Line {
    /// The log of the run, as it is.
    log: Vec<Entry>,
    /// The log of the line, if the run has been on another one.
    other: Option<Vec<Entry>>,
    /// The last step of both lines, if the log of the line is of an earlier version, and need not name the
    /// checkpoints until then.
    shared: u64,
}

impl Line {
    /// The line of the checkpoint `from`, or none that there is yet, of the run in `run`.
    ///
    /// # Errors
    ///
    /// [`CliError::Io`].
    pub fn of(run: &Path, from: Option<&Path>) -> Result<Self, CliError> {
        let log = log::read(run)?;
        let other = match from.and_then(|from| Some((from, entry_of(from)?))) {
            Some((from, entry)) if !log.contains(&entry) => other_log(run, from, &entry)?,
            _ => None,
        };
        let unnamed = other.as_ref().filter(|other| !other.contains(&Entry::Start));
        let shared = unnamed.map_or(0, |other| last_shared(&log, other));
        Ok(Self { log, other, shared })
    }

    /// Whether a checkpoint of the run is of this line. Where the run stays on its line all are: logs of
    /// earlier versions do not name them.
    pub fn holds(&self, checkpoint: &Path) -> bool {
        let holds = |log: &Vec<Entry>| {
            entry_of(checkpoint).is_some_and(|entry| entry.step() <= self.shared || log.contains(&entry))
        };
        self.other.as_ref().is_none_or(holds)
    }

    /// Copies the log of the run in `run` into the folder of a checkpoint that is about to be set aside. A
    /// copy that the checkpoint has stays, if it is of another line. Returns whether the log was copied.
    ///
    /// # Errors
    ///
    /// [`CliError::Io`] or [`CliError::Hub`].
    pub fn copy_log(&self, run: &Path, checkpoint: &Path) -> Result<bool, CliError> {
        let copy = checkpoint.join(LOG);
        let is_of_it = || entry_of(checkpoint).is_some_and(|entry| self.log.contains(&entry));
        if self.log.is_empty() || (copy.exists() && !is_of_it()) {
            return Ok(false);
        }
        copy_file(&run.join(LOG), &copy)?;
        Ok(true)
    }

    /// Makes the log of the run in `run` that of this line until `step`, with the checkpoint `from` as its
    /// last one. Steps behind it come again.
    ///
    /// Returns the log, and the place of a copy of the log before. There is a copy where lines are lost that
    /// do not come again as they were, unless a checkpoint that was set aside `took` one along.
    ///
    /// # Errors
    ///
    /// [`CliError::Io`] or [`CliError::Hub`].
    pub fn go_on(
        self,
        run: &Path,
        from: Option<&Path>,
        step: u64,
        took: bool,
    ) -> Result<(Log, Option<PathBuf>), CliError> {
        let loses = match from {
            None => self.log.iter().any(|entry| entry.step() > 0),
            Some(_) if self.other.is_some() => !self.log.is_empty(),
            // A run that was killed has logged steps behind its last checkpoint, but no checkpoint.
            Some(_) => self
                .log
                .iter()
                .any(|entry| entry.is_checkpoint() && entry.step() > step),
        };
        let mut copy = None;
        if loses && !took {
            let folder = Checkpoints::of(run).abandoned().to_path_buf();
            std::fs::create_dir_all(&folder).map_err(CliError::io("create", &folder))?;
            let path = free_name(&folder, "log", ".jsonl");
            copy_file(&run.join(LOG), &path)?;
            copy = Some(path);
        }
        let entries = match from {
            None => vec![Entry::Start],
            Some(from) => {
                let all = self.other.unwrap_or(self.log);
                let mut entries: Vec<Entry> = all.into_iter().filter(|entry| entry.step() <= step).collect();
                // Logs of earlier versions have no line of it, nor has that of a run which was killed when it
                // had written the checkpoint.
                entries.extend(entry_of(from).filter(|entry| !entries.contains(entry)));
                entries
            }
        };
        Ok((Log::begin(run, entries)?, copy))
    }
}

/// The log of the line of the checkpoint `from`, which the run's own log does not name: the one that the
/// checkpoint took along, or another one that was set aside and names it.
fn other_log(run: &Path, from: &Path, entry: &Entry) -> Result<Option<Vec<Entry>>, CliError> {
    if from.join(LOG).is_file() {
        return Ok(Some(log::read(from)?));
    }
    for folder in Checkpoints::of(run).list_abandoned() {
        let log = log::read(&folder)?;
        if log.contains(entry) {
            return Ok(Some(log));
        }
    }
    Ok(None)
}

/// The last step until which two logs have the same lines, those of checkpoints aside.
fn last_shared(one: &[Entry], other: &[Entry]) -> u64 {
    // A log that is read and written again may round its long numbers otherwise.
    let key = |entry: &Entry| match *entry {
        Entry::Start | Entry::Checkpoint { .. } => None,
        Entry::Step {
            step, loss, seconds, ..
        } => Some((step, loss, Some(seconds as f32))),
        Entry::Evaluation { step, loss, .. } => Some((step, loss, None)),
    };
    let is_same = |one: f32, other: f32| one == other || (one.is_nan() && other.is_nan());
    let pairs = one.iter().filter_map(key).zip(other.iter().filter_map(key));
    pairs
        .take_while(|(one, other)| one.0 == other.0 && is_same(one.1, other.1) && one.2 == other.2)
        .last()
        .map_or(0, |((step, ..), _)| step)
}

#[cfg(test)]
mod tests {
    use kiln_hub::data::LoaderState;

    use super::super::state::State;
    use super::*;
    use crate::config::OptimizerName;
    use crate::data::HeldOut;

    /// A run in a folder.
    struct Place(tempfile::TempDir);

    impl Place {
        fn new() -> Self {
            Self(tempfile::tempdir().unwrap())
        }

        fn run(&self) -> &Path {
            self.0.path()
        }

        fn checkpoints(&self) -> Checkpoints {
            Checkpoints::of(self.run())
        }

        fn checkpoint(&self, name: &str, step: u64) -> PathBuf {
            let state = State::now(
                step,
                LoaderState {
                    seed: 0,
                    epoch: 0,
                    batch: step,
                    batch_size: 1,
                    examples: 9,
                    contents: 0,
                },
                None,
                OptimizerName::Sgd,
                HeldOut::Random,
            );
            let write = |folder: &Path| {
                std::fs::write(folder.join("model.safetensors"), format!("{name} {step}")).unwrap();
                Ok(())
            };
            self.checkpoints().write(state, b"state", write).unwrap()
        }

        /// What a run does before its first step, in which it is killed after so many of three parts.
        fn resume(&self, from: Option<&Path>, step: u64, parts: usize) -> Option<(Log, Option<PathBuf>)> {
            let checkpoints = self.checkpoints();
            let line = Line::of(self.run(), from).unwrap();
            if parts == 0 {
                return None;
            }
            if let Some(from) = from
                && parts == 1
                && !checkpoints.holds(from, step)
            {
                checkpoints.set_aside(step, &line).unwrap();
                return None;
            }
            let (from, aside) = checkpoints.go_on_from(from, step, &line).unwrap();
            (parts == 3).then(|| {
                line.go_on(self.run(), from.as_deref(), step, aside.took_log)
                    .unwrap()
            })
        }

        /// Trains after `step` until `last`, with a checkpoint every 4 steps. The losses tell the lines
        /// apart.
        fn train(&self, name: &str, log: &mut Log, step: u64, last: u64) {
            for step in step + 1..=last {
                log.add(Entry::Evaluation {
                    step,
                    loss: name.len() as f32,
                    accuracy: None,
                });
                if step.is_multiple_of(4) {
                    let written = self.checkpoint(name, step);
                    log.add(entry_of(&written).unwrap());
                }
            }
        }

        /// Line A until 12, and B from 4 until `last`.
        fn two_lines(last: u64) -> Self {
            let place = Self::new();
            let (mut log, _) = place.resume(None, 0, 3).unwrap();
            place.train("A", &mut log, 0, 12);
            let fourth = place.checkpoints().list()[0].clone();
            let (mut log, copy) = place.resume(Some(&fourth), 4, 3).unwrap();
            assert_eq!(copy, None, "the checkpoints took it along");
            place.train("BB", &mut log, 4, last);
            place
        }

        /// A log of line A as earlier versions wrote it, with a loss that is no number.
        fn of_an_earlier_version(last: u64) -> Self {
            let place = Self::new();
            let line = |step| Entry::Evaluation {
                step,
                loss: if step == 2 { f32::NAN } else { 1.0 },
                accuracy: None,
            };
            Log::begin(place.run(), (1..=last).map(line).collect()).unwrap();
            place
        }

        fn names(&self) -> Vec<String> {
            let paths = self.checkpoints().list().into_iter();
            paths
                .map(|path| path.file_name().unwrap().to_str().unwrap().to_owned())
                .collect()
        }

        /// The log's steps, with the line of each.
        fn logged(&self) -> Vec<(u64, f32)> {
            Self::logged_in(self.run())
        }

        /// The steps of all logs that were set aside.
        fn logged_aside(&self) -> Vec<Vec<(u64, f32)>> {
            let mut folders = self.checkpoints().list_abandoned();
            folders.push(self.checkpoints().abandoned().to_path_buf());
            folders.iter().map(|folder| Self::logged_in(folder)).collect()
        }

        fn logged_in(folder: &Path) -> Vec<(u64, f32)> {
            let entries = log::read(folder).unwrap().into_iter();
            entries
                .filter_map(|entry| match entry {
                    Entry::Evaluation { step, loss, .. } => Some((step, loss)),
                    _ => None,
                })
                .collect()
        }
    }

    /// Steps of line A, and then some of B.
    fn steps(a: u64, b: u64) -> Vec<(u64, f32)> {
        let a_steps = (1..=a).map(|step| (step, 1.0));
        a_steps.chain((a + 1..=b).map(|step| (step, 2.0))).collect()
    }

    #[test]
    fn a_run_that_goes_back_to_a_line_has_its_log_and_its_checkpoints() {
        let place = Place::two_lines(8);
        let abandoned = place.checkpoints().abandoned().to_path_buf();
        assert_eq!(place.logged(), steps(4, 8));
        place.resume(Some(&abandoned.join("step-00000012")), 12, 3);
        assert_eq!(place.logged(), steps(12, 12));
        assert_eq!(place.names(), ["step-00000004", "step-00000012"]);
        // And to the other one.
        place.resume(Some(&abandoned.join("step-00000008-2")), 8, 3);
        assert_eq!(place.logged(), steps(4, 8));
        assert_eq!(place.names(), ["step-00000004", "step-00000008"]);
    }

    /// Whenever a run is killed while it goes from one line to another, what goes on next has the log of its
    /// checkpoint's line.
    #[test]
    fn a_run_that_is_killed_between_two_lines_is_on_one() {
        for parts in 0..3 {
            let place = Place::two_lines(8);
            let source = place.checkpoints().abandoned().join("step-00000012");
            place.resume(Some(&source), 12, parts);
            let last = place.checkpoints().last().unwrap();
            let Some(Entry::Checkpoint { step, .. }) = entry_of(&last) else {
                panic!("a checkpoint has a name")
            };
            place.resume(Some(&last), step, 3);
            let expected = match (parts, step) {
                (0, 8) => steps(4, 8),
                (1, 4) => steps(4, 4),
                (2, 12) => steps(12, 12),
                other => panic!("{other:?}"),
            };
            assert_eq!(place.logged(), expected, "killed after {parts} parts");
            // What was left is whole, too.
            place.resume(Some(&source), 12, 3);
            assert_eq!(place.logged(), steps(12, 12));

            // A line without a checkpoint, which could take its log along, keeps it all the same.
            let place = Place::two_lines(7);
            let source = place.checkpoints().abandoned().join("step-00000012");
            place.resume(Some(&source), 12, parts);
            place.resume(Some(&source), 12, 3);
            assert_eq!(place.logged(), steps(12, 12));
            assert!(
                place.logged_aside().contains(&steps(4, 7)),
                "killed after {parts} parts"
            );
        }
    }

    /// A checkpoint that somebody has copied is of the line that names it.
    #[test]
    fn a_copy_of_a_checkpoint_is_of_the_line_that_names_it() {
        let place = Place::new();
        let (mut log, _) = place.resume(None, 0, 3).unwrap();
        place.train("A", &mut log, 0, 12);
        let best = place.run().join("best");
        std::fs::create_dir(&best).unwrap();
        let all = place.checkpoints().list();
        for name in ["model.safetensors", "optimizer.mpk", "state.json"] {
            std::fs::copy(all[1].join(name), best.join(name)).unwrap();
        }
        let (mut log, _) = place.resume(Some(&all[0]), 4, 3).unwrap();
        place.train("BB", &mut log, 4, 11);
        place.resume(Some(&best), 8, 3);
        assert_eq!(place.logged(), steps(8, 8));
        assert_eq!(place.names(), ["step-00000004", "step-00000008"]);
    }

    #[test]
    fn a_log_that_no_checkpoint_takes_along_is_kept() {
        let place = Place::new();
        let (mut log, copy) = place.resume(None, 0, 3).unwrap();
        assert_eq!(copy, None, "there is none");
        place.train("A", &mut log, 0, 3);
        let before = std::fs::read(place.run().join(LOG)).unwrap();
        let (mut log, copy) = place.resume(None, 0, 3).unwrap();
        assert_eq!(std::fs::read(copy.unwrap()).unwrap(), before);
        assert!(place.logged().is_empty());
        place.train("A", &mut log, 0, 11);
        // Steps that are done again as they were.
        let last = place.checkpoints().last().unwrap();
        let (mut log, copy) = place.resume(Some(&last), 8, 3).unwrap();
        assert_eq!(copy, None);
        // Later checkpoints that are somewhere else by now.
        place.train("A", &mut log, 8, 12);
        std::fs::remove_dir_all(place.checkpoints().last().unwrap()).unwrap();
        let (_, copy) = place.resume(Some(&last), 8, 3).unwrap();
        assert_eq!(copy, Some(place.checkpoints().abandoned().join("log-2.jsonl")));
    }

    /// Logs of earlier versions name no checkpoints.
    #[test]
    fn a_run_of_an_earlier_version_stays_on_its_line() {
        let place = Place::of_an_earlier_version(9);
        let [_, last] = [4, 8].map(|step| place.checkpoint("A", step));
        place.resume(Some(&last), 8, 3);
        assert_eq!(place.logged().len(), 8);
        assert_eq!(place.names(), ["step-00000004", "step-00000008"]);
        let log = log::read(place.run()).unwrap();
        assert!(log.contains(&entry_of(&last).unwrap()), "it is named from now on");
    }

    /// Nor do such logs show of which line a checkpoint is that both have.
    #[test]
    fn a_line_of_an_earlier_version_comes_back_with_what_both_lines_have() {
        let place = Place::of_an_earlier_version(12);
        let [fourth, ..] = [4, 8, 12].map(|step| place.checkpoint("A", step));
        let (mut log, _) = place.resume(Some(&fourth), 4, 3).unwrap();
        place.train("BB", &mut log, 4, 8);
        let abandoned = place.checkpoints().abandoned().to_path_buf();
        place.resume(Some(&abandoned.join("step-00000012")), 12, 3);
        assert_eq!(place.names(), ["step-00000004", "step-00000012"]);
        assert_eq!(place.logged().len(), 12);
        assert!(abandoned.join("step-00000008-2").is_dir());
    }
}
