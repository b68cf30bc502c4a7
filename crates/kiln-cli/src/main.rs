//! The `kiln` program: parses the command line, runs the command, and ends with one readable message if it
//! fails.

use std::process::ExitCode;

use clap::Parser;
use kiln::images::{ENOUGH_QUEUES, QUEUES};

fn main() -> ExitCode {
    if std::env::var_os(QUEUES).is_none() {
        // SAFETY: no other thread runs yet that could read the environment.
        unsafe { std::env::set_var(QUEUES, ENOUGH_QUEUES) };
    }
    kiln_cli::run(kiln_cli::args::Arguments::parse())
}
