//! The gradient of a ReLU looks at what the ReLU stored.
//!
//! ReLU is recorded as `select(x <= 0, 0, x)`, and its gradient reads the same comparison. Where `x` is what
//! a contraction makes (with a bias), the next contraction reads the ReLU in 16 bits and its gradient reads
//! them again, so they are kept; the comparison would be kept beside them, one byte an element. But
//! `relu(x) <= 0` says the same, NaN included, and needs nothing more:
//!
//! ```text
//! %m = compare le %x, %0                                 %m = compare le %x, %0
//! %r = select %m, %0, %x                                 %r = select %m, %0, %x
//! %h = cast %r : bf16                             ─►     %h = cast %r : bf16
//! .. contractions read %h ..                             .. contractions read %h ..
//! %dx = select %m, %0, %dr            ; bwd              %w = cast %h : f32               ; bwd
//!                                                        %n = compare le %w, %0           ; bwd
//!                                                        %dx = select %n, %0, %dr         ; bwd
//! ```
//!
//! A number that 16 bits round to 0 counts as 0 for the gradient, as it does for whatever reads the stored
//! ReLU in the forward pass. Whether the comparison is kept or made again stays the partition's choice.
//! Behind a normalisation, whose result is not stored, everything stays as it is.

use kiln_graph::op::{CompareOp, Op};
use kiln_graph::{DType, Graph, Node, Phase, Rewriter, TypeError, Value};
use rustc_hash::FxHashMap;

use crate::transform::relu::{Relu, is_contracted, relu};

/// `graph` with gradients of ReLUs that look at what is stored.
///
/// # Errors
/// Only if a rule makes an ill-typed node, which would be a bug.
pub(super) fn look_at_what_is_stored(graph: Graph) -> Result<Graph, TypeError> {
    let users = graph.users();
    // By the stored value.
    let mut masks: FxHashMap<Value, Relu> = FxHashMap::default();
    for (_, data) in graph.nodes() {
        let wide = |relu: &Relu| graph.dtype(relu.x) == DType::F32 && is_contracted(&graph, relu.x);
        let Some(relu) = relu(&graph, data).filter(wide) else {
            continue;
        };
        let stored = users.of(data.outputs[0]).iter().find_map(|&user| {
            let user = graph.node(user);
            matches!(user.op, Op::Cast(DType::F16 | DType::BF16)).then(|| user.outputs[0])
        });
        let contracted = |&value: &Value| {
            let mut readers = users.of(value).iter();
            readers.any(|&user| graph.node(user).op.is_contraction())
        };
        if let Some(stored) = stored.filter(contracted) {
            masks.insert(stored, relu);
        }
    }
    if masks.is_empty() {
        return Ok(graph);
    }
    let mut pass = Rewriter::new(&graph);
    // The comparisons of the gradients, by those of the ReLUs.
    let mut again: FxHashMap<Value, Value> = FxHashMap::default();
    for (node, data) in graph.nodes() {
        let backward = data.provenance.phase == Phase::Backward;
        let known = |value: &&Value| backward && again.contains_key(value);
        let replaced: Vec<Value> = data.inputs.iter().filter(known).copied().collect();
        let forward: Vec<Value> = replaced.iter().map(|&value| pass.map(value)).collect();
        for value in &replaced {
            pass.replace(*value, again[value]);
        }
        pass.copy(node)?;
        for (&old, new) in replaced.iter().zip(forward) {
            pass.replace(old, new);
        }
        let Some(mask) = data.outputs.first().and_then(|value| masks.get(value)) else {
            continue;
        };
        let reads = |&user: &Node| graph.node(user).provenance.phase == Phase::Backward;
        if users.of(mask.compare).iter().any(reads) {
            let mut provenance = graph.def(mask.compare).provenance.clone();
            provenance.phase = Phase::Backward;
            let (stored, zeros) = (pass.map(data.outputs[0]), pass.map(mask.zeros));
            let wide = pass.graph.add(Op::Cast(DType::F32), &[stored], &provenance)?;
            let compare = Op::Compare(CompareOp::Le);
            again.insert(
                mask.compare,
                pass.graph.add(compare, &[wide, zeros], &provenance)?,
            );
        }
    }
    Ok(pass.finish())
}
