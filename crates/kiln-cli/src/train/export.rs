//! `kiln export`: the training step of a run as a folder that trains without Kiln.

use crate::args::ExportArguments;
use crate::config::Config;
use crate::error::CliError;
use crate::show;

use super::progress::Progress;
use super::ranks::Ranks;
use super::{Run, locate};

/// Steps until a training step is known and replayed.
const UNTIL_KNOWN: u64 = 2;

/// `kiln export`. The run itself stays as it is: the command works in a temporary folder, with the data that
/// the run has prepared.
///
/// # Errors
///
/// Everything that can be wrong with a run; [`CliError::Export`] if its step cannot be exported.
pub fn command(arguments: &ExportArguments) -> Result<(), CliError> {
    let (folder, from) = locate(&arguments.run)?;
    let from = from.ok_or_else(|| CliError::NoCheckpoint { path: folder.clone() })?;
    if arguments.out.join("step.so").exists() {
        return Err(CliError::Usage(format!(
            "{} holds an exported step already; choose another folder with --out",
            arguments.out.display()
        )));
    }
    let mut config = Config::read(&folder.join("config.toml"), &[])?;
    // The step runs on the CPU wherever the run trains.
    config.train.device = "cpu".to_owned();
    config.train.backend = "cpu".to_owned();
    // No text is printed.
    config.sample.tokens = 0;
    let scratch = tempfile::tempdir().map_err(CliError::io("create", &std::env::temp_dir()))?;
    let ranks = Ranks::connect(&config)?;
    let place = scratch.path().to_path_buf();
    let mut run = Run::open(config, place, Some(&folder.join("data")), Some(&from), ranks)?;
    let last = run.step + UNTIL_KNOWN;
    let mut progress = Progress::new(last, run.step, run.data.unit, 1);
    while run.step < last {
        run.train_step(&mut progress)?;
    }
    progress.finish();
    run.trainer.export(&arguments.out)?;
    show::line(format_args!(
        "{}: the step after step {last} (the checkpoint's and {UNTIL_KNOWN} more, which showed what the step is); README.md there says how to call it",
        arguments.out.display()
    ));
    Ok(())
}
