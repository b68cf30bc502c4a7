//! The program from outside: runs, interruptions, bad configs and damaged checkpoints, in folders of their
//! own.

mod place;

use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use place::{FAILING_EVALUATION, Place};
use serde_json::Value;

/// A folder with the config [`small`].
fn new_place() -> Place {
    Place::new(&small(""))
}

fn small(more: &str) -> String {
    format!(
        "name = \"small\"\n\
         [model]\nname = \"llama-tiny\"\nhidden_size = 32\nlayers = 1\nheads = 2\nintermediate_size = 48\ndropout = 0.1\n\
         [data]\nsource = \"text\"\npaths = [\"corpus.txt\"]\ntokenizer = \"bytes\"\nlength = 16\n\
         [optimizer]\nclip_norm = 1.0\n\
         [schedule]\nrate = 3e-3\nwarmup = 5\n\
         [train]\nsteps = 30\nbatch_size = 4\nbackend = \"aot_eager\"\nevaluation_batches = 2\nevaluate_every = 7\ncheckpoint_every = 4\n\
         [sample]\nprompt = \"line\"\ntokens = 8\n{more}"
    )
}

/// Waits until the run has a checkpoint of at least `step`.
fn wait_for(place: &Place, run: &str, step: u64, child: &mut Child) {
    let start = Instant::now();
    let reached = |name: &String| {
        name.strip_prefix("step-")
            .and_then(|text| text.parse::<u64>().ok())
            .is_some_and(|found| found >= step)
    };
    while !place.checkpoints(run).iter().any(reached) {
        assert!(
            child.try_wait().unwrap().is_none(),
            "the run ended before step {step}"
        );
        assert!(start.elapsed() < Duration::from_secs(300), "no checkpoint");
        std::thread::sleep(Duration::from_millis(2));
    }
}

#[test]
fn a_run_learns_and_leaves_everything_behind() {
    let place = new_place();
    let text = place.ok(&["train", "--config", "small.toml", "--out", "run", "--steps", "60"]);
    assert!(text.contains("line"), "the sample continues the prompt: {text}");
    let losses = place.losses("run");
    let value = |index: usize| losses[index].1.parse::<f64>().unwrap();
    assert_eq!(
        losses.iter().map(|(step, _)| *step).collect::<Vec<_>>(),
        (1..=60).collect::<Vec<_>>()
    );
    assert!(
        (value(0) - 257f64.ln()).abs() < 0.3 && value(59) < 0.75 * value(0),
        "{losses:?}"
    );
    assert_eq!(
        place.checkpoints("run"),
        ["step-00000056", "step-00000060"],
        "the newest two are kept"
    );
    let last = place.path("run/checkpoints/step-00000060");
    for file in [
        "model.safetensors",
        "config.json",
        "tokenizer.json",
        "optimizer.mpk",
        "state.json",
    ] {
        assert!(last.join(file).is_file(), "{file}");
    }
    let architecture: Value =
        serde_json::from_slice(&std::fs::read(last.join("config.json")).unwrap()).unwrap();
    assert_eq!(
        architecture["eos_token_id"], 256,
        "what ends a text of this tokenizer"
    );
    assert!(
        std::fs::read_to_string(place.path("run/curves.svg"))
            .unwrap()
            .contains("polyline")
    );

    let text = place.ok(&["eval", "--run", "run"]);
    assert!(text.contains("step 60") && text.contains("perplexity"), "{text}");
    let generate = [
        "generate",
        "--model",
        "run",
        "--prompt",
        "line",
        "--tokens",
        "12",
        "--temperature",
        "0",
    ];
    let text = place.ok(&generate);
    assert!(text.starts_with("line") && text.trim_end().len() > 4, "{text}");
    assert_eq!(place.ok(&generate), text, "temperature 0 has no choice");

    let error = place.fails(&["train", "--config", "small.toml", "--out", "run"]);
    assert!(error.contains("--resume"), "{error}");
}

#[test]
fn a_killed_run_goes_on_bit_for_bit() {
    let place = new_place();
    let whole = [
        "train",
        "--config",
        "small.toml",
        "--steps",
        "200",
        "--set",
        "sample.tokens=0",
        "--out",
    ];
    place.ok(&[&whole[..], &["whole"]].concat());
    let mut child = place
        .command(&[&whole[..], &["killed"]].concat())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    for step in [8, 40, 90] {
        wait_for(&place, "killed", step, &mut child);
        child.kill().unwrap();
        child.wait().unwrap();
        child = place
            .command(&["train", "--resume", "killed"])
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
    }
    assert!(child.wait().unwrap().success());
    let (whole, killed) = (place.losses("whole"), place.losses("killed"));
    assert_eq!(whole.len(), 200);
    assert_eq!(whole, killed);
    let weights = |run: &str| {
        std::fs::read(
            place
                .path(run)
                .join("checkpoints/step-00000200/model.safetensors"),
        )
        .unwrap()
    };
    assert!(weights("whole") == weights("killed"), "the weights differ");
}

#[test]
fn a_run_killed_before_its_first_checkpoint_starts_again() {
    let place = new_place();
    let arguments = [
        "train",
        "--config",
        "small.toml",
        "--steps",
        "6",
        "--set",
        "train.checkpoint_every=0",
        "--out",
    ];
    place.ok(&[&arguments[..], &["whole"]].concat());
    std::fs::create_dir_all(place.path("early")).unwrap();
    let read = |file: &str| std::fs::read_to_string(place.path(file)).unwrap();
    place.write("early/config.toml", &read("whole/config.toml"));
    let lines = read("whole/log.jsonl");
    let (before, _) = lines.split_once("{\"kind\":\"checkpoint\"").unwrap();
    place.write("early/log.jsonl", before);
    // Settings that would have made checkpoints in the steps before are no reason to miss any.
    let lowered = ["--set", "train.checkpoint_every=2"];
    let error = place.fails(
        &[
            &["train", "--resume", "early"][..],
            &lowered,
            &["--set", "sample.prompt="],
        ]
        .concat(),
    );
    assert!(error.contains("sample.prompt"), "{error}");
    let [_, said] = place.both(
        &[
            &["train", "--resume", "early"][..],
            &lowered,
            &["--set", "sample.prompt=x"],
        ]
        .concat(),
    );
    assert!(
        said.contains("the run begins again") && said.contains("early/abandoned/log.jsonl"),
        "{said}"
    );
    assert_eq!(read("early/abandoned/log.jsonl"), before);
    assert_eq!(place.losses("whole"), place.losses("early"));
    // A run that had a checkpoint does not begin again.
    std::fs::rename(place.path("early/checkpoints"), place.path("moved")).unwrap();
    let before = read("early/log.jsonl");
    let error = place.fails(&["train", "--resume", "early"]);
    assert!(
        error.contains("after step 6") && error.contains("back into early/checkpoints"),
        "{error}"
    );
    assert_eq!(read("early/log.jsonl"), before);
}

#[test]
fn a_resumed_run_stays_in_its_folder() {
    let place = new_place();
    place.ok(&["train", "--config", "small.toml", "--steps", "4", "--out", "run"]);
    let error = place.fails(&["train", "--resume", "run", "--out", "other", "--steps", "6"]);
    assert!(
        error.contains("leave --out away") && error.contains("copy the run's folder"),
        "{error}"
    );
    assert_eq!(place.checkpoints("run"), ["step-00000004"]);
    // Its own folder, however it is written.
    for from in ["run", "run/checkpoints/step-00000004"] {
        place.ok(&["train", "--resume", from, "--out", "./run/", "--steps", "4"]);
    }
    assert_eq!(names(&place, "run/checkpoints"), ["step-00000004"]);
    // The remedy.
    let copied = Command::new("cp")
        .args(["-r", "run", "other"])
        .current_dir(place.path(""))
        .status();
    assert!(copied.unwrap().success());
    place.ok(&["train", "--resume", "other", "--steps", "6"]);
    assert_eq!((place.losses("run").len(), place.losses("other").len()), (4, 6));

    // What is asked for is a checkpoint, but of no run.
    std::fs::create_dir(place.path("backup")).unwrap();
    std::fs::rename(
        place.path("other/checkpoints/step-00000006"),
        place.path("backup/best"),
    )
    .unwrap();
    let error = place.fails(&["eval", "--run", "backup/best"]);
    assert!(
        error.contains("backup/best is a checkpoint without its run"),
        "{error}"
    );
    // Nor does a new run begin over the checkpoints of another one.
    std::fs::rename(place.path("run/config.toml"), place.path("run/config.bak")).unwrap();
    for arguments in [
        &["train", "--config", "small.toml", "--out", "run"][..],
        &["train", "--resume", "run"],
        &["eval", "--run", "run"],
    ] {
        let error = place.fails(arguments);
        assert!(
            error.contains("run has checkpoints, but no config.toml"),
            "{error}"
        );
    }
    assert_eq!(place.checkpoints("run"), ["step-00000004"]);
}

/// Evaluation reads the running statistics of batch norm and a checkpoint takes everything: neither may
/// change what the run learns, nor may a resumption at any checkpoint.
#[test]
fn evaluations_checkpoints_and_resumptions_leave_a_run_as_it_is() {
    let place = new_place();
    place.write(
        "shapes.toml",
        "[model]\nname = \"resnet18\"\n[data]\nsource = \"shapes\"\nimage_size = 32\nexamples = 32\naugment = true\n\
         evaluation_fraction = 0.25\n[optimizer]\nname = \"sgd\"\nmomentum = 0.9\n[schedule]\nrate = 1e-2\n\
         [train]\nsteps = 20\nbatch_size = 2\n",
    );
    let run = |out: &str, evaluate_every: u32, checkpoint_every: u32| {
        let set = [
            format!("train.evaluate_every={evaluate_every}"),
            format!("train.checkpoint_every={checkpoint_every}"),
        ];
        let config = ["train", "--config", "shapes.toml", "--out", out];
        place.ok(&[&config[..], &["--set", &set[0], "--set", &set[1]]].concat());
        place.losses(out)
    };
    let alone = run("alone", 0, 0);
    assert_eq!(alone.len(), 20);
    // Each alone, both at one step and at different ones, and past the end.
    for (evaluate_every, checkpoint_every) in [(0, 4), (1, 0), (1, 10), (7, 10), (100, 4), (7, 100)] {
        let out = format!("every-{evaluate_every}-{checkpoint_every}");
        let losses = run(&out, evaluate_every, checkpoint_every);
        assert_eq!(losses, alone, "{out}");
        // As if the run had been killed after one of its checkpoints.
        let mut checkpoints = place.checkpoints(&out);
        while checkpoints.len() > 1 {
            let last = checkpoints.pop().unwrap();
            std::fs::remove_dir_all(place.path(&out).join("checkpoints").join(last)).unwrap();
        }
        if checkpoint_every > 0 && checkpoint_every < 20 {
            place.ok(&["train", "--resume", &out]);
            assert_eq!(place.losses(&out), alone, "{out}, resumed at {checkpoints:?}");
        }
        std::fs::remove_dir_all(place.path(&out)).unwrap();
    }
}

#[test]
fn weights_of_sixteen_bits_are_saved_and_resumed() {
    let place = new_place();
    place.write("corpus.txt", &"a line of text, and another one\n".repeat(60));
    place.write("small.toml", &small(""));
    let error = place.fails(&["train", "--config", "small.toml", "--weights", "bf8"]);
    assert!(
        error.contains("train.weights") && error.contains("bf16+master"),
        "{error}"
    );
    let stored = |run: &str, checkpoint: &str| {
        let file = place
            .path(run)
            .join("checkpoints")
            .join(checkpoint)
            .join("model.safetensors");
        let bytes = std::fs::read(file).unwrap();
        let tensors = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        let types: Vec<_> = tensors.iter().map(|(_, tensor)| tensor.dtype()).collect();
        types
    };
    for (weights, dtype) in [
        ("f32", safetensors::Dtype::F32),
        ("bf16", safetensors::Dtype::BF16),
        ("bf16+master", safetensors::Dtype::F32),
    ] {
        let out = format!("run-{weights}");
        let keep = ["--set", "train.keep=9", "--set", "train.autocast=bf16"];
        place.ok(&[
            &[
                "train",
                "--config",
                "small.toml",
                "--out",
                &out,
                "--weights",
                weights,
            ],
            &keep[..],
        ]
        .concat());
        let losses = place.losses(&out);
        let mut checkpoints = place.checkpoints(&out);
        for checkpoint in &checkpoints {
            assert!(
                stored(&out, checkpoint).iter().all(|&found| found == dtype),
                "{weights}"
            );
        }
        // As if the run had been killed after one of its checkpoints.
        while checkpoints.len() > 3 {
            let last = checkpoints.pop().unwrap();
            std::fs::remove_dir_all(place.path(&out).join("checkpoints").join(last)).unwrap();
        }
        place.ok(&["train", "--resume", &out]);
        assert_eq!(place.losses(&out), losses, "{weights}");
    }
    let [exact, narrow, master] =
        ["f32", "bf16", "bf16+master"].map(|weights| place.losses(&format!("run-{weights}")));
    assert!(
        exact != narrow && exact != master && narrow != master,
        "each is another step"
    );
}

#[cfg(unix)]
#[test]
fn an_interrupted_run_saves_and_leaves() {
    let place = new_place();
    let arguments = [
        "train",
        "--config",
        "small.toml",
        "--steps",
        "100000",
        "--out",
        "run",
    ];
    let mut child = place
        .command(&arguments)
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    wait_for(&place, "run", 4, &mut child);
    let interrupted = Command::new("kill")
        .args(["-INT", &child.id().to_string()])
        .status()
        .unwrap();
    assert!(interrupted.success());
    let output = child.wait_with_output().unwrap();
    let text = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(130), "{text}");
    let steps = place.losses("run").len();
    assert!(
        text.contains(&format!("stopped after step {steps};")) && text.contains("--resume run"),
        "{text}"
    );
    assert_eq!(place.checkpoints("run").last(), Some(&format!("step-{steps:08}")));
}

/// A pipe that nobody reads.
fn closed() -> Stdio {
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    writer.into()
}

#[test]
fn a_run_that_nobody_reads_trains_and_saves() {
    let place = new_place();
    let mut command = place.command(&["train", "--config", "small.toml", "--steps", "10", "--out", "run"]);
    command.args(["--profile", "2"]);
    for set in ["train.log_every=1", "train.checkpoint_minutes=1e300"] {
        command.args(["--set", set]);
    }
    command.env("KILN_LOG", "info").stdout(closed()).stderr(closed());
    assert!(command.status().unwrap().success());
    assert_eq!(place.losses("run").len(), 10);
    assert_eq!(
        place.checkpoints("run"),
        ["step-00000008", "step-00000010"],
        "what is not seen is saved"
    );

    for results in [
        &["eval", "--run", "run"][..],
        &["generate", "--model", "run", "--prompt", "line", "--tokens", "4"],
        &["backends"],
        &["cache", "list"],
    ] {
        let status = place.command(results).stdout(closed()).status().unwrap();
        assert!(status.success(), "{results:?}");
    }
    // A full disk is another matter than a reader that has read enough.
    if let Ok(full) = std::fs::OpenOptions::new().write(true).open("/dev/full") {
        let output = place.command(&["backends"]).stdout(full).output().unwrap();
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(
            output.status.code() == Some(1) && text.contains("standard output"),
            "{text}"
        );
    }

    let mut command = place.command(&["train", "--config", "missing.toml"]);
    let status = command.stderr(closed()).status().unwrap();
    assert_eq!(status.code(), Some(1), "an error is no panic");
}

/// A long run in the folder `run`, for which hangups are ignored as by `nohup`, or are not.
#[cfg(unix)]
fn with_hangups(place: &Place, ignored: bool) -> Child {
    use std::os::unix::process::CommandExt;

    let arguments = ["train", "--config", "small.toml", "--steps", "100000"];
    let mut command = place.command(&arguments);
    command.args(["--out", "run"]);
    let action = if ignored { libc::SIG_IGN } else { libc::SIG_DFL };
    // SAFETY: a call that may be made between fork and exec.
    unsafe {
        command.pre_exec(move || {
            libc::signal(libc::SIGHUP, action);
            Ok(())
        })
    };
    let child = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn();
    child.unwrap()
}

/// Sends signals, one right after the other.
#[cfg(unix)]
fn send(child: &Child, signals: &[i32]) {
    for &signal in signals {
        // SAFETY: the process has not been waited for, so that the number is its own.
        assert_eq!(unsafe { libc::kill(child.id() as i32, signal) }, 0);
    }
}

#[cfg(unix)]
#[test]
fn a_terminal_that_is_closed_ends_a_run_with_a_checkpoint() {
    let place = new_place();
    let mut child = with_hangups(&place, false);
    wait_for(&place, "run", 4, &mut child);
    send(&child, &[libc::SIGHUP, libc::SIGHUP]);
    std::thread::sleep(Duration::from_millis(1));
    send(&child, &[libc::SIGTERM]);
    let output = child.wait_with_output().unwrap();
    let text = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(130), "{text}");
    let steps = place.losses("run").len();
    assert!(text.contains(&format!("stopped after step {steps};")), "{text}");
    assert_eq!(place.checkpoints("run").last(), Some(&format!("step-{steps:08}")));
}

#[cfg(unix)]
#[test]
fn a_run_under_nohup_goes_on() {
    let place = new_place();
    let mut child = with_hangups(&place, true);
    wait_for(&place, "run", 4, &mut child);
    send(&child, &[libc::SIGHUP]);
    let steps = place.losses("run").len() as u64;
    wait_for(&place, "run", steps + 20, &mut child);
    send(&child, &[libc::SIGINT]);
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(130));
}

#[test]
fn unknown_keys_models_and_backends_name_the_nearest() {
    let place = new_place();
    place.write("bad.toml", &small("[trane]\nsteps = 3\n"));
    let error = place.fails(&["train", "--config", "bad.toml"]);
    assert!(
        error.contains("bad.toml") && error.contains("did you mean `train`"),
        "{error}"
    );
    let train = ["train", "--config", "small.toml", "--set"];
    for (set, expected) in [
        ("train.bach_size=3", "did you mean `batch_size`"),
        ("model.name=lama-tiny", "did you mean `llama-tiny`"),
        ("train.backend=cpus", "unknown backend"),
        ("data.source=shapes", "data.source = text"),
        ("optimizer.beta1=2.0", "beta1"),
        ("data.paths=[\"nowhere.txt\"]", "nowhere.txt"),
    ] {
        let error = place.fails(&[&train[..], &[set]].concat());
        assert!(error.contains(expected), "{set}: {error}");
    }
    assert!(
        place
            .fails(&["train", "--config", "missing.toml"])
            .contains("missing.toml")
    );
    assert!(
        place
            .fails(&["bench", "resnet81", "--json"])
            .contains("did you mean `resnet18`")
    );
}

/// Changes one byte in the middle of a file.
fn damage(path: &Path) {
    let mut bytes = std::fs::read(path).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 0x40;
    std::fs::write(path, bytes).unwrap();
}

#[test]
fn a_damaged_checkpoint_is_refused_with_the_one_before_it() {
    let place = new_place();
    place.ok(&["train", "--config", "small.toml", "--steps", "8", "--out", "run"]);
    let last = place.path("run/checkpoints/step-00000008");
    for file in [
        "model.safetensors",
        "optimizer.mpk",
        "tokenizer.json",
        "config.json",
    ] {
        let whole = std::fs::read(last.join(file)).unwrap();
        damage(&last.join(file));
        let error = place.fails(&["train", "--resume", "run", "--steps", "12"]);
        assert!(error.contains(file) && error.contains("step-00000004"), "{error}");
        std::fs::write(last.join(file), &whole[..whole.len() / 3]).unwrap();
        assert!(place.fails(&["eval", "--run", "run"]).contains(file));
        std::fs::write(last.join(file), whole).unwrap();
    }
    std::fs::write(last.join("state.json"), "{\"step\": 8").unwrap();
    assert!(
        place
            .fails(&["train", "--resume", "run", "--steps", "12"])
            .contains("state.json")
    );
    place.ok(&[
        "train",
        "--resume",
        "run/checkpoints/step-00000004",
        "--steps",
        "12",
    ]);
    assert_eq!(place.losses("run").len(), 12);
    assert!(place.fails(&["train", "--resume", "."]).contains("no checkpoint"));
}

#[test]
fn a_loss_that_is_no_number_stops_the_run() {
    let place = new_place();
    let arguments = [
        "train",
        "--config",
        "small.toml",
        "--out",
        "run",
        "--set",
        "optimizer.clip_norm=0.0",
        "--set",
    ];
    let error = place.fails(&[&arguments[..], &["schedule.rate=1e38"]].concat());
    assert!(
        error.contains("at step ") && error.contains("checkpoint"),
        "{error}"
    );
}

/// The names in a folder of a run, in order.
fn names(place: &Place, folder: &str) -> Vec<String> {
    let entries = std::fs::read_dir(place.path(folder)).unwrap();
    let mut names: Vec<_> = entries
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

/// The files in a folder of a run, in order.
fn files(place: &Place, folder: &str) -> Vec<(String, Vec<u8>)> {
    let read = |name: String| {
        let bytes = std::fs::read(place.path(folder).join(&name)).unwrap();
        (name, bytes)
    };
    names(place, folder).into_iter().map(read).collect()
}

#[test]
fn checkpoints_of_an_abandoned_line_are_set_aside() {
    let place = new_place();
    let set = ["--set", "sample.tokens=0", "--set", "train.keep=9"];
    let train = ["train", "--config", "small.toml", "--out", "run", "--steps", "12"];
    place.ok(&[&train[..], &set].concat());
    let resume = |from: &str, steps: &str| -> String {
        let arguments = [
            "train",
            "--resume",
            from,
            "--steps",
            steps,
            "--set",
            "train.keep=1",
        ];
        let [_, said] = place.both(&arguments);
        said
    };
    let said = resume("run/checkpoints/step-00000004", "6");
    for path in ["run/abandoned/step-00000008", "run/abandoned/step-00000012"] {
        assert_eq!(said.matches(path).count(), 1, "{said}");
    }
    assert_eq!(names(&place, "run/abandoned"), ["step-00000008", "step-00000012"]);
    assert_eq!(place.checkpoints("run"), ["step-00000006"]);
    let said = resume("run", "8");
    assert!(
        said.contains("going on after step 6") && !said.contains("abandoned"),
        "{said}"
    );
    assert_eq!(place.checkpoints("run"), ["step-00000008"]);
    // The other way: one that was set aside, in place of what came after it.
    let said = resume("run/abandoned/step-00000008", "8");
    assert!(said.contains("run/abandoned/step-00000008-2"), "{said}");
    assert_eq!(place.checkpoints("run"), ["step-00000008"]);
    assert_eq!(
        names(&place, "run/abandoned"),
        ["step-00000008", "step-00000008-2", "step-00000012"]
    );
    // Without a checkpoint, the run does not begin again: what was set aside may be all that there is of it.
    let log = || std::fs::read(place.path("run/log.jsonl")).unwrap();
    let before = log();
    std::fs::remove_dir_all(place.path("run/checkpoints/step-00000008")).unwrap();
    let error = place.fails(&["train", "--resume", "run"]);
    assert!(
        error.contains("has no checkpoint") && error.contains("--resume run/abandoned/step-00000012"),
        "{error}"
    );
    assert_eq!(log(), before);
}

#[test]
fn a_line_that_was_left_comes_back_with_its_log_and_its_checkpoints() {
    let place = new_place();
    let set = ["--set", "sample.tokens=0", "--set", "train.keep=9"];
    let train = ["train", "--config", "small.toml", "--out", "run", "--steps", "12"];
    place.ok(&[&train[..], &set].concat());
    let first = place.losses("run");
    let resume = |from: &str, steps: &str, rate: &str| {
        let rate = format!("schedule.rate={rate}");
        place.ok(&["train", "--resume", from, "--steps", steps, "--set", &rate])
    };
    resume("run/checkpoints/step-00000004", "8", "1e-2");
    let second = place.losses("run");
    assert_eq!(
        second[..5],
        first[..5],
        "the fifth loss is that before the update"
    );
    assert!(second.len() == 8 && second[5..] != first[5..8], "{second:?}");
    assert_eq!(place.checkpoints("run"), ["step-00000004", "step-00000008"]);

    resume("run/abandoned/step-00000012", "16", "3e-3");
    let losses = place.losses("run");
    assert_eq!(losses[..12], first);
    assert_eq!(losses.last().unwrap().0, 16);
    assert_eq!(
        place.checkpoints("run"),
        ["step-00000004", "step-00000012", "step-00000016"],
        "the eighth was of the other line"
    );
    resume("run/abandoned/step-00000008-2", "8", "1e-2");
    assert_eq!(place.losses("run"), second);
    assert_eq!(place.checkpoints("run"), ["step-00000004", "step-00000008"]);
}

#[test]
fn a_run_belongs_to_one_process() {
    let place = new_place();
    let train = ["train", "--config", "small.toml", "--steps", "100000"];
    let start = || {
        let mut command = place.command(&train);
        command
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap()
    };
    let (mut one, mut other) = (start(), start());
    wait_for(&place, "runs/small", 4, &mut one);
    wait_for(&place, "runs/small-2", 4, &mut other);
    let error = place.fails(&["train", "--resume", "runs/small"]);
    assert!(
        error.contains("another process trains in runs/small") && error.contains("--out"),
        "{error}"
    );
    for child in [&mut one, &mut other] {
        assert!(child.try_wait().unwrap().is_none(), "nobody disturbed it");
        child.kill().unwrap();
        child.wait().unwrap();
    }
    assert_eq!(names(&place, "runs"), ["small", "small-2"]);
    let last = place.checkpoints("runs/small").pop().unwrap();
    let steps = last.trim_start_matches("step-");
    place.ok(&["train", "--resume", "runs/small", "--steps", steps]);
}

#[test]
fn a_parameter_that_is_no_number_is_not_saved() {
    let place = new_place();
    let set = ["--set", "train.keep=1", "--set", "train.evaluate_every=0"];
    let train = ["train", "--config", "small.toml", "--out", "run", "--steps", "2"];
    place.ok(&[&train[..], &set].concat());
    // The loss of the last step is that before its update.
    let large = [
        "--set",
        "schedule.rate=1e30",
        "--set",
        "optimizer.weight_decay=1e30",
    ];
    let error = place.fails(&[&["train", "--resume", "run", "--steps", "3"], &large[..]].concat());
    assert!(
        error.contains("the parameter ") && error.contains("at step 3") && error.contains("step-00000002"),
        "{error}"
    );
    assert_eq!(place.checkpoints("run"), ["step-00000002"]);
}

/// Makes every parameter so large that an evaluation of the next model overflows: each moves by as much, so
/// that products overflow and the parameters do not.
const OVERFLOWING: [&str; 8] = [
    "--set",
    "schedule.rate=1e15",
    "--set",
    "schedule.warmup=0",
    "--set",
    "optimizer.weight_decay=0.0",
    "--set",
    "train.checkpoint_every=0",
];

#[test]
fn an_evaluation_that_is_no_number_is_a_failure() {
    let place = new_place();
    let train = ["train", "--config", "small.toml", "--out", "run", "--steps", "1"];
    let error = place.fails(&[&train[..], &OVERFLOWING].concat());
    assert!(
        error.contains("the evaluation loss is ") && error.contains("no checkpoint before it"),
        "{error}"
    );
    let log = std::fs::read_to_string(place.path("run/log.jsonl")).unwrap();
    assert!(log.lines().last().unwrap().contains("\"loss\":null"), "{log}");
    let error = place.fails(&["eval", "--run", "run"]);
    assert!(error.contains("the evaluation loss is "), "{error}");
}

#[test]
fn an_evaluation_that_fails_takes_no_step_with_it() {
    let place = new_place();
    place.break_evaluation("run");
    let train = ["train", "--config", "small.toml", "--out", "run", "--steps", "5"];
    let error = place.fails(&[&train[..], &FAILING_EVALUATION].concat());
    assert!(error.contains("out of range"), "{error}");
    assert_eq!(place.checkpoints("run"), ["step-00000001"]);
    assert!(place.path("run/curves.svg").is_file());
}

/// One checkpoint is kept: that of a model which overflows must not be that one.
#[test]
fn a_model_that_overflows_takes_no_checkpoint_with_it() {
    let place = new_place();
    let train = |more: &[&str], steps: &str, every: &str| -> String {
        let every = format!("train.evaluate_every={every}");
        let set = ["--steps", steps, "--set", "train.keep=1", "--set", &every];
        place.fails(&[&["train"], more, &OVERFLOWING, &set].concat())
    };
    place.ok(&[
        "train",
        "--config",
        "small.toml",
        "--out",
        "run",
        "--steps",
        "4",
        "--set",
        "train.keep=1",
    ]);
    assert_eq!(place.checkpoints("run"), ["step-00000004"]);
    // In the middle, it is not saved: a resumed run would go on from it.
    let error = train(&["--resume", "run"], "7", "1");
    for part in [
        "after step 5",
        "the evaluation loss is ",
        "--resume run/checkpoints/step-00000004",
    ] {
        assert!(error.contains(part), "{part}: {error}");
    }
    assert_eq!(place.checkpoints("run"), ["step-00000004"]);
    assert!(place.path("run/curves.svg").is_file());
    // At the end it is saved before it is evaluated, and takes no place.
    let error = train(&["--resume", "run"], "5", "0");
    assert!(
        error.contains("--resume run/checkpoints/step-00000004"),
        "{error}"
    );
    assert_eq!(place.checkpoints("run"), ["step-00000004", "step-00000005"]);
}

#[test]
fn a_text_that_cannot_be_printed_is_noticed_before_or_is_no_failure() {
    let place = new_place();
    let train = ["train", "--config", "small.toml", "--steps", "1"];
    for (set, expected) in [
        ("sample.prompt=", "it has no token"),
        ("sample.prompt=AAAA", "it has 300 tokens"),
        ("sample.temperature=-1.0", "temperature is -1"),
    ] {
        let set = set.replace("AAAA", &"a".repeat(300));
        let out = format!("without-{}", expected.replace(' ', "-"));
        let error = place.fails(&[&train[..], &["--out", &out, "--set", &set]].concat());
        assert!(
            error.contains("sample") && error.contains(expected),
            "{set}: {error}"
        );
        assert!(place.checkpoints(&out).is_empty(), "{set}");
    }
    let unlooked = ["--out", "run", "--set", "data.evaluation_fraction=0.0"];
    let [_, said] = place.both(&[&train[..], &OVERFLOWING, &unlooked].concat());
    assert!(said.contains("there is no text to print"), "{said}");
    assert_eq!(place.checkpoints("run"), ["step-00000001"]);
}

/// A run that ended before its first step does not keep the corrected command out of its folder.
#[test]
fn a_command_may_be_corrected_before_its_first_step() {
    let place = new_place();
    let train = |more: &[&str]| {
        let train = ["train", "--config", "small.toml", "--steps", "1", "--out", "run"];
        [&train[..], more].concat().join(" ")
    };
    let long = format!("sample.prompt={}", "a".repeat(300));
    for (more, expected) in [
        (&["--weights", "bf8"][..], "`bf8`"),
        (&["--set", "model.freeze=[\"nowhere\"]"], "model.freeze"),
        (
            &[
                "--set",
                "data.tokenizer=bpe",
                "--set",
                "data.vocabulary=300",
                "--set",
                &long,
            ],
            "tokens",
        ),
    ] {
        let command = train(more);
        let error = place.fails(&command.split(' ').collect::<Vec<_>>());
        assert!(error.contains(expected) && !error.contains("--resume"), "{error}");
    }
    // Of another tokenizer than the data that was prepared.
    let command = train(&[]);
    let command: Vec<&str> = command.split(' ').collect();
    place.ok(&command);
    assert_eq!(place.losses("run").len(), 1);
    let config = std::fs::read_to_string(place.path("run/config.toml")).unwrap();
    assert!(config.contains("tokenizer = \"bytes\""), "{config}");
    let error = place.fails(&command);
    assert!(error.contains("already holds a run"), "{error}");
}

#[test]
fn a_checkpoint_that_lies_elsewhere_is_written_again() {
    let place = new_place();
    let set = ["--set", "sample.tokens=0", "--set", "train.keep=9"];
    let train = ["train", "--config", "small.toml", "--out", "run", "--steps", "8"];
    place.ok(&[&train[..], &set].concat());
    std::fs::create_dir(place.path("run/best")).unwrap();
    let best = "run/best/step-00000004";
    std::fs::rename(place.path("run/checkpoints/step-00000004"), place.path(best)).unwrap();
    place.ok(&["train", "--resume", best, "--steps", "4"]);
    assert_eq!(place.checkpoints("run"), ["step-00000004"]);
    assert_eq!(names(&place, "run/abandoned"), ["step-00000008"]);
}

#[test]
fn a_checkpoint_with_a_parameter_that_is_no_number_is_refused() {
    let place = new_place();
    place.ok(&["train", "--config", "small.toml", "--out", "run", "--steps", "8"]);
    let last = place.path("run/checkpoints/step-00000008");
    let file = last.join("model.safetensors");
    let mut bytes = std::fs::read(&file).unwrap();
    let end = bytes.len() - 4;
    bytes[end..].copy_from_slice(&f32::NAN.to_le_bytes());
    std::fs::write(&file, bytes).unwrap();
    // As a program that has no checks would have written it.
    let state = last.join("state.json");
    let mut value: Value = serde_json::from_slice(&std::fs::read(&state).unwrap()).unwrap();
    value["files"]
        .as_object_mut()
        .unwrap()
        .remove("model.safetensors");
    std::fs::write(&state, value.to_string()).unwrap();
    let error = place.fails(&["train", "--resume", "run", "--steps", "9"]);
    assert!(
        error.contains("the parameter ") && error.contains("is NaN") && error.contains("step-00000004"),
        "{error}"
    );
}

/// The loss that `kiln eval` prints.
fn evaluated(place: &Place, run: &str) -> f64 {
    let text = place.ok(&["eval", "--run", run]);
    let (_, behind) = text.split_once("evaluation loss ").unwrap();
    behind.split(',').next().unwrap().parse().unwrap()
}

#[test]
fn an_evaluation_sees_every_example_once_whatever_the_batches() {
    let place = new_place();
    place.ok(&["train", "--config", "small.toml", "--out", "run", "--steps", "8"]);
    let path = place.path("run/config.toml");
    let config = std::fs::read_to_string(&path).unwrap();
    let loss = evaluated(&place, "run");
    for size in [7, 30] {
        let other = config.replace("batch_size = 4\n", &format!("batch_size = {size}\n"));
        assert_ne!(other, config);
        std::fs::write(&path, other).unwrap();
        let found = evaluated(&place, "run");
        assert!(
            (found - loss).abs() < 2e-4,
            "batches of {size}: {found} and {loss}"
        );
    }
}

#[test]
fn an_evaluation_is_of_the_data_that_the_config_names() {
    let place = new_place();
    place.ok(&["train", "--config", "small.toml", "--out", "run", "--steps", "4"]);
    place.write("a.txt", &"line of clay\n".repeat(90));
    place.write("b.txt", &"0123456789\n".repeat(90));
    let path = place.path("run/config.toml");
    let config = std::fs::read_to_string(&path).unwrap();
    let before = files(&place, "run/data");
    let own = evaluated(&place, "run");
    let of = |file: &str| {
        let other = config.replace(
            "evaluation_paths = []",
            &format!("evaluation_paths = [\"{file}\"]"),
        );
        assert_ne!(other, config);
        std::fs::write(&path, other).unwrap();
        evaluated(&place, "run")
    };
    let [a, b] = ["a.txt", "b.txt"].map(of);
    assert!(a != own && a != b, "{own} {a} {b}");
    assert_eq!(of("a.txt"), a);
    assert!(
        files(&place, "run/data") == before,
        "the run's folder stays as it is"
    );
    std::fs::write(&path, &config).unwrap();
    assert_eq!(evaluated(&place, "run"), own);
}

#[test]
fn a_corpus_that_has_changed_is_noticed_when_it_is_prepared_again() {
    let place = new_place();
    place.ok(&["train", "--config", "small.toml", "--out", "run", "--steps", "4"]);
    let corpus = std::fs::read_to_string(place.path("corpus.txt")).unwrap();
    // As many windows.
    place.write("corpus.txt", &format!("x{corpus}"));
    std::fs::remove_dir_all(place.path("run/data")).unwrap();
    let resume = ["train", "--resume", "run", "--steps", "6"];
    for arguments in [&resume[..], &["eval", "--run", "run"], &resume] {
        let error = place.fails(arguments);
        assert!(
            error.contains("data.paths has ") && error.contains("restore the data"),
            "{error}"
        );
    }
    place.write("corpus.txt", &corpus);
    place.ok(&resume);
}

#[test]
fn a_resumed_run_does_not_pretend_to_read_other_data() {
    let place = new_place();
    place.write("other.txt", &"another corpus\n".repeat(400));
    place.ok(&["train", "--config", "small.toml", "--out", "run", "--steps", "4"]);
    let config = || std::fs::read_to_string(place.path("run/config.toml")).unwrap();
    let before = config();
    let resume = ["train", "--resume", "run", "--steps", "8", "--set"];
    for set in [
        "data.paths=[\"other.txt\"]",
        "data.evaluation_paths=[\"other.txt\"]",
        "data.tokenizer=bpe",
    ] {
        let error = place.fails(&[&resume[..], &[set]].concat());
        let (key, now) = set.split_once('=').unwrap();
        assert!(
            error.contains(&format!("{key} is ")) && error.contains(now) && error.contains("run/data"),
            "{set}: {error}"
        );
        assert_eq!(config(), before, "{set}");
    }
    // Nor with a config that was edited.
    let edited = |from: &str, to: &str| {
        assert!(before.contains(from), "{before}");
        std::fs::write(place.path("run/config.toml"), before.replace(from, to)).unwrap();
        place.fails(&[
            "train",
            "--resume",
            "run",
            "--config",
            "small.toml",
            "--steps",
            "8",
        ])
    };
    place.write("small.toml", &small("").replace("corpus.txt", "other.txt"));
    let error = edited("corpus.txt", "other.txt");
    assert!(error.contains("data.paths is [\"corpus.txt\"]"), "{error}");
    let error = edited("batch_size", "batchsize");
    assert!(
        error.contains("run/config.toml") && error.contains("correct this file"),
        "{error}"
    );
    std::fs::write(place.path("run/config.toml"), &before).unwrap();
    // The files are not read again, and need not be there. No vocabulary is trained.
    std::fs::remove_file(place.path("corpus.txt")).unwrap();
    place.ok(&[&resume[..], &["data.vocabulary=300"]].concat());
}

#[test]
fn data_that_a_run_could_not_prepare_may_change() {
    let place = new_place();
    let missing = ["--set", "data.paths=[\"missing.txt\"]"];
    place.fails(&[&["train", "--config", "small.toml", "--out", "run"][..], &missing].concat());
    let paths = ["--set", "data.paths=[\"corpus.txt\"]"];
    let resume = ["train", "--resume", "run", "--steps", "2"];
    // It ends once more, when the data is prepared, which is of these paths from then on.
    let error = place.fails(&[&resume[..], &paths, &["--set", "sample.prompt="]].concat());
    assert!(error.contains("sample.prompt"), "{error}");
    let error = place.fails(&[&resume[..], &missing].concat());
    assert!(error.contains("data.paths is [\"corpus.txt\"]"), "{error}");
    place.ok(&[&resume[..], &["--set", "sample.prompt=line"]].concat());
    let config = std::fs::read_to_string(place.path("run/config.toml")).unwrap();
    assert!(
        config.contains("corpus.txt") && !config.contains("missing.txt"),
        "{config}"
    );
}

#[test]
fn a_resumed_run_that_is_another_one_keeps_its_config() {
    let place = new_place();
    place.ok(&["train", "--config", "small.toml", "--out", "run", "--steps", "4"]);
    let config = || std::fs::read_to_string(place.path("run/config.toml")).unwrap();
    let before = config();
    let resume = ["train", "--resume", "run", "--steps", "8", "--set"];
    for (set, expected) in [
        ("train.batch_size=8", "leave it at 4"),
        ("seed=3", "leave it at 0"),
        ("data.length=8", "data.length"),
        ("optimizer.name=sgd", "leave it at adamw"),
        ("model.layers=2", "leave it at 1"),
        ("model.dropout=0.5", "leave it at 0.1"),
    ] {
        let error = place.fails(&[&resume[..], &[set]].concat());
        assert!(
            error.contains(set.split('=').next().unwrap())
                && error.contains(expected)
                && error.contains("model.weights = \"run/checkpoints/step-00000004\""),
            "{set}: {error}"
        );
        assert_eq!(config(), before, "{set}");
    }
    // Nor if the run's own config was edited.
    std::fs::write(
        place.path("run/config.toml"),
        before.replace("layers = 1", "layers = 2"),
    )
    .unwrap();
    for arguments in [&["train", "--resume", "run"][..], &["eval", "--run", "run"]] {
        let error = place.fails(arguments);
        assert!(
            error.contains("model.layers is 1 in the checkpoint") && error.contains("and 2 in this run"),
            "{error}"
        );
    }
    std::fs::write(place.path("run/config.toml"), &before).unwrap();
    // A checkpoint of an earlier version does not say whose state it has.
    let state = place.path("run/checkpoints/step-00000004/state.json");
    let text = std::fs::read_to_string(&state).unwrap();
    assert!(text.contains("\"held_out\": \"random\","), "{text}");
    let text = text.replace("\"held_out\": \"random\",", "");
    std::fs::write(&state, text.replace("\"adamw\"", "null")).unwrap();
    let error = place.fails(&[&resume[..], &["optimizer.name=sgd"]].concat());
    assert!(error.contains("leave optimizer.name as it was"), "{error}");
    assert_eq!(config(), before);
    place.ok(&[&resume[..], &["train.keep=3"]].concat());
    assert!(config().contains("keep = 3"));
    // Nor how it set examples aside, which must not change.
    let text = std::fs::read_to_string(place.path("run/checkpoints/step-00000008/state.json")).unwrap();
    assert!(text.contains("every-nth"), "{text}");
}

#[test]
fn accumulated_batches_are_one_large_batch() {
    let place = new_place();
    let losses = |out: &str, set: &[&str]| -> Vec<f64> {
        let mut arguments = vec![
            "train",
            "--config",
            "small.toml",
            "--steps",
            "6",
            "--out",
            out,
            "--set",
            "model.dropout=0.0",
        ];
        set.iter().for_each(|set| arguments.extend(["--set", set]));
        place.ok(&arguments);
        place
            .losses(out)
            .iter()
            .map(|(_, loss)| loss.parse().unwrap())
            .collect()
    };
    let large = losses("large", &["train.batch_size=8"]);
    let accumulated = losses("accumulated", &["train.batch_size=4", "train.accumulate=2"]);
    for (a, b) in large.iter().zip(&accumulated) {
        assert!((a - b).abs() < 1e-3 * a, "{large:?} {accumulated:?}");
    }
}

#[test]
fn classifiers_train_and_are_evaluated() {
    let place = new_place();
    let rows = (0..64).map(|row| {
        let (text, label) = if row % 2 == 0 {
            ("red clay and fire", "clay")
        } else {
            ("cold water and wind", "water")
        };
        format!("{{\"text\": \"{text} {row}\", \"label\": \"{label}\"}}\n")
    });
    place.write("table.jsonl", &rows.collect::<String>());
    place.write(
        "bert.toml",
        "[model]\nname = \"bert-minilm\"\nhidden_size = 32\nlayers = 1\nheads = 2\nintermediate_size = 48\n\
         [data]\nsource = \"table\"\npaths = [\"table.jsonl\"]\nvocabulary = 300\nlength = 12\nevaluation_fraction = 0.25\n\
         [schedule]\nrate = 5e-3\n[train]\nsteps = 30\nbatch_size = 8\nbackend = \"aot_eager\"\n",
    );
    place.ok(&["train", "--config", "bert.toml", "--out", "bert"]);
    let text = place.ok(&["eval", "--run", "bert"]);
    assert!(text.contains("accuracy 100.0 %"), "{text}");
    // The checkpoint's ids are those of its tokenizer, whatever the data has become.
    let tokenizer =
        |folder: &str| std::fs::read_to_string(place.path(folder).join("tokenizer.json")).unwrap();
    let own = tokenizer("bert/checkpoints/step-00000030");
    std::fs::remove_dir_all(place.path("bert/data")).unwrap();
    let rows = std::fs::read_to_string(place.path("table.jsonl")).unwrap();
    place.write(
        "table.jsonl",
        &rows.replace("fire", "embers").replace("wind", "gale"),
    );
    place.ok(&["eval", "--run", "bert"]);
    assert!(!place.path("bert/data").exists(), "an evaluation writes nothing");
    for (steps, is_told) in [("31", true), ("32", false)] {
        let [_, said] = place.both(&["train", "--resume", "bert", "--steps", steps]);
        assert_eq!(
            said.contains("as many examples as when the position was saved, but others"),
            is_told,
            "{said}"
        );
    }
    assert_eq!(tokenizer("bert/data"), own);
    // So are its classes: another name would shift the labels.
    let rows = std::fs::read_to_string(place.path("table.jsonl")).unwrap();
    place.write("table.jsonl", &rows.replace("\"clay\"", "\"zinc\""));
    for file in ["classes.json", "tokenizer.json"] {
        std::fs::remove_file(place.path("bert/data").join(file)).unwrap();
    }
    for command in [&["eval", "--run"][..], &["train", "--resume"]] {
        let error = place.fails(&[command, &["bert"]].concat());
        assert!(
            error.contains("classes water, zinc") && error.contains("began with clay, water"),
            "{error}"
        );
    }
    place.write("table.jsonl", &rows);
    let mut other: Value = serde_json::from_str(&own).unwrap();
    other["model"]["merges"].as_array_mut().unwrap().pop().unwrap();
    place.write("bert/data/tokenizer.json", &other.to_string());
    for command in [&["eval", "--run"][..], &["train", "--resume"]] {
        let error = place.fails(&[command, &["bert"]].concat());
        assert!(
            error.contains("another tokenizer") && error.contains("remove tokenizer.json, "),
            "{error}"
        );
    }
    place.write(
        "shapes.toml",
        "[model]\nname = \"squeezenet1_1\"\n[data]\nsource = \"shapes\"\nimage_size = 32\nexamples = 32\nevaluation_fraction = 0.25\n\
         [optimizer]\nname = \"sgd\"\n[schedule]\nrate = 1e-2\n[train]\nsteps = 3\nbatch_size = 4\nbackend = \"aot_eager\"\n",
    );
    place.ok(&["train", "--config", "shapes.toml", "--out", "shapes"]);
    let [text, said] = place.both(&["eval", "--run", "shapes"]);
    assert!(text.contains("accuracy"), "{text}");
    assert!(
        !said.contains("not known"),
        "its config.json is Kiln's own: {said}"
    );
    let error = place.fails(&["train", "--resume", "shapes", "--set", "data.examples=64"]);
    assert!(
        error.contains("data.examples is 32") && error.contains("leave it at 32"),
        "{error}"
    );
    assert!(
        place
            .fails(&["generate", "--model", "shapes", "--prompt", "x"])
            .contains("no Llama")
    );
}

#[test]
fn bench_prints_the_fields_of_its_peers() {
    let place = new_place();
    let measure = |more: &[&str]| -> Value {
        let arguments = [
            "bench",
            "mlp",
            "--batch",
            "4",
            "--steps",
            "2",
            "--backend",
            "aot_eager",
            "--json",
        ];
        serde_json::from_str(place.ok(&[&arguments[..], more].concat()).trim()).unwrap()
    };
    for (more, infer) in [(&[][..], false), (&["--infer"][..], true)] {
        let line = measure(more);
        assert_eq!(
            (line["peer"].as_str(), line["infer"].as_bool()),
            (Some("kiln-aot_eager"), Some(infer))
        );
        for field in ["median", "min", "first", "compile_s"] {
            assert!(line[field].as_f64().unwrap() > 0.0, "{field}: {line}");
        }
        for field in ["model", "batch", "seq", "dtype", "mem_mb", "loss", "arena_mb"] {
            assert!(line.get(field).is_some(), "{field}: {line}");
        }
    }
}

#[test]
fn backends_explain_and_cache_answer() {
    let place = new_place();
    let text = place.ok(&["backends"]);
    assert!(
        ["eager", "aot_eager", "candle", "interpret", "cpu", "cuda"]
            .iter()
            .all(|name| text.contains(name)),
        "{text}"
    );
    assert!(
        text.contains("NVIDIA GPUs") && text.contains("libcublasLt"),
        "{text}"
    );
    let text = place.ok(&["explain", "--config", "small.toml", "--backend", "aot_eager"]);
    assert!(
        text.contains("region `train_step`") && text.contains("0 graph breaks"),
        "{text}"
    );
    assert!(place.ok(&["cache", "list"]).contains("0 entries"));
    assert!(place.ok(&["cache", "clear"]).contains("removed 0 entries"));
}

#[test]
fn a_graph_that_a_backend_cannot_run_is_minified() {
    let place = new_place();
    let graph = "graph @step {
  %x = parameter 0 : f32[8,6]
  %e = exp %x : f32[8,6]
  %s = reduce sum %e {axes=[0]} : f32[6]
  %t = tanh %s : f32[6]
  return %t, %e
}
";
    place.write("step.kg", graph);
    let right = ["minify", "step.kg", "--backend", "aot_eager"];
    assert!(place.ok(&right).contains("shows no fault"));
    // A GPU that is not there refuses every graph.
    let nowhere = ["--backend", "cuda", "--device", "cuda:99"];
    let text = place.ok(&[&["minify", "step.kg"][..], &nowhere].concat());
    assert!(
        text.contains("does not compile") && text.contains("step.min.kg"),
        "{text}"
    );
    let small = std::fs::read_to_string(place.path("step.min.kg")).unwrap();
    assert!(
        small.starts_with("// repeated by: kiln minify --check step.min.kg"),
        "{small}"
    );
    assert_eq!(
        small.matches(" = ").count(),
        1,
        "an argument that is returned: nothing runs there, {small}"
    );
    let again = place.run(&[&["minify", "--check", "step.min.kg"][..], &nowhere].concat());
    assert!(String::from_utf8_lossy(&again.stdout).contains("does not compile"));
    assert_eq!(again.status.code(), Some(1));
}

#[test]
fn a_gpu_that_is_not_there_is_named() {
    let place = new_place();
    let text = place.fails(&["bench", "mlp", "--steps", "1", "--device", "cuda:99"]);
    let missing = text.contains("libcuda was not found; install NVIDIA's driver");
    assert!(missing || text.contains("there is no device cuda:99"), "{text}");
    let text = place.fails(&["bench", "mlp", "--device", "gpu"]);
    assert!(text.contains("unknown device `gpu`"), "{text}");
}

/// What is explained is the step that `kiln train` runs with the config.
#[test]
fn explain_follows_the_config() {
    let place = new_place();
    let config = std::fs::read_to_string(place.path("small.toml")).unwrap();
    let half = config.replace(
        "backend = \"aot_eager\"",
        "backend = \"cpu\"\nautocast = \"bf16\"\nweights = \"bf16+master\"",
    );
    std::fs::write(place.path("half.toml"), half).unwrap();
    let explain = |arguments: &[&str]| place.ok(&[&["explain", "--config"], arguments].concat());
    let text = explain(&["small.toml"]);
    assert!(
        text.contains("each on burn-flex") && !text.contains("bf16"),
        "{text}"
    );
    let text = explain(&["half.toml"]);
    assert!(text.contains("kernels, ") && text.contains("bf16["), "{text}");
    // An argument is asked for by hand.
    let text = explain(&["half.toml", "--autocast", "f16", "--weights", "f32"]);
    assert!(text.contains("f16[") && !text.contains("bf16["), "{text}");
    // What `train` refuses is refused.
    place.write(
        "frozen.toml",
        &config.replace("[data]", "freeze = [\"layer.0\"]\n[data]"),
    );
    let error = place.fails(&["explain", "--config", "frozen.toml"]);
    assert!(
        error.contains("model.freeze") && error.contains("no parameter"),
        "{error}"
    );
}

#[test]
fn explain_gives_data_and_a_page() {
    let place = new_place();
    let page = place.path("page.html");
    let text = place.ok(&[
        "explain",
        "--config",
        "small.toml",
        "--json",
        "--html",
        page.to_str().unwrap(),
    ]);
    let report: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(report["region"], "train_step");
    let steps = report["steps"].as_array().unwrap();
    assert!(steps.iter().any(|step| step["runs"].as_u64() > Some(0)), "{text}");
    assert!(std::fs::read_to_string(page).unwrap().contains("id=\"report\""));
}

#[test]
fn the_log_shows_what_it_is_asked_for() {
    let place = new_place();
    let explain = |log: Option<&str>| {
        let mut command = place.command(&["explain", "--config", "small.toml", "--backend", "cpu"]);
        command.env_remove("KILN_LOG");
        log.into_iter().for_each(|log| {
            command.env("KILN_LOG", log);
        });
        String::from_utf8(command.output().unwrap().stderr).unwrap()
    };
    let silent = explain(None);
    assert!(!silent.contains("kiln::"), "{silent}");
    // The compiled steps are in the cache now: recompiles and hits are all that is left to say.
    let said = explain(Some("recompiles,cache"));
    let lines: Vec<&str> = said.lines().filter(|line| line.contains("kiln::")).collect();
    assert!(
        lines
            .iter()
            .any(|line| line.contains("kiln::cache") && line.contains("hit")),
        "{said}"
    );
    assert!(!said.contains("kiln::kernels"), "{said}");
}

#[test]
fn a_profiled_run_leaves_a_trace() {
    let place = new_place();
    let text = place.ok(&[
        "train",
        "--config",
        "small.toml",
        "--steps",
        "5",
        "--profile",
        "5",
        "--out",
        "profiled",
    ]);
    assert!(
        text.contains("by kernel") && text.contains("compile times"),
        "{text}"
    );
    let trace = std::fs::read_to_string(place.path("profiled").join("trace.json")).unwrap();
    let trace: Value = serde_json::from_str(&trace).unwrap();
    let events = trace["traceEvents"].as_array().unwrap();
    let count = |name: &str| {
        events
            .iter()
            .filter(|event| event["name"] == name && event["ph"] == "X")
            .count()
    };
    assert_eq!(count("train step"), 5);
    assert_eq!(count("wait for data"), 5);
    assert!(
        count("data loading") >= 5,
        "batches are prepared on a thread of their own"
    );
}

#[test]
fn a_trace_that_cannot_be_written_costs_no_step() {
    let place = new_place();
    // A folder stands where the trace belongs, and another one where the curves do.
    for name in ["trace.json", "curves.svg"] {
        std::fs::create_dir_all(place.path("untraced").join(name).join("kept")).unwrap();
    }
    let arguments = [
        "train",
        "--config",
        "small.toml",
        "--steps",
        "4",
        "--out",
        "untraced",
    ];
    let output = place
        .command(&arguments)
        .args(["--profile", "2"])
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success(), "{said}");
    for what in ["its trace", "its curves"] {
        assert!(
            said.contains(&format!("training goes on without {what}")),
            "{said}"
        );
    }
    let error = said.lines().last().unwrap();
    assert!(error.contains("trace.json"), "{said}");
    assert_eq!(place.checkpoints("untraced"), ["step-00000004"]);
}

#[test]
fn the_configs_of_the_repository_are_valid() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../configs");
    let mut count = 0;
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let config = kiln_cli::config::Config::read(&path, &[]).unwrap();
        let family = kiln_cli::model::Family::of(&config.model.name).unwrap();
        family.check(config.data.source).unwrap();
        assert_eq!(path.file_stem().unwrap().to_str(), Some(config.name.as_str()));
        count += 1;
    }
    assert_eq!(count, 8);
}

#[test]
fn a_run_is_exported() {
    let place = new_place();
    place.ok(&["train", "--config", "small.toml", "--out", "run", "--steps", "8"]);
    let log = std::fs::read(place.path("run/log.jsonl")).unwrap();
    // What the run has prepared is all that a resumption needs.
    std::fs::remove_file(place.path("corpus.txt")).unwrap();
    // Nor the tokenizer, which the checkpoint has, and which a resumption would put back.
    std::fs::remove_file(place.path("run/data/tokenizer.json")).unwrap();
    let data = files(&place, "run/data");
    let all = names(&place, "run");
    let text = place.ok(&["export", "--run", "run", "--out", "exported"]);
    assert!(text.contains("after step 10"), "{text}");
    assert_eq!(std::fs::read(place.path("run/log.jsonl")).unwrap(), log);
    assert_eq!(names(&place, "run"), all);
    assert!(files(&place, "run/data") == data);
    for name in ["step.so", "step.h", "state.safetensors", "README.md"] {
        assert!(place.path("exported").join(name).exists(), "{name}");
    }
    let manifest = std::fs::read_to_string(place.path("exported/manifest.json")).unwrap();
    let manifest: Value = serde_json::from_str(&manifest).unwrap();
    assert_eq!(manifest["learning_rate"], "any");
    assert_eq!(manifest["inputs"][0]["shape"][0], 4);
    // Every parameter with two moments.
    let states = manifest["states"].as_array().unwrap();
    assert!(
        states.iter().filter(|state| state["binding"] == "state").count() >= 30,
        "{}",
        states.len()
    );
    let error = place.fails(&["export", "--run", "run", "--out", "exported"]);
    assert!(error.contains("holds an exported step"), "{error}");
    let error = place.fails(&["export", "--run", "nowhere", "--out", "other"]);
    assert!(error.contains("nowhere"), "{error}");
}
