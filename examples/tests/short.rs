//! Every example runs, in its short form, on the backend that needs no compiler.

use std::process::Command;

/// Runs an example and returns what it printed.
fn run(program: &str) -> String {
    let output = Command::new(program).arg("--short").output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(
        output.status.success(),
        "{text}{}",
        String::from_utf8_lossy(&output.stderr)
    );
    text
}

/// The losses in `step N: loss X` lines.
fn losses(text: &str) -> Vec<f64> {
    let number = |line: &str| line.split("loss ").nth(1)?.split([',', ' ']).next()?.parse().ok();
    let losses: Vec<f64> = text
        .lines()
        .filter(|line| line.starts_with("step "))
        .filter_map(number)
        .collect();
    assert!(
        losses.len() >= 2 && losses.iter().all(|loss| loss.is_finite()),
        "{text}"
    );
    losses
}

#[test]
fn quickstart() {
    let text = run(env!("CARGO_BIN_EXE_quickstart"));
    losses(&text);
    assert!(text.contains("0 graph breaks"), "{text}");
}

#[test]
fn distributed() {
    let text = run(env!("CARGO_BIN_EXE_distributed"));
    losses(&text);
    assert!(text.starts_with("1 ranks"), "{text}");
}

/// Ranks see the same number of examples in a step, but draw their own, so losses are not those of one rank.
#[test]
fn distributed_on_ranks() {
    for launcher in ["mpirun.openmpi", "mpirun.mpich"] {
        let mut command = Command::new(launcher);
        // As root, as on machines of a CI.
        command
            .env("OMPI_ALLOW_RUN_AS_ROOT", "1")
            .env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")
            .args(["-n", "2"]);
        if launcher.ends_with("openmpi") {
            command.args(["--oversubscribe", "--bind-to", "none"]);
        }
        let Ok(output) = command
            .arg(env!("CARGO_BIN_EXE_distributed"))
            .arg("--short")
            .output()
        else {
            eprintln!("skipped: there is no {launcher} on this machine (Debian: openmpi-bin, mpich)");
            continue;
        };
        let [text, errors] =
            [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes).into_owned());
        assert!(output.status.success(), "{launcher}: {text}{errors}");
        assert_eq!(losses(&text).len(), 2, "rank 0 alone prints: {text}");
        assert!(text.starts_with("2 ranks"), "{text}");
    }
}

#[test]
fn varying_lengths() {
    let text = run(env!("CARGO_BIN_EXE_varying_lengths"));
    losses(&text);
    assert!(text.contains("mean ratio"), "{text}");
}

#[test]
fn own_project() {
    let text = run(env!("CARGO_BIN_EXE_own_project"));
    let losses = losses(&text);
    assert!(losses.last() < losses.first(), "{text}");
    assert!(text.contains("0 graph breaks"), "{text}");
}

/// What README tells a newcomer to paste is the example, and its `Cargo.toml` fits this workspace.
#[test]
fn the_readmes_program_is_the_example() {
    let readme = include_str!("../../README.md");
    let (_, program) = include_str!("../own_project/main.rs").split_once("\n\n").unwrap();
    assert!(
        readme.contains(&format!("```rust\n{program}```\n")),
        "README has another program"
    );
    let manifest = readme
        .split("```toml\n")
        .nth(1)
        .unwrap()
        .split("```")
        .next()
        .unwrap();
    let burn = manifest.lines().find(|line| line.starts_with("burn = ")).unwrap();
    let quoted = |text: &str| text.split('"').nth(1).unwrap().to_owned();
    let workspace = include_str!("../../Cargo.toml");
    let pinned = workspace
        .lines()
        .find(|line| line.starts_with("burn = "))
        .unwrap();
    assert_eq!(
        quoted(burn),
        quoted(pinned),
        "README and the workspace name another Burn"
    );
    assert!(
        burn.contains("default-features = false") && burn.contains("\"std\", \"autodiff\""),
        "{burn}"
    );
    let path = quoted(manifest.lines().find(|line| line.starts_with("kiln = ")).unwrap());
    let inside = path.strip_prefix("../kiln/").unwrap();
    let root = concat!(env!("CARGO_MANIFEST_DIR"), "/..");
    assert!(
        std::path::Path::new(root)
            .join(inside)
            .join("Cargo.toml")
            .exists(),
        "{path} is no crate"
    );
}

#[test]
fn train_resnet() {
    let text = run(env!("CARGO_BIN_EXE_train_resnet"));
    losses(&text);
    assert!(text.contains("of 16 pictures"), "{text}");
}

#[test]
fn finetune_bert() {
    let text = run(env!("CARGO_BIN_EXE_finetune_bert"));
    losses(&text);
    assert!(text.contains("numbers are trained"), "{text}");
}

#[test]
fn train_llama() {
    let text = run(env!("CARGO_BIN_EXE_train_llama"));
    // 257 tokens: an untrained model's loss is near the logarithm of that. The short run's batch is 32 bytes
    // of sources that change, so not very near.
    assert!((losses(&text)[0] - 257f64.ln()).abs() < 0.8, "{text}");
    assert!(text.contains("/// The "), "{text}");
}

#[test]
fn custom_step_fn() {
    let text = run(env!("CARGO_BIN_EXE_custom_step_fn"));
    assert!(
        text.contains("mean radius") && text.contains("0 graph breaks"),
        "{text}"
    );
}

#[test]
fn ndarray() {
    let text = run(env!("CARGO_BIN_EXE_ndarray"));
    let losses = losses(&text);
    assert!(losses.last() < losses.first(), "{text}");
    assert!(text.contains("bytes of batches that were copied: 0\n"), "{text}");
    assert!(text.contains("% of the points are put on their arm"), "{text}");
}

#[test]
fn custom_op() {
    let text = run(env!("CARGO_BIN_EXE_custom_op"));
    let losses = losses(&text);
    assert!(losses.last() < losses.first(), "{text}");
    assert!(
        text.contains("0 graph breaks") && !text.contains("outside the compiled code"),
        "{text}"
    );
    // Quantiles do not cross.
    for line in text.lines().filter(|line| line.starts_with("quantiles at")) {
        let values = line.split(": ").nth(1).unwrap().split_whitespace();
        let values: Vec<f64> = values.map(|value| value.parse().unwrap()).collect();
        assert!(values.len() == 5 && values.is_sorted(), "{line}");
    }
}

#[test]
fn with_learner() {
    let text = run(env!("CARGO_BIN_EXE_with_learner"));
    assert!(text.contains("epoch 2: training accuracy"), "{text}");
    assert!(
        text.contains("4 iterations, 2 compiled steps, 0 graph breaks"),
        "{text}"
    );
}
