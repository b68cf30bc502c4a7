//! `kiln explain`: the compiled training step of a config or a model.

use burn::tensor::backend::Backend;
use kiln::explain::Machine;
use kiln::{CompileBackend, CompileOptions, Kiln};

use crate::architecture::Architecture;
use crate::args::ExplainArguments;
use crate::bench::Subject;
use crate::config::{Config, OptimizerConfig};
use crate::data::{Data, pretrained_tokenizer};
use crate::error::CliError;
use crate::memory;
use crate::model::{Batch, Family, freeze, initialise};
use crate::train::{Setting, TrainBackend, Trainer, build_trainer};

/// A learning rate that leaves the weights about where they are.
const RATE: f64 = 1e-4;

/// Steps that `--measure` takes the mean of.
const MEASURED: usize = 5;

/// Calls until the step is compiled and known to come again.
const CALLS: usize = 3;

/// `kiln explain`: runs the step a few times and prints the report on it.
///
/// # Errors
///
/// As `kiln train` and `kiln bench`.
pub fn command(arguments: &ExplainArguments) -> Result<(), CliError> {
    let device = arguments.device;
    Kiln::seed(&device, 0);
    let (architecture, frozen, optimizer, batches) =
        match (&arguments.subject.config, &arguments.subject.model) {
            (Some(path), _) => {
                let config = Config::read(path, &[])?;
                let family = Family::of(&config.model.name)?;
                family.check(config.data.source)?;
                let prepared = tempfile::tempdir()
                    .map_err(CliError::io("create a temporary folder in", std::env::temp_dir()))?;
                let weights = config.model.weights.as_ref().map(kiln_hub::load).transpose()?;
                let tokenizer = pretrained_tokenizer(weights.as_ref(), family)?;
                let data = Data::open(&config, prepared.path(), tokenizer)?;
                let architecture = Architecture::resolve(&config, weights.as_ref(), &data)?;
                let loader = data.train(None)?;
                let batches: Vec<Batch<TrainBackend>> = loader
                    .take(config.train.accumulate)
                    .map(|batch| Ok(batch?.tensors(&device)))
                    .collect::<Result<_, CliError>>()?;
                (architecture, config.model.freeze, config.optimizer, batches)
            }
            (None, Some(name)) => {
                let subject = Subject::new(name, arguments.batch, arguments.seq, arguments.size)?;
                let batches = vec![subject.batch(&device)];
                (
                    subject.architecture,
                    Vec::new(),
                    OptimizerConfig::default(),
                    batches,
                )
            }
            (None, None) => return Err(CliError::Usage("give --config or --model".to_owned())),
        };
    let options = CompileOptions {
        memory_budget: arguments.memory_budget,
        tf32: arguments.tf32,
        autocast: arguments.autocast,
        ..CompileOptions::default()
            .with_backend(arguments.backend)
            .with_name("train_step")
    };
    let start = |options: CompileOptions| -> Result<Box<dyn Trainer>, CliError> {
        let model = architecture.init::<TrainBackend>(&device)?;
        initialise(&model);
        let (model, _) = freeze(model, &frozen);
        let mut trainer = build_trainer(
            model,
            &optimizer,
            Setting {
                options,
                weights: arguments.weights,
                ..Setting::default()
            },
        )?;
        for _ in 0..CALLS {
            trainer.step(RATE, batches.clone())?;
        }
        Ok(trainer)
    };
    let mut trainer = start(options.clone())?;
    let mut explain = trainer.explain();
    if arguments.measure {
        let profile = kiln::profile();
        for _ in 0..MEASURED {
            trainer.step(RATE, batches.clone())?;
        }
        let gpu = trainer
            .report()
            .steps
            .iter()
            .find(|step| step.backend == CompileBackend::Cuda)
            .map(|step| step.gpu);
        let machine = match gpu {
            Some(ordinal) => Machine::measure_gpu(ordinal, &options)?,
            None => Machine::measure(0)?,
        };
        explain = trainer.explain().with_times(&profile.summary(), Some(machine));
    }
    if let Some(path) = &arguments.html {
        std::fs::write(path, explain.to_html()).map_err(CliError::io("write", path))?;
        eprintln!("open {} in a browser", path.display());
    }
    if arguments.json {
        println!("{}", explain.to_json());
        return Ok(());
    }
    print!("{explain}");
    if arguments.graph {
        for step in trainer.report().steps {
            println!("\n{}", step.graph);
        }
    }
    let report = trainer.report();
    drop(trainer);
    if let Some(path) = &arguments.memory_curve {
        let time = |options: CompileOptions| {
            let mut trainer = start(options)?;
            memory::seconds(|| trainer.step(RATE, batches.clone()).map(drop))
        };
        let eager = match batches.first() {
            Some(batch) => memory::kept_by_autograd(&architecture, batch.clone(), &device)?,
            None => 0,
        };
        memory::curve(path, &report, &options, eager, time)?;
    }
    Ok(())
}
