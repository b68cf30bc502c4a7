//! Text on standard output and standard error. `println!` panics where nobody reads any more: a closed pipe,
//! a terminal that is gone. A run would end without a checkpoint because of a line about it.

use std::fmt::Display;
use std::io::{ErrorKind, Write};
use std::sync::OnceLock;

use crate::error::CliError;

/// The first error of standard output other than that nobody reads it.
static LOST: OnceLock<ErrorKind> = OnceLock::new();

/// Writes a line to standard output, if that takes it.
pub(crate) fn line(text: impl Display) {
    self::text(format_args!("{text}\n"));
}

/// Writes text to standard output, if that takes it.
pub(crate) fn text(text: impl Display) {
    if let Err(error) = write(std::io::stdout(), text)
        && error.kind() != ErrorKind::BrokenPipe
    {
        let _ = LOST.set(error.kind());
    }
}

/// Writes a line to standard error, if that takes it.
pub(crate) fn note(text: impl Display) {
    aside(format_args!("{text}\n"));
}

/// Writes text to standard error, if that takes it.
pub(crate) fn aside(text: impl Display) {
    let _ = write(std::io::stderr(), text);
}

/// Makes sure that standard output took the results of a command that has no others. Who closes a pipe has
/// read enough.
///
/// # Errors
///
/// [`CliError::Io`].
pub(crate) fn check() -> Result<(), CliError> {
    match LOST.get() {
        None => Ok(()),
        Some(&kind) => Err(CliError::io("write all of", "standard output")(kind.into())),
    }
}

fn write(mut to: impl Write, text: impl Display) -> std::io::Result<()> {
    // In one piece, so that other programs write none into it.
    let text = text.to_string();
    to.write_all(text.as_bytes())?;
    to.flush()
}
