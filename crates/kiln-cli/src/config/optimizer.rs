//! The optimizers of burn-optim by name, with their numbers.

use burn_optim::decay::WeightDecayConfig;
use burn_optim::grad_clipping::GradientClipping;
use burn_optim::momentum::MomentumConfig;
use burn_optim::{AdaGradConfig, AdamConfig, AdamWConfig, RmsPropConfig, SgdConfig};
use serde::{Deserialize, Serialize};

/// Name of an optimizer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OptimizerName {
    /// Adam with decoupled weight decay.
    AdamW,
    /// Adam.
    Adam,
    /// Stochastic gradient descent, with momentum unless that is 0.
    Sgd,
    /// RMSProp.
    RmsProp,
    /// AdaGrad.
    AdaGrad,
}

/// An optimizer and its numbers. Numbers that an optimizer does not have are ignored.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct OptimizerConfig {
    /// Which.
    pub name: OptimizerName,
    /// Decay of the first moment (Adam, AdamW).
    pub beta1: f32,
    /// Decay of the second moment (Adam, AdamW); `alpha` of RMSProp.
    pub beta2: f32,
    /// Added to the denominator.
    pub epsilon: f32,
    /// Weight decay: decoupled in AdamW, an L2 penalty elsewhere.
    pub weight_decay: f32,
    /// Momentum of SGD and RMSProp.
    pub momentum: f64,
    /// Greatest Euclidean norm of the gradient of each parameter; 0 does not clip.
    pub clip_norm: f32,
    /// Greatest magnitude of each element of a gradient; 0 does not clip.
    pub clip_value: f32,
}

impl Default for OptimizerConfig {
    fn default() -> Self {
        Self {
            name: OptimizerName::AdamW,
            beta1: 0.9,
            beta2: 0.999,
            epsilon: 1e-8,
            weight_decay: 0.01,
            momentum: 0.9,
            clip_norm: 0.0,
            clip_value: 0.0,
        }
    }
}

impl OptimizerConfig {
    pub(super) fn check(&self) -> Result<(), String> {
        for (key, beta) in [("beta1", self.beta1), ("beta2", self.beta2)] {
            if !(0.0..1.0).contains(&beta) {
                return Err(format!(
                    "optimizer.{key} is {beta}; it must be at least 0 and below 1"
                ));
            }
        }
        for (key, value) in [
            ("epsilon", f64::from(self.epsilon)),
            ("weight_decay", f64::from(self.weight_decay)),
            ("momentum", self.momentum),
        ] {
            if !(value >= 0.0 && value.is_finite()) {
                return Err(format!("optimizer.{key} is {value}; it must be at least 0"));
            }
        }
        for (key, value) in [("clip_norm", self.clip_norm), ("clip_value", self.clip_value)] {
            if !(value >= 0.0 && value.is_finite()) {
                return Err(format!(
                    "optimizer.{key} is {value}; it must be positive, or 0 for gradients that are not clipped"
                ));
            }
        }
        if self.clip_norm > 0.0 && self.clip_value > 0.0 {
            return Err(
                "optimizer.clip_norm and optimizer.clip_value are both set; burn-optim clips by one of them"
                    .to_owned(),
            );
        }
        Ok(())
    }

    /// How gradients are clipped.
    pub fn clipping(&self) -> Option<GradientClipping> {
        match (self.clip_norm, self.clip_value) {
            (norm, _) if norm > 0.0 => Some(GradientClipping::Norm(norm)),
            (_, value) if value > 0.0 => Some(GradientClipping::Value(value)),
            _ => None,
        }
    }

    fn decay(&self) -> Option<WeightDecayConfig> {
        (self.weight_decay > 0.0).then(|| WeightDecayConfig::new(self.weight_decay))
    }

    fn momentum(&self) -> Option<MomentumConfig> {
        (self.momentum > 0.0).then(|| {
            MomentumConfig::new()
                .with_momentum(self.momentum)
                .with_dampening(0.0)
        })
    }

    /// AdamW with these numbers.
    pub fn adamw(&self) -> AdamWConfig {
        AdamWConfig::new()
            .with_beta_1(self.beta1)
            .with_beta_2(self.beta2)
            .with_epsilon(self.epsilon)
            .with_weight_decay(self.weight_decay)
    }

    /// Adam with these numbers.
    pub fn adam(&self) -> AdamConfig {
        AdamConfig::new()
            .with_beta_1(self.beta1)
            .with_beta_2(self.beta2)
            .with_epsilon(self.epsilon)
            .with_weight_decay(self.decay())
    }

    /// SGD with these numbers.
    pub fn sgd(&self) -> SgdConfig {
        SgdConfig::new()
            .with_momentum(self.momentum())
            .with_weight_decay(self.decay())
    }

    /// RMSProp with these numbers.
    pub fn rms_prop(&self) -> RmsPropConfig {
        RmsPropConfig::new()
            .with_alpha(self.beta2)
            .with_epsilon(self.epsilon)
            .with_momentum(self.momentum as f32)
            .with_weight_decay(self.decay())
    }

    /// AdaGrad with these numbers.
    pub fn ada_grad(&self) -> AdaGradConfig {
        AdaGradConfig::new()
            .with_epsilon(self.epsilon)
            .with_weight_decay(self.decay())
    }
}
