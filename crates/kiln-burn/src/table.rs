//! The table of tensors that exist: id to burn-flex tensor, one for the process.
//!
//! A tensor is here once it is materialised. While it is pending in a recording it is not; [`crate::record`] knows it. If what was to
//! produce it failed, the reason is here, and every use reports it.

use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};

use burn_flex::FlexTensor;
use burn_ir::TensorId;
use rustc_hash::FxHashMap;
use std::sync::atomic::{AtomicU64, Ordering};

/// What is known of a tensor that is not pending.
#[derive(Clone)]
pub enum Slot {
    /// Its elements.
    Ready(FlexTensor),
    /// Why there are none.
    Failed(Arc<str>),
}

static TENSORS: LazyLock<Mutex<FxHashMap<TensorId, Slot>>> = LazyLock::new(Mutex::default);
static NEXT_ID: AtomicU64 = AtomicU64::new(1);

fn tensors() -> MutexGuard<'static, FxHashMap<TensorId, Slot>> {
    // Every critical section is one map operation: a panic elsewhere cannot leave it half done.
    TENSORS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// An id no tensor has had.
pub fn new_id() -> TensorId {
    TensorId::new(NEXT_ID.fetch_add(1, Ordering::Relaxed))
}

/// The id [`new_id`] gives next, or a later one.
pub fn id_watermark() -> u64 {
    NEXT_ID.load(Ordering::Relaxed)
}

/// Enters a tensor.
pub fn insert(id: TensorId, tensor: FlexTensor) {
    let previous = tensors().insert(id, Slot::Ready(tensor));
    // A large buffer is freed here, after the lock is gone.
    drop(previous);
}

/// Enters the reason why there is no tensor.
pub fn fail(id: TensorId, reason: Arc<str>) {
    let previous = tensors().insert(id, Slot::Failed(reason));
    drop(previous);
}

/// The tensor, shared with the table.
pub fn get(id: TensorId) -> Option<Slot> {
    tensors().get(&id).cloned()
}

/// The tensor, no longer in the table.
pub fn remove(id: TensorId) -> Option<Slot> {
    tensors().remove(&id)
}

/// Number of tensors, for leak tests.
pub fn len() -> usize {
    tensors().len()
}
