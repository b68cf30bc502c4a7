//! Debug dumps: complete, the same each time, and runnable without Kiln.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;

use burn::tensor::DType;
use kiln::{CompileOptions, KilnDevice};

use super::{train, train_width};

/// Every file below `folder` with its contents.
fn files(folder: &Path) -> BTreeMap<String, String> {
    let mut all = BTreeMap::new();
    let mut folders = vec![folder.to_path_buf()];
    while let Some(next) = folders.pop() {
        for entry in std::fs::read_dir(&next).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else {
                let name = path.strip_prefix(folder).unwrap().display().to_string();
                all.insert(name, std::fs::read_to_string(&path).unwrap());
            }
        }
    }
    all
}

fn dump(folder: &Path) {
    let _ = KilnDevice::cpu();
    train(
        CompileOptions::default().with_name("dumped").with_debug(folder),
        3,
    );
}

#[test]
fn two_dumps_of_one_program_are_equal() {
    let (one, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    dump(one.path());
    dump(other.path());
    let (one, other) = (files(one.path()), files(other.path()));
    assert!(
        one.keys().eq(other.keys()),
        "{:?} and {:?}",
        one.keys(),
        other.keys()
    );
    for (name, text) in &one {
        assert_eq!(text, &other[name], "{name} differs");
    }
    for name in [
        "recorded.txt",
        "0-recorded.kg",
        "1-simplify.kg",
        "schedule.txt",
        "plan.txt",
        "build.sh",
        "rerun",
        "source/step.c",
    ] {
        assert!(
            one.contains_key(&format!("dumped/step-0/{name}")),
            "{name} is missing in {:?}",
            one.keys()
        );
    }
    let stream = &one["dumped/step-0/recorded.txt"];
    assert!(stream.contains("Linear") || stream.contains("Matmul"), "{stream}");
}

/// Under autocast, because a program of its own must ask for the tiles of AMX as Kiln does.
#[test]
#[cfg(unix)]
fn rerun_times_the_step_alone() {
    let folder = tempfile::tempdir().unwrap();
    let _ = KilnDevice::cpu();
    let options = CompileOptions::default().with_autocast(DType::BF16);
    train_width(16, options.with_name("dumped").with_debug(folder.path()), 3);
    let output = Command::new(folder.path().join("dumped/step-0/rerun"))
        .args(["3", "2"])
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(
        output.status.success(),
        "{text}\n{}",
        String::from_utf8_lossy(&output.stderr)
    );
    assert!(text.contains("step: ") && text.contains("GFLOP/s"), "{text}");
}
