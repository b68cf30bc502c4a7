//! Programs that fail, by cause. A fix takes its lines away.

/// Causes, each with the programs that fail for it. Their tests pass without running, unless
/// `KILN_KNOWN=run` asks for them.
pub const KNOWN: &[(&str, &[&str])] = &[];
