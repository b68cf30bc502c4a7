//! `kiln bench --table`: Kiln's training steps beside those of PyTorch and JAX on this machine.
//!
//! Every measurement is a process of its own, so that its memory is one program's and nothing is warm by
//! accident. The programs take turns, so that a machine that slows down slows all of them. Of the rounds
//! the one with the median step time counts. Every process compiles anew, with its caches in a new folder;
//! the line "cached" is a second process of Kiln that finds the first one's cache.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use super::Measurement;
use crate::args::BenchArguments;
use crate::error::CliError;

/// The peers: files, and what is in them. `MODULE_step.py` measures.
const SCRIPTS: [(&str, &str); 3] = [
    ("torch_step.py", include_str!("../../peers/torch_step.py")),
    ("jax_step.py", include_str!("../../peers/jax_step.py")),
    ("jax_models.py", include_str!("../../peers/jax_models.py")),
];

/// Models of the table with batch, tokens and pixels.
const ROWS: [(&str, usize, usize, usize); 14] = [
    ("mlp", 128, 1, 1),
    ("llama-tiny", 8, 128, 1),
    ("llama-15m", 4, 256, 1),
    ("bert-minilm", 8, 128, 1),
    ("bert-base", 4, 128, 1),
    ("resnet18", 8, 1, 224),
    ("resnet50", 4, 1, 224),
    ("mobilenet_v2", 8, 1, 224),
    ("vit_small", 4, 1, 224),
    ("resnext50_32x4d", 4, 1, 224),
    ("mnasnet1_0", 8, 1, 224),
    ("squeezenet1_1", 8, 1, 224),
    ("alexnet", 16, 1, 224),
    ("vgg16", 2, 1, 224),
];

/// A program that measures: the command for one row, less the row.
struct Program {
    name: String,
    command: PathBuf,
    arguments: Vec<String>,
}

impl Program {
    /// Measures one row, with caches of compiled code in `cache`; none with a note on standard error if the
    /// program does not know the model or fails.
    fn measure(
        &self,
        row: (&str, usize, usize, usize),
        arguments: &BenchArguments,
        cache: &Path,
    ) -> Option<Measurement> {
        let (model, batch, seq, size) = row;
        let mut command = Command::new(&self.command);
        command
            .env("KILN_CACHE_DIR", cache)
            .env("TORCHINDUCTOR_CACHE_DIR", cache);
        command.args(&self.arguments).arg(model);
        for (flag, value) in [
            ("--batch", batch),
            ("--seq", seq),
            ("--size", size),
            ("--steps", arguments.steps),
        ] {
            command.args([flag, &value.to_string()]);
        }
        if arguments.infer {
            command.arg("--infer");
        }
        let output = command.stderr(Stdio::piped()).output().ok()?;
        let text = String::from_utf8_lossy(&output.stdout);
        let measurement = text
            .lines()
            .rev()
            .find_map(|line| serde_json::from_str(line).ok());
        if measurement.is_none() {
            let errors = String::from_utf8_lossy(&output.stderr);
            let reason = errors
                .lines()
                .rev()
                .find(|line| !line.trim().is_empty())
                .unwrap_or("it printed no measurement");
            eprintln!("{} has no number for {model}: {reason}", self.name);
        }
        measurement
    }
}

/// Prints the table.
///
/// # Errors
///
/// [`CliError::Io`] if the peers' scripts cannot be written out, [`CliError::Unknown`] for a model that is
/// not in the table.
pub fn command(arguments: &BenchArguments) -> Result<(), CliError> {
    let rows: Vec<_> = match &arguments.model {
        None => ROWS.to_vec(),
        Some(name) => {
            let row = ROWS.into_iter().find(|row| row.0 == name);
            vec![row.ok_or_else(|| CliError::unknown("model of the table", name, ROWS.map(|row| row.0)))?]
        }
    };
    let scripts =
        tempfile::tempdir().map_err(CliError::io("create a temporary folder in", std::env::temp_dir()))?;
    let programs = programs(scripts.path(), arguments)?;
    let mut table = String::from(HEAD);
    let mut ratios = Vec::new();
    for row in rows {
        let medians = measure_row(&programs, row, arguments, scripts.path())?;
        let (text, ratio) = table_rows(row, &medians);
        // Results are printed at once, because people watch and interrupt long runs.
        eprint!("{text}");
        table += &text;
        ratios.extend(ratio);
    }
    print!("{table}");
    if !ratios.is_empty() {
        let mean = (ratios.iter().map(|ratio| ratio.ln()).sum::<f64>() / ratios.len() as f64).exp();
        println!(
            "\nStep time of kiln over that of the fastest peer: geometric mean {mean:.2} over {} models.",
            ratios.len()
        );
    }
    Ok(())
}

const HEAD: &str = "| model | batch | program | step ms | kiln / it | first call s | kiln / it | peak MiB | kiln / it |\n\
                    |---|---|---|---:|---:|---:|---:|---:|---:|\n";

/// The median measurement of each program, and one of Kiln that finds its disk cache filled.
fn measure_row(
    programs: &[Program],
    row: (&str, usize, usize, usize),
    arguments: &BenchArguments,
    scripts: &Path,
) -> Result<Vec<Measurement>, CliError> {
    let mut again = None;
    let mut rounds: Vec<Vec<Measurement>> = programs.iter().map(|_| Vec::new()).collect();
    let mut works = vec![true; programs.len()];
    for round in 0..arguments.rounds.max(1) {
        eprintln!("{}: round {} of {}", row.0, round + 1, arguments.rounds.max(1));
        for ((program, measured), works) in programs.iter().zip(&mut rounds).zip(&mut works) {
            // A program that failed once is not run again.
            if !*works {
                continue;
            }
            let cache = tempfile::tempdir_in(scripts)
                .map_err(CliError::io("create a temporary folder in", scripts))?;
            let measurement = program.measure(row, arguments, cache.path());
            *works = measurement.is_some();
            measured.extend(measurement);
            if *works && again.is_none() && program.name == "kiln" {
                again = program
                    .measure(row, arguments, cache.path())
                    .map(|one| Measurement {
                        peer: format!("{}, cached", one.peer),
                        ..one
                    });
            }
        }
    }
    let mut medians: Vec<Measurement> = rounds.into_iter().filter_map(middle).collect();
    medians.extend(again);
    Ok(medians)
}

/// The lines of one model, and the step time of Kiln over that of the fastest peer.
fn table_rows(row: (&str, usize, usize, usize), medians: &[Measurement]) -> (String, Option<f64>) {
    let ours = medians.iter().find(|one| one.peer.starts_with("kiln-"));
    let over = |own: fn(&Measurement) -> f64, one: &Measurement| match ours {
        Some(ours) if !one.peer.starts_with("kiln-") => format!("{:.2}", own(ours) / own(one)),
        _ => "-".to_owned(),
    };
    let mut text = String::new();
    for one in medians {
        text += &format!(
            "| {} | {} | {} | {:.1} | {} | {:.1} | {} | {} | {} |\n",
            row.0,
            row.1,
            one.peer,
            one.median * 1e3,
            over(|m| m.median, one),
            one.first,
            over(|m| m.first, one),
            one.mem_mb,
            over(|m| m.mem_mb as f64, one),
        );
    }
    let fastest = medians
        .iter()
        .filter(|one| !one.peer.starts_with("kiln-"))
        .map(|one| one.median)
        .min_by(f64::total_cmp);
    (
        text,
        ours.zip(fastest).map(|(ours, fastest)| ours.median / fastest),
    )
}

/// The measurement with the median step time.
fn middle(mut rounds: Vec<Measurement>) -> Option<Measurement> {
    rounds.sort_by(|a, b| a.median.total_cmp(&b.median));
    let at = rounds.len() / 2;
    rounds.into_iter().nth(at)
}

/// This program first, then the peers that are installed.
fn programs(scripts: &Path, arguments: &BenchArguments) -> Result<Vec<Program>, CliError> {
    let own = std::env::current_exe().map_err(CliError::io("find", "this program"))?;
    let strings = |arguments: &[&str]| arguments.iter().map(|&argument| argument.to_owned()).collect();
    let mut programs = vec![Program {
        name: "kiln".to_owned(),
        command: own,
        arguments: strings(&["bench", "--json", "--backend", arguments.backend.name()]),
    }];
    let python = std::env::var_os("PEER_PYTHON").map_or_else(|| PathBuf::from("python3"), PathBuf::from);
    for (file, text) in SCRIPTS {
        let path = scripts.join(file);
        std::fs::write(&path, text).map_err(CliError::io("write", &path))?;
    }
    for (module, modes) in [("torch", ["eager", "compile"].as_slice()), ("jax", &["jit"])] {
        let import = format!("import {module}");
        let found = Command::new(&python)
            .args(["-c", &import])
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .status();
        if !found.is_ok_and(|status| status.success()) {
            eprintln!(
                "{} has no {module}; set PEER_PYTHON to an interpreter that has it",
                python.display()
            );
            continue;
        }
        let script = scripts.join(format!("{module}_step.py"));
        programs.extend(modes.iter().map(|mode| Program {
            name: format!("{module}-{mode}"),
            command: python.clone(),
            arguments: vec![
                script.display().to_string(),
                "--mode".to_owned(),
                (*mode).to_owned(),
            ],
        }));
    }
    Ok(programs)
}
