//! A folder in which tests run `kiln`.

// Each test program has its own copy of this module and uses a part of it.
#![allow(dead_code)]

use std::path::PathBuf;
use std::process::{Command, Output};

use serde_json::Value;

/// Settings of a run with an evaluation after each step. It fails if [`Place::break_evaluation`] prepared it.
pub const FAILING_EVALUATION: [&str; 6] = [
    "--set",
    "data.evaluation_paths=[\"corpus.txt\"]",
    "--set",
    "train.evaluate_every=1",
    "--set",
    "train.checkpoint_every=0",
];

/// A folder with a corpus and a config.
pub struct Place {
    folder: tempfile::TempDir,
}

impl Place {
    /// With `config` as `small.toml`.
    pub fn new(config: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let text: String = (0..400)
            .map(|line| format!("line {line}: the kiln fires clay number {}\n", line * 7 % 13))
            .collect();
        std::fs::write(folder.path().join("corpus.txt"), text).unwrap();
        let place = Self { folder };
        place.write("small.toml", config);
        place
    }

    /// A file or folder in it.
    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Writes a file in it.
    pub fn write(&self, name: &str, text: &str) {
        std::fs::write(self.path(name), text).unwrap();
    }

    /// `kiln` with these arguments, in this folder and with a cache of its own.
    pub fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_kiln"));
        command
            .args(arguments)
            .current_dir(self.folder.path())
            .env("KILN_CACHE_DIR", self.path("cache"));
        command
    }

    /// Runs a command.
    pub fn run(&self, arguments: &[&str]) -> Output {
        self.command(arguments).output().unwrap()
    }

    /// Runs a command that must succeed; returns its standard output.
    pub fn ok(&self, arguments: &[&str]) -> String {
        let [out, _] = self.both(arguments);
        out
    }

    /// Runs a command that must succeed; returns its standard output and its standard error.
    pub fn both(&self, arguments: &[&str]) -> [String; 2] {
        let output = self.run(arguments);
        let [out, err] =
            [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes).into_owned());
        assert!(output.status.success(), "{arguments:?}: {err}");
        [out, err]
    }

    /// Runs a command that must fail; returns its standard error.
    pub fn fails(&self, arguments: &[&str]) -> String {
        let output = self.run(arguments);
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(
            !output.status.success() && text.contains("error") && !text.contains("panicked"),
            "{arguments:?}: {text}"
        );
        text
    }

    /// Prepares the evaluation of a run of [`FAILING_EVALUATION`]: tokens that its model does not have.
    pub fn break_evaluation(&self, run: &str) {
        std::fs::create_dir_all(self.path(run).join("data")).unwrap();
        let count = 200u64;
        let tokens = [0xff; 2].repeat(count as usize);
        let file = [&b"KILNTOK\x02"[..], &count.to_le_bytes(), &tokens].concat();
        std::fs::write(self.path(run).join("data/evaluation-tokens.bin"), file).unwrap();
    }

    /// The losses of a run's log, by step, as they were written.
    pub fn losses(&self, run: &str) -> Vec<(u64, String)> {
        let text = std::fs::read_to_string(self.path(run).join("log.jsonl")).unwrap();
        let entries = text
            .lines()
            .map(|line| serde_json::from_str::<Value>(line).unwrap());
        entries
            .filter(|entry| entry["kind"] == "step")
            .map(|entry| (entry["step"].as_u64().unwrap(), entry["loss"].to_string()))
            .collect()
    }

    /// The names of a run's checkpoints, in order.
    pub fn checkpoints(&self, run: &str) -> Vec<String> {
        let entries = std::fs::read_dir(self.path(run).join("checkpoints"))
            .into_iter()
            .flatten()
            .flatten();
        let mut names: Vec<String> = entries
            .map(|entry| entry.file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    }
}
