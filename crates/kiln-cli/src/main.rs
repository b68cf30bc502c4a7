//! The `kiln` program: parses the command line, runs the command, and ends with one readable message if it
//! fails.

use std::process::ExitCode;

use clap::Parser;

fn main() -> ExitCode {
    kiln_cli::run(kiln_cli::args::Arguments::parse())
}
