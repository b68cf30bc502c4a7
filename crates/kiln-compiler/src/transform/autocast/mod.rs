//! Autocast: a step of f32 computes its products in 16 bits, and stores the values between them in 16 bits.
//!
//! Products, convolutions and attention (*contractions*) read `bf16` or `f16` and accumulate in f32.
//! Everything else computes in f32, as it did. What changes is the type in which values are *stored*:
//!
//! | value | type |
//! | --- | --- |
//! | operands of contractions, and of poolings of what contractions made | 16 bits |
//! | results of contractions | 16 bits; f32 where only updates and outputs depend on them, as on the gradients of parameters |
//! | gradients of convolutions' weights, on targets whose fast kernels round them ([`Policy::narrow_weight_gradients`]) | bf16 |
//! | what pointwise operations make of such results, and others read behind a further contraction (a residual stream, its gradient) | 16 bits |
//! | factors of gradients that were expensive to compute, on targets that would rather keep them ([`Policy::narrow_factors`]) | bf16 behind the forward pass |
//! | such gradients that are read again behind their sum over the batch (batch normalisation) | 16 bits |
//! | arguments and outputs of the step, reductions, statistics, what runs in the optimizer phase, losses, everything else | f32 |
//!
//! A pointwise operation never computes in 16 bits. Where its result is stored in 16 bits, a cast follows it
//! in the same loop nest; readers of the stored value widen it while they load it. Values that stay in
//! registers are not rounded:
//!
//! ```text
//! %y = dot_general %x, %w : f32        %xh = cast %x : bf16      %wh = cast %w : bf16
//! %z = tanh %y                    ─►   %y = dot_general %xh, %wh : bf16
//! %v = mul %z, %z                      %yw = cast %y : f32       %z = tanh %yw      %v = mul %z, %z      %vh
//! = cast %v : bf16 %u = dot_general %v, %r              %u = dot_general %vh, ..
//! ```
//!
//! There are four steps. `facts` finds for each value what it is made from and who reads it. `rewrite` makes
//! the graph with its casts; equal casts are one, and casts stand in front of movements. `masks` lets the
//! gradients of ReLUs look at what these stored. `widen` gives each reader of 16 bits a widening cast of its
//! own, so that no f32 copy is ever stored.
//!
//! The pass runs after all patterns, which match f32 compositions, and before the partition, which then
//! counts two bytes where two are stored. An argument that a contraction reads is cast by a kernel at the
//! start of the step, unless the caller has it in 16 bits as well ([`kiln_graph::Graph::note_copy`]): that
//! copy is read then. All other casts are parts of kernels that run anyway. A graph whose contractions are
//! all of 16 bits already, or marked [`full_precision`](kiln_graph::Provenance::full_precision), stays as it
//! is.

mod factors;
mod facts;
mod masks;
mod report;
mod rewrite;
mod widen;

use kiln_graph::{DType, Graph, TypeError};

pub use report::{AutocastReport, CastReport, CopyReport, Reason, StoredReport};

use crate::policy::Policy;
use facts::Facts;
use rewrite::Rewrite;

/// `graph` with its products in `dtype`, which is `f16` or `bf16`, for a target of these thresholds, and what
/// was decided; no report if there was nothing to do.
///
/// # Errors
/// Only if a rule makes an ill-typed node, which would be a bug.
pub fn autocast(
    graph: &Graph,
    dtype: DType,
    policy: &Policy,
) -> Result<(Graph, Option<AutocastReport>), TypeError> {
    // What f16 holds ends at 65,504.
    let narrow_gradients = policy.narrow_weight_gradients && dtype == DType::BF16;
    let narrow_factors = policy.narrow_factors && dtype == DType::BF16;
    let facts = Facts::new(graph, dtype, narrow_gradients, narrow_factors);
    if !facts.has_work() {
        return Ok((widen::widen_at_readers(graph)?, None));
    }
    let (graph, stored) = Rewrite::new(graph, &facts, dtype).run()?;
    let graph = masks::look_at_what_is_stored(graph)?;
    let graph = widen::widen_at_readers(&graph)?;
    let report = AutocastReport::new(dtype, stored, &graph);
    Ok((graph, Some(report)))
}
