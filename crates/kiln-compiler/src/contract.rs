//! The contract of a compiled step, which its caller must know: stored in the cache beside the code.

use serde::{Deserialize, Serialize};

use kiln_graph::{Collective, CollectiveKind, Graph, Op, Value};

use crate::checks::Check;
use crate::decision::Decision;
use crate::report::{BufferReport, KernelReport};
use crate::schedule::{KernelKind, Schedule};
use crate::transform::autocast::AutocastReport;

/// What the caller of a step must know.
#[derive(Clone, Debug, Serialize, Deserialize, PartialEq)]
pub struct Contract {
    /// For each output, the argument whose memory it takes over: pass the argument's pointer as the output's.
    pub aliases: Vec<Option<u32>>,
    /// Size of the arena in bytes.
    pub arena_bytes: usize,
    /// What autocast did; none if it was not asked for, or had nothing to do.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub autocast: Option<AutocastReport>,
    /// What the backward pass keeps and computes again; none for a step without one.
    pub partition: Option<Decision>,
    /// The kernels, by number.
    pub kernels: Vec<KernelReport>,
    /// The buffers that kernels share.
    pub buffers: Vec<BufferReport>,
    /// Operations that run outside, by index.
    pub externs: Vec<ExternCall>,
    /// Indices that the step checks before it overwrites anything.
    pub checks: Vec<Check>,
}

/// An operation that the front end runs during the step.
#[derive(Clone, Debug, Serialize, Deserialize, PartialEq, Eq)]
pub struct ExternCall {
    /// Name for people.
    pub name: String,
    /// What the front end needs to run it ([`kiln_graph::op::ExternOp::attributes`]).
    pub attributes: String,
    /// The collective, or the part of one, that the call runs; none for an operation kept whole.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub collective: Option<CollectiveCall>,
    /// Element type (by name) and extents of each operand. Buffers are passed operands first, then results.
    pub inputs: Vec<(String, Vec<usize>)>,
    /// Element type and extents of each result.
    pub outputs: Vec<(String, Vec<usize>)>,
}

/// A collective, or a part of one, that the front end runs during the step.
#[derive(Clone, Copy, Debug, Serialize, Deserialize, PartialEq, Eq)]
pub enum CollectiveCall {
    /// From the operand to the result, complete when the call returns.
    Run {
        /// Position of its kind in [`CollectiveKind::ALL`].
        kind: usize,
        /// Number of ranks.
        ranks: usize,
        /// Whether sums are divided by it.
        mean: bool,
        /// The rank whose operand all get.
        root: usize,
    },
    /// Begins a collective. One that works in place ([`CollectiveKind::is_in_place`]) may have its operand in
    /// the result's memory; otherwise the call copies the operand there, because the step reuses the
    /// operand's memory as soon as the call returns. Any other one reads its operand until the wait. The
    /// result's memory belongs to the collective until the wait.
    Start {
        /// Position of its kind in [`CollectiveKind::ALL`].
        #[serde(default)]
        kind: usize,
        /// Number of ranks.
        ranks: usize,
        /// Whether sums are divided by it.
        mean: bool,
        /// The rank whose operand all get.
        #[serde(default)]
        root: usize,
    },
    /// Waits for the collective that a start call began; the first operand is that call's result, a second
    /// one is not looked at. The result may share the first operand's memory; otherwise the call copies it
    /// there.
    Wait,
}

impl CollectiveCall {
    fn of(op: &Op) -> Option<Self> {
        let Collective {
            kind,
            ranks,
            mean,
            root,
            started,
        } = match *op {
            Op::CollectiveWait => return Some(Self::Wait),
            Op::Collective(collective) => collective,
            _ => return None,
        };
        let kind = CollectiveKind::ALL
            .iter()
            .position(|&known| known == kind)
            .unwrap_or(0);
        Some(match started {
            true => Self::Start {
                kind,
                ranks,
                mean,
                root,
            },
            false => Self::Run {
                kind,
                ranks,
                mean,
                root,
            },
        })
    }

    /// The collective that is run or started; none for a wait, and for a number that is no kind's.
    pub fn collective(&self) -> Option<Collective> {
        let (Self::Run {
            kind,
            ranks,
            mean,
            root,
        }
        | Self::Start {
            kind,
            ranks,
            mean,
            root,
        }) = *self
        else {
            return None;
        };
        Some(Collective {
            kind: *CollectiveKind::ALL.get(kind)?,
            ranks,
            mean,
            root,
            started: matches!(self, Self::Start { .. }),
        })
    }
}

/// The operations of `schedule` that run outside, in the order in which the step calls them. A target that
/// `compiles_c` has those that come with C inside.
pub fn externs(graph: &Graph, schedule: &Schedule, compiles_c: bool) -> Vec<ExternCall> {
    let types = |values: &[Value]| -> Vec<(String, Vec<usize>)> {
        let types = values
            .iter()
            .map(|&v| (graph.dtype(v).name().to_owned(), graph.shape(v).to_vec()));
        types.collect()
    };
    let call = |kind: &KernelKind| {
        let KernelKind::Library(node) = kind else {
            return None;
        };
        let data = graph.node(*node);
        let collective = CollectiveCall::of(&data.op);
        let (name, attributes) = match &data.op {
            Op::Extern(op) if compiles_c && !op.c_source.is_empty() => return None,
            Op::Extern(op) => (op.name.clone(), op.attributes.clone()),
            op if collective.is_some() => (op.name().to_owned(), String::new()),
            _ => return None,
        };
        Some(ExternCall {
            name,
            attributes,
            collective,
            inputs: types(&data.inputs),
            outputs: types(&data.outputs),
        })
    };
    let kinds = schedule.kernels.iter().map(|kernel| &kernel.kind);
    kinds.filter_map(call).collect()
}
