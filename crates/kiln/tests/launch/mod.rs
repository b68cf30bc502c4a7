//! This test program again, on ranks that `mpirun` starts, with the name of a part in `KILN_PART`.
//!
//! Where there is no `mpirun` the tests say so and do nothing.

// Each test program has its own copy of this module and uses a part of it.
#![allow(dead_code)]

pub mod examples;

use std::process::{Command, Output};

/// The `mpirun` of this machine, if it has one.
fn launcher() -> Option<Command> {
    let mut command = Command::new("mpirun");
    // As root, as on machines of a CI.
    command
        .env("OMPI_ALLOW_RUN_AS_ROOT", "1")
        .env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1");
    let version = command.arg("--version").output();
    let Ok(version) = version else {
        eprintln!("skipped: there is no mpirun on this machine (Debian: openmpi-bin)");
        return None;
    };
    let mut command = Command::new("mpirun");
    command
        .env("OMPI_ALLOW_RUN_AS_ROOT", "1")
        .env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1");
    if !String::from_utf8_lossy(&version.stdout).contains("HYDRA") {
        command.args(["--oversubscribe", "--bind-to", "none"]);
    }
    Some(command)
}

/// Runs the test `a_part` of this program on so many ranks.
pub fn run(ranks: usize, part: &str) -> Option<Output> {
    let program = std::env::current_exe().expect("the test has a file");
    let output = launcher()?
        .args(["-n", &ranks.to_string()])
        .arg(program)
        .args(["a_part", "--exact", "--nocapture"])
        .env("KILN_PART", part)
        .output();
    Some(output.expect("mpirun starts"))
}

/// What the ranks printed.
pub fn text(output: &Output) -> String {
    let [out, err] =
        [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes).into_owned());
    format!("{out}{err}")
}

/// Prints the losses of rank 0, bit for bit.
pub fn print(is_first: bool, losses: &[f32]) {
    if is_first {
        let bits: Vec<String> = losses
            .iter()
            .map(|loss| format!("{:08x}", loss.to_bits()))
            .collect();
        println!("\nlosses {}", bits.join(" "));
    }
}

/// The losses that rank 0 printed.
pub fn losses(ranks: usize, part: &str) -> Option<Vec<f32>> {
    let output = run(ranks, part)?;
    let text = text(&output);
    assert!(output.status.success(), "{ranks} ranks, {part}: {text}");
    Some(losses_in(&text))
}

/// The losses that [`print()`] printed.
pub fn losses_in(text: &str) -> Vec<f32> {
    let line = text.lines().find_map(|line| line.strip_prefix("losses "));
    let line = line.unwrap_or_else(|| panic!("no losses in\n{text}"));
    let bits = line
        .split(' ')
        .map(|word| u32::from_str_radix(word, 16).expect("bits"));
    bits.map(f32::from_bits).collect()
}

/// Panics unless both are the same losses within 1e-4.
pub fn agree(a: &[f32], b: &[f32], what: &str) {
    assert_eq!(a.len(), b.len(), "{what}");
    for (step, (a, b)) in a.iter().zip(b).enumerate() {
        assert!(
            (a - b).abs() <= 1e-4 * a.abs().max(1e-2),
            "{what}, step {step}: {a} and {b}"
        );
    }
}
