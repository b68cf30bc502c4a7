//! Operations kept whole inside a graph.
//!
//! Some operations have no lowering: grid sampling, deformable convolution, CTC loss, bicubic and Lanczos
//! interpolation. They become [`Op::Extern`] nodes whose attributes are the recorded operation as JSON, its
//! tensor ids replaced by positions (operands first, then results, each in the order of `OperationIr::inputs`
//! and `outputs`). So equal operations have equal attributes, and any executor can hand the node back to
//! burn-flex: [`run`] does that.

use burn_flex::FlexTensor;
use burn_ir::{OperationIr, TensorId, TensorIr, TensorStatus};
use kiln_graph::Op;
use kiln_graph::op::ExternOp;
use serde_json::Value as Json;

use super::lower::{Done, Fault, Lower, tensor_type};
use crate::custom;
use crate::eager::{self, OperationError, TensorStore};
use crate::stream;

/// Makes `operation` one extern node.
pub(super) fn keep(l: &mut Lower, operation: &OperationIr) -> Done {
    let inputs: Vec<&TensorIr> = operation.inputs().collect();
    let outputs: Vec<&TensorIr> = operation.outputs().collect();
    let operands = inputs
        .iter()
        .map(|ir| l.input(ir))
        .collect::<Result<Vec<_>, _>>()?;
    let types = outputs
        .iter()
        .map(|ir| tensor_type(ir))
        .collect::<Result<_, _>>()?;
    let ids: Vec<TensorId> = inputs.iter().chain(&outputs).map(|ir| ir.id).collect();
    let mut json = serde_json::to_value(operation)
        .map_err(|error| Fault::Unsupported(format!("it has no text form ({error})")))?;
    relative(&mut json, &ids);
    let op = Op::Extern(Box::new(ExternOp {
        name: stream::name(operation),
        attributes: json.to_string(),
        c_source: custom::id(operation)
            .and_then(custom::c_source)
            .unwrap_or_default()
            .to_owned(),
        outputs: types,
    }));
    let results = l.add_many(op, &operands)?;
    for (ir, value) in outputs.iter().zip(results) {
        l.define(ir, value)?;
    }
    Ok(())
}

/// Replaces every tensor id by its position in `ids`, and forgets which uses were the last.
fn relative(json: &mut Json, ids: &[TensorId]) {
    match json {
        Json::Object(fields) if fields.contains_key("id") && fields.contains_key("status") => {
            let id = fields["id"]["value"].as_u64();
            let position = ids.iter().position(|known| Some(known.value()) == id);
            if let Some(position) = position {
                fields.insert("id".into(), serde_json::json!({ "value": position }));
                fields.insert("status".into(), serde_json::json!(TensorStatus::ReadOnly));
            }
        }
        Json::Object(fields) => fields.values_mut().for_each(|value| relative(value, ids)),
        Json::Array(items) => items.iter_mut().for_each(|item| relative(item, ids)),
        _ => {}
    }
}

/// Why an operation kept whole did not run.
#[derive(Clone, Debug, thiserror::Error)]
pub enum ExternError {
    /// The attributes are not what the import writes.
    #[error("`{name}` has attributes that describe no operation: {reason}")]
    Attributes {
        /// Name of the operation.
        name: String,
        /// What is wrong with them.
        reason: String,
    },
    /// It ran and failed.
    #[error(transparent)]
    Operation(#[from] OperationError),
}

/// Runs an operation kept whole on burn-flex. `operands` are in the order of the node's.
///
/// # Errors
///
/// If the attributes describe no operation, or the operation fails.
///
/// # Panics
///
/// As the operation does on burn-flex.
pub fn run(op: &ExternOp, operands: Vec<FlexTensor>) -> Result<Vec<FlexTensor>, ExternError> {
    let operation: OperationIr =
        serde_json::from_str(&op.attributes).map_err(|error| ExternError::Attributes {
            name: op.name.clone(),
            reason: error.to_string(),
        })?;
    let inputs: Vec<TensorId> = operation.inputs().map(|ir| ir.id).collect();
    let outputs: Vec<TensorId> = operation.outputs().map(|ir| ir.id).collect();
    if inputs.len() != operands.len() || outputs.len() != op.outputs.len() {
        return Err(ExternError::Attributes {
            name: op.name.clone(),
            reason: format!(
                "they name {} operands and {} results, the node has {} and {}",
                inputs.len(),
                outputs.len(),
                operands.len(),
                op.outputs.len()
            ),
        });
    }
    let mut store = Scratch(inputs.into_iter().zip(operands).collect());
    // None of these operations draws random numbers.
    eager::run(&operation, &mut store, &mut || (0, 0))?;
    outputs
        .into_iter()
        .map(|id| {
            let found = store.0.iter().position(|(known, _)| *known == id);
            let position = found.ok_or_else(|| OperationError::missing(id))?;
            Ok(store.0.swap_remove(position).1)
        })
        .collect()
}

/// The tensors of one operation.
struct Scratch(Vec<(TensorId, FlexTensor)>);

impl TensorStore for Scratch {
    fn take(&mut self, ir: &TensorIr) -> Result<FlexTensor, OperationError> {
        let found = self.0.iter().find(|(id, _)| *id == ir.id);
        found
            .map(|(_, tensor)| tensor.clone())
            .ok_or_else(|| OperationError::missing(ir.id))
    }

    fn put(&mut self, ir: &TensorIr, tensor: FlexTensor) {
        self.0.push((ir.id, tensor));
    }
}
