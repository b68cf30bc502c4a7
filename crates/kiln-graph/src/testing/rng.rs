//! Numbers for choices.

/// SplitMix64 (Steele, Lea and Flood 2014): good enough for choices, and the same on every machine.
#[derive(Clone, Debug)]
pub struct Rng(u64);

impl Rng {
    /// The generator of a seed; seeds that are close give sequences that are not.
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// Any number.
    pub fn draw(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// A number below `limit`; 0 if that is 0.
    pub fn below(&mut self, limit: u64) -> u64 {
        self.draw() % limit.max(1)
    }

    /// A number in `[low, high)`.
    pub fn within(&mut self, low: f64, high: f64) -> f64 {
        low + (high - low) * ((self.draw() >> 11) as f64 / (1u64 << 53) as f64)
    }

    /// One of `choices`, each as likely as it is often listed.
    ///
    /// # Panics
    /// Panics if there are none.
    pub fn choose<'a, T>(&mut self, choices: &'a [T]) -> &'a T {
        &choices[self.below(choices.len() as u64) as usize]
    }
}
