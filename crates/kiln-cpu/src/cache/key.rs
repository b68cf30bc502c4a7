//! What identifies a compiled step.

use std::fmt;

use sha2::{Digest, Sha256};

use crate::build::BuildOptions;
use crate::build::Toolchain;
use crate::runtime::abi::ABI_VERSION;

/// Identity of a compiled step: a SHA-256 over everything its executable depends on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct CacheKey([u8; 32]);

impl CacheKey {
    /// Starts a key with what every step depends on: Kiln's version, the ABI, compiler, CPU and build
    /// options. Add the rest (graph text, compile options) as fields.
    pub fn builder(toolchain: &Toolchain, options: &BuildOptions) -> KeyBuilder {
        KeyBuilder { hash: Sha256::new() }
            .field("kiln", env!("CARGO_PKG_VERSION"))
            .field("abi", ABI_VERSION.to_string())
            .field("header", crate::runtime::abi::RUNTIME_HEADER)
            .field("toolchain", toolchain.identity())
            .field("build", options.identity())
    }
}

impl fmt::Display for CacheKey {
    /// 64 hexadecimal digits; also the name of the entry's files.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// Collects the fields of a [`CacheKey`].
#[derive(Debug, Clone)]
pub struct KeyBuilder {
    hash: Sha256,
}

impl KeyBuilder {
    /// Adds a named field. Order and names count; lengths are hashed too, so that neighbours cannot run
    /// together.
    #[must_use]
    pub fn field(mut self, name: &str, value: impl AsRef<[u8]>) -> Self {
        for part in [name.as_bytes(), value.as_ref()] {
            self.hash.update((part.len() as u64).to_le_bytes());
            self.hash.update(part);
        }
        self
    }

    /// The key.
    pub fn finish(self) -> CacheKey {
        CacheKey(self.hash.finalize().into())
    }
}
