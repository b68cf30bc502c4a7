//! The decisions of the partition, for people: stored in the cache with the step, without references to the
//! graph.

use std::fmt;
use std::sync::Arc;

use kiln_graph::NodeData;
use kiln_partition::{Origin, Report};
use serde::{Deserialize, Serialize};

/// The decisions of a partition: stored in the cache with the step.
#[derive(Clone, Debug, Serialize, Deserialize, PartialEq, Eq)]
pub struct Decision {
    /// Bytes kept from the forward to the backward pass, without outputs of the step.
    pub saved_bytes: u64,
    /// Bytes that would be kept if the backward pass recomputed nothing.
    pub everything_bytes: u64,
    /// The arena without a memory budget, if there is one.
    pub peak_without_budget: Option<u64>,
    /// Time of recomputed operations by the cost model, in picoseconds.
    pub recompute_picoseconds: u64,
    /// The product that runs in chunks of rows to fit the budget, in words.
    pub chunks: Option<String>,
    /// Kept values, largest first.
    pub saved: Vec<SavedReport>,
    /// Recomputed operations, the most bytes first.
    pub recomputed: Vec<RecomputedReport>,
}

/// A value that is kept from the forward to the backward pass.
#[derive(Clone, Debug, Serialize, Deserialize, PartialEq, Eq)]
pub struct SavedReport {
    /// Its name in the partitioned graph.
    pub name: String,
    /// Element type and shape.
    pub ty: String,
    /// Size in bytes.
    pub bytes: u64,
    /// Whether it leaves the step as an output as well.
    pub is_output: bool,
    /// The operation that makes it.
    pub origin: OriginReport,
    /// The operations that read it in the backward pass.
    pub users: Vec<OriginReport>,
}

/// What a node is and where it comes from.
#[derive(Clone, Debug, Serialize, Deserialize, PartialEq, Eq)]
pub struct OriginReport {
    /// Mnemonic of the primitive.
    pub op: String,
    /// The recorded operation, if known.
    pub operation: Option<String>,
    /// The forward operation whose gradient it belongs to, by Burn's name, if it is one; the line is that
    /// operation's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gradient_of: Option<String>,
    /// `file:line` of the user's call, if known.
    pub location: Option<String>,
    /// The user's module, if known.
    pub module: Option<String>,
}

impl OriginReport {
    /// What a node is and where it comes from.
    pub(crate) fn of(data: &NodeData) -> Self {
        Self::from(&Origin::of(data))
    }
}

impl From<&Origin> for OriginReport {
    fn from(origin: &Origin) -> Self {
        let text = |text: &Option<Arc<str>>| text.as_deref().map(str::to_owned);
        Self {
            op: origin.op.clone(),
            operation: text(&origin.operation),
            gradient_of: text(&origin.gradient_of),
            location: text(&origin.location),
            module: text(&origin.module),
        }
    }
}

impl fmt::Display for OriginReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let shared = |text: &Option<String>| text.as_deref().map(Arc::from);
        let origin = Origin {
            op: self.op.clone(),
            operation: shared(&self.operation),
            gradient_of: shared(&self.gradient_of),
            location: shared(&self.location),
            module: shared(&self.module),
        };
        origin.fmt(f)
    }
}

/// Operations of one kind that run again in the backward pass.
#[derive(Clone, Debug, Serialize, Deserialize, PartialEq, Eq)]
pub struct RecomputedReport {
    /// Mnemonic of the primitive.
    pub op: String,
    /// How many.
    pub count: usize,
    /// Bytes of their results, which are not kept.
    pub bytes: u64,
}

impl From<&Report> for Decision {
    fn from(report: &Report) -> Self {
        let saved = report.saved.iter().map(|saved| SavedReport {
            name: saved.value.to_string(),
            ty: saved.ty.to_string(),
            bytes: saved.bytes,
            is_output: saved.is_output,
            origin: OriginReport::from(&saved.origin),
            users: saved.users.iter().map(OriginReport::from).collect(),
        });
        let recomputed = report.recomputed.iter().map(|again| RecomputedReport {
            op: again.op.clone(),
            count: again.count,
            bytes: again.bytes,
        });
        Self {
            saved_bytes: report.saved_bytes,
            everything_bytes: report.everything_bytes,
            peak_without_budget: report.peak_without_budget,
            recompute_picoseconds: report.recompute_picoseconds,
            chunks: report.chunks.as_ref().map(ToString::to_string),
            saved: saved.collect(),
            recomputed: recomputed.collect(),
        }
    }
}
