//! Compile times: the time that each step took before it could run, stage by stage.
//!
//! Always collected: a compilation takes milliseconds at least, and its record a microsecond. The list is
//! bounded, because a program that recompiles for ever must not grow for ever.

use std::collections::VecDeque;
use std::fmt;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::summary::total;

/// Most steps whose times are kept.
const KEPT: usize = 4096;

static STEPS: Mutex<VecDeque<StepCompile>> = Mutex::new(VecDeque::new());

/// One stage of a compilation.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Stage {
    /// Its name: `record`, `import`, a pass, `partition`, `schedule`, `kernels`, `plan`, `emit`, `cc`,
    /// `load`.
    pub name: String,
    /// How long it took.
    pub seconds: f64,
}

impl Stage {
    /// A stage that took `time`.
    pub fn new(name: impl Into<String>, time: Duration) -> Self {
        Self {
            name: name.into(),
            seconds: time.as_secs_f64(),
        }
    }
}

/// The compilation of one step.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct StepCompile {
    /// Name of the region.
    pub region: String,
    /// Segment of the region, from 0.
    pub segment: usize,
    /// Which step of the region, in the order of compilation, from 0.
    pub step: usize,
    /// The backend that runs it.
    pub backend: String,
    /// Whether the disk cache had it.
    pub from_cache: bool,
    /// The stages, in order.
    pub stages: Vec<Stage>,
}

impl StepCompile {
    /// Sum of the stages.
    pub fn seconds(&self) -> f64 {
        total(self.stages.iter().map(|stage| stage.seconds))
    }
}

/// The compile times of a process. `Display` is a table, serde the JSON form.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct CompileTimes {
    /// The steps, in the order of compilation.
    pub steps: Vec<StepCompile>,
    /// For each stage, the sum over all steps.
    pub totals: Vec<Stage>,
}

impl CompileTimes {
    /// The times of these steps, with totals.
    pub fn of(steps: Vec<StepCompile>) -> Self {
        let mut totals: Vec<Stage> = Vec::new();
        for stage in steps.iter().flat_map(|step| &step.stages) {
            match totals.iter_mut().find(|total| total.name == stage.name) {
                Some(total) => total.seconds += stage.seconds,
                None => totals.push(stage.clone()),
            }
        }
        Self { steps, totals }
    }

    /// The whole time.
    pub fn seconds(&self) -> f64 {
        total(self.totals.iter().map(|stage| stage.seconds))
    }
}

/// Notes a compilation.
pub fn add(step: StepCompile) {
    let mut steps = STEPS.lock().unwrap_or_else(PoisonError::into_inner);
    if steps.len() == KEPT {
        steps.pop_front();
    }
    steps.push_back(step);
}

/// The compile times of all steps of this process.
pub fn compile_times() -> CompileTimes {
    let steps = STEPS.lock().unwrap_or_else(PoisonError::into_inner);
    CompileTimes::of(steps.iter().cloned().collect())
}

impl fmt::Display for CompileTimes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let title = |step: &StepCompile| {
            let cached = if step.from_cache { ", cached" } else { "" };
            format!(
                "{} {}.{} ({}{cached})",
                step.region, step.segment, step.step, step.backend
            )
        };
        let width = self
            .steps
            .iter()
            .map(|step| title(step).len())
            .max()
            .unwrap_or(0)
            .max(8);
        write!(f, "{:width$}", "seconds")?;
        for stage in &self.totals {
            write!(f, " {:>10}", stage.name)?;
        }
        writeln!(f, " {:>10}", "total")?;
        for step in &self.steps {
            write!(f, "{:width$}", title(step))?;
            for column in &self.totals {
                match step
                    .stages
                    .iter()
                    .filter(|stage| stage.name == column.name)
                    .map(|it| it.seconds)
                    .reduce(|a, b| a + b)
                {
                    Some(seconds) => write!(f, " {seconds:>10.4}")?,
                    None => write!(f, " {:>10}", "-")?,
                }
            }
            writeln!(f, " {:>10.4}", step.seconds())?;
        }
        write!(f, "{:width$}", "total")?;
        for total in &self.totals {
            write!(f, " {:>10.4}", total.seconds)?;
        }
        writeln!(f, " {:>10.4}", self.seconds())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn step(region: &str, stages: &[(&str, u64)]) -> StepCompile {
        StepCompile {
            region: region.to_owned(),
            segment: 0,
            step: 0,
            backend: "cpu".to_owned(),
            from_cache: false,
            stages: stages
                .iter()
                .map(|&(name, ms)| Stage::new(name, Duration::from_millis(ms)))
                .collect(),
        }
    }

    #[test]
    fn totals_are_the_sums_of_the_stages() {
        let times = CompileTimes::of(vec![
            step("a", &[("import", 2), ("cc", 100)]),
            step("b", &[("import", 3)]),
        ]);
        assert_eq!(times.totals.len(), 2);
        assert!((times.totals[0].seconds - 0.005).abs() < 1e-9);
        assert!((times.seconds() - 0.105).abs() < 1e-9);
        for none in [CompileTimes::default().seconds(), step("c", &[]).seconds()] {
            assert!(none == 0.0 && none.is_sign_positive(), "{none}");
        }
        let text = times.to_string();
        assert_eq!(text.lines().count(), 4, "{text}");
        assert!(
            text.lines().nth(2).is_some_and(|line| line.contains(" - ")),
            "no cc in b: {text}"
        );
        let json = serde_json::to_string(&times).unwrap();
        assert_eq!(
            serde_json::from_str::<CompileTimes>(&json).unwrap().steps.len(),
            2
        );
    }
}
