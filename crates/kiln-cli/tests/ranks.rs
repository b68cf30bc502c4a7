//! `mpirun -n N kiln train`: runs on several ranks from outside.
//!
//! Where there is no `mpirun` the tests say so and do nothing.

mod place;

use std::ops::Deref;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use place::{FAILING_EVALUATION, Place};
use serde_json::Value;

const CONFIG: &str = "name = \"small\"\n\
     [model]\nname = \"llama-tiny\"\nhidden_size = 32\nlayers = 1\nheads = 2\nintermediate_size = 48\n\
     [data]\nsource = \"text\"\npaths = [\"corpus.txt\"]\ntokenizer = \"bytes\"\nlength = 16\n\
     [optimizer]\nclip_norm = 1.0\n\
     [schedule]\nkind = \"constant\"\nrate = 3e-3\nwarmup = 5\n\
     [train]\nsteps = 24\nbatch_size = 12\nevaluation_batches = 2\nevaluate_every = 7\ncheckpoint_every = 4\n\
     [distributed]\ntimeout_seconds = 30\n\
     [sample]\ntokens = 0\n";

/// A folder in which several ranks run.
struct Shared(Place);

impl Deref for Shared {
    type Target = Place;

    fn deref(&self) -> &Place {
        &self.0
    }
}

impl Shared {
    /// With a cache that holds no step. The object files in it are those of all such folders: the C compiler
    /// sees each file once.
    fn new() -> Self {
        let place = Place::new(CONFIG);
        let objects = Path::new(env!("CARGO_TARGET_TMPDIR")).join("objects");
        std::fs::create_dir_all(&objects).unwrap();
        std::fs::create_dir(place.path("cache")).unwrap();
        std::os::unix::fs::symlink(&objects, place.path("cache/objects")).unwrap();
        Self(place)
    }

    /// `kiln` on so many ranks; none if there is no `mpirun`.
    fn command(&self, ranks: usize, arguments: &[&str]) -> Option<Command> {
        self.command_of("mpirun", ranks, arguments)
    }

    /// [`Shared::command`] with this launcher.
    fn command_of(&self, launcher: &str, ranks: usize, arguments: &[&str]) -> Option<Command> {
        // As root, as on machines of a CI.
        let root = [
            ("OMPI_ALLOW_RUN_AS_ROOT", "1"),
            ("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1"),
        ];
        let Ok(version) = Command::new(launcher).envs(root).arg("--version").output() else {
            eprintln!("skipped: there is no {launcher} on this machine (Debian: openmpi-bin, mpich)");
            return None;
        };
        let mut command = Command::new(launcher);
        command.envs(root).args(["-n", &ranks.to_string()]);
        if !String::from_utf8_lossy(&version.stdout).contains("HYDRA") {
            command.args(["--oversubscribe", "--bind-to", "none"]);
        }
        command
            .arg(env!("CARGO_BIN_EXE_kiln"))
            .args(arguments)
            .current_dir(self.path(""))
            .env("KILN_CACHE_DIR", self.path("cache"));
        Some(command)
    }

    /// The data of `kiln explain` on ranks that are not there.
    fn predict(&self, arguments: &[&str]) -> Value {
        let explain = ["explain", "--config", "small.toml", "--json"];
        json(&self.run(&[&explain[..], arguments].concat()))
    }

    fn ok(&self, ranks: usize, arguments: &[&str]) -> Option<()> {
        let output = self.command(ranks, arguments)?.output().unwrap();
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{ranks} ranks, {arguments:?}: {text}");
        Some(())
    }

    /// The losses of a run's log, one for each step, in order.
    fn losses(&self, run: &str) -> Vec<f64> {
        let steps = self.0.losses(run);
        for (number, (step, _)) in (1..).zip(&steps) {
            assert_eq!(*step, number, "each step is logged once");
        }
        steps.iter().map(|(_, loss)| loss.parse().unwrap()).collect()
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
    let place = Shared::new();
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

/// Each rank reads its share alone: a picture that is damaged is an error of one rank, and the run ends.
#[test]
fn a_damaged_picture_ends_the_rank_that_has_it_and_the_run() {
    let place = Shared::new();
    let fixtures = concat!(env!("CARGO_MANIFEST_DIR"), "/../kiln-hub/tests/fixtures/jpegs");
    let files = std::fs::read_dir(fixtures)
        .unwrap()
        .map(|entry| entry.unwrap().path());
    let mut files: Vec<_> = files.collect();
    files.sort();
    for (number, file) in files.iter().take(8).enumerate() {
        let class = place.path("pictures").join(["cup", "pot"][number % 2]);
        std::fs::create_dir_all(&class).unwrap();
        std::fs::copy(file, class.join(format!("{number}.jpeg"))).unwrap();
    }
    std::fs::write(place.path("pictures/pot/5.jpeg"), "no picture").unwrap();
    place.write(
        "pictures.toml",
        "[model]\nname = \"squeezenet1_1\"\n[data]\nsource = \"images\"\npaths = [\"pictures\"]\n\
         image_size = 32\nevaluation_fraction = 0.0\n[train]\nsteps = 2\nbatch_size = 8\n\
         [distributed]\ntimeout_seconds = 30\n",
    );
    // All pictures are one batch, whatever their order.
    let train = ["train", "--config", "pictures.toml", "--out", "run"];
    let Some(mut command) = place.command(2, &train) else {
        return;
    };
    let output = command.output().unwrap();
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success(), "{text}");
    assert_eq!(
        text.matches("5.jpeg").count(),
        1,
        "one of two ranks reads it: {text}"
    );
    assert!(
        !text.contains("waited 30 s"),
        "the other one knows at once: {text}"
    );
}

const SHARDED: [&str; 2] = ["--set", "distributed.sharded_state=true"];

#[test]
fn ranks_that_divide_the_state_write_whole_checkpoints() {
    let place = Shared::new();
    let train = |ranks, run: &str, steps: &str, more: &[&str]| {
        let arguments = ["train", "--config", "small.toml", "--out", run, "--steps", steps];
        place.ok(ranks, &[&arguments, more].concat())
    };
    let Some(()) = train(1, "one", "24", &[]) else {
        return;
    };
    let one = place.losses("one");
    train(2, "two", "24", &SHARDED).unwrap();
    agree(&one, &place.losses("two"), "two ranks with shares");

    // Two ranks with shares, three, one rank with all of the state, and two with shares again.
    train(2, "many", "6", &SHARDED).unwrap();
    for (ranks, steps) in [(3, "12"), (1, "18"), (2, "24")] {
        place
            .ok(ranks, &["train", "--resume", "many", "--steps", steps])
            .unwrap();
    }
    agree(&one, &place.losses("many"), "ranks that change");
}

#[test]
fn ranks_save_what_they_have_when_an_evaluation_fails() {
    let place = Shared::new();
    place.break_evaluation("run");
    let arguments = ["train", "--config", "small.toml", "--out", "run", "--steps", "3"];
    let arguments = [&arguments[..], &SHARDED, &FAILING_EVALUATION].concat();
    let Some(mut command) = place.command(2, &arguments) else {
        return;
    };
    let output = command.output().unwrap();
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(
        !output.status.success() && text.contains("out of range"),
        "{text}"
    );
    assert_eq!(place.checkpoints("run"), ["step-00000001"], "{text}");
}

/// A rank that can evaluate does not finish the run when another one cannot.
#[test]
fn ranks_end_when_the_evaluation_of_another_one_fails() {
    let place = Shared::new();
    // The other rank is started in a folder of its own, in which it finds other files.
    place.break_evaluation("other/run");
    for file in ["corpus.txt", "small.toml"] {
        std::fs::copy(place.path(file), place.path("other").join(file)).unwrap();
    }
    let train = ["train", "--config", "small.toml", "--out", "run", "--steps", "2"];
    let arguments = [
        &train[..],
        &FAILING_EVALUATION,
        &["--set", "train.evaluate_every=0"],
    ]
    .concat();
    let Some(mut command) = place.command(1, &arguments) else {
        return;
    };
    command.args([":", "-n", "1", "-wdir"]).arg(place.path("other"));
    command.arg(env!("CARGO_BIN_EXE_kiln")).args(&arguments);
    let output = command.output().unwrap();
    let [said, errors] = [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes));
    assert!(
        !output.status.success() && errors.contains("out of range"),
        "{said}{errors}"
    );
    assert!(!said.contains("curves are in"), "{said}{errors}");
    assert_eq!(place.checkpoints("run"), ["step-00000002"], "{errors}");
}

#[test]
fn ranks_that_divide_a_master_copy_write_whole_checkpoints() {
    let place = Shared::new();
    let train = |ranks, run: &str, steps: &str, more: &[&str]| {
        let arguments = ["train", "--config", "small.toml", "--out", run, "--steps", steps];
        let weights = ["--set", "train.weights=\"bf16+master\""];
        place.ok(ranks, &[&arguments[..], &weights, more].concat())
    };
    let Some(()) = train(1, "one", "24", &[]) else {
        return;
    };
    train(2, "two", "24", &SHARDED).unwrap();
    train(2, "many", "6", &SHARDED).unwrap();
    place
        .ok(2, &["train", "--resume", "many", "--steps", "12"])
        .unwrap();
    // A recorded call may round the loss otherwise than a replayed one, in its last bit; parameters are the
    // same.
    for (a, b) in place.losses("two").iter().zip(place.losses("many")) {
        assert!(
            (a - b).abs() < 1e-6 * a,
            "nothing is lost in a checkpoint: {a} and {b}"
        );
    }
    for (ranks, steps) in [(3, "18"), (1, "24")] {
        place
            .ok(ranks, &["train", "--resume", "many", "--steps", steps])
            .unwrap();
    }
    // A sum that is rounded otherwise may move a parameter of 8 bits to its neighbour.
    let one = place.losses("one");
    for (run, losses) in [("two", place.losses("two")), ("many", place.losses("many"))] {
        let close = |(a, b): (&f64, &f64)| (a - b).abs() < 2e-3 * a;
        assert!(one.iter().zip(&losses).all(close), "{run}: {one:?} {losses:?}");
    }
}

#[test]
fn ranks_do_not_go_on_from_different_checkpoints() {
    let place = Shared::new();
    // The first one reads no data. Its ranks agree on other data all the same: one prepares it for all.
    let paths = |name: &str| format!("data.paths=[\"{name}\"]");
    let arguments = [
        "train",
        "--config",
        "small.toml",
        "--out",
        "run",
        "--set",
        &paths("missing.txt"),
    ];
    let Some(mut command) = place.command(2, &arguments) else {
        return;
    };
    assert!(!command.output().unwrap().status.success());
    let set = ["--steps", "8", "--set", &paths("corpus.txt")];
    place
        .ok(2, &[&["train", "--resume", "run"][..], &set].concat())
        .unwrap();
    let resume = |step| format!("run/checkpoints/step-{step:08}");
    let mut command = place
        .command(1, &["train", "--resume", &resume(8), "--steps", "24"])
        .unwrap();
    command.args([":", "-n", "1", env!("CARGO_BIN_EXE_kiln")]).args([
        "train",
        "--resume",
        &resume(4),
        "--steps",
        "24",
    ]);
    let output = command.output().unwrap();
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success(), "{text}");
    for part in ["it has 4, rank 0 has 8", "the same checkpoint", "--resume"] {
        assert!(text.contains(part), "{part}: {text}");
    }
    assert_eq!(place.losses("run").len(), 8, "the run is as it was");
    assert_eq!(place.checkpoints("run"), ["step-00000004", "step-00000008"]);
}

#[test]
fn a_killed_rank_ends_the_run_and_a_resume_goes_on_with_the_same_losses() {
    a_killed_rank(&[]);
}

#[test]
fn a_killed_rank_with_a_share_of_the_state_loses_nothing() {
    a_killed_rank(&SHARDED);
}

/// Kills one of two ranks at some moment, and compares the losses of the resumed run with those of a whole
/// one.
fn a_killed_rank(more: &[&str]) {
    let place = Shared::new();
    let train = |run: &str| {
        let arguments = ["train", "--config", "small.toml", "--steps", "400", "--out", run];
        place.command(2, &[&arguments, more].concat())
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
    while place.checkpoints("killed").len() < 2 {
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

/// The launchers of Debian's two MPIs. Sums go in the order of ranks and over both in the same way, so that
/// runs are equal bit for bit; and so they are with buckets of any size.
#[test]
fn neither_the_mpi_nor_the_buckets_change_a_bit() {
    let place = Shared::new();
    let mut runs = Vec::new();
    for launcher in ["mpirun.openmpi", "mpirun.mpich"] {
        for (name, bucket) in [("default", "0"), ("small", "0.004")] {
            let run = format!("{launcher}-{name}");
            let bucket = format!("distributed.bucket_mb={bucket}");
            let arguments = [
                "train",
                "--config",
                "small.toml",
                "--steps",
                "8",
                "--out",
                &run,
                "--set",
                &bucket,
            ];
            let Some(mut command) = place.command_of(launcher, 2, &arguments) else {
                continue;
            };
            let output = command.output().unwrap();
            assert!(
                output.status.success(),
                "{run}: {}",
                String::from_utf8_lossy(&output.stderr)
            );
            runs.push((place.losses(&run), run));
        }
    }
    for (losses, run) in &runs {
        assert_eq!(losses, &runs[0].0, "{run} and {}", runs[0].1);
    }
}

fn json(output: &std::process::Output) -> Value {
    let (text, errors) = (
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr),
    );
    assert!(output.status.success(), "{errors}");
    serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text}\n{errors}"))
}

#[test]
fn a_step_on_ranks_that_are_not_there_is_predicted() {
    let place = Shared::new();
    let predict = |ranks: &str, link: &str| place.predict(&["--ranks", ranks, "--link", link]);
    let number = |report: &Value, key: &str| report["predictions"][0][key].as_f64().unwrap();
    let fast = predict("2", "1000GB,0us,0us");
    let slow = predict("2", "1MB,1ms");
    let many = predict("6", "1MB,1ms");
    // Next to nothing is exposed on a link that costs next to nothing.
    assert!(
        number(&fast, "exposed_seconds") < 1e-5,
        "{}",
        fast["predictions"][0]
    );
    for report in [&slow, &many] {
        let (step, kernels) = (number(report, "step_seconds"), number(report, "kernel_seconds"));
        let exposed = number(report, "exposed_seconds");
        let travel = number(report, "travel_seconds");
        assert!(
            step >= kernels + exposed - 1e-9 && exposed <= travel && exposed > 0.0,
            "{}",
            report["predictions"][0]
        );
        let buckets = report["predictions"][0]["buckets"].as_array().unwrap();
        assert!(buckets.len() > 1 && buckets[0]["count"].as_u64() > buckets[1]["count"].as_u64());
    }
    // All gradients cross the link: 2 (n - 1) / n times their bytes, each rank.
    let collectives = slow["steps"].as_array().unwrap().last().unwrap()["collectives"]
        .as_array()
        .unwrap()
        .clone();
    let bytes: f64 = collectives.iter().map(|it| it["bytes"].as_f64().unwrap()).sum();
    assert!(
        number(&slow, "travel_seconds") > bytes / 1e6
            && number(&slow, "travel_seconds") < 1.1 * bytes / 1e6 + 0.1
    );
    // AdamW keeps two numbers for each parameter, and the sums are one.
    let state = number(&slow, "state_bytes");
    assert!(
        (state / (2.0 * bytes) - 1.0).abs() < 0.01,
        "{state} bytes of state, {bytes} of gradients"
    );
}

#[test]
fn a_step_with_divided_state_is_predicted() {
    let place = Shared::new();
    let link = ["--ranks", "2,8", "--link", "1MB,1ms"];
    let whole = place.predict(&link);
    let sharded = place.predict(&[&link[..], &["--sharded"]].concat());
    let number = |report: &Value, at: usize, key: &str| report["predictions"][at][key].as_f64().unwrap();
    assert_eq!(sharded["predictions"][0]["sharded"], true);
    for (at, ranks) in [(0, 2.0), (1, 8.0)] {
        // Shares are rounded up to whole elements.
        let share = number(&whole, at, "state_bytes") / ranks;
        let state = number(&sharded, at, "state_bytes");
        assert!((state / share - 1.0).abs() < 0.03, "{state} of {share}");
        // What is reduced and scattered, and gathered, is what a sum sends.
        let (one, two) = (
            number(&whole, at, "travel_seconds"),
            number(&sharded, at, "travel_seconds"),
        );
        assert!((two / one - 1.0).abs() < 0.3, "{two} and {one}");
    }
    let step = sharded["steps"].as_array().unwrap().last().unwrap();
    let kinds: Vec<&str> = step["collectives"]
        .as_array()
        .unwrap()
        .iter()
        .map(|it| it["kind"].as_str().unwrap())
        .collect();
    assert!(
        kinds.contains(&"reduce_scatter") && kinds.contains(&"all_gather"),
        "{kinds:?}"
    );
    assert_eq!(
        step["externs"].as_array().unwrap().len(),
        0,
        "collectives are none of the operations on the host"
    );
}

#[test]
fn what_is_exposed_is_logged_traced_and_explained() {
    let place = Shared::new();
    let arguments = [
        "train",
        "--config",
        "small.toml",
        "--steps",
        "6",
        "--out",
        "run",
        "--profile",
        "4",
    ];
    let Some(()) = place.ok(2, &arguments) else { return };
    let log = std::fs::read_to_string(place.path("run/log.jsonl")).unwrap();
    let steps: Vec<Value> = log
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    let steps: Vec<&Value> = steps.iter().filter(|entry| entry["kind"] == "step").collect();
    assert!(
        steps
            .iter()
            .all(|step| step["exposed"].as_f64() <= step["seconds"].as_f64()),
        "{log}"
    );
    assert!(
        steps.iter().all(|step| step["exposed"].as_f64().unwrap() > 0.0),
        "{log}"
    );
    for (rank, name) in ["run/trace.json", "run/trace.rank1.json"].iter().enumerate() {
        let trace: Value = serde_json::from_slice(&std::fs::read(place.path(name)).unwrap()).unwrap();
        let events = trace["traceEvents"].as_array().unwrap();
        assert_eq!(events[0]["args"]["name"], format!("kiln rank {rank}"));
        let is = |event: &&Value, category: &str, text: &str| {
            event["cat"] == category && event["name"].as_str().unwrap().starts_with(text)
        };
        let travels = events
            .iter()
            .filter(|event| is(event, "ranks", "all_reduce of"))
            .count();
        let starts = events
            .iter()
            .filter(|event| is(event, "kernel", "start all_reduce of"))
            .count();
        let waits = events
            .iter()
            .filter(|event| is(event, "kernel", "wait for all_reduce of"))
            .count();
        assert!(
            travels >= starts && starts >= 4 && starts == waits,
            "{travels} {starts} {waits}"
        );
    }
    let output = place
        .command(2, &["explain", "--config", "small.toml", "--measure", "--json"])
        .unwrap()
        .output();
    // Rank 0 prints, and nobody else.
    let report = json(&output.unwrap());
    let collectives = report["steps"].as_array().unwrap().last().unwrap()["collectives"].clone();
    let collectives = collectives.as_array().unwrap();
    assert!(
        collectives.iter().all(|it| it["exposed"].as_f64().unwrap() > 0.0),
        "{collectives:?}"
    );
    assert!(report["predictions"][0]["measured"] == true && report["predictions"][0]["ranks"] == 2);
}

#[test]
fn ranks_with_different_configs_say_in_what() {
    let place = Shared::new();
    place.write("other.toml", &CONFIG.replace("rate = 3e-3", "rate = 1e-3"));
    let program = |config: &str| -> Vec<String> {
        [
            env!("CARGO_BIN_EXE_kiln"),
            "train",
            "--config",
            config,
            "--out",
            "run",
        ]
        .map(str::to_owned)
        .to_vec()
    };
    let Some(mut command) = place.command(1, &["train", "--config", "small.toml", "--out", "run"]) else {
        return;
    };
    command.args([":", "-n", "1"]).args(program("other.toml"));
    let output = command.output().unwrap();
    let text = String::from_utf8_lossy(&output.stderr);
    let said = "rank 1 differs from rank 0 in its config's `schedule.rate`: it has 0.001, rank 0 has 0.003";
    assert!(!output.status.success() && text.contains(said), "{text}");
}

#[test]
fn a_launcher_that_connects_no_mpi_is_an_error_that_says_what_to_type() {
    let place = Shared::new();
    let train = |variables: &[(&str, &str)]| {
        let output = place
            .0
            .command(&["train", "--config", "small.toml", "--out", "run"])
            .envs(variables.iter().copied())
            .output()
            .unwrap();
        assert!(!output.status.success());
        String::from_utf8_lossy(&output.stderr).into_owned()
    };
    if place.command(1, &[]).is_none() {
        return;
    }
    // As under a `srun` without an interface of the MPI.
    let srun = train(&[
        ("SLURM_PROCID", "1"),
        ("SLURM_STEP_NUM_TASKS", "2"),
        ("SLURM_LOCALID", "1"),
    ]);
    assert!(
        srun.contains("mixed world") && srun.contains("srun --mpi=pmix"),
        "{srun}"
    );
}
