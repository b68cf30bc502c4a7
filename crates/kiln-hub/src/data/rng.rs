//! Random numbers for order and augmentation.
//!
//! Resuming exactly needs numbers that depend only on their place: which run (seed), which epoch, which
//! example. So a generator is made for each such place by mixing its coordinates, and is cheap enough to be
//! dropped after a few draws. The generator is SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom
//! number generators, 2014): a counter and a mixing function. It is part of the meaning of a saved position
//! and must not change.

/// The odd constant nearest to 2^64 divided by the golden ratio: the counter's step.
const STEP: u64 = 0x9e37_79b9_7f4a_7c15;

/// A small deterministic generator. Not for cryptography.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rng {
    state: u64,
}

impl Rng {
    /// The generator of a place, such as `[seed, epoch, example]`.
    pub fn at(place: &[u64]) -> Self {
        let state = place.iter().fold(STEP, |state, &coordinate| {
            mix(state ^ mix(coordinate.wrapping_add(STEP)))
        });
        Self { state }
    }

    /// 64 random bits.
    pub fn bits(&mut self) -> u64 {
        self.state = self.state.wrapping_add(STEP);
        mix(self.state)
    }

    /// A number below `bound`, without bias; 0 if `bound` is 0.
    pub fn below(&mut self, bound: u64) -> u64 {
        if bound == 0 {
            return 0;
        }
        // The high half of a 128-bit product is uniform once the few low halves that would favour some
        // results are drawn again (Lemire: Fast random integer generation in an interval, 2019).
        let threshold = bound.wrapping_neg() % bound;
        loop {
            let product = u128::from(self.bits()) * u128::from(bound);
            if product as u64 >= threshold {
                return (product >> 64) as u64;
            }
        }
    }

    /// A number in `0..bound` as an index.
    pub fn index(&mut self, bound: usize) -> usize {
        self.below(bound as u64) as usize
    }

    /// A float in [0, 1), of 24 random bits.
    pub fn unit(&mut self) -> f32 {
        (self.bits() >> 40) as f32 / (1u32 << 24) as f32
    }

    /// A float in [low, high).
    pub fn range(&mut self, low: f32, high: f32) -> f32 {
        low + (high - low) * self.unit()
    }

    /// Whether an event of this probability happens.
    pub fn chance(&mut self, probability: f32) -> bool {
        self.unit() < probability
    }

    /// A float from the normal distribution of mean 0 and deviation 1 (Box and Muller).
    pub fn normal(&mut self) -> f32 {
        let radius = (-2.0 * (1.0 - self.unit()).ln()).sqrt();
        radius * (std::f32::consts::TAU * self.unit()).cos()
    }

    /// Puts items into random order (Fisher and Yates).
    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        for last in (1..items.len()).rev() {
            items.swap(last, self.index(last + 1));
        }
    }
}

/// SplitMix64's finalizer: each output bit depends on every input bit.
fn mix(mut x: u64) -> u64 {
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The first outputs of the published SplitMix64 for seed 1234567.
    #[test]
    fn known_answers() {
        let mut rng = Rng { state: 1_234_567 };
        let expected = [
            6457827717110365317,
            3203168211198807973,
            9817491932198370423,
            4593380528125082431,
        ];
        assert_eq!([rng.bits(), rng.bits(), rng.bits(), rng.bits()], expected);
    }

    #[test]
    fn places_are_independent() {
        let mut seen = std::collections::HashSet::new();
        for seed in 0..20 {
            for epoch in 0..20 {
                for item in 0..20 {
                    assert!(seen.insert(Rng::at(&[seed, epoch, item]).bits()));
                }
            }
        }
        assert_ne!(Rng::at(&[1, 2]).bits(), Rng::at(&[2, 1]).bits());
        assert_ne!(Rng::at(&[1]).bits(), Rng::at(&[1, 0]).bits());
    }

    #[test]
    fn distributions() {
        let mut rng = Rng::at(&[7]);
        let n = 100_000;
        let mut counts = [0u32; 7];
        (0..n).for_each(|_| counts[rng.index(7)] += 1);
        // Chi-square with 6 degrees of freedom; 22.5 is its 0.999 quantile, and the draw is fixed by the
        // seed.
        let expected = n as f64 / 7.0;
        let chi: f64 = counts
            .iter()
            .map(|&c| (f64::from(c) - expected).powi(2) / expected)
            .sum();
        assert!(chi < 22.5, "{chi}");
        let normal: Vec<f64> = (0..n).map(|_| f64::from(rng.normal())).collect();
        let mean = normal.iter().sum::<f64>() / n as f64;
        let variance = normal.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / n as f64;
        assert!(
            mean.abs() < 0.015 && (variance - 1.0).abs() < 0.02,
            "{mean} {variance}"
        );
        assert!(normal.iter().all(|x| x.is_finite()));
    }

    #[test]
    fn every_order_of_three_is_as_likely() {
        let mut counts = std::collections::HashMap::new();
        for seed in 0..6000 {
            let mut items = [0, 1, 2];
            Rng::at(&[seed]).shuffle(&mut items);
            *counts.entry(items).or_insert(0) += 1;
        }
        assert_eq!(counts.len(), 6);
        assert!(
            counts.values().all(|&c: &i32| (850..1150).contains(&c)),
            "{counts:?}"
        );
    }
}
