//! `mpirun -n N kiln train`: runs on several ranks from outside.
//!
//! Where there is no `mpirun` the tests say so and do nothing.

use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

struct Place(tempfile::TempDir);

impl Place {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let text: String = (0..400)
            .map(|line| format!("line {line}: the kiln fires clay number {}\n", line * 7 % 13))
            .collect();
        std::fs::write(folder.path().join("corpus.txt"), text).unwrap();
        let config = "name = \"small\"\n\
             [model]\nname = \"llama-tiny\"\nhidden_size = 32\nlayers = 1\nheads = 2\nintermediate_size = 48\n\
             [data]\nsource = \"text\"\npaths = [\"corpus.txt\"]\ntokenizer = \"bytes\"\nlength = 16\n\
             [optimizer]\nclip_norm = 1.0\n\
             [schedule]\nkind = \"constant\"\nrate = 3e-3\nwarmup = 5\n\
             [train]\nsteps = 24\nbatch_size = 12\nevaluation_batches = 2\nevaluate_every = 7\ncheckpoint_every = 4\n\
             [distributed]\ntimeout_seconds = 30\n\
             [sample]\ntokens = 0\n";
        std::fs::write(folder.path().join("small.toml"), config).unwrap();
        Self(folder)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// `kiln` on so many ranks; none if there is no `mpirun`.
    fn command(&self, ranks: usize, arguments: &[&str]) -> Option<Command> {
        // As root, as on machines of a CI.
        let root = [
            ("OMPI_ALLOW_RUN_AS_ROOT", "1"),
            ("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1"),
        ];
        let Ok(version) = Command::new("mpirun").envs(root).arg("--version").output() else {
            eprintln!("skipped: there is no mpirun on this machine (Debian: openmpi-bin)");
            return None;
        };
        let mut command = Command::new("mpirun");
        command.envs(root).args(["-n", &ranks.to_string()]);
        if !String::from_utf8_lossy(&version.stdout).contains("HYDRA") {
            command.args(["--oversubscribe", "--bind-to", "none"]);
        }
        command
            .arg(env!("CARGO_BIN_EXE_kiln"))
            .args(arguments)
            .current_dir(self.0.path())
            .env("KILN_CACHE_DIR", self.path("cache"));
        Some(command)
    }

    fn ok(&self, ranks: usize, arguments: &[&str]) -> Option<()> {
        let output = self.command(ranks, arguments)?.output().unwrap();
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{ranks} ranks, {arguments:?}: {text}");
        Some(())
    }

    /// The losses of a run's log, one for each step, in order.
    fn losses(&self, run: &str) -> Vec<f64> {
        let text = std::fs::read_to_string(self.path(run).join("log.jsonl")).unwrap();
        let entries: Vec<Value> = text
            .lines()
            .map(|line| serde_json::from_str(line).unwrap())
            .collect();
        let steps: Vec<&Value> = entries.iter().filter(|entry| entry["kind"] == "step").collect();
        for (number, step) in steps.iter().enumerate() {
            assert_eq!(step["step"], number + 1, "each step is logged once");
        }
        steps.iter().map(|step| step["loss"].as_f64().unwrap()).collect()
    }
}

fn agree(a: &[f64], b: &[f64], what: &str) {
    assert_eq!(a.len(), b.len(), "{what}");
    for (step, (a, b)) in a.iter().zip(b).enumerate() {
        assert!(
            (a - b).abs() < 1e-4 * a.abs(),
            "{what}, step {}: {a} and {b}",
            step + 1
        );
    }
}

#[test]
fn any_number_of_ranks_sees_the_same_data_and_goes_on_with_any_other() {
    let place = Place::new();
    let train = |ranks, run: &str, steps: &str| {
        place.ok(
            ranks,
            &["train", "--config", "small.toml", "--out", run, "--steps", steps],
        )
    };
    let Some(()) = train(1, "one", "24") else { return };
    let one = place.losses("one");
    assert_eq!(one.len(), 24);
    train(2, "two", "24").unwrap();
    agree(&one, &place.losses("two"), "two ranks");

    // Two ranks, then three, then one.
    train(2, "many", "8").unwrap();
    for (ranks, steps) in [(3, "16"), (1, "24")] {
        place
            .ok(ranks, &["train", "--resume", "many", "--steps", steps])
            .unwrap();
    }
    agree(&one, &place.losses("many"), "ranks that change");

    let output = place
        .command(5, &["train", "--config", "small.toml", "--out", "five"])
        .unwrap();
    let output = { output }.output().unwrap();
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(
        !output.status.success() && text.contains("12 examples do not divide among 5 ranks"),
        "{text}"
    );
}

#[test]
fn a_killed_rank_ends_the_run_and_a_resume_goes_on_with_the_same_losses() {
    let place = Place::new();
    let train = |run: &str| {
        place.command(
            2,
            &["train", "--config", "small.toml", "--steps", "400", "--out", run],
        )
    };
    let Some(mut whole) = train("whole") else { return };
    assert!(
        whole
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .status()
            .unwrap()
            .success()
    );

    let mut command = train("killed").unwrap();
    let mut child = command
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let start = Instant::now();
    let last =
        || std::fs::read_dir(place.path("killed/checkpoints")).map_or(0, |entries| entries.flatten().count());
    while last() < 2 {
        assert!(start.elapsed() < Duration::from_secs(300), "no checkpoint");
        assert!(
            child.try_wait().unwrap().is_none(),
            "the run ended before it was killed"
        );
        std::thread::sleep(Duration::from_millis(5));
    }
    // One of the two ranks: a child of mpirun.
    let children = format!("/proc/{0}/task/{0}/children", child.id());
    let Ok(children) = std::fs::read_to_string(children) else {
        eprintln!("skipped: the system does not tell who the ranks are");
        child.kill().unwrap();
        child.wait().unwrap();
        return;
    };
    let victim = children.split_whitespace().last().unwrap().to_owned();
    assert!(
        Command::new("kill")
            .args(["-9", &victim])
            .status()
            .unwrap()
            .success()
    );
    assert!(!child.wait().unwrap().success(), "mpirun says that a rank died");

    place.ok(2, &["train", "--resume", "killed"]).unwrap();
    assert_eq!(place.losses("whole"), place.losses("killed"), "bit for bit");
}
