//! `KILN_MINIFY`: a step that goes wrong becomes the smallest graph that does, in a file that the error names.
//!
//! Faults are planted in the C compiler: a script that damages the sources of steps, but not those by which
//! Kiln tries a compiler. Each program runs in a process of its own, which is this one under another name.

#![cfg(unix)]

use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use burn_tensor::{Tensor, TensorData};
use kiln::{CompileBackend, CompileOptions, Error, Kiln, KilnDevice};
use kiln_burn::execute::minify::Observed;
use kiln_minify::{Case, Fill, observe, print_verdict};

/// Tells a process that it is the program of a test.
const PROGRAM: &str = "KILN_MINIFY_TEST_PROGRAM";

/// Tells a process that it observes the file that is its last argument.
const OBSERVER: &str = "KILN_MINIFY_TEST_OBSERVER";

fn step() -> Result<(), Error> {
    let options = CompileOptions::default()
        .with_name("planted")
        .check_against("interpret", 1e-4)
        .unwrap();
    let tensor = |shape: [usize; 2], seed: f32| {
        let count = shape[0] * shape[1];
        let values: Vec<f32> = (0..count).map(|i| (seed + 1.7 * i as f32).sin()).collect();
        Tensor::<Kiln, 2>::from_data(TensorData::new(values, shape), &KilnDevice::cpu())
    };
    let (x, w) = (tensor([5, 4], 0.1), tensor([4, 3], 0.2));
    let mut region = kiln::compile(options);
    region
        .run(|| ((x.matmul(w) * 0.5).tanh() + 1.0).sum_dim(1))
        .map(drop)
}

/// The process of a program: says what its step answers.
#[test]
fn program() {
    if std::env::var_os(PROGRAM).is_some() {
        match step() {
            Ok(()) => println!("the step is right"),
            Err(error) => println!("the step fails: {error}"),
        }
    }
}

/// The process that observes one graph, as `kiln minify --verdict --check` does.
#[test]
fn observer() {
    if std::env::var_os(OBSERVER).is_none() {
        return;
    }
    let file = std::env::args().next_back().unwrap();
    let case = Case::parse(&std::fs::read_to_string(file).unwrap(), Fill::Signed, 1).unwrap();
    let backend = Observed {
        backend: CompileBackend::Cpu,
        gpu: 0,
    };
    print_verdict(observe(&case, &backend, 1e-4).unwrap().as_ref());
}

/// A folder with a C compiler that plants `fault`, a line of shell that is given the source as `$file`.
struct Place {
    folder: tempfile::TempDir,
    compiler: PathBuf,
}

impl Place {
    fn new(fault: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let compiler = folder.path().join("cc");
        let script = format!(
            "#!/bin/sh\nfile=; last=\nfor word; do [ \"$last\" = -c ] && file=$word; last=$word; done\n\
             if [ -n \"$file\" ] && ! grep -q compiler_trial step.c && grep -q '_tanh_f32(' \"$file\"; then {fault}; fi\n\
             exec ${{REAL_CC:-cc}} \"$@\"\n"
        );
        // Renamed into place: a program that is being written cannot be run.
        let new = folder.path().join("new");
        std::fs::write(&new, script).unwrap();
        std::fs::set_permissions(&new, std::fs::Permissions::from_mode(0o755)).unwrap();
        std::fs::rename(new, &compiler).unwrap();
        Self { folder, compiler }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// What the test `name` of this program prints in a process with the planted compiler.
    fn run(&self, name: &str, variable: &str, file: Option<&Path>) -> Output {
        let exe = std::env::current_exe().unwrap();
        let mut command = Command::new(&exe);
        command.args(["--exact", name, "--nocapture"]).args(file);
        let observer = format!("{} --exact observer --nocapture", exe.display());
        let real = std::env::var("CC").unwrap_or_else(|_| "cc".to_owned());
        command
            .env(variable, "1")
            .env(OBSERVER, "1")
            .env("REAL_CC", real)
            .env("CC", &self.compiler)
            .env("KILN_CACHE_DIR", self.path("cache"))
            .env("KILN_MINIFY", self.path("small"))
            .env("KILN_MINIFY_COMMAND", observer);
        command.output().unwrap()
    }

    /// Runs the program, whose step must fail with an error that begins with `begins`, and checks the file
    /// that the error names: one `tanh` of one element, which shows the `fault` again.
    fn check(&self, begins: &str, fault: &str) {
        let output = self.run("program", PROGRAM, None);
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let error = text
            .split("the step fails: ")
            .nth(1)
            .unwrap_or_else(|| panic!("{text}"));
        assert!(error.starts_with(begins), "{error}");
        let files: Vec<_> = std::fs::read_dir(self.path("small")).unwrap().collect();
        let [Ok(file)] = &files[..] else {
            panic!("{files:?}")
        };
        let file = file.path();
        let repeat = format!(
            "kiln minify --check {} --backend cpu --device cpu --tolerance 0.0001",
            file.display()
        );
        assert!(error.contains(&format!("`{repeat}` repeats it")), "{error}");

        let small = std::fs::read_to_string(&file).unwrap();
        assert!(
            small.starts_with(&format!("// repeated by: {repeat}\n// fault: ")),
            "{small}"
        );
        let case = Case::parse(&small, Fill::Signed, 1).unwrap();
        let nodes = case.graph.nodes().map(|(_, node)| node.op.name());
        assert_eq!(nodes.collect::<Vec<_>>(), ["parameter", "tanh"], "{small}");
        let output = self.run("observer", OBSERVER, Some(&file));
        let verdict = String::from_utf8_lossy(&output.stdout).into_owned();
        let seen = match verdict.split("kiln-minify verdict: ").nth(1) {
            Some(verdict) => verdict.to_owned(),
            None => output.status.to_string(),
        };
        assert!(seen.contains(fault), "{seen}");
    }
}

#[test]
fn a_difference_is_minified() {
    let place = Place::new("sed -i 's/_tanh_f32(/_sin_f32(/' \"$file\"");
    place.check(
        "region `planted`: output 0 is not what interpret gives",
        "Differs",
    );
}

#[test]
fn a_source_that_does_not_compile_is_minified() {
    let place = Place::new("echo planted: no code for this >&2; exit 1");
    place.check("region `planted`: ", "Refused");
}

#[test]
fn a_crash_is_seen_in_another_process_and_minified() {
    let place = Place::new("sed -i 's/\\([vs]\\)_tanh_f32(/(__builtin_trap(), \\1_tanh_f32)(/' \"$file\"");
    place.check(
        "region `planted`: the compiled step did not run here, because it ran in a process of its own first: the process crashes",
        "signal",
    );
}

#[test]
fn what_is_right_runs() {
    let place = Place::new("true");
    let output = place.run("program", PROGRAM, None);
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(text.contains("the step is right"), "{text}");
    assert!(!place.path("small").exists());
}
