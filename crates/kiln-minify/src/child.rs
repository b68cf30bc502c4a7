//! Observing a case in a process of its own, which may crash or hang.

use std::ffi::OsString;
use std::io::{self, Read as _};
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use crate::case::Case;
use crate::fault::Fault;

/// The beginning of the line with the verdict of a child process.
const VERDICT: &str = "kiln-minify verdict: ";

/// How often a running child process is looked at.
const INTERVAL: Duration = Duration::from_millis(2);

/// The command that observes a case: it is given the case's file as its last argument, and calls
/// [`print_verdict`] once it knows.
#[derive(Clone, Debug)]
pub struct ChildProbe {
    /// The program and its first arguments.
    pub command: Vec<OsString>,
    /// Environment variables that it is given besides those of this process.
    pub environment: Vec<(OsString, OsString)>,
    /// After how long it is taken to hang.
    pub timeout: Duration,
}

/// Reports the observation to the process that started this one.
pub fn print_verdict(fault: Option<&Fault>) {
    match serde_json::to_string(&fault) {
        Ok(text) => println!("{VERDICT}{text}"),
        Err(error) => eprintln!("the verdict cannot be written: {error}"),
    }
}

impl ChildProbe {
    /// The fault that `case` shows in a process of its own.
    ///
    /// # Errors
    /// [`io::Error`] if the process cannot be started or the case not be written: this machine's fault, not
    /// the backend's.
    pub fn observe(&self, case: &Case) -> io::Result<Option<Fault>> {
        let folder = tempfile::Builder::new().prefix("kiln-minify-").tempdir()?;
        let file = folder.path().join("case.kg");
        std::fs::write(&file, case.to_text())?;
        self.observe_file(&file)
    }

    /// The fault that the case in `file` shows in a process of its own.
    ///
    /// # Errors
    /// As [`ChildProbe::observe`].
    pub fn observe_file(&self, file: &Path) -> io::Result<Option<Fault>> {
        let [program, arguments @ ..] = self.command.as_slice() else {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                "a probe without a command",
            ));
        };
        let mut child = Command::new(program)
            .args(arguments)
            .arg(file)
            .envs(self.environment.iter().map(|(name, value)| (name, value)))
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()?;
        // Read beside the wait: a child that writes more than a pipe holds would wait for its reader.
        let mut pipe = child.stdout.take();
        let reader = std::thread::spawn(move || {
            let mut text = Vec::new();
            let read = pipe.as_mut().map(|pipe| pipe.read_to_end(&mut text));
            read.transpose().map(|_| text)
        });
        let Some(status) = wait(&mut child, self.timeout)? else {
            return Ok(Some(Fault::Hung));
        };
        let text = reader
            .join()
            .map_err(|_| io::Error::other("the reader of a child process panicked"))??;
        let text = String::from_utf8_lossy(&text);
        let verdict = text.lines().rev().find_map(|line| line.strip_prefix(VERDICT));
        match verdict.and_then(|verdict| serde_json::from_str(verdict).ok()) {
            Some(verdict) => Ok(verdict),
            None => Ok(Some(Fault::Crashed(ending(status)))),
        }
    }
}

/// Waits for a child process; none if it took longer than `timeout` and was ended.
fn wait(child: &mut Child, timeout: Duration) -> io::Result<Option<ExitStatus>> {
    let until = Instant::now() + timeout;
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(Some(status));
        }
        if Instant::now() >= until {
            child.kill()?;
            child.wait()?;
            return Ok(None);
        }
        std::thread::sleep(INTERVAL);
    }
}

/// How a process ended, in words that are the same each time.
fn ending(status: ExitStatus) -> String {
    #[cfg(unix)]
    if let Some(signal) = std::os::unix::process::ExitStatusExt::signal(&status) {
        return format!("signal {signal}");
    }
    match status.code() {
        // The exit status of Rust's runtime after a panic.
        Some(101) => "a panic".to_owned(),
        Some(code) => format!("exit status {code}"),
        None => status.to_string(),
    }
}
