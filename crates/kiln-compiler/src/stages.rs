//! The stages of a compilation, timed.

use std::time::{Duration, Instant};

/// Times of the stages, in order.
#[derive(Clone, Debug, Default)]
pub struct Stages {
    /// Each stage with its time.
    pub times: Vec<(&'static str, Duration)>,
}

impl Stages {
    /// Runs a stage and notes its time. Spans of tracing and of an open profile have its name.
    pub fn time<T>(&mut self, name: &'static str, stage: impl FnOnce() -> T) -> T {
        let span = tracing::debug_span!("stage", name);
        let _entered = span.enter();
        let _profiled = kiln_profile::span(kiln_profile::Category::Compile, name);
        let start = Instant::now();
        let result = stage();
        self.times.push((name, start.elapsed()));
        result
    }
}
