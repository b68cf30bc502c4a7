//! Each reader has a widening cast of its own.
//!
//! A value of 16 bits that several kernels read as f32 is cast in each of them while it is loaded. One cast
//! with several readers would be a value of its own: the scheduler would store its f32. So every operation
//! that reads a cast from 16 bits to f32 gets a cast of its own, in its own part of the step.

use kiln_graph::op::Op;
use kiln_graph::{DType, Graph, Phase, Rewriter, TypeError, Value};
use rustc_hash::FxHashMap;

/// `graph` with a widening cast for each of its readers.
///
/// # Errors
/// Only if a rule makes an ill-typed node, which would be a bug.
pub(super) fn widen_at_readers(graph: &Graph) -> Result<Graph, TypeError> {
    let widens = |value: Value| {
        let data = graph.def(value);
        let from = data.inputs.first().map(|&operand| graph.dtype(operand));
        matches!(data.op, Op::Cast(DType::F32)) && matches!(from, Some(DType::F16 | DType::BF16))
    };
    let users = graph.users();
    // A cast whose reader is a movement stays: the movement is no kernel, and its readers are the ones that
    // count.
    let moved = |value: Value| {
        users
            .of(value)
            .iter()
            .any(|&user| graph.node(user).op.is_movement())
    };
    let spread = |value: Value| widens(value) && users.outputs(value) == 0 && !moved(value);
    let mut pass = Rewriter::new(graph);
    for (node, data) in graph.nodes() {
        if data.outputs.first().is_some_and(|&value| spread(value)) {
            continue;
        }
        let mut own: FxHashMap<Value, Value> = FxHashMap::default();
        for &operand in data.inputs.iter().filter(|&&operand| spread(operand)) {
            if own.contains_key(&operand) {
                continue;
            }
            let cast = graph.def(operand);
            let mut provenance = cast.provenance.clone();
            if data.provenance.phase != Phase::Unknown {
                provenance.phase = data.provenance.phase;
            }
            provenance.chunk = data.provenance.chunk;
            let narrow = pass.map(cast.inputs[0]);
            let widened = pass.graph.add(cast.op.clone(), &[narrow], &provenance)?;
            own.insert(operand, widened);
            pass.replace(operand, widened);
        }
        pass.copy(node)?;
    }
    Ok(pass.finish())
}
