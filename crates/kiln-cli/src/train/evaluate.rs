//! Evaluation: mean loss over examples that training never sees and, for classifiers, the part of them that
//! are classified correctly.

use std::fmt;
use std::path::Path;

use kiln::{CompileOptions, Compiled, Kiln, KilnDevice};

use super::checkpoint::Checkpoints;
use crate::config::Config;
use crate::data::Data;
use crate::error::CliError;
use crate::model::Model;

/// The outcome of an evaluation.
#[derive(Clone, Debug, PartialEq)]
pub struct Evaluation {
    /// Mean loss over the examples.
    pub loss: f32,
    /// Part of the examples whose likeliest class is theirs; none for language models.
    pub accuracy: Option<f64>,
}

impl Evaluation {
    /// Makes sure that the loss after `step` steps of the run in `run` is a number.
    ///
    /// # Errors
    ///
    /// [`CliError::Evaluation`].
    pub fn check(&self, step: u64, run: &Path) -> Result<(), CliError> {
        match self.loss.is_finite() {
            true => Ok(()),
            false => Err(CliError::Evaluation {
                step,
                loss: self.loss,
                checkpoint: Checkpoints::of(run).before(step),
            }),
        }
    }
}

impl fmt::Display for Evaluation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "evaluation loss {:.4}", self.loss)?;
        match self.accuracy {
            Some(accuracy) => write!(f, ", accuracy {:.1} %", accuracy * 100.0),
            None => write!(f, ", perplexity {:.1}", self.loss.exp()),
        }
    }
}

/// Evaluates as often as asked; the forward pass is compiled once.
pub struct Evaluator {
    region: Compiled,
    most: usize,
    device: KilnDevice,
}

impl Evaluator {
    /// An evaluator for the runs of a config, with models on `device`.
    pub fn new(config: &Config, options: CompileOptions, device: KilnDevice) -> Self {
        Self {
            region: kiln::compile(options),
            most: config.train.evaluation_batches,
            device,
        }
    }

    /// Evaluates a model in evaluation mode; none if nothing is set aside.
    ///
    /// # Errors
    ///
    /// [`CliError::Data`] or [`CliError::Step`].
    pub fn run(&mut self, model: &Model<Kiln>, data: &Data) -> Result<Option<Evaluation>, CliError> {
        let Some(batches) = data.evaluation()? else {
            return Ok(None);
        };
        let device = self.device;
        let (mut sum, mut rows, mut right, mut examples) = (0.0, 0usize, 0usize, 0usize);
        for batch in batches.take(self.most) {
            let batch = batch?;
            let labels = batch.labels().to_vec();
            // The last batch may be smaller: its mean counts for as many examples as it has.
            let weight = batch.rows();
            let input = batch.tensors::<Kiln>(&device)?;
            let (loss, logits) = self.region.run(|| model.evaluate(input))?;
            let unreadable = |error| CliError::Usage(format!("the evaluation cannot be read: {error}"));
            let loss = loss.try_into_data().map_err(unreadable)?;
            sum += weight as f64 * loss.iter::<f64>().next().unwrap_or(f64::NAN);
            rows += weight;
            if let Some(logits) = logits {
                let [count, classes] = logits.dims();
                let logits: Vec<f32> = logits
                    .try_into_data()
                    .map_err(unreadable)?
                    .iter::<f32>()
                    .collect();
                let likeliest = logits
                    .chunks(classes.max(1))
                    .map(|row| (0..row.len()).max_by(|&a, &b| row[a].total_cmp(&row[b])));
                right += likeliest
                    .zip(&labels)
                    .filter(|(found, label)| *found == usize::try_from(**label).ok())
                    .count();
                examples += count;
            }
        }
        if rows == 0 {
            return Ok(None);
        }
        let accuracy = (examples > 0).then(|| right as f64 / examples as f64);
        Ok(Some(Evaluation {
            loss: (sum / rows as f64) as f32,
            accuracy,
        }))
    }
}
