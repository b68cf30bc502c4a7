//! The kiln command line.
//!
//! ```text
//! kiln train     a run from a config: data, training step, checkpoints, log, curves
//! kiln eval      the evaluation of a run's checkpoint
//! kiln generate  text from a Llama checkpoint
//! kiln bench     one training step, timed; a table beside other frameworks
//! kiln explain   what a model's step compiles to
//! kiln export    a run's step as a folder that trains without Kiln
//! kiln minify    the smallest graph on which a backend still goes wrong
//! kiln backends  what can run a step here
//! kiln cache     the disk cache of compiled steps
//! ```
//!
//! The crate joins the others and adds no mathematics of its own. [`config`] has the config of a run,
//! [`architecture`] a model's sizes, [`model`] puts the families of kiln-models behind one module, [`data`]
//! puts the sources of kiln-hub behind one batch, [`train`] is the loop. Results go to standard output,
//! everything else to standard error.

pub mod architecture;
pub mod args;
pub mod backends;
pub mod bench;
pub mod cache;
pub mod config;
pub mod data;
pub mod error;
pub mod explain;
pub mod generate;
pub mod memory;
pub mod minify;
pub mod model;
mod show;
pub mod train;

use std::process::ExitCode;

use args::{Arguments, CacheAction, Command};
pub use error::CliError;

/// Runs a command; its failure is printed as one message.
pub fn run(arguments: Arguments) -> ExitCode {
    kiln::log::init();
    match dispatch(arguments.command) {
        Ok(code) => code,
        Err(error) => {
            show::note(format_args!("error: {error}"));
            ExitCode::FAILURE
        }
    }
}

fn dispatch(command: Command) -> Result<ExitCode, CliError> {
    match command {
        Command::Train(arguments) => return train::command(&arguments),
        Command::Eval(arguments) => train::evaluate_command(&arguments)?,
        Command::Generate(arguments) => generate::command(&arguments)?,
        Command::Bench(arguments) => bench::command(&arguments)?,
        Command::Explain(arguments) => explain::command(&arguments)?,
        Command::Export(arguments) => train::export::command(&arguments)?,
        Command::Minify(arguments) => return minify::command(&arguments),
        Command::Backends => backends::command(),
        Command::Cache {
            action: CacheAction::List,
        } => cache::list()?,
        Command::Cache {
            action: CacheAction::Clear,
        } => cache::clear()?,
    }
    show::check()?;
    Ok(ExitCode::SUCCESS)
}
