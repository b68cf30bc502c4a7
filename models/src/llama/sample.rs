//! Choosing the next token from its logits: temperature, then the k likeliest, then the likeliest that make
//! up p.
//!
//! The choice runs on the host from a seed, so a text is a function of the model, the prompt and the seed, on
//! any backend that computes the same logits.

/// Draws tokens.
#[derive(Debug, Clone)]
pub struct Sampler {
    temperature: f64,
    top_k: Option<usize>,
    top_p: Option<f64>,
    state: u64,
}

impl Sampler {
    /// A sampler. Temperature 0 always takes the likeliest token; `top_k` and `top_p` narrow the choice in
    /// this order.
    pub fn new(temperature: f64, top_k: Option<usize>, top_p: Option<f64>, seed: u64) -> Self {
        Self {
            temperature,
            top_k,
            top_p,
            state: seed,
        }
    }

    /// The next token; `None` if `logits` is empty or holds no finite number.
    pub fn sample(&mut self, logits: &[f32]) -> Option<u32> {
        let mut candidates: Vec<(u32, f32)> = (0u32..)
            .zip(logits.iter().copied())
            .filter(|(_, logit)| logit.is_finite())
            .collect();
        // Likeliest first, ties by token.
        candidates.sort_by(|left, right| right.1.total_cmp(&left.1).then(left.0.cmp(&right.0)));
        let &(best, highest) = candidates.first()?;
        if self.temperature == 0.0 {
            return Some(best);
        }
        if let Some(k) = self.top_k {
            candidates.truncate(k.max(1));
        }
        let weights: Vec<f64> = candidates
            .iter()
            .map(|(_, logit)| ((logit - highest) as f64 / self.temperature).exp())
            .collect();
        let kept = match self.top_p {
            Some(p) => Self::nucleus(&weights, p),
            None => weights.len(),
        };
        let mut rest = self.uniform() * weights[..kept].iter().sum::<f64>();
        for ((token, _), weight) in candidates[..kept].iter().zip(&weights) {
            rest -= weight;
            if rest < 0.0 {
                return Some(*token);
            }
        }
        // Rounding can leave a last crumb of probability; it belongs to the last candidate.
        Some(candidates[kept - 1].0)
    }

    /// How many of the `weights`, likeliest first, reach the share `p` of their sum; at least one.
    fn nucleus(weights: &[f64], p: f64) -> usize {
        let goal = p * weights.iter().sum::<f64>();
        let mut sum = 0.0;
        let reached = weights.iter().position(|weight| {
            sum += weight;
            sum >= goal
        });
        reached.map_or(weights.len(), |index| index + 1)
    }

    /// Uniform in `[0, 1)`: SplitMix64, a counter passed through a mixing function.
    fn uniform(&mut self) -> f64 {
        self.state = self.state.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut mixed = self.state;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        mixed ^= mixed >> 31;
        (mixed >> 11) as f64 / (1u64 << 53) as f64
    }
}
