//! Log events that describe a compiled step, one line each: for steps that were built and for steps from
//! the disk cache.
//!
//! Nothing is formatted unless a subscriber listens to the target.

use std::fmt;

use crate::contract::Contract;
use crate::decision::{Decision, RecomputedReport};
use crate::options::Keep;

/// Logs what the backward pass keeps, what kernels fuse, and what they cost.
pub fn step(name: &str, keep: Keep, contract: &Contract) {
    if let Some(decision) = &contract.partition {
        partition(name, keep, decision);
    }
    for (number, kernel) in contract.kernels.iter().enumerate() {
        if kernel.nodes.len() > 1 {
            tracing::debug!(
                target: "kiln::fusion",
                step = name,
                kernel = number,
                name = kernel.name,
                "{}",
                kernel.nodes.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
            );
        }
        tracing::debug!(
            target: "kiln::kernels",
            step = name,
            kernel = number,
            name = kernel.name,
            operations = kernel.nodes.len(),
            bytes = kernel.bytes,
            flops = kernel.flops,
        );
    }
}

fn partition(name: &str, keep: Keep, decision: &Decision) {
    tracing::debug!(
        target: "kiln::partition",
        step = name,
        keep = %keep,
        kept_bytes = decision.saved_bytes,
        read_bytes = decision.everything_bytes,
        peak_without_budget = decision.peak_without_budget,
        chunks = decision.chunks,
        "keeps {} tensors for the backward pass; computes again: {}",
        decision.saved.len(),
        Recomputed(&decision.recomputed)
    );
}

/// `3 exp, 1 mul`
struct Recomputed<'a>(&'a [RecomputedReport]);

impl fmt::Display for Recomputed<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_empty() {
            return f.write_str("nothing");
        }
        for (position, again) in self.0.iter().enumerate() {
            let comma = if position > 0 { ", " } else { "" };
            write!(f, "{comma}{} {}", again.count, again.op)?;
        }
        Ok(())
    }
}
