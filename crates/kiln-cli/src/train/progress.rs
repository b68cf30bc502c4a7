//! The display of a run: a bar on a terminal, a line now and then elsewhere. All on standard error.

use std::io::IsTerminal;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::show;

/// The display of a run.
pub struct Progress {
    bar: Option<ProgressBar>,
    /// Whether nothing is shown.
    silent: bool,
    unit: &'static str,
    steps: u64,
    every: u64,
    /// Steps timed since the first ones, which record and compile, and the time they took.
    timed: (u64, Duration),
    last: Instant,
    seen: u64,
}

/// The numbers of one step.
pub struct StepNumbers {
    /// Steps done.
    pub step: u64,
    /// Mean loss.
    pub loss: f32,
    /// Seconds.
    pub seconds: f64,
    /// Tokens or examples a second.
    pub per_second: f64,
    /// Peak memory in MiB: of the GPU, if the step runs on one, else of the process.
    pub memory_mb: Option<u64>,
    /// The step's arithmetic as a part of what the GPU can do at most, where that is known.
    pub share: Option<f64>,
    /// Seconds in which it waited for other ranks, if there are any.
    pub exposed: Option<f64>,
    /// Steps skipped so far because a gradient was not finite, where that is known.
    pub skipped: Option<u32>,
}

impl Progress {
    /// A display of a run of `steps` that starts after `done`; elsewhere than on a terminal a line every
    /// `every` steps.
    pub fn new(steps: u64, done: u64, unit: &'static str, every: u64) -> Self {
        let bar = std::io::stderr().is_terminal().then(|| {
            let bar = ProgressBar::with_draw_target(Some(steps), ProgressDrawTarget::stderr_with_hz(10));
            let style = ProgressStyle::with_template("{bar:24} {pos}/{len}  {msg}");
            bar.set_style(
                style
                    .unwrap_or_else(|_| ProgressStyle::default_bar())
                    .progress_chars("━╸ "),
            );
            bar.set_position(done);
            bar.set_message("recording and compiling the step");
            bar.enable_steady_tick(Duration::from_millis(200));
            bar
        });
        Self {
            bar,
            silent: false,
            unit,
            steps,
            every,
            timed: (0, Duration::ZERO),
            last: Instant::now(),
            seen: 0,
        }
    }

    /// A display that shows nothing.
    pub fn silent() -> Self {
        Self {
            bar: None,
            silent: true,
            unit: "",
            steps: 0,
            every: 1,
            timed: (0, Duration::ZERO),
            last: Instant::now(),
            seen: 0,
        }
    }

    /// Shows a step.
    pub fn step(&mut self, numbers: &StepNumbers) {
        if self.silent {
            return;
        }
        self.seen += 1;
        let now = Instant::now();
        // The first steps compile; they would spoil the time left.
        if self.seen > 3 {
            self.timed.0 += 1;
            self.timed.1 += now - self.last;
        }
        self.last = now;
        let StepNumbers {
            step,
            loss,
            seconds,
            per_second,
            memory_mb,
            share,
            exposed,
            skipped,
        } = numbers;
        let share = share.map_or_else(String::new, |share| format!("  {:.0} % of peak", share * 100.0));
        let exposed = exposed.map_or_else(String::new, |time| format!(" ({:.0} ms exposed)", time * 1e3));
        let skipped = match skipped {
            None | Some(0) => String::new(),
            Some(skipped) => format!("  {skipped} skipped"),
        };
        let memory = memory_mb.map_or_else(String::new, |mb| format!("  {mb} MiB"));
        let left = self
            .left(*step)
            .map_or_else(String::new, |left| format!("  {} left", duration(left)));
        let text = format!(
            "loss {loss:.4}  {per_second:.0} {}/s  {:.0} ms{exposed}{share}{memory}{skipped}{left}",
            self.unit,
            seconds * 1e3
        );
        match &self.bar {
            Some(bar) => {
                bar.set_position(*step);
                bar.set_message(text);
            }
            None if *step == 1 || step % self.every == 0 || *step == self.steps => {
                show::note(format_args!("step {step}/{}  {text}", self.steps))
            }
            None => {}
        }
    }

    /// Prints a line above the bar.
    pub fn say(&self, text: &str) {
        match &self.bar {
            Some(bar) => bar.suspend(|| show::note(text)),
            None if self.silent => {}
            None => show::note(text),
        }
    }

    /// Ends the display; the last numbers stay.
    pub fn finish(&self) {
        if let Some(bar) = &self.bar {
            bar.abandon();
        }
    }

    fn left(&self, step: u64) -> Option<Duration> {
        let (steps, time) = self.timed;
        let left = self.steps.saturating_sub(step) as f64 / steps as f64;
        // Nobody waits for what is longer than any duration.
        Duration::try_from_secs_f64(time.as_secs_f64() * left).ok()
    }
}

fn duration(time: Duration) -> String {
    let seconds = time.as_secs();
    match (seconds / 3600, seconds / 60 % 60, seconds % 60) {
        (0, 0, s) => format!("{s} s"),
        (0, m, s) => format!("{m} min {s:02} s"),
        (h, m, _) => format!("{h} h {m:02} min"),
    }
}

/// Peak resident memory of this process in MiB; none where the system does not tell.
pub fn peak_memory_mb() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    let kib: u64 = line.split_whitespace().next()?.parse().ok()?;
    Some(kib >> 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_number_of_steps_is_too_large() {
        let mut progress = Progress::silent();
        assert_eq!(progress.left(1), None, "nothing is timed");
        (progress.steps, progress.timed) = (11, (4, Duration::from_secs(2)));
        assert_eq!(progress.left(1), Some(Duration::from_secs(5)));
        progress.steps = u64::MAX;
        progress.timed.1 = Duration::from_secs(20);
        assert_eq!(progress.left(1), None);
    }
}
