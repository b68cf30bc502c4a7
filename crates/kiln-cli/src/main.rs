//! The `kiln` program: parses the command line, runs the command, and ends with one readable message if it
//! fails.

use std::process::ExitCode;

use clap::Parser;
use kiln::images::{ENOUGH_QUEUES, QUEUES};
use kiln_cli::args::{Arguments, Command};
use kiln_cli::train::decodes_on_device;

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    // Elsewhere more queues gain nothing, and processes that share a GPU wait long for each other's.
    let decodes = || matches!(&arguments.command, Command::Train(train) if decodes_on_device(train));
    if std::env::var_os(QUEUES).is_none() && decodes() {
        // SAFETY: no other thread runs yet that could read the environment.
        unsafe { std::env::set_var(QUEUES, ENOUGH_QUEUES) };
    }
    kiln_cli::run(arguments)
}
