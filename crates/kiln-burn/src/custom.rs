//! Operations of the program's own: functions on the host that stay whole in a step.
//!
//! Such an operation is an `OperationIr::Custom` whose id is made of the program's name for it, and this
//! file knows the function of each id. A step refers to the operation by the id alone, so an id stands for
//! one function of this process: functions capture nothing, so their type identifies them ([`register`]).
//! Another process may give the id to another function; a step from the disk cache calls the function that
//! this process has registered. Operations that run outside of compiled code are run here
//! (`import/external.rs`), on every backend.

use std::any::{Any, TypeId};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};

use burn_backend::TensorData;
use burn_flex::FlexTensor;
use burn_ir::{CustomOpIr, OperationIr, TensorIr};
use rustc_hash::{FxHashMap, FxHashSet};

use crate::eager::OperationError;
use crate::record::type_text;

/// The beginning of the ids of these operations; the program's name follows.
const PREFIX: &str = "custom ";

/// The function of an operation: from the operands, in order, to the results.
pub type HostFunction = dyn Fn(&[TensorData]) -> Vec<TensorData> + Send + Sync;

#[derive(Default)]
struct Known {
    ids: FxHashMap<(String, TypeId, Option<&'static str>), String>,
    functions: FxHashMap<String, Arc<HostFunction>>,
    c_sources: FxHashMap<String, &'static str>,
    /// Names of the operations whose warning about copies was given.
    said: FxHashSet<String>,
}

static KNOWN: LazyLock<Mutex<Known>> = LazyLock::new(Mutex::default);

fn known() -> MutexGuard<'static, Known> {
    KNOWN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The id of the operation that the program calls `name` and whose function has the type `of`; `make` gives
/// the function if it is new. Equal types are equal functions, and functions of one name have an id each; so have
/// those of one function and different sources in C.
pub fn register(
    name: &str,
    of: TypeId,
    c_source: Option<&'static str>,
    make: impl FnOnce() -> Arc<HostFunction>,
) -> String {
    let mut known = known();
    let key = (name.to_owned(), of, c_source);
    if let Some(id) = known.ids.get(&key) {
        return id.clone();
    }
    let plain = format!("{PREFIX}{name}");
    let numbered = (2..).map(|number| format!("{plain} ({number})"));
    let is_free = |id: &String| !known.functions.contains_key(id);
    let id = std::iter::once(plain.clone())
        .chain(numbered)
        .find(is_free)
        .unwrap_or(plain);
    known.functions.insert(id.clone(), make());
    if let Some(source) = c_source {
        known.c_sources.insert(id.clone(), source);
    }
    known.ids.insert(key, id.clone());
    id
}

/// The id of an operation of the program's own; none if it is another one.
pub(crate) fn id(operation: &OperationIr) -> Option<&str> {
    match operation {
        OperationIr::Custom(op) => Some(&*op.id).filter(|id| id.starts_with(PREFIX)),
        _ => None,
    }
}

/// Warns once for each of these operations that a step on a GPU copies its operands to the host, and its
/// results back.
pub(crate) fn say_that_copies(names: impl Iterator<Item = String>) {
    for name in names.filter(|name| name.starts_with(PREFIX)) {
        if known().said.insert(name.clone()) {
            kiln_log::warn!(
                target: "kiln",
                "the operation {name} runs on the host: on a GPU each call copies its operands there and its results back"
            );
        }
    }
}

/// The C source of the operation of this id, if the program gave one.
pub(crate) fn c_source(id: &str) -> Option<&'static str> {
    known().c_sources.get(id).copied()
}

/// Runs an operation of the program's own.
///
/// # Errors
///
/// If its function is not known in this process, or gives other results than the operation has.
///
/// # Panics
///
/// If the function does, with its message behind the operation's name.
pub(crate) fn run(op: &CustomOpIr, operands: Vec<FlexTensor>) -> Result<Vec<FlexTensor>, OperationError> {
    let function = known().functions.get(&op.id).cloned();
    let function = function.ok_or_else(|| OperationError::Unsupported {
        operation: op.id.clone(),
        reason: "this process knows no function of that name; `kiln::custom_op` makes it known".into(),
    })?;
    let fails = |reason: String| OperationError::Own {
        operation: op.id.clone(),
        reason,
    };
    let operands: Vec<TensorData> = operands.into_iter().map(FlexTensor::into_data).collect();
    let results = catch_unwind(AssertUnwindSafe(|| function(&operands)));
    let results = results.unwrap_or_else(|payload| resume_unwind(named(payload, &op.id)));
    if results.len() != op.outputs.len() {
        let (found, wanted) = (results.len(), op.outputs.len());
        return Err(fails(format!(
            "returned {found} tensors instead of {wanted} (a gradient has one for each float input, in order)"
        )));
    }
    for (index, (result, ir)) in results.iter().zip(&op.outputs).enumerate() {
        if result.shape != ir.shape || result.dtype != ir.dtype {
            let found = TensorIr {
                shape: result.shape.clone(),
                dtype: result.dtype,
                ..ir.clone()
            };
            let (found, wanted) = (type_text(&found), type_text(ir));
            return Err(fails(format!(
                "returned {found} as result {index} instead of {wanted}"
            )));
        }
    }
    Ok(results.into_iter().map(FlexTensor::from_data).collect())
}

/// The payload of a panic with the name of the operation, if it is a message.
fn named(payload: Box<dyn Any + Send>, id: &str) -> Box<dyn Any + Send> {
    let message = match payload.downcast_ref::<&str>() {
        Some(message) => Some((*message).to_owned()),
        None => payload.downcast_ref::<String>().cloned(),
    };
    match message {
        Some(message) => Box::new(format!(
            "the function of the operation `{id}` panicked: {message}"
        )),
        None => payload,
    }
}
