//! What the compiler thought, on disk: `KILN_DEBUG=DIR` makes every compilation write a folder there.
//!
//! `DIR/<name>-<fingerprint>/` holds the graph as recorded and after each pass, the schedule, the memory plan, the times of the stages and the C
//! sources. Trouble with writing is a warning and never stops a compilation.

use std::fmt::Write as _;
use std::io;
use std::path::{Path, PathBuf};

use kiln_graph::Graph;

use crate::CompiledStep;

/// The folder that `KILN_DEBUG` names, if it does.
pub fn folder() -> Option<PathBuf> {
    std::env::var_os("KILN_DEBUG")
        .filter(|folder| !folder.is_empty())
        .map(PathBuf::from)
}

/// Writes everything about a compilation of `graph` into a folder of its own in `folder`.
pub fn write(folder: &Path, graph: &Graph, compiled: &CompiledStep) {
    let fingerprint = graph.fingerprint().to_string();
    let name: String = graph
        .name
        .chars()
        .map(|c| if c.is_alphanumeric() { c } else { '_' })
        .collect();
    let folder = folder.join(format!("{name}-{}", &fingerprint[..12]));
    if let Err(error) = write_files(&folder, compiled) {
        tracing::warn!(folder = %folder.display(), %error, "KILN_DEBUG: cannot write");
    }
}

fn write_files(folder: &Path, compiled: &CompiledStep) -> io::Result<()> {
    std::fs::create_dir_all(folder)?;
    let put = |name: &str, text: &str| std::fs::write(folder.join(name), text);
    for (number, (pass, text)) in compiled.dumps.iter().enumerate() {
        put(&format!("{number}-{pass}.kg"), text)?;
    }
    put("schedule.txt", &compiled.schedule.to_text(&compiled.graph))?;
    put("plan.txt", &compiled.plan.to_text(&compiled.graph))?;
    let mut times = String::new();
    for (stage, time) in &compiled.times {
        let _ = writeln!(times, "{stage}: {time:?}");
    }
    put("times.txt", &times)?;
    for file in &compiled.sources {
        put(&file.name, &file.text)?;
    }
    Ok(())
}
