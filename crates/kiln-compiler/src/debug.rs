//! The result of each stage, on disk: [`crate::Options::debug`] names the folder of one step.
//!
//! ```text
//! 0-recorded.kg 1-simplify.kg ..   the graph as recorded and after each pass
//! schedule.txt plan.txt            kernels; where every buffer lives
//! ```
//!
//! A target adds its code. Names and contents are a function of the graph and the options, so that `diff -r`
//! of two dumps shows what changed. (Times are therefore not among them; they are in `kiln::compile_times`.)
//! Trouble with writing is a warning and never stops a compilation.

use std::io;
use std::path::Path;

use kiln_graph::Graph;

use crate::plan::Plan;
use crate::schedule::Schedule;
use crate::transform::Dumps;

/// Writes the files that do not depend on a machine into `folder`: `graph` after each pass (`dumps`), its
/// schedule and its plan of memory.
pub fn write(folder: &Path, dumps: &Dumps, graph: &Graph, schedule: &Schedule, plan: &Plan) {
    let written = || -> io::Result<()> {
        std::fs::create_dir_all(folder)?;
        let put = |name: &str, text: &str| std::fs::write(folder.join(name), text);
        for (number, (pass, text)) in dumps.iter().enumerate() {
            put(&format!("{number}-{}.kg", pass.replace(' ', "-")), text)?;
        }
        put("schedule.txt", &schedule.to_text(graph))?;
        put("plan.txt", &plan.to_text(graph))
    };
    warn_unless_written(folder, written());
}

/// Warns if a part of the dump in `folder` could not be `written`.
pub fn warn_unless_written(folder: &Path, written: io::Result<()>) {
    if let Err(error) = written {
        kiln_log::warn!(folder = %folder.display(), %error, "the debug dump cannot be written");
    }
}
