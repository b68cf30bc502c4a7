//! `kiln explain`: the compiled training step of a config or a model.

use burn::tensor::backend::Backend;
use kiln::distributed::{self, Link, World};
use kiln::explain::{Assumptions, Explain, Machine};
use kiln::{Buckets, CompileBackend, CompileOptions, Kiln, KilnDevice, RegionReport};
use kiln_hub::data::Share;

use crate::architecture::Architecture;
use crate::args::{ExplainArguments, WeightsArgument};
use crate::bench::Subject;
use crate::config::{Config, DistributedConfig, OptimizerConfig};
use crate::data::{Data, HeldOut, pretrained_tokenizer};
use crate::error::CliError;
use crate::memory;
use crate::model::{Batch, Family, freeze, initialise};
use crate::show;
use crate::train::{self, Setting, Together, TrainBackend, Trainer, build_trainer, divides};

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
    let world = world(arguments)?;
    if arguments.memory_curve.is_some() && world.size() > 1 {
        return Err(CliError::Usage("--memory-curve is for one rank".to_owned()));
    }
    let config = match &arguments.subject.config {
        Some(path) => Some(Config::read(path, &[])?),
        None => None,
    };
    let How {
        device,
        mut options,
        weights,
    } = how(arguments, config.as_ref())?;
    options.threads = threads(arguments, &world);
    Kiln::seed(&device, 0);
    let Of {
        architecture,
        frozen,
        optimizer,
        batches,
        distributed,
    } = subject(arguments, config, &device, &world)?;
    let link = match arguments.link {
        Some(link) => Some(link),
        None => world.link()?,
    };
    options.buckets = buckets(arguments, link, &world, &options);
    let start = |options: CompileOptions| -> Result<Box<dyn Trainer>, CliError> {
        let model = architecture.init::<TrainBackend>(&device)?;
        initialise(&model);
        let model = freeze(model, &frozen)?;
        let mut trainer = build_trainer(
            model,
            &optimizer,
            Setting {
                options,
                weights,
                together: Some(Together {
                    world: &world,
                    sharded: distributed.sharded_state,
                    synchronised: distributed.synchronised_batch_norm,
                }),
                ..Setting::default()
            },
        )?;
        for _ in 0..CALLS {
            trainer.step(RATE, batches.clone())?.read()?;
        }
        Ok(trainer)
    };
    let explained = |trainer: &mut dyn Trainer| -> Result<Explain, CliError> {
        if !arguments.measure {
            return Ok(trainer.explain());
        }
        let profile = kiln::profile();
        for _ in 0..MEASURED {
            trainer.step(RATE, batches.clone())?.read()?;
        }
        let machine = machine(&trainer.report(), &options)?;
        Ok(trainer.explain().with_times(&profile.summary(), Some(machine)))
    };
    let mut trainer = start(options.clone())?;
    let mut explain = explained(&mut *trainer)?;
    if let Some(link) = link {
        let assumptions = assumptions(arguments, link, &world, &trainer.report());
        let mut apart = start(options.clone().with_buckets(Buckets::NONE))?;
        let described = explained(&mut *apart)?;
        let machine = machine(&trainer.report(), &options)?;
        explain = explain
            .with_predictions(
                &trainer.report(),
                (&apart.report(), &described),
                &assumptions,
                &machine,
            )
            .map_err(CliError::Usage)?;
    }
    if !world.is_first() {
        return Ok(());
    }
    if let Some(path) = &arguments.html {
        std::fs::write(path, explain.to_html()).map_err(CliError::io("write", path))?;
        show::note(format_args!("open {} in a browser", path.display()));
    }
    // Neither the graph nor the memory curve can be asked for with it.
    if arguments.json {
        show::line(explain.to_json());
        return Ok(());
    }
    show::text(explain);
    if arguments.graph {
        for step in trainer.report().steps {
            show::line(format_args!("\n{}", step.graph));
        }
    }
    let report = trainer.report();
    drop(trainer);
    if let Some(path) = &arguments.memory_curve {
        let time = |options: CompileOptions| {
            let mut trainer = start(options)?;
            memory::seconds(|| trainer.step(RATE, batches.clone())?.read().map(drop))
        };
        let eager = memory::kept_by_autograd(&architecture, batches.clone(), &device)?;
        memory::curve(path, &report, &options, eager, time)?;
    }
    Ok(())
}

/// What the step is of.
struct Of {
    architecture: Architecture,
    /// Names of parameters that are not trained.
    frozen: Vec<String>,
    optimizer: OptimizerConfig,
    /// Those of this rank.
    batches: Vec<Batch<TrainBackend>>,
    distributed: DistributedConfig,
}

/// How the step is compiled, and where it runs.
struct How {
    device: KilnDevice,
    options: CompileOptions,
    weights: WeightsArgument,
}

/// As `kiln train` does it with the config, but for what the arguments ask for.
fn how(arguments: &ExplainArguments, config: Option<&Config>) -> Result<How, CliError> {
    const NAME: &str = "train_step";
    let of_config = match config {
        Some(config) => How {
            device: train::device(config)?,
            options: train::compile_options(config, NAME)?,
            weights: train::weights(config)?,
        },
        None => How {
            device: KilnDevice::cpu(),
            options: CompileOptions::default().with_name(NAME),
            weights: None,
        },
    };
    let options = of_config.options;
    Ok(How {
        device: arguments.device.unwrap_or(of_config.device),
        options: CompileOptions {
            backend: arguments.backend.unwrap_or(options.backend),
            memory_budget: arguments.memory_budget.or(options.memory_budget),
            tf32: arguments.tf32 || options.tf32,
            autocast: arguments.autocast.or(options.autocast),
            ..options
        },
        weights: arguments.weights.unwrap_or(of_config.weights),
    })
}

/// What the arguments name.
fn subject(
    arguments: &ExplainArguments,
    config: Option<Config>,
    device: &KilnDevice,
    world: &World,
) -> Result<Of, CliError> {
    let mut of = match (config, &arguments.subject.model) {
        (Some(config), _) => {
            let family = Family::of(&config.model.name)?;
            family.check(config.data.source)?;
            let prepared = tempfile::tempdir()
                .map_err(CliError::io("create a temporary folder in", std::env::temp_dir()))?;
            let weights = config.model.weights.as_ref().map(kiln_hub::load).transpose()?;
            let tokenizer = pretrained_tokenizer(weights.as_ref(), family)?;
            divides(config.train.batch_size, world.size())?;
            let share = Share {
                rank: world.rank(),
                ranks: world.size(),
            };
            let data =
                Data::open(&config, device, prepared.path(), tokenizer, HeldOut::Random)?.with_share(share);
            let architecture = Architecture::resolve(&config, weights.as_ref(), &data)?;
            let loader = data.train(None)?;
            let batches: Vec<Batch<TrainBackend>> = loader
                .take(config.train.accumulate)
                .map(|batch| batch?.tensors(device))
                .collect::<Result<_, CliError>>()?;
            Of {
                architecture,
                frozen: config.model.freeze,
                optimizer: config.optimizer,
                batches,
                distributed: config.distributed,
            }
        }
        (None, Some(name)) => {
            let subject = Subject::new(name, arguments.batch, arguments.seq, arguments.size)?;
            let batches = vec![subject.batch(device)];
            Of {
                architecture: subject.architecture,
                frozen: Vec::new(),
                optimizer: OptimizerConfig::default(),
                batches,
                distributed: DistributedConfig::default(),
            }
        }
        (None, None) => return Err(CliError::Usage("give --config or --model".to_owned())),
    };
    of.distributed.sharded_state |= arguments.sharded;
    Ok(of)
}

/// The ranks that the step is one of: those of `--ranks`, which need not exist, or those that were started.
fn world(arguments: &ExplainArguments) -> Result<World, CliError> {
    let Some(&first) = arguments.ranks.first() else {
        return Ok(distributed::init()?);
    };
    if arguments.ranks.iter().any(|&ranks| ranks < 2) {
        return Err(CliError::Usage(
            "--ranks must be at least 2: one rank needs no prediction, and --measure times it".to_owned(),
        ));
    }
    Ok(distributed::imagine(first)?)
}

/// The sizes of buckets that the arguments or the config ask for, or that `kiln train` would choose for the
/// link.
fn buckets(
    arguments: &ExplainArguments,
    link: Option<Link>,
    world: &World,
    options: &CompileOptions,
) -> Option<Buckets> {
    let asked = |megabytes: f64| Buckets::with_others((megabytes * f64::from(1 << 20)) as usize);
    match (
        arguments.bucket_mb.map(asked).or(options.buckets),
        link,
        options.memory_budget,
    ) {
        (Some(asked), _, _) => Some(asked),
        (None, Some(link), None) => {
            let (fixed, byte) = link.of_sums(world.size());
            Some(Buckets::of(fixed, byte))
        }
        _ => None,
    }
}

/// Under which assumptions the step is predicted. Kernels that were measured beside communication are as slow
/// as that made them; those of imagined ranks ran alone.
fn assumptions(
    arguments: &ExplainArguments,
    link: Link,
    world: &World,
    report: &RegionReport,
) -> Vec<Assumptions> {
    let imagined = !arguments.ranks.is_empty();
    let speed = match arguments.measure && !imagined {
        true => 1.0,
        false => speed(report, world),
    };
    let all = match &arguments.ranks[..] {
        [] => &[world.size()],
        all => all,
    };
    let one = |&ranks: &usize| Assumptions {
        ranks,
        link,
        speed,
        imagined,
    };
    all.iter().map(one).collect()
}

/// The threads of the step: those asked for, or a rank's share of the cores.
fn threads(arguments: &ExplainArguments, world: &World) -> usize {
    match (arguments.threads, arguments.ranks.is_empty()) {
        // Imagined ranks have a machine like this one each.
        (0, true) => train::threads(world),
        (asked, _) => asked,
    }
}

/// How fast kernels and communication go beside each other. On a CPU one thread of each rank moves data: it
/// has a core of its own, or shares those of the step. A GPU does both at once.
fn speed(report: &RegionReport, world: &World) -> f64 {
    let Some(step) = report
        .steps
        .iter()
        .rfind(|step| step.backend == CompileBackend::Cpu)
    else {
        return 1.0;
    };
    match step.threads < world.threads() {
        true => 1.0,
        false => step.threads as f64 / (step.threads as f64 + 1.0),
    }
}

/// The limits of the machine that runs a step.
fn machine(report: &RegionReport, options: &CompileOptions) -> Result<Machine, CliError> {
    let gpu = report
        .steps
        .iter()
        .find(|step| step.backend == CompileBackend::Cuda);
    Ok(match gpu {
        Some(step) => Machine::measure_gpu(step.gpu, options)?,
        None => Machine::measure(options.threads)?,
    })
}
