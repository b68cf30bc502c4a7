//! `kiln train --profile STEPS`: a trace of the first steps of a run.

use std::path::Path;

use kiln::Profile;

use crate::error::CliError;

/// A profile that ends by itself after some steps.
pub struct StepProfile {
    profile: Profile,
    left: u64,
}

impl StepProfile {
    /// Opens a profile for `steps` steps.
    pub fn start(steps: u64) -> Self {
        Self {
            profile: kiln::profile(),
            left: steps,
        }
    }

    /// Counts a step; true after the last.
    pub fn step_done(&mut self) -> bool {
        self.left = self.left.saturating_sub(1);
        self.left == 0
    }

    /// Writes `trace.json` into `folder`; prints where the time went, and the compile times.
    ///
    /// # Errors
    ///
    /// [`CliError::Io`] if the file cannot be written.
    pub fn write(self, folder: &Path) -> Result<(), CliError> {
        let path = folder.join("trace.json");
        self.profile
            .export_chrome_trace(&path)
            .map_err(CliError::io("write", &path))?;
        println!("{}", self.profile.summary());
        println!("compile times, in seconds\n{}", kiln::compile_times());
        println!("open {} with https://ui.perfetto.dev", path.display());
        Ok(())
    }
}
