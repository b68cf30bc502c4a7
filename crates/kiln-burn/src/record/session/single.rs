//! Operations on a GPU outside of regions: each is a compiled step of one operation, made once for each of
//! its shapes.
//!
//! An operation runs on the GPU if one of its operands is there or its tensors are large, otherwise on the
//! host, where the program's small tensors (a batch's labels, a mask, a learning rate) come from. An
//! operation that has no kernel on the GPU runs on the host with copies, and so does one that comes in ever
//! new shapes; a warning is given once for each.

use std::collections::BTreeSet;
use std::sync::{Arc, LazyLock, Mutex};

use burn_ir::{OperationIr, TensorIr, TensorStatus};
use rustc_hash::FxHashMap;

use super::super::breaks::BreakReason;
use super::super::recording::{Identity, Recorded, Recording};
use super::super::step::Step;
use super::tensors::fetch;
use super::{lock, no_value};
use crate::device::Place;
use crate::execute::{Effort, Setting};
use crate::options::{CompileBackend, CompileOptions};
use crate::random::{self, Stream};
use crate::storage::Storage;
use crate::{stream, table};

/// Elements of the largest tensor from which an operation on tensors of the host runs on the GPU. Below
/// that the host is done before a copy and a kernel would be.
const LARGE: usize = 1 << 15;

/// Shapes of one operation that are compiled. A program that goes on has lengths that grow, and would wait
/// for a compiler at each of them.
const SHAPES: usize = 64;

/// The steps of one operation each that were compiled. None: the host runs it.
#[derive(Default)]
struct Singles {
    steps: FxHashMap<(u8, Identity), Option<Arc<Step>>>,
    shapes: FxHashMap<String, usize>,
    said: BTreeSet<String>,
}

static SINGLES: LazyLock<Mutex<Singles>> = LazyLock::new(Mutex::default);

/// Runs `operation` on the GPU that its tensors live on. Returns whether it did: false leaves it to the
/// host.
///
/// # Panics
///
/// If an operand has no value, an index is out of range, or the GPU fails: Burn's operations return no
/// errors.
pub(super) fn run(operation: &OperationIr) -> bool {
    let Some(place) = place(operation).filter(|place| place.gpu().is_some()) else {
        return false;
    };
    let operands = operands(operation);
    if !is_for_gpu(operation, &operands) {
        return false;
    }
    let mut recording = Recording::new(table::id_watermark());
    for (ir, tensor) in operands {
        if !recording.knows(ir.id) {
            recording.add_input(&ir, tensor);
        }
    }
    // The stream is taken only when it is certain that the GPU draws, because an operation that the host
    // runs takes its own.
    recording.push(operation.clone(), || Stream { seed: 0, stream: 0 });
    let consumed = recording.take_consumed();
    let mut recorded = recording.finish();
    let Some(step) = find_or_compile(place, operation, &recorded) else {
        return false;
    };
    recorded.streams.fill_with(random::take);
    consumed.into_iter().for_each(|id| drop(table::remove(id)));
    let inputs = std::mem::take(&mut recorded.inputs);
    let mut inputs: Vec<Storage> = inputs.into_iter().map(|input| input.tensor).collect();
    match step.run(&mut inputs, &recorded.scalars, &recorded.streams) {
        Ok(tensors) => recorded
            .output_ids
            .into_iter()
            .zip(tensors)
            .for_each(|(id, tensor)| table::insert(id, tensor)),
        Err(error) => panic!("{}: {error}", stream::name(operation)),
    }
    true
}

/// Where the tensors of an operation live.
fn place(operation: &OperationIr) -> Option<Place> {
    let first = operation.inputs().chain(operation.outputs()).next()?;
    Some(table::place(first.id))
}

/// The operands and their elements, which stay in the table.
fn operands(operation: &OperationIr) -> Vec<(TensorIr, Storage)> {
    let operand = |ir: &TensorIr| {
        let shared = TensorIr {
            status: TensorStatus::ReadOnly,
            ..ir.clone()
        };
        match fetch(&shared, BreakReason::OutsideOperation) {
            Ok(tensor) => (ir.clone(), tensor),
            Err(error) => no_value(&stream::name(operation), &error.to_string()),
        }
    };
    operation.inputs().map(operand).collect()
}

fn is_for_gpu(operation: &OperationIr, operands: &[(TensorIr, Storage)]) -> bool {
    let elements = |ir: &TensorIr| ir.shape.num_elements();
    let on_gpu = operands
        .iter()
        .any(|(_, tensor)| matches!(tensor, Storage::Gpu(_)));
    on_gpu || operation.inputs().chain(operation.outputs()).map(elements).max() >= Some(LARGE)
}

fn find_or_compile(place: Place, operation: &OperationIr, recorded: &Recorded) -> Option<Arc<Step>> {
    let key = (place.index(), recorded.identity.clone());
    let mut singles = lock(&SINGLES);
    if let Some(known) = singles.steps.get(&key) {
        return known.clone();
    }
    let name = stream::name(operation);
    let shapes = singles.shapes.entry(name.clone()).or_default();
    *shapes += 1;
    if *shapes > SHAPES {
        let reason = format!("it came in more than {SHAPES} shapes, and each is compiled");
        singles.say(&name, place, &reason);
        return None;
    }
    // Without the lock: other threads' operations go on. Two threads may compile the same one; the first to
    // end is kept.
    drop(singles);
    let options = CompileOptions::default()
        .with_backend(CompileBackend::Cuda)
        .with_name(name.clone());
    let setting = Setting {
        effort: Effort::Quick,
        ..Setting::default()
    };
    let compiled = Step::compile(
        &options,
        CompileBackend::Cuda,
        setting,
        recorded,
        Default::default(),
    );
    let mut singles = lock(&SINGLES);
    let step = match compiled {
        Ok(step) if step.backend == CompileBackend::Cuda => Some(Arc::new(step)),
        Ok(_) => {
            singles.say(&name, place, "it has no kernel there");
            None
        }
        Err(error) => {
            singles.say(&name, place, &error.to_string());
            None
        }
    };
    singles.steps.entry(key).or_insert(step).clone()
}

impl Singles {
    /// Warns once that an operation runs on the host.
    fn say(&mut self, name: &str, place: Place, reason: &str) {
        if self.said.insert(name.to_owned()) {
            kiln_log::warn!(
                target: "kiln",
                "{name}, outside a compiled step, runs on the host with copies to and from {place}, which is slower: {reason}"
            );
        }
    }
}
