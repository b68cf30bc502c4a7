//! `kiln train` and `kiln eval`: a run from a config.
//!
//! ```text
//! config ─► data ─► architecture ─► model ─► training step ─► loop: batch, step, log │ evaluation │ checkpoint
//! ```
//!
//! **Exact resume.** A run is a function of its config. Five things change while it runs: the model, the
//! optimizer's state, the place in the data, the random generator's state and the step's number. A
//! checkpoint has these five, so that the losses after a resume are those of a run that was never stopped,
//! bit for bit. Nothing in the loop may depend on anything else: the learning rate is a function of the
//! step's number, evaluations draw no random numbers.

mod checkpoint;
mod copy;
pub(crate) mod curves;
mod evaluate;
pub mod export;
mod folder;
mod interrupt;
mod line;
mod log;
mod open;
mod place;
mod profile;
mod progress;
mod ranks;
mod settings;
mod state;
mod trainer;
mod utilization;

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Instant;

use burn::module::ParamId;
use kiln::{CompileBackend, CompileOptions, Kiln, KilnDevice, Place};
use kiln_hub::data::Batches;
use kiln_hub::{Checkpoint, write_bytes_atomic};
use kiln_profile::Category;

use crate::architecture::Architecture;
use crate::args::{EvalArguments, TrainArguments, WeightsArgument, parse_autocast, parse_weights};
use crate::config::Config;
use crate::data::{Data, HeldOut, HostBatch, Prepared};
use crate::error::CliError;
use crate::model::{Family, Heads, not_finite, without_autodiff};
use crate::show;
pub use checkpoint::Checkpoints;
use checkpoint::{damaged, read_state};
use evaluate::Evaluator;
use folder::Claim;
use log::{Entry, Log};
pub use place::locate;
use profile::StepProfile;
pub use progress::peak_memory_mb;
use progress::{Progress, StepNumbers};
use ranks::Ranks;
pub use ranks::{divides, threads};
use settings::Settings;
pub use settings::decodes_on_device;
use state::{State, entry_of};
use trainer::Loss;
pub use trainer::{Setting, Together, TrainBackend, Trainer, build as build_trainer};
use utilization::Utilization;

/// `kiln train`.
///
/// # Errors
///
/// Everything that can be wrong with a config, its data and its checkpoints, each as a [`CliError`] that says
/// what to do.
pub fn command(arguments: &TrainArguments) -> Result<ExitCode, CliError> {
    let Settings { config, folder, from } = Settings::of(arguments)?;
    let ranks = Ranks::connect(&config)?;
    // Until the command ends.
    let claim = match (&folder, &arguments.resume) {
        _ if !ranks.is_first() => None,
        (Some(folder), Some(place)) => Some(Claim::resume(folder, from.as_deref(), place)?),
        _ => Some(Claim::start(arguments.out.as_deref(), &config.name)?),
    };
    // Of a new run, rank 0 tells it.
    let folder = folder.or_else(|| Some(claim.as_ref()?.folder().to_path_buf()));
    let folder = folder.unwrap_or_default();
    let profile = arguments
        .profile
        .map(|steps| StepProfile::start(steps, ranks.rank()));
    let mut run = Run::open(config, folder, None, from.as_deref(), ranks)?;
    run.profile = profile;
    run.take_over()?;
    interrupt::install();
    run.go()
}

/// `kiln eval`. The run's folder stays as it is, and may be that of a run which trains: examples of other
/// settings than those that it has prepared are read and encoded anew.
///
/// # Errors
///
/// As [`command`]; [`CliError::Usage`] if the run's config sets nothing aside.
pub fn evaluate_command(arguments: &EvalArguments) -> Result<(), CliError> {
    loop {
        let (folder, from) = locate(&arguments.run)?;
        let from = from.ok_or_else(|| CliError::NoCheckpoint { path: folder.clone() })?;
        let evaluated = evaluate(arguments, &folder, &from);
        // A run that trains removes its old checkpoints; there is a newer one then.
        if evaluated.is_ok() || from.exists() {
            return evaluated;
        }
    }
}

/// Evaluates checkpoint `from` of the run in `folder`.
fn evaluate(arguments: &EvalArguments, folder: &Path, from: &Path) -> Result<(), CliError> {
    let mut config = Config::read(&folder.join("config.toml"), &[])?;
    if let Some(backend) = arguments.backend {
        config.train.backend = backend.name().to_owned();
    }
    if let Some(device) = arguments.device {
        config.train.device = device.to_string();
    }
    // Of an evaluation asked for by hand, all of it.
    config.train.evaluation_batches = usize::MAX;
    let state = read_state(from)?;
    state.check_model(from, None, &config.model)?;
    let on = device(&config)?;
    let weights = Checkpoint::open(from).map_err(|error| damaged(from, error.to_string()))?;
    let prepared = Prepared::new(&folder.join("data"))
        .read_only(&config)?
        .with_counts(state.classes.clone(), state.tokens)
        .with_tokenizer_of(&weights, Family::of(&config.model.name)?)?;
    let data = Data::open_prepared(&config, &on, &prepared, None, state.held_out)?;
    let architecture = Architecture::read(&weights)?;
    architecture.check(&config, &data)?;
    let model = architecture.init::<Kiln>(&on)?.load(&weights, Heads::Stored)?;
    let mut evaluator = Evaluator::new(&config, compile_options(&config, "evaluate")?, on);
    let result = evaluator.run(&model, &data)?.ok_or_else(|| {
        CliError::Usage("this run sets no examples aside: data.evaluation_fraction is 0 and data.evaluation_paths is empty"
                .to_owned())
    })?;
    show::line(format_args!("step {}: {result}", state.step));
    result.check(state.step, folder)
}

/// How the steps of a config are compiled.
///
/// # Errors
///
/// [`CliError::Config`] if a name is none of those there are.
pub fn compile_options(config: &Config, name: &str) -> Result<CompileOptions, CliError> {
    let backend: CompileBackend = config
        .train
        .backend
        .parse()
        .map_err(|error: kiln::UnknownBackend| CliError::config("train.backend", error))?;
    let options = CompileOptions::default()
        .with_backend(backend)
        .with_tf32(config.train.tf32)
        .with_name(name);
    let options = match config.train.autocast.as_str() {
        "none" => options,
        name => {
            let dtype = parse_autocast(name);
            options.with_autocast(dtype.map_err(|error| CliError::config("train.autocast", error))?)
        }
    };
    let options = match config.distributed.buckets() {
        Some(buckets) => options.with_buckets(buckets),
        None => options,
    };
    Ok(match config.train.memory_budget_mb {
        0 => options,
        budget => options.with_memory_budget(budget << 20),
    })
}

/// How parameters are stored.
///
/// # Errors
///
/// [`CliError::Config`] if the name is none of those there are.
pub fn weights(config: &Config) -> Result<WeightsArgument, CliError> {
    parse_weights(&config.train.weights).map_err(|error| CliError::config("train.weights", error))
}

/// Where the steps of a config run.
///
/// # Errors
///
/// [`CliError::Config`] if the name is that of no device.
pub fn device(config: &Config) -> Result<KilnDevice, CliError> {
    let device = config.train.device.parse();
    device.map_err(|error: kiln::UnknownDevice| CliError::config("train.device", error))
}

/// A step that was queued and whose loss has not been looked at.
///
/// A GPU goes from one step to the next without a break if the next one is queued by then. So the loop looks
/// at a loss when it has queued the step behind it.
struct UnderWay {
    /// Its number, from 1.
    step: u64,
    rate: f64,
    /// What was trained on: tokens, images.
    units: usize,
    loss: Loss,
    /// Seconds that the host has waited for other ranks.
    exposed: Option<f64>,
    begun: Instant,
}

/// A run that is going on.
struct Run {
    config: Config,
    /// The config as it is written: that of all ranks.
    written: String,
    folder: PathBuf,
    device: KilnDevice,
    ranks: Ranks,
    data: Data,
    /// How its examples for evaluation were chosen.
    held_out: HeldOut,
    architecture: Architecture,
    trainer: Box<dyn Trainer>,
    /// Ids of the model's parameters in order.
    order: Vec<ParamId>,
    batches: Batches<HostBatch>,
    evaluator: Evaluator,
    log: Log,
    utilization: Utilization,
    /// Steps done, or queued.
    step: u64,
    under_way: Option<UnderWay>,
    /// When the last loss was there.
    read_at: Instant,
    profile: Option<StepProfile>,
    /// Why the trace could not be written, which ends the run only after all else is.
    trace: Result<(), CliError>,
    last_checkpoint: Option<PathBuf>,
    /// The step of the last checkpoint.
    saved: Option<u64>,
    /// Checkpoints that were set aside when the run was resumed.
    abandoned: Vec<PathBuf>,
    /// The log of steps before, if the run goes on without them and no checkpoint has it.
    old_log: Option<PathBuf>,
}

impl Run {
    fn go(&mut self) -> Result<ExitCode, CliError> {
        let steps = self.config.train.steps;
        let parameters = kiln_models::params::num_trainable(self.trainer.model()?);
        let mut progress = match self.ranks.is_first() {
            true => Progress::new(steps, self.step, self.data.unit, self.config.train.log_every),
            false => Progress::silent(),
        };
        let model = &self.config.model;
        progress.say(&format!(
            "{}: {} with {:.2} million parameters, {} steps of {} {}, in {}",
            self.config.name,
            model.weights.as_ref().unwrap_or(&model.name),
            parameters as f64 * 1e-6,
            steps,
            self.config.train.batch_size * self.config.train.accumulate,
            if self.data.unit == "tokens" {
                "windows"
            } else {
                self.data.unit
            },
            self.folder.display()
        ));
        if self.step > 0 {
            progress.say(&format!("going on after step {}", self.step));
        }
        for moved in &self.abandoned {
            progress.say(&format!(
                "a checkpoint was set aside, with its log: {}",
                moved.display()
            ));
        }
        if let Some(log) = &self.old_log {
            if self.step == 0 {
                progress.say("there is no checkpoint yet: the run begins again, and so does its log");
            }
            progress.say(&format!("the log until now was set aside: {}", log.display()));
        }
        let mut saved_at = Instant::now();
        let mut warned = false;
        while self.step < steps {
            if self.ranks.any(interrupt::is_requested())? {
                self.look(&mut progress)?;
                return self.leave(&progress);
            }
            self.train_step(&mut progress)?;
            if self.profile.as_mut().is_some_and(StepProfile::step_done) {
                self.finish_profile(&progress);
            }
            if let Some(reason) = self
                .trainer
                .history()
                .obstacle
                .as_deref()
                .filter(|_| !std::mem::replace(&mut warned, true))
            {
                progress.say(&format!("the step is recorded at every call: {reason}"));
            }
            let done = self.step;
            let every = |count: u64| count > 0 && done.is_multiple_of(count) && done < steps;
            if every(self.config.train.evaluate_every) {
                self.look(&mut progress)?;
                self.evaluate_or_save(&progress)?;
            }
            let minutes = self.config.train.checkpoint_minutes;
            let mut due = minutes > 0.0 && saved_at.elapsed().as_secs_f64() >= minutes * 60.0;
            if minutes > 0.0 && self.config.distributed.sharded_state {
                // All ranks give their shares at the same step.
                due = self.ranks.any(due)?;
            }
            if every(self.config.train.checkpoint_every) || (due && self.step < steps) {
                self.look(&mut progress)?;
                self.save()?;
                self.remove_old();
                self.draw(&progress);
                saved_at = Instant::now();
            }
        }
        self.look(&mut progress)?;
        progress.finish();
        self.finish_profile(&progress);
        self.save()?;
        self.evaluate_or_save(&progress)?;
        self.remove_old();
        self.draw(&progress);
        self.finish(&progress)?;
        std::mem::replace(&mut self.trace, Ok(()))?;
        Ok(ExitCode::SUCCESS)
    }

    fn train_step(&mut self, progress: &mut Progress) -> Result<(), CliError> {
        let (step, steps) = (self.step, self.config.train.steps);
        let begun = Instant::now();
        let mut units = 0;
        let mut batches = Vec::with_capacity(self.config.train.accumulate);
        let loading = kiln_profile::span(Category::Data, "wait for data");
        for _ in 0..self.config.train.accumulate {
            let batch = self
                .batches
                .next()
                .ok_or_else(|| CliError::Usage("the training data ended".to_owned()))??;
            // A rank's share of the batch. All have as many examples.
            units += batch.units() * self.ranks.world().size();
            batches.push(batch);
        }
        drop(loading);
        let inputs = batches.into_iter().map(|batch| batch.tensors(&self.device));
        let inputs = inputs.collect::<Result<_, _>>()?;
        let rate = self.config.schedule.rate(step, steps);
        let before = self.ranks.world().waited();
        let recorded = self.trainer.history().recorded;
        let loss = match self.trainer.step(rate, inputs) {
            Ok(loss) => loss,
            Err(error) => {
                // What is wrong may be wrong since the step before.
                self.look(progress)?;
                return Err(error);
            }
        };
        let waited = (self.ranks.world().waited() - before).as_secs_f64();
        self.step += 1;
        let before = self.under_way.replace(UnderWay {
            step: self.step,
            rate,
            units,
            loss,
            exposed: self.ranks.are_several().then_some(waited),
            begun,
        });
        if let Some(before) = before {
            self.look_at(before, progress)?;
        }
        // A step that was recorded and one that may be skipped for its loss scale, which says how things
        // stand now, are looked at by themselves, and so are those of a profile.
        let alone = self.trainer.history().recorded > recorded || self.is_scaled() || self.profile.is_some();
        if alone || matches!(self.device.place(), Place::Host) {
            self.look(progress)?;
        }
        Ok(())
    }

    /// Whether steps scale their loss.
    fn is_scaled(&self) -> bool {
        let train = &self.config.train;
        [&train.autocast, &train.weights]
            .iter()
            .any(|kind| kind.starts_with("f16"))
    }

    /// Looks at the loss of the step that is under way, if there is one.
    fn look(&mut self, progress: &mut Progress) -> Result<(), CliError> {
        match self.under_way.take() {
            Some(step) => self.look_at(step, progress),
            None => Ok(()),
        }
    }

    /// Waits for the loss of `done`, and logs the step.
    fn look_at(&mut self, done: UnderWay, progress: &mut Progress) -> Result<(), CliError> {
        let UnderWay {
            step,
            rate,
            units,
            loss,
            exposed,
            begun,
        } = done;
        let loss = loss.read()?;
        // A step that skips a gradient that is not finite goes on, until there is no scale that could shrink.
        let skipped = || self.trainer.loss_scale().is_some_and(|now| now.scale > 1.0);
        if !loss.is_finite() && !skipped() {
            progress.finish();
            return Err(CliError::NotFinite {
                what: "the loss".to_owned(),
                step,
                value: loss,
                checkpoint: self.last_checkpoint.clone(),
            });
        }
        // Steps that overlap share the time.
        let begun = begun.max(self.read_at);
        self.read_at = Instant::now();
        let seconds = self.read_at.duration_since(begun).as_secs_f64();
        let per_second = units as f64 / seconds;
        let memory_mb = match kiln::explain::device_memory_peak(self.device)? {
            Some(bytes) => Some(bytes >> 20),
            None => peak_memory_mb(),
        };
        self.utilization.look(&*self.trainer)?;
        let logged = step == 1 || step.is_multiple_of(self.config.train.log_every);
        let scale = logged.then(|| self.trainer.loss_scale()).flatten();
        self.log.add(Entry::Step {
            loss_scale: scale.map(|now| now.scale),
            skipped: scale.map(|now| now.skipped),
            step,
            loss,
            rate,
            seconds,
            per_second,
            memory_mb,
            exposed,
        });
        progress.step(&StepNumbers {
            step,
            loss,
            seconds,
            per_second,
            memory_mb,
            share: self.utilization.share(seconds),
            exposed,
            skipped: scale.map(|now| now.skipped),
        });
        Ok(())
    }

    /// Evaluates. What ends the run there takes no step with it: all ranks save first, whichever of them
    /// failed, and all end then.
    ///
    /// A model that overflows is not saved: a resumed run would go on from it, and its checkpoints would take
    /// the places of those before it. Nor does a checkpoint whose evaluation failed remove others.
    fn evaluate_or_save(&mut self, progress: &Progress) -> Result<(), CliError> {
        let evaluated = self.evaluate(progress);
        let overflows = matches!(evaluated, Err(CliError::Evaluation { .. }));
        // The others wait: rank 0 may have written its last checkpoint before it evaluated.
        let any = self.ranks.any_patiently(evaluated.is_err());
        let any = any.and_then(|failed| Ok((failed, failed && self.ranks.any_patiently(overflows)?)));
        let (failed, overflows) = match any {
            Err(_) if evaluated.is_err() => return evaluated,
            any => any?,
        };
        if failed {
            progress.finish();
            let saved = if overflows { Ok(()) } else { self.save() };
            self.draw(progress);
            // A launcher ends all ranks when the first one ends: none does before rank 0 has written.
            let all = self.ranks.any_patiently(saved.is_err());
            saved?;
            if evaluated.is_ok() {
                all?;
                return Err(CliError::OtherRank);
            }
        }
        evaluated
    }

    fn evaluate(&mut self, progress: &Progress) -> Result<(), CliError> {
        let model = without_autodiff(self.trainer.model()?);
        if let Some(result) = self.evaluator.run(&model, &self.data)? {
            progress.say(&format!("step {}: {result}", self.step));
            self.log.add(Entry::Evaluation {
                step: self.step,
                loss: result.loss,
                accuracy: result.accuracy,
            });
            result.check(self.step, &self.folder)?;
        }
        Ok(())
    }

    /// Writes a checkpoint of the steps done, unless there is one. Those before it stay, until
    /// [`Run::remove_old`].
    fn save(&mut self) -> Result<(), CliError> {
        if self.saved.replace(self.step) == Some(self.step) {
            return Ok(());
        }
        if !self.ranks.is_first() {
            return match self.config.distributed.sharded_state {
                true => self.trainer.give_state(),
                false => Ok(()),
            };
        }
        let scale = self.trainer.loss_scale();
        let (place, name) = (self.batches.state(), self.config.optimizer.name);
        let state = State {
            model: self.config.model.fixed(),
            classes: self.data.classes.clone(),
            tokens: self.data.tokens,
            ..State::now(self.step, place, scale, name, self.held_out)
        };
        let optimizer = self.trainer.optimizer_state(&self.order)?;
        let model = self.trainer.whole_model()?;
        // The loss that was looked at is the one before the update.
        if let Some((path, value)) = not_finite(&model)? {
            return Err(CliError::NotFinite {
                what: format!("the parameter {path}"),
                step: self.step,
                value,
                checkpoint: self.last_checkpoint.clone(),
            });
        }
        let (architecture, tokenizer) = (&self.architecture, &self.data.tokenizer);
        let write = |folder: &Path| {
            model.save(architecture, folder)?;
            if let Some(tokenizer) = tokenizer {
                tokenizer.save(folder.join("tokenizer.json"))?;
            }
            Ok(())
        };
        let written = Checkpoints::of(&self.folder).write(state, &optimizer, write);
        let written = written.map_err(|error| error.of_checkpoint(&self.folder, None))?;
        let entry = entry_of(&written);
        self.last_checkpoint = Some(written);
        if let Some(entry) = entry {
            self.log.add(entry);
        }
        Ok(())
    }

    /// Removes checkpoints that the run does not keep.
    fn remove_old(&self) {
        if let Some(last) = self.last_checkpoint.as_ref().filter(|_| self.ranks.is_first()) {
            Checkpoints::of(&self.folder).remove_old(last, self.config.train.keep);
        }
    }

    /// Draws the curves. Training goes on without a picture that cannot be drawn or written.
    fn draw(&self, progress: &Progress) {
        if !self.ranks.is_first() {
            return;
        }
        let path = self.folder.join("curves.svg");
        let drawn = curves::draw(&self.config.name, self.log.entries())
            .and_then(|svg| Ok(write_bytes_atomic(&path, svg.as_bytes())?));
        if let Err(error) = drawn {
            progress.say(&format!("training goes on without its curves: {error}"));
        }
    }

    /// Ends the profile, if there is one: writes the trace and prints where the time went. Training goes on
    /// without a trace that cannot be written.
    fn finish_profile(&mut self, progress: &Progress) {
        let Some(profile) = self.profile.take() else {
            return;
        };
        self.trace = profile.write(&self.folder);
        if let Err(error) = &self.trace {
            progress.say(&format!("training goes on without its trace: {error}"));
        }
    }

    /// Saves and ends after Ctrl-C.
    fn leave(&mut self, progress: &Progress) -> Result<ExitCode, CliError> {
        progress.finish();
        self.finish_profile(progress);
        self.save()?;
        self.remove_old();
        self.draw(progress);
        progress.say(&format!(
            "stopped after step {}; go on with kiln train --resume {}",
            self.step,
            self.folder.display()
        ));
        std::mem::replace(&mut self.trace, Ok(()))?;
        Ok(ExitCode::from(interrupt::INTERRUPTED))
    }

    /// Prints the last lines of a finished run: where everything is and, for language models, a text.
    fn finish(&self, progress: &Progress) -> Result<(), CliError> {
        if !self.ranks.is_first() {
            return Ok(());
        }
        let losses = self.log.entries().iter().filter_map(|entry| match entry {
            Entry::Step { loss, .. } => Some(*loss),
            Entry::Evaluation { .. } | Entry::Start | Entry::Checkpoint { .. } => None,
        });
        let losses: Vec<f32> = losses.collect();
        let tail = &losses[losses.len().saturating_sub(10)..];
        if let Some(first) = losses.first() {
            let last = tail.iter().sum::<f32>() / tail.len() as f32;
            show::line(format_args!(
                "loss {first:.4} at the first step, {last:.4} over the last {}",
                tail.len()
            ));
        }
        show::line(format_args!(
            "checkpoint, log and curves are in {}",
            self.folder.display()
        ));
        if self.config.sample.tokens > 0 {
            let model = without_autodiff(self.trainer.model()?);
            match crate::generate::sample(&self.config.sample, &model, &self.data) {
                Ok(Some(text)) => show::line(format_args!("\n{text}")),
                Ok(None) => {}
                // The run is finished and saved.
                Err(error) => progress.say(&format!("there is no text to print: {error}")),
            }
        }
        Ok(())
    }
}
