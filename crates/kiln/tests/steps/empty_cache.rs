//! Tests that count compilations.

use std::path::Path;
use std::process::Command;

/// Runs the test `name`, which is `check`, in a process with a cache that has no step: what was compiled for
/// other programs may be what this one lacks. What the C compiler made of single files is nothing that is
/// counted, and these tests have it in common.
pub fn with_empty_cache(name: &str, check: impl FnOnce()) {
    const CHILD: &str = "KILN_TEST_EMPTY_CACHE";
    if std::env::var_os(CHILD).is_some() {
        return check();
    }
    let cache = tempfile::tempdir().unwrap();
    let objects = Path::new(env!("CARGO_TARGET_TMPDIR")).join("objects");
    std::fs::create_dir_all(&objects).unwrap();
    std::os::unix::fs::symlink(&objects, cache.path().join("objects")).unwrap();
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", name, "--nocapture"])
        .env(CHILD, "1")
        .env("KILN_CACHE_DIR", cache.path())
        .output()
        .unwrap();
    let [said, errors] = [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes));
    assert!(said.contains("1 passed"), "{said}{errors}");
}
