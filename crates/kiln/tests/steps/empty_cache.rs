//! Tests that count compilations.

use std::process::Command;

/// Runs the test `name`, which is `check`, in a process with an empty cache: what was compiled for other
/// programs may be what this one lacks.
pub fn with_empty_cache(name: &str, check: impl FnOnce()) {
    const CHILD: &str = "KILN_TEST_EMPTY_CACHE";
    if std::env::var_os(CHILD).is_some() {
        return check();
    }
    let cache = tempfile::tempdir().unwrap();
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", name, "--nocapture"])
        .env(CHILD, "1")
        .env("KILN_CACHE_DIR", cache.path())
        .output()
        .unwrap();
    let [said, errors] = [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes));
    assert!(said.contains("1 passed"), "{said}{errors}");
}
