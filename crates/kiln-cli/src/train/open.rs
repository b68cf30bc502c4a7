//! A run before its first step: what it starts from, and that a resumed run is the one that it goes on with.

use std::path::{Path, PathBuf};
use std::time::Instant;

use burn::tensor::backend::Backend;
use kiln::Kiln;
use kiln_hub::data::DataError;
use kiln_hub::{Checkpoint, write_bytes_atomic};

use super::checkpoint::{Checkpoints, damaged, read_optimizer, read_state};
use super::evaluate::Evaluator;
use super::folder::CONFIG;
use super::line::Line;
use super::log::{self, Entry, Log};
use super::ranks::Ranks;
use super::state::State;
use super::trainer::{SavedState, Setting, Together, TrainBackend, build as build_trainer};
use super::utilization::Utilization;
use super::{Run, compile_options, device, weights};
use crate::architecture::Architecture;
use crate::config::{Config, DataSource, Difference, Kept};
use crate::data::{Data, HeldOut, Prepared, pretrained_tokenizer};
use crate::error::CliError;
use crate::generate::check_sample;
use crate::model::{Family, Heads, freeze, initialise, not_finite};

impl Run {
    /// Prepares a run in `folder`, from the checkpoint `from` if there is one. Prepared files of the data are
    /// in `data`, if not in the run's own folder; that is another run's, and stays as it is.
    pub(super) fn open(
        config: Config,
        folder: PathBuf,
        data: Option<&Path>,
        from: Option<&Path>,
        ranks: Ranks,
    ) -> Result<Self, CliError> {
        let folder = ranks.folder(folder)?;
        let written = config.to_toml()?;
        let config = ranks.config(config);
        let options = compile_options(&config, "train_step")?.with_threads(ranks.threads());
        let family = Family::of(&config.model.name)?;
        family.check(config.data.source)?;
        std::fs::create_dir_all(&folder).map_err(CliError::io("create", &folder))?;
        let state = from.map(read_state).transpose()?;
        if let (Some(state), Some(from)) = (&state, from) {
            state.check_optimizer(from, config.optimizer.name)?;
        }
        let device = device(&config)?;

        // Weights to start from determine tokenizer and sizes; a resumed run has both beside its own
        // weights.
        let start_from = match (&from, &config.model.weights) {
            (Some(from), _) => {
                Some(Checkpoint::open(from).map_err(|error| damaged(from, error.to_string()))?)
            }
            (None, Some(name)) => Some(kiln_hub::load(name)?),
            (None, None) => None,
        };
        let prepared = data.map_or_else(|| folder.join("data"), Path::to_path_buf);
        if ranks.is_first() {
            // The others look when this rank has prepared the folder, and would see its changes.
            let saved = saved_config(&folder)?;
            if let (Some(state), Some(from)) = (&state, from) {
                state.check_model(from, saved.as_ref().map(|saved| &saved.model), &config.model)?;
            } else if let Some(saved) = &saved {
                has_no_checkpoint(&folder, saved)?;
            }
            same_data(&prepared, saved.as_ref(), &config, from)?;
            if from.is_none() {
                // The config is that of what is prepared now. A run that goes on keeps its own until it is
                // known to be the same run.
                write_bytes_atomic(&folder.join(CONFIG), written.as_bytes())?;
            }
            if data.is_none() {
                std::fs::create_dir_all(&prepared).map_err(CliError::io("create", &prepared))?;
                config.kept().save(&prepared)?;
            }
        }
        let mut files = Prepared::new(&prepared);
        if data.is_some() {
            files = files.read_only(&config)?;
        }
        if let (Some(state), Some(checkpoint)) = (&state, &start_from) {
            files = files.with_counts(state.classes.clone(), state.tokens);
            files = files.with_tokenizer_of(checkpoint, family)?;
        }
        let pretrained = pretrained_tokenizer(start_from.as_ref(), family)?;
        let held_out = state.as_ref().map_or(HeldOut::Random, |state| state.held_out);
        let data = Data::open_prepared(&config, &device, &files, pretrained, held_out)?;
        let data = data.with_share(ranks.share());
        ranks.prepared(&folder)?;
        ranks.agree_on(state.as_ref())?;
        Kiln::seed(&device, config.seed);
        let architecture = match (&from, &start_from) {
            (Some(_), Some(checkpoint)) => {
                let architecture = Architecture::read(checkpoint)?;
                architecture.check(&config, &data)?;
                architecture
            }
            _ => Architecture::resolve(&config, start_from.as_ref(), &data)?,
        };
        check_sample(&config.sample, &architecture, &data)?;
        let mut model = architecture.init::<TrainBackend>(&device)?;
        if let Some(checkpoint) = &start_from {
            let heads = if from.is_some() { Heads::Stored } else { Heads::New };
            model = model.load(checkpoint, heads).map_err(|error| match from {
                Some(from) => damaged(from, error.to_string()),
                None => error,
            })?;
        }
        let order = initialise(&model);
        // Errors of the run name its last checkpoint as one with finite parameters.
        if let Some(from) = from
            && let Some((path, value)) = not_finite(&model)?
        {
            return Err(damaged(from, format!("the parameter {path} is {value}")));
        }
        let model = freeze(model, &config.model.freeze)?;
        let saved = from
            .map(|from| {
                Ok::<_, CliError>(SavedState {
                    bytes: read_optimizer(from)?,
                    order: &order,
                    loss_scale: state.as_ref().and_then(State::loss_scale),
                })
            })
            .transpose()?;
        let utilization = Utilization::new(device, options.clone());
        let setting = Setting {
            options,
            weights: weights(&config)?,
            state: saved,
            together: Some(Together {
                world: ranks.world(),
                sharded: config.distributed.sharded_state,
                synchronised: config.distributed.synchronised_batch_norm,
            }),
        };
        let trainer = build_trainer(model, &config.optimizer, setting)?;
        let batches = data.train(state.as_ref().map(|state| state.data));
        let batches = batches.map_err(|error| match from {
            Some(from) => differs(error, &config, from),
            None => error,
        })?;
        let step = state.as_ref().map_or(0, |state| state.step);
        let evaluating = compile_options(&config, "evaluate")?.with_threads(ranks.threads());
        let evaluator = Evaluator::new(&config, evaluating, device);
        // The random generator is restored last, because preparing the model has drawn random numbers.
        if let Some(state) = &state {
            state.restore_random();
        }
        ranks.share_random()?;
        Ok(Self {
            config,
            written,
            folder,
            device,
            ranks,
            data,
            held_out,
            architecture,
            trainer,
            order,
            batches,
            evaluator,
            log: Log::nowhere(),
            utilization,
            step,
            under_way: None,
            read_at: Instant::now(),
            profile: None,
            trace: Ok(()),
            last_checkpoint: from.map(Path::to_path_buf),
            saved: from.map(|_| step),
            abandoned: Vec::new(),
            old_log: None,
        })
    }

    /// Makes the run's folder that of the run: until here, all that could have been another run's has been
    /// compared, and the folder is as before, except for what is prepared.
    ///
    /// A checkpoint that lies elsewhere, such as one that was set aside, is copied to where a later resume
    /// finds it, and takes the place of one of the same step. The log follows it.
    pub(super) fn take_over(&mut self) -> Result<(), CliError> {
        if self.ranks.is_first() {
            let checkpoints = Checkpoints::of(&self.folder);
            let source = self.last_checkpoint.take();
            let line = Line::of(&self.folder, source.as_deref())?;
            let taken = checkpoints.go_on_from(source.as_deref(), self.step, &line);
            let full = |error: CliError| error.of_checkpoint(&self.folder, source.as_deref());
            let (from, aside) = taken.map_err(full)?;
            write_bytes_atomic(&self.folder.join(CONFIG), self.written.as_bytes())?;
            (self.log, self.old_log) =
                line.go_on(&self.folder, from.as_deref(), self.step, aside.took_log)?;
            (self.last_checkpoint, self.abandoned) = (from, aside.moved);
        }
        // The copy of a large checkpoint takes long.
        self.ranks.any_patiently(false)?;
        Ok(())
    }
}

/// The config that the run in `folder` has; none if it is new.
fn saved_config(folder: &Path) -> Result<Option<Config>, CliError> {
    let path = folder.join(CONFIG);
    if !path.exists() {
        return Ok(None);
    }
    match Config::read(&path, &[]) {
        Ok(config) => Ok(Some(config)),
        Err(CliError::Config { place, reason }) => Err(CliError::config(
            place,
            format!(
                "{}\n  the run cannot be compared with what it is to go on with: correct this file, or copy the config \
                 that the run was started with over it",
                reason.trim_end()
            ),
        )),
        Err(error) => Err(error),
    }
}

/// Makes sure that the run in `folder`, which has no checkpoint, never had one: it ended before its first one
/// was due, and begins again.
fn has_no_checkpoint(folder: &Path, saved: &Config) -> Result<(), CliError> {
    let checkpoints = Checkpoints::of(folder);
    let entries = log::read(folder)?;
    let last = entries.iter().map(Entry::step).max().unwrap_or(0);
    let written = entries.iter().rev().find(|entry| entry.is_checkpoint());
    // A log of an earlier version does not say when checkpoints were written. The step behind a checkpoint is
    // logged when the checkpoint is written.
    let every = saved.train.checkpoint_every;
    let had_some = !entries.contains(&Entry::Start) && every > 0 && last > every;
    let put_back = format!("put a checkpoint back into {}", checkpoints.folder().display());
    let (reason, remedy) = match (checkpoints.list_abandoned().pop(), written) {
        (Some(moved), _) => (
            format!(
                "some that were set aside are in {}",
                checkpoints.abandoned().display()
            ),
            format!(
                "go on from one of them, as with `kiln train --resume {}`",
                moved.display()
            ),
        ),
        (None, Some(entry)) => (
            format!("its log says that one was written after step {}", entry.step()),
            put_back,
        ),
        (None, None) if had_some => (
            format!("its log has {last} steps, and one was written every {every}"),
            put_back,
        ),
        (None, None) => return Ok(()),
    };
    Err(CliError::NoneLeft {
        run: folder.to_path_buf(),
        reason,
        remedy,
    })
}

/// Makes sure that a run asks for the data that it has prepared, which it has in any case. What it has not
/// prepared yet may change until there is a checkpoint. Runs of earlier versions have only their config to
/// tell.
fn same_data(
    prepared: &Path,
    saved: Option<&Config>,
    now: &Config,
    from: Option<&Path>,
) -> Result<(), CliError> {
    let Some(saved) = Kept::read(prepared)?.or_else(|| Some(saved?.kept())) else {
        return Ok(());
    };
    let is_kept = |file: &str| from.is_some() || prepared.join(file).exists();
    match saved.difference(&now.kept(), is_kept) {
        None => Ok(()),
        Some(Difference { key, before, now }) => Err(CliError::Prepared {
            what: key,
            saved: before,
            now,
            prepared: prepared.to_path_buf(),
        }),
    }
}

/// The error of data at which a run of `config` cannot go on from the checkpoint `from`.
fn differs(error: CliError, config: &Config, from: &Path) -> CliError {
    let CliError::Data(DataError::Resume { what, saved, now }) = error else {
        return error;
    };
    let what = match what {
        "batch size" => "train.batch_size",
        "number of examples" => match config.data.source {
            DataSource::Shapes => "data.examples",
            _ => "the number of examples (data.paths, data.length, data.evaluation_fraction)",
        },
        other => other,
    };
    CliError::Differs {
        what: what.to_owned(),
        saved: saved.to_string(),
        now: now.to_string(),
        path: from.to_path_buf(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CONFIG: &str = "[model]\nname = \"llama-tiny\"\n[data]\nsource = \"text\"\n[train]\n";

    /// A run without a checkpoint was killed before its first one, or has lost them.
    #[test]
    fn a_run_that_had_checkpoints_does_not_begin_again() {
        let place = tempfile::tempdir().unwrap();
        let run = place.path();
        let check = |every: u64| {
            let set = format!("train.checkpoint_every={every}");
            has_no_checkpoint(run, &Config::parse(CONFIG, "x.toml", &[set]).unwrap())
        };
        let lines = |count| {
            let line = |step| {
                format!("{{\"kind\":\"evaluation\",\"step\":{step},\"loss\":1.0,\"accuracy\":null}}\n")
            };
            std::fs::write(run.join("log.jsonl"), (1..=count).map(line).collect::<String>()).unwrap();
        };
        assert!(check(4).is_ok());
        // It may have been killed while it wrote the first one.
        lines(4);
        assert!(check(4).is_ok());
        lines(5);
        assert!(check(5).is_ok() && check(0).is_ok());
        let error = check(4).unwrap_err().to_string();
        for part in [
            "5 steps",
            "every 4",
            "/checkpoints, or start another run",
            "config.toml` and --out",
        ] {
            assert!(error.contains(part), "{part}: {error}");
        }
        let moved = run.join("abandoned/step-00000004");
        std::fs::create_dir_all(&moved).unwrap();
        std::fs::write(moved.join("state.json"), "").unwrap();
        let error = check(0).unwrap_err().to_string();
        assert!(
            error.contains(&format!("--resume {}", moved.display())),
            "{error}"
        );
    }

    /// A log that names checkpoints says whether there was one, whatever the settings are now.
    #[test]
    fn a_log_that_names_checkpoints_answers_for_them() {
        let place = tempfile::tempdir().unwrap();
        let run = place.path();
        let check = || {
            let set = ["train.checkpoint_every=4", "train.checkpoint_minutes=10.0"];
            has_no_checkpoint(
                run,
                &Config::parse(CONFIG, "x.toml", &set.map(String::from)).unwrap(),
            )
        };
        let evaluation = Entry::Evaluation {
            step: 100,
            loss: 1.0,
            accuracy: None,
        };
        let mut log = Log::begin(run, vec![Entry::Start, evaluation]).unwrap();
        assert!(check().is_ok(), "it was killed before the first one");
        log.add(Entry::Checkpoint {
            step: 2,
            weights: String::new(),
        });
        let error = check().unwrap_err().to_string();
        assert!(error.contains("after step 2"), "{error}");
    }
}
