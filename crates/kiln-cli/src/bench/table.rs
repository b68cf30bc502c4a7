//! `kiln bench --table`: Kiln's training steps beside those of PyTorch and JAX on this machine.
//!
//! Every measurement is a process of its own, so that memory is one program's and nothing is warm by
//! accident, and the programs take turns, so that a machine which slows down slows all of them. Of the rounds
//! the one with the median step time counts.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use super::Measurement;
use crate::args::BenchArguments;
use crate::error::CliError;

const TORCH: &str = include_str!("../../peers/torch_step.py");
const JAX: &str = include_str!("../../peers/jax_step.py");

const ROUNDS: usize = 3;

/// Models of the table with batch, tokens and pixels.
const ROWS: [(&str, usize, usize, usize); 7] = [
    ("mlp", 64, 1, 1),
    ("llama-tiny", 8, 128, 1),
    ("llama-15m", 2, 128, 1),
    ("bert-minilm", 4, 64, 1),
    ("resnet18", 4, 1, 96),
    ("mobilenet_v2", 4, 1, 96),
    ("vit", 1, 1, 224),
];

/// A program that measures: the command for one row, less the row.
struct Program {
    name: String,
    command: PathBuf,
    arguments: Vec<String>,
}

impl Program {
    /// Measures one row; none with a note on standard error if the program does not know the model or fails.
    fn measure(&self, row: (&str, usize, usize, usize), arguments: &BenchArguments) -> Option<Measurement> {
        let (model, batch, seq, size) = row;
        let mut command = Command::new(&self.command);
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
    let mut table = String::from(
        "| model | batch | program | step ms | of kiln | first call s | peak MiB |\n|---|---|---|---:|---:|---:|---:|\n",
    );
    for row in rows {
        let mut rounds: Vec<Vec<Measurement>> = programs.iter().map(|_| Vec::new()).collect();
        let mut works = vec![true; programs.len()];
        for round in 0..ROUNDS {
            eprintln!("{}: round {} of {ROUNDS}", row.0, round + 1);
            for ((program, measured), works) in programs.iter().zip(&mut rounds).zip(&mut works) {
                // What failed once is not asked again.
                if *works {
                    let measurement = program.measure(row, arguments);
                    *works = measurement.is_some();
                    measured.extend(measurement);
                }
            }
        }
        let medians: Vec<Option<Measurement>> = rounds.into_iter().map(middle).collect();
        let ours = medians.first().cloned().flatten();
        for measurement in medians.into_iter().flatten() {
            let ratio = ours.as_ref().map_or_else(
                || "-".to_owned(),
                |ours| format!("{:.2}", measurement.median / ours.median),
            );
            let Measurement {
                peer,
                median,
                first,
                mem_mb,
                ..
            } = &measurement;
            table += &format!(
                "| {} | {} | {peer} | {:.1} | {ratio} | {first:.1} | {mem_mb} |\n",
                row.0,
                row.1,
                median * 1e3
            );
        }
    }
    print!("{table}");
    Ok(())
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
    for (module, script, text, modes) in [
        ("torch", "torch_step.py", TORCH, ["eager", "compile"].as_slice()),
        ("jax", "jax_step.py", JAX, ["jit"].as_slice()),
    ] {
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
        let path = scripts.join(script);
        std::fs::write(&path, text).map_err(CliError::io("write", &path))?;
        programs.extend(modes.iter().map(|mode| Program {
            name: format!("{module}-{mode}"),
            command: python.clone(),
            arguments: vec![
                path.display().to_string(),
                "--mode".to_owned(),
                (*mode).to_owned(),
            ],
        }));
    }
    Ok(programs)
}
