//! What a dataset contains, as a number: a saved position means something else in other data of the same
//! length.

use sha2::{Digest, Sha256};

/// Most examples of a dataset that are looked at.
const MOST: usize = 4096;

/// The number of what is added to it, the same on every machine.
pub(super) struct Contents(Sha256);

impl Contents {
    /// Of a kind of data.
    pub(super) fn of(kind: &str) -> Self {
        let mut contents = Self(Sha256::new());
        contents.add(kind.as_bytes());
        contents
    }

    pub(super) fn add(&mut self, bytes: &[u8]) {
        // The length divides what follows each other.
        self.0.update((bytes.len() as u64).to_le_bytes());
        self.0.update(bytes);
    }

    /// Not 0, which stands for contents that nobody has looked at.
    pub(super) fn number(self) -> u64 {
        let digest = self.0.finalize();
        let first = digest.first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes));
        first.max(1)
    }
}

/// The examples that stand for all `len`: all of them, or some that are spread evenly.
pub(super) fn examples(len: usize) -> impl Iterator<Item = usize> {
    let count = len.min(MOST);
    (0..count).map(move |number| (number as u128 * len as u128 / count as u128) as usize)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn examples_are_spread_over_all() {
        assert!(examples(0).next().is_none());
        assert!(examples(7).eq(0..7));
        let many: Vec<usize> = examples(10 * MOST + 3).collect();
        assert_eq!((many.len(), many[0]), (MOST, 0));
        assert!(many.windows(2).all(|pair| pair[0] < pair[1]) && many[MOST - 1] >= 10 * MOST - 10);
    }

    #[test]
    fn what_is_divided_otherwise_is_something_else() {
        let number = |parts: &[&str]| {
            let mut contents = Contents::of("text");
            parts.iter().for_each(|part| contents.add(part.as_bytes()));
            contents.number()
        };
        assert_eq!(number(&["ab", "c"]), number(&["ab", "c"]));
        assert_ne!(number(&["ab", "c"]), number(&["a", "bc"]));
        assert_ne!(number(&["ab", "c"]), number(&["c", "ab"]));
    }
}
