//! The state of a run at a checkpoint, `state.json`: what no other file has, and what the run cannot change.

use std::collections::BTreeMap;
use std::path::Path;

use kiln::LossScale;
use kiln_burn::random::{self, Stream};
use kiln_hub::data::LoaderState;
use serde::{Deserialize, Serialize};

use super::log::Entry;
use crate::config::{Difference, ModelConfig, OptimizerName};
use crate::data::HeldOut;
use crate::error::CliError;

/// The file that makes a folder a checkpoint.
pub const STATE: &str = "state.json";

/// `state.json`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct State {
    /// Optimizer steps done.
    pub step: u64,
    /// Place in the data.
    pub data: LoaderState,
    /// The random generator: its seed, and the stream that comes next.
    pub random: Option<(u64, u64)>,
    /// Loss scaling, if the loss is scaled: the scale, the steps since it changed, and the skipped steps.
    #[serde(default)]
    pub loss_scale: Option<(f32, u32, u32)>,
    /// Whose state `optimizer.mpk` is; checkpoints of earlier versions do not say.
    #[serde(default)]
    pub optimizer: Option<OptimizerName>,
    /// How examples are set aside for evaluation.
    #[serde(default)]
    pub held_out: HeldOut,
    /// The settings of the model that a run keeps, by their key. The run's config may have been edited since.
    /// Empty in checkpoints of earlier versions, like the next two.
    #[serde(default)]
    pub model: BTreeMap<String, String>,
    /// Names of the classes, in the order of their labels; empty for language models, too.
    #[serde(default)]
    pub classes: Vec<String>,
    /// Tokens of the corpus, of a run on a stream of tokens.
    #[serde(default)]
    pub tokens: Option<usize>,
    /// SHA-256 of each other file, in hexadecimal.
    pub files: BTreeMap<String, String>,
}

impl State {
    /// The state now, after `step` optimizer steps.
    pub fn now(
        step: u64,
        data: LoaderState,
        loss_scale: Option<LossScale>,
        optimizer: OptimizerName,
        held_out: HeldOut,
    ) -> Self {
        let random = random::state().map(|Stream { seed, stream }| (seed, stream));
        Self {
            step,
            data,
            random,
            loss_scale: loss_scale.map(|now| (now.scale, now.steps, now.skipped)),
            optimizer: Some(optimizer),
            held_out,
            model: BTreeMap::new(),
            classes: Vec::new(),
            tokens: None,
            files: BTreeMap::new(),
        }
    }

    /// The line of the log that names the checkpoint of this state.
    pub fn entry(&self) -> Entry {
        let is_weights = |name: &&String| name.ends_with(".safetensors");
        let weights = self.files.keys().find(is_weights).map(|name| &self.files[name]);
        Entry::Checkpoint {
            step: self.step,
            weights: weights.cloned().unwrap_or_default(),
        }
    }

    /// Makes sure that a config asks for the model of this state, which is in `folder` and would be trained
    /// in any case. A checkpoint of an earlier version does not say which that is: the config that the run
    /// has, `saved`, does.
    ///
    /// # Errors
    ///
    /// [`CliError::Differs`].
    pub fn check_model(
        &self,
        folder: &Path,
        saved: Option<&ModelConfig>,
        now: &ModelConfig,
    ) -> Result<(), CliError> {
        let difference = match (self.model.is_empty(), saved) {
            (false, _) => now.difference(&self.model),
            (true, Some(saved)) => now.difference(&saved.fixed()),
            (true, None) => None,
        };
        match difference {
            None => Ok(()),
            Some(Difference { key, before, now }) => Err(CliError::Differs {
                what: key,
                saved: before,
                now,
                path: folder.to_path_buf(),
            }),
        }
    }

    /// Makes sure that the state in `folder` is that of the optimizer of a config. Adam and AdamW have the
    /// same state.
    ///
    /// # Errors
    ///
    /// [`CliError::Differs`].
    pub fn check_optimizer(&self, folder: &Path, now: OptimizerName) -> Result<(), CliError> {
        let kind = |name| match name {
            OptimizerName::Adam => OptimizerName::AdamW,
            other => other,
        };
        match self.optimizer {
            Some(saved) if kind(saved) != kind(now) => Err(CliError::Differs {
                what: "optimizer.name".to_owned(),
                saved: format!("{saved:?}").to_lowercase(),
                now: format!("{now:?}").to_lowercase(),
                path: folder.to_path_buf(),
            }),
            _ => Ok(()),
        }
    }

    /// Where loss scaling stood.
    pub fn loss_scale(&self) -> Option<LossScale> {
        self.loss_scale.map(|(scale, steps, skipped)| LossScale {
            scale,
            steps,
            skipped,
        })
    }

    /// Restores the random generator.
    pub fn restore_random(&self) {
        if let Some((seed, stream)) = self.random {
            random::restore(Stream { seed, stream });
        }
    }
}

/// The line of a log that names the checkpoint in `folder`; none if its state cannot be read.
pub fn entry_of(folder: &Path) -> Option<Entry> {
    let bytes = std::fs::read(folder.join(STATE)).ok()?;
    let state: State = serde_json::from_slice(&bytes).ok()?;
    Some(state.entry())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_optimizer_is_named() {
        let data = LoaderState {
            seed: 0,
            epoch: 0,
            batch: 0,
            batch_size: 1,
            examples: 9,
            contents: 0,
        };
        let state = State::now(1, data, None, OptimizerName::AdamW, HeldOut::Random);
        let check = |now| state.check_optimizer(Path::new("at"), now);
        assert!(check(OptimizerName::AdamW).is_ok() && check(OptimizerName::Adam).is_ok());
        let error = check(OptimizerName::Sgd).unwrap_err().to_string();
        assert!(
            error.contains("optimizer.name is adamw") && error.contains("sgd"),
            "{error}"
        );
    }
}
