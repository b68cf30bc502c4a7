//! Text generation: the prompt fills the cache in one pass, then each new token costs one position.

use super::{KvCache, Llama, Sampler};
use crate::ModelError;
use burn::config::Config;
use burn::tensor::backend::Backend;
use burn::tensor::{Int, Tensor, TensorData};
use std::ops::ControlFlow;

/// How text is generated.
#[derive(Config, Debug)]
pub struct GenerateConfig {
    /// Most tokens to add. Default: 128
    #[config(default = 128)]
    pub max_new_tokens: usize,
    /// Divides the logits: below 1 sharper, above 1 flatter, 0 always the likeliest token. Default: 1
    #[config(default = 1.0)]
    pub temperature: f64,
    /// Draw from the k likeliest tokens only. Default: from all
    pub top_k: Option<usize>,
    /// Draw from the fewest likeliest tokens that have this probability together. Default: from all
    pub top_p: Option<f64>,
    /// Tokens that end the text. Default: none
    #[config(default = "Vec::new()")]
    pub stop_tokens: Vec<u32>,
    /// Seed of the draws. Default: 0
    #[config(default = 0)]
    pub seed: u64,
}

impl GenerateConfig {
    /// Checks the numbers.
    ///
    /// # Errors
    ///
    /// A negative or infinite temperature, a `top_k` of 0, a `top_p` outside of `(0, 1]`.
    pub fn validate(&self) -> Result<(), ModelError> {
        let fail = |reason: String| Err(ModelError::Generate { reason });
        if !(self.temperature >= 0.0 && self.temperature.is_finite()) {
            return fail(format!(
                "temperature is {}: use 0 (greedy) or a positive number",
                self.temperature
            ));
        }
        if self.top_k == Some(0) {
            return fail("top_k is 0: use at least 1, or leave it out".into());
        }
        if let Some(p) = self.top_p.filter(|p| !(*p > 0.0 && *p <= 1.0)) {
            return fail(format!("top_p is {p}: use a number in (0, 1], or leave it out"));
        }
        Ok(())
    }
}

impl<B: Backend> Llama<B> {
    /// Continues `prompt`; returns the new tokens.
    ///
    /// Ends after `max_new_tokens`, at a stop token (which is not returned), when the model's longest
    /// sequence is reached, or when `on_token` breaks; `on_token` sees each token as it comes. Call it on a
    /// backend without autodiff (`model.valid()`), or every step keeps its graph.
    ///
    /// # Errors
    ///
    /// An empty prompt, one longer than the model allows or with unknown tokens, settings out of range,
    /// logits without a finite number, or a device that fails.
    pub fn generate(
        &self,
        prompt: &[u32],
        config: &GenerateConfig,
        device: &B::Device,
        mut on_token: impl FnMut(u32) -> ControlFlow<()>,
    ) -> Result<Vec<u32>, ModelError> {
        config.validate()?;
        self.check_prompt(prompt)?;
        let room = self
            .max_positions()
            .map_or(usize::MAX, |longest| longest - prompt.len());
        let count = config.max_new_tokens.min(room);
        let mut sampler = Sampler::new(config.temperature, config.top_k, config.top_p, config.seed);
        let mut cache = KvCache::new(self.num_layers(), prompt.len() + count.min(256));
        let mut next = prompt.to_vec();
        let mut generated = Vec::new();
        while generated.len() < count {
            let ids: Vec<i64> = next.iter().map(|id| i64::from(*id)).collect();
            let tokens = Tensor::<B, 2, Int>::from_data(TensorData::new(ids, [1, next.len()]), device);
            let logits = self.forward_cached(tokens, &mut cache);
            let data = logits.try_into_data().map_err(|error| ModelError::Device {
                reason: error.to_string(),
            })?;
            let logits: Vec<f32> = data.iter::<f32>().collect();
            let token = sampler.sample(&logits).ok_or_else(|| ModelError::Generate {
                reason: "the logits hold no finite number: the weights are damaged or have diverged".into(),
            })?;
            if config.stop_tokens.contains(&token) {
                break;
            }
            generated.push(token);
            if on_token(token).is_break() {
                break;
            }
            next = vec![token];
        }
        Ok(generated)
    }

    fn check_prompt(&self, prompt: &[u32]) -> Result<(), ModelError> {
        let fail = |reason: String| Err(ModelError::Generate { reason });
        if prompt.is_empty() {
            return fail("the prompt has no token: begin with the model's first token (bos)".into());
        }
        if let Some(token) = prompt.iter().find(|token| **token as usize >= self.vocab_size()) {
            return fail(format!(
                "the prompt holds token {token}, the model knows {}",
                self.vocab_size()
            ));
        }
        if let Some(longest) = self.max_positions().filter(|longest| prompt.len() > *longest) {
            return fail(format!(
                "the prompt has {} tokens, the model allows {longest}",
                prompt.len()
            ));
        }
        Ok(())
    }
}
