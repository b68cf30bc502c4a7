//! `kiln minify`: the smallest graph on which a backend is still wrong.
//!
//! Each candidate runs in a child process, `kiln minify --check FILE`, which compares the backend with the
//! interpreter, because the backend may crash. The same command repeats the fault for a person.

use std::ffi::OsString;
use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use kiln_burn::execute::minify::Observed;
use kiln_minify::{Case, ChildProbe, Fill, Limits, minify, observe, print_verdict, provoke};

use crate::args::MinifyArguments;
use crate::error::CliError;
use crate::show;

/// The recorded step in a folder of a debug dump.
const RECORDED: &str = "0-recorded.kg";

/// `kiln minify`.
///
/// # Errors
///
/// If the dump is no graph, or no child process can be started.
pub fn command(arguments: &MinifyArguments) -> Result<ExitCode, CliError> {
    let dump = match arguments.dump.is_dir() {
        true => arguments.dump.join(RECORDED),
        false => arguments.dump.clone(),
    };
    let text = std::fs::read_to_string(&dump).map_err(CliError::io("read", &dump))?;
    let case =
        Case::parse(&text, Fill::Signed, 1).map_err(|error| CliError::config(dump.display(), error))?;
    let recorded = case.graph.num_nodes();
    if arguments.check {
        return check(&case, arguments);
    }
    let cache =
        tempfile::tempdir().map_err(CliError::io("create a temporary folder in", std::env::temp_dir()))?;
    let probe = probe(arguments, cache.path())?;
    let mut trouble = None;
    let mut oracle = |case: &Case| {
        probe.observe(case).unwrap_or_else(|error| {
            trouble.get_or_insert(error);
            None
        })
    };
    let shown = match Case::has_arguments(&text) {
        true => Some(case),
        false => provoke(&case.graph, &mut oracle),
    };
    let limits = Limits {
        time: Duration::from_secs(arguments.seconds),
        ..Limits::default()
    };
    let found = shown.and_then(|case| minify(case, &mut oracle, &limits));
    if let Some(error) = trouble {
        return Err(CliError::io(
            "observe a graph in a process of",
            std::env::temp_dir(),
        )(error));
    }
    let Some(found) = found else {
        show::line(format_args!(
            "{} shows no fault on backend {}",
            dump.display(),
            arguments.backend
        ));
        return Ok(ExitCode::SUCCESS);
    };
    let out = arguments
        .out
        .clone()
        .unwrap_or_else(|| dump.with_extension("min.kg"));
    let repeat = format!("kiln minify --check {}{}", out.display(), on_backend(arguments));
    std::fs::write(&out, found.to_text(&repeat)).map_err(CliError::io("write", &out))?;
    show::line(&found.fault);
    let until = if found.complete {
        ""
    } else {
        ", until the time was over"
    };
    let nodes = found.case.graph.num_nodes();
    show::line(format_args!(
        "{nodes} of {recorded} nodes are left; {} graphs were tried{until}",
        found.attempts
    ));
    show::line(format_args!("repeat it with `{repeat}`"));
    Ok(ExitCode::SUCCESS)
}

/// The options that select the tested backend, as they are typed.
fn on_backend(arguments: &MinifyArguments) -> String {
    let MinifyArguments {
        backend,
        device,
        tolerance,
        ..
    } = arguments;
    format!(" --backend {backend} --device {device} --tolerance {tolerance:?}")
}

/// The child processes. They compile hundreds of graphs, and have a cache of their own for that.
fn probe(arguments: &MinifyArguments, cache: &Path) -> Result<ChildProbe, CliError> {
    let program = std::env::current_exe().map_err(CliError::io("find the program of", Path::new("kiln")))?;
    let options = on_backend(arguments);
    let options = options.split_whitespace().chain(["--verdict", "--check"]);
    Ok(ChildProbe {
        command: [program.into_os_string(), "minify".into()]
            .into_iter()
            .chain(options.map(OsString::from))
            .collect(),
        environment: vec![("KILN_CACHE_DIR".into(), cache.into())],
        timeout: Duration::from_secs(arguments.timeout),
    })
}

/// Observes one case in this process: for a person, or for the process that started this one.
fn check(case: &Case, arguments: &MinifyArguments) -> Result<ExitCode, CliError> {
    let backend = Observed {
        backend: arguments.backend,
        gpu: arguments.device.place().gpu().unwrap_or(0),
    };
    let observed = observe(case, &backend, arguments.tolerance);
    if arguments.verdict {
        // A graph that the interpreter refuses shows no fault.
        print_verdict(observed.ok().flatten().as_ref());
        return Ok(ExitCode::SUCCESS);
    }
    let observed = observed.map_err(|error| CliError::config(arguments.dump.display(), error))?;
    match observed {
        Some(fault) => {
            show::line(fault);
            Ok(ExitCode::FAILURE)
        }
        None => {
            show::line(format_args!("no fault on backend {}", arguments.backend));
            Ok(ExitCode::SUCCESS)
        }
    }
}
