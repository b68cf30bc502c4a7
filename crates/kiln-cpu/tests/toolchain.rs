//! The compiler that is taken when some are refused.

#![cfg(unix)]

use std::io;
use std::sync::{Arc, Mutex};

use kiln_cpu::{CpuError, Toolchain};

/// Runs `body` and gives the warnings.
fn warnings<T>(body: impl FnOnce() -> T) -> (T, Vec<String>) {
    #[derive(Clone, Default)]
    struct Sink(Arc<Mutex<Vec<u8>>>);
    impl io::Write for Sink {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().extend_from_slice(bytes);
            Ok(bytes.len())
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }
    let sink = Sink::default();
    let writer = sink.clone();
    let subscriber = tracing_subscriber::fmt()
        .with_max_level(tracing_subscriber::filter::LevelFilter::WARN)
        .with_ansi(false)
        .with_writer(move || writer.clone())
        .finish();
    let result = tracing::subscriber::with_default(subscriber, body);
    let text = String::from_utf8(sink.0.lock().unwrap().clone()).unwrap();
    (result, text.lines().map(str::to_owned).collect())
}

/// `count` programs in a folder that are the usual compiler under names of their own.
fn compilers(folder: &std::path::Path, count: usize) -> Vec<String> {
    use std::os::unix::fs::PermissionsExt as _;
    let cc = Toolchain::detect().unwrap().command();
    let compiler = |number: usize| {
        let path = folder.join(format!("compiler-{number}"));
        std::fs::write(&path, format!("#!/bin/sh\nexec {cc} \"$@\"\n")).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
        path.to_str().unwrap().to_owned()
    };
    (0..count).map(compiler).collect()
}

#[test]
fn a_refused_compiler_is_passed_over_with_one_warning() {
    let folder = tempfile::tempdir().unwrap();
    let candidates = compilers(folder.path(), 3);
    let mut asked = Vec::new();
    let accept = |toolchain: &Toolchain| {
        // On a machine with tiles of AMX a compiler that is refused is asked about without them, too.
        if asked.last() != Some(&toolchain.command()) {
            asked.push(toolchain.command());
        }
        match asked.len() {
            3 => Ok(()),
            number => Err(format!("reason {number}")),
        }
    };
    let (found, said) = warnings(|| Toolchain::first_accepted(&candidates, accept).unwrap());
    assert_eq!(asked, candidates);
    assert_eq!(found.command(), candidates[2]);
    assert_eq!(said.len(), 1, "{said:?}");
    for part in [
        &*candidates[0],
        "reason 1",
        &candidates[1],
        "reason 2",
        "passed over",
        &candidates[2],
    ] {
        assert!(said[0].contains(part), "{said:?} lacks {part}");
    }
}

#[test]
fn no_warning_where_nothing_was_passed_over() {
    let (found, said) = warnings(|| Toolchain::find(|_| Ok::<(), String>(())));
    assert!(found.is_ok() && said.is_empty(), "{found:?} {said:?}");
}

#[test]
fn one_compiler_under_two_names_is_asked_about_once() {
    let folder = tempfile::tempdir().unwrap();
    let mut candidates = compilers(folder.path(), 1);
    let link = folder.path().join("link");
    std::os::unix::fs::symlink(&candidates[0], &link).unwrap();
    candidates.push(link.to_str().unwrap().to_owned());
    let mut asked = 0;
    let refuse = |_: &Toolchain| {
        asked += 1;
        Err("it is wrong")
    };
    let (error, said) = warnings(|| Toolchain::first_accepted(&candidates, refuse).unwrap_err());
    assert!(matches!(error, CpuError::NoCompiler { .. }), "{error}");
    assert!(error.to_string().contains("it is wrong"), "{error}");
    let times = 1 + usize::from(Toolchain::detect().unwrap().isa().has_tiles());
    // A fallback to another compiler is logged.
    assert!(asked == times && said.is_empty(), "{asked} {said:?}");
}

#[test]
fn a_compiler_that_changes_has_another_fingerprint() {
    let folder = tempfile::tempdir().unwrap();
    let command = &compilers(folder.path(), 1)[0];
    let fingerprint = || Toolchain::from_candidates(&[command]).unwrap().fingerprint();
    let before = fingerprint();
    assert_eq!(before, fingerprint());
    // The same version in another file.
    let text = std::fs::read_to_string(command).unwrap() + "\n";
    std::fs::write(command, text).unwrap();
    assert_ne!(before, fingerprint());
    let more = Toolchain::from_candidates(&[format!("{command} -g")]).unwrap();
    assert_ne!(more.fingerprint(), fingerprint(), "arguments count");
}
