//! The learning rate as a function of the step alone, so that a resumed run needs no state for it.

use serde::{Deserialize, Serialize};

/// How the rate goes after the warm-up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ScheduleKind {
    /// Stays.
    Constant,
    /// Falls along a line.
    Linear,
    /// Falls along half a cosine.
    Cosine,
}

/// The learning rate over time.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ScheduleConfig {
    /// How the rate goes after the warm-up.
    pub kind: ScheduleKind,
    /// The greatest rate.
    pub rate: f64,
    /// Steps in which the rate rises from near 0 along a line.
    pub warmup: u64,
    /// The last rate of `linear` and `cosine`, as a part of `rate`.
    pub end: f64,
    /// Steps in which the rate falls, warm-up included; by default the run's. A run that is to be prolonged
    /// with `--steps` wants a number here.
    pub steps: Option<u64>,
}

impl Default for ScheduleConfig {
    fn default() -> Self {
        Self {
            kind: ScheduleKind::Cosine,
            rate: 1e-3,
            warmup: 0,
            end: 0.1,
            steps: None,
        }
    }
}

impl ScheduleConfig {
    pub(super) fn check(&self) -> Result<(), String> {
        if !(self.rate > 0.0 && self.rate.is_finite()) {
            return Err(format!("schedule.rate is {}; it must be positive", self.rate));
        }
        if !(0.0..=1.0).contains(&self.end) {
            return Err(format!(
                "schedule.end is {}; it is a part of the rate, from 0 to 1",
                self.end
            ));
        }
        Ok(())
    }

    /// The rate of optimizer step `step`, from 0, in a run of `steps`.
    pub fn rate(&self, step: u64, steps: u64) -> f64 {
        if step < self.warmup {
            return self.rate * (step + 1) as f64 / self.warmup as f64;
        }
        let length = self.steps.unwrap_or(steps).saturating_sub(self.warmup);
        let done = if length == 0 {
            1.0
        } else {
            ((step - self.warmup) as f64 / length as f64).min(1.0)
        };
        let height = match self.kind {
            ScheduleKind::Constant => 1.0,
            ScheduleKind::Linear => 1.0 - done,
            ScheduleKind::Cosine => 0.5 * (1.0 + (std::f64::consts::PI * done).cos()),
        };
        match self.kind {
            ScheduleKind::Constant => self.rate,
            _ => self.rate * (self.end + (1.0 - self.end) * height),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_rise_in_the_warmup_and_fall_to_the_end() {
        for kind in [ScheduleKind::Linear, ScheduleKind::Cosine] {
            let schedule = ScheduleConfig {
                kind,
                rate: 2.0,
                warmup: 10,
                end: 0.25,
                steps: None,
            };
            let rates: Vec<f64> = (0..=110).map(|step| schedule.rate(step, 110)).collect();
            assert!(rates[..11].windows(2).all(|pair| pair[0] <= pair[1]), "{kind:?}");
            assert!(rates[10..].windows(2).all(|pair| pair[0] >= pair[1]), "{kind:?}");
            assert_eq!((rates[9], rates[10], rates[110]), (2.0, 2.0, 0.5), "{kind:?}");
            assert!(
                (rates[60] - 1.25).abs() < 1e-12,
                "half way both are in the middle: {kind:?}"
            );
        }
    }

    #[test]
    fn a_constant_rate_stays() {
        let schedule = ScheduleConfig {
            kind: ScheduleKind::Constant,
            ..Default::default()
        };
        assert!((0..50).all(|step| schedule.rate(step, 10) == schedule.rate));
    }
}
