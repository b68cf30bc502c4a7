//! Where a node comes from: the Burn operation, the phase of the step, the line of the user's program.

use std::fmt;
use std::sync::Arc;

/// The part of the training step a node belongs to. Import leaves every node `Unknown`; the partitioner
/// assigns the rest (kiln-partition says how).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default, PartialOrd, Ord)]
pub enum Phase {
    /// Not assigned yet.
    #[default]
    Unknown,
    /// What the forward outputs (loss, logits, metrics) need.
    Forward,
    /// What the gradients need and forward does not.
    Backward,
    /// The rest: parameter and state updates.
    Optimizer,
}

impl Phase {
    /// The short name in the text form: `-`, `fwd`, `bwd`, `opt`.
    pub const fn name(self) -> &'static str {
        match self {
            Phase::Unknown => "-",
            Phase::Forward => "fwd",
            Phase::Backward => "bwd",
            Phase::Optimizer => "opt",
        }
    }

    /// Whether it runs after the forward pass: backward or optimizer.
    pub const fn is_after_forward(self) -> bool {
        matches!(self, Phase::Backward | Phase::Optimizer)
    }

    /// The phase of that short name.
    pub fn from_name(name: &str) -> Option<Self> {
        [Phase::Unknown, Phase::Forward, Phase::Backward, Phase::Optimizer]
            .into_iter()
            .find(|phase| phase.name() == name)
    }
}

impl fmt::Display for Phase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Why a node exists. Rewrites give a new node the provenance of the node it replaces.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Default)]
pub struct Provenance {
    /// The recorded operation, such as `NumericFloat.Add`; none for nodes a transform made from nothing.
    pub operation: Option<Arc<str>>,
    /// The phase of the step.
    pub phase: Phase,
    /// The forward operation whose gradient it belongs to, by Burn's name (`matmul`), if it is known.
    pub gradient_of: Option<Arc<str>>,
    /// `file:line` of the user's call, where recording could see it cheaply; of a node with
    /// [`Provenance::gradient_of`], that of the forward operation.
    pub location: Option<Arc<str>>,
    /// Path of the Burn module the operation ran in, if known.
    pub module: Option<Arc<str>>,
    /// The chunk of rows that the node computes, where a part of the step runs chunk by chunk to save
    /// memory; nodes that run after all chunks have the number after the last. Nodes of different chunks
    /// must not share a kernel, because the next chunk reuses the memory of the one before.
    pub chunk: Option<u16>,
    /// Whether the program asked for f32: the node and its gradient are then computed and stored in f32,
    /// whatever other operations use.
    pub full_precision: bool,
}

impl Provenance {
    /// The provenance of a node imported from the recorded operation `operation`.
    pub fn operation(operation: impl Into<Arc<str>>) -> Self {
        Self {
            operation: Some(operation.into()),
            ..Self::default()
        }
    }
}
