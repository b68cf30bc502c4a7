//! `kiln train --profile STEPS`: a trace of the first steps of a run.

use std::path::Path;

use kiln::Profile;

use crate::error::CliError;
use crate::show;

/// A profile that ends by itself after some steps.
pub struct StepProfile {
    profile: Profile,
    left: u64,
    rank: usize,
}

impl StepProfile {
    /// Opens a profile for `steps` steps of this rank.
    pub fn start(steps: u64, rank: usize) -> Self {
        Self {
            profile: kiln::profile(),
            left: steps,
            rank,
        }
    }

    /// Counts a step; true after the last.
    pub fn step_done(&mut self) -> bool {
        self.left = self.left.saturating_sub(1);
        self.left == 0
    }

    /// Writes `trace.json` into `folder`; prints where the time went, and the compile times. Ranks other than
    /// the first write `trace.rank1.json` and so on, and print nothing.
    ///
    /// # Errors
    ///
    /// [`CliError::Io`] if the file cannot be written.
    pub fn write(self, folder: &Path) -> Result<(), CliError> {
        let path = match self.rank {
            0 => folder.join("trace.json"),
            rank => folder.join(format!("trace.rank{rank}.json")),
        };
        self.profile
            .export_chrome_trace(&path)
            .map_err(CliError::io("write", &path))?;
        if self.rank > 0 {
            return Ok(());
        }
        show::line(self.profile.summary());
        show::line(format_args!(
            "compile times, in seconds\n{}",
            kiln::compile_times()
        ));
        show::line(format_args!(
            "open {} with https://ui.perfetto.dev",
            path.display()
        ));
        Ok(())
    }
}
