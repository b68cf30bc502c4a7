//! Keys: the identities of entries.

use std::fmt;
use std::num::ParseIntError;
use std::str::FromStr;

use sha2::{Digest, Sha256};

/// Identity of an entry: a SHA-256 over everything that its content depends on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Key([u8; 32]);

impl Key {
    /// A key without fields yet.
    pub fn builder() -> KeyBuilder {
        KeyBuilder { hash: Sha256::new() }
    }

    /// The key of a content that depends on `parts` and nothing else. Order counts.
    pub fn of(parts: impl IntoIterator<Item = impl AsRef<[u8]>>) -> Self {
        parts.into_iter().fold(Self::builder(), KeyBuilder::part).finish()
    }
}

impl fmt::Display for Key {
    /// 64 hexadecimal digits, which are also the name of the entry's files.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl FromStr for Key {
    type Err = ParseIntError;

    fn from_str(text: &str) -> Result<Self, ParseIntError> {
        // What is no byte is no number.
        let byte = |at: usize| u8::from_str_radix(text.get(2 * at..2 * at + 2).unwrap_or_default(), 16);
        let mut key = [0; 32];
        for (at, to) in key.iter_mut().enumerate() {
            *to = byte(at)?;
        }
        Ok(Self(key))
    }
}

/// Collects the fields of a [`Key`].
#[derive(Debug, Clone)]
pub struct KeyBuilder {
    hash: Sha256,
}

impl KeyBuilder {
    /// Adds a named field. Order and names count.
    #[must_use]
    pub fn field(self, name: &str, value: impl AsRef<[u8]>) -> Self {
        self.part(name).part(value)
    }

    /// Lengths are hashed too, so that neighbours cannot run together.
    fn part(mut self, part: impl AsRef<[u8]>) -> Self {
        let part = part.as_ref();
        self.hash.update((part.len() as u64).to_le_bytes());
        self.hash.update(part);
        self
    }

    /// The key.
    pub fn finish(self) -> Key {
        Key(self.hash.finalize().into())
    }
}
