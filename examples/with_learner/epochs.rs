//! A renderer that prints one line an epoch. burn-train's own draw a terminal interface (feature `tui`) or
//! print every batch.

use std::collections::BTreeMap;
use std::time::Instant;

use burn_train::metric::{MetricDefinition, MetricId, NumericEntry};
use burn_train::renderer::{
    EvaluationName, EvaluationProgress, MetricState, MetricsRenderer, MetricsRendererEvaluation,
    MetricsRendererTraining, ProgressType, TrainingProgress,
};

/// Prints the mean of every metric over each epoch.
pub struct Epochs {
    metrics: Vec<MetricDefinition>,
    training: Means,
    validation: Means,
    since: Instant,
}

impl Epochs {
    pub fn new() -> Self {
        Self {
            metrics: Vec::new(),
            training: Means::default(),
            validation: Means::default(),
            since: Instant::now(),
        }
    }

    fn name(&self, id: &MetricId) -> String {
        let metric = self.metrics.iter().find(|metric| metric.metric_id == *id);
        metric.map_or_else(String::new, |metric| metric.name.to_lowercase())
    }
}

/// For each metric's name, the sum of its values and what they are weighted with.
#[derive(Default)]
struct Means(BTreeMap<String, (f64, f64)>);

impl Means {
    fn add(&mut self, name: String, value: &NumericEntry) {
        let weight = match value {
            NumericEntry::Value(_) => 1.0,
            NumericEntry::Aggregated { count, .. } => *count as f64,
        };
        let (sum, weights) = self.0.entry(name).or_default();
        *sum += weight * value.current();
        *weights += weight;
    }

    /// The means as text; what comes next is another epoch.
    fn take(&mut self) -> String {
        let means = std::mem::take(&mut self.0);
        let means = means
            .into_iter()
            .map(|(name, (sum, weights))| format!("{name} {:.3}", sum / weights));
        means.collect::<Vec<_>>().join(", ")
    }
}

impl MetricsRendererTraining for Epochs {
    fn update_train(&mut self, state: MetricState) {
        if let MetricState::Numeric(entry, value) = state {
            self.training.add(self.name(&entry.metric_id), &value);
        }
    }

    fn update_valid(&mut self, state: MetricState) {
        if let MetricState::Numeric(entry, value) = state {
            self.validation.add(self.name(&entry.metric_id), &value);
        }
    }

    fn render_train(&mut self, _: TrainingProgress, _: Vec<ProgressType>) {}

    fn render_valid(&mut self, item: TrainingProgress, _: Vec<ProgressType>) {
        let last =
            |progress: burn::data::dataloader::Progress| progress.items_processed >= progress.items_total;
        if item.progress.is_some_and(last) {
            println!(
                "epoch {}: training {}; validation {}; {:.1} s",
                item.global_progress.items_processed,
                self.training.take(),
                self.validation.take(),
                self.since.elapsed().as_secs_f64()
            );
            self.since = Instant::now();
        }
    }
}

impl MetricsRendererEvaluation for Epochs {
    fn update_test(&mut self, _: EvaluationName, _: MetricState) {}

    fn render_test(&mut self, _: EvaluationProgress, _: Vec<ProgressType>) {}
}

impl MetricsRenderer for Epochs {
    fn manual_close(&mut self) {}

    fn register_metric(&mut self, definition: MetricDefinition) {
        self.metrics.push(definition);
    }
}
