//! A run before its first step: what it starts from, and that a resumed run is the one that it goes on with.

use std::path::{Path, PathBuf};
use std::time::Instant;

use burn::tensor::backend::Backend;
use kiln::Kiln;
use kiln_hub::data::DataError;
use kiln_hub::{Checkpoint, write_bytes_atomic};

use super::checkpoint::{Checkpoints, State, damaged, read_optimizer, read_state};
use super::evaluate::Evaluator;
use super::log::Log;
use super::ranks::Ranks;
use super::trainer::{SavedState, Setting, Together, TrainBackend, build as build_trainer};
use super::utilization::Utilization;
use super::{Run, compile_options, device};
use crate::architecture::Architecture;
use crate::args::parse_weights;
use crate::config::Config;
use crate::data::{Data, HeldOut, pretrained_tokenizer};
use crate::error::CliError;
use crate::generate::check_sample;
use crate::model::{Family, Heads, freeze, initialise, not_finite};

impl Run {
    /// Prepares a run in `folder`, from the checkpoint `from` if there is one. Prepared files of the data are
    /// in `data`, if not in the run's own folder.
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
        let pretrained = pretrained_tokenizer(start_from.as_ref(), family)?;
        let write_config = || match ranks.is_first() {
            true => write_bytes_atomic(&folder.join("config.toml"), written.as_bytes()),
            false => Ok(()),
        };
        // A resumed run that turns out to be another one keeps its config.
        let path = folder.join("config.toml");
        let is_new = !path.exists();
        if is_new {
            write_config()?;
        } else if let Ok(saved) = Config::read(&path, &[]) {
            if let Some(from) = from {
                same_model(&saved, &config, from)?;
            }
            same_data(&saved, &config, &folder, from)?;
        }
        let held_out = state.as_ref().map_or(HeldOut::Random, |state| state.held_out);
        let prepared = data.map_or_else(|| folder.join("data"), Path::to_path_buf);
        // The tokenizer of a resumed run is that of its checkpoint, even if its prepared files are gone.
        let kept = prepared.join("tokenizer.json");
        if let (Some(_), Some(tokenizer), true) = (from, &pretrained, ranks.is_first())
            && !kept.exists()
        {
            std::fs::create_dir_all(&prepared).map_err(CliError::io("create", &prepared))?;
            tokenizer.save(&kept)?;
        }
        let data = Data::open(&config, &device, &prepared, pretrained, held_out)?;
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
        let (model, frozen) = freeze(model, &config.model.freeze);
        if frozen == 0 && !config.model.freeze.is_empty() {
            return Err(CliError::config(
                "model.freeze",
                "no parameter has a path that begins with one of these; a path is that of kiln-models, such as \
                 bert.encoder.layer.0",
            ));
        }
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
            weights: parse_weights(&config.train.weights)
                .map_err(|error| CliError::config("train.weights", error))?,
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
            Some(from) => differs(error, from),
            None => error,
        })?;
        let step = state.as_ref().map_or(0, |state| state.step);
        let evaluating = compile_options(&config, "evaluate")?.with_threads(ranks.threads());
        let evaluator = Evaluator::new(&config, evaluating, device);
        // All that could have been another run's has been compared.
        if !is_new {
            write_config()?;
        }
        // A checkpoint that lies elsewhere, such as one that was set aside, is written again, and goes before
        // one of the same step. All ranks say the same, since they may write it together.
        let is_elsewhere = from.is_some_and(|from| !Checkpoints::of(&folder).holds(from, step));
        let is_elsewhere = ranks.any(is_elsewhere)?;
        let last = step.saturating_sub(u64::from(is_elsewhere));
        let abandoned = match ranks.is_first() {
            true => Checkpoints::of(&folder).set_aside(last)?,
            false => Vec::new(),
        };
        let log = match ranks.is_first() {
            true => Log::open(&folder, step)?,
            false => Log::nowhere(),
        };
        // The random generator is restored last, because preparing the model has drawn random numbers.
        if let Some(state) = &state {
            state.restore_random();
        }
        ranks.share_random()?;
        let last_checkpoint = from.map(Path::to_path_buf);
        let saved = from.filter(|_| !is_elsewhere).map(|_| step);
        Ok(Self {
            config,
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
            log,
            utilization,
            step,
            under_way: None,
            read_at: Instant::now(),
            profile: None,
            trace: Ok(()),
            last_checkpoint,
            saved,
            abandoned,
        })
    }
}

/// Makes sure that a resumed run asks for the model of its checkpoint `from`, whose sizes it would have in
/// any case.
fn same_model(saved: &Config, now: &Config, from: &Path) -> Result<(), CliError> {
    let pairs = saved.model.fixed().into_iter().zip(now.model.fixed());
    match pairs.into_iter().find(|(saved, now)| saved != now) {
        None => Ok(()),
        Some(((what, saved), (_, now))) => Err(CliError::Differs {
            what: what.to_owned(),
            saved,
            now,
            path: from.to_path_buf(),
        }),
    }
}

/// Makes sure that a resumed run asks for the data that it has prepared in its folder, which it has in any
/// case. What it has not prepared yet may change until there is a checkpoint.
fn same_data(saved: &Config, now: &Config, folder: &Path, from: Option<&Path>) -> Result<(), CliError> {
    let saved = saved.data.kept();
    for (file, what, now) in now.data.kept() {
        let before = saved.iter().find(|(_, key, _)| *key == what);
        if let Some((_, _, before)) = before
            && *before != now
            && (from.is_some() || folder.join("data").join(file).exists())
        {
            return Err(CliError::Prepared {
                what: what.to_owned(),
                saved: before.clone(),
                now,
                run: folder.to_path_buf(),
            });
        }
    }
    Ok(())
}

/// The error of data at which a run cannot go on from the checkpoint `from`.
fn differs(error: CliError, from: &Path) -> CliError {
    let CliError::Data(DataError::Resume { what, saved, now }) = error else {
        return error;
    };
    let what = match what {
        "batch size" => "train.batch_size",
        "number of examples" => "the number of examples (data.paths, data.length, data.evaluation_fraction)",
        other => other,
    };
    CliError::Differs {
        what: what.to_owned(),
        saved: saved.to_string(),
        now: now.to_string(),
        path: from.to_path_buf(),
    }
}
