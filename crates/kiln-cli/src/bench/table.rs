//! `kiln bench --table`: Kiln's training steps beside those of PyTorch and JAX on this machine.
//!
//! Every measurement is a process of its own, so that its memory is one program's and nothing is warm by
//! accident. The programs take turns, so that a machine that slows down slows all of them. Each program has
//! a folder of its own for what it compiles, empty in the first round: the time of the first call is that of
//! the first round, and later rounds find what the first has compiled. Of the rounds the one with the median
//! step time counts. The line "cached" is a process of Kiln that finds the first one's cache.
//!
//! On a GPU the models are larger, and PyTorch also runs with CUDA graphs (`torch-overhead`). All programs
//! let products of f32 use TF32 there, or none does: `--tf32` says so. Memory budgets and the types of
//! weights are Kiln's alone.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use kiln::Place;

use super::Measurement;
use crate::args::{BenchArguments, autocast_name, weights_name};
use crate::error::CliError;
use crate::show;

/// This program's name in the table.
const KILN: &str = "kiln";

/// The other programs: a module of Python, and in which modes it is measured. CUDA graphs need a GPU.
const PEERS: [(&str, &[&str]); 2] = [("torch", &["eager", "compile", CUDA_GRAPHS]), ("jax", &["jit"])];
const CUDA_GRAPHS: &str = "overhead";

/// The peers: files, and what is in them. `MODULE_step.py` measures.
const SCRIPTS: [(&str, &str); 3] = [
    ("torch_step.py", include_str!("../../peers/torch_step.py")),
    ("jax_step.py", include_str!("../../peers/jax_step.py")),
    ("jax_models.py", include_str!("../../peers/jax_models.py")),
];

/// A model with batch, tokens and pixels.
type Row = (&'static str, usize, usize, usize);

/// Models of the table on a GPU.
const GPU_ROWS: [Row; 4] = [
    ("bert-base", 32, 128, 1),
    ("llama-125m", 8, 1024, 1),
    ("resnet50", 128, 1, 224),
    ("decoder-2l", 16, 512, 1),
];

/// Models of the table on the CPU.
const ROWS: [Row; 14] = [
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
    /// The command that measures one row.
    fn measuring(&self, row: Row, arguments: &BenchArguments) -> Command {
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
        for (flag, asked) in [("--infer", arguments.infer), ("--tf32", arguments.tf32)] {
            command.args(asked.then_some(flag));
        }
        if let Some(dtype) = arguments.autocast {
            command.args(["--autocast", autocast_name(dtype)]);
        }
        command
    }

    /// Measures one row, with caches of compiled code in `cache`; none with a note on standard error if the
    /// program does not know the model or fails.
    fn measure(&self, row: Row, arguments: &BenchArguments, cache: &Path) -> Option<Measurement> {
        let model = row.0;
        let mut command = self.measuring(row, arguments);
        command
            .env("KILN_CACHE_DIR", cache)
            .env("TORCHINDUCTOR_CACHE_DIR", cache)
            .env("JAX_COMPILATION_CACHE_DIR", cache);
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
            show::note(format_args!("{} has no number for {model}: {reason}", self.name));
        }
        measurement
    }
}

/// Prints the table.
///
/// # Errors
///
/// [`CliError::Io`] if the peers' scripts cannot be written out, [`CliError::Unknown`] for a model or a
/// program that is not in the table.
pub fn command(arguments: &BenchArguments) -> Result<(), CliError> {
    let all = if on_gpu(arguments) {
        GPU_ROWS.as_slice()
    } else {
        &ROWS
    };
    let rows: Vec<_> = match &arguments.model {
        None => all.to_vec(),
        Some(name) => {
            let row = all.iter().find(|row| row.0 == name);
            let unknown = || CliError::unknown("model of the table", name, all.iter().map(|row| row.0));
            vec![*row.ok_or_else(unknown)?]
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
        show::aside(&text);
        table += &text;
        ratios.extend(ratio);
    }
    show::text(table);
    if !ratios.is_empty() {
        let mean = (ratios.iter().map(|ratio| ratio.ln()).sum::<f64>() / ratios.len() as f64).exp();
        show::line(format_args!(
            "\nStep time of kiln over that of the fastest peer: geometric mean {mean:.2} over {} models.",
            ratios.len()
        ));
    }
    Ok(())
}

const HEAD: &str = "| model | batch | program | step ms | kiln / it | first call s | kiln / it | peak MiB | kiln / it |\n\
                    |---|---|---|---:|---:|---:|---:|---:|---:|\n";

/// The median measurement of each program, and one of Kiln that finds its disk cache filled.
fn measure_row(
    programs: &[Program],
    row: Row,
    arguments: &BenchArguments,
    scripts: &Path,
) -> Result<Vec<Measurement>, CliError> {
    let mut again = None;
    let mut rounds: Vec<Vec<Measurement>> = programs.iter().map(|_| Vec::new()).collect();
    let mut works = vec![true; programs.len()];
    let caches: Vec<_> = programs
        .iter()
        .map(|_| tempfile::tempdir_in(scripts))
        .collect::<Result<_, _>>()
        .map_err(CliError::io("create a temporary folder in", scripts))?;
    for round in 0..arguments.rounds.max(1) {
        show::note(format_args!(
            "{}: round {} of {}",
            row.0,
            round + 1,
            arguments.rounds.max(1)
        ));
        for (index, program) in programs.iter().enumerate() {
            // A program that failed once is not run again.
            if !works[index] {
                continue;
            }
            let cache = caches[index].path();
            let measurement = program.measure(row, arguments, cache);
            works[index] = measurement.is_some();
            rounds[index].extend(measurement);
            if works[index] && again.is_none() && program.name == KILN {
                again = program.measure(row, arguments, cache).map(|one| Measurement {
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
fn table_rows(row: Row, medians: &[Measurement]) -> (String, Option<f64>) {
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
            memory(one),
            over(|m| memory(m) as f64, one),
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

/// The measurement with the median step time, and the first round's time of the first call, which compiled.
fn middle(mut rounds: Vec<Measurement>) -> Option<Measurement> {
    let first = rounds.first()?.first;
    rounds.sort_by(|a, b| a.median.total_cmp(&b.median));
    let at = rounds.len() / 2;
    let middle = rounds.into_iter().nth(at)?;
    Some(Measurement { first, ..middle })
}

/// This program first, then the peers that are installed and wanted.
fn programs(scripts: &Path, arguments: &BenchArguments) -> Result<Vec<Program>, CliError> {
    let own = std::env::current_exe().map_err(CliError::io("find", "this program"))?;
    let mut programs = vec![Program {
        name: KILN.to_owned(),
        command: own,
        arguments: own_arguments(arguments),
    }];
    let python = std::env::var_os("PEER_PYTHON").map_or_else(|| PathBuf::from("python3"), PathBuf::from);
    for (file, text) in SCRIPTS {
        let path = scripts.join(file);
        std::fs::write(&path, text).map_err(CliError::io("write", &path))?;
    }
    let named = |module: &str, mode: &str| format!("{module}-{mode}");
    let known: Vec<String> = PEERS
        .iter()
        .flat_map(|(module, modes)| modes.iter().map(|mode| named(module, mode)))
        .collect();
    if let Some(other) = arguments.peers.iter().find(|peer| !known.contains(peer)) {
        return Err(CliError::unknown(
            "program of the table",
            other,
            known.iter().map(String::as_str),
        ));
    }
    let wanted = |name: &String| arguments.peers.is_empty() || arguments.peers.contains(name);
    for (module, modes) in PEERS {
        let modes: Vec<(String, &str)> = modes
            .iter()
            .filter(|&&mode| mode != CUDA_GRAPHS || on_gpu(arguments))
            .map(|&mode| (named(module, mode), mode))
            .filter(|(name, _)| wanted(name))
            .collect();
        if modes.is_empty() {
            continue;
        }
        let import = format!("import {module}");
        let found = Command::new(&python)
            .args(["-c", &import])
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .status();
        if !found.is_ok_and(|status| status.success()) {
            show::note(format_args!(
                "{} has no {module}; set PEER_PYTHON to an interpreter that has it",
                python.display()
            ));
            continue;
        }
        let script = scripts.join(format!("{module}_step.py"));
        let device = if on_gpu(arguments) { "cuda" } else { "cpu" };
        programs.extend(modes.into_iter().map(|(name, mode)| Program {
            name,
            command: python.clone(),
            arguments: strings(&[&script.display().to_string(), "--mode", mode, "--device", device]),
        }));
    }
    Ok(programs)
}

/// Kiln's arguments, less those that every program has ([`Program::measure`]).
fn own_arguments(arguments: &BenchArguments) -> Vec<String> {
    let mut own = strings(&[
        "bench",
        "--json",
        "--backend",
        arguments.backend.name(),
        "--device",
        &arguments.device.to_string(),
    ]);
    if let Some(bytes) = arguments.memory_budget {
        own.extend(strings(&["--memory-budget", &bytes.to_string()]));
    }
    if arguments.weights.is_some() {
        own.extend(strings(&["--weights", &weights_name(arguments.weights)]));
    }
    own
}

fn strings(arguments: &[&str]) -> Vec<String> {
    arguments.iter().map(|&argument| argument.to_owned()).collect()
}

/// Whether the table is that of a GPU.
fn on_gpu(arguments: &BenchArguments) -> bool {
    arguments.device.place() != Place::Host
}

/// The memory that is compared: on a GPU its own.
fn memory(one: &Measurement) -> u64 {
    one.device_mb.unwrap_or(one.mem_mb)
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::args::{Arguments, Command as Chosen};

    fn bench(words: &[String]) -> BenchArguments {
        let words = ["kiln".to_owned()].into_iter().chain(words.iter().cloned());
        match Arguments::try_parse_from(words).unwrap().command {
            Chosen::Bench(arguments) => arguments,
            other => panic!("{other:?}"),
        }
    }

    /// What Kiln and another program are called with for a row of the table.
    fn called(more: &[&str]) -> [Vec<String>; 2] {
        let arguments = bench(&strings(&[&["bench", "--table", "--steps", "7"], more].concat()));
        let other = strings(&["--mode", "eager"]);
        [own_arguments(&arguments), other].map(|own| {
            let program = Program {
                name: String::new(),
                command: PathBuf::from("program"),
                arguments: own,
            };
            let command = program.measuring(("mlp", 128, 1, 1), &arguments);
            let words = command.get_args().map(|word| word.to_string_lossy().into_owned());
            words.collect()
        })
    }

    #[test]
    fn a_row_is_measured_as_the_table_is_asked_for() {
        let [own, other] = called(&[
            "--tf32",
            "--weights",
            "bf16+master",
            "--memory-budget",
            "1000",
            "--autocast",
            "bf16",
        ]);
        let row = bench(&own);
        assert_eq!(row.model.as_deref(), Some("mlp"));
        assert_eq!((row.batch, row.steps, row.table), (128, 7, false));
        assert!(row.tf32 && row.json && row.autocast.is_some());
        assert_eq!(weights_name(row.weights), "bf16+master");
        assert_eq!(row.memory_budget, Some(1000));
        for word in ["--tf32", "--autocast"] {
            assert!(other.iter().any(|found| found == word), "{word}: {other:?}");
        }
        for word in ["--weights", "--memory-budget"] {
            assert!(!other.iter().any(|found| found == word), "{word}: {other:?}");
        }
    }

    /// Neither Kiln nor the others round products unless they are asked to.
    #[test]
    fn products_are_exact_in_all_programs_or_in_none() {
        for words in called(&[]) {
            assert!(!words.iter().any(|word| word == "--tf32"), "{words:?}");
        }
        for (name, text) in SCRIPTS.iter().filter(|(name, _)| name.ends_with("_step.py")) {
            assert!(
                text.contains("\"--tf32\"") && text.contains("arguments.tf32"),
                "{name}"
            );
        }
    }
}
