//! The graph of a function in the place of its operation ([`crate::inlined`]).

use burn_ir::CustomOpIr;
use kiln_graph::{Op, Shape, Value};
use rustc_hash::FxHashMap;

use super::lower::{Done, Fault, Lower};
use crate::inlined::{Body, Inlined, Number};

/// Adds the nodes of `function` to the graph under construction, with the operands of `op` for its
/// parameters.
pub(super) fn inline(l: &mut Lower, op: &CustomOpIr, function: &Inlined) -> Done {
    let body = &function.body;
    let operands = op.inputs.iter().map(|ir| l.input(ir));
    let operands = operands.collect::<Result<Vec<Value>, Fault>>()?;
    let mut values = arguments(l, body, &operands)?;
    let unknown =
        || Fault::Unsupported("its graph reads a tensor that is no operand; please report this".into());
    for (_, node) in body.graph.nodes() {
        if matches!(node.op, Op::Parameter { .. } | Op::Scalar { .. }) {
            continue;
        }
        let inputs = node.inputs.iter().map(|input| values.get(input).copied());
        let inputs = inputs.collect::<Option<Vec<Value>>>().ok_or_else(unknown)?;
        let mut provenance = node.provenance.clone();
        provenance.location = provenance.location.or_else(|| l.p.location.clone());
        provenance.full_precision |= l.p.full_precision;
        let results = l.graph.add_node(node.op.clone(), &inputs, provenance)?;
        for (&old, new) in node.outputs.iter().zip(results) {
            values.insert(old, new);
        }
    }
    for (ir, output) in op.outputs.iter().zip(&body.graph.outputs) {
        let value = values.get(&output.value).ok_or_else(unknown)?;
        l.define(ir, *value)?;
    }
    Ok(())
}

/// The parameters and runtime scalars of `body` in the graph under construction.
fn arguments(l: &mut Lower, body: &Body, operands: &[Value]) -> Result<FxHashMap<Value, Value>, Fault> {
    let mut values = FxHashMap::default();
    // Every draw has its stream, whether or not something reads it.
    let draws: Vec<[Value; 2]> = (0..body.draws).map(|_| l.random_position()).collect();
    for (&parameter, operand) in body.graph.parameters().iter().zip(&body.parameters) {
        values.extend(operand.map(|operand| (parameter, operands[operand])));
    }
    for (&scalar, number) in body.graph.scalars().iter().zip(&body.scalars) {
        let value = match *number {
            Number::Operand(operand) => Some(element(l, operands[operand])?),
            Number::Seed(draw) => Some(draws[draw][0]),
            Number::Stream(draw) => Some(draws[draw][1]),
            Number::Unused => None,
        };
        values.extend(value.map(|value| (scalar, value)));
    }
    Ok(values)
}

/// The only element of `x` as a rank-0 value.
fn element(l: &mut Lower, x: Value) -> Result<Value, Fault> {
    let def = l.graph.def(x);
    match def.op {
        // The runtime scalar that fills the tensor.
        Op::Broadcast { ref dims, .. } if dims.is_empty() => Ok(def.inputs[0]),
        _ => l.reshape(x, Shape::from([])),
    }
}
