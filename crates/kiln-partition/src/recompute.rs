//! Which operations may be computed a second time, in the backward pass, instead of being kept.
//!
//! | operations | [`Recompute`] | why |
//! | --- | --- | --- |
//! | `constant`, `iota`, `reshape`, `transpose`, `broadcast`, `slice`, `pad`, `concat`, `flip` | `Free` | nothing is computed: a reader reads through them by index |
//! | pointwise (`add` .. `select`, `cast`) | `Fused` | computed in the registers of the kernel that reads them |
//! | `random` | `Fused` | counter-based: element `i` is a pure function of seed, stream and `i`, so a dropout mask comes out the same bit for bit; it is not kept, whatever a draw costs |
//! | `reduce`, `gather`, `index_select` | `Fused` | a row's statistics, or a look-up, inside the kernel that reads it |
//! | `arg_reduce`, `cumulative`, `update_slice`, pooling and its gradients, `scatter`, `index_put` | `Kernel` | linear work, but a kernel of its own that writes its result |
//! | `dot_general`, `conv` and its gradients, `attention` and its gradient, `sort`, `top_k` | `Expensive` | more than linear work: only when a memory budget asks for it |
//! | `parameter`, `scalar` | `Never` | they are there anyway |
//! | `extern` | `Never` | what it does is not known here; it may not be a function of its operands |
//!
//! Everything else is a pure function of its operands, and an executor runs equal nodes on equal operands in
//! the same way, so a value computed twice has the same bits twice. Of 16 bits it may have more in a
//! register: what decides by it has it rounded (`kiln_compiler::schedule::bits`).

use kiln_graph::Op;

/// What it takes to compute a node a second time.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Recompute {
    /// Nothing.
    Free,
    /// Arithmetic in a kernel that runs anyway.
    Fused,
    /// A kernel with linear work, which reads its operands and writes its results.
    Kernel,
    /// A kernel with more than linear work: recomputed only under a memory budget.
    Expensive,
    /// Not possible, or pointless.
    Never,
}

impl Recompute {
    /// The row of the table for `op`.
    pub fn of(op: &Op) -> Self {
        match op {
            Op::Constant { .. }
            | Op::Iota { .. }
            | Op::Reshape(_)
            | Op::Transpose(_)
            | Op::Broadcast { .. }
            | Op::Slice { .. }
            | Op::Pad { .. }
            | Op::Concat { .. }
            | Op::Flip(_) => Self::Free,
            Op::Unary(_)
            | Op::Binary(_)
            | Op::Compare(_)
            | Op::Select
            | Op::Cast(_)
            | Op::Random { .. }
            | Op::Reduce { .. }
            | Op::Gather { .. }
            | Op::IndexSelect { .. } => Self::Fused,
            Op::ArgReduce { .. }
            | Op::Cumulative { .. }
            | Op::UpdateSlice { .. }
            | Op::MaxPool(_)
            | Op::MaxPoolWithIndices { .. }
            | Op::MaxPoolGrad { .. }
            | Op::AvgPool { .. }
            | Op::AvgPoolGrad { .. }
            | Op::Scatter { .. }
            | Op::IndexPut { .. } => Self::Kernel,
            Op::DotGeneral(_)
            | Op::Conv(_)
            | Op::ConvInputGrad { .. }
            | Op::ConvWeightGrad { .. }
            | Op::Attention(_)
            | Op::AttentionGrad(_)
            | Op::Sort { .. }
            | Op::TopK { .. } => Self::Expensive,
            Op::Parameter { .. }
            | Op::Scalar { .. }
            | Op::Collective(_)
            | Op::CollectiveWait
            | Op::Extern(_) => Self::Never,
        }
    }

    /// Whether the node runs as a kernel of its own, so that its results lie in memory.
    pub fn is_kernel(self) -> bool {
        matches!(self, Self::Kernel | Self::Expensive | Self::Never)
    }
}
