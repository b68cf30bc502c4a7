//! Who hears a warning. Each case is a process: a subscriber is the process's.

#![allow(
    clippy::disallowed_macros,
    reason = "what they do without this crate is compared"
)]

use std::process::Command;
use std::sync::{Arc, Mutex};

use tracing_subscriber::fmt::MakeWriter;

const CHILD: &str = "KILN_TEST_LOG";

/// Runs test `name` in a process of its own; what that wrote to standard error.
fn child(name: &str) -> String {
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", name, "--nocapture"])
        .env(CHILD, "1")
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{said}");
    said
}

fn is_child() -> bool {
    std::env::var_os(CHILD).is_some()
}

#[derive(Clone, Default)]
struct Lines(Arc<Mutex<Vec<u8>>>);

impl std::io::Write for Lines {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

impl MakeWriter<'_> for Lines {
    type Writer = Self;

    fn make_writer(&self) -> Self {
        self.clone()
    }
}

impl Lines {
    fn text(&self) -> String {
        String::from_utf8(self.0.lock().unwrap().clone()).unwrap()
    }
}

#[test]
fn a_program_without_a_subscriber_sees_warnings() {
    if is_child() {
        for number in [1, 2] {
            kiln_log::warn!(target: "kiln", number, "it is slow");
        }
        std::thread::spawn(|| kiln_log::warn!("a thread says: {}", 3))
            .join()
            .unwrap();
        kiln_log::error!(target: "kiln", "it ends");
        tracing::warn!("nobody hears this");
        return;
    }
    let said = child("a_program_without_a_subscriber_sees_warnings");
    for wanted in [
        "it is slow number=1",
        "it is slow number=2",
        "a thread says: 3",
        "WARN",
        "ERROR kiln: it ends",
    ] {
        assert!(said.contains(wanted), "{said}");
    }
    assert!(!said.contains("nobody hears this"), "{said}");
}

#[test]
fn a_subscriber_of_the_program_hears_them_alone() {
    if is_child() {
        let lines = Lines::default();
        // A warning in front of it is in nobody's way.
        kiln_log::warn!("too early");
        tracing_subscriber::fmt()
            .with_writer(lines.clone())
            .with_ansi(false)
            .init();
        kiln_log::warn!(target: "kiln", "subscribed");
        tracing::warn!("subscribed besides");
        let text = lines.text();
        assert!(
            text.contains("kiln: subscribed") && text.contains("subscribed besides"),
            "{text}"
        );
        assert!(!text.contains("too early"), "{text}");
        return;
    }
    let said = child("a_subscriber_of_the_program_hears_them_alone");
    assert!(
        said.contains("too early") && !said.contains("subscribed"),
        "{said}"
    );
}

#[test]
fn what_a_subscriber_leaves_out_is_left_out() {
    if is_child() {
        tracing_subscriber::fmt().with_env_filter("kiln=error").init();
        kiln_log::warn!(target: "kiln", "unwanted");
        return;
    }
    let said = child("what_a_subscriber_leaves_out_is_left_out");
    assert!(!said.contains("unwanted"), "{said}");
}
